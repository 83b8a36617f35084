"""The figure of all sweeps shows each rule's exponent, interval and verdict, in the order of the table."""

import math

from mup_tpu import plots
from mup_tpu.analysis import Columns
from mup_tpu.analysis.referee import Comparison, Ruling
from mup_tpu.analysis.regret import Regret
from mup_tpu.words.referee import page


def ruling(**changes) -> Ruling:
    values = {
        "sweep": "a", "columns": Columns(), "smallest": 64, "largest": 256,
        "rule": "mup",
        "architecture": "gpt2", "update_rule": "adamw",
        "alone": True, "best_loss": 2.0, "alpha": 0.0, "low": -0.1, "high": 0.1,
        "regret": None, "decision": "TRANSFERS", "runs": 8, "hours": 0.1,
    }  # fmt: skip
    return Ruling(**(values | changes))


FOUND = [
    ruling(
        columns=Columns(scale="depth"), smallest=2, largest=8, rule="completep", alpha=0.3, low=-0.2,
        high=0.8, decision="INCONCLUSIVE",
    ),
    ruling(),
    ruling(
        rule="sp", architecture="llama", update_rule="muon", alpha=-0.9, low=-4, high=-0.7, decision="DRIFTS"
    ),
    ruling(rule="of_$mine$", alpha=math.nan, low=math.nan, high=math.nan, decision="INCONCLUSIVE"),
]  # fmt: skip


def test_rules_stand_below_each_other_with_interval_and_verdict():
    figure = plots.referee_figure(FOUND)
    (ax,) = figure.axes
    names = [label.get_text().replace("\\$", "$") for label in ax.get_yticklabels()]
    assert names == [
        "depth",
        "CompleteP: 2 to 8, a",
        "width",
        "μP: 64 to 256, a",
        "SP (llama, muon): 64 to 256, a",
        "of_$mine$: 64 to 256, a",
    ]
    assert list(ax.get_yticks()) == [5, 4, 3, 2, 1, 0]
    assert [text.get_fontweight() for text in ax.get_yticklabels()][:3] == ["bold", "normal", "bold"]
    bars = {line.get_ydata()[0]: list(line.get_xdata()) for line in ax.lines if len(line.get_xdata()) == 2}
    edge = -bars[1][0]
    assert bars[4] == [-0.2, 0.8] and bars[2] == [-0.1, 0.1] and bars[1] == [-edge, -0.7] and edge < 4
    marks = {line.get_ydata()[0]: line for line in ax.lines if line.get_marker() in ("o", "s", "D")}
    assert [marks[row].get_xdata()[0] for row in (4, 2, 1)] == [0.3, 0.0, -0.9]
    assert len({(marks[row].get_marker(), marks[row].get_color()) for row in (4, 2, 1)}) == 3
    assert [line.get_ydata()[0] for line in ax.lines if line.get_marker() == "<"] == [1], "cut at the edge"
    assert [(text.get_text(), text.xy[1]) for text in ax.texts] == [("not known", 0)]
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert said == ["TRANSFERS", "DRIFTS", "INCONCLUSIVE", "|α| < 0.2 does not matter"]


def test_a_group_has_each_rule_s_sweeps_together_and_its_baseline_first():
    of_tokens = {
        "columns": Columns("steps_planned", parametrization="token_rule"),
        "smallest": 250,
        "largest": 4000,
    }
    found = [
        ruling(rule=rule, sweep=sweep, **of_tokens) for sweep in ("a", "b") for rule in ("lr_0.32", "none")
    ]
    (ax,) = plots.referee_figure(found).axes
    lr = "lr × tokens$^{−0.32}$"
    names = ["step count", *(f"{rule}: 250 to 4000, {s}" for rule in ("no token rule", lr) for s in "ab")]
    assert [label.get_text() for label in ax.get_yticklabels()] == names


def test_a_drift_whose_interval_holds_0_says_what_shows_it_and_a_flat_valley_has_no_exponent():
    regret = Regret(64, 256, 0.05, 0.03, 0.08, "estimated", 0.1)
    found = [
        ruling(alpha=-0.2, low=-0.6, high=0.1, decision="DRIFTS", regret=regret),
        ruling(alpha=-0.5, low=-0.6, high=-0.4, decision="DRIFTS", regret=regret),
        ruling(alpha=1.09, low=-15.74, high=17.92, decision="INCONCLUSIVE", regret=regret),
    ]
    (ax,) = plots.referee_figure(found).axes
    assert [text.get_text() for text in ax.texts] == [
        "no power law, but regret 0.030 to 0.080 nat", "not known",
    ]  # fmt: skip
    text = page("results", Comparison(tuple(found)))
    assert "| −0.20 (−0.60 to 0.10) | 0.050 | DRIFTS (no power law) |" in text
    assert "| DRIFTS |" in text and "| not known | 0.050 | INCONCLUSIVE" in text
