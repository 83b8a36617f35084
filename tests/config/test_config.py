"""Configuration: what is refused and in which words, and what makes a trial the same trial."""

import dataclasses
import math
import re

import pytest
import tyro

from mup_tpu.config import (
    Axes,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunOptions,
    SequenceOptions,
    Sweep,
    SweepOptions,
    TrainConfig,
    Trial,
    columns,
    parse_number,
)
from mup_tpu.config.grid import design_points
from mup_tpu.config.sweep import Domain, Search
from mup_tpu.config.toml import (
    from_dict,
    load_search,
    load_sweep,
    load_trial,
    parse_axis,
    write_sweep,
)
from mup_tpu.config.trial import part_of_field
from mup_tpu.config.values import about
from mup_tpu.errors import ConfigError
from mup_tpu.optimizers import UPDATE_RULES, update_rule_of
from mup_tpu.rules.parametrization import Parameter, Scaling

HUGE, SWEEP = 10**40, 'experiment = "x"\n'
FIVE = ("width", "depth", "batch_size", "steps", "beta1")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ModelConfig(parametrization="mupp"), "parametrization 'mupp' is not one of 'mup', 'sp'"),
        (lambda: ModelConfig(width=100), "width 100 is not a multiple of head_size 32; nearest allowed:"),
        (lambda: ModelConfig(base_width=40), "base_width 40 is not a multiple of head_size 32; nearest"),
        (lambda: ModelConfig(width=63, growing_dimension="head_size"), "width 63 is not a multiple of the"),
        (lambda: ModelConfig(depth=0), "depth 0 is not allowed"),
        (lambda: ModelConfig(readout_zero_init=True), "needs tied false"),
        (lambda: Trial().replace(module="readout"), "module 'readout' needs tied false"),
        (lambda: ModelConfig(qk_norm=True), "qk_norm True is for architecture 'llama' or 'moe': 'gpt2'"),
        (lambda: ModelConfig(query_group_size=2), "query_group_size 2 is for architecture 'llama' or"),
        (lambda: ModelConfig("llama", num_experts=4), "num_experts 4 is for architecture 'moe': 'llama'"),
        (lambda: ModelConfig("moe", experts_per_token=9), "experts_per_token 9 is more than num_experts 8"),
        (lambda: ModelConfig("moe", expert_granularity=3), "expert_granularity 3 does not divide 4 times"),
        (lambda: ModelConfig("moe", qk_norm=True, shared_experts=1), "shared_experts 1 needs qk_norm false"),
        (lambda: ModelConfig("moe", query_group_size=3), "query_group_size 3 does not divide the 2 heads"),
        (
            lambda: ModelConfig("llama", width=192, base_width=64, query_group_size=3),
            "query_group_size 3 does not divide the 2 heads at width 64; nearest below that does: 2",
        ),
        (lambda: ModelConfig("llama", query_group_size=0), "query_group_size 0 is not allowed: it must be 1"),
        (lambda: ModelConfig("llama", width=66, growing_dimension="head_size"), "head_size 33 at width 66"),
        (lambda: OptimizerConfig(learning_rate=-8.0), "learning_rate -8 is not allowed.* write 0.00390625"),
        (lambda: OptimizerConfig(learning_rate=0.0), "learning_rate 0 is not allowed: a learning rate is"),
        (lambda: OptimizerConfig(beta2=1.0), "beta2 1.0 is not allowed: it must be below 1"),
        (lambda: TrainConfig(steps=100, warmup=200), "warmup 200 is 200 steps, but the run has steps 100"),
        (lambda: TrainConfig(steps=1, warmup=0.9), "warm-up must be shorter than the run"),
        (lambda: TrainConfig(warmup=2.5), "warmup 2.5 is neither a fraction below 1 nor a whole number"),
        (lambda: DataConfig(validation_fraction=1.5), "validation_fraction 1.5 is not allowed: .* below 1"),
        (lambda: Sweep("x", tune={"learning_rate": ()}), r"tune learning_rate \(\) is not a list of values"),
        (lambda: Trial().replace(widht=3), "unknown key 'widht'; the nearest known key is 'width'"),
        (lambda: ModelConfig(depth=100_000_000), "depth 100000000 is not allowed: it must be at most 10,000"),
        (lambda: TrainConfig(seed=2**63), "seed 9223372036854775808 is not allowed: it must be at most 9"),
        (lambda: DataConfig(data_seed=-1), "data_seed -1 is not allowed: it must be 0 or more"),
        (lambda: ModelConfig(alpha_in=HUGE**8), "alpha_in 1000.* is not allowed: it must be a finite number"),
        (lambda: OptimizerConfig(learning_rate=math.nan), "learning_rate nan is not allowed: .* finite"),
        (lambda: ModelConfig(tied=0.5), "tied 0.5 is not true or false"),
        (lambda: ModelConfig(width=64.0), "width 64.0 is not a whole number"),
        (lambda: DataConfig(corpus=3), "corpus 3 is not text"),
        (lambda: OptimizerConfig(optimizer=["adamw"]), r"optimizer \['adamw'\] is not one of 'adamw', 'sgd'"),
        (
            lambda: Trial().replace(steps=10**9, batch_size=2**20, sequence_length=2**20),
            "steps 1000000000 of batch_size 1048576 and sequence_length 1048576 are more than 2\\^63 tokens",
        ),
        (lambda: TrainConfig(cooldown=0.3), "cooldown 0.3 is for schedule 'wsd': 'cosine' does not"),
        (lambda: TrainConfig(schedule="wsd", cooldown=2.5), "cooldown 2.5 is neither a fraction below 1"),
        (lambda: TrainConfig(steps=100, schedule="wsd", cooldown=95), "cooldown 95 is 95 steps and warmup"),
        (lambda: RunOptions(threads=1_000_000), "threads 1000000 is not allowed: it must be at most 1,024"),
        (lambda: RunOptions(device="tpu", execution="loop"), "execution 'loop' is for CPUs and GPUs"),
        (lambda: SweepOptions(heartbeat=math.inf), "heartbeat inf is not allowed: it must be a finite"),
        (lambda: SequenceOptions(budget="2h"), "budget='2h' needs until_settled"),
        (lambda: SequenceOptions(True, budget="soon"), "budget 'soon' is not a time; write 90s, 30m or 2h"),
        (lambda: Domain("uniform", -1e308, 1e308), "low -1e.308 is not below high 1e.308"),
        (lambda: Search("x", space={"tied": Domain("choice", values=(0.5, 1.5))}), "space of tied: tied 0.5"),
        (lambda: Sweep("x", num_seeds=10**6), "num_seeds 1000000 is not allowed: it must be at most 100,000"),
        (lambda: Sweep("x", num_seeds=10**4), "the grid has 420,000 trials; at most 100,000"),
        (lambda: Sweep("x", scale=({},)), "scale .* is not a name with its values"),
        (lambda: Sweep("x", scale={"depth": (0, 2)}), "scale depth 0 is not allowed: it must be above 0"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_in_one_sentence(make, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[model]\nwidht = 3", r"trial\.toml: model: unknown key 'widht'; the nearest known key is 'width'"),
        ("[modle]\nwidth = 3", "unknown key 'modle'; the nearest known key is 'model'"),
        ("[model]\ntied = 1", "tied 1 is not true or false"),
        ("[optimizer]\noptimizer = 'adam'", "optimizer 'adam' is not one of 'adamw', 'sgd'"),
        ("[optimizer]\nlearning_rate = 'fast'", "learning_rate 'fast' is not a number"),
        ("model = 3", "model: 3 is not a table"),
        ("[model", "is not valid TOML"),
        ("[train]\nseed = 0x" + "f" * 6000, "seed of type int is not allowed"),
        ("[train]\nseed = " + "9" * 6000, "is not valid TOML: Exceeds the limit"),
        ("[model]\nwidth = " + "[" * 5000, "is not valid TOML"),
        (SWEEP + "scale = {dept = [2]}", "scale: unknown key 'dept'; the nearest known key is 'depth'"),
        (SWEEP + "scale = {depth = 2}", "scale depth 2 is not a list of values"),
        (SWEEP + "scale = {depth = []}", "scale depth \\[\\] is not a list of values, one at least"),
        (SWEEP + "scale = {depth = [2.5]}", "scale: depth 2.5 is not a whole number"),
        (SWEEP + "scale = {depth = [2], width = [64]}", r"is not one name with its values.*\[\[scale\]\]"),
        (SWEEP + "scale = {precision = ['bf16']}", "scale precision 'bf16' is not a number"),
        (SWEEP + "tune = {tied = [true, false]}", "tune tied True is not a number; compare its values"),
        (SWEEP + "tune = {weight_decay = ['much']}", "tune: weight_decay 'much' is not a number"),
        (SWEEP + "widths = [64]", "unknown key 'widths'"),
        (SWEEP + "scale = {seed = [1, 2]}", "seed is no axis of a sweep: num_seeds gives"),
        (SWEEP + "scale = {learning_rate = [0.1]}", "learning_rate is on two axes"),
        (SWEEP + "scale = [{depth = 2}, {width = 64}]", "does not set depth as the first does"),
        (SWEEP + "scale = [{depth = 2}]\nmeasured_by = 'time'", "measured_by 'time' is not one of 'flops'"),
        (SWEEP + "scale = 3", "scale 3 is not a name with its values"),
        (SWEEP + "settings = {depth = 2}", "is the file of a study, not of a sweep"),
        (SWEEP + "tune = {width = [64, 128], depth = [1, 2, 3]}", "width has fewer than three values: hyp"),
        (SWEEP + "tune = {warmup = [0, 0.1, 0.2], depth = [1, 2, 3]}", "warmup has the value 0: hyperparam"),
        (SWEEP + f"tune = {{{', '.join(f'{n} = [1, 2]' for n in FIVE)}}}", "5 hyperparameters: at most 4"),
        (SWEEP + "tune = {depth = [1, 2, 3]}\ndesign = 'grid'", "design 'grid' needs a tune with several"),
        (SWEEP + "tune = {beta1 = [0.1, 0.2, 0.3], depth = [1, 2, 3]}\ndesign = 'x'", "design 'x' is not"),
    ],
)  # fmt: skip
def test_bad_toml_is_refused_in_one_sentence(toml, sentence, tmp_path):
    path = tmp_path / ("sweep.toml" if toml.startswith(SWEEP) else "trial.toml")
    path.write_text(toml)
    with pytest.raises(ConfigError, match=sentence) as caught:
        (load_sweep if toml.startswith(SWEEP) else load_trial)(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400 and path.name in str(caught.value)


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "../..", "a/b", "a\\b", ".hidden", "a\nb", "\0", "a" * 201]
)
def test_an_experiment_is_named_as_a_folder_can_be(name):
    for make in (Sweep, lambda name: Search(name, space={"learning_rate": Domain("uniform", 0.1, 0.2)})):
        with pytest.raises(ConfigError, match="experiment .* is (not allowed|longer)") as caught:
            make(name)
        assert "\n" not in str(caught.value)
    assert Sweep("[b]2026[$x$] · μP").experiment == "[b]2026[$x$] · μP"


