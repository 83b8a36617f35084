"""Private parts of Ray, as they are in Ray 2.50 to 2.60.

`ray.init` has no option for four things:

- To listen on this machine only. Ray does so on macOS and Windows, where it expects no other node
  (`ENABLE_RAY_CLUSTER`). Its option for a node's address does not do: it turns 127.0.0.1 into the address
  that other machines reach.
- To start neither the autoscaler's process nor the log monitor's (`RayParams`): one machine needs no
  autoscaler, and nobody reads the workers' output.
- To leave the driver's working folder off the path on which workers look for modules, where Ray puts it
  first (`_py_driver_sys_path`).
- To name an actor by its id before it has answered (`_actor_id`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from ray._private import parameter, ray_constants
from ray.job_config import JobConfig

from mup_tpu.files.safe_path import is_needed


@contextlib.contextmanager
def alone_on_this_machine() -> Iterator[None]:
    """Have a cluster that starts in the block listen on this machine only, with two processes fewer."""
    can_have_more_nodes, parameters = ray_constants.ENABLE_RAY_CLUSTER, parameter.RayParams
    ray_constants.ENABLE_RAY_CLUSTER = False
    fewer: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False}
    parameter.RayParams = partial(parameters, **fewer)  # type: ignore
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = can_have_more_nodes
        parameter.RayParams = parameters  # type: ignore


class _WithoutWorkingFolder(list[str]):
    """Folders that Ray puts on the path of workers, without the driver's working folder."""

    def extend(self, folders: Iterable[str]) -> None:
        """Add folders: that of the driver's script, and the working folder last."""
        super().extend(folder for folder in folders if folder != os.getcwd() or is_needed(folder))


def safe_job() -> JobConfig:
    """Settings of a driver whose workers look for no module in its working folder."""
    settings = JobConfig()
    settings._py_driver_sys_path = _WithoutWorkingFolder()
    return settings


def actor_id(actor: Any) -> str:
    """Id of an actor, as the actor itself finds it in its runtime context."""
    return str(actor._actor_id.hex())
