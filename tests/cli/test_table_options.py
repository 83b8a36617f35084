"""Each option of a command that reads tables changes the answer, or is refused."""

from dataclasses import fields

import numpy as np
import pandas as pd
import pytest

from mup_tpu import cli
from mup_tpu.cli.table import TableOptions

# Option of `TableOptions` -> a value that changes something in the table below
VALUES = {
    "scale": ["heads"],
    "tune": ["other_rate"],
    "compare": ["rule"],
    "columns": ["loss=other_loss"],
    "where": ["noise<0.8"],
    "best_over": ["wd"],
    "only": ["norm<0.9"],
    "states": ["failed=diverged"],
    "loss_unit": ["bit"],
    "maximize": [],
    "bytes_per_token": ["4.2"],
    "chance": ["2.6"],
    "epsilon": ["0.001"],
    "delta": ["3"],
}
COMMANDS = {
    "analyze": ["analyze", "--where", "D=16", "--columns", "seed=wd", "--epsilon", "0.5"],
    "predict": ["predict", "--at", "width=1024", "--where", "D=16", "--columns", "seed=wd"],
    "law": ["predict", "--scale", "width,D", "--at", "width=1024,D=64", "--columns", "seed=wd"],
    "together": ["analyze", "--tune", "lr,wd", "--where", "D=16", "--epsilon", "0.5"],
    "predict together": ["predict", "--tune", "lr,wd", "--at", "width=1024", "--where", "D=16"],
}


def test_every_option_has_a_value():
    assert {*VALUES} == {f.name for f in fields(TableOptions)}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A grid of width, D, lr and wd, with other losses, rates, conditions and states beside them."""
    rows = [
        (w, d, x, y) for w in (64, 128, 256) for d in (16, 32) for x in range(-11, -5) for y in (-6, -4, -2)
    ]
    width, tokens, x, y = np.array(rows, float).T
    random, away = np.random.default_rng(0), x + 8 + np.log2(width / 64)
    loss = 3 - np.log2(width) / 10 - tokens / 300 + 0.03 * away**2 + 0.01 * (y + 4) ** 2
    loss += random.normal(0, 0.003, len(loss))
    frame = pd.DataFrame({"width": width, "D": tokens, "lr": 2**x, "wd": 2**y, "loss": loss}).assign(
        other_loss=loss + 0.02 * away,
        heads=width / 32,
        other_rate=2**x * width,
        rule=np.where(x % 2, "a", "b"),
        noise=random.uniform(size=len(loss)),
        norm=away,
        status=np.where(random.uniform(size=len(loss)) < 0.05, "failed", "finished"),
    )
    path = tmp_path_factory.mktemp("options") / "runs.csv"
    frame.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_changes_the_answer_or_is_refused(name, table, capfd):
    command, *options = COMMANDS[name]

    def answer(*more):
        try:
            cli.main([command, str(table), *options, *more])
        except SystemExit as end:
            assert end.code == 2
            return "refused"
        return capfd.readouterr().out

    plain, dropped = answer(), []
    assert plain != "refused"
    for option, values in VALUES.items():
        flag = f"--{option.replace('_', '-')}"
        if flag in options and option in ("scale", "tune"):
            continue
        if answer(flag, *values) == plain:
            dropped.append(flag)
    assert not dropped, f"{name}: {' '.join(dropped)}"
