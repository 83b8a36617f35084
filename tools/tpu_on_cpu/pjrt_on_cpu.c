// Hands XLA's CPU plugin (PJRT) to torch_tpu: the options that torch_tpu passes are replaced by one device a process.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { size_t struct_size; void* ext; const char* name; size_t name_size; int type; union { const char* s; int64_t i; } value; size_t value_size; } Named;
typedef struct { size_t struct_size; void* ext; const void* create_options; size_t num_options; } CreateArgs;
typedef void* (*Fn)(void*);
typedef struct { size_t struct_size; void* ext; size_t vsize; void* vext; int major, minor; Fn fn[200]; } Api;
static Fn real_create; static Api copy; static Named one;
static void* create(void* a) {
  CreateArgs* args = a;
  one.struct_size = sizeof(Named); one.name = "cpu_device_count"; one.name_size = 16; one.type = 1; one.value.i = 1; one.value_size = 1;
  args->create_options = &one; args->num_options = 1;
  return real_create(a);
}
const void* GetPjrtApi(void) {
  static int done;
  if (done) return &copy;
  void* h = dlopen(getenv("PJRT_PLUGIN_ON_CPU"), RTLD_NOW | RTLD_LOCAL);
  if (!h) { fprintf(stderr, "%s\n", dlerror()); abort(); }
  const Api* (*get)(void) = (const Api* (*)(void))dlsym(h, "GetPjrtApi");
  const Api* api = get();
  memcpy(&copy, api, api->struct_size); real_create = copy.fn[10]; copy.fn[10] = create; done = 1;
  return &copy;
}
