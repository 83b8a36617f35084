"""Plans for a target: what they cost, what they expect, and that a sweep takes them."""

import math
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from mup_tpu import plan
from mup_tpu.analysis import analyze, load_table
from mup_tpu.analysis.outlook import Assumed
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.trend import Pace, Priors, Trend
from mup_tpu.config import Axis, Ladder, Sweep, Trial
from mup_tpu.config.columns import configured
from mup_tpu.config.toml import load_sweep
from mup_tpu.errors import ConfigError, TableError
from mup_tpu.models import training_flops
from mup_tpu.store import Store, StoredAxes
from mup_tpu.tuning.runner import Corpora
from mup_tpu.tuning.sequence import _grid_of, buy


def test_the_expected_regret_is_that_of_predictions_of_drawn_optima():
    """Optima of rules that drift evenly, drawn from the priors and predicted with them."""
    priors = Priors(steady=0.0, scatter=0.1, moving=Pace(0.3, 0.0), breaks=0.0)
    assumed = Assumed(priors, None, 0.0, 0.06, 0.1, Reason.of("start"))
    at, runs = np.array([-4.0, -3.0, -2.0]), (8, 8, 16)
    errors = np.sqrt([max(0.1 / n, 0.04**2) for n in runs])
    generator, squares = np.random.default_rng(0), []
    for _ in range(400):
        shocks = 0.1 * generator.standard_t(3) * generator.standard_normal(4)
        true = -7 + generator.normal(0, 0.3) * np.append(at, 0.0) + shocks
        seen = true[:3] + errors * generator.standard_normal(3)
        predicted = Trend(tuple(2.0**at), seen, errors, priors).optimum(1.0).mean
        squares.append(min((predicted - true[3]) ** 2, 1.0))
    expected = assumed.variance(list(at), runs)
    assert np.mean(squares) == pytest.approx(expected, rel=4 * np.std(squares) / np.mean(squares) / 20)
    assert assumed.regret(expected) == pytest.approx(0.03 * expected)


def test_a_copied_optimum_is_worse_the_farther_it_is_and_by_its_drift():
    usual = Assumed.usual("width", "mup")
    assert usual.copied(-3, 8) > usual.copied(-1, 8) > usual.regret(2 * 0.1**2)
    still = Priors(steady=0.0, scatter=1e-6, moving=Pace(1e-6, 1e-6))
    drifts = Assumed(still, None, -0.5, 0.1, 1e-9, Reason.of("start"))
    assert drifts.copied(-2, 8) == pytest.approx(0.05 * (1.0 + 0.04**2), rel=1e-3)


def test_a_plan_costs_what_its_runs_cost_and_stays_within_its_budget():
    base = Trial().replace(steps=50)
    for budget in (2e13, 1e14, 1e16):
        found = plan("width=1024", budget, base)
        costs = [step.runs * training_flops(step.trial, 256) for step in found.steps]
        assert found.flops == pytest.approx(sum(costs)) and found.flops <= budget
        assert [step.trial.model.width for step in found.steps[:3]] == sorted(
            step.trial.model.width for step in found.steps[:3]
        )
    assert found.target_flops == pytest.approx(training_flops(base.replace(width=1024), 256))
    assert f"expected regret {found.regret:.4f} nat" in repr(found)
    assert found.regret < found.copied < math.inf


def test_more_money_buys_less_regret_until_it_is_not_worth_it():
    small, large, huge = (plan("width=8192", budget) for budget in ("1.3e14", "1e17", "1e20"))
    assert large.regret < small.regret
    assert huge.flops == large.flops and "as much compute is worth" in huge.larger
    assert "beyond the budget" in small.larger


def test_steps_that_no_device_launches_in_the_time_are_refused_with_the_batch_to_blame():
    """A layer's launches take 0.17 ms, so that 24 layers make at most 245 steps a second."""
    target = ["width=2048", "depth=24", "tokens=26e9"]
    with pytest.raises(
        ConfigError,
        match=r"runs of [\d,]+ steps in .* would need [\d,]+ steps a second, and no device makes "
        r"more than 245 with 24 layers: give a larger batch_size than 16 \(2,048 tokens a step\)",
    ):
        plan(target, "200h", flops_per_second=8 * 0.3 * 312e12)
    found = plan([*target, "batch_size=4096"], "200h", flops_per_second=8 * 0.3 * 312e12)
    assert "gpt2 on 4096 × 128 = 524,288 tokens of" in repr(found)
    assert plan("width=1024", "20h", flops_per_second=1e15).steps, "seconds in all"


