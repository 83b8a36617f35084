"""What a trial is: frozen dataclasses, read from TOML or the command line, hashed to a trial_id.

A value of a `Trial` decides its result. How it is run (device, threads, logging) is in `RunOptions`, outside
of the trial, because the same trial run otherwise must land on the same row of the store.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import itertools
import json
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from mup_tpu.errors import ConfigError
from mup_tpu.parametrization import PARAMETRIZATIONS, Growth


def parse_learning_rate(text: str | float) -> float:
    """A plain number from `0.004`, `4e-3` or `2^-8`.

    Raises:
        ConfigError: the text is none of these.
    """
    try:
        if isinstance(text, str) and "^" in text:
            base, exponent = text.split("^")
            return float(base) ** float(exponent)
        return float(text)
    except (ValueError, TypeError):
        raise ConfigError(
            f"learning rate {text!r} is not a number; write 0.00390625, 3.9e-3 or 2^-8"
        ) from None


def format_learning_rate(value: float) -> str:
    """`2^-8` where the exponent is a multiple of 1/8, else the plain number to three digits."""
    exponent = math.log2(value) if value > 0 else math.nan
    return f"2^{exponent:g}" if (8 * exponent).is_integer() else f"{value:.3g}"


def _learning_rate_argument(tokens: list[str]) -> float:
    try:
        return parse_learning_rate(tokens[0])
    except ConfigError as error:
        raise ValueError(str(error)) from None


def described(default: Any, label: str = "", unit: str = "", column: str = "", as_power: bool = False) -> Any:
    """A field with what its column in run tables is called, where that does not follow from its name.

    Args:
        default: of the field.
        label: what figures and tables for people call it.
        unit: of its values.
        column: its name in run tables. A property of that name gives the value where there is one.
        as_power: whether its values are written as powers of 2.
    """
    about = {"label": label, "unit": unit, "column": column, "as_power": as_power}
    return field(default=default, metadata=about)


LearningRate = Annotated[
    float,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="LR",
        instance_from_str=_learning_rate_argument,
        is_instance=lambda x: isinstance(x, float),
        str_from_instance=lambda x: [format_learning_rate(x)],
    ),
]


@dataclass(frozen=True)
class ModelConfig:
    """A model of a given size in a given parametrization."""

    architecture: Literal["gpt2"] = "gpt2"
    """Network, of mup_tpu.models."""
    width: int = 128
    """Embedding size (d_model); a multiple of the head size."""
    depth: int = described(2, unit="layers")
    """Transformer layers."""
    head_size: int = 32
    """Dimensions of one attention head; at the base width if the head size grows with width."""
    growing: Literal["heads", "head_size"] = "heads"
    """What grows with width: the number of heads, or the size of each."""
    tied: bool = True
    """Whether the readout is the token embedding, as in GPT-2."""
    parametrization: str = "mup"
    """A rule of mup_tpu.parametrization: "mup" or "sp"."""
    base_width: int = 64
    """Width at which the parametrizations agree; multipliers are relative to it."""
    base_depth: int = described(0, unit="layers")
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

    def __post_init__(self) -> None:
        for name in ("width", "depth", "head_size", "base_width"):
            require_positive(self, name)
        for name in ("init_std", "base_depth"):
            require_positive(self, name, allow_zero=True)
        require_choices(self)
        _require_one_of("parametrization", self.parametrization, tuple(PARAMETRIZATIONS))
        if self.base_width % self.head_size:
            raise ConfigError(_not_a_multiple("base_width", self.base_width, "head_size", self.head_size))
        unit = self.head_size if self.growing == "heads" else self.base_width // self.head_size
        if self.width % unit:
            name = "head_size" if self.growing == "heads" else "the number of heads"
            raise ConfigError(_not_a_multiple("width", self.width, name, unit))
        if self.tied and self.readout_zero_init:
            raise ConfigError(
                "readout_zero_init true needs tied false: a tied readout is the embedding, and would zero it"
            )

    @property
    def heads(self) -> int:
        """Attention heads a layer."""
        return (self.width if self.growing == "heads" else self.base_width) // self.head_size

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
    vocab_size: int = 4096
    """Tokens of a trained BPE; bytes always have 256, a pretrained tokenizer has its own."""
    sequence_length: int = described(128, unit="tokens")
    """Tokens a sequence."""
    batch_size: int = described(16, unit="sequences")
    """Sequences a step."""
    data_seed: int = 0
    """Seed of the order of the batches."""
    validation_fraction: float = 0.05
    """Share of documents held out, by a hash of each document."""

    def __post_init__(self) -> None:
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

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Update rule."""
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
    """Largest norm of a trial's gradient; 0 does not clip."""

    def __post_init__(self) -> None:
        require_choices(self)
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            hint = (
                f"; if that is its log2, write {2.0**self.learning_rate:g} or 2^{self.learning_rate:g}"
                if -64 <= self.learning_rate < 0
                else ""
            )
            raise ConfigError(
                f"learning_rate {self.learning_rate:g} is not allowed: a learning rate is above 0{hint}"
            )
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} is not in [0, 1)")
        for name in ("weight_decay", "eps", "grad_clip"):
            require_positive(self, name, allow_zero=True)


