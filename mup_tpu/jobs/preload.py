"""Imports of a process that trains packs, and of the server that it is forked from."""

import mup_tpu.training.process  # noqa: F401
from mup_tpu.internals import leave_out_backends
from mup_tpu.internals.processes import importing

leave_out_backends()
with importing():
    from mup_tpu.training.loop import PackRun

__all__ = ["PackRun"]
