"""Private part of tyro, as it is in tyro 1.0: the check that a default is of its option's type.

tyro asks typeguard whether None is a `str | None`, or `()` a `tuple[str, ...]`, and its import takes a tenth
of a command.
"""

from typing import Any

from tyro import _resolver, _singleton

_is_instance = _resolver.is_instance


def _is_instance_or_empty(typ: Any, value: Any) -> bool:
    return value in (None, ()) or (not _singleton.is_sentinel(value) and _is_instance(typ, value))


_resolver.is_instance = _is_instance_or_empty
