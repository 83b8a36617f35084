"""A private part of tyro, as it is in tyro 1.0.

`is_instance` imports typeguard for an optional type and for a tuple of any length, which is a third of what
the help of a command takes. Both are answered here.
"""

from types import UnionType
from typing import Any, get_args, get_origin

from tyro import _resolver

_by_typeguard = _resolver.is_instance


def _is_instance(typ: Any, value: Any) -> bool:
    members = get_args(typ)
    if isinstance(typ, UnionType):
        return any(_is_instance(member, value) for member in members)
    if get_origin(typ) is tuple and members[1:] == (...,):
        return isinstance(value, tuple) and all(_is_instance(members[0], part) for part in value)
    return _by_typeguard(typ, value)


def without_typeguard() -> None:
    _resolver.is_instance = _is_instance
