"""Sentences of reasons and notes, by their code. None ends in a full stop, so that they can be joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mup_tpu.analysis.ingest.table_columns import Columns, list_of
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import RunTable
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.config import on_one_line
from mup_tpu.config.columns import label, plural, write_scale
from mup_tpu.errors import given
from mup_tpu.words.names import amount, listed

_ORDINALS = {4: "a fourth", 5: "a fifth", 6: "a sixth", 7: "a seventh", 8: "an eighth"}


def because(reason: Reason, columns: Columns = Columns()) -> str:
    """Return the sentence of a reason or note, by the names of the table's columns."""
    values: dict[str, Any] = {**reason.values}
    values |= {n: because(v, columns) for n, v in values.items() if isinstance(v, Reason)}
    values |= {"scale": label(columns.scale), "tuned": label(columns.hyperparameter)}
    values["several"] = plural(columns.scale)
    for name in ("column", "tuned_column"):
        if name in values:
            values[name] = label(values[name])
    if "at" in values:
        values["at"] = write_scale(columns.scale, values["at"])
    if "scales" in values and isinstance(values["scales"], list):
        values["scales"] = listed([write_scale(columns.scale, scale) for scale in values["scales"]])
    sentence = _SENTENCES[reason.code]
    return sentence.format(**values) if isinstance(sentence, str) else sentence(values)


def notes(of: RunTable | TransferAnalysis) -> list[str]:
    return [because(note, of.columns) for note in of.notes]


def _states_left_out(values: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in values["counts"].items())
    left_out = f"{counts} runs left out, since they have no result"
    lost = next((s for s in values["counts"] if s.lower() in ("crashed", "failed", "failure", "fail")), "")
    return left_out + (f"; {given('states', f'{lost}=diverged')} if they diverged" if lost else "")


def _one(values: Mapping[str, Any], value: object) -> str:
    return f"{values['name']}={value}"


