"""Sentences of verdicts, reasons and predictions, as tables of data and text."""

import ast
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import Columns, analyze, check_table
from mup_tpu.analysis.design import Batch, Cell
from mup_tpu.analysis.drift import Drift
from mup_tpu.analysis.optimum import Optimum
from mup_tpu.analysis.prediction import ExpectedCost, Predictions, RulePrediction, Score
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import Cost
from mup_tpu.analysis.scaling_law import ExpectedLoss
from mup_tpu.analysis.verdict import Regret, Verdict
from mup_tpu.store.header import KeptPrediction
from mup_tpu.words import reasons, verdicts
from mup_tpu.words.names import amount, bound, exponent, listed, number, power
from mup_tpu.words.predictions import prediction, prediction_details
from mup_tpu.words.reasons import because
from mup_tpu.words.verdicts import commands, details, price, remedy, score_sentence, status, to_dict

ANALYSIS = Path(reasons.__file__).parents[1]


def test_every_reason_has_a_sentence_and_every_sentence_a_reason():
    nodes = (
        node
        for path in ANALYSIS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
    made = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "Reason.of"]
    assert {node.args[0].value for node in made} == set(reasons._SENTENCES)
    assert str(Reason.of("few scales", needed=3, known=2)) == "few scales (needed 3, known 2)"
    assert str(Reason.of("start")) == "start"


COSTS = Cost(2.0, 64**-2.0, "runs", "width", 64.0)


@pytest.mark.parametrize(
    ("code", "values", "sentence"),
    [
        ("extend grids", {"scales": [64.0, 128.0, 1e6]},
         "no optimum inside the grid at width 64, 128 and 1M: extend it there first"),
        ("few scales", {"needed": 3, "known": 2}, "a verdict needs 3 widths, and there are 2"),
        ("another scale", {"count": 4, "settles": True},
         "seeds alone do not make the interval of α narrow enough: a fourth width would settle the verdict"),
        ("another scale", {"count": 9, "settles": False},
         "seeds alone do not make the interval of α narrow enough: the 9th width is the next step"),
        ("over budget", {"costs": COSTS, "cost": 500.0, "left": 49.0},
         "a verdict is expected to cost 500 runs more, and 49 runs of the budget is left"),
        ("not allowed", {"purpose": Reason.of("start"), "error": "beta2 1 is not allowed"},
         "start at the smallest scale, but beta2 1 is not allowed"),
        ("losses too alike", {"gain": 0.0282, "scatter": 0.0235},
         "the losses differ by 2.82% and scatter by 2.35%, too little for a fit"),
        ("states left out", {"counts": {"failed": 2, "running": 1}},
         "2 failed, 1 running runs left out, since they have no result; states='failed=diverged' if they "
         "diverged"),
        ("usual sweeps", {"count": 0, "kind": "", "keeps": ""},
         "0 stored and public sweeps along any scale"),
        ("usual sweeps", {"count": 31, "kind": "width", "keeps": "mup"},
         "31 stored and public sweeps along width, under rules that keep the optimum, such as mup"),
        ("varies inside cells", {"name": "rule", "listed": ["a", "b"]},
         "rule varies inside cells ('a', 'b': parametrization='rule' compares them, where='rule=a' takes "
         "one)"),
        ("runs at 0", {"count": 3, "column": "lr"},
         "3 runs at learning rate 0 left out: 0 has no logarithm"),
    ],
)  # fmt: skip
def test_sentences_of_reasons(code, values, sentence):
    assert because(Reason.of(code, **values), Columns()) == sentence


KNOWN = {"value": 0.036, "low": 0.02, "high": 0.05, "relative": 0.1}


