"""What a transformer's sizes say before any run: its parameters, and the learning rate of published laws.

Published rates are a prior. All are for AdamW without a rule such as μP. Their errors are root mean squares
in octaves over two public sources, of which a law's own is left out (benchmarks/published_laws.md).
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mup_tpu.analysis.trend import NORMAL_95
from mup_tpu.config.values import shown
from mup_tpu.errors import ConfigError, raised_as
from mup_tpu.files import read_local
from mup_tpu.words.plans import VOCABULARY

# Fields of transformers' configurations with the experts that a token takes
_TAKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Types whose blocks are attention and a gated feed-forward network, without biases that count
_GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2", "phi3", "mixtral", "qwen3_moe", "olmoe")


def params_of(width: float, depth: float) -> float:
    """Return the parameters of a transformer's layers, 12·L·W² (Kaplan et al. 2020, arXiv:2001.08361)."""
    return 12 * depth * width**2


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a transformer at one size."""

    width: int
    depth: int
    blocks: float
    active: float  # of the blocks, those that a token uses
    embeddings: float  # of tokens and positions, with a readout that is not tied
    readout: float  # those that a token's logits take, tied or not; 0 if the vocabulary is not known

    @property
    def total(self) -> float:
        return self.blocks + self.embeddings

    @property
    def used(self) -> float:
        return self.active + self.embeddings

    @property
    def flops_a_token(self) -> float:
        # Two for a product and its sum, forwards; twice that backwards (Kaplan et al. 2020)
        return 6 * (self.active + self.readout)

    def at(self, width: float, depth: float) -> ParameterCounts:
        """Return the counts at another size, where all but the vocabulary grows as the width."""
        wide, deep = width / self.width, depth / self.depth
        return ParameterCounts(
            int(width), int(depth), self.blocks * wide**2 * deep, self.active * wide**2 * deep,
            self.embeddings * wide, self.readout * wide,
        )  # fmt: skip

    @classmethod
    def of_layers(cls, width: int, depth: int, vocabulary: int = 0) -> ParameterCounts:
        """Return those of a dense transformer; without a vocabulary the usual one has memory and no FLOPs."""
        layers, table = params_of(width, depth), float((vocabulary or VOCABULARY) * width)
        return cls(width, depth, layers, layers, 2 * table, table if vocabulary else 0.0)


def read_counts(path: str) -> ParameterCounts:
    """Count the parameters of a config.json of transformers, as transformers builds it.

    Without torch or transformers they follow from vocabulary, feed-forward network, heads and experts.

    Raises:
        ConfigError: it is no configuration of a causal language model whose parameters can be counted.
    """
    with raised_as(
        ConfigError, f"target {path} cannot be read as JSON", (OSError, ValueError, RecursionError)
    ):
        values = json.loads(read_local(path))
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError(f"target {path} has no model_type, as a config.json of transformers has")
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        return _built(path, values)
    return _by_formula(path, values)


def _built(path: str, values: Mapping[str, Any]) -> ParameterCounts:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.for_model(**values).get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        readout = model.get_output_embeddings().weight
    except Exception as error:  # whatever a class raises of a configuration that it cannot build
        why = str(error).strip().splitlines()[0][:100] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"target {path}: transformers builds no causal language model of type "
            f"{shown(values['model_type'])} from it ({why}): give width=, depth= and tokens="
        ) from None
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    embeddings = sum(weight.numel() for weight in {id(w): w for w in [*tables, readout]}.values())
    blocks = sum(parameter.numel() for parameter in model.parameters()) - embeddings
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    share = _share(path, {n: getattr(config, n, None) for n in (*_TAKEN, *_EXPERTS)}) if experts else 1.0
    return ParameterCounts(
        config.hidden_size, config.num_hidden_layers, blocks, blocks - experts * (1 - share), embeddings,
        readout.numel(),
    )  # fmt: skip


def _share(path: str, values: Mapping[str, Any]) -> float:
    taken, of = ([values[n] for n in names if values.get(n)] for names in (_TAKEN, _EXPERTS))
    if not taken or not of:
        raise ConfigError(
            f"target {path} has experts, and no {' or '.join((_EXPERTS if taken else _TAKEN)[:2])}"
        )
    return float(taken[0] / of[0])


def _by_formula(path: str, values: Mapping[str, Any]) -> ParameterCounts:
    kind = values["model_type"]
    try:
        if kind == "gpt2":
            width, depth = int(values["n_embd"]), int(values["n_layer"])
            blocks, readout = depth * (12 * width**2 + 13 * width), float(values["vocab_size"] * width)
            positions = values["n_positions"] * width
            return ParameterCounts(width, depth, blocks, blocks, readout + positions, readout)
        if kind not in _GATED:
            raise KeyError(kind)
        width, depth = int(values["hidden_size"]), int(values["num_hidden_layers"])
        heads, size = values["num_attention_heads"], values.get("head_dim")
        size = size or width // heads
        keys = values.get("num_key_value_heads") or heads
        inner = values.get("moe_intermediate_size") or values["intermediate_size"]
        attention, network = width * size * 2 * (heads + keys), 3 * width * inner
        experts = next((values[name] for name in _EXPERTS if values.get(name)), 1)
        share = _share(path, values) if experts > 1 else 1.0
        router = experts * width if experts > 1 else 0
        blocks = depth * (attention + experts * network + router)
        active = depth * (attention + experts * share * network + router)
        readout = float(values["vocab_size"] * width)
        is_tied = values.get("tie_word_embeddings", kind == "gemma")
        return ParameterCounts(width, depth, blocks, active, readout if is_tied else 2 * readout, readout)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"target {path}: the parameters of type {shown(kind)} do not follow from it without torch and "
            f"transformers ({error}): install the extra train, or give width=, depth= and tokens="
        ) from None


_LARGE_FACTOR = 4.0  # between two laws, from which their disagreement is reported
# Parameters and learning rates, by the model cards of cerebras/Cerebras-GPT-6.7B and its kin (20 tokens a
# parameter); up to 1.3 billion parameters nearly those of GPT-3
_CEREBRAS_GPT = {
    111e6: 6e-4, 256e6: 6e-4, 590e6: 2e-4, 1.3e9: 2e-4, 2.7e9: 2e-4, 6.7e9: 1.2e-4, 13e9: 1.2e-4,
}  # fmt: skip
_CEREBRAS_GPT_LOG2 = np.log2([*_CEREBRAS_GPT]), np.log2([*_CEREBRAS_GPT.values()])


def rate_by_law(params: float, tokens: float) -> float:
    """Return the best learning rate with AdamW, without a rule: 1.79·N^-0.713·D^0.307 (Step Law)."""
    return 1.79 * params**-0.713 * tokens**0.307


@dataclass(frozen=True)
class RateLaw:
    """A published law of the learning rate."""

    name: str
    source: str
    formula: str
    domain: Mapping[str, tuple[float, float]]  # least and most of what it was fitted to
    error: float  # octaves
    rate: Callable[[Mapping[str, float]], float]


LAWS = (
    RateLaw(
        "Step Law", "Li et al. 2025, arXiv:2503.04715", "1.79·N^-0.713·D^0.307",
        {"params": (6e7, 1.1e9), "tokens": (2e9, 1e11)}, 1.54,
        lambda of: rate_by_law(of["params"], of["tokens"]),
    ),
    RateLaw(
        "DeepSeek", "DeepSeek-AI 2024, arXiv:2401.02954", "0.3118·C^-0.125, C = 6·N·D",
        {"compute": (1e17, 2e19)}, 1.14,
        lambda of: 0.3118 * of["compute"] ** -0.125,
    ),
    RateLaw(
        "marin", "isoFLOP sweeps of marin-community/marin", "0.33·√(sequences of 4096)/width",
        {"params": (1e8, 4e9), "compute": (1e18, 1e21)}, 0.60,
        lambda of: 0.33 * math.sqrt(of["batch"] / 4096) / of["width"],
    ),
    RateLaw(
        "Cerebras-GPT", "Dey et al. 2023, arXiv:2304.03208, and its model cards", "its table, by parameters",
        {"params": (1.1e8, 1.3e10)}, 2.24,
        lambda of: float(2 ** np.interp(math.log2(of["params"]), *_CEREBRAS_GPT_LOG2)),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class PublishedRate:
    """Learning rate of a law at a target."""

    law: RateLaw
    rate: float
    outside: tuple[str, ...]  # sizes of the target that are beyond the law's domain


@dataclass(frozen=True)
class RatePrior:
    """What published laws say together."""

    rates: tuple[PublishedRate, ...]
    rate: float
    error: float  # octaves

    @property
    def low(self) -> float:
        return self.rate * 2.0 ** (-NORMAL_95 * self.error)

    @property
    def high(self) -> float:
        return self.rate * 2.0 ** (NORMAL_95 * self.error)

    @property
    def apart(self) -> float | None:
        rates = [one.rate for one in self.rates]
        factor = max(rates) / min(rates)
        return factor if factor >= _LARGE_FACTOR else None

    def to_dict(self) -> dict[str, Any]:
        laws = [
            {"law": r.law.name, "rate": r.rate, "source": r.law.source, "outside": list(r.outside)}
            for r in self.rates
        ]
        return asdict(self) | {"rates": laws, "low": self.low, "high": self.high, "apart": self.apart}


def published_rates(width: float, params: float, tokens: float, batch: float) -> RatePrior:
    """Return the rates of published laws and their mixture.

    Each law is a normal distribution around its rate, weighed by the inverse square of its error.

    Examples:
        >>> made = published_rates(2048, 1.2e9, 26e9, 2**19)
        >>> print(f"{made.rate:.1e} ({made.low:.0e} to {made.high:.0e})")
        1.4e-03 (3e-04 to 7e-03)
    """
    of = {"width": width, "params": params, "tokens": tokens, "batch": batch, "compute": 6 * params * tokens}
    rates = []
    for law in LAWS:
        beyond = (name for name, (low, high) in law.domain.items() if not low <= of[name] <= high)
        rates.append(PublishedRate(law, law.rate(of), tuple(beyond)))
    x_L, error_L = np.log2([r.rate for r in rates]), np.array([r.law.error for r in rates])
    weight_L = error_L**-2 / (error_L**-2).sum()
    x = float(weight_L @ x_L)
    return RatePrior(tuple(rates), 2**x, math.sqrt(float(weight_L @ (error_L**2 + (x_L - x) ** 2))))
