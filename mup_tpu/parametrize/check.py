"""The linter of a module as it is trained, and the coordinate check of rules applied to it.

Yang et al. 2022 (Tensor Programs V), appendix D.1: modules of several widths train a few steps on one batch.
`measure` says what is measured, `diagnosis` what follows; `mup_tpu.plots.coordinate_check_figure` draws it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import nn

from mup_tpu.analysis.diagnosis import (
    LINEARIZATION,
    SIZES,
    Diagnosis,
    Exponent,
    Finding,
    GrownParameter,
    Mend,
    laziness,
    pooled,
    pooled_name,
    tried,
)
from mup_tpu.errors import ConfigError, first_line
from mup_tpu.parametrize.measure import Loss, Progress, Trained, TrainedModule, measure_sizes
from mup_tpu.parametrize.module import FactorTable
from mup_tpu.parametrize.roles import (
    Build,
    outputs_first,
    parameters_of,
    require_function,
    role_of,
    unwrapped,
)
from mup_tpu.parametrize.rules import parametrize
from mup_tpu.rules.parametrization import infer_infshapes

_QUIET_S = 10.0  # seconds between two lines of progress of a check that is called from Python


@dataclass(frozen=True)
class LintReport:
    """Verdict on every parameter of a module."""

    findings: tuple[Finding, ...]
    """The main cause first; those without a cause last."""
    parameters: tuple[GrownParameter, ...] = field(repr=False)
    fits: Mapping[tuple[str, str, int], Exponent] = field(repr=False)
    """Exponents by (layer, quantity, step)."""
    measured: pd.DataFrame = field(repr=False)
    scale: str = "width"

    @property
    def causes(self) -> list[str]:
        return list(dict.fromkeys(f.cause for f in self.findings if f.cause))

    @property
    def passes(self) -> bool:
        return not any(f.is_wrong for f in self.findings) and not self.unknown

    @property
    def unknown(self) -> list[Finding]:
        """Findings of parameters that leave the check without an answer: of matrices, or of all."""
        unknown = [f for f in self.findings if f.verdict == "unknown"]
        judged = [f for f in self.findings if f.verdict not in ("unknown", "not judged")]
        matrices = {p.name for p in self.parameters if p.inputs_grow and p.outputs_grow}
        return [f for f in unknown if not judged or (f.cause and f.name in matrices)]

    @property
    def sentence(self) -> str:
        wrong = [f for f in self.findings if f.is_wrong]
        wrong = [f for f in wrong if f.cause] or wrong
        if not wrong and self.unknown:
            return f"not known: {_line(self.unknown)}"
        if not wrong:
            return (
                f"no layer grows with {self.scale}, and none dies; if a large model diverges all the same, "
                "look at the base's learning rate and warm-up, at depth, and at what a few steps do not show"
            )
        others = [cause for cause in self.causes[1:] if any(f.cause == cause for f in wrong)]
        first = [f for f in wrong if f.cause == wrong[0].cause]
        return _line(first) + (f"; also: {', '.join(others)}" if others else "")

    @property
    def sizes(self) -> pd.DataFrame:
        # Sizes of layers by short names, for `mup_tpu.plots.coordinate_check_figure`
        sizes = self.measured[self.measured["quantity"].isin((*SIZES, LINEARIZATION))]
        return sizes.assign(layer=sizes["layer"].map(_labels(list(dict.fromkeys(sizes["layer"])))))

    def table(self) -> FactorTable:
        """Return a row per parameter: shapes, exponents of settings and effect, verdict and cause."""
        verdicts = {f.name: f for f in reversed(self.findings)}
        rows = []
        for p in self.parameters:
            row: dict[str, Any] = {"parameter": p.name, "role": p.role, "shape": p.shape, "wide": p.wide}
            for quantity in ("init", "learning rate", "decay", "gradient", "effect"):
                fits = (fit for (name, q, _), fit in self.fits.items() if (name, q) == (p.name, quantity))
                fit = next(fits, None)
                row[quantity] = round(fit.value, 2) if fit else math.nan
            finding = verdicts.get(p.name)
            row["verdict"], row["cause"] = (finding.verdict, finding.cause) if finding else ("unknown", "")
            rows.append(row)
        return FactorTable(pd.DataFrame(rows).set_index("parameter"))

    @property
    def lines(self) -> list[str]:
        """The sentence, then a line for each further cause."""
        # Vectors without a gradient or a growing axis need no word beside the table.
        shown = [f for f in self.findings if f.cause and (f.is_wrong or f in self.unknown)]
        causes = [f"- {_line([f for f in shown if f.cause == cause])}" for cause in self.causes]
        wrong = [line for line in causes if line != "- "]
        lazy = filter(None, [laziness(self.fits, self.scale)])
        return [self.sentence, *wrong[1:], *lazy]

    def __str__(self) -> str:
        return "\n".join([*self.lines, f"exponents of the {self.scale}:", repr(self.table())])

    def to_dict(self) -> dict[str, Any]:
        table = self.table().reset_index().astype(object)
        return {
            "passes": self.passes,
            "sentence": self.sentence,
            "laziness": laziness(self.fits, self.scale),
            "causes": self.causes,
            "findings": [
                {key: value for key, value in vars(f).items() if key != "mends"} | {"remedy": f.remedy}
                for f in self.findings
                if f.cause
            ],
            "parameters": table.where(table.notna(), None).to_dict("records"),
        }


@dataclass(frozen=True)
class CoordinateCheck:
    """Measurements of a coordinate check of several rules, and its conclusions."""

    table: pd.DataFrame = field(repr=False)
    """Columns parametrization, that of the scale, seed, step (number of updates), layer, quantity
    ("activation", "update" since init, or along the depth "linearization") and rms. A layer is the end of a
    submodule's name with the numbers in it."""
    reports: Mapping[str, LintReport]
    """Report of each rule."""

    @classmethod
    def of(cls, reports: Mapping[str, LintReport]) -> CoordinateCheck:
        """Join the reports of several rules."""
        sizes = [report.sizes.assign(parametrization=rule) for rule, report in reports.items()]
        return cls(pd.concat(sizes, ignore_index=True), reports)

    @property
    def sentences(self) -> tuple[str, ...]:
        return tuple(f"{rule}: {report.sentence}" for rule, report in self.reports.items())

    def to_dict(self) -> dict[str, Any]:
        return {
            "passes": {rule: report.passes for rule, report in self.reports.items()},
            "scale": (scale := next(report.scale for report in self.reports.values())),
            "sizes": sorted(self.table[scale].unique().tolist()),
            "seeds": int(self.table["seed"].nunique()),
            "sentences": list(self.sentences),
            "rules": {rule: report.to_dict() for rule, report in self.reports.items()},
        }