@pytest.mark.parametrize(
    ("decision", "look", "drift", "regret", "sentence"),
    [
        (
            "TRANSFERS", None, (0.02, -0.1, 0.14), "estimated",
            "best learning rate ∝ width^0.02 (95 % -0.10 to 0.14); the optimum of width 64 costs 0.036 nat "
            "at width 256 (95 % 0.020 to 0.050).",
        ),
        (
            "DRIFTS", 3, (-0.2, -0.6, 0.2), "at least",
            "best learning rate ∝ width^-0.20 (95 % -0.60 to 0.20), not a power law; the optimum of width 64 "
            "costs at least 0.036 nat at width 256 (95 % 0.020 to ∞).",
        ),
        (
            "OPEN", None, (1.09, -15.7, 17.9), "diverged",
            "may it be copied? best learning rate ∝ width^α with α not known; the optimum of width 64 "
            "diverges at width 256.",
        ),
        (
            "DRIFTS", None, (-0.001, -0.05, 0.05), "stopped early",
            "best learning rate ∝ width^0.00 (95 % -0.05 to 0.05), not a power law; the optimum of width 64 "
            "was stopped early at width 256, far behind the best.",
        ),
        (
            "DRIFTS", None, (0.4, 0.1, 0.7), "refused",
            "best learning rate ∝ width^0.40 (95 % 0.10 to 0.70); the optimum of width 64 does not meet the "
            "condition at width 256.",
        ),
        (
            "OPEN", None, (0.4, 0.1, 0.7), "not bracketed",
            "may it be copied? best learning rate ∝ width^0.40 (95 % 0.10 to 0.70); the regret at width 256 "
            "is unknown: its grid holds no optimum.",
        ),
        (
            "MOVES AT NO COST", None, (-0.23, -0.3, -0.15), "estimated",
            "best learning rate ∝ width^-0.23 (95 % -0.30 to -0.15) over these widths; the optimum of width "
            "64 costs 0.036 nat at width 256 (95 % 0.020 to 0.050).",
        ),
    ],
)  # fmt: skip
def test_sentences_of_verdicts(decision, look, drift, regret, sentence):
    high = math.inf if regret == "at least" else 0.05
    found = Regret(64, 256, **KNOWN | {"high": high}, expected=0.04, status=regret)
    known = Drift(*drift, 0.0, -8.0, (64.0, 128.0, 256.0), drift)
    text = verdicts._verdict("mup", Verdict(decision, look), 3, known, found, Columns())
    looks = f" after {look} of at most 8 looks" if look else ""
    assert text == f"mup: {decision}{looks}: {sentence}"


def test_too_few_optima_are_counted():
    drift = Drift(*[math.nan] * 5, (64.0, 128.0))
    text = verdicts._verdict("mup", Verdict("OPEN"), 4, drift, None, Columns(scale="depth"))
    assert text == "mup: OPEN: 2 of 4 depths have an optimum inside their grid, and 3 are needed."


FITTED = Optimum(64, "bracketed", -8, -8.2, -7.8, loss=2.5, best_x=-8, band_low=-9, band_high=-7, se=0.1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "bracketed"),
        ({"status": "at lower edge"}, "at or below 2^-8, the lower edge: extend the grid downwards"),
        ({"status": "at upper edge"}, "at or above 2^-8, the upper edge: extend the grid upwards"),
        ({"status": "no finite run"}, "unknown, since every run diverged: extend the grid downwards"),
        ({"status": "flat"},
         "flat, so a wide interval: from 2^-9 to 2^-7 the expected loss is within 0.01 nat of the best"),
        ({"missed_x": -7.0, "missed_by": 0.05},
         "bracketed; the fit lies 0.05 nat below the runs at 2^-7, more than their errors allow"),
        ({"missed_x": -7.0, "missed_by": -0.05, "status": "bracketed by divergence"},
         "bracketed by divergence; the fit lies 0.05 nat above the runs at 2^-7, more than their errors "
         "allow"),
    ],
)  # fmt: skip
def test_states_of_optima(changes, sentence):
    assert status(replace(FITTED, **changes)) == sentence


def batch(cells, to_verdict=math.nan, costs=COSTS):
    return Batch("mup", tuple(cells), Reason.of("start"), 25.0, to_verdict, 63.0, costs)


@pytest.mark.parametrize(
    ("to_verdict", "costs", "sentence"),
    [
        (
            math.inf, COSTS,
            "next batch: as dear as 25 runs at width 64; spent so far: 63 runs; total to a verdict: unknown; "
            "assumed: cost ∝ width^2.0",
        ),
        (
            7200.0, Cost(0.9, 1.0, "s", "width"),
            "next batch: 25 s; spent so far: 63 s; total to a verdict: about 2.0 h; measured: cost ∝ "
            "width^0.9",
        ),
        (math.nan, Cost(0.0, 1.0, "runs"), "next batch: 25 runs; spent so far: 63 runs"),
    ],
)  # fmt: skip
def test_prices_of_batches(to_verdict, costs, sentence):
    assert price(batch([], to_verdict, costs)) == sentence