def test_a_plan_checkpoints_its_longer_runs_about_every_five_minutes():
    found = plan("width=1024", "2h", flops_per_second=1.6e11)
    longest = max(step.flops / 1.6e11 for step in found.steps)
    steps = found.steps[0].trial.train.steps
    assert longest > 300 and found.checkpoint_every == int(steps * 300 / longest)
    assert plan("width=1024", "2h", flops_per_second=1.6e12).checkpoint_every == 0
    assert plan("width=1024", 1e16).checkpoint_every == 0, "on a machine of unknown speed"


def test_fields_that_do_not_shrink_are_the_targets_own(tmp_path):
    found = plan(["width=1024", "depth=8,tokens=4e6"], "1e17")
    assert plan("width = 1024 depth=8, tokens=4e6", "1e17").goal == found.goal
    assert found.goal == ("width=1024", "depth=8", "steps=1953")
    grown = found.sweep.scale_axis.fields
    for trial in found.sweep.trials():
        own = trial.flat()
        for name, value in (("width", 1024), ("depth", 8), ("steps", 1953)):
            assert own[name] < value if name in grown else own[name] == value
    assert set(found.transfer.split()) <= set(found.goal)
    file = tmp_path / "plan.toml"
    file.write_text(found.toml())
    assert load_sweep(file) == found.sweep


def test_any_sweep_is_written_as_it_is_read(tmp_path):
    from mup_tpu.config.toml import parse_axis, write_sweep

    ladder = Ladder(({"width": 64, "steps": 50}, {"width": 128, "steps": 100}), "tokens")
    base = Trial().replace(init_std=0.1, tied=False, corpus='a "b"', weight_decay=1e-4)
    sweeps = (
        Sweep("a", base, scale=ladder, learning_rates=(2**-8, 0.003)),
        Sweep("b", base, ("sp", "mup"), (64, 128), num_seeds=3),
        Sweep("c", tune=parse_axis("weight_decay=0,0.1", ""), compare=parse_axis("tied=true,false", "")),
    )
    for sweep in sweeps:
        (tmp_path / "s.toml").write_text(write_sweep(sweep))
        assert load_sweep(tmp_path / "s.toml") == sweep


@pytest.mark.parametrize("away", [-3, 3])
def test_an_optimum_three_octaves_from_the_usual_rate_is_bracketed_at_the_smallest_proxy_first(
    away, tmp_path
):
    planned = plan("width=1024", "1e16").sweep
    best = math.log2(planned.learning_rates[4]) + away
    rows = _bought(planned, best, tmp_path)
    (result,) = analyze(load_table(tmp_path)).results
    assert all(o.is_bracketed and o.x == pytest.approx(best, abs=0.1) for o in result.optima)
    larger = rows[rows["width"] > rows["width"].min()]
    assert (abs(np.log2(larger["lr"]) - best) < 2.6).all(), "only the smallest width searches"
    assert len(larger) <= 8 * 2 * (len(result.optima) - 1)


def _bought(planned, best, folder, noise=0.0, first_looks=False):
    """Rows that a sequence buys of a planned sweep whose valleys are parabolas around one optimum."""
    generator = np.random.default_rng(0)
    corpora, widths = Corpora(), tuple(map(float, planned.scale_axis.values))
    store = Store(folder, planned.experiment, StoredAxes.of(planned), widths)

    def run(trials, purchase):
        store.append(
            configured(trial)
            | {"trial_id": corpora.trial_id(trial), "status": "finished", "purchase": purchase(trial)}
            | {
                "loss": 3.0
                + 0.05 * (math.log2(trial.optimizer.learning_rate) - best) ** 2
                + noise * generator.standard_normal()
            }
            for trial in trials
        )
        return Counter(finished=len(trials))

    buy(_grid_of(planned, corpora), store, run, False, math.inf, Console(quiet=True), first_looks)
    return store.results()


