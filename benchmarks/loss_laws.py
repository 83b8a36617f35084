"""Laws of the loss beside those that the owners of the runs printed, with the largest runs held out.

    python benchmarks/loss_laws.py --tables DIR     prints the table of loss_laws.md

DIR holds public repositories, of which nothing is kept: epoch-research/analyzing-chinchilla as chinchilla/,
Open-Athena/scaling-law-analysis as athena/, mcleish7/gemstone-scaling-laws as gemstones/, and
allenai/OLMo-ladder as olmo-ladder/.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import tyro

from mup_tpu.analysis import Columns, Reading, loss_laws
from mup_tpu.analysis.loss_law import LargestRun
from mup_tpu.analysis.scaling_law import ExpectedLoss
from mup_tpu.words.plans import short

Source = tuple[str, pd.DataFrame, dict[str, float], pd.DataFrame | None]
"""Name; runs with params, tokens and loss; what the owners printed; runs to predict, None for the largest."""


def chinchilla(folder: Path) -> Iterator[Source]:
    """The 240 runs of least loss, and the fit of Besiroglu et al. 2024, arXiv:2404.10102, table 1."""
    table = pd.read_csv(folder / "chinchilla/data/svg_extracted_data.csv").dropna(subset=["loss"])
    table = table.rename(columns={"Model Size": "params"}).nsmallest(len(table) - 5, "loss")
    table["tokens"] = table["Training FLOP"] / 6 / table["params"]
    printed = {"E": 1.817, "A": 482.0, "α": 0.348, "B": 2085.4, "β": 0.366}
    yield "Chinchilla's runs, read off by Epoch AI", table, printed, None


def open_athena(folder: Path) -> Iterator[Source]:
    """Llama 3's isoFLOP curves beside their fit (arXiv:2603.22339), and marin's, without a printed one."""
    data = folder / "athena/data/isoflops"
    table = pd.read_csv(data / "extract/llama_3/isoflops.csv")
    printed = {"E": 0.6021, "A": 56.2, "α": 0.3068, "B": 147.3, "β": 0.3110}
    yield "Llama 3's isoFLOP curves, read off", table[table["condition"] == "raw_loss"], printed, None
    for name in ("comma", "dclm", "nemotron"):
        yield f"marin, isoFLOP, {name}", marin(data, name), {}, None


def marin(data: Path, name: str) -> pd.DataFrame:
    table = pd.read_csv(data / f"extract/marin_202603/raw/isoflop-{name}.csv")
    columns = ["parameter_count", "throughput/total_tokens", "eval/paloma/macro_loss"]
    return table[columns].set_axis(["params", "tokens", "loss"], axis=1).dropna().assign(data=name)


def gemstones(folder: Path) -> Iterator[Source]:
    """Their checkpoints of 22 models, and their fits with Huber's δ of 1e-3 (McLeish et al. 2025)."""
    for name, words in (("cool_end", "cooled down"), ("hot_100b+", "from 100 B tokens on")):
        file = folder / f"gemstones/wandb_dfs/wandb_df_for_fitting_{name}.jsonl"
        table = pd.read_json(file, lines=True).rename(
            columns={"params_active_precise": "params", "final_loss": "loss"}
        )
        fit = folder / f"gemstones/parameters_delta-3/approach_3_parameters_grid_search_0_{name}.json"
        values = {key: value["0"] for key, value in json.loads(fit.read_text()).items()}
        (alpha, beta), (log_a, log_b) = values["exponents"], values["coefficients"]
        printed = {"E": math.exp(values["irreducible_error"]), "A": math.exp(log_a), "α": alpha}
        printed |= {"B": math.exp(log_b), "β": beta}
        yield f"Gemstones, {words}", table[["params", "tokens", "loss"]], printed, None


