"""Recipes train the target at the rates that were predicted, or say why they cannot."""

import tomllib

import mup
import pandas as pd
import pytest

from mup_tpu.cli import main
from mup_tpu.errors import ConfigError
from mup_tpu.words.recipes import PROGRAMS, base_rate_words, shared_settings, write_recipe

RATE = {"lr": (-8.0, -9.0, -7.0)}
RUN = {"width": 1024, "depth": 16, "batch": 2**19, "steps": 1000, "warmup": 0.1, "odd": 3}
MUP = {"parametrization": "mup", "base_width": 64, "beta1": 0.9, "beta2": 0.95, "wd": 0.1, "seq_len": 2048}


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("toml", ["lr = 0.003906", "batch = 524288", "width = 1024"]),
        ("transformers", ["    learning_rate=0.003906,", "    max_steps=1000,", "    warmup_steps=100,"]),
        ("nanochat", ["  --matrix-lr=0.003906", "  --total-batch-size=524288", "  --aspect-ratio=64"]),
        ("torchtitan", ["  --optimizer.param-groups.0.optimizer-kwargs.lr 0.003906", "  --training.steps"]),
        ("olmo-core", ["    lr=0.003906,", "#   --data_loader.global_batch_size=524288"]),
        ("megatron", ["  --lr 0.003906", "  --hidden-size 1024", "  --lr-warmup-iters 100"]),
    ],
)  # fmt: skip
def test_a_recipe_is_written_as_a_program_takes_it(program, words):
    optimizer = {"optimizer": "muon"} if program == "nanochat" else {}
    text = write_recipe(program, RATE, RUN, "", optimizer)
    assert all(any(line.startswith(one) for line in text.splitlines()) for one in words), text
    assert "# lr: 95 % 0.00195 to 0.00781" in text and "the learning rate is that of all parameters" in text
    if program != "toml":
        assert "no option here, so set by hand: " in text and "odd 3" in text
        assert "# not known from these runs, so its defaults hold: weight decay, " in text


@pytest.mark.parametrize("program", ["toml", *(program for program in PROGRAMS if program != "nanochat")])
def test_under_mup_hidden_matrices_have_a_rate_of_their_own(program):
    text = write_recipe(program, RATE, RUN, "", MUP)
    assert "0.003906 is that of base width 64; hidden matrices of width 1024 have 0.0002441" in text
    if program in ("torchtitan", "olmo-core"):
        assert "{'lr': 0.0002441, 'weight_decay': 1.6}" in text and "logits × 0.0625" in text
    if program == "megatron":
        assert "--use-mup \\\n  --mup-base-hidden-size 64" in text
    if program == "toml":
        assert "hidden_lr = 0.0002441" in text


@pytest.mark.parametrize(
    ("program", "values", "shared", "words"),
    [
        ("transformers", RUN, {"parametrization": "μP"}, "name no base_width: add a column base_width"),
        ("torchtitan", {}, MUP, "these runs name no width: add a column width"),
        ("megatron", RUN, {"base_width": 64}, "base_width 64 and no rule: name it in a column parametr"),
        ("olmo-core", RUN, {"parametrization": "completep"}, "no recipe is known for CompleteP"),
        ("nanochat", RUN, MUP | {"optimizer": "muon"}, "it has no μP, and the SP rate for it is not known"),
        ("nanochat", RUN, {"optimizer": "adamw"}, "trains matrices with Muon, and these runs use adamw"),
        ("nanochat", RUN, {}, "with Muon, and these runs use an optimizer that they do not name"),
        ("transformers", RUN, {"optimizer": "muon"}, "with AdamW, and these runs use muon"),
        ("torchtitan", RUN | {"width": 9129.3}, MUP, "width 9129.3 is that of no model: give --at width="),
        ("nanochat", RUN | {"width": 1000}, {"optimizer": "muon"}, "no --aspect-ratio gives width 1000"),
    ],
)
def test_a_recipe_that_would_train_another_model_is_refused(program, values, shared, words):
    with pytest.raises(ConfigError, match=words):
        write_recipe(program, RATE, values, "", shared)


