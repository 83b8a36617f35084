/* An H100 that stores and computes nothing: CUDA's runtime and driver, NVML and cuBLAS, as torch calls them.
 *
 * Memory is the host's, taken only where something is copied. Kernels are counted and not run, so that results are
 * what lay there: zeros, mostly. A stream captures as CUDA documents it: what may wait for the device, or takes
 * memory, is refused in a thread that captures, and breaks its capture.
 *
 * Environment: HOLLOW_GPUS (how many), HOLLOW_GPU_MIB (memory of each), HOLLOW_GPU_MAJOR (compute capability),
 * HOLLOW_GPU_DRIVER (version of CUDA that the driver is for, as 11040). HOLLOW_GPU_FAULT, an error's number, comes
 * after HOLLOW_GPU_FAULT_AFTER kernels of a process, and from all its calls from then on; in one process alone, if
 * HOLLOW_GPU_FAULT_ONCE names a file that is not there yet.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if CUDART_VERSION < 13000
#define cudaGetDeviceProperties cudaGetDeviceProperties_v2
#endif

#define SHOWN __attribute__((visibility("default")))
#define RUNTIME SHOWN cudaError_t
#define DRIVER SHOWN CUresult
#define BLAS SHOWN int
#define OK return cudaSuccess
#define NAME "NVIDIA H100 80GB HBM3"

static int setting(const char *name, int otherwise) {
    const char *given = getenv(name);
    return given ? atoi(given) : otherwise;
}

static size_t capacity(void) { return (size_t)setting("HOLLOW_GPU_MIB", 81920) << 20; }

static _Thread_local cudaError_t last_error;

static cudaError_t fail(cudaError_t error) { return last_error = error; }

RUNTIME cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

RUNTIME cudaPeekAtLastError(void) { return last_error; }

/* Captures. A stream takes part from the call that begins its capture, or from its wait for an event of it. */

typedef struct { int kernels; } Graph;
typedef struct { int is_active, is_broken; unsigned long long id; Graph *graph; } Capture;
typedef struct { Capture *capture; } Stream, Event;

static Stream default_stream;
static size_t launched;
static Capture *global_one; /* the last that forbids unsafe calls to every thread */
static _Thread_local Capture *begun_here;
static _Thread_local enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

static Stream *stream_of(void *handle) { return (size_t)handle < 3 ? &default_stream : (Stream *)handle; }

static Capture *active(Capture *capture) { return capture && capture->is_active ? capture : NULL; }

static Capture *capturing(void *handle) { return active(stream_of(handle)->capture); }

static cudaError_t broken(Capture *capture, cudaError_t error) {
    capture->is_broken = 1;
    return fail(error);
}

/* The error of a GPU that has failed. */
static cudaError_t fault(void) {
    static int is_dead;
    const char *once = getenv("HOLLOW_GPU_FAULT_ONCE");
    int error = setting("HOLLOW_GPU_FAULT", 0);
    if (!error || launched < setting("HOLLOW_GPU_FAULT_AFTER", 1000)) OK;
    if (!is_dead) is_dead = !once || open(once, O_CREAT | O_EXCL, 0600) >= 0 ? 1 : -1;
    return is_dead > 0 ? fail(error) : cudaSuccess;
}

/* Refusal of a call that a failed GPU, a capture of this thread, or a global one does not allow. */
static cudaError_t unsafe(void) {
    if (fault()) return fault();
    Capture *capture = active(begun_here);
    if (!capture && mode == cudaStreamCaptureModeGlobal) capture = active(global_one);
    if (!capture || mode == cudaStreamCaptureModeRelaxed) OK;
    return broken(capture, cudaErrorStreamCaptureUnsupported);
}

static cudaError_t launch(void *handle) {
    Capture *capture = capturing(handle);
    if (capture) capture->graph->kernels++;
    else launched++;
    return fault();
}

/* Kernels launched so far, those of replayed graphs among them. */
SHOWN size_t hollow_gpu_kernels(void) { return launched; }

