"""Does training in bf16 move the best learning rate?

PJRT_DEVICE=CPU python experiments/bf16_vs_float32.py --device xla

The sweep below once in float32 and once in bf16 (matrix products in bfloat16; weights, optimizer state,
softmax and loss in float32), on the same batches from the same weights. XLA's CPU client multiplies as a TPU
does, by float32 sums of bfloat16 products, and needs no bfloat16 instructions of the CPU.
"""

import tyro
from rich.console import Console

from mup_tpu.cli import guard
from mup_tpu.cli.replay import TableOptions, show
from mup_tpu.config import RunOptions, Sweep, SweepOptions, Trial

SWEEP = Sweep(
    experiment="bf16_vs_float32",
    base=Trial().replace(
        depth=2,
        head_size=32,
        base_width=64,
        init_std=0.14,
        alpha_in=3.0,
        alpha_out=0.9,
        alpha_attn=0.4,
        sequence_length=128,
        batch_size=16,
        steps=150,
        warmup=0.25,
        eval_batches=32,
    ),
    parametrizations=("mup",),
    widths=(64,),
    learning_rates=tuple(2.0**e for e in range(-10, -3)),
    num_seeds=2,
)


def main(
    results: str = "results/bf16_vs_float32",
    run: RunOptions = RunOptions(),
    where: SweepOptions = SweepOptions(),
) -> None:
    """Run both sweeps, or what is missing of them, then show both optima.

    Args:
        results: Results folder; what is stored there is not run again.
        run: How each trial is run.
        where: Where the sweep runs.
    """
    from mup_tpu.tuning.sweep import run_trials

    trials = [
        trial.replace(precision=precision) for precision in ("float32", "bf16") for trial in SWEEP.trials()
    ]
    run_trials(SWEEP.experiment, trials, results, where, run, Console())
    show(results, TableOptions(parametrization_col="precision"))


if __name__ == "__main__":
    guard(lambda: tyro.cli(main, description=__doc__, config=(tyro.conf.OmitArgPrefixes,)))
