"""Plans for a target: sizes and what is derived, costs, what is expected, and that sweeps take them."""

import io
import json
import math
import re
import shutil
import tomllib
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from mup_tpu import plan
from mup_tpu.analysis.planned import predict_planned
from mup_tpu.analysis.trend import BY_KIND, Pace, Priors, Trend, fixed
from mup_tpu.cli import main
from mup_tpu.config import Sweep, Trial
from mup_tpu.config.columns import configured
from mup_tpu.config.toml import load_sweep, parse_axis, write_sweep
from mup_tpu.errors import ConfigError, StoreError, TableError
from mup_tpu.models import sizes, training_flops
from mup_tpu.store import Store
from mup_tpu.store.header import load_predictions
from mup_tpu.study.study import Study, load_study
from mup_tpu.tuning.plan import LAUNCH_S, Measured, Speed, planned_of
from mup_tpu.tuning.runner import Corpora
from mup_tpu.tuning.sequence import Buyer
from mup_tpu.tuning.sweep import measured
from mup_tpu.tuning.target import goal_of, read_target
from mup_tpu.words.plans import plan_lines, plan_table, recipe_lines, recipe_table

A100S = Speed(8 * 0.3 * 312e12, 8)


def test_the_expected_variance_is_that_of_predictions_of_drawn_optima():
    """Rules that drift evenly along two scales, drawn from the priors and predicted with them."""
    priors = tuple(Priors(0.0, 0.1, moving=Pace(slope, 0.0), breaks=0.0) for slope in (0.3, 0.2))
    at = np.array([[-4.0, -3], [-3, -2], [-2, -2], [-2, -1]])
    errors, generator, squares = np.full(4, 0.1), np.random.default_rng(0), []
    for _ in range(300):
        slopes = generator.normal(0, [0.3, 0.2])
        shocks = 0.1 * np.abs(generator.standard_t(3)) * generator.standard_normal(5)
        true = -7 + np.append(at @ slopes, 0.0) + shocks
        made = Trend(2.0**at, true[:4] + errors * generator.standard_normal(4), errors, priors).optimum(
            (1, 1)
        )
        squares.append(min((made.mean - true[4]) ** 2, 1.0))
    expected = Trend(2.0**at, np.zeros(4), errors, priors).expected_variance((1, 1))
    assert np.mean(squares) == pytest.approx(expected, rel=4 * np.std(squares) / np.mean(squares) / 300**0.5)


def test_exponents_are_found_apart_and_a_fixed_one_stays():
    """x = -6 - 0.3·tokens + 0.4·batch, on cells that separate the two."""
    at = np.array([[-6.0, -3], [-6, -1], [-4, -3], [-2, -3], [-2, -1]])
    x = -6 + at @ [-0.3, 0.4]
    priors = (BY_KIND["tokens"], BY_KIND["batch size"])
    for first, expected in ((priors[0], -0.3), (fixed(-0.3), -0.3)):
        trend = Trend(2.0**at, x, np.full(5, 0.02), (first, priors[1]))
        (tokens, error), (batch, _) = trend.exponents((1, 1))
        assert tokens == pytest.approx(expected, abs=0.05) and batch == pytest.approx(0.4, abs=0.08)
        assert trend.optimum((1, 1)).mean == pytest.approx(-6, abs=0.15)
    assert error < 0.01