def test_a_sequence_of_first_looks_buys_the_plan_s_runs_alone_and_goes_on_without(tmp_path):
    found = plan("width=4096", "1e17", Sweep("plan"))
    file = tmp_path / "plan.toml"
    file.write_text(found.toml())
    planned, runs = load_sweep(file), sum(step.runs for step in found.steps)
    best = math.log2(planned.learning_rates[4])
    assert len(_bought(planned, best, tmp_path / "runs", 0.04, first_looks=True)) == runs
    assert len(_bought(planned, best, tmp_path / "runs", 0.04)) > runs


@pytest.mark.parametrize("rates", [None, tuple(2 ** (-k / 2) for k in range(8, 18))])
def test_a_sequence_first_buys_the_runs_of_the_plan(rates, tmp_path):
    found = plan("width=4096", "1e17", Sweep("plan", learning_rates=rates))
    file = tmp_path / "plan.toml"
    file.write_text(found.toml())
    planned = load_sweep(file)
    rows = _bought(planned, math.log2(planned.learning_rates[len(planned.learning_rates) // 2]), tmp_path)
    for number, step in enumerate(found.steps, start=1):
        bought = rows[rows["purchase"] == number]
        assert set(bought["width"]) == {step.trial.model.width} and len(bought) == step.runs
        assert step.says.startswith(f"{len(bought)} runs, ")
        assert step.flops == pytest.approx(step.runs * training_flops(step.trial, 256))
    start, wider = (rows[rows["purchase"] == n] for n in (1, 2))
    ends = [f"2^{np.log2(end):g}" for end in (start["lr"].min(), start["lr"].max())]
    assert f" {' to '.join(ends)}, {start['seed'].nunique()} seeds each" in found.steps[0].says
    reach = np.log2(wider["lr"].max() / wider["lr"].min()) / 2
    assert f"within {reach:g} octaves of the optimum" in found.steps[1].says
    assert planned.num_seeds == start["seed"].nunique()


def test_a_table_of_ones_own_replaces_what_is_usual():
    usual, own = (plan("width=4096", "1e17", table=t) for t in (None, "results/lr_transfer"))
    assert "lr_transfer, mup" in repr(own) and "public sweeps" in repr(usual)
    assert own.half_width < usual.half_width
    assert own.sweep.learning_rates[4] == 2**-6
    sp = plan("width=2048", "1e17", Sweep("sp", parametrizations=("sp",)), _drifting()).sweep
    assert sp.learning_rates[4] == 2**-9 / (min(sp.scale_axis.values) / 64), (
        "its rule's, at its smallest width"
    )
    assert plan("width=2048", "1e17", Trial().replace(learning_rate=2**-10)).sweep.learning_rates[4] == 2**-10
    with pytest.raises(TableError, match="two widths with a known optimum"):
        plan("width=4096", "1e17", table=_one_width())


def test_a_table_along_another_scale_gives_its_rates_alone_and_the_plan_says_so():
    found = plan("depth=16", "1e17", table=_drifting())
    assert found.lines()[-1].endswith("is along width, so only its rates are used")
    assert found.sweep.learning_rates[4] == 2**-4
    assert found.regret == plan("depth=16", "1e17").regret


def _drifting():
    """μP's optimum at 2^-4, SP's at 2^-9 at width 64 and falling."""
    rows = [
        {"width": width, "parametrization": rule, "lr": 2.0**x, "loss": 2 + 0.1 * (x - best - alpha * k) ** 2}
        for k, width in enumerate((64, 128, 256))
        for rule, best, alpha in (("mup", -4, 0), ("sp", -9, -1))
        for x in range(-14, 0)
    ]
    return pd.DataFrame(rows)


def _one_width():
    rows = [{"width": 64, "lr": 2.0**x, "loss": 2 + 0.1 * (x + 6) ** 2} for x in range(-9, -3)]
    return pd.DataFrame(rows)


def test_a_sweeps_own_rules_and_rates_are_taken_and_another_hyperparameter_is_refused():
    rules, rates = Axis("parametrization", ("sp", "mup")), Axis("learning_rate", (2**-9, 2**-8, 2**-7))
    found = plan("width=1024", "1e15", Sweep("mine", tune=rates, compare=rules))
    assert found.rule == "mup" and found.sweep.experiment == "mine"
    assert found.sweep.learning_rates == (2**-9, 2**-8, 2**-7)
    assert plan("width=1024", "1e15", Sweep("mine", parametrizations=("sp",))).rule == "sp"
    with pytest.raises(ConfigError, match="tune weight_decay of the sweep: a plan is made for the learning"):
        plan("width=1024", "1e15", Sweep("mine", tune=Axis("weight_decay", (0.0, 0.1))))


@pytest.mark.parametrize(
    ("target", "budget", "sentence"),
    [
        ("", "1e17", "a plan needs a target: give --at width=4096"),
        ("widht=3", "1e17", "is not FIELD=VALUE with a field of width, depth, batch_size, steps, tokens"),
        ("width=wide", "1e17", "width 'wide' is not a whole number"),
        ("steps=9,tokens=3e6", "1e17", "steps and tokens were both given"),
        ("width=4096 width=8192", "1e17", "'width=8192' and another value of width were both given"),
        ("width=100", "1e17", "width 100 is not a multiple of head_size 32"),
        ("width=96", "1e17", "target width=96 has not 3 smaller proxies, from width 64 on: sweep it itself"),
        (
            "width=128",
            "1e17",
            "target width=128 has not 3 smaller proxies, from width 64 on: sweep it itself",
        ),
        ("tokens=-5", "1e17", "target: tokens -5.0 is not allowed: it must be above 0"),
        ("width=4096", "soon", "budget 'soon' is not a time; write 90s, 30m or 2h"),
        ("width=4096", "2h", "budget 2h is a time: give flops_per_second"),
        ("width=4096", "-1", "budget -1 is not allowed"),
        ("width=4096", "1e6", "budget (1e+06 FLOP) does not pay three proxies (24 + 5 + 5 runs), which cost"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(target, budget, sentence):
    with pytest.raises(ConfigError) as error:
        plan(target, budget)
    assert sentence in str(error.value)


def test_a_budget_that_is_too_small_is_told_in_the_units_of_the_cost():
    with pytest.raises(
        ConfigError, match=r"budget \(6e\+09 FLOP, 60 s\) does not .* [\d.e+]+ FLOP, [\d.]+ (min|h): give"
    ):
        plan("width=4096", "60s", flops_per_second=1e8)


def test_a_plan_says_when_the_target_itself_is_better_swept():
    """One octave above the least useful width, proxies cost what the target costs, and SP's optimum moves."""
    sp = Sweep("sp", parametrizations=("sp",))
    near, far = plan("depth=16", "1e16"), plan("width=8192", "1e20", sp)
    assert near.at_target.endswith("sweep it rather than proxies")
    assert far.at_target.endswith("the plan costs less")
    values = len(near.sweep.learning_rates)
    assert near.at_target.startswith(f"{values} runs of the target itself")
    assert near.cost(values * near.target_flops) in near.at_target


def test_a_plan_says_why_the_rest_of_the_budget_is_left():
    rich, poor = plan("width=1024", "1e16"), plan("width=1024", "2e14")
    times = (1e16 - rich.flops) / rich.target_flops
    assert rich.left.startswith("left of the budget: 9.9e+15 FLOP")
    assert f"{times:.3g} times the target's own run" in rich.left and rich.left in rich.lines()
    assert poor.left.endswith("the target's own run costs more") and poor.at_target == ""


def test_other_rules_stand_in_a_sentence_of_their_own():
    found = plan("width=1024", "1e16")
    assert list(found.others) == ["sp"] and found.others["sp"] > found.regret
    left = f"{found.others['sp']:.4f} nat"
    assert f"under sp the same runs would leave {left}: its optimum moves more" in found.lines()


def test_short_times_are_not_rounded_to_nothing():
    assert "0.2 s" in plan("width=1024", "1e16", flops_per_second=1e15).lines()[0]
