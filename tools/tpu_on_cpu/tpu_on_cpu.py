"""A device "tpu" on a machine without TPUs: import this before torch, or run it in place of mup-tpu.

torch_tpu takes its PJRT plugin from TPU_LIBRARY_PATH. XLA's CPU plugin answers the same C API, so that
programs for a TPU run here, with values. `pjrt_on_cpu.c` lies between both:
the plugin refuses torch_tpu's options.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path

HERE = Path(__file__).parent
PLUGIN = "lammps_jax_pjrt_cpu"  # package with XLA's CPU plugin; torch_tpu's compiled graphs need this version


def begin() -> None:
    """Give this process a device "tpu"."""
    spec = importlib.util.find_spec(PLUGIN)
    assert spec is not None and spec.origin is not None, f"pip install '.[tpu-on-cpu]': {PLUGIN} is missing"
    library = Path(tempfile.gettempdir()) / f"pjrt_on_cpu-{os.getuid()}.so"
    made = library.with_suffix(f".{os.getpid()}")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", made, HERE / "pjrt_on_cpu.c", "-ldl"], check=True)
    made.replace(library)
    os.environ |= {
        "PJRT_PLUGIN_ON_CPU": str(Path(spec.origin).with_name("pjrt_c_api_cpu_plugin.so")),
        "TPU_LIBRARY_PATH": str(library),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch_tpu loads by itself only where it sees a TPU
    }
    libtpu = types.ModuleType("libtpu")
    libtpu.configure_library_path = lambda: None  # type: ignore[attr-defined]  # the real one names libtpu
    sys.modules["libtpu"] = libtpu
    from torch_tpu import _loader

    _loader._init_device("tpu")


begin()

if __name__ == "__main__":
    from mup_tpu.cli import main

    main()
