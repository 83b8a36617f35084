"""Public tables of other people's learning-rate sweeps: place, authors' claim and reader of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from mup_tpu.analysis import Columns

_HYPERBALL = "WhenWen/WhenWen.github.io"
_HYPERBALL_RUNS = "wd_blog/scripts/{}/wandb_hyperball_runs.csv"


@dataclass(frozen=True)
class Sweep:
    """Runs of a table that is not copied here, along one scale."""

    name: str
    growing: str
    scale: str
    runs: pd.DataFrame


@dataclass(frozen=True)
class Source:
    """A table of someone else's runs."""

    repository: str
    path: str
    commit: str
    claim: str
    """Claim of its authors, from a capital letter on, without a period."""
    columns: Columns = Columns()
    rule: str = ""
    """Name of its rule; "" where the table compares several."""
    ours: str = ""
    """Part that is analysed here, and differences from the claim."""
    sweeps: Callable[[Path], Iterator[Sweep]] | None = None
    """Reader of a clone; None where the rows are copied to results/public/rows."""


def _step_law(clone: Path) -> Iterator[Sweep]:
    """Sweeps along parameters, tokens or batch size, the other two fixed; three scales at least in each.

    The loss is the smoothed one: `loss` is a single batch's, and the luckiest batch would win.
    """
    kinds = {"N": "parameters", "Na": "active parameters (MoE)", "D": "tokens", "bs": "batch size"}
    for file in ("dense_lr_bs_loss.csv", "moe_lr_bs_loss.csv"):
        frame = pd.read_csv(clone / "data" / file)
        size = "Na" if "Na" in frame else "N"
        for scale in (size, "D", "bs"):
            fixed = [column for column in (size, "D", "bs") if column != scale]
            for values, part in frame.groupby(fixed):
                runs = part.groupby([scale, "lr"], as_index=False)["smooth loss"].mean()
                at = ", ".join(f"{column} {value:.3g}" for column, value in zip(fixed, values, strict=True))
                if runs[scale].nunique() >= 3:
                    runs = runs.rename(columns={"smooth loss": "loss"})
                    yield Sweep(f"{file.partition('_')[0]}, {at}", kinds[scale], scale, runs)


