"""Rules for batch size, tokens and weight decay, by the numbers of their papers; what rows say of them."""

import math

import pytest

from mup_tpu.config import Sweep, Trial
from mup_tpu.errors import ConfigError
from mup_tpu.models import declare, parameter_scalings
from mup_tpu.optimizers import UPDATE_RULES, constants
from mup_tpu.rules.optimizer import BATCH_RULES, DECAY_RULES, TOKEN_RULES
from mup_tpu.rules.parametrization import PARAMETRIZATIONS
from mup_tpu.training import pack_key
from mup_tpu.training.record import applied

VOCAB, T = 40, 16
HIDDEN, EMBEDDING = "transformer.h.0.mlp.c_fc.weight", "transformer.wte.weight"
BASE = Trial().replace(
    width=64, base_width=32, head_size=16, sequence_length=T, batch_size=8, base_batch_size=8, steps=100,
    base_steps=100, learning_rate=0.01, weight_decay=0.1, eps=1e-8, beta1=0.9, beta2=0.95,
)  # fmt: skip


def hyperparameters(trial: Trial, name: str = HIDDEN) -> dict[str, float]:
    """Those of one parameter, with all factors."""
    scaling = parameter_scalings(trial, VOCAB, T)[name]
    parameter = declare(trial.model, VOCAB, T).parameters[name]
    config = trial.optimizer
    rule = UPDATE_RULES["adamw"]
    betas = constants(trial, [rule])["adamw"]
    return {
        "lr": config.learning_rate * scaling.learning_rate,
        "weight_decay": rule.weight_decay(config, parameter, scaling),
        "eps": config.eps * scaling.eps,
        "beta1": betas.first,
        "beta2": betas.second,
    }


@pytest.mark.parametrize("name", [HIDDEN, EMBEDDING])
@pytest.mark.parametrize("parametrization", ["sp", "mup", "completep", "sp_embedding"])
@pytest.mark.parametrize(
    ("batch", "tokens"), [(4.0, 1.0), (1.0, 16.0), (4.0, 16.0), (0.5, 0.25)], ids=lambda x: f"{x:g}"
)
def test_completedp_s_batch_and_token_rules_are_those_of_its_table(batch, tokens, parametrization, name):
    """Mlodozeniec et al. 2025, Table 1, last column, on top of any rule for width and depth."""
    plain = BASE.replace(
        parametrization=parametrization, batch_size=int(8 * batch), steps=int(100 * tokens / batch)
    )
    ruled = plain.replace(batch_rule="completedp", token_rule="completedp")
    assert (ruled.growth.batch_size, ruled.growth.tokens) == (batch, tokens)
    was, root = hyperparameters(plain, name), math.sqrt(batch / tokens)
    assert hyperparameters(ruled, name) == pytest.approx(
        {
            "lr": was["lr"] * root,
            "weight_decay": was["weight_decay"] * root,
            "eps": was["eps"] / root,
            "beta1": 1 - 0.1 * batch / tokens,
            "beta2": 1 - 0.05 * batch / tokens,
        }
    )
    assert ruled.optimizer.learning_rate == 0.01, "what is tuned stays the base's"


@pytest.mark.parametrize(
    ("rule", "field", "factor"),
    [
        ("none", "batch_rule", 1.0), ("lr_sqrt", "batch_rule", 2.0), ("lr_linear", "batch_rule", 4.0),
        ("none", "token_rule", 1.0), ("lr_0.32", "token_rule", 4**-0.32), ("lr_0.5", "token_rule", 0.5),
    ],
)  # fmt: skip
def test_the_other_rules_change_the_learning_rate_alone(rule, field, factor):
    grown = BASE.replace(batch_size=32, steps=25) if field == "batch_rule" else BASE.replace(steps=400)
    was = hyperparameters(grown)
    assert hyperparameters(grown.replace(**{field: rule})) == pytest.approx(was | {"lr": was["lr"] * factor})


@pytest.mark.parametrize(
    ("parametrization", "rule", "expected"),
    [
        ("mup", "parametrization", 4.0), ("sp", "parametrization", 1.0), ("mup", "linear", 4.0),
        ("sp", "linear", 4.0), ("mup", "sqrt", 2.0), ("sp", "sqrt", 2.0), ("mup", "constant", 1.0),
        ("mup", "timescale", 4.0), ("sp", "timescale", 1.0),
    ],
)  # fmt: skip
def test_hidden_decay_against_width(parametrization, rule, expected):
    trial = BASE.replace(parametrization=parametrization, width=128, decay_rule=rule)
    assert hyperparameters(trial)["weight_decay"] == pytest.approx(0.1 * expected)
    assert hyperparameters(trial, EMBEDDING)["weight_decay"] == pytest.approx(0.1), "hidden matrices alone"


RULES = [*((rule, "none") for rule in BATCH_RULES), *(("none", rule) for rule in TOKEN_RULES)]


