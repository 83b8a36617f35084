"""A search against the usual way: Hugging Face's Trainer in a Ray Tune function.

    python benchmarks/search_vs_hf_trainer.py --repeats 3 --out benchmarks/search_vs_hf_trainer.csv

Same GPT-2 (transformers' own there), same tokens, steps, batch, evaluation, algorithm (Optuna's TPE),
scheduler (ASHA) and two trials at a time with one thread each. Needs accelerate, which Trainer asks for.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import tyro
from paired import compare, report

from mup_tpu.config import DataConfig
from mup_tpu.data.cache import load_cache
from mup_tpu.files import cache_root

SEARCH = """
experiment = "bench"
[base.model]
width = 64
head_size = 32
parametrization = "sp"
[base.train]
steps = {steps}
eval_batches = 8
[space.learning_rate]
low = 0.0005
high = 0.05
"""
EVALUATIONS = 5


def hf_trainer(tokens_folder: str, steps: int, trials: int) -> None:
    """The peer, as Ray's and Hugging Face's guides show it."""
    os.environ |= {"RAY_AIR_NEW_OUTPUT": "0", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1"}
    import logging

    import optuna
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.optuna import OptunaSearch

    def train(config: dict) -> None:
        import numpy as np
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

        torch.set_num_threads(1)

        class Blocks(torch.utils.data.Dataset):
            def __init__(self, split: str, count: int | None = None) -> None:
                self.tokens = np.load(f"{tokens_folder}/{split}.npy", mmap_mode="r")
                self.count = count or (len(self.tokens) - 1) // 128

            def __len__(self) -> int:
                return self.count

            def __getitem__(self, i: int) -> dict:
                block = torch.from_numpy(self.tokens[i * 128 : i * 128 + 128].astype(np.int64))
                return {"input_ids": block, "labels": block}

        class ToTune(TrainerCallback):
            def on_evaluate(self, args, state, control, metrics, **kwargs) -> None:
                tune.report({"loss": metrics["eval_loss"], "share": 100 * state.global_step // steps})

        shape = GPT2Config(
            vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=16,
                per_device_eval_batch_size=16, learning_rate=config["learning_rate"], adam_beta2=0.95,
                weight_decay=0.0, max_grad_norm=1.0, warmup_steps=steps // 10, lr_scheduler_type="cosine",
                eval_strategy="steps", eval_steps=steps // EVALUATIONS, save_strategy="steps",
                save_steps=steps // EVALUATIONS, save_total_limit=1, logging_steps=10, report_to=[],
                disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
            )  # fmt: skip
            Trainer(
                GPT2LMHeadModel(shape), arguments, train_dataset=Blocks("train"),
                eval_dataset=Blocks("validation", 128), callbacks=[ToTune()],
            ).train()  # fmt: skip

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Where torch_xla is installed, accelerate would train on XLA's CPU client instead of the CPU.
    on_cpu = {"env_vars": {"ACCELERATE_USE_CPU": "1", "USE_TORCH_XLA": "0"}}
    ray.init(
        address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
        runtime_env=on_cpu,
    )  # fmt: skip
    sampler = optuna.samplers.TPESampler(seed=0)
    space = {"learning_rate": tune.loguniform(5e-4, 5e-2)}
    with tempfile.TemporaryDirectory() as scratch:
        results = tune.Tuner(
            tune.with_resources(train, {"CPU": 1}),
            tune_config=tune.TuneConfig(
                search_alg=OptunaSearch(space=space, metric="loss", mode="min", sampler=sampler),
                scheduler=ASHAScheduler(
                    time_attr="share", metric="loss", mode="min", max_t=100, grace_period=20,
                    reduction_factor=3,
                ),
                num_samples=trials,
                max_concurrent_trials=2,
            ),
            run_config=tune.RunConfig(name="hf", storage_path=scratch, verbose=0),
        ).fit()  # fmt: skip
        assert not results.errors, results.errors[0]
        done = sum(r.metrics["share"] for r in results) * steps // 100
        print(
            f"steps trained: {done}, best loss {results.get_best_result('loss', 'min').metrics['loss']:.4f}"
        )


def main(
    repeats: int = 3, trials: int = 12, steps: int = 300, out: Path | None = None, peer: str | None = None
) -> None:
    """Time both in turn.

    Args:
        repeats: Pairs of runs.
        trials: Trials of a search; 1 compares a single trial's speed.
        steps: Optimizer steps a trial.
        out: CSV file for the table.
        peer: Folder of tokens: run the peer once, here.
    """
    if peer is not None:
        hf_trainer(peer, steps, trials)
        return
    tokens = cache_root() / "tokens" / load_cache(DataConfig()).fingerprint
    size = ["--trials", str(trials), "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "search.toml"
        file.write_text(SEARCH.format(steps=steps))
        ours = [
            [
                sys.executable, "-m", "mup_tpu", "search", str(file), "--results", "{run}",
                "--num-samples", str(trials), "--evaluations", str(EVALUATIONS), "--max-concurrent", "2",
            ]
        ]  # fmt: skip
        theirs = [[sys.executable, __file__, "--peer", str(tokens), *size]]
        table = compare(ours, theirs, repeats, Path(scratch))
        print((Path(scratch) / "peer.log").read_text()[-400:])
    report(table.assign(trials=trials, steps=steps), out)


if __name__ == "__main__":
    tyro.cli(main)
