"""Configuration: what is refused and in which words, and what makes a trial the same trial."""

import dataclasses
import re

import pytest

from mup_tpu.config import Axis, DataConfig, Ladder, ModelConfig, OptimizerConfig, Sweep, TrainConfig, Trial
from mup_tpu.config_io import from_dict, load_sweep, load_trial, parse_axis
from mup_tpu.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ModelConfig(parametrization="mupp"), "parametrization 'mupp' is not one of 'mup', 'sp'"),
        (
            lambda: ModelConfig(width=100),
            "width 100 is not a multiple of head_size 32; nearest allowed: 96, 128",
        ),
        (
            lambda: ModelConfig(base_width=40),
            "base_width 40 is not a multiple of head_size 32; nearest allowed: 32, 64",
        ),
        (
            lambda: ModelConfig(width=63, growing_dimension="head_size"),
            "width 63 is not a multiple of the number of heads 2",
        ),
        (lambda: ModelConfig(depth=0), "depth 0 is not allowed"),
        (lambda: ModelConfig(readout_zero_init=True), "needs tied false"),
        (
            lambda: OptimizerConfig(learning_rate=-8.0),
            "learning_rate -8 is not allowed.* write 0.00390625 or 2\\^-8",
        ),
        (
            lambda: OptimizerConfig(learning_rate=0.0),
            "learning_rate 0 is not allowed: a learning rate is above 0",
        ),
        (lambda: OptimizerConfig(beta2=1.0), r"beta2 1.0 is not in \[0, 1\)"),
        (lambda: TrainConfig(steps=100, warmup=200), "warmup 200 is 200 steps, but the run has steps 100"),
        (lambda: TrainConfig(steps=1, warmup=0.9), "warm-up must be shorter than the run"),
        (lambda: TrainConfig(warmup=2.5), "warmup 2.5 is neither a fraction below 1 nor a whole number"),
        (lambda: DataConfig(validation_fraction=1.5), "validation_fraction 1.5 is not between 0 and 1"),
        (lambda: Sweep("x", learning_rates=()), "learning_rates of the sweep is empty"),
        (lambda: Trial().replace(widht=3), "unknown key 'widht'; the nearest known key is 'width'"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_in_one_sentence(make, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[model]\nwidht = 3", r"trial\.toml: model: unknown key 'widht'; the nearest known key is 'width'"),
        ("[modle]\nwidth = 3", "unknown key 'modle'; the nearest known key is 'model'"),
        ("[model]\nwidth = '64'", "model: width '64' is not a whole number"),
        ("[model]\ntied = 1", "tied 1 is not true or false"),
        ("[optimizer]\noptimizer = 'adam'", "optimizer 'adam' is not one of 'adamw', 'sgd'"),
        ("[optimizer]\nlearning_rate = 'fast'", "learning rate 'fast' is not a number"),
        ("model = 3", "model: 3 is not a table"),
        ("[model", "is not valid TOML"),
    ],
)
def test_bad_toml_is_refused_in_one_sentence(toml, sentence, tmp_path):
    path = tmp_path / "trial.toml"
    path.write_text(toml)
    with pytest.raises(ConfigError, match=sentence):
        load_trial(path)