def _line(findings: Sequence[Finding]) -> str:
    """Return one sentence about parameters of one cause: the first in full, the others by name."""
    if not findings:
        return ""
    names = list(dict.fromkeys(pooled_name(f.name) for f in findings[1:] if f.name != findings[0].name))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return str(findings[0]) + (f"; so too {', '.join(names[:3])}{more}" if names else "")


def lint(
    build: Callable[..., Any],
    batch: Any,
    loss: Loss,
    *,
    widths: Sequence[int] = (64, 128, 256, 512),
    scale: str = "width",
    lr: float = 2**-7,
    roles: Mapping[str, str] = {},
    steps: int = 4,
    seeds: int = 2,
    seconds: float = math.inf,
    progress: Progress | None = None,
) -> LintReport:
    """Check a module as it is trained, whoever scaled it: does each parameter follow μP?

    Args:
        build: function of the width. It returns the module as it is trained, or the module and its
            optimizers. A module alone gets AdamW with one learning rate, or MuAdamW after `set_base_shapes`.
        batch: batch for training and measuring, or a function that returns one.
        loss: function of a module and the batch; a scalar.
        widths: sizes, at least two; three octaves show an exponent well.
        scale: "width", or any parameter of `build` or `batch`: "depth", "heads", "experts", "batch_size",
            "sequence_length". Those of others are at their defaults. Beside width and depth only growth is a
            fault: averages over more tokens, heads or experts shrink rightly.
        lr: learning rate of a module without an optimizer.
        roles: roles of parameters, as in `parametrize`.
        steps: number of updates.
        seeds: number of seeds of the init, from 0.
        seconds: time after which no further width begins, once three are measured.
        progress: function of the present work and the share of all work that is done; by default a line on
            standard error every ten seconds.

    Raises:
        ConfigError: build or loss fails, or nothing grows with the width.
    """
    require_function(build)
    taken = inspect.signature(build).parameters
    if scale != "width" and scale not in {*taken, *_parameters(batch)}:
        raise ConfigError(
            f"neither build nor batch has a parameter {scale!r}; build has {', '.join(taken) or 'none'}"
        )
    return check_sizes(
        lambda size, seed: _trained(build, scale, lr, size), _batches(batch, scale), loss, widths, scale,
        roles=roles, steps=steps, seeds=seeds, seconds=seconds, progress=progress,
    )  # fmt: skip


