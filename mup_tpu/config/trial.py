"""A trial: one training run, and the id that its configuration is hashed to.

A `Trial` decides its result. Device, threads and logging are in `RunOptions`: they make no other trial, and
no other row of the store.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass, field
from typing import Any

from mup_tpu.config.parts import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from mup_tpu.config.values import about, unknown_key, unread_under
from mup_tpu.errors import ConfigError
from mup_tpu.files import short_hash
from mup_tpu.rules.parametrization import Growth, require_rule


@dataclass(frozen=True)
class Trial:
    """One training run, wholly determined by this configuration and the data's fingerprint."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        steps, batch, length = self.train.steps, self.data.batch_size, self.data.sequence_length
        if steps * batch * length >= 2**63:
            raise ConfigError(
                f"steps {steps} of batch_size {batch} and sequence_length {length} are more than 2^63 tokens"
            )
        require_rule(self.model.parametrization, self.optimizer.optimizer)
        # Without a base these rules would change nothing, silently.
        for rule, bases in (
            ("batch_rule", ("base_batch_size",)), ("token_rule", ("base_steps", "base_batch_size")),
        ):  # fmt: skip
            for base in bases:
                if getattr(self.optimizer, rule) != "none" and not getattr(self.train, base):
                    raise ConfigError(
                        f"{rule} {getattr(self.optimizer, rule)!r} needs {base}, which is 0: "
                        "give the value of the run whose hyperparameters these are"
                    )

    def replace(self, **changes: Any) -> Trial:
        """Return this trial with fields of its parts changed.

        Fields that a new architecture, optimizer or schedule does not read return to their defaults, unless
        they are given too.

        Examples:
            >>> trial = Trial().replace(width=256, learning_rate=2**-7)
            >>> trial.model.width, trial.optimizer.learning_rate
            (256, 0.0078125)

        Raises:
            ConfigError: a name belongs to no part, or the values do not fit.
        """
        parts: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            if name not in part_of_field():
                raise ConfigError(unknown_key(name, part_of_field()))
            parts.setdefault(part_of_field()[name], {})[name] = value
        return dataclasses.replace(
            self, **{part: _changed(getattr(self, part), values) for part, values in parts.items()}
        )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)

    def flat(self) -> dict[str, Any]:
        return {name: value for part in self.to_dict().values() for name, value in part.items()}

    def trial_id(self, data_fingerprint: str) -> str:
        """Name of this configuration on these data: 16 hex digits.

        A field that is newer than the first release counts only if it differs from its default, so that
        stored rows keep their names. 0 and 0.0 are one trial.

        Raises:
            ConfigError: the precision is "auto", which is decided when a trial runs.
        """
        if self.train.precision == "auto":
            raise ConfigError("precision 'auto' has no trial_id yet: give 'float32', 'bf16' or 'float64'")
        content: dict[str, Any] = {"data_fingerprint": data_fingerprint}
        for part in dataclasses.fields(self):
            config = getattr(self, part.name)
            content[part.name] = {}
            for f in dataclasses.fields(config):
                name, value = about(f).hashed_as or f.name, getattr(config, f.name)
                if name not in IN_FINGERPRINT and (name in _ALWAYS_IN_ID[part.name] or value != f.default):
                    content[part.name][name] = float(value) if isinstance(f.default, float) else value
        canonical = json.dumps(_floats_as_hex(content), sort_keys=True, separators=(",", ":"))
        return short_hash(canonical)

    @property
    def growth(self) -> Growth:
        """Return the growth from the base along each scale."""
        m, t, batch_size = self.model, self.train, self.data.batch_size
        base = dataclasses.replace(m, width=m.base_width)
        base_batch_size, base_steps = t.base_batch_size or batch_size, t.base_steps or t.steps
        return Growth(
            width=m.width_multiplier,
            head_size=m.actual_head_size / base.actual_head_size,
            depth=m.depth / (m.base_depth or m.depth),
            batch_size=batch_size / base_batch_size,
            tokens=(t.steps * batch_size) / (base_steps * base_batch_size),
        )


# Fields of the first release, by part. Nothing is ever added here.
_ALWAYS_IN_ID = {
    "model": {
        "width", "depth", "head_size", "growing", "tied", "parametrization", "base_width", "init_std",
        "alpha_in", "alpha_out", "alpha_attn", "readout_zero_init",
    },
    "data": {"sequence_length", "batch_size", "data_seed"},
    "optimizer": {
        "optimizer", "learning_rate", "weight_decay", "decay_mode", "beta1", "beta2", "eps", "momentum",
        "grad_clip",
    },
    "train": {
        "steps", "warmup", "schedule", "final_lr_fraction", "seed", "loss_kind", "eval_batches", "precision",
    },
}  # fmt: skip

# Fields that decide the tokens. The data's fingerprint stands for them, so that the same text in another
# folder gives the same trial_id.
IN_FINGERPRINT = (
    "corpus", "text_column", "max_documents", "tokenizer", "vocab_size", "validation_fraction",
)  # fmt: skip

# Parts of a trial by name
PARTS = {"model": ModelConfig, "data": DataConfig, "optimizer": OptimizerConfig, "train": TrainConfig}


def _changed(part: Any, changes: dict[str, Any]) -> Any:
    """Return a part with fields changed; those that a new choice does not read get their defaults."""
    values = {**vars(part), **changes}
    unread = {
        f.name: f.default
        for f in dataclasses.fields(part)
        if about(f).only.keys() & changes.keys() and f.name not in changes and unread_under(f, values)
    }
    return dataclasses.replace(part, **unread, **changes)


@functools.cache
def part_of_field() -> dict[str, str]:
    return {f.name: part for part, cls in PARTS.items() for f in dataclasses.fields(cls)}


def field_column(name: str) -> str:
    fields = {f.name: f for f in dataclasses.fields(PARTS[part_of_field()[name]])}
    return about(fields[name]).column or name


def _floats_as_hex(value: Any) -> Any:
    """Write floats exactly, so that a hash does not depend on how Python prints them."""
    if isinstance(value, dict):
        return {k: _floats_as_hex(v) for k, v in value.items()}
    return value.hex() if isinstance(value, float) else value
