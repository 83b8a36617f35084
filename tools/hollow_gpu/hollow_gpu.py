"""Build the hollow GPU's libraries, and run commands with them (README.md)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Names by which the driver's libraries are looked for."""


def build(folder: Path) -> None:
    """Compile the libraries into a folder. Triton brings headers of CUDA 12, torch for CUDA 13 its own."""
    import triton

    packages = Path(triton.__file__).parents[1]
    headers = (packages / "nvidia/cu13/include", packages / "triton/backends/nvidia/include")
    for name in LIBRARIES:
        words = (
            "cc",
            "-shared",
            "-fPIC",
            "-O1",
            "-D__CUDA_API_VERSION_INTERNAL",
            *(f"-I{x}" for x in headers),
            SOURCE,
        )
        subprocess.run([*words, f"-Wl,-soname,{name}", "-o", folder / name], check=True)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # as linkers look for it


def environment(
    folder: Path, gpus: int = 1, mib: int = 81920, major: int = 9, visible: str | None = None
) -> dict[str, str]:
    """Return the environment of a process that sees such GPUs, after `build`.

    Args:
        folder: the libraries'; what is compiled for GPUs is kept there too.
        gpus: number of GPUs.
        mib: memory of each.
        major: compute capability.
        visible: CUDA_VISIBLE_DEVICES; None leaves it unset.
    """
    given = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    given |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return given | {
        "LD_PRELOAD": str(folder / "libcuda.so.1"),
        "LD_LIBRARY_PATH": _path(str(folder), "LD_LIBRARY_PATH"),
        "HOLLOW_GPUS": str(gpus),
        "HOLLOW_GPU_MIB": str(mib),
        "HOLLOW_GPU_MAJOR": str(major),
        "PYTHONPATH": _path(str(Path(__file__).parent), "PYTHONPATH"),  # filled_gpu
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def _path(first: str, name: str) -> str:
    return os.pathsep.join(filter(None, (first, os.environ.get(name))))


def main() -> None:
    """Run a command with hollow GPUs: python tools/hollow_gpu/hollow_gpu.py FOLDER COMMAND ..."""
    folder = Path(sys.argv[1]).resolve()
    if not (folder / "libcuda.so").exists():
        folder.mkdir(parents=True, exist_ok=True)
        build(folder)
    told = {name: int(os.environ[name]) for name in ("gpus", "mib", "major") if name in os.environ}
    given = environment(folder, visible=os.environ.get("CUDA_VISIBLE_DEVICES"), **told)
    sys.exit(subprocess.run(sys.argv[2:], env=given, check=False).returncode)


if __name__ == "__main__":
    main()
