"""What a trial is, and the id that it is hashed to.

A value of a `Trial` decides its result. How it is run (device, threads, logging) is in `RunOptions`, outside
of the trial, because the same trial run otherwise must land on the same row of the store.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from mup_tpu.config.values import (
    LearningRate,
    described,
    not_a_multiple,
    require_of_architecture,
    require_one_of,
    require_positive,
    require_valid,
    unknown_key,
)
from mup_tpu.errors import ConfigError
from mup_tpu.rules.optimizer import BATCH_RULES, DECAY_RULES, TOKEN_RULES, Choice
from mup_tpu.rules.parametrization import PARAMETRIZATIONS, Growth, require_rule

# Far above what is trained: more is a slip, and would be planned for minutes, or not fit columns of 64 bits.
_WIDEST, _DEEPEST, _LARGEST, _LONGEST = 2**20, 10_000, 2**24, 10**9


@dataclass(frozen=True)
class ModelConfig:
    """A model of a given size in a given parametrization."""

    architecture: Literal["gpt2", "llama"] = "gpt2"
    """Network, of mup_tpu.models."""
    width: int = described(128, most=_WIDEST)
    """Embedding size (d_model); a multiple of the head size."""
    depth: int = described(2, unit="layers", most=_DEEPEST)
    """Transformer layers."""
    head_size: int = described(32, most=_WIDEST)
    """Dimensions of one attention head; at the base width if the head size grows with width."""
    growing_dimension: Annotated[Literal["heads", "head_size"], tyro.conf.arg(aliases=["--growing"])] = (
        described("heads", column="growing", former="growing")
    )
    """What grows with width: the number of heads, or the size of each."""
    tied: bool = True
    """Whether the readout is the token embedding, as in GPT-2."""
    parametrization: str = "mup"
    """A rule of mup_tpu.rules.parametrization: "mup", "sp", "completep" and others (docs/rules.md)."""
    base_width: int = described(64, most=_WIDEST)
    """Width at which the parametrizations agree; multipliers are relative to it."""
    base_depth: int = described(0, unit="layers", most=_DEEPEST)
    """Depth at which they agree; 0 is the trial's own, so that depth counts as not grown."""
    init_std: float = described(0.02, label="init σ")
    """Standard deviation of the weights' init at the base width (GPT-2's is 0.02)."""
    alpha_in: float = described(1.0, label="α_in (embeddings)")
    """Multiplier of the summed token and position embeddings."""
    alpha_out: float = described(1.0, label="α_out (logits)")
    """Multiplier of the logits."""
    alpha_attn: float = described(1.0, label="α_attn (attention logits)")
    """Multiplier of the attention logits."""
    readout_zero_init: bool = False
    """Start an untied readout at zero (not possible when tied)."""
    qk_norm: bool = described(False, only=("llama",))
    """Whether queries and keys of each head go through an RMS norm, as in Qwen3."""
    query_group_size: int = described(1, unit="heads", least=1, most=_WIDEST, only=("llama",))
    """Query heads that share a key and a value head (grouped-query attention); 1 shares none. It stays as the
    model grows, so that the key and value heads grow with width as the query heads do."""

    def __post_init__(self) -> None:
        require_valid(self)
        for name in ("width", "depth", "head_size", "base_width"):
            require_positive(self, name)
        for name in ("init_std", "base_depth"):
            require_positive(self, name, allow_zero=True)
        require_one_of("parametrization", self.parametrization, tuple(PARAMETRIZATIONS))
        if self.base_width % self.head_size:
            raise ConfigError(not_a_multiple("base_width", self.base_width, "head_size", self.head_size))
        unit = self.head_size if self.growing_dimension == "heads" else self.base_width // self.head_size
        if self.width % unit:
            name = "head_size" if self.growing_dimension == "heads" else "the number of heads"
            raise ConfigError(not_a_multiple("width", self.width, name, unit))
        require_of_architecture(self)
        if self.architecture == "llama":
            self._require_shape_of_llama()
        if self.tied and self.readout_zero_init:
            raise ConfigError(
                "readout_zero_init true needs tied false: a tied readout is the embedding, and would zero it"
            )

    def _require_shape_of_llama(self) -> None:
        base_heads = self.base_width // self.head_size
        sizes = (
            (self.base_width, base_heads, self.head_size),
            (self.width, self.heads, self.actual_head_size),
        )
        for width, heads, head_size in sizes:
            if head_size % 2:
                raise ConfigError(
                    f"head_size {head_size} at width {width} is not allowed: rotary positions turn pairs of "
                    "dimensions, so it must be even"
                )
            if heads % self.query_group_size:
                below = max(n for n in range(1, self.query_group_size) if heads % n == 0)
                raise ConfigError(
                    f"query_group_size {self.query_group_size} does not divide the {heads} heads at width "
                    f"{width}; nearest below that does: {below}"
                )

    @property
    def heads(self) -> int:
        """Attention heads a layer."""
        return (self.width if self.growing_dimension == "heads" else self.base_width) // self.head_size

    @property
    def actual_head_size(self) -> int:
        """Dimensions of one attention head at this width."""
        return self.width // self.heads

    @property
    def width_multiplier(self) -> float:
        """Width over base width, m."""
        return self.width / self.base_width