@pytest.mark.parametrize(
    ("target", "values", "derived"),
    [
        ("params=1.3B", (2112, 24, 2**19, 49005), ["width 2112 and depth 24", "tokens 25.7B", "batch 524k"]),
        ("width=2048 depth=24 tokens=26e9", (2048, 24, 2**19, 49591), ["batch 524k tokens: 0.58·tokens"]),
        ("width=2048 depth=24 tokens=26B batch=0.5M", (2048, 24, 500000, 52000), []),
        ("width=1024", (1024, 12, 131072, 23040), ["depth 12", "tokens 3.02B", "batch 131k"]),
        ("depth=8 steps=2000 batch=2^19", (704, 8, 524288, 2000), ["width 704"]),
        ("params=100M width=1024 tokens=1B", (1024, 8, 2**16, 15259), ["width 1024 and depth 8", "batch 65"]),
    ],
)  # fmt: skip
def test_sizes_that_are_not_given_are_derived_and_said(target, values, derived):
    goal = goal_of(read_target(target), None, 0)
    assert tuple(goal.values[name] for name in ("width", "depth", "batch", "steps")) == values
    assert len(goal.derived) == len(derived)
    assert all(words in sentence for words, sentence in zip(derived, goal.derived, strict=True))


def test_a_target_may_be_a_configuration_of_transformers_or_a_file(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16})
    )
    (tmp_path / "target.toml").write_text('width = 1024\ndepth = 24\ntokens = "1B"\n')
    of_config = read_target(f"{tmp_path}/config.json tokens=1B")
    assert of_config.pop("config").endswith("config.json")
    assert of_config == read_target(f"{tmp_path}/target.toml")


def test_a_plan_for_one_s_own_model_of_1_3_b_takes_no_default_of_ours():
    made = plan("params=1.3B", "200h", flops_per_second=A100S)
    text = repr(made)
    assert "sotu" not in text and "2,048 tokens" not in text and made.sweep is None
    assert "derived: tokens 25.7B" in text and "of 8 × " not in text
    lines = text.partition("─\n")[2].splitlines()
    first, *_, total, target, share = [line.split() for line in lines[: len(made.steps) + 3]]
    assert first[:6] == ["128", "4", "8192", "15.7M", "24", "3"]
    assert first[-1] == f"{made.steps[0].regret:.4f}"
    assert (total[0], target[0], share[0]) == ("sum", "target", "share")
    assert share[1] == f"{100 * made.cost / made.target_cost:.2g}"
    promised = tomllib.loads(made.toml())["target"]["promised"]
    assert [one["runs"] for one in promised] == [step.runs for step in made.steps]
    assert promised[-1]["regret"] == pytest.approx(made.regret, rel=0.01)
    assert made.regret < 0.05 < made.copied and made.cost < 0.2 * made.target_cost < made.budget
    table = pd.DataFrame([step.sizes for step in made.steps])
    assert (table.max() < pd.Series(made.goal.sizes(made.goal.values))).all(), "every size shrinks"
    assert np.linalg.matrix_rank(np.log2(table) - np.log2(table).mean()) == 4, "and its exponent is learnt"
    assert set(made.shortened) == {"width", "depth", "tokens", "batch"}
    assert all(half < made.half_width for half in made.shortened.values())
    for step in made.steps:
        steps, depth = made.goal.steps(step.values)
        assert step.cost >= step.runs * steps * depth * LAUNCH_S / 8, "no device launches steps faster"
    known = plan("params=1.3B", "200h", flops_per_second=A100S, fix=["width=0"])
    assert known.regret < made.regret + 0.01 * (made.cost - known.cost) / made.target_cost
    assert "fixed: learning rate ∝ width^0" in repr(known)


def test_claims_of_a_rule_narrow_the_priors():
    plain, mup = (plan("width=1024", "1e18", rule=rule) for rule in (None, "mup"))
    assert mup.steps[-1].regret + 0.1 * mup.cost / mup.target_cost < (
        plain.steps[-1].regret + 0.1 * plain.cost / plain.target_cost
    )


