"""The linter on models that others scaled: right ones pass, and each injected fault is named."""

import re
from dataclasses import replace

import lint_faults as faults
import lint_held_out as held_out
import mup
import pandas as pd
import pytest
import torch
from torch import nn

from mup_tpu.analysis.diagnosis import Diagnosis, Exponent, Finding, GrownParameter
from mup_tpu.errors import ConfigError
from mup_tpu.parametrize import LintReport, lint, parametrize
from mup_tpu.plots import coordinate_check_figure

QUICK = {"widths": (32, 64, 128), "seeds": 1, "steps": 2}


def first_cause(report):
    return next((finding.cause for finding in report.findings if finding.cause), "")


def listed(name):
    """A fault of `benchmarks/lint_faults.py`, with its right causes."""
    ((_, changes, causes),) = [fault for fault in faults.FAULTS if fault[0].startswith(name)]
    return "llama", changes, causes


CASES = [
    *map(listed, (
        "one learning rate for all", "attention 1/√d", "hidden σ constant", "readout without 1/m (llm.c",
        "ε larger", "decay coupled", "optimizer of another copy",
        "attention divided twice", "hidden learning rate ∝ 1/m²", "readout without 1/m, learning rate",
        "tied, learning rate 1/m", "embeddings' σ ∝ 1/√m", "hidden σ ∝ 1/m", "readout × 1/m²",
        "factor √m", "Muon with Adam",
    )),
    ("gpt", {}, set()),
    ("gpt", {"optimizer": "muon", "logits": held_out.one}, {held_out.MISSING}),
    ("gpt", {"sigma": {"readout": held_out.inverse_root}}, {held_out.START}),
    (held_out.Stacked, {"optimizer": "lion"}, set()),
    (held_out.GRU, {"sigma": {"*weight_hh*": held_out.one}}, {held_out.INIT}),
    (held_out.Graph, {"after": held_out.in_bf16, "lr": 2**-12}, {held_out.ROUNDED}),
]  # fmt: skip

NOT_MENDED = {"attention 1/√d", "attention divided twice", "decay coupled", held_out.GROUPS, held_out.GROWS}


@pytest.mark.parametrize(("kind", "changes", "causes"), CASES)
def test_a_fault_is_named_once_with_its_cause_and_remedy_and_right_models_pass(kind, changes, causes):
    report = (faults if isinstance(kind, str) else held_out).check(kind, changes, **QUICK)
    assert report.passes == (not causes), report
    if causes:
        cause = first_cause(report)
        assert cause in causes and report.findings[0].remedy in report.sentence, report
        assert str(report).count(cause) == 1 + str(report.table()).count(cause), report
        assert ("all is flat" in report.sentence) == (cause not in NOT_MENDED), report


def test_frozen_matrices_with_adapters_pass():
    assert held_out.check(held_out.Lora, {}, steps=2).passes


def test_a_right_model_passes_and_its_table_has_a_row_a_parameter():
    report = faults.check("gpt", {}, steps=2)
    assert report.passes, report
    row = report.table().loc["blocks.1.down.weight"]
    assert tuple(row["shape"]) == (32, 64) and tuple(row["wide"]) == (256, 512)
    assert (row["role"], row["verdict"]) == ("hidden", "follows")
    assert (row["learning rate"], row["init"]) == (-1, pytest.approx(-0.5, abs=0.05))
    assert abs(row["effect"]) < 0.3


@pytest.mark.nightly
def test_of_all_faults_95_percent_are_named_first_and_right_models_pass():
    cases = [
        (kind, changes, causes)
        for kind in ("gpt", "llama", "vit")
        for _, changes, causes in [*faults.FAULTS, *((name, changes, {""}) for name, changes in faults.RIGHT)]
        if not (changes.get("tied") and kind == "vit")
    ]
    results = [(first_cause(faults.check(k, changes)) in causes, causes) for k, changes, causes in cases]
    right = [is_right for is_right, causes in results if causes == {""}]
    named = [is_right for is_right, causes in results if causes != {""}]
    assert len(named) > 120 and sum(named) >= 0.95 * len(named)
    assert len(right) > 25 and sum(right) >= len(right) - 1


class Mup(nn.Module):
    def __init__(self, width: int, readout: type[nn.Linear] = mup.MuReadout) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(29, width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), readout(width, 29)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.relu(self.middle(self.embedding(tokens)))))


def plain(width):
    return Mup(width, nn.Linear)


def test_a_module_of_the_package_mup_is_checked_as_it_is():
    def theirs(width):
        return mup.set_base_shapes(Mup(width), Mup(32), delta=Mup(64))

    assert lint(theirs, faults.batch_of("gpt"), faults.loss, **QUICK).passes
    assert "learning rate not scaled" in lint(plain, faults.batch_of("gpt"), faults.loss, **QUICK).causes


