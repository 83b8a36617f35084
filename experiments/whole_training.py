"""Do μP's assumptions hold until the end? Powers of the width of a stock GPT-2, at steps 1 to 600.

python experiments/whole_training.py            trains what is missing in results/whole_training
python experiments/whole_training.py --draw     draws its figure anew

Of each matrix, on held-out text: the size of its output, of what its change since init adds to it (the
update), and the **alignment** |ΔW·x| / (|ΔW|·|x|) of that change with its inputs, 1 if a change of rank one
meets the input that it learnt from. μP's 1/m for Adam takes an alignment that does not follow the width (Yang
et al. 2022, Tensor Programs V, appendix J; Everett et al. 2024, arXiv:2407.05872, section 4).

Shapes: B sequences, T tokens.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import GPT2Config
from transformers.pytorch_utils import Conv1D

from mup_tpu import data
from mup_tpu.config import Trial
from mup_tpu.parametrize import from_config

FOLDER = Path("results/whole_training")
BASE, WIDTHS, RULES, SEEDS = 64, (64, 96, 128, 192, 256), ("mup", "sp"), 2
STEPS, WARMUP = 600, 60
TIMES = (1, 2, 5, 10, 20, 50, 100, 200, 400, STEPS)
RATES = {"mup": 2.0**-7, "sp": 2.0**-7}  # at the base; in SP the same rate at every width
TEXT = Trial().replace(sequence_length=64, batch_size=16).data
TRIALS = [(rule, width, seed) for width in WIDTHS for rule in RULES for seed in range(SEEDS)]
QUANTITIES = {"activation": "output", "update": "update since init", "alignment": "alignment"}
LAYERS = {"c_attn": "queries, keys, values", "attn.c_proj": "attention's output", "c_fc": "MLP, in",
          "mlp.c_proj": "MLP, out", "lm_head": "readout"}  # fmt: skip


def trained_sizes(rule: str, width: int, seed: int) -> list[dict[str, object]]:
    """Train once, by a warm-up and a linear fall to 0; return a row a time, matrix and quantity."""
    corpus = data.load(TEXT)
    config = GPT2Config(
        vocab_size=corpus.vocab_size, n_positions=64, n_embd=BASE, n_layer=2, n_head=BASE // 16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    grown = from_config(config, width=width, rule=rule)
    model = grown.model()
    optimizer = torch.optim.AdamW(grown.mup.param_groups(model, lr=RATES[rule], weight_decay=0.0), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / WARMUP, (STEPS - done) / (STEPS - WARMUP))
    )
    matrices = {
        name: part for name, part in model.named_modules() if isinstance(part, Conv1D | torch.nn.Linear)
    }
    start = {name: part.weight.detach().clone() for name, part in matrices.items()}
    probe_BT = torch.from_numpy(corpus.validation_batches(1)[0])[..., :-1]
    rows: list[dict[str, object]] = []
    at = {"rule": rule, "width": width, "seed": seed}

    def measure(step: int) -> None:
        def keep(name: str, part: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            change = part.weight.detach() - start[name]
            change = change if isinstance(part, Conv1D) else change.T
            moved = inputs[0] @ change
            sizes = {
                "activation": rms(output),
                "update": rms(moved),
                "alignment": float(moved.norm() / (change.norm() * inputs[0].norm())),
            }
            for quantity, size in sizes.items():
                rows.append(at | {"step": step, "matrix": name, "quantity": quantity, "size": size})

        hooks = [
            part.register_forward_hook(lambda p, i, o, name=name: keep(name, p, i, o))
            for name, part in matrices.items()
        ]
        with torch.no_grad():
            made = model(input_ids=probe_BT, labels=probe_BT)
        for hook in hooks:
            hook.remove()
        of_model = at | {"step": step, "matrix": ""}
        rows.append(of_model | {"quantity": "loss", "size": made.loss.item()})
        rows.append(of_model | {"quantity": "logits", "size": rms(made.logits)})

    for step in range(1, STEPS + 1):
        tokens_BT = torch.from_numpy(corpus.train_batch(step))[..., :-1]
        loss = model(input_ids=tokens_BT, labels=tokens_BT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step in TIMES:
            measure(step)
    return rows


def rms(values: torch.Tensor) -> float:
    return values.square().mean().sqrt().item()


def exponents(table: pd.DataFrame) -> pd.DataFrame:
    """Return the power of the width, with its standard error, of each kind of matrix at each step."""
    matrices = table[table["matrix"] != ""]
    kind = matrices["matrix"].map(lambda name: next(k for k in LAYERS if name.endswith(k)))
    rows = []
    for key, cell in matrices.assign(kind=kind).groupby(["rule", "step", "kind", "quantity"]):
        # Blocks differ in size, and share the power of the width.
        log2 = np.log2(cell[["width", "size"]].astype(float))
        x_N, y_N = (log2 - log2.groupby(cell["matrix"]).transform("mean")).to_numpy().T
        slope, error = np.polyfit(x_N, y_N, 1, cov=True)
        rows.append((*key, slope[0], error[0, 0] ** 0.5))
    return pd.DataFrame(rows, columns=["rule", "step", "kind", "quantity", "exponent", "error"])


def draw(fits: pd.DataFrame) -> None:
    """Draw exponents against the step: a panel for each rule and quantity, a line for each kind of matrix."""
    import matplotlib.pyplot as plt

    from mup_tpu.plots.style import STYLE
    from mup_tpu.words.names import rule_name

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(RULES), len(QUANTITIES), figsize=(9, 5.2), sharex=True, sharey="row", layout="constrained"
        )
        for panels, rule in zip(axes, RULES, strict=True):
            for panel, (quantity, title) in zip(panels, QUANTITIES.items(), strict=True):
                panel.axhline(0, color="0.4", linewidth=0.8)
                for kind, label in LAYERS.items():
                    line = fits[(fits[["rule", "quantity", "kind"]] == [rule, quantity, kind]).all(axis=1)]
                    panel.errorbar(
                        line["step"],
                        line["exponent"],
                        1.96 * line["error"],
                        label=label,
                        linewidth=1.4,
                        elinewidth=0.7,
                    )
                panel.set(xscale="log", title=f"{rule_name(rule)}: {title}")
        for panel in axes[-1]:
            panel.set_xlabel("step")
        for panel in axes[:, 0]:
            panel.set_ylabel("power of the width (95 %)")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(LAYERS))
        (FOLDER / "figures").mkdir(exist_ok=True)
        figure.savefig(FOLDER / "figures" / "exponents.png", dpi=110)


def main() -> None:
    """Train what is missing, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="draw the stored numbers, and train nothing")
    options = parser.parse_args()
    file = FOLDER / "whole_training.parquet"
    table = pd.read_parquet(file) if file.exists() else pd.DataFrame(columns=["rule", "width", "seed"])
    stored = {*table[["rule", "width", "seed"]].itertuples(index=False, name=None)}
    for rule, width, seed in [] if options.draw else TRIALS:
        if (rule, width, seed) not in stored:
            print(f"{rule}, width {width}, seed {seed}", flush=True)
            table = pd.concat([table, pd.DataFrame(trained_sizes(rule, width, seed))], ignore_index=True)
            FOLDER.mkdir(parents=True, exist_ok=True)
            table.to_parquet(file)
    fits = exponents(table)
    draw(fits)
    last = fits[fits["step"] == STEPS].pivot(index="kind", columns=["quantity", "rule"], values="exponent")
    print(last.round(2).to_string())


if __name__ == "__main__":
    main()