@pytest.mark.parametrize("parametrization", PARAMETRIZATIONS)
@pytest.mark.parametrize(("batch_rule", "token_rule"), [*RULES[1:], ("completedp", "completedp")])
def test_a_constant_timescale_is_constant_under_all_other_rules(parametrization, batch_rule, token_rule):
    """Wang & Aitchison 2024: τ = B/(η·λ·D), of hidden matrices and of embeddings."""

    def timescale(trial: Trial, name: str) -> float:
        values = hyperparameters(trial, name)
        return trial.data.batch_size / (
            values["lr"] * values["weight_decay"] * trial.train.steps * trial.data.batch_size
        )

    base = BASE.replace(
        parametrization=parametrization, width=32, depth=2, base_depth=2, decay_rule="timescale",
        batch_rule=batch_rule, token_rule=token_rule,
    )  # fmt: skip
    grown = base.replace(width=128, depth=8, batch_size=16, steps=800)
    for name in (HIDDEN, EMBEDDING):
        assert timescale(grown, name) == pytest.approx(timescale(base, name))


@pytest.mark.parametrize(
    ("field", "rule"),
    [("batch_rule", r) for r in BATCH_RULES] + [("token_rule", r) for r in TOKEN_RULES]
    + [("decay_rule", r) for r in DECAY_RULES],
)  # fmt: skip
def test_at_the_base_every_rule_changes_nothing(field, rule):
    base = BASE.replace(width=32)
    ruled = base.replace(**{field: rule})
    assert parameter_scalings(ruled, VOCAB, T) == parameter_scalings(base, VOCAB, T)
    assert pack_key(ruled) == pack_key(base)


def test_rows_hold_what_was_applied_beside_what_was_tuned():
    trial = BASE.replace(
        parametrization="completep", depth=8, base_depth=2, width=128, batch_size=16, steps=50,
        batch_rule="completedp", token_rule="completedp",
    )  # fmt: skip
    assert applied(trial, VOCAB) == pytest.approx(
        {
            "applied_lr": 0.01 / 4 * 2**0.5,
            "applied_weight_decay": 0.1 * 4 * 2**0.5,
            "applied_eps": 1e-8 / 4 / 4 / 2**0.5,
            "applied_beta1": 0.8,
            "applied_beta2": 0.9,
        }
    )
    sgd = applied(BASE.replace(optimizer="sgd", batch_rule="lr_linear", batch_size=32, steps=25), VOCAB)
    assert sgd == pytest.approx({"applied_lr": 0.04, "applied_weight_decay": 0.1})


def test_a_beta_below_zero_is_one_sentence_before_anything_trains():
    trial = BASE.replace(batch_size=128, steps=7, batch_rule="completedp")
    with pytest.raises(ConfigError, match=r"^beta1 0\.9 would be -0\.6 by batch_rule 'completedp'.*0\.9375"):
        pack_key(trial)
    assert constants(trial.replace(beta1=0.9375, beta2=0.95), [UPDATE_RULES["adamw"]])["adamw"].first == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_rule": "sqrt"}, "batch_rule 'sqrt' is not one of 'none', 'lr_sqrt'"),
        ({"batch_rule": "lr_sqrt", "base_batch_size": 0}, "batch_rule 'lr_sqrt' needs base_batch_size"),
        ({"token_rule": "lr_0.5", "base_steps": 0}, "token_rule 'lr_0.5' needs base_steps, which is 0"),
        (
            {"decay_rule": "sqrt", "decay_mode": "independent"},
            "decay_rule 'sqrt' scales coupled weight decay: it needs decay_mode 'coupled', not 'independent'",
        ),
        ({"batch_rule": "completedp", "decay_mode": "independent"}, "batch_rule 'completedp' scales coupled"),
    ],
)
def test_what_would_do_nothing_or_cannot_be_is_refused_in_one_sentence(changes, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        BASE.replace(**changes)
    assert "\n" not in str(caught.value)


def test_rules_of_the_learning_rate_alone_go_with_independent_decay():
    trial = BASE.replace(decay_mode="independent", batch_rule="lr_sqrt", batch_size=32, steps=25)
    values = hyperparameters(trial)
    assert values["lr"] * values["weight_decay"] == pytest.approx(0.1), "the shrinking by λ stays"


@pytest.mark.parametrize(
    ("scale", "changes", "sentence"),
    [
        (
            {"depth": (2, 4)},
            {"compare": {"parametrization": ("mup", "completep")}},
            "parametrization 'completep' follows depth, .* base_depth is 0",
        ),
        (
            {"steps": (50, 100)},
            {"compare": {"decay_rule": ("linear", "timescale")}},
            "decay_rule 'timescale' follows steps, .* base_steps is 0",
        ),
    ],
)
def test_a_sweep_along_a_scale_that_its_rule_has_no_base_for_is_refused(scale, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Sweep("s", Trial(), scale=scale, **changes)
    Sweep("s", Trial().replace(base_depth=2, base_steps=50), scale=scale, **changes)
    ((field, values),) = scale.items()
    Sweep("s", Trial(), scale=[{field: value, "width": 64} for value in values])


def test_rules_are_an_axis_to_compare_along():
    points = tuple({"batch_size": b, "steps": 400 // b} for b in (4, 8, 16))
    sweep = Sweep(
        "batches", BASE, scale=points, measured_by="batch_size", compare={"batch_rule": ("none", "lr_sqrt")}
    )
    trials = sweep.trials()
    assert {t.growth.tokens for t in trials} == {0.5}
    assert {(t.data.batch_size, t.optimizer.batch_rule) for t in trials} == {
        (b, rule) for b in (4, 8, 16) for rule in ("none", "lr_sqrt")
    }