def _cooldowns(clone: Path) -> Iterator[Sweep]:
    """Sweeps along the steps of the 124 M model, one for each share of linear decay with four lengths."""
    rows = []
    for file in sorted((clone / "data").rglob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        setting = run["config"]
        if setting["dataset"] == "slimpajama" and (setting["n_layer"], setting["n_embd"]) == (12, 768):
            names = ("scheduler", "decay_type", "wsd_fract_decay", "iterations", "lr")
            rows.append([*map(setting.get, names), run["summary"]["final-val/loss"]])
    frame = pd.DataFrame(rows, columns=["scheduler", "decay", "cooldown", "steps", "lr", "loss"])
    frame = frame[(frame["scheduler"] == "wsd") & (frame["decay"] == "linear")]
    for cooldown, part in frame.groupby("cooldown"):
        if part["steps"].nunique() >= 4:
            runs = part.groupby(["steps", "lr"], as_index=False)["loss"].mean()
            yield Sweep(f"cooldown {cooldown:g}", "tokens", "steps", runs)


def _one_step(clone: Path) -> Iterator[Sweep]:
    """Sweeps along the batch size, one for each state of the model that a single step starts from."""
    frame = pd.read_csv(clone / "outputs" / "mnist_optimal_batch_lr_dense" / "aggregate_results.csv")
    names = {"epsilon": "lr", "mean_loss_change": "loss", "stderr_loss_change": "loss_err"}
    for step, part in frame.rename(columns=names).groupby("checkpoint_step"):
        runs = part[["batch_size", "lr", "loss", "loss_err"]]
        yield Sweep(f"after {step} steps", "batch size", "batch_size", runs)


SOURCES = {
    "mup_mlp": Source(
        "microsoft/mup", "examples/MLP/demo.ipynb", "13e9901",
        "Over the width of an MLP on CIFAR-10 μP's optimum stays, SP's falls (epoch 3)",
    ),
    "nanogpt_mup_shakespeare": Source(
        "EleutherAI/nanoGPT-mup", "mup_examples/mutransfer_lr_shakespeare_char/plot.ipynb",
        "read off its figure",
        "Over the width of GPT-2 μP's optimum stays, SP's falls (tiny Shakespeare, means of 3 seeds)",
    ),
    "nanogpt_mup_owt": Source(
        "EleutherAI/nanoGPT-mup", "mup_examples/mutransfer_lr_owt/plot.ipynb", "read off its figure",
        "The same on OpenWebText",
    ),
    "gemstone": Source(
        "mcleish7/gemstone-scaling-laws", "data/preflight_mup_olmo_variant.csv", "1fb97a2",
        "A variant of μP with OLMo's init, tried on four shapes before their ladder was trained",
        Columns(along=("depth",)), "μP, OLMo's variant",
    ),
    "marin_muonh": Source(
        "marin-community/marin", "experiments/speedrun/muonh_qwen3_scaling/selection_summary.json", "329ead4",
        "MuonH on Qwen3 of 130 M to 1.2 B parameters, batch and tokens growing too: the best rate falls",
        Columns(scale="params"), "MuonH",
    ),
    "hyperball_width": Source(
        _HYPERBALL, _HYPERBALL_RUNS.format("transfer"), "3f6c3f2",
        # The runs of their figure: mup-adam-no-input-norm, mup-adamh with a warm-up of 0.1,
        # mup-muon-linear-input-norm, mup-muonh-linear-input-norm.
        "From width 128 to 2048 (4 layers), without a factor, the best rate drifts 1.4 times for AdamH and "
        "MuonH, 2 for Adam, 4 for Muon",
        Columns(parametrization="optimizer"),
    ),
    "hyperball_depth": Source(
        _HYPERBALL, _HYPERBALL_RUNS.format("transfer"), "3f6c3f2",
        "The same over 4 to 512 layers of width 128: 1.4 times, 3 for Adam, 4 for Muon",
        Columns("depth", parametrization="optimizer"),
    ),
    "hyperball_tokens": Source(
        _HYPERBALL, _HYPERBALL_RUNS.format("lr_datasize"), "3f6c3f2",
        "130 M parameters, batches of 524 288 tokens, on 1 to 128 billion tokens; MuonH ends lower at each",
        Columns("tokens", parametrization="optimizer"),
    ),
    "marin_adamh": Source(
        "marin-community/marin", "experiments/speedrun/adamh_qwen3_scaling/selection_summary.json", "dffdec0",
        "AdamH on the models of marin_muonh: 0.02 or 0.015 is best", Columns(scale="params"), "AdamH",
    ),
    "marin_adamc": Source(
        "marin-community/marin", "experiments/speedrun/adamc_qwen3_scaling/selection_summary.json", "8be6ad6",
        "AdamC (decay corrected for the schedule): from 0.01 at 130 M parameters to 0.003 at 1.2 B",
        Columns(scale="params"), "AdamC",
        "Rates of 520 M and 1.2 B are the grid's largest.",
    ),
    "marin_moe_tokens": Source(
        "marin-community/marin", "experiments/grug/moe_apr2/new_plots/all_lr_sweep_results.json", "69ca5b5",
        "A mixture of experts of width 512 under AdamH and Adam, batches of 32; a later recipe has "
        "tokens^-0.28", Columns(scale="steps"), "AdamH",
        "Rates are Adam's; AdamH's are 13/3 of them. Left out: the longest length (crashed), larger widths.",
    ),
    "megatron_mup": Source(
        "NVIDIA/Megatron-LM", "pull/3058", "a table in a comment",
        "Best rates of GPT over width 128 to 2048: SP's halve with each doubling, μP's stay up to 1024",
        ours="Optima alone, on a grid of factor 2.",
    ),
    "marin_depth_mup": Source(
        "marin-community/marin", ".agents/logbooks/moe-depth-mup-lr-sweep.md", "05768c5",
        "Mixtures of experts of width 512 to 1024 under AdamH, residual branches × 1/√layers: the best "
        "multiple of tokens^-0.28 · width^-0.37 · √batch stays 1",
        Columns("flops"), "AdamH, multiple of a law",
        "The largest at 12 000 of 12 648 steps.",
    ),
    "marin_muonh_recipe": Source(
        "marin-community/marin", "issues/5951", "a table in a comment",
        "MuonH on mixtures of experts of three widths, 10 to 240 tokens a parameter: the best rate falls as "
        "tokens^-0.395",
        Columns("tokens", parametrization="width"), "MuonH",
        "Optima alone, by parabolas through five rates; 10 % is taken as their error, tokens are in active "
        "parameters, and rates are multiples of the recipe's at 10.",
    ),
    "small_batches": Source(
        "martin-marek/batch-size", "utils/fig10.ipynb", "32700f0, read off its figure",
        "AdamW on C4, 19 M parameters, batches of 16 to 1024 at equal tokens: small ones do as well as large "
        "ones if β₂ keeps its half-life in tokens",
        Columns(scale="batch_size"),
        ours="A fixed β₂ costs small batches loss; α is the same.",
    ),
    "cooldown_steps": Source(
        "fabian-sp/lr-scheduling", "data/**/*.json", "8ace3a3",
        "The best rate falls as 1/√steps and rises with the share of the cooldown (Llama of 124 M "
        "parameters, AdamW)", rule="SP",
        ours="15 000 to 50 000 steps are too few octaves to tell 1/√steps from 0.",
        sweeps=_cooldowns,
    ),
    "one_step": Source(
        "TatianaUshakova/batch-size-lr-scaling", "outputs/mnist_optimal_batch_lr_dense/aggregate_results.csv",
        "83f2cf6",
        "One step of SGD from two states of an MLP on MNIST: the best rate is ε/(1 + B₀/batch) (McCandlish "
        "et al. 2018), no power law",
        rule="SGD, one step",
        sweeps=_one_step,
    ),
    "step_law": Source(
        "step-law/steplaw", "data/dense_lr_bs_loss.csv` and `data/moe_lr_bs_loss.csv", "32a8f4c",
        "lr ∝ N^-0.713 · D^0.307, at the best batch", rule="SP",
        ours="As sweeps of three points or more along size, tokens or batch, the others fixed; smooth loss.",
        sweeps=_step_law,
    ),
}  # fmt: skip
