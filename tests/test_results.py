"""Stored results: complete, small and explained; the stored rows give the stored numbers again."""

import functools
import json
import re
from pathlib import Path

import pandas as pd
import pytest

from mup_tpu.analysis.referee import Comparison
from mup_tpu.cli import main
from mup_tpu.cli.results import open_results
from mup_tpu.cli.table import TableOptions
from mup_tpu.config import Trial
from mup_tpu.config.toml import from_dict
from mup_tpu.plots import drawings
from mup_tpu.store import load_curves, load_runs
from mup_tpu.store.header import load_predictions
from mup_tpu.study.report import StudyTrial
from mup_tpu.words import names
from mup_tpu.words.verdicts import to_dict

RESULTS = Path(__file__).parents[1] / "results"
FOLDERS = sorted(path for path in RESULTS.iterdir() if path.is_dir())
STORES = [file.parent for file in sorted(RESULTS.rglob("store.json"))]
PREDICTED = sorted((RESULTS / "prediction").glob("*/predictions.json"))
"""Predictions beside runs at their scale."""
SEARCHES = [path for path in STORES if (path / "search.json").exists()]
TOGETHER = sorted(
    {path.parent for path in STORES if path not in SEARCHES} - {RESULTS, RESULTS / "prediction"}
)
"""Folders of several sweeps, each with figures that compare them."""
SWEEPS = [path for path in STORES if path not in SEARCHES and path.parent == RESULTS]


DAILY = (
    "depth_transfer", "ladder_mup", "nanogpt_mup", "quickstart", "decay_transfer", "vit_adam",
)  # fmt: skip
"""Sweeps whose analyses are compared each day: another scale, hyperparameter or look each, and a study."""


def by_name(folders, daily):
    return [pytest.param(f, id=f.name, marks=[] if f.name in daily else pytest.mark.nightly) for f in folders]


def files_of(figures) -> set[str]:
    """Names of the files in which figures of these names are stored."""
    return {f"{name}.{suffix}" for name in figures for suffix in ("png", "svg")}


@functools.cache
def runs_of(folder: Path) -> pd.DataFrame:
    return load_runs(folder)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def stored_results(folder: Path):
    return json.loads((folder / "figures" / "analysis.json").read_text())["results"]


def drift_of(result):
    return [result["drift"][key] for key in ("alpha", "low", "high")]


@pytest.mark.parametrize("folder", by_name(SWEEPS, DAILY))
def test_the_numbers_behind_the_figures_come_out_of_the_stored_rows(folder, stored, assert_close):
    no_json = {"NaN": None, "Infinity": "inf", "-Infinity": "-inf"}
    found = json.loads(json.dumps(to_dict(stored(folder.name))), parse_constant=no_json.get)
    kept = json.loads((folder / "figures" / "analysis.json").read_text())
    assert_close(found, kept, "analysis", rel=0.01, abs=2e-4)
    names = names_in(folder / "figures")
    assert {"analysis.json", "transfer.png"} & names and names <= files_of(drawings(stored(folder.name))) | {
        "analysis.json"
    }


@pytest.mark.nightly
@pytest.mark.parametrize("folder", TOGETHER, ids=lambda p: p.name)
def test_the_comparison_of_several_sweeps_comes_out_of_the_stored_rows(folder, stored, tmp_path):
    sweeps = Comparison.of({p.name: stored(p.relative_to(RESULTS)) for p in STORES if p.parent == folder})
    found = sweeps.table(names.rule_name)
    found.drop(columns="regret_status").to_csv(tmp_path / "found.csv", index=False)
    found, kept = (pd.read_csv(f) for f in (tmp_path / "found.csv", folder / "figures" / "sweeps.csv"))
    pd.testing.assert_frame_equal(found, kept, rtol=0.02, atol=0.02)
    assert {"sweeps.png", "sweeps.csv"} <= names_in(folder / "figures")


@pytest.mark.parametrize(
    "folder",
    [pytest.param(RESULTS / "quickstart", marks=pytest.mark.nightly), SEARCHES[0]],
    ids=lambda p: p.name,
)
def test_plot_writes_every_stored_figure(folder, tmp_path, capsys):
    main(["analyze", "--figures", str(folder), "--out", str(tmp_path)])
    assert names_in(tmp_path) >= names_in(folder / "figures")


@pytest.mark.parametrize("folder", SEARCHES, ids=lambda p: p.name)
def test_a_search_s_best_trials_come_out_of_the_stored_rows(folder, capsys):
    main(["analyze", str(folder)])
    assert f"best of {len(runs_of(folder))} trials" in capsys.readouterr().out


@pytest.mark.parametrize("folder", by_name(STORES, DAILY))
def test_every_run_has_ended_and_has_its_curve_and_its_name(folder):
    """Each row's configuration gives its trial_id; otherwise it would be trained again."""
    runs, curves = runs_of(folder), load_curves(folder)
    assert set(runs["status"]) <= {"finished", "diverged", "stopped"}
    assert set(runs["trial_id"]) == set(curves["trial_id"])
    assert not runs["trial_id"].duplicated().any()
    assert (runs["experiment"] == folder.name).all()
    for run in runs.itertuples():
        config = json.loads(run.config)
        if (folder / "study.json").exists():
            assert StudyTrial(folder.name, config | {"seed": run.seed}).id == run.trial_id
        else:
            assert from_dict(Trial, config).trial_id(run.data_fingerprint) == run.trial_id