class Experts(nn.Module):
    def __init__(self, experts: int, is_mean: bool) -> None:
        super().__init__()
        self.is_mean, self.embedding, self.head = is_mean, nn.Embedding(29, 32), nn.Linear(32, 29)
        self.router, self.norm = nn.Linear(32, experts), nn.LayerNorm(32)
        self.experts = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(experts))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens))
        shares = self.router(x).softmax(-1) * (1 if self.is_mean else len(self.experts))
        mixed = torch.stack([expert(x) for expert in self.experts], -1)
        return self.head(x + (mixed * shares.unsqueeze(-2)).sum(-1))


def gpt(width=32, **changes):
    return faults.build("gpt", replace(faults.Recipe(), **changes))(width)


def of_depth(depth, branches=lambda depth: 2 / depth):
    return gpt(depth=depth, branches=branches(depth), sigma={"tok.": lambda m: 7.0})


def tokens(batch_size=8, sequence_length=12):
    return faults.batch_of("gpt").repeat(8, 1)[:batch_size, :sequence_length]


def summed(module, batch):
    return faults.loss(module, batch) * batch[:, 1:].numel()


@pytest.mark.parametrize(
    ("scale", "build", "loss", "cause"),
    [
        ("depth", of_depth, faults.loss, ""),
        ("depth", lambda depth: of_depth(depth, lambda _: 1.0), faults.loss, "residual branch not scaled"),
        ("heads", lambda heads: gpt(64, heads=heads), faults.loss, ""),
        ("heads", lambda heads: gpt(64, heads=heads, attention=lambda d: (16 / d) ** 2), faults.loss,
         "attention divided twice"),
        ("experts", lambda experts: Experts(experts, True), faults.loss, ""),
        ("experts", lambda experts: Experts(experts, False), faults.loss, "cause not known"),
        ("batch_size", gpt, faults.loss, ""),
        ("sequence_length", gpt, summed, "a sum over the batch"),
    ],
)  # fmt: skip
def test_any_parameter_of_build_or_batch_is_a_scale_of_the_same_check(scale, build, loss, cause):
    sizes = (3, 6, 12) if scale == "sequence_length" else (2, 4, 8)
    report = lint(build, tokens, loss, widths=sizes, scale=scale, seeds=1, steps=2)
    assert first_cause(report).startswith(cause) and bool(first_cause(report)) == bool(cause), report
    assert report.passes == (not cause) and {*report.sizes[scale]} == {*sizes}


def exits(width):
    raise SystemExit(0)


ONE = plain(32)


@pytest.mark.parametrize(
    ("build", "loss", "sentence"),
    [
        (Mup(8), faults.loss, "build is a Mup; give the function that makes the module at any width"),
        (lambda width: 3, faults.loss, r"build\(32\) returns int; it must return a torch.nn.Module"),
        (lambda w: (plain(w), "adamw"), faults.loss, "returns tuple; .* or one with its optimizers"),
        (lambda width: plain(8), faults.loss, "has the same shapes at all widths"),
        (lambda width: plain(str(width)), faults.loss, r"build\(32\) fails \(TypeError: "),
        (exits, faults.loss, r"build\(32\) fails \(SystemExit: 0\)"),
        (nn.LazyLinear, faults.loss, r"build\(32\) returns a module with lazy parameters"),
        (lambda width: nn.ReLU(), faults.loss, r"build\(32\) returns a ReLU without parameters"),
        (lambda width: ONE, faults.loss, "returns the same module twice"),
        (lambda w: (m := plain(w), torch.optim.LBFGS(m.parameters())), faults.loss, r"step\(\) of LBFGS "),
        (plain, lambda module, batch: module(batch), "must return one number with a gradient"),
        (plain, lambda module: 0.0, r"loss\(module, batch\) fails \(TypeError"),
        (plain, None, r"loss must be a function of a module and the batch"),
    ],
)  # fmt: skip
def test_one_sentence_says_what_is_wrong(build, loss, sentence):
    with pytest.raises(ConfigError, match=sentence):
        lint(build, faults.batch_of("gpt"), loss, **QUICK | {"seeds": 2})


def test_a_scale_that_nothing_takes_is_refused():
    with pytest.raises(ConfigError, match="neither build nor batch has a parameter 'depht'; build has width"):
        lint(plain, tokens, faults.loss, scale="depht", **QUICK)


@pytest.mark.parametrize(
    ("changes", "factor", "missing"), [({"lr": 0.0}, 1, "not updated"), ({}, 0, "no gradient")]
)
def test_what_is_not_known_does_not_pass(changes, factor, missing):
    build = faults.build("gpt", replace(faults.Recipe(), **changes))
    report = lint(build, tokens, lambda *of: factor * faults.loss(*of), **QUICK)
    assert not report.passes
    assert re.search(f"tok.weight .token embedding. is unknown: {missing}", report.sentence), report.sentence