def test_missing_toml(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml cannot be read: No such file"):
        load_trial(tmp_path / "nothing.toml")


def test_toml_round_trip(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text(
        'experiment = "mine"\nwidths = [64, 128]\nlearning_rates = ["2^-8", 0.01]\nnum_seeds = 2\n'
        "[base.model]\ndepth = 3\n[base.train]\nsteps = 50\n[base.optimizer]\nlearning_rate = '2^-7'\n"
    )
    sweep = load_sweep(path)
    assert sweep.learning_rates == (2**-8, 0.01)
    assert (sweep.base.model.depth, sweep.base.train.steps) == (3, 50)
    assert sweep.base.optimizer.learning_rate == 2**-7
    assert from_dict(Trial, sweep.base.to_dict()) == sweep.base


def test_sweep_is_the_whole_grid_narrow_first():
    sweep = Sweep("x", widths=(128, 64), learning_rates=(0.02, 0.01, 0.02), num_seeds=2)
    trials = sweep.trials()
    assert len(trials) == 2 * 2 * 2 * 2
    assert [t.model.width for t in trials] == [64] * 8 + [128] * 8
    assert len({t.trial_id("data") for t in trials}) == 16


def test_trial_id_names_what_decides_the_result():
    trial = Trial()
    base = trial.trial_id("data")
    assert re.fullmatch("[0-9a-f]{16}", base)
    assert Trial().trial_id("data") == base
    assert trial.trial_id("other data") != base
    changes = {
        "width": 256,
        "learning_rate": 0.5,
        "seed": 1,
        "data_seed": 1,
        "steps": 10,
        "precision": "bf16",
        "eps": 1e-6,
    }
    ids = {trial.replace(**{name: value}).trial_id("data") for name, value in changes.items()}
    assert len(ids | {base}) == len(changes) + 1
    # The fingerprint stands for the text and its tokens: the same text from another folder is the same trial.
    assert trial.replace(corpus="elsewhere/sotu.txt").trial_id("data") == base


def test_a_later_field_changes_the_trial_id_only_where_it_differs_from_its_default():
    later = [("later", int, dataclasses.field(default=0))]
    Later = dataclasses.make_dataclass("Later", later, bases=(ModelConfig,), frozen=True)
    model = dataclasses.asdict(Trial().model)
    assert Trial(model=Later(**model)).trial_id("data") == Trial().trial_id("data")
    assert Trial(model=Later(**model, later=2)).trial_id("data") != Trial().trial_id("data")
    wider = dataclasses.replace(Trial().model, width=256)
    assert Trial(model=Later(**dataclasses.asdict(wider))).trial_id("data") != Trial().trial_id("data")


def test_warmup_in_steps_or_as_a_fraction():
    assert TrainConfig(steps=200, warmup=0.1).warmup_steps == 20
    assert TrainConfig(steps=200, warmup=20).warmup_steps == 20
    assert TrainConfig(steps=200, warmup=0).warmup_steps == 0


def test_heads_and_head_size():
    grown = ModelConfig(width=256, head_size=32, base_width=64)
    assert (grown.heads, grown.actual_head_size, grown.width_multiplier) == (8, 32, 4)
    stretched = ModelConfig(width=256, head_size=32, base_width=64, growing_dimension="head_size")
    assert (stretched.heads, stretched.actual_head_size) == (2, 128)


AXES = """
experiment = "mine"
scale = {depth = [4, 2]}
tune = {weight_decay = [0.1, 0, "2^-4"]}
compare = {precision = ["float32", "bf16"]}
"""


def sweep_of(tmp_path, toml: str) -> Sweep:
    path = tmp_path / "sweep.toml"
    path.write_text(toml)
    return load_sweep(path)


def test_a_sweep_is_any_scale_against_any_hyperparameter(tmp_path):
    sweep = sweep_of(tmp_path, AXES)
    assert [axis.column for axis in sweep.axes] == ["depth", "weight_decay", "precision"]
    trials = sweep.trials()
    points = [(t.model.depth, t.train.precision, t.optimizer.weight_decay) for t in trials]
    assert points == [(d, p, wd) for d in (2, 4) for p in ("float32", "bf16") for wd in (0.0, 0.0625, 0.1)]
    assert {t.model.parametrization for t in trials} == {"mup"}, "nothing but the precision is compared"


def test_a_ladder_sets_several_fields_at_each_point(tmp_path):
    toml = 'experiment = "l"\nmeasured_by = "tokens"\n[[ladder]]\nbatch_size = 4\nsteps = 50\n'
    sweep = sweep_of(tmp_path, toml + "[[ladder]]\nbatch_size = 8\nsteps = 100\n")
    assert sweep.scale_axis == Ladder(
        ({"batch_size": 4, "steps": 50}, {"batch_size": 8, "steps": 100}), "tokens"
    )
    assert sweep.scale_axis.column == "tokens_planned"
    assert {(t.data.batch_size, t.train.steps) for t in sweep.trials()} == {(4, 50), (8, 100)}
    assert Ladder(({"width": 64, "depth": 2},), measured_by="depth").column == "depth"


def test_parametrizations_are_compared_by_default_where_they_differ():
    """Along the width; at one width SP and μP are one and the same, or differ as they do everywhere."""
    assert Sweep("x").compare_axis.values == ("sp", "mup")
    assert Sweep("x", scale=Axis("depth", (2, 4))).compare_axis.values == ("mup",)
    assert Sweep("x", scale=Ladder(({"width": 64, "depth": 2},))).compare_axis.values == ("sp", "mup")


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("scale = {dept = [2]}", "scale: unknown key 'dept'; the nearest known key is 'depth'"),
        ("scale = {depth = 2}", "scale: depth 2 is not a list"),
        ("scale = {depth = []}", "depth of the sweep has no values"),
        ("scale = {depth = [2.5]}", "scale: depth 2.5 is not a whole number"),
        ("scale = {depth = [2], width = [64]}", r"is not one field with its values.*\[\[ladder\]\]"),
        ("scale = {precision = ['bf16']}", "scale precision of the sweep is not a number"),
        ("tune = {tied = [true, false]}", "tune tied of the sweep is not a number"),
        ("tune = {weight_decay = ['much']}", "tune: weight_decay 'much' is not a number"),
        ("widths = [64]\nscale = {depth = [2]}", "widths and scale of the sweep were both given"),
        ("scale = {seed = [1, 2]}", "seed is no axis of a sweep: num_seeds gives"),
        ("scale = {learning_rate = [0.1]}", "learning_rate is on two axes of the sweep"),
        ("scale = {depth = [2]}\nladder = [{depth = 2}]", "scale and ladder were both given"),
        ("ladder = [{depth = 2}, {width = 64}]", "does not set the first one's fields: depth"),
        (
            "ladder = [{depth = 2}]\nmeasured_by = 'time'",
            "measured_by 'time' is not one of 'params', 'flops'",
        ),
        ("ladder = 3", r"ladder 3 is not tables of fields: write \[\[ladder\]\]"),
        ("ladder = []", "ladder has no points"),
        ("measured_by = 'flops'", "measured_by 'flops' is that of a ladder, and there is none"),
    ],
)
def test_bad_axes_are_refused_in_one_sentence(toml, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence) as caught:
        sweep_of(tmp_path, f'experiment = "x"\n{toml}\n')
    assert "\n" not in str(caught.value) and "sweep.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("depth=2,4,8", Axis("depth", (2, 4, 8))),
        ("weight_decay=0,0.01,2^-3", Axis("weight_decay", (0.0, 0.01, 0.125))),
        ("tied=true,false", Axis("tied", (True, False))),
        ("parametrization=mup,sp", Axis("parametrization", ("mup", "sp"))),
    ],
)
def test_axes_from_the_command_line(text, axis):
    assert parse_axis(text, "scale") == axis


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("depth", "scale 'depth' is not FIELD=VALUE,VALUE"),
        ("depth=two", "scale: depth 'two' is not a whole number"),
        ("weight_decay=x", "scale: weight_decay 'x' is not a number"),
        ("tied=maybe", "scale: tied 'maybe' is not true or false"),
        ("depth=", "depth of the sweep has no values"),
    ],
)
def test_bad_axes_on_the_command_line(text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_axis(text, "scale")


def test_a_field_that_was_renamed_is_known_by_its_former_name(tmp_path):
    """In TOML, in stored configurations and to `replace`; and `trial_id` still goes by it."""
    path = tmp_path / "trial.toml"
    path.write_text("[model]\ngrowing = 'head_size'\n")
    trial = load_trial(path)
    assert trial == Trial().replace(growing="head_size") == Trial().replace(growing_dimension="head_size")
    assert trial.trial_id("data") != Trial().trial_id("data")