@dataclass(frozen=True)
class DataConfig:
    """A corpus, how it becomes tokens, and how tokens become batches."""

    corpus: str = "sotu"
    """Text: "sotu" (embedded: US State of the Union addresses); a file or folder of .txt, .jsonl, .parquet or
    .arrow; a data set of the Hugging Face hub (wikitext/wikitext-2-raw-v1); or a folder or URL of shards that
    `mup-tpu data prepare` wrote."""
    text_column: str = "text"
    """Column that holds the text, of corpora that have columns."""
    max_documents: int = 0
    """Take only so many documents from the start; a data set of the hub is then streamed. 0 takes all."""
    tokenizer: str = "bytes"
    """"bytes" (256 tokens); "bpe": byte-level BPE trained on the corpus's training documents; or the name or
    folder of a pretrained one, as transformers' AutoTokenizer takes it. Prepared shards bring their own."""
    vocab_size: int = described(4096, most=_LARGEST)
    """Tokens of a trained BPE; bytes always have 256, a pretrained tokenizer has its own."""
    sequence_length: int = described(128, unit="tokens", most=_LARGEST)
    """Tokens a sequence."""
    batch_size: int = described(16, unit="sequences", most=_LARGEST)
    """Sequences a step."""
    data_seed: int = described(0, least=0)
    """Seed of the order of the batches."""
    validation_fraction: float = 0.05
    """Share of documents held out, by a hash of each document."""

    def __post_init__(self) -> None:
        require_valid(self)
        for name in ("vocab_size", "sequence_length", "batch_size"):
            require_positive(self, name)
        require_positive(self, "max_documents", allow_zero=True)
        if not 0 < self.validation_fraction < 1:
            raise ConfigError(
                f"validation_fraction {self.validation_fraction} is not between 0 and 1, both excluded"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """An update rule; learning rate and weight decay are those of the base width."""

    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """Update rule; "muon" is for hidden matrices, and AdamW trains the rest."""
    learning_rate: LearningRate = described(2.0**-8, column="lr", as_power=True)
    """Peak learning rate at the base width, plain (not log2): 0.004 or 2^-8."""
    weight_decay: float = 0.0
    """Weight decay λ of matrices and embeddings; biases and norms have none."""
    decay_mode: Literal["coupled", "independent"] = "coupled"
    """"coupled": a step shrinks weights by lr·λ, as in torch; "independent": by schedule·λ alone."""
    beta1: float = described(0.9, label="β₁")
    """AdamW's decay of the first moment."""
    beta2: float = described(0.95, label="β₂")
    """AdamW's decay of the second moment."""
    eps: float = described(1e-8, label="ε")
    """AdamW's ε at the base; the parametrization may scale it."""
    momentum: float = 0.0
    """SGD's momentum."""
    grad_clip: float = described(1.0, label="gradient clipping")
    """Largest norm of a trial's gradient; 0 does not clip. No rule scales it, though the norm follows width,
    depth and batch size."""
    batch_rule: str = "none"
    """How learning rate and other hyperparameters follow the batch size, of mup_tpu.rules.optimizer."""
    token_rule: str = "none"
    """How they follow the training tokens."""
    decay_rule: str = "parametrization"
    """How coupled weight decay follows the scales, in place of the parametrization's factor."""
    adamw_lr_ratio: float = described(1.0, label="AdamW's learning rate / Muon's")
    """With "muon": learning rate of all that is no hidden matrix, which AdamW trains, over Muon's."""
    muon_momentum: float = described(0.95, label="Muon's momentum")
    """Muon's decay of its running average of gradients."""
    muon_nesterov: bool = described(True, label="Muon with Nesterov's momentum")
    """Whether Muon looks a step ahead along its momentum (Nesterov)."""
    muon_scale: Literal["spectral", "match_rms_adamw"] = "spectral"
    """Muon's factor on its orthogonalised update: "spectral", √(out/in), so that outputs change alike at any
    width; "match_rms_adamw", 0.2·√max(out, in), as large as AdamW's."""
    newton_schulz_steps: int = described(5, least=1, most=99, label="Newton-Schulz steps")
    """Steps of Muon's orthogonalisation."""
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of these: "float32", that of the weights and the same on all devices (in precision float64
    that); "bfloat16", that of torch.optim.Muon, faster where there are units for it."""

    def __post_init__(self) -> None:
        require_valid(self)
        if self.learning_rate <= 0:
            hint = (
                f"; if that is its log2, write {2.0**self.learning_rate:g} or 2^{self.learning_rate:g}"
                if -64 <= self.learning_rate < 0
                else ""
            )
            raise ConfigError(
                f"learning_rate {self.learning_rate:g} is not allowed: a learning rate is above 0{hint}"
            )
        for name in ("beta1", "beta2", "momentum", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} is not in [0, 1)")
        for name in ("weight_decay", "eps", "grad_clip"):
            require_positive(self, name, allow_zero=True)
        require_positive(self, "adamw_lr_ratio")
        for name, rules in (
            ("batch_rule", BATCH_RULES), ("token_rule", TOKEN_RULES), ("decay_rule", DECAY_RULES),
        ):  # fmt: skip
            require_one_of(name, getattr(self, name), tuple(rules))
        if self.weight_decay and self.decay_mode == "independent":
            self._require_rules_of_independent_decay()

    def _require_rules_of_independent_decay(self) -> None:
        """Independent decay is no λ that learning rates multiply, of which alone these rules speak."""
        spoken_of = {
            "batch_rule": BATCH_RULES[self.batch_rule].weight_decay,
            "token_rule": TOKEN_RULES[self.token_rule].weight_decay,
            "decay_rule": self.decay_rule != "parametrization",
        }
        for name in (name for name, speaks in spoken_of.items() if speaks):
            raise ConfigError(
                f"{name} {getattr(self, name)!r} scales coupled weight decay: it needs decay_mode 'coupled', "
                f"not {self.decay_mode!r}"
            )

    @property
    def rules(self) -> Choice:
        """How it follows batch size, tokens and width."""
        return Choice(self.batch_rule, self.token_rule, self.decay_rule)


@dataclass(frozen=True)
class TrainConfig:
    """How long a trial trains, its learning-rate schedule, and which loss is its result."""

    steps: int = described(500, label="step count", column="steps_planned", most=_LONGEST)
    """Optimizer steps."""
    warmup: float = described(0.1, label="warm-up", unit="share of the steps, or steps")
    """Linear warm-up: a fraction of the steps if below 1, else a number of steps."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Learning rate after warm-up: constant, or falling to final_lr_fraction of its peak, in "wsd" (warm-up,
    stable, decay) during the cooldown alone."""
    cooldown: float = described(0.2, label="cooldown", unit="share of the steps, or steps")
    """The last part of schedule "wsd": a fraction of the steps if below 1, else a number of steps."""
    final_lr_fraction: float = 0.1
    """Share of the peak learning rate left at the last step (all but constant)."""
    seed: int = 0
    """Seed of the init."""
    loss_kind: Literal["validation_final", "train_mean"] = "validation_final"
    """The trial's result: loss on held-out text after the last step, or the mean training loss of the run."""
    eval_batches: int = described(8, most=_LARGEST)
    """Batches of held-out text an evaluation takes."""
    precision: Literal["float32", "float64", "bf16"] = "float32"
    """Arithmetic; "bf16" multiplies matrices in bfloat16 and keeps weights, optimizer and loss in float32."""
    base_batch_size: int = described(0, unit="sequences", most=_LARGEST)
    """Batch size at which the parametrizations agree, sequences; 0 is the trial's own."""
    base_steps: int = described(0, most=_LONGEST)
    """Steps of the run at which the parametrizations agree, at the base batch size; 0 is the trial's own."""

    def __post_init__(self) -> None:
        require_valid(self)
        for name in ("steps", "eval_batches"):
            require_positive(self, name)
        for name in ("warmup", "base_batch_size", "base_steps"):
            require_positive(self, name, allow_zero=True)
        require_positive(self, "cooldown")
        for name in ("warmup", "cooldown"):
            value = getattr(self, name)
            if value >= 1 and value != int(value):
                raise ConfigError(f"{name} {value} is neither a fraction below 1 nor a whole number of steps")
        if self.schedule == "wsd":
            self._require_room_for_cooldown()
        elif self.cooldown != type(self).cooldown:
            raise ConfigError(f"cooldown {self.cooldown:g} needs schedule 'wsd', not {self.schedule!r}")
        if self.warmup_steps >= self.steps and self.warmup_steps > 0:
            raise ConfigError(
                f"warmup {self.warmup:g} is {self.warmup_steps} steps, but the run has steps {self.steps}: "
                "warm-up must be shorter than the run"
            )
        if not 0 < self.final_lr_fraction <= 1:
            raise ConfigError(f"final_lr_fraction {self.final_lr_fraction} is not above 0 and at most 1")

    def _require_room_for_cooldown(self) -> None:
        both = self.warmup_steps + self.cooldown_steps
        if both > self.steps:
            raise ConfigError(
                f"cooldown {self.cooldown:g} is {self.cooldown_steps} steps and warmup {self.warmup:g} is "
                f"{self.warmup_steps}, but the run has steps {self.steps}: together they must not be longer"
            )

    @property
    def warmup_steps(self) -> int:
        """Warm-up in steps."""
        return round(self.warmup * self.steps) if self.warmup < 1 else int(self.warmup)

    @property
    def cooldown_steps(self) -> int:
        """Cooldown of schedule "wsd" in steps, at least one."""
        return max(1, round(self.cooldown * self.steps)) if self.cooldown < 1 else int(self.cooldown)


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
        # Without a base these rules would do nothing, and say nothing of it.
        for rule, bases in (
            ("batch_rule", ("base_batch_size",)), ("token_rule", ("base_steps", "base_batch_size")),
        ):  # fmt: skip
            for base in bases:
                if getattr(self.optimizer, rule) != "none" and not getattr(self.train, base):
                    raise ConfigError(
                        f"{rule} {getattr(self.optimizer, rule)!r} needs {base}, which is 0: "
                        "give that of the run whose hyperparameters these are"
                    )

    def replace(self, **changes: Any) -> Trial:
        """This trial with fields of its parts changed.

        Examples:
            >>> trial = Trial().replace(width=256, learning_rate=2**-7)
            >>> trial.model.width, trial.optimizer.learning_rate
            (256, 0.0078125)

        Raises:
            ConfigError: a name belongs to no part, or the values do not fit.
        """
        parts: dict[str, dict[str, Any]] = {}
        for given, value in changes.items():
            name = current_names().get(given, given)
            if name not in part_of_field():
                raise ConfigError(unknown_key(name, part_of_field()))
            parts.setdefault(part_of_field()[name], {})[name] = value
        return dataclasses.replace(
            self,
            **{part: dataclasses.replace(getattr(self, part), **values) for part, values in parts.items()},
        )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain nested values, ready for JSON or TOML."""
        return dataclasses.asdict(self)

    def flat(self) -> dict[str, Any]:
        """The fields of all parts by name, as `replace` takes them."""
        return {name: value for part in self.to_dict().values() for name, value in part.items()}

    def trial_id(self, data_fingerprint: str) -> str:
        """16 hex digits that name this configuration on these data.

        A field that came later than a stored row counts only where it differs from its default, so that the
        row keeps its name.
        """
        content: dict[str, Any] = {"data_fingerprint": data_fingerprint}
        for part in dataclasses.fields(self):
            config = getattr(self, part.name)
            names = {f: f.metadata.get("former") or f.name for f in dataclasses.fields(config)}
            content[part.name] = {
                name: _as_declared(getattr(config, f.name), f.default)
                for f, name in names.items()
                if name not in _IN_FINGERPRINT
                and (name in _ALWAYS_IN_ID[part.name] or getattr(config, f.name) != f.default)
            }
        canonical = json.dumps(_floats_as_hex(content), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def growth(self) -> Growth:
        """How far it has grown from its base along each scale."""
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


# The fields of the first release, by part. Nothing is ever added here.
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

# These fields decide the tokens themselves, so that the data's fingerprint already stands for them: the same
# text gives the same trial_id from another folder.
_IN_FINGERPRINT = (
    "corpus",
    "text_column",
    "max_documents",
    "tokenizer",
    "vocab_size",
    "validation_fraction",
)

PARTS = {"model": ModelConfig, "data": DataConfig, "optimizer": OptimizerConfig, "train": TrainConfig}
"""The parts of a trial by name."""


@functools.cache
def part_of_field() -> dict[str, str]:
    """Name of a field -> the part of a trial that it belongs to."""
    return {f.name: part for part, cls in PARTS.items() for f in dataclasses.fields(cls)}


@functools.cache
def current_names() -> dict[str, str]:
    """Former name of a field -> its name now."""
    fields = (f for cls in PARTS.values() for f in dataclasses.fields(cls))
    return {f.metadata["former"]: f.name for f in fields if f.metadata.get("former")}


def is_field(name: str) -> bool:
    """Whether a trial has such a field."""
    return name in part_of_field()


def field_column(name: str) -> str:
    """Column of run tables that holds a field of a trial."""
    fields = {f.name: f for f in dataclasses.fields(PARTS[part_of_field()[name]])}
    return fields[name].metadata.get("column") or name


def _as_declared(value: Any, default: Any) -> Any:
    """A whole number that was given for a float as a float: 0 and 0.0 are one trial."""
    return float(value) if isinstance(default, float) else value


def _floats_as_hex(value: Any) -> Any:
    """Floats written exactly, so that a hash does not depend on how Python prints them."""
    if isinstance(value, dict):
        return {k: _floats_as_hex(v) for k, v in value.items()}
    return value.hex() if isinstance(value, float) else value