OUR_RUNS = (
    "x.py --compare parametrization=mup --scale {0}=256 --num-seeds 3 --tune {1}=2^-13,2^-12",
    "x.py --compare parametrization=mup --scale {0}=512 --num-seeds 1 --tune {1}=2^-13.5",
)
THEIR_RUNS = (
    "add learning rate 2^-13 2^-12 at {0} 256, 3 seeds each", "add learning rate 2^-13.5 at {0} 512, 1 seed",
)  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "command", "lines"),
    [
        (Columns(), "x.py", [line.format("width", "learning_rate") for line in OUR_RUNS]),
        (Columns("depth", "init_std"), "x.py", [line.format("depth", "init_std") for line in OUR_RUNS]),
        (Columns("d_model"), "x.py", [line.format("d_model") for line in THEIR_RUNS]),
        (Columns(), None, [line.format("width") for line in THEIR_RUNS]),
    ],
)
def test_next_runs_are_commands_of_our_own_sweeps_and_else_sentences(columns, command, lines):
    cells = [Cell(256, -13, 2, 3), Cell(256, -12, 1, 3), Cell(512, -13.5, 1, 1)]
    assert list(commands(batch(cells), columns, command)) == lines


KEPT = KeptPrediction(
    "2026-01-02T00:00:00", 72, "f", (64.0, 128.0), "mup", "width", "lr", 512.0, -6.0, (-6.1, -5.9),
    (-6.5, -5.5), 0.001, (2.3, 2.2, 2.4),
)  # fmt: skip


@pytest.mark.parametrize(
    ("x", "loss", "ending"),
    [
        (-6.1, 2.31, "measured 2^-6.10 = 0.0146, inside the interval; loss predicted 2.300 nat (95 % 2.200 "
        "to 2.400); measured 2.310, inside the interval"),
        (-8.0, 2.5, "measured 2^-8.00 = 0.00391, outside the interval; loss predicted 2.300 nat (95 % 2.200 "
        "to 2.400); measured 2.500, outside the interval"),
        (math.nan, math.nan, "the optimum is not known"),
    ],
)  # fmt: skip
def test_scores_of_predictions(x, loss, ending):
    start = "μP: at width 512, predicted on 2026-01-02 from 72 runs: learning rate 2^-6.00 = 0.0156 (95 % "
    assert score_sentence(Score(KEPT, x, 0.01, loss), Columns()) == f"{start}0.011 to 0.0221); {ending}"
    unpredicted = Score(replace(KEPT, loss=None), -6.0, 0.01, 2.4)
    assert score_sentence(unpredicted, Columns()).endswith("; loss 2.400 nat, not predicted")
    bytes_ = Columns(unit="bpb", loss_name="val_bpb")
    assert score_sentence(unpredicted, bytes_).endswith("; val_bpb 2.400, not predicted")
    assert score_sentence(unpredicted, Columns(unit="MSE")).endswith("; loss 2.400 MSE, not predicted")


def runs(alpha=0.0, widths=(64, 128, 256)) -> pd.DataFrame:
    frame = pd.DataFrame(itertools.product(widths, range(-12, -3), range(2)), columns=["width", "lr", "seed"])
    octaves = np.log2(frame["width"] / 64)
    loss = 2.4 - 0.1 * octaves + 0.04 * (frame["lr"] + 8 - alpha * octaves) ** 2
    return frame.assign(lr=2.0 ** frame["lr"], loss=loss)


MADE = RulePrediction(
    "mup", "lr", "width=1024", 1024.0, {"width": 1024.0}, -8.0, (-8.1, -7.9), (-8.5, -7.5),
    ExpectedCost(0.002, 0.01), ExpectedLoss(2.0, 1.9, 2.1), reach=2.0, smallest=(64.0, -8.2),
    largest=(256.0, -8.1), staying=ExpectedCost(0.2, 0.5), following=ExpectedCost(0.003, 0.02),
    furthest=4.0, steady=0.0, steady_before=0.0, unclaimed=(-9.0, -7.0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {},
            [
                "expected cost over the best value there: 0.0020 nat (at most 0.0100)",
                "with the optimum 2^-8.20 = 0.0034, of width 64: 0.20 nat (at most 0.50); 2^-8.10 = 0.00364, "
                "of width 256: 0.0030 nat (at most 0.0200)",
                "expected loss 2.000 nat (95 % 1.900 to 2.100)",
            ],
        ),
        ({"bears": False, "furthest": 1.0}, ["extrapolated too far: beyond width 512 the expected cost "
        "exceeds 0.01 nat"]),
        (
            {"claimed": True, "steady": 0.912, "steady_before": 0.75, "sweeps": 31},
            [
                "μP claims that the optimum stays: probability 0.91, before the runs 0.75 (width under such "
                "rules, 31 sweeps); without the claim 95 % 0.00195 to 0.00781, 2.0 times as wide"
            ],
        ),
        ({"sweeps": 40}, ["prior: width, 40 sweeps"]),
        ({"bears": False, "furthest": 0.0}, ["extrapolated too far: at any distance the expected cost "
        "exceeds 0.01 nat"]),
    ],
)  # fmt: skip
def test_limits_and_costs_of_predictions(changes, lines):
    predictions = Predictions(analyze(check_table(runs())), (), (), {}, ())
    assert prediction_details(replace(MADE, **changes), predictions)[: len(lines)] == lines
    unknown = replace(MADE, loss=None, why_no_loss=Reason.of("few optima", known=2, needed=3))
    expected = "expected loss unknown: 2 scales have a known optimum, and 3 are needed"
    assert prediction_details(unknown, predictions)[-1] == expected


