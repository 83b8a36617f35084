"""Stored sweeps as one table: the verdict of each rule along each way of growing, and its cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.load import load_table
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.regret import Regret
from mup_tpu.analysis.run_table import RunTable
from mup_tpu.analysis.scores import score
from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult, analyze
from mup_tpu.analysis.worth import Worth
from mup_tpu.config import columns
from mup_tpu.errors import MupTpuError, TableError
from mup_tpu.rules.optimizer import BATCH_RULES, DECAY_RULES, TOKEN_RULES
from mup_tpu.rules.parametrization import PARAMETRIZATIONS
from mup_tpu.store import is_search
from mup_tpu.store.predictions import FILE, load_predictions

_RULES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "parametrization": {name: rule.source for name, rule in PARAMETRIZATIONS.items()},
        "batch_rule": {name: rule.source for name, rule in BATCH_RULES.items()},
        "token_rule": {name: rule.source for name, rule in TOKEN_RULES.items()},
        "decay_rule": {name: rule.source for name, rule in DECAY_RULES.items()},
    }
)
"""Source of each rule, by the column that names it."""
_FIRST = "parametrization"
"""Compared column whose rows come first."""
_BEFORE = {"architecture": "gpt2", "optimizer": "adamw"}
"""Values of columns that the rows of the first releases lack."""


@dataclass(frozen=True)
class Ruling:
    """The verdict of one stored sweep on one rule."""

    sweep: str
    """Folder of the sweep."""
    columns: Columns
    smallest: float
    """Smallest scale that was run."""
    largest: float
    """Largest scale that was run."""
    rule: str
    source: str
    """Paper of the rule; "" if no rules are compared."""
    architecture: str
    update_rule: str
    alpha: float
    low: float
    high: float
    """Drift exponent, with a 95 % interval."""
    regret: Regret | None
    """Regret of the smallest scale's optimum at the largest; None if one of these optima is unknown."""
    decision: str
    looks: int
    """Looks of its sequence; 0 for a table with one look."""
    runs: int
    hours: float
    """Training time of its runs on one device (on CPUs, one thread); nan if unknown."""
    worth: Worth = Worth()

    @property
    def compares(self) -> str:
        """Column of the rule."""
        return self.columns.parametrization

    @property
    def is_no_power_law(self) -> bool:
        """Whether it DRIFTS by its regret alone, although α's interval holds 0."""
        return self.decision == "DRIFTS" and self.low <= 0 <= self.high and self.regret is not None

    @property
    def setting(self) -> tuple[str, str, str]:
        """Architecture, update rule and the tuned column."""
        return self.architecture, self.update_rule, self.columns.hyperparameter


Judged = dict[Path, tuple[RunTable, TransferAnalysis]]
"""Tables of sweeps and their analyses, by their folders."""


def rulings(folder: str | Path, judged: Judged | None = None) -> tuple[list[Ruling], dict[str, Reason]]:
    """Rulings of the sweeps below a folder, and the reason why each other folder is left out.

    Sweeps are added to `judged`, from which `held` takes them.

    Raises:
        TableError: there is no sweep.
    """
    found: list[Ruling] = []
    left_out: dict[str, Reason] = {}
    for header in sorted(Path(folder).glob("*/store.json")):
        path = header.parent
        if is_search(path):
            left_out[path.name] = Reason.of("a search")
            continue
        try:
            table = load_table(path)
            scale, tuned = table.columns.scale, table.columns.hyperparameter
            if table.runs["scale"].nunique() < 2:
                left_out[path.name] = Reason.of("one scale", column=scale)
                continue
            if table.runs.groupby("scale")["x"].nunique().max() < 2:
                left_out[path.name] = Reason.of("one value", column=scale, tuned_column=tuned)
                continue
            analysis = analyze(table)
            if judged is not None:
                judged[path] = table, analysis
        except MupTpuError as error:
            left_out[path.name] = Reason.of("refused", error=str(error))
            continue
        found += [_ruling(path.name, table, result) for result in analysis.results]
    if not found:
        raise TableError(f"{folder} has no folder with a sweep of several scales in it")
    return sorted(
        found,
        key=lambda r: (columns.label(r.columns.scale), r.compares != _FIRST, r.compares, r.rule, r.sweep),
    ), left_out


def held(folder: str | Path, judged: Judged | None = None) -> dict[str, list[bool]]:
    """Whether the interval of each kept prediction holds the optimum that came out.

    Args:
        folder: folder of results folders, at any depth; the answers are listed by its direct subfolders.
        judged: sweeps that are analysed already.
    """
    found: dict[str, list[bool]] = {}
    for file in sorted(Path(folder).glob(f"*/**/{FILE}")):
        try:
            table, analysis = (judged or {}).get(file.parent) or (load_table(file.parent), None)
            run = set(table.runs["scale"])
            kept = [p for p in load_predictions(file.parent) if p.scale in run and p.scale not in p.scales]
            inside = [s.is_inside for s in score(kept, analysis or analyze(table))] if kept else []
        except MupTpuError:
            continue
        if known := [one for one in inside if one is not None]:
            found.setdefault(file.relative_to(folder).parts[0], []).extend(known)
    return found


def _ruling(sweep: str, table: RunTable, result: TransferResult) -> Ruling:
    compared = table.columns.parametrization
    assert table.stored is not None, "read from a results folder"
    of_rule = stored = table.stored
    if compared in stored and stored[compared].astype(str).eq(result.compared).any():
        of_rule = stored[stored[compared].astype(str) == result.compared]

    def made_with(column: str) -> str:
        if column not in of_rule:  # a study of somebody's own training
            return "own"
        held = of_rule[column].fillna(_BEFORE[column])
        return ", ".join(sorted(map(str, held.unique())))

    return Ruling(
        sweep=sweep,
        columns=table.columns,
        smallest=result.optima[0].scale,
        largest=result.optima[-1].scale,
        rule=result.compared,
        source=_RULES.get(compared, {}).get(result.compared, ""),
        architecture=made_with("architecture"),
        update_rule=made_with("optimizer"),
        alpha=result.drift.alpha,
        low=result.drift.low,
        high=result.drift.high,
        regret=result.headline_regret,
        decision=result.verdict.decision,
        worth=result.worth,
        looks=result.sequence.looks[-1].number if result.sequence else 0,
        runs=len(of_rule),
        hours=float(of_rule["wall_time_s"].sum() / 3600) if "wall_time_s" in of_rule else math.nan,
    )
