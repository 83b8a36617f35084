"""Best learning rates of other people's sweeps, by the analysis that our own sweeps get.

    python scripts/public_tables.py                    # rows in results/public/rows, and our own sweeps
    python scripts/public_tables.py --tables FOLDER    # also the tables that are not copied here

results/public gets a row for each sweep with its optima (sweeps.csv), exponents pooled over sources
(pooled.csv), a figure and a page. FOLDER holds clones of github.com/step-law/steplaw,
fabian-sp/lr-scheduling and TatianaUshakova/batch-size-lr-scaling, in folders of these names; without one its
rows of sweeps.csv are kept.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from public_sources import SOURCES, Source, Sweep
from scipy import stats

from mup_tpu.analysis import Columns, Reading, RunTable, analyze, check_table, load_table
from mup_tpu.analysis.optimum import Optimum, Status
from mup_tpu.analysis.transfer import tolerance
from mup_tpu.analysis.trend import Pace, Priors, Trend, claims, kind_of
from mup_tpu.analysis.valley import Valley
from mup_tpu.analysis.verdict import Question, take_looks
from mup_tpu.errors import MupTpuError
from mup_tpu.plots.style import raised
from mup_tpu.store import load_runs
from mup_tpu.words import names

PLACE = Path("results/public")
ORDER = (
    "width",
    "depth",
    "parameters",
    "active parameters (MoE)",
    "batch size",
    "tokens",
    "compute",
)


_GROWING = {
    "params": "parameters",
    "steps": "tokens",
    "steps_planned": "tokens",
    "batch_size": "batch size",
    "flops": "compute",
}
"""Ways of growing by column; a column that is not here is its own name. Steps are at a fixed batch."""


def main(tables: Path | None = None, results: Path = Path("results")) -> None:
    """Analyse all sweeps, pool their exponents, and write table, figure and page.

    Args:
        tables: Folder of clones.
        results: Folder of our own sweeps.
    """
    before = pd.read_csv(PLACE / "sweeps.csv") if (PLACE / "sweeps.csv").exists() else pd.DataFrame()
    found = [row for name, source in SOURCES.items() for row in _of_source(name, source, tables, before)]
    sweeps = pd.DataFrame([*found, *_ours(results)])
    sweeps.to_csv(PLACE / "sweeps.csv", index=False, float_format="%.4g")
    sweeps = pd.read_csv(PLACE / "sweeps.csv")  # the page follows from the stored numbers
    pooled = pool(sweeps)
    pooled.to_csv(PLACE / "pooled.csv", index=False, float_format="%.4g")
    draw(pooled, sweeps)
    (PLACE / "README.md").write_text(page(sweeps, pooled), encoding="utf-8")


def _of_source(
    name: str, source: Source, tables: Path | None, before: pd.DataFrame
) -> Iterator[dict[str, object]]:
    """Rows of a source: analysed from its copied table or its clone, else those of before."""
    clone = tables / source.repository.partition("/")[2] if tables else None
    if source.sweeps is None:
        table = load_table(PLACE / "rows" / f"{name}.csv", Reading(source.columns))
        kind = _GROWING.get(table.columns.scale, table.columns.scale)
        rows = list(_rows(table, source.repository, name, kind))
    elif clone and clone.exists():
        rows = [row for sweep in source.sweeps(clone) for row in _of_sweep(sweep, source.repository)]
    else:
        print(f"{source.repository}: no clone, earlier rows are kept")
        rows = before[before["source"] == source.repository].to_dict("records")
    for row in rows:
        if source.rule and source.sweeps is None and len(rows) > 1:  # the table compares sizes
            row["sweep"] = f"{name}, {row['rule']}"
        yield row | ({"rule": source.rule} if source.rule else {})


def _of_sweep(sweep: Sweep, repository: str) -> Iterator[dict[str, object]]:
    try:
        table = check_table(sweep.runs, Reading(Columns(scale=sweep.scale)))
    except MupTpuError as error:
        print(f"{repository}, {sweep.name} left out: {error}")
        return
    yield from _rows(table, repository, sweep.name, sweep.growing)


def _ours(results: Path) -> Iterator[dict[str, object]]:
    for header in sorted(results.glob("*/store.json")):
        try:
            table = load_table(header.parent)
        except MupTpuError:  # a search, say
            continue
        if table.columns.hyperparameter == "lr":
            runs = load_runs(header.parent)
            update_rule = str(runs["optimizer"].iloc[0]) if "optimizer" in runs else "adamw"
            scale = table.columns.scale
            kind = _GROWING.get(scale, scale.replace("num_", "number of ").replace("_", " "))
            for row in _rows(table, "ours", header.parent.name, kind):
                by = "" if update_rule == "adamw" else f", {names.rule_name(update_rule, 'optimizer')}"
                yield row | {"rule": f"{row['rule']}{by}"}


def _rows(table: RunTable, source: str, sweep: str, kind: str) -> Iterator[dict[str, object]]:
    """A row for each rule of a sweep."""
    scales, is_runs = sorted(table.runs["scale"].unique()), table.columns.loss != ""
    alone = {} if is_runs else {result.compared: result for result in analyze(table).results}
    for compared, runs in table.runs.groupby("compared"):
        if is_runs:
            *_, look = take_looks(runs, Question.of(table, tolerance(table, [])))
            optima = [e.optimum for e in look.evidence.estimates]
            drift, regret, decision = look.evidence.drift, look.evidence.headline, look.decision
            noise = look.evidence.noise.sigma
            valley = next((e.valley for e in reversed(look.evidence.estimates)
                           if e.valley is not None and e.optimum.is_bracketed), None)  # fmt: skip
        else:
            optima, drift, regret = [*alone[compared].optima], alone[compared].drift, None
            decision = alone[compared].verdict.decision
            noise, valley = math.nan, None
        known = [o for o in optima if o.is_bracketed and o.status != Status.FLAT]
        yield {
            "source": source,
            "sweep": sweep,
            "growing": kind,
            "rule": names.rule_name(str(compared), table.columns.parametrization),
            "from": scales[0],
            "to": scales[-1],
            "runs": len(runs),
            "alpha": drift.alpha,
            "low": drift.low,
            "high": drift.high,
            "regret": regret.value if regret else math.nan,
            "regret_low": regret.low if regret else math.nan,
            "regret_high": regret.high if regret else math.nan,
            "verdict": decision,
            "kind": kind_of(table.columns.scale),
            "claimed": claims(str(compared), kind_of(table.columns.scale)),
            "late": _broke_late(known),
            "curvature": np.median(valley.curvature_R) if valley else math.nan,
            "steeper": _steeper(valley) if valley else math.nan,
            "noise": noise,
            "optima": "; ".join(f"{o.scale:.6g} {o.mean:.4f} {o.se:.4f}" for o in known),
            "losses": "; ".join(f"{o.scale:.6g} {o.loss:.6g}" for o in optima if is_runs and o.is_bracketed),
        }


def _steeper(valley: Valley) -> float:
    """Logarithm of the rise an octave above the optimum over that an octave below."""
    one_R = np.ones(len(valley.x_R))
    return float(np.median(np.log(valley.rise(one_R) / valley.rise(-one_R))))


def _broke_late(known: list[Optimum]) -> bool | None:
    """Whether the last optimum leaves the 95 % of a constant slope through those before; None below four."""
    if len(known) < 4:
        return None
    scales, x_S, error_S = np.array([(o.scale, o.mean, o.se) for o in known]).T
    straight = Priors(0.0, 0.1, moving=Pace(1.0, 1e-4), breaks=0.0)
    expected = Trend(scales[:-1], x_S[:-1], error_S[:-1], (straight,)).optimum(scales[-1])
    expected = replace(expected, deviation_K=np.hypot(expected.deviation_K, error_S[-1]))
    return bool(x_S[-1] < expected.quantile(0.025) or expected.quantile(0.975) < x_S[-1])


def known_optima(written: object) -> np.ndarray:
    """Scale, log2 of the optimum and its error, a row each, as sweeps.csv has them."""
    rows = [one.split() for one in str(written).split("; ")] if isinstance(written, str) else []
    return np.array(rows, float).reshape(-1, 3)


_DECISIONS = {"held": "TRANSFERS", "free": "MOVES AT NO COST", "drifted": "DRIFTS", "open": "OPEN"}


def pool(sweeps: pd.DataFrame) -> pd.DataFrame:
    """The atlas: α of each rule along each way of growing, its verdicts, late breaks and misses.

    α has random effects over sweeps, then over sources.

    The variance between is DerSimonian and Laird's (1986), and the interval over sources Hartung and Knapp's
    (2001), which with two sources is wide, as it should be. One source alone keeps its own interval.
    """
    rows = []
    known = sweeps[np.isfinite(sweeps["high"] - sweeps["low"])]
    for (kind, rule), group in known.groupby(["growing", "rule"], sort=False):
        of_sources = [_pooled(*_estimates(part)) for _, part in group.groupby("source")]
        mean, error, between = of_sources[0]
        half = stats.norm.ppf(0.975) * error
        if len(of_sources) > 1:
            mean, error, between = _pooled(*np.array([found[:2] for found in of_sources]).T)
            half = stats.t.ppf(0.975, len(of_sources) - 1) * error
        verdicts, late = group["verdict"].value_counts(), group["late"].dropna().astype(bool)
        x = [known_optima(written)[:, 1] for written in group["optima"]]
        moved = [abs(float(x_S[-1] - x_S[0])) for x_S in x if len(x_S) > 1]
        rows.append(
            {"growing": kind, "rule": rule, "sources": ", ".join(sorted(set(group["source"]))),
             "sweeps": len(group), "alpha": mean, "low": mean - half, "high": mean + half, "between": between,
             **{name: verdicts.get(decision, 0) for name, decision in _DECISIONS.items()},
             "late": late.sum(), "of": len(late), "octaves": np.median(moved) if moved else math.nan,
             "regret": group["regret"].median()}
        )  # fmt: skip
    found = pd.DataFrame(rows)
    place = found["growing"].map({kind: number for number, kind in enumerate(ORDER)})
    return found.assign(place=place).sort_values(["place", "sweeps"], ascending=[True, False], kind="stable",
                                                 ignore_index=True).drop(columns="place")  # fmt: skip


def _estimates(part: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Exponents and their standard errors, from intervals of 95 %."""
    errors = (part["high"] - part["low"]).to_numpy() / (2 * stats.norm.ppf(0.975))
    return part["alpha"].to_numpy(), np.maximum(errors, 1e-3)


