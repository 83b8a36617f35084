"""Target of a transfer: the scale, and which rules are trained there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from mup_tpu.config import require_above_zero
from mup_tpu.config.fields import require_one_of
from mup_tpu.config.paths import Names
from mup_tpu.config.toml import parse_value
from mup_tpu.errors import ConfigError
from mup_tpu.rules.parametrization import PARAMETRIZATIONS


@dataclass(frozen=True)
class Target:
    """Scale of a transfer, and its trials there."""

    at: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Fields at the target, FIELD=VALUE: --at width=1024, or --at width=512 depth=8. Steps and batch size may
    be given too where the sweep has another scale."""
    top: int = 1
    """Number of best trials to transfer; above 1, a sweep gives each rule's own, without a prediction."""
    num_seeds: int = 1
    """Seeds of each trial."""
    compare: Names | None = None
    """Parametrizations at the target. By default the only one of a sweep, else mup, and for a search mup,sp.
    A sweep gives each its own predicted optimum, a search the same hyperparameters."""

    def __post_init__(self) -> None:
        require_above_zero("top", self.top)
        require_above_zero("num_seeds", self.num_seeds)
        for name in self.compare or ():
            require_one_of("compare", name, tuple(PARAMETRIZATIONS))

    def split(self, scale: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields that grow, and other changes: steps and batch size if `scale` lacks them.

        Raises:
            ConfigError: a value is not FIELD=VALUE, a field is given twice, or there is none.
        """
        fields: dict[str, Any] = {}
        for text in (part for given in self.at for part in given.split(",")):
            name, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"at {text!r} is not FIELD=VALUE; write for example depth=8")
            if name in fields:
                raise ConfigError(
                    f"at {text!r} and another value of {name} were both given: give one of them"
                )
            fields[name] = parse_value(name, value, "at")
        if not fields:
            raise ConfigError("transfer needs a target: give --at FIELD=VALUE, such as --at width=1024")
        changes = {n: v for n, v in fields.items() if n in ("steps", "batch_size") and n not in scale}
        if len(changes) == len(fields):
            return fields, {}
        return {n: v for n, v in fields.items() if n not in changes}, changes

    def rules(self, default: Sequence[str]) -> tuple[str, ...]:
        """Return the rules to train, each once."""
        return tuple(dict.fromkeys(self.compare or default))