def test_a_key_s_bias_has_no_gradient_but_rounding_and_needs_no_word():
    class Biased(held_out.Perceiver):
        def __init__(self, width, o):
            super().__init__(width, o)
            self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)

    batch = held_out.BATCHES[held_out.Perceiver](0)
    report = lint(held_out.build(Biased, {}), batch, held_out.loss, **QUICK)
    row = report.table().loc["k.bias"]
    assert (row["verdict"], row["cause"]) == ("not judged", "not trained")
    assert "k.bias" not in report.sentence and report.table().loc["q.bias", "verdict"] == "follows"


@pytest.mark.parametrize(("role", "cause"), [("readout", "inner matrix treated as readout"), ("hidden", "")])
def test_a_matrix_to_a_fixed_size_that_layers_follow_is_hidden(role, cause):
    def build(width):
        narrow = (nn.Linear(width, 16, bias=False), nn.Linear(16, width), nn.GELU())
        return nn.Sequential(nn.Embedding(29, width), nn.LayerNorm(width), *narrow, nn.Linear(width, 29))

    def trained(width):
        scaled = parametrize(build, width=width, base_width=32, roles={"2.weight": role})
        module = scaled.init_(build(width))
        return module, torch.optim.AdamW(scaled.param_groups(module, lr=2**-8))

    report = lint(trained, tokens, faults.loss, widths=(32, 64, 128), steps=2)
    assert report.passes == (not cause)
    if cause:
        assert (report.findings[0].name, report.findings[0].cause) == ("2.weight", cause)
        assert "roles={'its name': 'hidden'}" in str(report)


@pytest.mark.parametrize(
    ("exponent", "verdict"),
    [
        ((0.3, 0.1, 0.5), "grows"), ((0.3, 0.0, 0.6), "follows"), ((-0.5, -0.7, -0.2), "dies"),
        ((0.0, -0.4, 0.4), "follows"), ((0.0, -0.6, 0.6), "unknown"), ((0.1, -0.9, 0.24), "unknown"),
    ],
)  # fmt: skip
def test_an_exponent_is_judged_by_its_interval(exponent, verdict):
    assert Exponent(*exponent).verdict == verdict


def test_a_report_s_sentence_names_all_parameters_of_the_first_cause_and_further_causes():
    steps, head = "learning rate not scaled", "readout's 1/m missing"
    found = [
        Finding(f"blocks.{i}.{name}", "hidden", "grows", steps) for i in (0, 1) for name in ("up", "down")
    ]
    found.append(Finding("head", "readout", "grows", head))
    sentence = LintReport(tuple(found), (), {}, pd.DataFrame()).sentence
    assert sentence.startswith(f"{found[0]}; so too blocks.*.down, blocks.*.up")
    assert sentence.endswith(f"; also: {head}")


def test_sizes_of_the_first_middle_and_last_block_are_drawn():
    report = faults.check("gpt", {"depth": 5}, **QUICK)
    figure = coordinate_check_figure(report.sizes.assign(parametrization="as trained"))
    titles = [f"as trained: {size} size" for size in ("activation", "update")]
    assert [ax.get_title() for ax in figure.axes] == titles
    keys = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert {key.split()[1].rstrip(":") for key in keys if key[-8:].split()[0].isdecimal()} <= {"0", "2", "4"}
    assert sum(key.startswith("down") for key in keys) == 3
    assert abs(report.fits["blocks.0.up", "update", 1].value) < 0.3


@pytest.mark.parametrize(
    ("exponents", "verdict"),
    [((0.0, 0.4, 0.8), "follows"), ((-0.5, -0.2, 0.0), "follows"), ((0.9, 1.0, 1.0), "grows")],
)
def test_behind_a_matrix_that_starts_at_0_any_step_may_show_that_effects_are_flat(exponents, verdict):
    """A readout at 0 hides all effects at the first step; later, training scatters them."""
    rows = [
        {"width": width, "seed": 0, "step": step, "layer": "token", "quantity": quantity, "rms": rms}
        for width in (32, 64, 128, 256)
        for step, exponent in enumerate((0.0, *exponents), 1)
        for quantity, rms in (
            ("effect", width**exponent if step > 1 else 0.0), ("gradient", width ** (exponent - 1)),
            ("learning rate", 0.01), ("size", 0.01), ("decay", 0.0),
        )
    ]  # fmt: skip
    token = GrownParameter("token", "position_embedding", (1, 32), (1, 256), False, True)
    (finding,) = Diagnosis(pd.DataFrame(rows), [token], "width").findings()
    assert finding.verdict == verdict