RUNTIME cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *given) {
    enum cudaStreamCaptureMode was = mode;
    mode = *given;
    *given = was;
    OK;
}

RUNTIME cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode given) {
    static unsigned long long id;
    if (stream_of(stream) == &default_stream) return fail(cudaErrorStreamCaptureUnsupported);
    if (capturing(stream)) return fail(cudaErrorIllegalState);
    begun_here = stream_of(stream)->capture = malloc(sizeof(Capture));
    *begun_here = (Capture){1, 0, ++id, calloc(1, sizeof(Graph))};
    if (given == cudaStreamCaptureModeGlobal) global_one = begun_here;
    OK;
}

RUNTIME cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    Capture *capture = capturing(stream);
    if (!capture) return fail(cudaErrorIllegalState);
    if (capture != begun_here) return fail(cudaErrorStreamCaptureWrongThread);
    capture->is_active = 0;
    *graph = capture->is_broken ? NULL : (cudaGraph_t)capture->graph;
    return capture->is_broken ? fail(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}

RUNTIME cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    Capture *capture = capturing(stream);
    *status = !capture              ? cudaStreamCaptureStatusNone
              : capture->is_broken ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    OK;
}

#if CUDART_VERSION < 13000
RUNTIME cudaStreamGetCaptureInfo_v2(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, size_t *count
) {
#else
RUNTIME cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count
) {
    if (edges) *edges = NULL;
#endif
    Capture *capture = capturing(stream);
    cudaStreamIsCapturing(stream, status);
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = capture ? (cudaGraph_t)capture->graph : NULL;
    if (nodes) *nodes = NULL;
    if (count) *count = 0;
    OK;
}

RUNTIME cudaGraphInstantiate(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long flags) {
    *ready = (cudaGraphExec_t)graph;
    OK;
}

RUNTIME cudaGraphInstantiateWithFlags(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(ready, graph, flags);
}

RUNTIME cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    *count = ((Graph *)graph)->kernels;
    OK;
}

RUNTIME cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t stream) {
    launched += ((Graph *)ready)->kernels;
    return fault();
}

RUNTIME cudaGraphDestroy(cudaGraph_t graph) { OK; }
RUNTIME cudaGraphExecDestroy(cudaGraphExec_t ready) { OK; }

/* Streams and events. */

RUNTIME cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority) {
    *stream = (cudaStream_t)calloc(1, sizeof(Stream));
    OK;
}

RUNTIME cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
RUNTIME cudaStreamDestroy(cudaStream_t stream) { OK; }
RUNTIME cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; OK; }

RUNTIME cudaStreamSynchronize(cudaStream_t stream) {
    Capture *capture = capturing(stream);
    return capture ? broken(capture, cudaErrorStreamCaptureUnsupported) : unsafe();
}

RUNTIME cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
RUNTIME cudaDeviceSynchronize(void) { return unsafe(); }

RUNTIME cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    *event = (cudaEvent_t)calloc(1, sizeof(Event));
    OK;
}

RUNTIME cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
RUNTIME cudaEventDestroy(cudaEvent_t event) { free(event); OK; }

RUNTIME cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
    ((Event *)event)->capture = capturing(stream);
    OK;
}

RUNTIME cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

RUNTIME cudaEventQuery(cudaEvent_t event) {
    Capture *capture = active(((Event *)event)->capture);
    return capture ? broken(capture, cudaErrorCapturedEvent) : unsafe();
}

RUNTIME cudaEventSynchronize(cudaEvent_t event) { return cudaEventQuery(event); }
RUNTIME cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) { *ms = 1; OK; }

RUNTIME cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    Capture *joined = active(((Event *)event)->capture), *own = capturing(stream);
    if (joined) stream_of(stream)->capture = joined;
    else if (own) return broken(own, cudaErrorStreamCaptureIsolation);
    OK;
}

/* Memory. */

typedef struct Block { char *start; size_t size; int device; struct Block *next; } Block;

