"""Targets of a plan: the sizes of a training, given or derived by published laws, and those of its proxies.

A **size** is what the optimum may follow: width, depth, tokens of the whole training, tokens of a batch. A
run has **values** under the names of whoever trains it: our networks take batch_size and steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from mup_tpu.analysis.trend import kind_of
from mup_tpu.config import Sweep, Trial, unknown_key
from mup_tpu.config.toml import parse_value, read_toml
from mup_tpu.config.values import shown
from mup_tpu.errors import ConfigError
from mup_tpu.models import training_flops
from mup_tpu.tuning.laws import ParameterCounts, RatePrior, params_of, published_rates, read_counts
from mup_tpu.words.plans import short

# Compute-optimal tokens of a parameter (Hoffmann et al. 2022, arXiv:2203.15556, table 3)
TOKENS_A_PARAMETER = 20
# Width over depth where only one number gives the model's size: 2048/24, GPT-3's 1.3B (Brown et al. 2020)
_ASPECT = 85
# Least useful sizes of a proxy of somebody's own transformer, and of our networks
_LEAST = {"width": 128, "depth": 4}
_LEAST_OF_OURS = {"width": 64, "depth": 2, "batch_size": 8, "steps": 100}
_LEAST_STEPS = 500  # fewer are mostly warm-up, and their optimum says little about longer training
_SHORTEST = 16  # factor by which a size of unknown meaning is shortened at most
_MOST, _FEWEST = 1e18, 10_000  # of any size; of parameters
_PREFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}
SIZES = ("width", "depth", "params", "tokens", "batch", "steps", "vocab")  # of a transformer, by their names
# Least and most of each size of a transformer that is planned
_POSSIBLE = {"width": (1, 10**6), "depth": (1, 10**4), "tokens": (10**3, 10**17), "batch": (1, 10**10)}

Sizes = dict[str, float]
Values = dict[str, Any]


def batch_by_law(tokens: float) -> float:
    """Return the best batch, tokens: 0.58·D^0.571 (Step Law, Li et al. 2025, arXiv:2503.04715)."""
    return 0.58 * tokens**0.571


def number(text: str, name: str, of: str = "target: ") -> float:
    """Read a number above 0: 1.3B, 0.5M, 26e9, 2^19."""
    digits, prefix = (text[:-1], text[-1]) if text[-1:] in _PREFIXES else (text, "")
    try:
        base, _, power = digits.replace("_", "").partition("^")
        value = (float(base) ** float(power or 1)) * _PREFIXES.get(prefix, 1)
    except (ValueError, OverflowError):
        value = math.nan
    if not (isinstance(value, float) and 0 < value <= _MOST):
        known = f"a number above 0, at most {_MOST:g}"
        raise ConfigError(f"{of}{name} {shown(text)} is not {known}; write 4096, 1.3B or 26e9")
    return value


def read_target(target: str | Sequence[str] | Mapping[str, Any]) -> dict[str, str]:
    """Return the parts of a target as text by name.

    A part is NAME=VALUE, a config.json of transformers, or a TOML file with NAME = VALUE.
    """
    if isinstance(target, Mapping):
        return {name: str(value) for name, value in target.items()}
    texts = [target] if isinstance(target, str) else list(target)
    parts = [part for whole in texts for part in re.sub(r"\s*=\s*", "=", whole).replace(",", " ").split()]
    given: dict[str, str] = {}
    for text in parts:
        name, equals, value = text.partition("=")
        pairs = {name: value}
        if not equals and text.endswith(".json"):
            counts = read_counts(text)
            pairs = {"width": str(counts.width), "depth": str(counts.depth), "config": text}
        elif not equals and text.endswith(".toml"):
            values = read_toml(text)
            pairs = {n: str(v) for n, v in values.get("target", values).items() if not isinstance(v, dict)}
        elif not equals or not value:
            raise ConfigError(f"target {shown(text)} is not NAME=VALUE, such as width=4096 or params=1.3B")
        if twice := next((name for name in pairs if name in given), None):
            raise ConfigError(f"target {shown(text)} and another value of {twice} were both given: give one")
        given |= pairs
    if not given:
        raise ConfigError("a plan needs a target: give --at params=1.3B, or --at width=4096")
    return given


@dataclass(frozen=True)
class Goal:
    """A target and its proxies."""

    values: Values  # of the target's run
    shrinks: tuple[str, ...]  # sizes that proxies make smaller, by their names in the law
    floors: Sizes  # least useful value of each
    derived: tuple[str, ...] = ()  # where values come from that were not given, a sentence each
    base: Trial | None = None  # trial of our networks; None for somebody's own training
    vocab_size: int = 0  # tokens of the corpus of our networks
    units: Mapping[str, int] = field(default_factory=dict)  # values of a name are multiples of its unit
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values that all runs of somebody's own training share."""
    is_in_tokens: bool = False  # whether a batch is of tokens, as a transformer's
    is_continued: bool = False  # whether longer runs of somebody's own training go on from shorter ones
    counts: ParameterCounts | None = None  # at the target; None where only width and depth are known

    @property
    def published(self) -> RatePrior | None:
        """Return what published laws say of a transformer's learning rate; None for other trainings."""
        if not self.is_in_tokens:
            return None
        width, depth, batch = (float(self.values[name]) for name in ("width", "depth", "batch"))
        params = params_of(width, depth) if self.counts is None else float(self.counts.used)
        return published_rates(width, params, batch * self.values["steps"], batch)

    def known(self, values: Mapping[str, Any]) -> Values:
        shared = self.settings if self.base is None else self.base.flat()
        return {**shared, **self.values, **values}

    def sizes(self, values: Mapping[str, Any]) -> Sizes:
        known = self.known(values)
        sizes = {name: float(known[name]) for name in self.shrinks if name in known}
        if self.base is not None:
            batch = float(known["batch_size"] * known["sequence_length"])
            sizes |= {"batch": batch, "tokens": batch * known["steps"]}
        elif "steps" in known and "batch" in known:
            sizes["tokens"] = float(known["steps"]) * float(known["batch"])
        return {name: sizes[name] for name in self.shrinks}

    def values_at(self, sizes: Mapping[str, float]) -> Values:
        """Return the values of a run of some sizes, rounded to what can be trained."""
        values = dict(self.values)
        length = self.base.data.sequence_length if self.base is not None else 1
        for name, size in sizes.items():
            if name == "tokens":
                continue
            key, size = ("batch_size", size / length) if name == "batch" and self.base else (name, size)
            whole = self.values[key]
            if size >= whole:
                continue
            unit = self.units.get(key, 1)
            if key == "batch":  # halves, which its parts divide as they do the target's batch
                values[key] = max(1, whole // 2 ** round(math.log2(whole / size)))
            elif isinstance(whole, int):
                values[key] = max(1, round(size / unit)) * unit
            else:
                values[key] = size
        if "tokens" in sizes and "steps" in values:
            known = self.known(values)
            batch = known.get("batch", 1) if self.base is None else known["batch_size"] * length
            values["steps"] = max(1, round(sizes["tokens"] / batch))
        return values

    def flops(self, values: Mapping[str, Any]) -> float:
        """Return the FLOP of a run; nan where its sizes do not give them."""
        if self.base is not None:
            return training_flops(self.base.replace(**values), self.vocab_size)
        known = {"params": math.nan, "tokens": math.nan} | self.known(values)
        counts = self.counts_at(values)
        if {"steps", "batch"} <= known.keys():
            known["tokens"] = known["steps"] * known["batch"]
        return float((counts.flops_a_token if counts else 6 * known["params"]) * known["tokens"])

    def counts_at(self, values: Mapping[str, Any]) -> ParameterCounts | None:
        known = self.known(values)
        if not {"width", "depth"} <= known.keys():
            return None
        at = known["width"], known["depth"]
        return ParameterCounts.of_layers(*at) if self.counts is None else self.counts.at(*at)

    def memory_bytes(self, values: Mapping[str, Any]) -> float:
        """Return the bytes of weights, gradients and AdamW's moments; nan where sizes do not give them.

        16 a parameter, in float32 or mixed precision (Rajbhandari et al. 2020, arXiv:1910.02054).
        """
        counts = self.counts_at(values)
        return math.nan if counts is None else 16.0 * counts.total

    def activation_bytes(self, values: Mapping[str, Any]) -> float:
        """Return the bytes of activations for a token: 34·depth·width in 16 bits, without logits.

        Korthikanti et al. 2022, arXiv:2205.05198, equation 1, with attention that keeps no matrix.
        """
        known = self.known(values)
        return 34.0 * known["depth"] * known["width"]

    def work(self, values: Mapping[str, Any]) -> float:
        """Return a measure of a run's time: FLOP, or the product of its values where these do not give it."""
        flops = self.flops(values)
        if math.isfinite(flops):
            return flops
        known = {n: v for n, v in {**self.values, **values}.items() if isinstance(v, int | float)}
        return float(math.prod(v ** (2 if kind_of(n) == "width" else 1) for n, v in known.items()))

    def compute(self, values: Mapping[str, Any]) -> float:
        """Return a run's work, by which a study orders its sizes.

        A millionth for each octave of steps parts equal ones.
        """
        apart = 1 + 1e-6 * math.log2(max(1, self.steps(values)[0]))
        return float(f"{self.work(values) * apart:.9g}")

    def steps(self, values: Mapping[str, Any]) -> tuple[int, int]:
        known = self.known(values)
        return int(known.get("steps", 0)), int(known.get("depth", 1))


def _of_ours(given: Mapping[str, str], base: Trial, vocab_size: int) -> Goal:
    """Return the goal of a trial of our networks, of which some fields grow; nothing is derived."""
    length = base.data.sequence_length
    if unknown := next((n for n in given if n not in (*_LEAST_OF_OURS, "tokens", "batch")), None):
        allowed = ", ".join((*_LEAST_OF_OURS, "tokens", "batch"))
        raise ConfigError(f"target {unknown}={given[unknown]} is not FIELD=VALUE with a field of {allowed}")
    for pair in (("steps", "tokens"), ("batch_size", "batch")):
        if {*pair} <= given.keys():
            raise ConfigError(f"target: {pair[0]} and {pair[1]} were both given: give one of them")
    values: Values = {n: parse_value(n, v, "target") for n, v in given.items() if n in _LEAST_OF_OURS}
    if "batch" in given:
        values["batch_size"] = max(1, round(number(given["batch"], "batch") / length))
    batch = values.get("batch_size", base.data.batch_size) * length
    if "tokens" in given:
        values["steps"] = max(1, round(number(given["tokens"], "tokens") / batch))
    base.replace(**values)  # refuses what cannot be trained
    model, flat = base.model, base.flat() | {"width": base.model.base_width}
    unit = model.head_size if model.growing_dimension == "heads" else model.base_width // model.head_size
    least = {name: min(value, flat[name]) for name, value in _LEAST_OF_OURS.items()}
    least["width"] = -(-least["width"] // unit) * unit
    floors: Sizes = {name: float(least[name]) for name in ("width", "depth") if name in values}
    if "batch_size" in values:
        floors["batch"] = float(least["batch_size"] * length)
    if "steps" in values:
        floors["tokens"] = float(least["steps"] * floors.get("batch", batch))
    return Goal(values, (), floors, (), base, vocab_size, {"width": unit})


def _of_a_transformer(given: Mapping[str, str], config: str = "") -> Goal:
    """Return the goal of somebody's own transformer; what is not given is derived by published laws."""
    counts = read_counts(config) if config else None
    if unknown := next((name for name in given if name not in SIZES), None):
        raise ConfigError(f"target: {unknown_key(unknown, SIZES)}")
    of = {name: number(text, name) for name, text in given.items()}
    derived = []
    if not {"width", "depth", "params"} & of.keys():
        raise ConfigError("target: the model's size is missing: give params=1.3B, or width=2048 depth=24")
    if of.get("params", math.inf) < _FEWEST:
        raise ConfigError(
            f"target: params {given['params']} are fewer than {_FEWEST:,}: no transformer has so few"
        )
    if "params" in of:
        by_aspect = (of["params"] / 12 / _ASPECT**2) ** (1 / 3)
        depth = of.get("depth") or (of["params"] / (12 * of["width"] ** 2) if "width" in of else by_aspect)
        depth = max(1, round(depth / 2) * 2 if "depth" not in of and depth > 3 else round(depth))
        width = of.get("width") or round(math.sqrt(of["params"] / 12 / depth) / 64) * 64
        made = params_of(width, depth) if counts is None else counts.total
        if not 0.75 < made / of["params"] < 1.33:
            raise ConfigError(
                f"target: params {given['params']} contradict width {width:g} and depth {depth:g}, which "
                f"have {short(made)}: give params alone, or width and depth"
            )
        if {"width", "depth"} - of.keys():
            how = "" if {"width", "depth"} & of.keys() else f", width about {_ASPECT} × depth as GPT-3's 1.3B"
            derived.append(
                f"width {width:g} and depth {depth:g} from params {given['params']}: 12·depth·width²{how}"
            )
    else:
        width = of.get("width") or round(_ASPECT * of["depth"] / 64) * 64
        depth = of.get("depth") or max(1, round(of["width"] / _ASPECT / 2) * 2)
        for name, value in (("width", width), ("depth", depth)):
            if name not in of:
                derived.append(f"{name} {value:g}: width about {_ASPECT} × depth, as GPT-3's 1.3B")
    params = params_of(width, depth) if counts is None else counts.used
    if "vocab" in of and counts is None:
        counts = ParameterCounts.of_layers(int(width), int(depth), int(of["vocab"]))
    elif counts is not None:
        used = "" if counts.used == counts.total else f", of which a token uses {short(counts.used)}"
        derived.append(
            f"{short(counts.total)} parameters{used}, {short(counts.embeddings)} of embeddings: {config}"
        )
    if {"tokens", "steps", "batch"} <= of.keys() and abs(of["steps"] * of["batch"] / of["tokens"] - 1) > 0.02:
        raise ConfigError(
            f"target: tokens {given['tokens']} contradict steps {given['steps']} of batch {given['batch']}, "
            f"which are {short(of['steps'] * of['batch'])}: give two of them"
        )
    tokens = of.get("tokens") or of.get("steps", 0) * of.get("batch", 0)
    if not tokens:
        tokens = TOKENS_A_PARAMETER * params
        law = f"{TOKENS_A_PARAMETER} a parameter, compute-optimal (Hoffmann et al. 2022)"
        derived.append(f"tokens {short(tokens)}: {law}")
    batch = of.get("batch") or (tokens / of["steps"] if "steps" in of else 0)
    if not batch:
        batch = 2.0 ** round(math.log2(batch_by_law(tokens)))
        law = "0.58·tokens^0.571 to a power of 2 (Step Law, Li et al. 2025)"
        derived.append(f"batch {short(batch)} tokens: {law}")
    for name, size in {"width": width, "depth": depth, "tokens": tokens, "batch": batch}.items():
        low, high = _POSSIBLE[name]
        if not low <= size <= high or (name in ("width", "depth") and size % 1):
            kind = "a whole number" if name in ("width", "depth") else "a number"
            how = "" if name in of else f", derived from {', '.join(f'{n}={given[n]}' for n in given)},"
            raise ConfigError(f"target: {name} {size:g}{how} is not {kind} from {low:g} to {high:g}")
    if batch > tokens:
        raise ConfigError(f"target: batch {short(batch)} is larger than all tokens, {short(tokens)}")
    values = {"width": int(width), "depth": int(depth), "batch": int(batch)}
    values["steps"] = max(1, round(tokens / batch))
    least = {name: min(float(_LEAST[name]), float(values[name])) for name in _LEAST}
    shortest = min(tokens, tokens / params * params_of(least["width"], least["depth"]))
    smallest = min(batch, batch_by_law(shortest), shortest / _LEAST_STEPS)
    floors = least | {"tokens": shortest, "batch": smallest}
    return Goal(values, (), floors, tuple(derived), units={"width": 64}, is_in_tokens=True, counts=counts)


def _of_a_study(
    given: Mapping[str, str], scale: Sequence[Values], settings: Mapping[str, Any], is_continued: bool = False
) -> Goal:
    """Return the goal of somebody's own training under its own names; nothing is derived.

    Points of the scale come the smallest first; all runs share the settings.
    """
    names = {*scale[0], *settings, "width", "depth", "steps", "batch"} if scale else {*settings}
    if unknown := next((name for name in given if name not in names), None):
        raise ConfigError(f"target: {unknown_key(unknown, sorted(names))}")
    of = {name: number(text, name) for name, text in given.items()}
    values: Values = {name: int(v) if v == int(v) else v for name, v in of.items()}
    values |= {name: scale[-1][name] for name in (scale[0] if scale else {}) if name not in values}
    rest = {name: value for name, value in settings.items() if name not in values}
    floors, units = Sizes(), dict[str, int]()
    for name, whole in values.items():
        points = [point[name] for point in scale if name in point]
        if points and whole < min(points):
            raise ConfigError(
                f"target: {name} {whole:g} is below the study's smallest, {min(points):g}, and proxies are "
                "smaller than the target: give a larger one, or smaller ones to the study"
            )
        floors[name] = float(min(points)) if points else max(1.0, whole / _SHORTEST)
        if isinstance(whole, int) and kind_of(name) in ("width", "batch size"):
            units[name] = reduce(math.gcd, [int(p) for p in points], whole) or 1
    both = {"steps", "batch"} <= {*values, *rest}
    if both and "steps" in values:
        least = floors.pop("steps")
        floors["tokens"] = least * floors.get("batch", float({**values, **rest}["batch"]))
    return Goal(values, (), floors, units=units, settings=rest, is_continued=is_continued)


def goal_of(given: Mapping[str, str], base: Any, vocab_size: int) -> Goal:
    """Return the goal of a plan: of our networks (Sweep, Trial), of a study, or of a transformer (None)."""
    given, config = {name: text for name, text in given.items() if name != "config"}, given.get("config", "")
    if isinstance(base, Sweep | Trial):
        goal = _of_ours(given, base.base if isinstance(base, Sweep) else base, vocab_size)
    elif base is None:
        goal = _of_a_transformer(given, config)
    else:
        goal = _of_a_study(given, base.points, base.settings, base.continued == "steps")
        goal = replace(goal, counts=read_counts(config)) if config else goal
    whole = replace(goal, shrinks=tuple(goal.floors)).sizes(goal.values)
    return replace(goal, shrinks=tuple(name for name in whole if whole[name] >= 2 * goal.floors[name]))