@dataclass(frozen=True)
class TrainConfig:
    """How long a trial trains, its learning-rate schedule, and which loss is its result."""

    steps: int = described(500, label="step count", column="steps_planned")
    """Optimizer steps."""
    warmup: float = described(0.1, label="warm-up", unit="steps", column="warmup_steps")
    """Linear warm-up: a fraction of the steps if below 1, else a number of steps."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate after warm-up: constant, or falling to final_lr_fraction of its peak."""
    final_lr_fraction: float = 0.1
    """Share of the peak learning rate left at the last step (linear and cosine)."""
    seed: int = 0
    """Seed of the init."""
    loss_kind: Literal["validation_final", "train_mean"] = "validation_final"
    """The trial's result: loss on held-out text after the last step, or the mean training loss of the run."""
    eval_batches: int = 8
    """Batches of held-out text an evaluation takes."""
    precision: Literal["float32", "float64", "bf16"] = "float32"
    """Arithmetic; "bf16" multiplies matrices in bfloat16 and keeps weights, optimizer and loss in float32."""
    base_batch_size: int = described(0, unit="sequences")
    """Batch size at which the parametrizations agree, sequences; 0 is the trial's own."""
    base_steps: int = 0
    """Steps of the run at which the parametrizations agree, at the base batch size; 0 is the trial's own."""

    def __post_init__(self) -> None:
        for name in ("steps", "eval_batches"):
            require_positive(self, name)
        require_choices(self)
        for name in ("warmup", "base_batch_size", "base_steps"):
            require_positive(self, name, allow_zero=True)
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ConfigError(
                f"warmup {self.warmup} is neither a fraction below 1 nor a whole number of steps"
            )
        if self.warmup_steps >= self.steps and self.warmup_steps > 0:
            raise ConfigError(
                f"warmup {self.warmup:g} is {self.warmup_steps} steps, but the run has steps {self.steps}: "
                "warm-up must be shorter than the run"
            )
        if not 0 < self.final_lr_fraction <= 1:
            raise ConfigError(f"final_lr_fraction {self.final_lr_fraction} is not above 0 and at most 1")

    @property
    def warmup_steps(self) -> int:
        """Warm-up in steps."""
        return round(self.warmup * self.steps) if self.warmup < 1 else int(self.warmup)


@dataclass(frozen=True)
class Trial:
    """One training run, wholly determined by this configuration and the data's fingerprint."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def replace(self, **changes: Any) -> Trial:
        """This trial with fields of its parts changed: `trial.replace(width=256, learning_rate=2**-7)`.

        Raises:
            ConfigError: a name belongs to no part, or the values do not fit.
        """
        parts: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            if name not in _part_of_field():
                raise ConfigError(unknown_key(name, _part_of_field()))
            parts.setdefault(_part_of_field()[name], {})[name] = value
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
            content[part.name] = {
                f.name: getattr(config, f.name)
                for f in dataclasses.fields(config)
                if f.name not in _IN_FINGERPRINT
                and (f.name in _ALWAYS_IN_ID[part.name] or getattr(config, f.name) != f.default)
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


@dataclass(frozen=True)
class Axis:
    """A field of a trial and its values along a sweep."""

    field: str
    """Name of the field, such as "width" or "weight_decay"."""
    values: tuple[Any, ...]
    """Its values, each once."""

    def __post_init__(self) -> None:
        if self.field not in _part_of_field():
            raise ConfigError(unknown_key(self.field, _part_of_field()))
        if not self.values:
            raise ConfigError(f"{self.field} of the sweep has no values: give at least one")

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that it changes: one."""
        return (self.field,)

    @property
    def points(self) -> tuple[dict[str, Any], ...]:
        """What each of its points sets; numbers in ascending order."""
        values = dict.fromkeys(self.values)
        return tuple({self.field: v} for v in (sorted(values) if self.is_numeric else values))

    @property
    def is_numeric(self) -> bool:
        """Whether its values are numbers."""
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)

    @property
    def column(self) -> str:
        """Column of run tables that it is read from."""
        return field_column(self.field)


