"""Private parts of Ray, as they are in Ray 2.50 to 2.60.

- A process reads `RAY_AUTH_MODE` and the token once, when it imports ray; `Config` and
  `AuthenticationTokenLoader` have it read them again. Ray 2.50 has no tokens.
- `GcsClient` greets a cluster in milliseconds. `ray.init` tries a refused token for minutes, and a driver
  that sends a token to a cluster without tokens is taken in, but loses its actors.
- `_actor_id` names an actor before it has answered.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from ray import _raylet, exceptions

_library: Any = _raylet
_REFUSED: Any = getattr(exceptions, "AuthenticationError", ())


@contextlib.contextmanager
def authenticated(mode: str, token: str = "") -> Iterator[None]:
    """Have Ray authenticate by a mode, "token" or "disabled", in the block; without a token by the user's."""
    changed = {"RAY_AUTH_MODE": mode} | ({"RAY_AUTH_TOKEN": token} if token else {})
    before = {name: os.environ.pop(name, None) for name in changed}
    os.environ.update(changed)
    _read_again()
    try:
        yield
    finally:
        for name in changed:
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if value is not None})
        _read_again()


def _read_again() -> None:
    _library.Config.initialize("")
    if hasattr(_library, "AuthenticationTokenLoader"):
        _library.AuthenticationTokenLoader.instance().reset_cache()


def has_token() -> bool:
    """Return whether the user has a token, in the environment or in a file."""
    loader = getattr(_library, "AuthenticationTokenLoader", None)
    return loader is not None and bool(loader.instance().has_token(ignore_auth_mode=True))


def takes(address: str) -> bool:
    """Return whether a cluster takes the present token, or none.

    Raises:
        RayError: no cluster answers.
    """
    stderr = os.dup(2)
    with open(os.devnull, "wb") as nowhere:  # Ray's library prints a warning
        os.dup2(nowhere.fileno(), 2)
    try:
        _library.GcsClient(address=address)
        return True
    except _REFUSED:
        return False
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def actor_id(actor: Any) -> str:
    return str(actor._actor_id.hex())