enum { ON_HOST = -1, MOST_GPUS = 16 };

static Block *blocks;
static size_t held[MOST_GPUS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int current;

static void *reserved(size_t size, int device) {
    char *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    Block *block = malloc(sizeof *block);
    if (start == MAP_FAILED) return NULL;
    pthread_mutex_lock(&lock);
    *block = (Block){start, size, device, blocks};
    blocks = block;
    if (device != ON_HOST) held[device] += size;
    pthread_mutex_unlock(&lock);
    return start;
}

static cudaError_t released(const void *start) {
    cudaError_t error = unsafe();
    pthread_mutex_lock(&lock);
    for (Block **at = &blocks; !error && *at; at = &(*at)->next) {
        Block *block = *at;
        if (block->start != start) continue;
        *at = block->next;
        if (block->device != ON_HOST) held[block->device] -= block->size;
        munmap(block->start, block->size);
        free(block);
        break;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static Block *block_of(const void *given) {
    const char *address = given;
    pthread_mutex_lock(&lock);
    Block *block = blocks;
    while (block && (address < block->start || address >= block->start + block->size)) block = block->next;
    pthread_mutex_unlock(&lock);
    return block;
}

RUNTIME cudaMalloc(void **start, size_t size) {
    cudaError_t error = unsafe();
    if (error) return error;
    if (held[current] + size > capacity() || !(*start = reserved(size, current))) return fail(cudaErrorMemoryAllocation);
    OK;
}

RUNTIME cudaHostAlloc(void **start, size_t size, unsigned int flags) {
    cudaError_t error = unsafe();
    if (!error && !(*start = reserved(size, ON_HOST))) return fail(cudaErrorMemoryAllocation);
    return error;
}

RUNTIME cudaFree(void *start) { return released(start); }
RUNTIME cudaFreeHost(void *start) { return released(start); }

RUNTIME cudaMemGetInfo(size_t *unused, size_t *all) {
    *all = capacity();
    *unused = *all - held[current];
    OK;
}

RUNTIME cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
    Block *block = block_of(address);
    memset(found, 0, sizeof *found);
    found->type = !block                      ? cudaMemoryTypeUnregistered
                  : block->device == ON_HOST ? cudaMemoryTypeHost
                                              : cudaMemoryTypeDevice;
    found->device = block && block->device != ON_HOST ? block->device : 0;
    found->devicePointer = found->hostPointer = (void *)address;
    OK;
}

RUNTIME cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    cudaError_t error = unsafe();
    if (!error) memmove(to, from, size);
    return error;
}

RUNTIME cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (kind != cudaMemcpyDeviceToDevice && !capturing(stream)) memmove(to, from, size);
    return launch(stream);
}

RUNTIME cudaMemset(void *start, int value, size_t size) { return unsafe(); }

RUNTIME cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t stream) {
    return launch(stream);
}

/* Devices. */

static int gpus(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    int there = setting("HOLLOW_GPUS", 1), named = 1;
    if (!visible) return there;
    if (!*visible || *visible == '-') return 0;
    while (*visible) named += *visible++ == ',';
    return named < there ? named : there;
}

static int driver(void) { return setting("HOLLOW_GPU_DRIVER", CUDART_VERSION); }

RUNTIME cudaGetDeviceCount(int *count) {
    *count = driver() < 12000 ? 0 : gpus();
    return *count ? cudaSuccess : fail(driver() < 12000 ? cudaErrorInsufficientDriver : cudaErrorNoDevice);
}
RUNTIME cudaGetDevice(int *device) { *device = current; OK; }

RUNTIME cudaSetDevice(int device) {
    if (device < 0 || device >= gpus()) return fail(cudaErrorInvalidDevice);
    current = device;
    OK;
}

RUNTIME cudaDriverGetVersion(int *version) { *version = driver(); OK; }
RUNTIME cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; OK; }
RUNTIME cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; OK; }
RUNTIME cudaDeviceCanAccessPeer(int *can, int device, int other) { *can = 0; OK; }

