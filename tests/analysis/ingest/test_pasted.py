"""Tables as people paste them: Markdown, sizes with prefixes, repeats without a seed."""

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import check_table, load_table
from mup_tpu.errors import TableError
from mup_tpu.words.reasons import notes as notes_of

RUNS = pd.DataFrame(
    [
        {"width": w, "lr": 2.0**x, "seed": s, "loss": 3 - w / 640 + 0.05 * (x + 8) ** 2 + 0.01 * s}
        for w in (64, 128, 256)
        for x in range(-10, -5)
        for s in (0, 1)
    ]
)
EXPECTED = check_table(RUNS).runs


def markdown(rows: list[list[str]]) -> str:
    head, *others = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "---:|" * len(rows[0]), *others])


@pytest.mark.parametrize("name", ["table.md", "table.txt"])
@pytest.mark.parametrize(
    "mark", [str, "**{}**".format, "`{}`".format, "*{}*".format], ids=["plain", "bold", "code", "italic"]
)
def test_a_table_in_markdown_is_read_with_text_around_it(name, mark, tmp_path):
    rows = [[str(value) for value in row] for row in RUNS.itertuples(index=False)]
    rows[3] = [mark(cell) for cell in rows[3]]
    text = f"# Results\n\nLower is better | of all.\n\n{markdown([[*RUNS], *rows])}\n\nDone.\n"
    (tmp_path / name).write_text(text)
    pd.testing.assert_frame_equal(load_table(tmp_path / name).runs, EXPECTED)


def test_a_wide_table_in_markdown_has_sizes_in_brackets(tmp_path):
    wide = RUNS[RUNS["seed"] == 0].pivot_table("loss", "width", "lr")
    rows = [[f"{w} ({w / 100:.1f}M)", *(f"{loss:.4f}" for loss in row)] for w, row in wide.iterrows()]
    (tmp_path / "wide.md").write_text(markdown([["Width", *(f"{lr:.3e}" for lr in wide)], *rows]))
    runs = load_table(tmp_path / "wide.md").runs
    assert sorted(runs["scale"].unique()) == [64, 128, 256] and len(runs) == 15


def test_markdown_without_a_table_is_one_sentence(tmp_path):
    (tmp_path / "notes.md").write_text("# Notes\nnothing\n")
    with pytest.raises(TableError, match="it holds no table"):
        load_table(tmp_path / "notes.md")


@pytest.mark.parametrize(
    ("texts", "sizes"),
    [
        (["15M", "130M", "1.3B"], [15e6, 130e6, 1.3e9]),
        (["15m", "130m", "1_3b"], [15e6, 130e6, 1.3e9]),
        (["d512", "d1024", "d2048"], [512, 1024, 2048]),
        (["1,024", "2,048", "4,096.0"], [1024, 2048, 4096]),
        (["512 (15M)", "1024 (60M)", "2048"], [512, 1024, 2048]),
    ],
)
def test_sizes_as_people_write_them(texts, sizes):
    named = dict(zip((64, 128, 256), texts, strict=True))
    table = check_table(RUNS.assign(width=RUNS["width"].map(named)))
    assert sorted(table.runs["scale"].unique()) == sizes


def test_repeats_without_a_column_of_the_seed_are_seeds():
    table = check_table(RUNS.drop(columns="seed"))
    assert table.runs.groupby(["scale", "x"])["seed"].nunique().eq(2).all()
    np.testing.assert_allclose(sorted(table.runs["loss"]), sorted(EXPECTED["loss"]))
    assert "repeats of a cell are read as its seeds, since the table has no column of them" in notes_of(table)
    with pytest.raises(TableError, match="they differ in recipe"):
        check_table(RUNS.drop(columns="seed").assign(recipe=np.where(RUNS["seed"], "a", "b")))
