"""Cost of our search beside plain Ray Tune: 32 trials that train almost nothing.

    python benchmarks/search_overhead.py --repeats 5 --out benchmarks/search_overhead.csv

The peer is a Ray Tune Trainable with the same algorithm, scheduler, concurrency and reused actors that trains
the same tiny GPT-2, transformers' own, for the same steps, and keeps nothing but what Tune keeps. Ours stores
every trial with its curve, checkpoints, and can be resumed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import tyro
from paired import compare, report

SEARCH = """
experiment = "bench"
[base.model]
width = 32
base_width = 32
head_size = 16
[base.data]
sequence_length = 16
batch_size = 2
[base.train]
steps = 4
warmup = 0.0
eval_batches = 1
[space.learning_rate]
low = 0.0001
high = 0.1
"""
TRIALS, STEPS, EVALUATIONS = 32, 4, 2


def plain_tune() -> None:
    """The peer."""
    os.environ |= {"RAY_AIR_NEW_OUTPUT": "0", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1"}
    import logging

    import optuna
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.optuna import OptunaSearch

    class Trainable(tune.Trainable):
        def setup(self, config: dict) -> None:
            import torch
            from transformers import GPT2Config, GPT2LMHeadModel

            torch.set_num_threads(1)
            shape = GPT2Config(vocab_size=256, n_positions=16, n_embd=32, n_layer=2, n_head=2)
            self.model = GPT2LMHeadModel(shape)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config["learning_rate"])
            self.done = 0

        def reset_config(self, new_config: dict) -> bool:
            self.setup(new_config)
            return True

        def step(self) -> dict:
            import torch

            for _ in range(STEPS // EVALUATIONS):
                tokens = torch.randint(256, (2, 16))
                loss = self.model(tokens, labels=tokens).loss
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.done += 1
            with torch.no_grad():
                tokens = torch.randint(256, (2, 16))
                held_out = self.model(tokens, labels=tokens).loss.item()
            return {"loss": held_out, "share": 100 * self.done // STEPS, "done": self.done >= STEPS}

        def save_checkpoint(self, checkpoint_dir: str) -> dict:
            return {}

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=0)
    space = {"learning_rate": tune.loguniform(1e-4, 1e-1)}
    with tempfile.TemporaryDirectory() as scratch:
        tune.Tuner(
            tune.with_resources(Trainable, {"CPU": 1}),
            tune_config=tune.TuneConfig(
                search_alg=OptunaSearch(space=space, metric="loss", mode="min", sampler=sampler),
                scheduler=ASHAScheduler(
                    time_attr="share", metric="loss", mode="min", max_t=100, grace_period=20,
                    reduction_factor=3,
                ),
                num_samples=TRIALS,
                max_concurrent_trials=2,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name="plain", storage_path=scratch, verbose=0,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        ).fit()  # fmt: skip


def main(repeats: int = 5, out: Path | None = None, peer: bool = False) -> None:
    """Time both in turn.

    Args:
        repeats: Pairs of runs.
        out: CSV file for the table.
        peer: Run the peer once, here.
    """
    if peer:
        plain_tune()
        return
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "search.toml"
        file.write_text(SEARCH)
        ours = [
            [
                sys.executable, "-m", "mup_tpu", "search", str(file), "--results", "{run}",
                "--num-samples", str(TRIALS), "--evaluations", str(EVALUATIONS), "--max-concurrent", "2",
            ]
        ]  # fmt: skip
        table = compare(ours, [[sys.executable, __file__, "--peer"]], repeats, Path(scratch))
    report(table.assign(overhead=1 / table["ratio"]), out)


if __name__ == "__main__":
    tyro.cli(main)
