"""Address of a Ray cluster: found for "auto" without trusting other users, and asked whether it answers.

Ray itself trusts any user's file and processes for "auto", sends the token of `~/.ray/auth_token` to any
listener there, and tries for minutes without an answer.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from mup_tpu.errors import ConfigError, reason

_CONNECT_S, _ANSWER_S = 5.0, 8.0  # seconds that a host has to accept a connection, and then to answer

# First words of HTTP/2, on which gRPC builds, without a token: a server answers with its settings
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def find(address: str) -> str:
    """Return `RAY_ADDRESS` for "auto", or the note of this user's `ray start`; other addresses unchanged."""
    if address != "auto":
        return address
    note = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")  # noqa: S108 (where Ray notes it)
    if address_found := os.environ.get("RAY_ADDRESS") or own_note(note):
        return address_found
    others = f"; {note} is another user's" if os.path.lexists(note) else ""
    raise ConfigError(
        f"address 'auto' finds no Ray cluster of this user on this machine{others}; give its HOST:PORT, or "
        "start one with `ray start --head`"
    )


def own_note(note: Path) -> str:
    """Read the address in Ray's note of its last cluster; "" if it is no regular file of this user."""
    try:
        with open(os.open(note, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="ascii") as file:
            status = os.fstat(file.fileno())
            is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
            return file.read(256).strip() if is_own else ""
    except (OSError, ValueError):
        return ""


def check_answers(address: str) -> None:
    """Check in seconds that a cluster answers, which speaks Ray's protocol."""
    host, _, port = address.rpartition(":")
    if "://" in address or address == "local":
        return
    if not host or not port.isdigit():
        raise ConfigError(
            f"address {address!r} is not allowed: write auto, HOST:PORT (10.0.0.1:6379) or ray://HOST:PORT"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            connection.settimeout(_ANSWER_S)
            connection.sendall(_GREETING)
            answer = connection.recv(9)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster answers at address {address!r}: {reason(error)}") from None
    if answer[3:4] != b"\x04":  # a frame of settings
        raise ConfigError(
            f"no Ray cluster answers at address {address!r}: the listener there does not speak Ray's protocol"
        )
