"""Target of a transfer: the scale, and which rules are trained there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mup_tpu.config import require_above_zero
from mup_tpu.config.fields import require_one_of
from mup_tpu.config.toml import parse_value
from mup_tpu.errors import ConfigError
from mup_tpu.rules.parametrization import PARAMETRIZATIONS


@dataclass(frozen=True)
class Target:
    """Scale of a transfer, and its trials there."""

    width: int | None = None
    """Width of the target; short for --to width=WIDTH."""
    to: tuple[str, ...] = ()
    """Fields that grow, with their values at the target: --to depth=8, or --to width=512 depth=8."""
    top: int = 1
    """Number of best trials to transfer; above 1, a sweep gives each rule's own, without a prediction."""
    num_seeds: int = 1
    """Seeds of each trial."""
    steps: int | None = None
    """Steps at the target in place of the search's."""
    batch_size: int | None = None
    """Batch size at the target in place of the search's."""
    parametrizations: tuple[str, ...] | None = None
    """Rules at the target. By default the only rule of a sweep, else mup, and for a search sp too, with the
    same hyperparameters."""
    compare: tuple[str, ...] = ()
    """Further rules to train: from a sweep at their own predicted optimum, from a search with the same
    hyperparameters."""

    def __post_init__(self) -> None:
        require_above_zero("top", self.top)
        require_above_zero("num_seeds", self.num_seeds)
        for option in ("parametrizations", "compare"):
            for name in getattr(self, option) or ():
                require_one_of(option, name, tuple(PARAMETRIZATIONS))
        if self.parametrizations == ():
            raise ConfigError("parametrizations is empty: give at least one")

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Fields that grow, with their values."""
        found: dict[str, Any] = {} if self.width is None else {"width": self.width}
        for text in self.to:
            name, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"to {text!r} is not FIELD=VALUE; write for example depth=8")
            if name in found or self.changes.get(name) is not None:
                raise ConfigError(
                    f"to {text!r} and another value of {name} were both given: give one of them"
                )
            found[name] = parse_value(name, value, "to")
        if not found:
            raise ConfigError(
                "transfer needs a target: give --width, or --to FIELD=VALUE such as --to depth=8"
            )
        return found

    @property
    def changes(self) -> dict[str, Any]:
        """Other fields to change."""
        return {"steps": self.steps, "batch_size": self.batch_size}

    def rules(self, usual: Sequence[str]) -> tuple[str, ...]:
        """Rules to train, each once, where `usual` are the default."""
        return tuple(dict.fromkeys((*(self.parametrizations or usual), *self.compare)))
