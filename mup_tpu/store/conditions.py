"""Conditions on rows: a column equals a value, or is at least or at most a number."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mup_tpu.config import on_one_line, parse_number
from mup_tpu.config.columns import label
from mup_tpu.errors import ConfigError, TableError


@dataclass(frozen=True)
class Condition:
    """A condition on rows: a column equals a value, or is at least or at most a number."""

    column: str
    relation: str
    """"=", ">=" or "<="."""
    value: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """A condition from COLUMN=VALUE, COLUMN>=VALUE or COLUMN<=VALUE."""
        found = re.fullmatch(r"\s*([^=<>]+?)\s*(>=|<=|=)\s*(.*?)\s*", text, re.DOTALL)
        if found is None:
            raise TableError(
                f"where {on_one_line(text)!r} is not COLUMN=VALUE; write for example steps_planned=500, or "
                "width>=64"
            )
        condition = cls(*found.groups())
        if condition.relation != "=":
            condition.bound()
        return condition

    def bound(self) -> float:
        """The value as a number."""
        try:
            return parse_number(self.value)
        except (ValueError, ConfigError):
            raise TableError(
                f"where {on_one_line(str(self))!r}: {on_one_line(self.value)!r} is not a number"
            ) from None

    def __str__(self) -> str:
        return f"{self.column}{self.relation}{self.value}"

    @property
    def words(self) -> str:
        """Text for people: "width from 64 on"."""
        name = label(self.column)
        return {
            "=": f"{name} {self.value}",
            ">=": f"{name} from {self.value} on",
            "<=": f"{name} up to {self.value}",
        }[self.relation]