def olmo(folder: Path) -> Iterator[Source]:
    """16 runs of 190 M to 1.3 B parameters, loss on C4; their 7B and 13B came later (Bhagia et al. 2024)."""
    data = folder / "olmo-ladder/src/scripts/paper"
    rows = []
    for settings in json.loads((data / "configs/final.json").read_text()).values():
        for path in settings["paths"]:
            last = pd.read_csv(folder / "olmo-ladder" / path).tail(5)
            if "throughput/total_tokens" not in last:
                last["throughput/total_tokens"] = last["_step"] * last["batch_size_in_tokens"]
            tokens = last["throughput/total_tokens"].iloc[-1]
            loss = last["eval/c4_en-validation/CrossEntropyLoss"].mean()
            rows.append((settings["mode"], settings["n"], tokens, loss))
    table = pd.DataFrame(rows, columns=["mode", "params", "tokens", "loss"])
    yield "OLMo's ladder, loss on C4", table[table["mode"] == "train"], {}, table[table["mode"] == "eval"]


def lines(source: Source) -> Iterator[str]:
    name, table, printed, later = source
    known = table.head(0) if later is None else later
    at = [f"params={n},tokens={d}" for n, d in known[["params", "tokens"]].to_numpy()]
    laws = loss_laws(table[["params", "tokens", "loss"]], at)
    (one,) = laws.laws
    values, intervals = one.law.parameters, one.law.intervals
    shown = {key: interval for key, interval in intervals.items() if key in "Eαβ"}
    parameters = (f"{key} {values[key]:.4g} ({low:.3g} to {high:.3g})" for key, (low, high) in shown.items())
    theirs = ", ".join(f"{key} {printed[key]:.4g}" for key in "Eαβ" if key in printed) or "–"
    outcomes: list[tuple[tuple[float, ...], float, ExpectedLoss]] = []
    if isinstance(held := one.held_out, LargestRun) and later is None:
        outcomes.append((held.sizes, held.loss, held.expected))
        # The owners' law has seen this run, ours has not.
        seen = f"; theirs {printed_loss(printed, *held.sizes):.4g}" if printed else ""
    else:
        assert later is not None
        targets = zip(laws.targets, later["loss"], strict=True)
        outcomes += [((*t.sizes.values(),), loss, t.expected) for t, loss in targets]
        seen = ""
    came = "; ".join(
        f"{short(sizes[0])} on {short(sizes[1])}: {e.loss:.4g} ({e.low:.4g} to {e.high:.4g}), came out "
        f"{loss:.4g}, {'inside' if e.holds(loss) else 'outside'}"
        for sizes, loss, e in outcomes
    )
    a, low, high = one.law.split
    yield (
        f"| {name} | {len(one.loss_P)} | {', '.join(parameters)}; N ∝ C^{a:.2f} ({low:.2f} to {high:.2f}) | "
        f"{theirs} | {came}{seen} |"
    )


def printed_loss(printed: dict[str, float], params: float, tokens: float) -> float:
    return printed["E"] + printed["A"] * params ** -printed["α"] + printed["B"] * tokens ** -printed["β"]


def speedups(folder: Path) -> Iterator[str]:
    """Marin's data sets beside each other, by the loss on the same text (Paloma)."""
    data = folder / "athena/data/isoflops"
    table = pd.concat([marin(data, name) for name in ("comma", "dclm", "nemotron")])
    laws = loss_laws(table, ["compute=1e20"], reading=Reading(Columns(parametrization="data")))
    for gain in laws.speedups:
        yield (
            f"{gain.compared} over {gain.baseline}: × {gain.factor:.2f} (95 % {gain.low:.2f} to "
            f"{gain.high:.2f}) in compute at {gain.at:.3g} FLOP"
        )


def main(tables: Path) -> None:
    """Print the table; `tables` holds the repositories."""
    np.seterr(all="ignore")
    print("| runs | | our law (95 %) | printed | largest, predicted from smaller runs |")
    print("|---|---|---|---|---|")
    sources: tuple[Callable[[Path], Iterator[Source]], ...] = (chinchilla, open_athena, gemstones, olmo)
    for source in sources:
        for found in source(tables):
            for line in lines(found):
                print(line, flush=True)
    for line in speedups(tables):
        print(line)


if __name__ == "__main__":
    tyro.cli(main)