def coord_check(
    build: Build,
    batch: Any,
    loss: Loss,
    *,
    widths: Sequence[int],
    lr: float,
    eps: float = 1e-8,
    rules: Sequence[str] = ("mup", "sp"),
    steps: int = 4,
    seeds: int = 2,
    seconds: float = math.inf,
    progress: Progress | None = None,
    **options: Any,
) -> CoordinateCheck:
    """Give a plain module each rule's factors by `parametrize`, and check it at several widths.

    The module has no dropout, which would count as change. `lr` (as in your training or somewhat more) and
    `eps` are those at the base, by default the least width. `rules` are keys of
    `mup_tpu.rules.parametrization.PARAMETRIZATIONS`, `options` others of `parametrize`, such as roles; the
    rest is as in `lint`.

    Raises:
        ConfigError: as `parametrize`, or a readout's module is never called.
    """
    if isinstance(rules, str) or "rule" in options:
        rule = options.get("rule", rules)
        raise ConfigError(f"coord_check compares a list of rules: give rules=[{rule!r}]")
    require_function(build)
    options = {"base_width": min(widths, default=1), **options}
    depth, required = options.get("depth"), dict[str, str]()

    def scaled_module(rule: str, width: int, seed: int) -> Trained:
        scaled = parametrize(build, width=width, rule=rule, **options)
        module = scaled.init_(build(width) if depth is None else build(width, depth))
        required.clear()
        for f in scaled.forward:
            if f.place == "input":
                required[f.module] = (
                    f"the readout {f.module!r} is not called as a module, so that its logits are not "
                    f"multiplied by {f.factor:g}; call it, or multiply them in your code and give "
                    f"roles={{{f.module!r}: 'by hand'}}"
                )
        return module, _optimizers(scaled.optimizer, scaled.param_groups(module, lr=lr, eps=eps))

    reports = {
        rule: check_sizes(
            functools.partial(scaled_module, rule), _batches(batch, "width"), loss, widths, "width",
            roles=options.get("roles", {}), steps=steps, seeds=seeds, seconds=seconds, progress=progress,
            required=required, rule=f"{rule}, ",
        )
        for rule in rules
    }  # fmt: skip
    return CoordinateCheck.of(reports)


def assert_mup(
    build: Callable[..., Any],
    batch: Any,
    loss: Loss,
    *,
    base_width: int | None = None,
    widths: Sequence[int] = (),
    **options: Any,
) -> LintReport:
    """Assert in a test that no parameter of a module grows or dies with width; return the report.

    With `base_width`, that of the tuning, a plain module gets μP's factors and options are those of
    `coord_check`; without, it is trained as `build` returns it, with options of `lint`. The widths are by
    default four, from the base width or 64.

    Raises:
        AssertionError: an effect of updates, an activation or attention logits grow or die with width.
    """
    widths = widths or [(base_width or 64) * 2**k for k in range(4)]
    if base_width is None:
        report = lint(build, batch, loss, widths=widths, **options)
    else:
        options = dict[str, Any](rules=("mup",), lr=2**-7) | options
        reports = coord_check(build, batch, loss, widths=widths, base_width=base_width, **options).reports
        report = next((r for r in reports.values() if not r.passes), [*reports.values()][0])
    if not report.passes:
        raise AssertionError(str(report))
    return report