@pytest.mark.parametrize(
    "text",
    ["2^99999", "0^-1", "-2^0.5", "nan", "inf", "-inf", "1e999", "2^", "^", "2^3^4", 10**400, None, ""],
)
def test_numbers_with_a_power_are_finite_or_refused(text):
    with pytest.raises(ConfigError, match="number .* is not a number; write"):
        parse_number(text)


def test_a_whole_number_for_a_float_names_the_same_trial():
    assert Trial().replace(weight_decay=0).trial_id("d") == Trial().replace(weight_decay=0.0).trial_id("d")
    assert Trial().replace(alpha_in=2).trial_id("d") == Trial().replace(alpha_in=2.0).trial_id("d")


def test_a_sweep_without_a_name_has_that_of_its_file_and_a_missing_file_is_a_sentence(tmp_path):
    axes = "scale = {width = [64]}\ntune = {learning_rate = [0.01]}"
    assert sweep_of(tmp_path, axes).experiment == "sweep"
    with pytest.raises(ConfigError, match=r"nothing\.toml cannot be read: No such file"):
        load_trial(tmp_path / "nothing.toml")


def test_toml_round_trip(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text(
        'experiment = "mine"\nscale = {width = [64, 128]}\ntune = {learning_rate = ["2^-8", 0.01]}\n'
        "num_seeds = 2\n"
        "[base.model]\ndepth = 3\n[base.train]\nsteps = 50\n[base.optimizer]\nlearning_rate = '2^-7'\n"
    )
    sweep = load_sweep(path)
    assert sweep.tuned == {"learning_rate": (2**-8, 0.01)}
    assert (sweep.base.model.depth, sweep.base.train.steps) == (3, 50)
    assert sweep.base.optimizer.learning_rate == 2**-7
    assert from_dict(Trial, sweep.base.to_dict()) == sweep.base


def test_sweep_is_the_whole_grid_narrow_first():
    sweep = Sweep("x", scale={"width": (128, 64)}, tune={"learning_rate": (0.02, 0.01, 0.02)}, num_seeds=2)
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


def test_warmup_in_steps_or_as_a_fraction_and_heads_that_grow_in_number_or_size():
    assert [TrainConfig(steps=200, warmup=given).warmup_steps for given in (0.1, 20, 0)] == [20, 20, 0]
    grown = ModelConfig(width=256, head_size=32, base_width=64)
    assert (grown.heads, grown.actual_head_size, grown.width_multiplier) == (8, 32, 4)
    stretched = dataclasses.replace(grown, growing_dimension="head_size")
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
    assert sweep.axes == Axes(("depth",), "depth", ("weight_decay",), ("precision",))
    trials = sweep.trials()
    points = [(t.model.depth, t.train.precision, t.optimizer.weight_decay) for t in trials]
    assert points == [(d, p, wd) for d in (2, 4) for p in ("float32", "bf16") for wd in (0.0, 0.0625, 0.1)]
    assert {t.model.parametrization for t in trials} == {"mup"}, "nothing but the precision is compared"


def test_several_hyperparameters_are_tuned_at_the_points_of_a_design(tmp_path):
    """Centre, ends of the axes, and corners at 2^(-H/4) of the way: √½ for two, ½ for four."""
    octaves = tuple(2.0**x for x in range(-4, 5))
    both = Sweep("x", tune={"learning_rate": octaves, "weight_decay": octaves[::-1]})
    points = {tuple(math.log2(point[name]) for name in both.tuned) for point in both.tuned_points}
    corners = {(a, b) for a in (-3, 3) for b in (-3, 3)}
    assert points == {(0, 0), (-4, 0), (4, 0), (0, -4), (0, 4)} | corners and len(both.tuned_points) == 9
    four = design_points(dict.fromkeys("abcd", octaves), "composite")
    assert len(four) == 1 + 2 * 4 + 2**4 and {math.log2(v) for v in four[-1].values()} == {2.0}
    assert len(design_points(dict.fromkeys("ab", octaves), "grid")) == 81
    assert len(design_points({"a": [1, 2, 3], "b": [1, 10, 100]}, "composite")) == 9, "of three values, all"
    for sweep in (both, dataclasses.replace(both, design="grid")):
        (tmp_path / "sweep.toml").write_text(write_sweep(sweep))
        assert load_sweep(tmp_path / "sweep.toml") == sweep


def test_a_ladder_sets_several_fields_at_each_point(tmp_path):
    toml = 'experiment = "l"\nmeasured_by = "tokens"\n[[scale]]\nbatch_size = 4\nsteps = 50\n'
    sweep = sweep_of(tmp_path, toml + "[[scale]]\nbatch_size = 8\nsteps = 100\n")
    assert sweep.points == ({"batch_size": 4, "steps": 50}, {"batch_size": 8, "steps": 100})
    assert sweep.axes.size == "tokens_planned"
    assert {(t.data.batch_size, t.train.steps) for t in sweep.trials()} == {(4, 50), (8, 100)}
    assert Sweep("x", scale=({"width": 64, "depth": 2},), measured_by="depth").axes.size == "depth"


def test_parametrizations_are_compared_by_default_where_they_differ():
    """Along the width; at one width SP and μP are one and the same, or differ as they do everywhere."""
    assert [*Sweep("x").rules] == ["sp", "mup"]
    assert [*Sweep("x", compare={}).rules] == [Sweep("x").base.model.parametrization]
    assert [*Sweep("x", scale={"depth": (2, 4)}).rules] == ["mup"]
    assert [*Sweep("x", scale=({"width": 64, "depth": 2},)).rules] == ["sp", "mup"]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("depth=2,4,8", {"depth": [2, 4, 8]}),
        ("weight_decay=0,0.01,2^-3", {"weight_decay": [0.0, 0.01, 0.125]}),
        ("tied=true,false", {"tied": [True, False]}),
        ("depth", "scale depth has no values; write for example"),
        ("wide", "scale: width 'wide' is not a whole number"),
        ("weight_decay=x", "scale: weight_decay 'x' is not a number"),
        ("tied=maybe", "scale: tied 'maybe' is not true or false"),
    ],
)
def test_axes_from_the_command_line(text, read):
    if isinstance(read, dict):
        assert parse_axis(text, "scale") == read
    else:
        with pytest.raises(ConfigError, match=read):
            parse_axis(text, "scale")