def test_a_width_of_nanochat_is_the_one_that_it_trains():
    for width, depth in ((2112, 24), (1280, 20), (768, 12), (1344, 16)):
        text = write_recipe("nanochat", {"matrix_lr": RATE["lr"]}, {"width": width, "depth": depth})
        ratio, head = (int(text.split(f"--{name}=")[1].split()[0]) for name in ("aspect-ratio", "head-dim"))
        assert -(-depth * ratio // head) * head == width


def test_settings_that_all_runs_share_are_in_the_recipe():
    rows = pd.DataFrame(
        {"d_model": [64, 128], "peak_lr": [0.1, 0.2], "betas": "(0.9, 0.95)", "wd": [0.1, 0.1],
         "lr_scheduler_type": "cosine", "note": "x", "seed": [0, 1]}
    )  # fmt: skip
    shared = {"beta1": 0.9, "beta2": 0.95, "wd": 0.1, "lr_scheduler_type": "cosine"}
    assert shared_settings(rows) == shared
    text = write_recipe("transformers", {"peak_lr": RATE["lr"]}, {"d_model": 1024}, "", shared_settings(rows))
    assert "adam_beta2=0.95" in text and "weight_decay=0.1" in text and "lr_scheduler_type='cosine'" in text
    assert "d_model 1024" in text and "so its defaults hold: ε, gradient clipping" in text


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_the_recipe_for_transformers_gives_each_parameter_the_rate_of_mups_own_optimizer(tied, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    def config(width):
        return LlamaConfig(
            hidden_size=width, intermediate_size=2 * width, num_attention_heads=width // 16, vocab_size=64,
            num_key_value_heads=width // 16, num_hidden_layers=2, tie_word_embeddings=tied,
        )  # fmt: skip

    config(64).save_pretrained(tmp_path)
    text = write_recipe("transformers", RATE, {"width": 256}, "", MUP).replace("CONFIG", str(tmp_path))
    names = {}
    exec(text, names)
    arguments = names["arguments"]
    arguments.output_dir = str(tmp_path)
    trainer = names["MupTrainer"](model=names["model"], args=arguments)
    groups = trainer.create_optimizer().param_groups
    plain = {width: LlamaForCausalLM(config(width)) for width in (64, 128, 256)}
    mup.set_base_shapes(plain[256], plain[64], delta=plain[128], do_assert=False)  # its readout is plain
    stock = mup.MuAdamW(plain[256].parameters(), lr=arguments.learning_rate, weight_decay=0.1)
    expected = {p: (g["lr"], g["weight_decay"]) for g in stock.param_groups for p in g["params"]}
    rates = {p: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    ours = dict(names["model"].named_parameters())
    for name, parameter in plain[256].named_parameters():
        rate, decay = rates[ours[name]]
        assert rate == pytest.approx(expected[parameter][0]), name
        assert decay == pytest.approx(expected[parameter][1] if parameter.dim() > 1 else 0.0), name
    assert {round(rate / arguments.learning_rate, 3) for rate, _ in rates.values()} == {1.0, 0.25}


@pytest.mark.parametrize(
    ("optimizer", "words", "hidden"),
    [
        ({}, "train at 0.000488 (× 0.0625)", 0.000488),
        ({"optimizer": "adamw"}, "train at 0.000488 (× 0.0625)", 0.000488),
        ({"optimizer": "muon", "muon_scale": "match_rms_adamw"}, "train at 0.00195 (× 0.25)", 0.00195),
        ({"optimizer": "adamh"}, "train at 0.00195 (× 0.25)", 0.00195),
        ({"optimizer": "muon", "muon_scale": "spectral"}, "", 2.0**-7),
        ({"optimizer": "muonh"}, "", 2.0**-7),
        ({"optimizer": "muon"}, "", "how those of hidden matrices follow the width under muon is not known"),
        ({"optimizer": "sgd"}, "", "how those of hidden matrices follow the width under sgd is not known"),
    ],
)
def test_hidden_rates_follow_the_optimizer(optimizer, words, hidden):
    """Factors are those of `parametrize`: 1/m under Adam, 1/√m or 1 for orthogonal or turned matrices."""
    values = {"base_width": 64, "width": 1024, "parametrization": "mup", **optimizer}
    sentence = base_rate_words(values, "mup", "learning_rate", 2.0**-7)
    assert words in sentence and bool(sentence) == bool(words)
    recipe = write_recipe("toml", {"learning_rate": (-7.0, -8.0, -6.0)}, values)
    rate = tomllib.loads(recipe).get("hidden_learning_rate")
    if isinstance(hidden, str):
        assert hidden in recipe and rate is None
    else:
        assert rate == pytest.approx(hidden, rel=0.01)


def test_a_prediction_says_whose_rate_it_is(capsys, tmp_path):
    table = pd.DataFrame(
        {"parametrization": "mup", "d_model": width, "base_width": 64, "peak_lr": 2.0**x,
         "loss": 3 + (x + 7) ** 2 / 20} for width in (64, 128, 256) for x in range(-10, -3)
    )  # fmt: skip
    table.to_csv(tmp_path / "mup.csv", index=False)
    main(["predict", str(tmp_path / "mup.csv"), "--at", "d_model=1024"])
    out = capsys.readouterr().out
    assert " is the rate at base width 64: hidden matrices of width 1024 train at 0.00048" in out
    main(["predict", str(tmp_path / "mup.csv"), "--at", "d_model=1024", "--format", "torchtitan"])
    assert "hidden = others | {'lr': 0.00048" in capsys.readouterr().out