def _optimizers(name: str, groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
    if not name.startswith("muon"):
        makers = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        if name not in makers:
            raise ConfigError(f"torch has no {name}: lint a build that returns its module and {name}")
        return [makers[name](groups)]
    adjust = "match_rms_adamw" if name.endswith("adamw") else "original"
    matrices = [group for group in groups if group["use_muon"]]
    rest = [group for group in groups if not group["use_muon"]]
    return [torch.optim.Muon(matrices, adjust_lr_fn=adjust), torch.optim.AdamW(rest)]


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters if inspect.isroutine(function) else {}


def _batches(batch: Any, scale: str) -> Callable[[int], Any]:
    """Return the batch of each size, from one or from a function that returns one."""
    if not inspect.isroutine(batch):
        return lambda size: batch
    names = _parameters(batch)
    is_required = any(p.default is p.empty for p in names.values())
    return lambda size: batch(**{scale: size}) if scale in names else batch(size) if is_required else batch()


def _trained(build: Callable[..., Any], scale: str, lr: float, size: int) -> Trained:
    """Return the module that build makes, and its optimizers: AdamW, or mup's, if it makes none."""
    names = inspect.signature(build).parameters
    try:
        # Where batch alone takes the scale, build has its defaults.
        built = build(**{scale: size}) if scale in names else build(size) if scale == "width" else build()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"build({size}) fails ({first_line(error)})") from error
    parts = built if isinstance(built, tuple) else (built,)
    flat = [part for of in parts for part in (of if isinstance(of, list | tuple) else [of])]
    if not isinstance(flat[0], nn.Module) or not all(hasattr(o, "param_groups") for o in flat[1:]):
        raise ConfigError(
            f"build({size}) returns {type(built).__name__}; it must return a torch.nn.Module, or one with "
            "its optimizers"
        )
    module, *optimizers = flat
    parameters = list(module.parameters())
    if not parameters:
        raise ConfigError(f"build({size}) returns a {type(module).__name__} without parameters")
    if any(nn.parameter.is_lazy(p) for p in parameters):
        raise ConfigError(
            f"build({size}) returns a module with lazy parameters; call it once on a batch in build, so that "
            "they have shapes"
        )
    if not optimizers and parameters and all(hasattr(p, "infshape") for p in parameters):
        import mup

        optimizers = [mup.MuAdamW(parameters, lr=lr)]
    return module, optimizers or [torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)]


def check_sizes(
    trained: Callable[[int, int], Trained],
    batch: Callable[[int], Any],
    loss: Loss,
    sizes: Sequence[Any],
    scale: str,
    *,
    roles: Mapping[str, str] = {},
    steps: int,
    seeds: int,
    seconds: float = math.inf,
    progress: Progress | None = None,
    required: Mapping[str, str] = {},
    rule: str = "",
) -> LintReport:
    """Train modules of all sizes, and diagnose what was measured.

    `trained` is a function of the size and the seed, `batch` of the size.
    """
    if len(set(sizes)) < 2:
        raise ConfigError(f"{scale}s {list(sizes)} are fewer than two, so that nothing can be seen to grow")
    if not callable(loss):
        raise ConfigError("loss must be a function of a module and the batch: loss(module, batch)")
    sizes = sorted(set(sizes))

    def fresh(size: int, seed: int = 0) -> Trained:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return trained(size, seed)

    def start(size: int, seeds: int = seeds, mends: Sequence[Mend] = ()) -> list[TrainedModule]:
        modules = [fresh(size, seed) for seed in range(seeds)]
        if len({id(module) for module, _ in modules}) < len(modules):
            raise ConfigError(
                f"build({size}) returns the same module twice; it must make a new one each time"
            )
        growth, by_block = size / sizes[0], scale == "depth"
        data = batch(size)
        return [TrainedModule(of, loss, data, required, mends, growth, by_block) for of in modules]

    said_at = time.monotonic()

    def say(doing: str, share: float) -> None:
        nonlocal said_at
        if time.monotonic() > said_at + _QUIET_S:
            said_at = time.monotonic()
            print(f"{doing}: {share:.0%}", file=sys.stderr, flush=True)

    table = measure_sizes(scale, sizes, start, steps, progress or say, seconds, rule)
    (small, optimizers), (large, _) = (fresh(table[scale].agg(end).item()) for end in ("min", "max"))
    parameters = _subjects(small, optimizers, large, roles, scale)
    if scale != "width":
        table = pooled(table)
    diagnosis = Diagnosis(table, parameters, scale)
    findings = diagnosis.findings()

    def measured(mends: Sequence[Mend]) -> list[Finding] | None:
        """Return the findings of a quick check with mends, of one seed."""
        with contextlib.suppress(ConfigError):
            # Three octaves show what a mend does; larger sizes cost most.
            few = sorted(table[scale].unique().tolist())[:4]
            quick = functools.partial(start, seeds=1, mends=mends)
            fewest = min(steps, diagnosis.steps)
            again = measure_sizes(scale, few, quick, fewest, progress or say, doing="trying causes, ")
            return Diagnosis(again, parameters, scale).findings()
        return None

    if scale == "width" and any(f.is_wrong for f in findings):
        findings = tried(findings, diagnosis.suspects(findings), measured)
    return LintReport(tuple(findings), tuple(parameters), diagnosis.fits, table, scale)