RUNTIME cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    *found = (struct cudaDeviceProp){
        .name = NAME,
        .major = setting("HOLLOW_GPU_MAJOR", 9),
        .totalGlobalMem = capacity(),
        .multiProcessorCount = 132,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsPerMultiProcessor = 2048,
        .maxBlocksPerMultiProcessor = 32,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .sharedMemPerBlock = 49152,
        .sharedMemPerBlockOptin = 232448,
        .sharedMemPerMultiprocessor = 233472,
        .l2CacheSize = 50 << 20,
        .memoryBusWidth = 5120,
        .pciBusID = device,
    };
    OK;
}

RUNTIME cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp found;
    cudaGetDeviceProperties(&found, device);
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = found.major; break;
    case cudaDevAttrMultiProcessorCount: *value = found.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = found.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = found.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = found.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlockDimX: *value = found.maxThreadsDim[0]; break;
    case cudaDevAttrMaxGridDimX: *value = found.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = found.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = found.maxGridSize[2]; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = found.regsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = found.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = found.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = found.sharedMemPerMultiprocessor; break;
    case cudaDevAttrClockRate: *value = 1980000; break; /* kHz */
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = found.memoryBusWidth; break;
    default: *value = 0;
    }
    OK;
}

/* NVML counts all GPUs, whichever CUDA shows. */
SHOWN int nvmlInit_v2(void) { return 0; }
SHOWN int nvmlInitWithFlags(unsigned int flags) { return 0; }
SHOWN int nvmlShutdown(void) { return 0; }
SHOWN int nvmlDeviceGetCount_v2(unsigned int *count) { *count = setting("HOLLOW_GPUS", 1); return 0; }

/* Ray asks for these. */
SHOWN int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = NULL; return 0; }
SHOWN int nvmlDeviceGetName(void *device, char *name, unsigned int most) { strncpy(name, NAME, most); return 0; }

/* Of these torch needs the names alone, once it is out of memory. */
SHOWN int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { *device = NULL; return 0; }
SHOWN int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned int *count, void *found) { *count = 0; return 0; }
SHOWN int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned int *count, void *found) { *count = 0; return 0; }
SHOWN int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = CUDART_VERSION; return 0; }
SHOWN int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
SHOWN int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }

/* Kernels. */

RUNTIME cudaLaunchKernel(
    const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream
) {
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535) return fail(cudaErrorInvalidConfiguration);
    if (!block.x || block.x * block.y * block.z > 1024) return fail(cudaErrorInvalidConfiguration);
    return launch(stream);
}

/* By these CUDA 13 launches a kernel that is called as a function. */
RUNTIME __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)function; OK; }

RUNTIME __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream
) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

RUNTIME cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **arguments) {
    return launch(how->stream);
}

RUNTIME cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    int version = 10 * setting("HOLLOW_GPU_MAJOR", 9);
    *found = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = version, .binaryVersion = version,
        .maxDynamicSharedSizeBytes = 232448,
    };
    OK;
}

RUNTIME cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) { OK; }

RUNTIME cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *kernel, int threads, size_t shared, unsigned int flags
) {
    *blocks = 2;
    OK;
}

/* The driver, for Triton's kernels. */

DRIVER cuInit(unsigned int flags) { return gpus() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
DRIVER cuDeviceGet(CUdevice *device, int index) { *device = index; return CUDA_SUCCESS; }
DRIVER cuDeviceGetCount(int *count) { *count = gpus(); return CUDA_SUCCESS; }

DRIVER cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device); /* the same numbers */
    return CUDA_SUCCESS;
}

static CUresult made(void *handle) {
    *(void **)handle = (void *)1;
    return CUDA_SUCCESS;
}

DRIVER cuCtxGetCurrent(CUcontext *context) { return made(context); }
DRIVER cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
DRIVER cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
DRIVER cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 1 << 20; return CUDA_SUCCESS; }
DRIVER cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return made(context); }