@dataclass(frozen=True)
class Ladder:
    """A scale of several fields that change together: width with depth, batch size with steps."""

    points: tuple[dict[str, Any], ...]
    """What each point sets; all of them the same fields."""
    measured_by: str = "flops"
    """What places its points: "params" (without embeddings), "flops" or "tokens" (of the whole run), or one
    of its fields."""

    is_numeric = True

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("ladder has no points: give at least one")
        for point in self.points:
            for name in point:
                if name not in _part_of_field():
                    raise ConfigError(f"ladder: {unknown_key(name, _part_of_field())}")
            if set(point) != set(self.fields):
                raise ConfigError(
                    f"ladder: the point {point} does not set the first one's fields: {', '.join(self.fields)}"
                )
        _require_one_of("measured_by", self.measured_by, (*_MEASURES, *self.fields))

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that it changes."""
        return tuple(self.points[0])

    @property
    def column(self) -> str:
        """Column of run tables that it is read from."""
        return _MEASURES.get(self.measured_by) or field_column(self.measured_by)


_MEASURES = {"params": "params_non_embedding", "flops": "flops", "tokens": "tokens_planned"}
"""What a ladder may be measured by, besides its fields -> column of run tables."""

WIDTHS = (64, 128, 256)
LEARNING_RATES = tuple(2.0**e for e in range(-11, -4))


@dataclass(frozen=True)
class Sweep:
    """A known grid of trials: everything compared × a scale × a tuned hyperparameter × seeds.

    `widths`, `learning_rates` and `parametrizations` are the short forms of the usual axes.
    """

    experiment: str
    """Name of the experiment; a results folder holds one."""
    base: Trial = field(default_factory=Trial)
    """What all trials share."""
    parametrizations: tuple[str, ...] | None = None
    """Parametrizations to compare; by default ("sp", "mup") along the width, else the base's alone."""
    widths: tuple[int, ...] | None = None
    """Model widths; (64, 128, 256) where there is no other scale."""
    learning_rates: tuple[LearningRate, ...] | None = None
    """Peak learning rates at the base, plain or as 2^-8; 2^-11 to 2^-5 where nothing else is tuned."""
    num_seeds: int = 1
    """Seeds per cell: 0 to num_seeds - 1."""
    scale: Axis | Ladder | None = None
    """The way of growing, where it is not the width."""
    tune: Axis | None = None
    """The hyperparameter that is tuned, where it is not the learning rate."""
    compare: Axis | None = None
    """What is compared beside each other, where it is not parametrizations; values need not be numbers."""

    def __post_init__(self) -> None:
        require_positive(self, "num_seeds")
        for short, axis in (("widths", "scale"), ("learning_rates", "tune"), ("parametrizations", "compare")):
            if getattr(self, short) is not None and getattr(self, axis) is not None:
                raise ConfigError(
                    f"{short} and {axis} of the sweep were both given: {short} is short for one"
                )
            if getattr(self, short) == ():
                raise ConfigError(f"{short} of the sweep is empty: give at least one")
        for name in ("scale", "tune"):
            axis = getattr(self, f"{name}_axis")
            if not axis.is_numeric:
                raise ConfigError(
                    f"{name} {axis.field} of the sweep is not a number; compare its values instead"
                )
        fields = [f for axis in self.axes for f in axis.fields]
        if twice := [f for f in fields if fields.count(f) > 1]:
            raise ConfigError(f"{twice[0]} is on two axes of the sweep: each field may change along one")

    @property
    def scale_axis(self) -> Axis | Ladder:
        """The way of growing."""
        return self.scale or Axis("width", self.widths or WIDTHS)

    @property
    def tune_axis(self) -> Axis:
        """What is tuned at each point of the scale."""
        return self.tune or Axis("learning_rate", self.learning_rates or LEARNING_RATES)

    @property
    def compare_axis(self) -> Axis:
        """What is compared; one value where nothing is."""
        if self.compare is not None:
            return self.compare
        usual = ("sp", "mup") if "width" in self.scale_axis.fields else (self.base.model.parametrization,)
        return Axis("parametrization", self.parametrizations or usual)

    @property
    def axes(self) -> tuple[Axis | Ladder, ...]:
        """Scale, tuned hyperparameter, and what is compared."""
        return self.scale_axis, self.tune_axis, self.compare_axis

    def trials(self) -> list[Trial]:
        """All trials, small scales first.

        Raises:
            ConfigError: a combination is not allowed.
        """
        scale, tune, compare = self.axes
        grid = itertools.product(scale.points, compare.points, tune.points, range(self.num_seeds))
        return [
            self.base.replace(**at, **compared, **tuned, seed=self.base.train.seed + s)
            for at, compared, tuned, s in grid
        ]


