"""Published learning rates: formulas beside the rates that their owners trained with."""

import pytest

from mup_tpu.cli import main
from mup_tpu.tuning.laws import LAWS, published_rates
from mup_tpu.tuning.target import goal_of


@pytest.mark.parametrize(
    ("law", "sizes", "rate"),
    [
        # DeepSeek LLM 7B and 67B, arXiv:2401.02954, table 2: layers' parameters, and 2 T tokens
        ("DeepSeek", {"width": 4096, "params": 6.04e9, "tokens": 2e12, "batch": 2304 * 4096}, 4.2e-4),
        ("DeepSeek", {"width": 8192, "params": 6.4e10, "tokens": 2e12, "batch": 4608 * 4096}, 3.2e-4),
        # Runs of 3e19 and 1e20 FLOP in marin's isoFLOP sweep of the Common Pile
        ("marin", {"width": 1280, "params": 6.7e8, "tokens": 7.8e9, "batch": 32 * 4096}, 0.0014584077),
        ("marin", {"width": 1536, "params": 1.0e9, "tokens": 1.7e10, "batch": 64 * 4096}, 0.00171875),
        ("Cerebras-GPT", {"width": 4096, "params": 6.7e9, "tokens": 1.34e11, "batch": 2.13e6}, 1.2e-4),
        # The best run of 1.07 B parameters on 20 B tokens in Step Law's table, between points of its grid
        ("Step Law", {"width": 2048, "params": 1.0737e9, "tokens": 2e10, "batch": 256 * 2048}, 9.4e-4),
    ],
)
def test_law_gives_the_rate_that_its_owners_used(law, sizes, rate):
    (made,) = (one for one in published_rates(**sizes).rates if one.law.name == law)
    assert made.rate == pytest.approx(rate, rel=0.05)


def test_prior_lies_between_the_laws_nearest_to_the_most_accurate():
    made = published_rates(2048, 1.2e9, 26e9, 2**19)
    rates = {one.law.name: one.rate for one in made.rates}
    assert min(rates.values()) < made.rate < max(rates.values()) and made.low < made.rate < made.high
    best = min(LAWS, key=lambda law: law.error).name
    assert abs(made.rate / rates[best] - 1) == min(abs(made.rate / rate - 1) for rate in rates.values())
    assert made.apart == pytest.approx(max(rates.values()) / min(rates.values()))
    assert published_rates(768, 8.5e7, 5e9, 1e5).apart is None or made.apart > 4


def test_an_answer_before_any_run(capsys):
    main(["predict", "--at", "params=1.3B"])
    printed = " ".join(capsys.readouterr().out.split())
    prior = goal_of({"params": "1.3B"}, None, 0).published
    assert f"before any run: learning rate {prior.rate:.2g} (95 % {prior.low:.2g} to" in printed
    assert "times apart" in printed and "Step Law" in printed and "20 a parameter" in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "predict needs a table or folder, or a transformer's size: --at params=1.3B"),
        (["--at", "params=1.3B", "--loss-law"], "published laws take --at and --json alone"),
        (["--at", "parms=1.3B"], "params"),
    ],
)
def test_predictions_of_nothing(arguments, sentence, capsys):
    with pytest.raises(SystemExit):
        main(["predict", *arguments])
    assert sentence in " ".join(capsys.readouterr().err.split())