def test_every_folder_is_small_and_its_page_says_how_it_was_made_and_each_exponent():
    assert sum(p.stat().st_size for p in RESULTS.rglob("*") if p.is_file()) < 20e6
    numbers = r"([+-]?\d+\.\d+) \((-?\d+\.\d+) to (-?\d+\.\d+)\)"
    for folder in FOLDERS:
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert "```bash" in text and ("core" in text or "H200" in text), folder
        text = " ".join(text.replace("−", "-").replace("**", "").split())
        written = [tuple(map(float, exponent)) for exponent in re.findall(numbers, text)]
        for drift in map(drift_of, stored_results(folder) if folder in SWEEPS else ()):
            assert None in drift or pytest.approx(drift, abs=0.006) in written, folder


@pytest.mark.parametrize("file", PREDICTED, ids=lambda p: p.parent.name)
def test_predictions_are_older_than_the_runs_at_their_scale(file):
    runs = runs_of(file.parent)
    started = pd.to_datetime(runs["finished_at"]) - pd.to_timedelta(runs["wall_time_s"], unit="s")
    for kept in load_predictions(file.parent):
        there = started[runs[kept.scale_column] == kept.scale]
        assert (there > pd.Timestamp(kept.made_at)).all()


@pytest.mark.parametrize("folder", by_name([f.parent for f in PREDICTED], [PREDICTED[0].parent.name]))
def test_the_page_of_predictions_says_what_the_stored_rows_say(folder):
    page = (RESULTS / "prediction" / "README.md").read_text(encoding="utf-8").replace("−", "-")
    row = (
        rf"^\| \[?{folder.name}\b.*\| `(\w[\w.]*)` .*\| 2\^([-\d.]+) \(.*\| 2\^([-\d.]+).*\| (inside|outside)"
    )
    rows = [(rule, *map(float, x), ruling) for rule, *x, ruling in re.findall(row, page, re.M)]
    scored = [
        (s.prediction.compared, s.prediction.x, s.x, "inside" if s.is_inside else "outside")
        for s in open_results(str(folder), TableOptions()).scores
        if s.is_inside is not None
    ]
    assert len(rows) == len(scored)
    for rule, x, came, ruling in scored:
        numbers = (pytest.approx(n, abs=0.03) for n in (x, came))
        assert (rule, *numbers, ruling) in rows


def test_mup_coordinate_check_is_flat_and_sp_s_is_not():
    from mup_tpu.analysis.diagnosis import by_setting, layer_exponents

    table = pd.read_parquet(RESULTS / "coord_check" / "coord_check.parquet")
    parts = by_setting(table)
    assert set(parts) == {"adamw_tied", "adamw_untied", "sgd_tied", "sgd_untied"}
    assert names_in(RESULTS / "coord_check" / "figures") <= files_of(parts)
    for setting, part in parts.items():
        assert table.attrs[setting]["passes"] == {"sp": False, "mup": True}
        fits = layer_exponents(part)
        grown = {rule: max(f.low for key, f in fits.items() if key[0] == rule) for rule in ("sp", "mup")}
        assert grown["mup"] < 0.1 and grown["sp"] > 0.7, grown


@pytest.mark.parametrize(
    ("page", "sweep"), [("README.md", "nanogpt_mup"), ("docs/tutorials/first_sweep.md", "first_verdicts")]
)
def test_the_first_pages_open_with_the_stored_verdicts(page, sweep):
    text = (RESULTS.parent / page).read_text(encoding="utf-8")
    for mark, plain in (("**", ""), ("\\*", "*"), ("−", "-"), ("μP:", "mup:"), ("SP:", "sp:")):
        text = text.replace(mark, plain)
    top = text.partition("\n## Where to")[0] if page == "README.md" else text.partition("\n## 2.")[0]
    for result in stored_results(RESULTS / sweep):
        assert result["verdict"]["sentence"] in top


def test_the_table_of_all_sweeps_says_what_their_analyses_say():
    """Drift exponent with its interval, and verdict, of each rule."""
    row = re.compile(
        r"^\| (?P<rule>\w[\w.]*)[^|]*\|[^|]+\| (?P<alpha>[^|]+) \|[^|]+\|[^|]+\| (?P<verdict>\w+) .*"
        r"\[(?P<sweep>\w+)\]\(",
        re.M,
    )
    rows = [match.groupdict() for match in row.finditer((RESULTS / "README.md").read_text(encoding="utf-8"))]
    assert len(rows) > 30
    assert {found["sweep"] for found in rows} <= {path.name for path in SWEEPS}
    for found in rows:
        stored = stored_results(RESULTS / found["sweep"])
        (result,) = (r for r in stored if r["parametrization"] == found["rule"])
        assert f"{found['rule']}: {found['verdict']}" in result["verdict"]["sentence"], found
        numbers = [float(n.replace("−", "-")) for n in re.findall(r"−?\d+\.\d+", found["alpha"])]
        assert numbers == pytest.approx(drift_of(result) if numbers else [], abs=0.011), found


@pytest.mark.nightly
def test_the_table_of_all_sweeps_comes_out_of_the_stored_rows(tmp_path):
    numbers = r"−?\d+\.\d+"
    open_results(str(RESULTS), TableOptions()).write_report(tmp_path / "README.md")
    made, stored = ((f / "README.md").read_text(encoding="utf-8") for f in (tmp_path, RESULTS))
    assert re.sub(numbers, "#", made) == re.sub(numbers, "#", stored)
    values = [[float(n.replace("−", "-")) for n in re.findall(numbers, text)] for text in (made, stored)]
    assert values[0] == pytest.approx(values[1], abs=0.011), (
        "make it again: mup-tpu analyze results --report --out results/README.md"
    )
