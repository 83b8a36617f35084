"""Laws of the loss from tables: worlds of known laws, and tables that contradict themselves."""

import math

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import Columns, Reading, loss_laws
from mup_tpu.cli import main
from mup_tpu.errors import TableError
from mup_tpu.words import summary

E, A, B, ALPHA, BETA = 1.82, 482.0, 2085.0, 0.348, 0.366  # Besiroglu et al. 2024, table 1


def runs(noise=0.0, seed=0, gain=1.0):
    """Return runs of Chinchilla's law; `gain` divides the compute that a recipe needs for a loss."""
    sizes = [(n, d) for n in 10 ** np.linspace(7.5, 10, 6) for d in 10 ** np.linspace(8.5, 11.5, 5)]
    table = pd.DataFrame(sizes, columns=["N", "D"])
    share = gain**0.5
    table["loss"] = E + A * (share * table["N"]) ** -ALPHA + B * (share * table["D"]) ** -BETA
    shocks = np.random.default_rng(seed).standard_normal(len(table))
    return table.assign(loss=table["loss"] * np.exp(noise * shocks))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t,
        lambda t: t.rename(columns={"N": "num_params", "D": "total_tokens", "loss": "eval/loss"}),
        lambda t: t.assign(flops=6 * t["N"] * t["D"]).drop(columns="D"),
        lambda t: t.assign(flops=6 * t["N"] * t["D"]).drop(columns="N"),
        lambda t: t.assign(N=[f"{n / 1e9}B" for n in t["N"]], flops=7e0 * t["N"] * t["D"]),
        lambda t: pd.concat([t.assign(lr=1e-3, loss=t["loss"] + 0.1), t.assign(lr=2e-3)]),
        lambda t: pd.concat([t, t.assign(loss=np.nan)]),  # diverged
    ],
)
def test_law_is_recovered_from_any_two_of_its_sizes(change):
    (one,) = loss_laws(change(runs())).laws
    assert one.law.parameters == pytest.approx({"E": E, "A": A, "α": ALPHA, "B": B, "β": BETA}, rel=0.01)
    assert one.held_out.loss == pytest.approx(one.held_out.expected.loss, rel=1e-3)


@pytest.fixture(scope="module")
def noisy():
    """Laws of four tables with noise; their intervals take most of this file's time."""
    return [loss_laws(runs(0.003, seed), ["C=1e21", "N=7B,D=2T"]) for seed in range(4)]


def test_best_size_of_a_budget_is_where_the_law_is_least(noisy):
    laws = noisy[0]
    (one,), (at_budget, at_size) = laws.laws, laws.targets
    n = 10 ** np.linspace(8, 11, 3001)
    losses = [one.law.loss(size, 1e21 / 6 / size) for size in n]
    best, low, high = at_budget.best.params
    assert best == pytest.approx(n[np.argmin(losses)], rel=0.01)
    assert at_budget.expected.loss == pytest.approx(min(losses)) == pytest.approx(at_budget.best.loss[0])
    true = (ALPHA * A / BETA / B) ** (1 / (ALPHA + BETA)) * (1e21 / 6) ** (BETA / (ALPHA + BETA))
    assert low < true < high and high < 1.5 * low
    assert at_size.expected.loss == pytest.approx(one.law.loss(7e9, 2e12))
    a, low, high = one.law.split
    assert low < BETA / (ALPHA + BETA) < high


@pytest.mark.parametrize("is_compute", [True, False])
def test_speedup_of_a_recipe_holds_the_true_one(is_compute):
    recipes = [runs(0.002, 1).assign(recipe="old"), runs(0.002, 2, gain=1.25).assign(recipe="new")]
    if is_compute:
        c = 10 ** np.linspace(17, 21, 12)
        recipes = [
            pd.DataFrame({"compute": c, "loss": 1.8 + 2000 * (gain * c) ** -0.18, "recipe": name})
            for name, gain in (("old", 1.0), ("new", 1.25))
        ]
        recipes = [t.assign(loss=t["loss"] * np.exp(0.001 * np.random.default_rng(i).standard_normal(12)))
                   for i, t in enumerate(recipes)]  # fmt: skip
    table = pd.concat(recipes)
    laws = loss_laws(table, ["compute=1e20"], reading=Reading(Columns(parametrization="recipe")))
    (speedup,) = laws.speedups
    assert (speedup.compared, speedup.baseline, speedup.at) == ("new", "old", 1e20)
    assert speedup.low < 1.25 < speedup.high and speedup.high / speedup.low < 1.6
    assert "new over old: × 1." in summary(laws) and "in compute at 1e+20 FLOP" in summary(laws)