@pytest.mark.parametrize(
    ("changes", "at"),
    [
        ({}, "width 1024 (2 octaves beyond width 256)"),
        ({"scale": 512.0, "reach": 1.0}, "width 512 (1 octave beyond width 256)"),
        ({"scale": 128.0, "reach": -1.0}, "width 128 (between scales that were run)"),
        ({"scale": 32.0, "reach": -3.0}, "width 32 (1 octave below width 64)"),
        ({"target": "params=1e9"}, "params=1e9, width 1024 (2 octaves beyond width 256)"),
    ],
)
def test_sentences_of_predictions(changes, at):
    predictions = Predictions(analyze(check_table(runs())), (), (), {}, ())
    made = replace(MADE, sizes={"width": changes.get("scale", 1024.0)}, **changes)
    assert prediction(made, predictions) == (
        f"μP: learning rate 2^-8.00 = 0.00391 at {at}; 95 % 0.00276 to 0.00552, 50 % 0.00364 to 0.00419"
    )


def test_lines_below_a_verdict_begin_with_advice_and_name_the_next_runs():
    (settled,) = (analysis := analyze(check_table(runs()))).results
    lines = details(settled, analysis)
    assert re.match(
        r"use learning rate 2\^-8.0 = 0.0039\d*, the optimum of width 64, at width 256: ", lines[0]
    )
    assert not any(line.startswith("to settle it") for line in lines)
    assert "wider is better in 18 of 18 comparisons of final losses, and in 2 of 2 at the optima" in lines
    (drifting,) = (analysis := analyze(check_table(runs(-1.0)))).results
    assert "at width 256: the optimum there is 2^-10.0 = 0.00097" in details(drifting, analysis)[0]
    (few,) = (analysis := analyze(check_table(runs(widths=(64, 128))))).results
    settle, purpose, *_ = details(few, analysis)[1:]
    assert settle == f"to settle it: {remedy(few, analysis)}"
    assert purpose.startswith("a verdict needs 3 widths, and there are 2; next batch: as dear as ")
    values = to_dict(analysis)  # JSON has the sentences beside the numbers
    (result,) = values["results"]
    assert result["verdict"]["sentence"].startswith("all: OPEN: 2 of 2 widths")
    assert result["verdict"]["settle"] == remedy(few, analysis)
    assert result["next"]["reason"] == "a verdict needs 3 widths, and there are 2"
    assert result["optima"][0]["sentence"] == "bracketed" and "predictions" not in values
    ours = replace(analysis, table=replace(analysis.table, command="x.py"))
    assert remedy(few, ours).startswith("x.py ") and " && " not in remedy(few, ours)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(math.nan, 2), "-"),
        (number(-0.001, 2), "0.00"),
        (number(-math.inf, 2), "−∞"),
        (number(1.005, 1), "1.0"),
        (power(-5.53), "2^-5.53 = 0.0216"),
        (power(-0.001, ".1f"), "2^0.0 = 0.999"),
        (bound(math.inf), "∞"),
        (bound(-math.inf), "0"),
        (bound(-6.123), "2^-6.123"),
        (exponent(-0.001, -0.05, 0.05), "0.00 (-0.05 to 0.05)"),
        (exponent(0.0, -1.0, 1.0), "not known"),
        (amount(Cost(1.0, 1.0, "FLOP"), 1.5e6), "1.5e+06 FLOP"),
        (amount(Cost(1.0, 1.0, "s"), 90.0), "90 s"),
        (listed(["a"]), "a"),
        (listed(["a", "b", "c"]), "a, b and c"),
    ],
)
def test_numbers(text, expected):
    assert text == expected