def _subjects(
    small: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    large: nn.Module,
    roles: Mapping[str, str],
    scale: str,
) -> list[GrownParameter]:
    """Return what shapes at two sizes and modules show about each parameter."""
    before, after = parameters_of(small), parameters_of(large)
    shared = [name for name in after if name in before and len(before[name].shape) == len(after[name].shape)]
    shapes = [{n: outputs_first(after[n], of[n].shape) for n in shared} for of in (before, after)]
    if scale == "width":
        if shapes[0] == shapes[1]:
            raise ConfigError(
                "the module has the same shapes at all widths; build must use the width that it gets"
            )
        axes = infer_infshapes(shapes[0], shapes[1], shapes[1])
    named = {unwrapped(name): p for name, p in small.named_parameters()}
    names = {id(p): name for name, p in named.items()}
    families = {  # an optimizer of accelerate wraps one of torch
        names[id(p)]: next(
            (f for f in ("sgd", "muon") if f in type(getattr(o, "optimizer", o)).__name__.lower()), "adam"
        )
        for o in optimizers
        for group in o.param_groups
        for p in group["params"]
        if id(p) in names
    }
    subjects: dict[str, GrownParameter] = {}
    for name in shared:
        grown = [a != b for a, b in zip(shapes[0][name], shapes[1][name], strict=True)]
        role = role_of(after[name], axes[name], roles) or "unknown" if scale == "width" else ""
        owners = after[name].owners
        tables = [o for o in owners if isinstance(o.module, nn.Embedding)]
        is_tied = len(owners) > len(tables) > 0 and role == "token_embedding"
        outputs_grow = bool(grown) and grown[0]
        inputs_grow = any(grown[1:])
        if any(grown) and role in ("token_embedding", "position_embedding", "norm", "bias"):
            outputs_grow, inputs_grow = True, False
        elif sum(grown) == 2:
            outputs_grow = inputs_grow = True  # stacked experts: the first axis is their number
        kind = pooled_name(name) if scale != "width" else name
        modules = tuple(o.name if scale == "width" else pooled_name(o.name) for o in owners)
        subject = GrownParameter(
            kind, role, before[name].shape, after[name].shape, inputs_grow, outputs_grow,
            families.get(name, "adam"), modules, is_tied, named[name].requires_grad,
            torch.finfo(named[name].dtype).bits < 32,
        )  # fmt: skip
        subjects.setdefault(kind, subject)
    return list(subjects.values())


def _labels(names: Sequence[str]) -> dict[str, str]:
    """Return short labels of submodules for legends: "mlp.c_proj 0" for "transformer.h.0.mlp.c_proj"."""
    parts = {name: [p for p in name.split(".") if not (p.isdecimal() or p == "*")] for name in names}
    labels: dict[str, str] = {}
    for name in names:
        numbers = "".join(f" {part}" for part in name.split(".") if part.isdecimal())
        words = parts[name] if any(parts[name]) else [name or "output"]
        alike = [other for other in {tuple(p) for p in parts.values()} if other and other != tuple(words)]
        sizes = range(1, len(words))
        unique = (i for i in sizes if all(p[-i:] != tuple(words[-i:]) for p in alike))
        labels[name] = ".".join(words[-next(unique, len(words)) :]) + numbers
    return labels if len(set(labels.values())) == len(labels) else {name: name for name in names}
