"""The figure of all sweeps shows each rule's exponent, interval and verdict, in the order of the table."""

import math

from mup_tpu import plots
from mup_tpu.analysis.referee import Ruling


def ruling(**changes) -> Ruling:
    values = {
        "sweep": "a", "scale": "width", "growing": "width 64 to 256", "tuned": "learning rate",
        "rule": "mup", "source": "",
        "architecture": "gpt2", "update_rule": "adamw", "alpha": 0.0, "low": -0.1, "high": 0.1,
        "regret": None, "decision": "TRANSFERS", "looks": 1, "runs": 8, "hours": 0.1,
    }  # fmt: skip
    return Ruling(**(values | changes))


FOUND = [
    ruling(
        scale="depth", growing="depth 2 to 8", rule="completep", alpha=0.3, low=-0.2, high=0.8,
        decision="INCONCLUSIVE",
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
        "depth 2 to 8: CompleteP, a",
        "width 64 to 256: μP, a",
        "width 64 to 256: SP (llama, muon), a",
        "width 64 to 256: of_$mine$, a",
    ]
    assert list(ax.get_yticks()) == [3, 2, 1, 0]
    bars = {line.get_ydata()[0]: list(line.get_xdata()) for line in ax.lines if len(line.get_xdata()) == 2}
    edge = -bars[1][0]
    assert bars[3] == [-0.2, 0.8] and bars[2] == [-0.1, 0.1] and bars[1] == [-edge, -0.7] and edge < 4
    marks = {line.get_ydata()[0]: line for line in ax.lines if line.get_marker() in ("o", "s", "D")}
    assert [marks[row].get_xdata()[0] for row in (3, 2, 1)] == [0.3, 0.0, -0.9]
    assert len({(marks[row].get_marker(), marks[row].get_color()) for row in (3, 2, 1)}) == 3
    assert [line.get_ydata()[0] for line in ax.lines if line.get_marker() == "<"] == [1], "cut at the edge"
    assert [(text.get_text(), text.xy[1]) for text in ax.texts] == [("not known", 0)]
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert said == ["TRANSFERS", "DRIFTS", "INCONCLUSIVE", "|α| < 0.2 does not matter"]