@dataclass(frozen=True)
class RunOptions:
    """How trials are run; none of it changes a finished trial's result beyond float reassociation."""

    device: Literal["auto", "cpu", "cuda", "xla"] = "auto"
    """Where to train; "auto" takes CUDA where there is one. "xla" is TPUs, through torch_xla."""
    mesh: str = "auto"
    """How a pack spreads over XLA devices: trial=4,data=2 splits its members 4 ways and each batch 2 ways."""
    tpu_trial: Literal["host", "chip", "slice"] = "host"
    """What a pack has to itself on a Ray cluster of TPUs: a host's chips, one chip, or a slice of hosts."""
    way: Literal["auto", "loop", "vmap"] = "auto"
    """Members of a pack in turns ("loop", the CPU's default) or stacked as one program ("vmap")."""
    compile: bool = False
    """Put the step through torch.compile: half a minute at the start of every width."""
    threads: int = 0
    """CPU threads of one pack; 0 shares the cores between the packs that run at once."""
    log_every: int = 10
    """Steps between points of the training curve and log lines (also how often divergence is looked for)."""
    eval_every: int = 0
    """Steps between evaluations on held-out text; 0 evaluates at the end alone."""
    halving: bool = False
    """Stop members half-way or at three quarters if their training loss is far behind the pack's best."""
    tuned: tyro.conf.Suppress[tuple[str, ...]] = ("learning_rate",)
    """Fields whose values halving compares; a sweep sets those of its tuned axis."""
    checkpoint_every: int = 0
    """Steps between checkpoints, written while training goes on; 0 writes none."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_positive(self, "log_every")
        for name in ("threads", "eval_every", "checkpoint_every"):
            require_positive(self, name, allow_zero=True)


@dataclass(frozen=True)
class SweepOptions:
    """Where the packs of a sweep run."""

    ray: bool = False
    """Run packs on Ray, on this machine if there is no --address: there each GPU has packs of its own."""
    address: str | None = None
    """Ray cluster to run packs on ("auto", or host:port), in place of this machine alone."""
    pack_size: int = 0
    """Most trials that train together in one process; 0 chooses for the device."""
    heartbeat: float = 600.0
    """Seconds without a report (a line of a pack's log; on XLA devices they come with evaluations) after
    which a pack counts as hung: its process is ended and it is tried again. A pack in the command's own
    process cannot be watched."""

    def __post_init__(self) -> None:
        require_positive(self, "pack_size", allow_zero=True)
        require_positive(self, "heartbeat")

    @property
    def on_ray(self) -> bool:
        """Whether Ray runs the packs: an address asks for it too."""
        return self.ray or self.address is not None


PARTS = {"model": ModelConfig, "data": DataConfig, "optimizer": OptimizerConfig, "train": TrainConfig}
"""The parts of a trial by name."""


@functools.cache
def _part_of_field() -> dict[str, str]:
    return {f.name: part for part, cls in PARTS.items() for f in dataclasses.fields(cls)}


def field_column(name: str) -> str:
    """Column of run tables that holds a field of a trial."""
    fields = {f.name: f for f in dataclasses.fields(PARTS[_part_of_field()[name]])}
    return fields[name].metadata.get("column") or name


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The sentence for a key that is not known, with the nearest one that is."""
    known = list(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"the nearest known key is {near[0]!r}" if near else f"known keys are {', '.join(known)}"
    return f"unknown key {key!r}; {hint}"


def _not_a_multiple(name: str, value: int, of_name: str, of: int) -> str:
    lower, upper = value // of * of, (value // of + 1) * of
    nearest = f"{lower}, {upper}" if lower else f"{upper}"
    return f"{name} {value} is not a multiple of {of_name} {of}; nearest allowed: {nearest}"


def require_positive(config: Any, name: str, allow_zero: bool = False) -> None:
    """A field must hold a finite number above 0 (or 0).

    Raises:
        ConfigError: it does not.
    """
    value = getattr(config, name)
    if not math.isfinite(value) or value < 0 or (value == 0 and not allow_zero):
        raise ConfigError(
            f"{name} {value} is not allowed: it must be {'0 or more' if allow_zero else 'above 0'}"
        )


def require_choices(config: Any) -> None:
    """Every field of a `Literal` type must hold one of its values.

    Raises:
        ConfigError: one does not; the nearest value is named.
    """
    for name, choices in _choices(config.__class__).items():
        _require_one_of(name, getattr(config, name), choices)


@functools.cache
def _choices(cls: type) -> dict[str, tuple[str, ...]]:
    hints = typing.get_type_hints(cls)
    return {n: typing.get_args(hint) for n, hint in hints.items() if typing.get_origin(hint) is Literal}


def _require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"{name} {value!r} is not one of {', '.join(map(repr, choices))}{hint}")


def _floats_as_hex(value: Any) -> Any:
    """Floats written exactly, so that a hash does not depend on how Python prints them."""
    if isinstance(value, dict):
        return {k: _floats_as_hex(v) for k, v in value.items()}
    return value.hex() if isinstance(value, float) else value
