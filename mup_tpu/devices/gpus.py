"""Whether torch sees a GPU that it can use, and why not."""

from __future__ import annotations

import functools
import os
import warnings

import torch


@functools.cache
def why_no_gpu() -> str | None:
    """Reason why torch sees no GPU, "" if it is not known; None if torch sees one.

    Torch gives its reason once, as a warning: "CUDA initialization: The NVIDIA driver is too old. Update ..."
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return _too_old()
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is for CPUs"
    for said in (str(warning.message) for warning in caught):
        if said.startswith("CUDA initialization: "):
            return said.removeprefix("CUDA initialization: ").partition(". ")[0].rstrip(".")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden!r}"


def _too_old() -> str | None:
    """Sentence about the first GPU if torch has no kernels for it: torch warns of that, and fails later."""
    capability = torch.cuda.get_device_capability(0)
    known = [int(name.removeprefix("sm_")) for name in torch.cuda.get_arch_list() if name[3:].isdigit()]
    if not known or 10 * capability[0] + capability[1] >= min(known):
        return None
    name, has = torch.cuda.get_device_name(0), ".".join(map(str, capability))
    return f"torch {torch.__version__} needs compute capability {min(known) / 10}, and {name} has {has}"