def test_a_stored_configuration_gives_the_trial_and_its_id():
    trial = Trial().replace(growing_dimension="head_size", optimizer="sgd", momentum=0.9)
    assert from_dict(Trial, trial.to_dict()) == trial
    assert trial.trial_id("data") != Trial().trial_id("data")
    for wrong in ([], {"optimizer": 3}, {"optimizer": {"optimiser": "sgd"}}):
        with pytest.raises(ConfigError, match="configuration"):
            from_dict(Trial, wrong)


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[base.train]\nbatch_size = 8", "base: train: batch_size belongs to [base.data], not to"),
        ("[base.model]\nwarmup = 0.1", "base: model: warmup belongs to [base.train], not to [base.model]"),
        ("[base.train]\nnum_seeds = 2", "base: train: num_seeds belongs to the top of the file, above the"),
        ("width = 64", "width belongs to [base.model]"),
        ("[base]\nsteps = 9", "base: steps belongs to [base.train], not to [base]"),
        ("[base.train]\nstepz = 9", "base: train: unknown key 'stepz'; the nearest known key is 'steps'"),
    ],
)  # fmt: skip
def test_a_key_in_a_wrong_table_is_answered_with_its_table(toml, sentence, tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text('experiment = "x"\n' + toml)
    with pytest.raises(ConfigError) as caught:
        load_sweep(path)
    assert str(caught.value).startswith(f"{path}: {sentence}")
    if toml.startswith(("[base.train]\nbatch", "[base.train]\nstepz")):  # likewise in the file of a trial
        path.write_text(toml.replace("base.", ""))
        with pytest.raises(ConfigError) as caught:
            load_trial(path)
        expected = f"{path}: {sentence}".replace("base: ", "").replace("base.", "")
        assert str(caught.value).startswith(expected)


REALS = [c for c in columns.CONFIGURED.values() if c.type is float]


@pytest.mark.parametrize("field", [column.field for column in REALS])
def test_a_real_field_takes_powers_wherever_it_is_written(field, tmp_path):
    """In TOML of any name, on axes, in ladders, in domains, and as an option if it has one."""
    part = part_of_field()[field]
    (facts,) = [about(f) for f in dataclasses.fields(getattr(Trial(), part)) if f.name == field]
    base = {name: choices[0] for name, choices in facts.only.items()}
    low, high = ("2^-4", "2^-3") if facts.above < 2**-4 else ("2^4", "2^5")
    lower, upper = (2.0 ** int(power[2:]) for power in (low, high))
    expected = Trial().replace(**base, **{field: lower})
    tables: dict[str, list[str]] = {part: [f'{field} = "{low}"']}
    for name, value in base.items():
        tables.setdefault(part_of_field()[name], []).append(f"{name} = {value!r}")
    for name in ("mine.toml", "learning_rate.toml"):
        (tmp_path / name).write_text("\n".join(f"[{t}]\n" + "\n".join(k) for t, k in tables.items()))
        assert load_trial(tmp_path / name) == expected
    own = "".join(f"[base.{t}]\n" + "\n".join(k[t == part :]) + "\n" for t, k in tables.items())
    tuned = "tune = {data_seed = [0]}\n"
    axis = sweep_of(tmp_path, f'experiment = "x"\n{tuned}scale = {{{field} = ["{low}"]}}\n{own}').scale
    assert axis == ({field: lower},) and parse_axis(f"{field}={low}", "scale") == {field: [lower]}
    rung = sweep_of(tmp_path, f'experiment = "x"\n{tuned}scale = [{{{field} = "{low}"}}]\n{own}').scale
    assert rung == ({field: lower},)
    space = f'[space.{field}]\nlow = "{low}"\nhigh = "{high}"\n'
    (tmp_path / "mine.toml").write_text(f'experiment = "x"\n{own}{space}')
    assert load_search(tmp_path / "mine.toml").space[field] == Domain("loguniform", lower, upper)
    if field in ("adamw_lr_ratio", "module_lr_factor"):
        return
    options = [word for name, value in {**base, field: low}.items() for word in (f"--{name}", value)]
    read = tyro.cli(Trial, args=options, config=(tyro.conf.OmitArgPrefixes,))
    assert read == expected


class Seen:
    """An optimizer's configuration that notes which of its fields are read."""

    def __init__(self, config):
        self.config, self.read = config, set()

    def __getattr__(self, name):
        self.read.add(name)
        return getattr(self.config, name)


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_fields_of_update_rules_are_those_that_they_read(rule):
    """By what each rule, and AdamW beside one that does not take everything, asks of its configuration."""
    hidden, other = (Parameter((8, 8), role, 8, 8) for role in ("hidden", "norm"))
    seen = Seen(Trial().replace(optimizer=rule).optimizer)
    for parameter in (hidden, other):
        used = update_rule_of(seen, parameter)
        used.applied(seen, used.constants(seen, 1.0), Scaling())
        used.learning_rate(seen), used.slots(seen), used.scaled_as(seen)
    declared = [f for f in dataclasses.fields(OptimizerConfig) if "optimizer" in about(f).only]
    assert {f.name for f in declared if rule in about(f).only["optimizer"]} == (
        seen.read & {f.name for f in declared}
    )
    assert len(declared) == 10


@pytest.mark.parametrize(
    ("rule", "field", "value"),
    [("adamw", "muon_momentum", 0.9), ("muonh", "muon_scale", "match_rms_adamw")],
)
def test_a_field_of_another_update_rule_is_refused(rule, field, value, tmp_path):
    """It would change nothing but the trial's id, so that the same training was run again."""
    (readers,) = (about(f).only["optimizer"] for f in dataclasses.fields(OptimizerConfig) if f.name == field)
    rules = " or ".join(map(repr, readers))
    sentence = f"{field} {value!r} is for optimizer {rules}: '{rule}' does not read it, so it must be "
    (tmp_path / "trial.toml").write_text(
        f"[optimizer]\noptimizer = '{rule}'\n{field} = {repr(value).lower()}\n"
    )
    base = Trial().replace(optimizer=rule)
    for make in (
        lambda: load_trial(tmp_path / "trial.toml"),
        lambda: base.replace(**{field: value}),
        lambda: Trial().replace(**{"optimizer": rule, field: value}),
        lambda: Sweep("x", base, scale={"depth": (2,)}, compare={field: (value,)}).trials(),
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence)) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_a_new_choice_leaves_what_it_does_not_read():
    """So that update rules can be compared where one has hyperparameters of its own."""
    muon = Trial().replace(optimizer="muon", muon_momentum=0.9, beta2=0.99)
    sweep = Sweep("x", muon, scale={"depth": (2,)}, compare={"optimizer": ("muon", "adamw", "sgd")})
    found = {t.optimizer.optimizer: t.optimizer for t in sweep.trials()}
    assert (found["muon"].muon_momentum, found["muon"].beta2) == (0.9, 0.99)
    assert (found["adamw"].muon_momentum, found["adamw"].beta2) == (0.95, 0.99)
    assert (
        found["sgd"] == Trial().replace(optimizer="sgd", learning_rate=found["sgd"].learning_rate).optimizer
    )
    assert Trial().replace(schedule="wsd", cooldown=0.3).replace(schedule="cosine") == Trial()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: path.symlink_to("/dev/zero"), "cannot be read: it has more than 1,048,576 bytes"),
        (lambda path: path.write_text("# " + "x" * 2**21), "cannot be read: it has more than 1,048,576"),
        (lambda path: path.write_text("\n".join(f"a.b{i} = 1" for i in range(50_000))), "unknown key 'a'"),
    ],
)
def test_toml_that_is_too_large_is_refused(make, sentence, tmp_path):
    """A device filled memory."""
    path = tmp_path / "trial.toml"
    make(path)
    with pytest.raises(ConfigError, match=sentence):
        load_trial(path)
    path.unlink()
    path.write_text("# " + "." * 1000 + "\n[train]\nwarmup = 0.5 # a.b.c\n")
    assert load_trial(path) == Trial().replace(warmup=0.5)