def test_a_study_is_planned_under_its_own_names(tmp_path):
    study = Study(tmp_path, scale={"width": [16, 32, 64]}, tune={"rate": [0.01]}, settings={"steps": 200})
    with pytest.raises(
        ConfigError, match="the cost of a run does not follow from the target: give --probe 60s"
    ):
        plan("width=512", "1h", study)
    settings = {"steps": 9, "batch": 64, "depth": 2}
    known = Study(tmp_path, scale={"width": [16, 32]}, tune={"rate": [0.01]}, settings=settings)
    made = plan("width=512 steps=900", "1e12", known)
    assert made.tuned == "rate" and set(made.steps[0].values) == {"width", "steps"}
    assert made.goal.shrinks == ("width", "tokens")
    wider = plan("width=512", "1e12", known)
    assert tomllib.loads(wider.toml())["scale"] == {"width": [step.values["width"] for step in wider.steps]}


def test_a_study_s_seeds_and_the_name_that_runs_continue_along_are_planned(tmp_path):
    """Longer runs of one size cost what the shorter ones lack; a design is bought at two seeds."""
    points = [{"width": 32, "steps": 100}, {"width": 64, "steps": 200}]
    tune = {"rate": [0.01, 0.1, 1.0], "decay": [0.01, 0.1, 1.0]}
    settings = {"batch": 64, "depth": 2}
    whole, continued = (
        plan("width=512 steps=6400", "1e14", Study(tmp_path, scale=points, tune=tune, seeds=2,
             settings=settings, measured_by="steps", continued=name))
        for name in (None, "steps")
    )  # fmt: skip
    written = tomllib.loads(continued.toml())
    assert written["num_seeds"] == 2 and written["continued"] == "steps"
    assert "continued" not in tomllib.loads(whole.toml())
    assert continued.steps[1].runs == 18
    (tmp_path / "plan.toml").write_text(continued.toml())
    assert load_study(tmp_path / "plan.toml", str(tmp_path / "runs"))[0].grid.continued == "steps"
    longer = [step for step in continued.steps if step.is_continued]
    assert longer
    for step in longer:
        assert step.cost < step.runs * continued.goal.flops(step.values)


def test_proxies_of_our_networks_take_no_less_than_eight_sequences_a_step():
    steps = plan("batch_size=128", "1e15", Trial()).steps
    assert min(step.values["batch_size"] for step in steps) == 8


def test_a_plan_costs_what_its_runs_cost_and_stays_within_its_budget():
    base = Trial().replace(steps=50)
    for budget in (2e13, 1e14, 1e16):
        made = plan("width=1024", budget, base)
        costs = [s.runs * training_flops(base.replace(**s.values), 256) for s in made.steps]
        assert made.cost == pytest.approx(sum(costs)) and made.cost <= budget
        assert [step.values["width"] for step in made.steps] == sorted(s.values["width"] for s in made.steps)
    assert made.target_cost == pytest.approx(training_flops(base.replace(width=1024), 256))
    assert (
        f"target: {made.regret:.4f} nat with this plan" in repr(made) and made.regret < made.copied < math.inf
    )
    assert "each step of the target trains gpt2 on 16 × 128 = 2,048 tokens of sotu" in repr(made)


def test_a_table_of_two_hyperparameters_with_a_price_fits_into_80_columns():
    speed = Speed(64 * 0.3 * 989e12, 64, peak=64 * 989e12, price=2.5)
    made = plan("params=7B", flops_per_second=speed, tune={"weight_decay": [0.03, 0.1, 0.3]})
    console = Console(width=80, file=io.StringIO())
    console.print(plan_table(made))
    assert "expected" in (shown := console.file.getvalue()) and "within" in shown and "13,867" in shown


def test_more_money_buys_less_regret_until_it_is_not_worth_it():
    small, large, huge = (plan("width=8192", budget, Trial()) for budget in ("6e13", "1e17", "1e20"))
    assert large.regret < small.regret and huge.cost == large.cost
    assert huge.saved < 0.1 * huge.larger.cost / huge.target_cost