DRIVER cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *is_active) {
    *flags = 0;
    *is_active = 1;
    return CUDA_SUCCESS;
}

DRIVER cuGetErrorString(CUresult error, const char **text) { *text = "a hollow GPU's error"; return CUDA_SUCCESS; }
DRIVER cuModuleLoad(CUmodule *module, const char *path) { return made(module); }
DRIVER cuModuleLoadData(CUmodule *module, const void *image) { return made(module); }
DRIVER cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
DRIVER cuModuleGetFunction(CUfunction *kernel, CUmodule module, const char *name) { return made(kernel); }
DRIVER cuFuncSetAttribute(CUfunction kernel, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
DRIVER cuFuncSetCacheConfig(CUfunction kernel, CUfunc_cache preferred) { return CUDA_SUCCESS; }

DRIVER cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction kernel) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

DRIVER cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction kernel, void **arguments, void **extra) {
    launch(how->hStream);
    return CUDA_SUCCESS;
}

DRIVER cuLaunchKernel(
    CUfunction kernel, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,
    unsigned int block_y, unsigned int block_z, unsigned int shared, CUstream stream, void **arguments, void **extra
) {
    launch(stream);
    return CUDA_SUCCESS;
}

DRIVER cuPointerGetAttribute(void *found, CUpointer_attribute attribute, CUdeviceptr address) {
    if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER || !block_of((void *)address)) return CUDA_ERROR_INVALID_VALUE;
    *(CUdeviceptr *)found = address;
    return CUDA_SUCCESS;
}

static CUresult not_there(void) { return CUDA_ERROR_NOT_SUPPORTED; }

/* torch asks for all of the driver that it may ever need, once it is out of memory. */
RUNTIME cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned int version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result
) {
    void *found = dlsym(RTLD_DEFAULT, name);
    *function = found ? found : (void *)not_there;
    if (result) *result = cudaDriverEntryPointSuccess;
    OK;
}

RUNTIME cudaGetDriverEntryPoint(
    const char *name, void **function, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result
) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}

/* cuBLAS. */

static _Thread_local void *blas_stream;

static int described(void **descriptor) {
    *descriptor = calloc(1, 256);
    return 0;
}

BLAS cublasCreate_v2(void **handle) { return described(handle); }
BLAS cublasDestroy_v2(void *handle) { free(handle); return 0; }
BLAS cublasSetStream_v2(void *handle, void *stream) { blas_stream = stream; return 0; }
BLAS cublasSetWorkspace_v2(void *handle, void *start, size_t size) { return 0; }
BLAS cublasGetMathMode(void *handle, int *found) { *found = 0; return 0; }
BLAS cublasSetMathMode(void *handle, int given) { return 0; }
BLAS cublasGetPointerMode_v2(void *handle, int *found) { *found = 0; return 0; }
BLAS cublasSetPointerMode_v2(void *handle, int given) { return 0; }
BLAS cublasLtMatmulDescCreate(void **made) { return described(made); }
BLAS cublasLtMatrixLayoutCreate(void **made) { return described(made); }
BLAS cublasLtMatmulPreferenceCreate(void **made) { return described(made); }
BLAS cublasLtMatmulDescDestroy(void *made) { free(made); return 0; }
BLAS cublasLtMatrixLayoutDestroy(void *made) { free(made); return 0; }
BLAS cublasLtMatmulPreferenceDestroy(void *made) { free(made); return 0; }
BLAS cublasLtMatmulDescSetAttribute(void) { return 0; }
BLAS cublasLtMatrixLayoutSetAttribute(void) { return 0; }
BLAS cublasLtMatmulPreferenceSetAttribute(void) { return 0; }

BLAS cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int most, void *algorithms,
    int *found
) {
    *found = 1;
    return 0;
}

#define PRODUCT(name) BLAS name(void) { launch(blas_stream); return 0; }
PRODUCT(cublasLtMatmul)
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasDotEx)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