def test_parameters_are_inside_their_intervals_as_often_as_they_say(noisy):
    inside = []
    for laws in noisy:
        intervals, true = laws.laws[0].law.intervals, {"α": ALPHA, "β": BETA, "E": E}
        inside += [intervals[name][0] <= x <= intervals[name][1] for name, x in true.items()]
    assert np.mean(inside) >= 0.8


def test_pinned_asymptote_is_kept_in_all_draws():
    laws = loss_laws(runs(0.003), asymptote=1.7)
    assert laws.laws[0].law.irreducible == pytest.approx(1.7)
    assert laws.laws[0].law.intervals["E"] == pytest.approx((1.7, 1.7))
    assert "E 1.7 as given" in summary(laws)


def test_runs_of_one_ratio_have_a_law_of_compute():
    table = runs()
    table = table.assign(D=20 * table["N"], loss=lambda t: E + A * t["N"] ** -ALPHA)
    laws = loss_laws(table, ["params=1e10,tokens=2e11"])
    assert laws.sizes == ("compute",)
    assert laws.laws[0].law.exponent == pytest.approx(ALPHA / 2, rel=0.01)
    assert laws.targets[0].expected.loss == pytest.approx(E + A * 1e10**-ALPHA, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        (lambda t: t.iloc[[0, 4, 12, 18, 21]], {}, "needs more than 5 points and"),
        (lambda t: t[t["N"].isin(t["N"].unique()[:2])], {}, "there are 10 points and 2 and 5 sizes"),
        (lambda t: t.assign(flops=t["N"] * t["D"]), {}, r"compute 1e\+16 of row 0 contradicts 6 × 3.16e"),
        (lambda t: t.assign(loss=-t["loss"]), {}, "loss -.* must be above 0 and below 1e"),
        (lambda t: t.assign(loss=1e-300 * t["loss"]), {}, "loss .*e-300 is not allowed in a scaling law"),
        (lambda t: t.assign(N=1e290 * t["N"]), {}, r"variable 3.16.*e\+297 is not allowed"),
        (lambda t: t.assign(loss=math.nan), {"at": ["N=7B,D=2T"]}, "no run of the table has a finite loss"),
        (lambda t: t.assign(N=0), {"at": ["N=7B,D=2T"]}, "params must be above 0, but row 0 has 0"),
        (lambda t: t[:0], {}, "table has no finished run"),
        (lambda t: t, {"at": ["N=7B,params=8B,D=2T"]}, "at N=7B,params=8B,D=2T has params twice"),
        (lambda t: t.assign(N=t["N"] - t["N"][0]), {}, "params must be above 0, but row 0 has 0"),
        (lambda t: t.assign(D=t["D"].where(t["D"] > 1e9)), {}, "tokens is empty in row 0"),
        (lambda t: t.drop(columns="loss"), {}, "table has no column 'loss'; it has N, D"),
        (lambda t: t, {"reading": Reading(Columns(seed="run"))}, "no column 'run'; it has N, D, loss"),
        (lambda t: t[["loss"]].assign(kind="x"), {}, "no column of parameters, tokens or compute"),
        (lambda t: t, {"at": ["N=7B"]}, "at N=7B is no target of this law: give params=NUMBER,tokens"),
        (lambda t: t, {"asymptote": 4.0}, "asymptote 4 must be above 0 and below every loss"),
    ],
)  # fmt: skip
def test_tables_without_a_law(change, options, sentence):
    with pytest.raises(TableError, match=sentence):
        loss_laws(change(runs()), **options)


def test_law_of_a_results_folder_takes_the_best_rate_of_each_size(capsys):
    main(["predict", "results/lr_transfer", "--loss-law", "--where", "parametrization=mup"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "at each size the best run over lr is taken" in printed
    assert "largest, predicted from the smaller ones: 1.4" in printed
    with pytest.raises(SystemExit):
        main(["predict", "results/scaling_law", "--asymptote", "1"])
    assert "--asymptote 1 needs --loss-law" in capsys.readouterr().err.replace("1.0", "1")