def test_long_runs_of_our_networks_are_checkpointed_about_every_five_minutes():
    slow, fast = (plan("width=1024", "20h", Trial(), flops_per_second=speed) for speed in (3e10, 1.6e13))
    longest, steps = max(step.cost for step in slow.steps), Trial().train.steps
    assert longest > 300 and slow.checkpoint_every == int(steps * 300 / longest)
    assert fast.checkpoint_every == plan("width=1024", 1e16, Trial()).checkpoint_every == 0


def test_fields_that_do_not_shrink_are_the_targets_own(tmp_path):
    made = plan(["width=1024", "depth=8,tokens=4e6"], "1e17", Trial())
    assert plan("width = 1024 depth=8, tokens=4e6", "1e17", Trial()).goal == made.goal
    assert made.goal.values == {"width": 1024, "depth": 8, "steps": 1953}
    file = tmp_path / "plan.toml"
    file.write_text(made.toml())
    assert load_sweep(file) == made.sweep
    for trial in made.sweep.trials():
        for name, value in made.goal.values.items():
            grows = name in made.sweep.axes.scale
            assert trial.flat()[name] <= value if grows else trial.flat()[name] == value


def test_any_sweep_is_written_as_it_is_read(tmp_path):
    ladder = ({"width": 64, "steps": 50}, {"width": 128, "steps": 100})
    rules, widths = {"parametrization": ("sp", "mup")}, {"width": (64, 128)}
    base = Trial().replace(init_std=0.1, tied=False, corpus='a "b"', weight_decay=1e-4)
    for sweep in (
        Sweep("a", base, scale=ladder, measured_by="tokens", tune={"learning_rate": (2**-8, 0.003)}),
        Sweep("b", base, compare=rules, scale=widths, num_seeds=3),
        Sweep("c", tune=parse_axis("weight_decay=0,0.1", ""), compare=parse_axis("tied=true,false", "")),
    ):
        (tmp_path / "s.toml").write_text(write_sweep(sweep))
        assert load_sweep(tmp_path / "s.toml") == sweep


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("1.3 B", ("params=1.3B", "200h", None, None, A100S)),
        ("ours", ("width=4096", "1e17", Trial())),
        ("three scales", ("width=1024 depth=8 tokens=4e6", "1e17", Trial())),
        ("a table", ("width=4096", "1e17", Trial(), "results/lr_transfer")),
        ("in SP", ("width=2048", "1e17", Sweep("sp", compare={"parametrization": ("sp",)}))),
    ],
)
def test_plans_are_the_frozen_ones(name, arguments, golden):
    golden(f"plan: {name}", plan(*arguments).to_dict())


def test_a_table_of_ones_own_replaces_what_is_usual():
    usual, own = (plan("width=4096", "1e17", Trial(), table=t) for t in (None, "results/lr_transfer"))
    assert "lr_transfer, mup" in repr(own) and "public sweeps" in repr(usual)
    assert own.sweep.tuned["learning_rate"][4] == 2**-6
    sp = plan("width=2048", "1e17", Sweep("sp", compare={"parametrization": ("sp",)}), _drifting()).sweep
    assert sp.tuned["learning_rate"][4] == 2**-9, "its rule's, at its smallest width"
    slow = plan("width=2048", "1e17", Trial().replace(learning_rate=2**-10))
    assert slow.sweep.tuned["learning_rate"][4] == 2**-10
    deep = plan("depth=16", "1e17", Trial(), table=_drifting())
    assert "is along width, so only its rates are used\n" in repr(deep)
    assert deep.sweep.tuned["learning_rate"][4] == 2**-4
    one = _drifting().query("width == 64")
    with pytest.raises(TableError, match="two widths with a known optimum"):
        plan("width=4096", "1e17", Trial(), table=one)


def _drifting():
    """μP's optimum at 2^-4, SP's at 2^-9 at width 64 and falling."""
    return pd.DataFrame(
        {"width": width, "parametrization": rule, "lr": 2.0**x, "loss": 2 + 0.1 * (x - best - alpha * k) ** 2}
        for k, width in enumerate((64, 128, 256))
        for rule, best, alpha in (("mup", -4, 0), ("sp", -9, -1))
        for x in range(-14, 0)
    )


