"""Private parts of Ray, as they are in Ray 2.50 to 2.60.

`ray.init` has no option for three things:

- To listen on this machine only. Ray does so on macOS and Windows, where it expects no other node
  (`ENABLE_RAY_CLUSTER`). Its option for a node's address does not do: it turns 127.0.0.1 into the address
  that other machines reach.
- To start neither the autoscaler's process nor the log monitor's (`RayParams`): one machine needs no
  autoscaler, and nobody reads the workers' output.
- To name an actor by its id before it has answered (`_actor_id`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from ray._private import parameter, ray_constants


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


def actor_id(actor: Any) -> str:
    """Id of an actor, as the actor itself finds it in its runtime context."""
    return str(actor._actor_id.hex())