_SENTENCES: Mapping[str, str | Callable[[Mapping[str, Any]], str]] = MappingProxyType(
    {
        # Purposes of the next runs.
        "start": "start at the smallest scale",
        "extend grids": "no optimum inside the grid at {scale} {scales}: extend it there first",
        "extend grids and add a scale": "no optimum inside the grid at {scale} {scales}: extend it there, "
        "and add a {scale}, since a verdict needs {needed} and there are {known}",
        "few scales": "a verdict needs {needed} {several}, and there are {known}",
        "planned scale": "the verdict is open, and {scale} {at} is planned: take a first look at it",
        "source not run": "{scale} {at} was not run at the optimum of {scales}: its loss there is "
        "extrapolated",
        "one run": "the best value at {scale} {at} was run once and may have been lucky: run it again",
        "holes": "runs beside the optimum at {scale} {scales} diverged or are missing: run a value in "
        "between",
        "another scale": lambda v: (
            "seeds alone do not make the interval of α narrow enough: "
            + _ORDINALS.get(v["count"], f"the {v['count']}th")
            + f" {v['scale']} "
            + ("would settle the verdict" if v["settles"] else "is the next step")
        ),
        "wide interval": "the interval of {quantity} is too wide: runs beside the optimum at {scale} "
        "{scales} narrow it most",
        "wide regret": "the cost of the best values is known least at {scale} {at}: runs at {scale} {scales} "
        "tell most of it",
        # Ends of a sequence without a verdict.
        "looks used up": "{looks} looks were taken, the most for which the verdict's error rates were "
        "measured",
        "purchases used up": "{purchases} batches of runs were bought without a verdict",
        "no optimum in a wide grid": "the grid at {scale} {at} spans {octaves:.0f} octaves and holds no "
        "optimum",
        "over budget": lambda v: (
            f"a verdict is expected to cost {amount(v['costs'], v['cost'])} more, and "
            f"{amount(v['costs'], v['left'])} of the budget is left"
        ),
        "not allowed": "{purpose}, but {error}",
        # Why a law, a loss or a rate is unknown.
        "refused": "{error}",
        "few optima": "{known} scales have a known optimum, and {needed} are needed",
        "few on the way": "{known} of the sizes with a known optimum grow towards the target in all "
        "dimensions alike, and {needed} are needed",
        "loss not above 0": "the loss {loss:g} is not above 0",
        "loss interval too wide": "its 95 % interval is too wide ({low:.3g} to {high:.3g} nat)",
        "losses too alike": "the losses differ by {gain:.2%} and scatter by {scatter:.2%}, too little for a "
        "fit",
        "exponent may be 0": "the exponent {name} may be 0 (95 % {low:.2f} to {high:.2f})",
        "irreducible loss unknown": "the irreducible loss E is not determined (95 % {low:.2f} to {high:.2f} "
        "nat)",
        "law not identified": "{recipe}: the runs do not determine the law: {why}",
        "size from compute": "{name} are compute / 6 / the other size, since the table gives both",
        "sizes grow together": "tokens follow from parameters in all runs, so the law is of compute, 6·N·D",
        "best of rates": "at each size the best run over {name} is taken",
        "parameters unknown": "the table does not give the number of parameters of a run",
        "parameters differ": "runs of one scale differ in their number of parameters",
        "no prediction": "{compared}: no {tuned_column} predicted, since {known} of {scales} {several} have "
        "an optimum inside their grid, and {needed} are needed",
        # Why a folder is in no table of all sweeps.
        "a search": "a search",
        "one scale": "of one {column}",
        "one value": "of one {tuned_column} at each {column}",
        # What a plan assumes.
        "usual sweeps": lambda v: (
            f"{v['count']} stored and public sweeps along {v['kind'] or 'any scale'}"
            + (f", under rules that keep the optimum, such as {v['keeps']}" if v["keeps"] else "")
        ),
        "this sweep": "{name}, {compared}",
        "only rates": "{assumed}; {name} is along {column}, so only its rates are used",
        # Notes on a table, in the order of reading it.
        "losses in columns": lambda v: (
            f"columns {list_of(v['names'])} are read as losses, one column for each {v['column']}"
        ),
        "empty cells": "{count} empty cells left out: write inf where a run diverged",
        "curves in columns": "{count} columns are read as curves of {metric}, with the settings in their "
        "names",
        "settings in names": lambda v: (
            f"read from the names of the runs: {list_of(v['settings'])} (column "
            f"{on_one_line(v['name'])}, such as {on_one_line(v['example'])})"
        ),
        "columns guessed": lambda v: (
            "columns recognized by their names: "
            f"{', '.join(f'{name} ({meaning})' for name, meaning in v['meanings'].items())}; "
            f"to choose others: {', '.join(map(given, v['fields']))}"
        ),
        "column chosen": lambda v: (
            f"the {v['meaning']} is {on_one_line(v['name'])}, not "
            f"{list_of(v['others'])} ({given(v['field'])} chooses another)"
        ),
        "peak of a schedule": "the learning rate is the peak of the schedule that {name} logs, whose warm-up "
        "ends by step {step}",
        "plain from a logarithm": lambda v: f"{v['of']} is {v['base']}^{on_one_line(v['name'])}",
        "one size": "no column is known to be a scale, so all runs count as size 1; a model of size 2 is "
        "twice as large",
        "unit in a heading": lambda v: (
            f"values of {on_one_line(v['name'])} are multiplied by {v['factor']:g}"
        ),
        "summaries left out": lambda v: (
            f"{v['count']} rows left out that summarise others, with {v['name']} {', '.join(v['words'])}"
        ),
        "sentinels left out": "{count} runs with loss {values} left out: no run can end at such a loss, so "
        "it marks a failure",
        "ended early": "{count} runs ended before their peers (column {name}: {listed}, of {most}): they "
        "count as stopped, and are kept as +inf",
        "ended at odd steps": "{count} runs left out, since they did not end with their peers (column "
        "{name}: {listed}, not {most})",
        "optima with intervals": "the table has optima ({name}) with 95 % intervals ({low} to {high}) and "
        "no runs",
        "optima of a grid": "the table has optima ({name}) and no runs; each is known to one step of a grid "
        "of factor {factor:.3g}",
        "no losses": "the table has no losses",
        "errors behind ±": "numbers after ± in {name} are read as standard errors of its means",
        "errors in a column": "{name} is read as the standard error of {loss}",
        "errors from deviations": "the standard error of {loss} is {name} over the square root of {count}",
        "deviation without a count": "{name} is not used: its number of runs is needed, in a column n_seeds",
        "states left out": _states_left_out,
        "column not used": "{error}; the column is not used",
        "loss converted": "{name} is in {unit}, converted to nat per token: × {factor:.3g}",
        "bits per byte": lambda v: (
            f"{v['name']} is in bits per byte, and so are regrets and ε; {given('bytes_per_token')}, the "
            "bytes of text in a token, converts it to nat per token"
        ),
        "perplexity converted": "{name} is a perplexity, converted to nat per token by its logarithm",
        "unit unknown": "{name} may not be in nat per token: regrets and ε are in its unit",
        "maximized": "{name} is maximized: regrets and ε are in its unit",
        "epsilon by share": lambda v: (
            f"ε is {v['epsilon']:.3g} {v['unit']}, {v['share']:.0%} of the difference between the scales' "
            f"best values; {given('epsilon')} sets another"
        ),
        "confounded": lambda v: (
            f"{v['name']} changes with {v['scale']} ({v['pairs']}), so a drift may be of either; "
            f"{given('along', v['name'])} says that it is meant"
        ),
        "mixed": lambda v: (
            f"{v['name']} differs among the runs of one {v['scale']} ({v['listed']}): compare runs of one, "
            f"by {given('where', _one(v, v['first']))}"
            + (
                f"; if it is tuned too, {given('hyperparameter', v['tune'])} analyses both"
                if v["tune"]
                else ""
            )
        ),
        "refused by conditions": "{count} runs refused by {conditions}: they count as +inf, and bound an "
        "optimum under that constraint",
        "runs without a metric": "{count} runs left out, since none of their metrics has a value",
        "values merged": "{count} values within {octaves} octaves of another are merged with it",
        "repeats are seeds": "repeats of a cell are read as its seeds, since the table has no column of them",
        "duplicates dropped": "{count} identical duplicate rows dropped",
        "other last step": lambda v: (
            f"{len(v['runs'])} runs left out, since they do not end at step "
            f"{v['step']:g} as most do: {list_of(v['runs'])}; write inf as the last loss of a diverged run"
        ),
        "varies inside cells": lambda v: (
            f"{v['name']} varies inside cells ({', '.join(map(repr, v['listed'][:4]))}: "
            f"{given('parametrization', v['name'])} compares them, "
            f"{given('where', _one(v, v['listed'][0]))} takes one)"
        ),
        "runs stopped early": "{count} runs stopped early are kept, as +inf: they bound the optimum, and no "
        "fit uses their loss",
        "runs diverged": "diverged runs, kept as +inf: {count}",
        "blown up": lambda v: (
            f"runs that count as diverged: {v['count']}; their losses, {v['least']:.3g} and more, lie far "
            f"above those at the smallest values ({given('chance')} gives the loss of guessing)"
        ),
        "runs at 0": "{count} runs at {column} 0 left out: 0 has no logarithm",
        "unequal seeds": "unequal seeds: cells have {least} to {most} runs, so means come from a model with "
        "an effect of each seed",
        "rows of the folder's question": lambda v: (
            "rows that the results folder selects: "
            + ", ".join(condition.words for condition in v["conditions"])
        ),
        "scales not planned": "{scale} {scales} left out, since the sequence does not plan it",
        "sequence": "{name} numbers the {purchases} purchases of a sequence: its looks are counted, and it "
        "is assumed to have planned the {several} of the table",
        # Notes on an analysis.
        "rounded losses": "losses are rounded to {step:g}, so the noise is taken to be at least that large",
        "no replicates": "{compared}: one run in each cell, so intervals come from the residuals of the fits",
    }
)