def test_a_sweeps_own_rules_and_rates_are_taken():
    rules, rates = {"parametrization": ("sp", "mup")}, {"learning_rate": (2**-9, 2**-8, 2**-7)}
    made = plan("width=1024", "1e15", Sweep("mine", tune=rates, compare=rules))
    assert made.rule == "mup" and made.sweep.experiment == "mine_plan"
    assert made.sweep.tune == {"learning_rate": (2**-9, 2**-8, 2**-7)}
    assert plan("width=1024", "1e15", Sweep("mine", compare={"parametrization": ("sp",)})).rule == "sp"
    with pytest.raises(ConfigError, match="tune weight_decay of the sweep: a plan is made for the learning"):
        plan("width=1024", "1e15", Sweep("mine", tune={"weight_decay": (0.0, 0.1)}))


@pytest.mark.parametrize(
    ("target", "base", "budget", "sentence"),
    [
        ("", None, "1e17", "a plan needs a target: give --at params=1.3B, or --at width=4096"),
        ("tokens=1B", None, "1e17", "the model's size is missing: give params=1.3B, or width=2048 depth=24"),
        ("widht=3", None, "1e17", "target: unknown key 'widht'; the nearest known key is 'width'"),
        ("params=big", None, "1e17", "params 'big' is not a number above 0, at most 1e+18; write 4096"),
        ("params=10", None, "1e17", "params 10 are fewer than 10,000: no transformer has so few"),
        ("width=0.3", None, "1e17", "width 0.3 is not a whole number from 1 to 1e+06"),
        ("width=2048 tokens=1", None, "1e17", "tokens 1 is not a number from 1000 to 1e+17"),
        ("width=2048 steps=1", None, "1e17", "batch 2.41592e+10, derived from width=2048, steps=1, is not"),
        ("width=64 batch=1B tokens=1M", None, "1e17", "batch 1B is larger than all tokens, 1M"),
        ("params=1B params=2B", None, "1e17", "'params=2B' and another value of params were both given"),
        ("params=1.3B width=512 depth=4", None, "1e17", "contradict width 512 and depth 4, which have 12.6M"),
        ("width=512 tokens=1B steps=10 batch=1k", None, "1e17", "tokens 1B contradict steps 10 of batch 1k"),
        ("width=128 depth=4 tokens=16M", None, "1e17", "has not 3 smaller proxies, from width 128, depth 4"),
        ("params=1.3B", None, "1e6", "budget (1e+06 FLOP) does not pay three proxies (24 + 5 + 5 runs)"),
        ("config.json", None, "1e17", "target config.json cannot be read"),
        ("widht=3", Trial(), "1e17", "not FIELD=VALUE with a field of width, depth, batch_size, steps, "),
        ("width=wide", Trial(), "1e17", "width 'wide' is not a whole number"),
        ("steps=9,tokens=3e6", Trial(), "1e17", "steps and tokens were both given"),
        ("width=100", Trial(), "1e17", "width 100 is not a multiple of head_size 32"),
        ("width=96", Trial(), "1e17", "target width=96 has not 3 smaller proxies, from width 64 on"),
        ("width=4096", Trial(), "soon", "budget 'soon' is not a time; write 90s, 30m or 2h"),
        ("width=4096", Trial(), "2h", "budget 2h is a time: give flops_per_second"),
        ("width=4096", Trial(), "-1", "budget -1 is not allowed"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_one_sentence(target, base, budget, sentence):
    with pytest.raises(ConfigError) as error:
        plan(target, budget, base)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tune": {"weight_decay": [0.1, 0.1, 0.1]}}, "weight_decay has fewer than three values"),
        ({"tune": {"steps": [1, 2, 3]}}, "tune steps: it is a size of the target"),
        ({"tune": {"learning_rate": [0.0]}}, "tune: a learning rate must be above 0"),
        ({"tune": {"learning_rate": [1e-320, 0.1]}}, "tune: a learning rate must be above 0"),
        ({"fix": ["heads=0"]}, "fix heads=0: proxies make width, depth, tokens, batch smaller"),
        ({"fix": ["width=x"]}, "fix: width 'x' is not a number"),
    ],
)
def test_hyperparameters_and_exponents_that_are_not_allowed_are_one_sentence(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        plan("width=2048", "1e20", **given)


def _bought(bought, made, best, folder, noise=0.0, stop=math.inf, loss=None):
    """Rows of a planned sweep of ours whose valleys are parabolas around `best` of a row's columns."""
    generator, corpora, loaded = np.random.default_rng(0), Corpora(), made.sweep
    target = tomllib.loads(made.toml())["target"]
    planned_of(replace(loaded, target=target)).keep(str(folder))
    points = measured(loaded, corpora)
    store = Store(folder, loaded.experiment, loaded.axes, tuple(points))

    def result_of(trial, row):
        counts = sizes(trial, 256)
        if loss is not None:
            return counts | {"loss": loss(row | counts)}
        away = math.log2(row["lr"]) - best(row | counts)
        return counts | {"loss": 3.0 + 0.05 * away**2 + noise * generator.standard_normal()}

    return bought(Buyer(loaded, points, corpora.trial_id, store), store, result_of, stop)


@pytest.mark.parametrize(
    "away", [pytest.param(-3, marks=pytest.mark.nightly), pytest.param(0, marks=pytest.mark.nightly), 3]
)
def test_a_plan_is_bought_size_after_size_and_predicts_its_target(away, tmp_path, bought):
    """The optimum falls with tokens; it may lie three octaves from the typical rate."""
    made = plan("width=1024 depth=8 steps=4000", "1e17", Trial())
    centre = math.log2(made.rates[4]) + away
    whole = made.goal.sizes(made.goal.values)

    def best(row):
        return centre - 0.3 * math.log2(row["tokens_planned"] / whole["tokens"])

    rows = _bought(bought, made, best, tmp_path, 0.002)
    recipe = predict_planned(str(tmp_path))
    (found,) = recipe.optima
    assert found.known == recipe.cells == len(made.steps) and found.interval[0] < centre < found.interval[1]
    assert found.exponents["tokens"][0] == pytest.approx(-0.3, abs=0.15)
    sd = (found.interval[1] - found.interval[0]) / 3.92
    assert found.taking.expected == pytest.approx(0.05 * sd**2, rel=0.5), "by the curvature of the runs"
    runs = sum(step.runs for step in made.steps)
    assert runs <= len(rows) <= runs + (4 if not away else 12), "grids without an optimum are extended"
    first = rows[rows["purchase"] == 1]
    assert len(first) == made.steps[0].runs and set(first["width"]) == {made.steps[0].values["width"]}
    assert any("95 %" in line for line in recipe_lines(recipe))


def test_an_interrupted_plan_goes_on_and_its_folder_answers_from_what_there_is(tmp_path, bought):
    made = plan("width=1024", "1e16", Trial())
    whole = _bought(bought, made, lambda row: -6.0, tmp_path / "whole")
    _bought(bought, made, lambda row: -6.0, tmp_path / "ended", stop=26)
    assert predict_planned(str(tmp_path / "ended")).optima[0].known >= 1
    again = _bought(bought, made, lambda row: -6.0, tmp_path / "ended")
    assert set(again["trial_id"]) == set(whole["trial_id"])
    with pytest.raises(TableError, match="at 'depth': the plan follows width"):
        predict_planned(str(tmp_path / "whole"), {"depth": 3})
    (tmp_path / "whole" / "plan.json").write_text("[1]")
    with pytest.raises(StoreError, match="plan.json cannot be read"):
        predict_planned(str(tmp_path / "whole"))


def test_a_plan_says_what_is_left_and_what_other_rules_would_leave():
    mup, poor = (plan("width=1024", budget, Trial()) for budget in ("1e16", "7e13"))
    assert "Raise --budget by 1.5e+13 FLOP for one more size, width 192." in repr(poor)
    assert f"Train the target longer with the {1e16 - mup.cost:.2g} FLOP that are left" in repr(mup)
    assert plan("width=8192", "1e20", Sweep("sp", compare={"parametrization": ("sp",)})).others == {}
    assert f"{mup.others['sp']:.4f} nat with the same runs under SP" in repr(mup)


def test_remarks_are_at_most_five_sentences_that_say_what_to_do():
    speed = Speed(16 * 0.3 * 989e12, 16, peak=16 * 989e12)
    made = plan("params=3B", "200h", flops_per_second=speed)
    remarks = [line for line in plan_lines(made) if line[:1].isupper()]
    assert len(remarks) <= 5 and all(line.endswith(".") for line in remarks)
    assert {line.split()[0] for line in remarks} <= {"Time", "Have", "Keep", "Train", "Raise", "Choose"}
    assert "30% (--mfu) of 16 × 989 TFLOP/s" in remarks[0]
    table = plan_table(made)
    shares = [float(row[table.headings.index("MFU, %")]) for row in table.rows[: len(made.steps)]]
    assert shares == sorted(shares) and shares[0] < 1 and shares[-1] == 30, "small models reach less"
    table = plan_table(plan("params=3B", "200h", flops_per_second=replace(speed, price=2.5)))
    prices = [row[table.headings.index("price")] for row in table.rows]
    assert prices[-2] == f"{made.target_cost / 3600 * 16 * 2.5:,.0f}"


def test_times_beyond_the_timed_sizes_grow_as_between_the_last_two():
    """The work doubles and the time grows by √2 each time; an only size grows as the work."""
    goal = goal_of(read_target("width=1024 depth=8 tokens=1B batch=100k"), None, 0)
    work = math.log2(goal.work(goal.values) / goal.steps(goal.values)[0])
    few, many = ((work - 4, -3.0),), ((work - 6, -4.0), (work - 4, -3.0))
    assert Measured(few, 0.0).seconds(goal, goal.values) == pytest.approx(1e4 * 2.0 ** (-3 + 4))
    assert Measured(many, 5.0).seconds(goal, goal.values) == pytest.approx(5 + 1e4 * 2.0 ** (-3 + 2))


@pytest.fixture(scope="module")
def two(bought, tmp_path_factory):
    """Folder, plan, rows and loss of a rate, whose best falls with tokens, and a decay, whose best rises."""
    tune = {"learning_rate": (2**-9, 2**-7, 2**-5), "weight_decay": (0.03, 0.1, 0.3)}
    made = plan("width=512 steps=8000", "1e17", Sweep("two", Trial().replace(steps=500), tune=tune))
    folder = tmp_path_factory.mktemp("planned") / "two"
    folder.mkdir()
    (folder / "plan.toml").write_text(made.toml())
    assert load_sweep(folder / "plan.toml") == made.sweep
    assert made.beside == {"weight_decay": (0.03, 0.1, 0.3)}
    whole, generator = made.goal.sizes(made.goal.values), np.random.default_rng(0)

    def loss(row):
        a = math.log2(row["lr"]) + 7 + 0.3 * math.log2(row["tokens_planned"] / whole["tokens"])
        b = math.log2(row["weight_decay"]) + 4 - 0.2 * math.log2(row["width"] / 512)
        rise = 0.03 * a * a + 0.02 * b * b + 0.015 * a * b + 0.002 * generator.standard_normal()
        return 2 + 30 * row["flops"] ** -0.1 + rise

    return folder, made, _bought(bought, made, None, folder, loss=loss), loss


def test_a_plan_of_two_hyperparameters_is_bought_and_predicts_both(two):
    folder, made, rows, _ = two
    assert "a design of all values" in repr(made)
    recipe = predict_planned(str(folder))
    rate, decay = recipe.optima
    assert rate.interval[0] < -7 < rate.interval[1] and decay.interval[0] < -4 < decay.interval[1]
    assert rate.exponents["tokens"][0] == pytest.approx(-0.3, abs=0.15)
    assert rate.by_rule == ("width",) and decay.by_rule == (), "muP claims nothing of decay"
    assert rate.octave_cost == pytest.approx(0.03 - 0.015**2 / 4 / 0.02, rel=0.3)
    assert {pair.interacts for pair in recipe.pairs} == {True} and len(rows) < 120
    shorter = predict_planned(str(folder), {"tokens": recipe.sizes["tokens"] / 8})
    assert shorter.values == {"width": 512, "steps": 1000} and shorter.optima[0].x > rate.x + 0.5
    with pytest.raises(TableError, match="at width=-3 is not allowed: a size is above 0"):
        predict_planned(str(folder), {"width": -3})
    state = recipe_table(recipe)
    assert len(state.rows) == len(made.steps) + 1 and state.rows[0][-1] == f"({made.steps[0].regret:.4f})"
    assert state.rows[-1][-1].endswith(f"({made.regret:.4f})") and "(×" in state.rows[1][-2]
    text = "\n".join(recipe_lines(recipe))
    assert (recipe.loss is None) == ("expected loss unknown: " in text)
    assert "by rule: μP keeps the best learning rate along width (75% of the prior)" in text
    assert "an error of one octave costs 0.0" in text and "learning rate and weight decay interact" in text


@pytest.mark.slow
def test_a_kept_recipe_of_two_hyperparameters_is_scored_by_runs_at_the_target(two, tmp_path, capsys):
    folder, made, _, loss = two
    shutil.copytree(folder, tmp_path / "two")
    for _ in range(2):  # the second time adds nothing
        main(["predict", str(tmp_path / "two"), "--keep"])
    kept = load_predictions(tmp_path / "two")
    assert [one.hyperparameter for one in kept] == ["lr", "weight_decay"]
    there = tmp_path / "two_transfer"
    there.mkdir()
    shutil.copy(tmp_path / "two" / "predictions.json", there)
    rates, decays = ([2 ** (one.x + step) for step in (-2, -1, 0, 1, 2)] for one in kept)
    tuned = {"learning_rate": rates, "weight_decay": decays}
    sweep = replace(made.sweep, scale=(made.goal.values,), tune=tuned)
    rows = [configured(t) | sizes(t, 256) | {"status": "finished"} for t in sweep.trials()]
    runs = [row | {"trial_id": f"{i}", "loss": loss(row)} for i, row in enumerate(rows)]
    Store(there, "two", sweep.axes).append(runs)
    main(["analyze", str(tmp_path / "two"), "--report", "--figures"])
    capsys.readouterr()
    came = predict_planned(str(tmp_path / "two")).came
    assert (came.runs, came.values) == (9, 9) and 0 <= came.regret < 0.05
    page = (tmp_path / "two" / "report.html").read_text()
    for words in ("Came at the target: 9 runs", "the plan promised", "What came (in brackets"):
        assert words in page
    assert "DRIFTS" not in page.partition("<body>")[2], (
        "no verdict along one of several sizes that grow together"
    )
    main(["analyze", str(there)])
    out = " ".join(capsys.readouterr().out.split())
    scored = [line for line in out.split("μP: at ")[1:] if "predicted on" in line]
    assert len(scored) == 2 and "weight decay 2^-" in scored[1]
    for line, x in zip(scored, (-7, -4), strict=True):
        measured = float(re.search(r"measured 2\^(-[\d.]+) = [\d.]+, inside the interval", line)[1])
        assert measured == pytest.approx(x, abs=0.3)
