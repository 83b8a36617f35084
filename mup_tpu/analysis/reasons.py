"""Reasons and notes as data: what an analysis has to report, without its sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reason:
    """A reason or a note. `mup_tpu.words.because` makes its sentence.

    The values `at` and `scales` are points of the scale; a sentence writes them in the scale's unit.
    """

    code: str  # Key of its sentence in `mup_tpu.words.reasons`.
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, code: str, **values: Any) -> Reason:
        return cls(code, values)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value}" for name, value in self.values.items())
        return f"{self.code} ({values})" if values else self.code
