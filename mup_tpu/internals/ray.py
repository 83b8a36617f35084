"""Private parts of Ray, as they are in Ray 2.50 to 2.60.

`ray.init` has no option for five things:

- To listen on this machine only. Ray does so on macOS and Windows, where it expects no other node
  (`ENABLE_RAY_CLUSTER`). Its option for a node's address does not do: it turns 127.0.0.1 into the address
  that other machines reach.
- To start neither the autoscaler's process nor the log monitor's (`RayParams`): one machine needs no
  autoscaler, and nobody reads the workers' output.
- To have the raylet's two agents end with it. The raylet itself is killed when its driver is; the agents
  then tried for a minute to tell the cluster's store, which is gone too (`process_watcher`).
- To leave the driver's working folder off the path on which workers look for modules, where Ray puts it
  first (`_py_driver_sys_path`).
- To name an actor by its id before it has answered (`_actor_id`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ray._private import parameter, ray_constants, services
from ray.job_config import JobConfig

from mup_tpu.files.local import is_needed


@contextlib.contextmanager
def alone_on_this_machine() -> Iterator[None]:
    """Have a cluster that starts in the block listen on this machine only, with two processes fewer; all its
    processes end when the driver is killed.
    """
    fewer = partial(parameter.RayParams, no_monitor=True, include_log_monitor=False)  # type: ignore[arg-type]
    with (
        patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False),
        patch.object(parameter, "RayParams", fewer),
        patch.object(services, _PYTHON, partial(_python_with_parent, getattr(services, _PYTHON))),
    ):
        yield


_PYTHON = "_build_python_executable_command_memory_profileable"  # Begins commands of Python processes


def _python_with_parent(build: Callable[..., list[str]], *args: Any, **options: Any) -> list[str]:
    # Linux kills the process when its parent ends.
    first = [sys.executable, "-ISu", str(Path(__file__).with_name("with_parent.py"))]
    return [*(first if sys.platform == "linux" else []), *build(*args, **options)]


class _WithoutWorkingFolder(list[str]):
    """Folders that Ray puts on the path of workers, without the driver's working folder."""

    def extend(self, folders: Iterable[str]) -> None:
        super().extend(folder for folder in folders if folder != os.getcwd() or is_needed(folder))


def safe_job() -> JobConfig:
    settings = JobConfig()
    settings._py_driver_sys_path = _WithoutWorkingFolder()
    return settings


def actor_id(actor: Any) -> str:
    return str(actor._actor_id.hex())