def _pooled(values: np.ndarray, errors: np.ndarray) -> tuple[float, float, float]:
    """Mean, its standard error, and the standard deviation between."""
    if len(values) == 1:
        return values[0], errors[0], math.nan
    weights, freedom = errors**-2.0, len(values) - 1
    q = float((weights * (values - np.average(values, weights=weights)) ** 2).sum())
    tau2 = max(0.0, (q - freedom) / (weights.sum() - (weights**2).sum() / weights.sum()))
    weights = 1 / (errors**2 + tau2)
    mean = float(np.average(values, weights=weights))
    spread = float((weights * (values - mean) ** 2).sum() / (freedom * weights.sum()))
    return mean, math.sqrt(max(spread, 1 / weights.sum())), math.sqrt(tau2)


def draw(pooled: pd.DataFrame, sweeps: pd.DataFrame) -> None:
    """α of each rule along each way of growing, pooled, above the sweeps that it comes from."""
    kept = pooled[pooled["high"] - pooled["low"] < 4].iloc[::-1].reset_index(drop=True)
    figure, axes = plt.subplots(figsize=(7.2, 0.32 * len(kept) + 1.1), layout="constrained")
    for y, row in kept.iterrows():
        part = sweeps[(sweeps["growing"] == row["growing"]) & (sweeps["rule"] == row["rule"])]
        for is_ours, marker, colour in ((False, "o", "#0072B2"), (True, "s", "#E69F00")):
            shown = part[(part["source"] == "ours") == is_ours]
            axes.plot(
                shown["alpha"], [y] * len(shown), marker, color=colour, alpha=0.35, markersize=4, zorder=1
            )
        axes.plot([row["low"], row["high"]], [y, y], color="black", linewidth=2, zorder=2)
        axes.plot(row["alpha"], y, "D", color="black", markersize=5, zorder=3)
    labels = [raised(f"{row['growing']}: {row['rule']} ({row['sweeps']})") for _, row in kept.iterrows()]
    axes.set_yticks(range(len(kept)), labels, fontsize=8)
    axes.axvline(0, color="0.6", linewidth=1, zorder=0)
    for y in range(1, len(kept)):
        if kept["growing"][y] != kept["growing"][y - 1]:
            axes.axhline(y - 0.5, color="0.85", linewidth=0.8, zorder=0)
    axes.set_ylim(-0.7, len(kept) - 0.3)
    axes.set_xlim(-2, 1.2)
    axes.set_xlabel(r"α: best learning rate ∝ scale$^{\alpha}$ (95 % of the mean)")
    for marker, colour, label in (("o", "#0072B2", "a sweep of others"), ("s", "#E69F00", "a sweep of ours"),
                                  ("D", "black", "mean, random effects")):  # fmt: skip
        axes.plot([], [], marker, color=colour, label=label, markersize=5)
    axes.legend(loc="lower left", fontsize=8)
    figure.savefig(PLACE / "alphas.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def page(sweeps: pd.DataFrame, pooled: pd.DataFrame) -> str:
    """The page of results/public."""
    parts = [_TOP, _atlas(pooled), _findings(sweeps, pooled)]
    parts.append(_SOURCES + "".join(_item(name, source) for name, source in SOURCES.items()))
    rows, counts = [], []
    for name, source in SOURCES.items():
        own = sweeps[sweeps["source"] == source.repository]
        if source.sweeps is None:
            rows.append(own[own["sweep"].str.split(", ").str[0] == name].assign(table=own["sweep"]))
        elif len(own) <= 4:
            rows.append(own.assign(table=name, rule=own["rule"] + ", " + own["sweep"]))
        else:
            counts.append(own.assign(table=name))
    few = pd.concat(rows)
    parts.append(_table(few, ["table", "rule"], "verdict"))
    many = pd.concat(counts).groupby(["table", "growing"])["verdict"].value_counts().unstack(fill_value=0)
    cells = [[*place, *row] for place, row in zip(many.index, many.to_numpy(), strict=True)]
    parts.append(
        "Verdicts of the tables with many sweeps:\n\n" + _markdown(["table", "growing", *many], cells)
    )
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _atlas(pooled: pd.DataFrame) -> str:
    """A row for each rule and way of growing."""
    headings = ["growing", "rule", "sweeps", "sources", "α (95 %)", "held, moved at no cost, drifted, open",
                "broke late",
                "missed: octaves", "nat"]  # fmt: skip
    cells = []
    for row in pooled.to_dict("records"):
        octaves, nat = (
            f"{row[name]:.{digits}f}" if math.isfinite(row[name]) else "–"
            for name, digits in (("octaves", 1), ("regret", 3))
        )
        late = f"{row['late']} of {row['of']}" if row["of"] else "–"
        decisions = ", ".join(str(row[name]) for name in _DECISIONS)
        labels = [row[name] for name in ("growing", "rule", "sweeps", "sources")]
        cells.append([*labels, _exponent(row), decisions, late, octaves, nat])
    return _markdown(headings, cells)


def _item(name: str, source: Source) -> str:
    """A source as an item of a list: its place, the options that read it, and its authors' claim."""
    options = f", `{_options(source).strip()}`" if _options(source) else ""
    repository = f"[{source.repository}](https://github.com/{source.repository})"
    text = f"- **{name}**{options}: `{source.path}` of {repository} ({source.commit}). {source.claim}."
    wrapped = textwrap.fill(
        f"{text} {source.ours}", 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return wrapped + "\n"


def _options(source: Source) -> str:
    """Options of the analysis that the command line does not find by itself."""
    along = "".join(f" --columns along={column}" for column in source.columns.along)
    scale, compared = source.columns.scale, source.columns.parametrization
    is_named = compared != Columns().parametrization
    named = f" --scale {scale}" if is_named or scale in ("steps", "batch_size", "flops") else ""
    return along + named + (f" --compare {compared}" if is_named else "")


def _findings(sweeps: pd.DataFrame, pooled: pd.DataFrame) -> str:
    """Findings of the pooled exponents, as a list."""

    def of(kind: str, rule: str, source: str = "") -> str:
        found = pool(sweeps[sweeps["source"].str.contains(source)]) if source else pooled
        return _exponent(found[(found["growing"] == kind) & (found["rule"] == rule)].iloc[0])

    def falls(rule: str) -> str:
        row = sweeps[(sweeps["sweep"] == "hyperball_width") & (sweeps["rule"] == rule)].iloc[0]
        return f"{(row['to'] / row['from']) ** -row['alpha']:.1f}"

    late = pooled.groupby("growing", sort=False)[["late", "of"]].sum()
    breaks = "; ".join(f"{kind} {row['late']} of {row['of']}" for kind, row in late.iterrows() if row["of"])
    return (
        f"- **Late breaks**: {breaks}.\n"
        "  A slope along the batch size saturates; elsewhere few break more than chance would.\n"
        f"- **Tokens, at fixed size and batch.** Step Law's rate stays,\n  {of('tokens', 'SP', 'steplaw')}; "
        "their law's 0.307 is along a batch that grows too. Over longer\n  spans Muon's and MuonH's fall; "
        "AdamH's is open.\n- **Batch, at fixed tokens.** It rises, by less than a root, in both sources:\n  "
        f"{of('batch size', 'SP', 'steplaw')} and {of('batch size', 'SP', 'martin-marek')}.\n- **Parameters, "
        "tokens and batch together**, Qwen3 of 130 M to 1.2 B: AdamH's and MuonH's fall,\n  within intervals "
        "that hold 0.\n- **Depth**, 4 layers to 512: Adam's falls, Muon's most; intervals of AdamH and MuonH "
        "hold 0.\n- **Hyperball**, without a factor. From width 128 to 2048 the best rate falls\n  "
        f"{falls('AdamH')} times for AdamH and {falls('MuonH')} for MuonH (the authors say 1.4), within\n  "
        f"intervals that hold 0; {falls('Adam')} times for Adam and {falls('Muon')} for Muon.\n"
    )


_TOP = """\
# Atlas of learning-rate sweeps
How does the best learning rate move as a model or its training grows, under which rule, and how far would a
small run have missed? Public tables and our own sweeps, analysed alike: along the width μP's best rate stays,
SP's falls.

![Exponents by rule and way of growing](alphas.png)

- **α**: best learning rate ∝ scale^α. Sweeps of one source are pooled first, then sources (random effects;
  DerSimonian and Laird 1986, intervals of Hartung and Knapp 2001): no law, as sources are no random sample.
- **Held, moved at no cost, drifted, open**: sweeps that TRANSFER, MOVE AT NO COST, DRIFT, or are OPEN.
- **Broke late**: of the sweeps with four known optima or more, those whose last one leaves the 95 % interval
  of a constant slope through the others. One in twenty would by chance.
- **Missed**: distance from the smallest scale's optimum to the largest's, octaves, and its cost at the
  largest scale, nat: medians.

`python scripts/public_tables.py --tables FOLDER` makes this page, [sweeps.csv](sweeps.csv) with all optima,
valleys and noises, and [pooled.csv](pooled.csv) in minutes of one core; the priors of `predict` and
`plan` are [chosen from them](../../benchmarks/prediction.md). Repositories are under MIT, Apache 2.0
(marin), BSD (Megatron-LM) or no licence (Gemstone).
"""
_SOURCES = """\
## Tables of others
With their authors' claims. One command reads each, with the options after its name; cooldown_steps,
one_step and step_law need clones:
```bash
mup-tpu analyze results/public/rows/mup_mlp.csv
```

"""


def _table(rows: pd.DataFrame, names: list[str], last: str = "") -> str:
    cells = []
    for row in rows.to_dict("records"):
        known = row["high"] - row["low"] < 4
        alpha = _exponent(row) if known else "not known"
        first = [f"{row[n]:,g}" if isinstance(row[n], int | float) else str(row[n]) for n in names]
        cells.append([*first, alpha, *([row[last]] if last else [])])
    return _markdown([*names, "α (95 %)", *([last] if last else [])], cells)


def _exponent(row: Mapping[str, float] | pd.Series) -> str:
    alpha, low, high = (f"{round(row[name], 2) + 0.0:.2f}" for name in ("alpha", "low", "high"))  # not -0.00
    return f"{alpha} ({low} to {high})"


def _markdown(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


if __name__ == "__main__":
    tyro.cli(main)
