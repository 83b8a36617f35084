"""Training programs that other people wrote, swept unchanged: sweep, kill -9, resume, verdict, prediction.

    python benchmarks/real_trainers.py CLONES OUT [NAME ...]

CLONES holds a clone of each program under the name of its repository, at the commit below, made ready as its
README says: its environment in `.venv`, and its data. Nothing of these programs is part of this repository.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import tyro
from tyro.conf import Positional

from mup_tpu.errors import MupTpuError
from mup_tpu.store import load_runs


@dataclass(frozen=True)
class Program:
    """A training program, and how it is swept."""

    name: str
    repository: str
    commit: str
    trainer: str  # the words of --trainer
    study: str  # the study file; its name is added
    at: str  # target of the prediction
    folder: str = "."  # of the clone, where the program is started
    config: str = ""  # its configuration file in YAML, where it reads one
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def clone(self) -> str:
        return self.repository.partition("/")[2]


PROGRAMS = [
    Program(
        "nanogpt",
        "karpathy/nanoGPT",
        "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        "python train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 "
        "--eval_interval=30 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --dropout=0.0 "
        "--max_iters=60 --lr_decay_iters=60 --warmup_iters=5 --out_dir={folder} --n_embd={n_embd} "
        "--learning_rate={learning_rate}",
        'scale = {n_embd = [16, 32, 64]}\ntune = {learning_rate = ["2^-9", "2^-7", "2^-5", "2^-3"]}',
        "n_embd=768",
    ),
    Program(
        "nanogpt-mup",
        "EleutherAI/nanoGPT-mup",
        "b2a5e60948d2e11885dc76c1355af98705f54a70",
        "python train.py --dataset=shakespeare_char --device=cpu --dtype=float32 --compile=False --n_layer=2 "
        "--batch_size=8 --gradient_accumulation_steps=1 --block_size=64 --max_iters=60 --decay_lr=False "
        "--eval_interval=30 --eval_iters=5 --always_save_checkpoint=False --never_save_checkpoint=True "
        "--mup_enabled=True --out_dir={folder} "
        "--n_embd={n_embd} --n_head={n_head} --mup_width_multiplier={multiplier} "
        "--learning_rate={learning_rate} --seed={seed}",
        'tune = {learning_rate = ["2^-8", "2^-6", "2^-4"]}\nmeasured_by = "n_embd"\n'
        "[[scale]]\nn_embd = 32\nn_head = 2\nmultiplier = 1.0\n"
        "[[scale]]\nn_embd = 64\nn_head = 4\nmultiplier = 2.0\n"
        "[[scale]]\nn_embd = 128\nn_head = 8\nmultiplier = 4.0\n",
        "n_embd=1024",
    ),
    Program(
        "nanochat",
        "karpathy/nanochat",
        "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd",
        "python -m scripts.base_train --depth=2 --head-dim=16 --window-pattern=L --max-seq-len=128 "
        "--device-batch-size=4 --total-batch-size=512 --eval-every=20 --eval-tokens=2048 "
        "--core-metric-every=-1 --sample-every=-1 --num-iterations=40 --model-tag={id} "
        "--aspect-ratio={aspect_ratio} --matrix-lr={matrix_lr}",
        'scale = {aspect_ratio = [16, 32, 64]}\ntune = {matrix_lr = ["2^-7", "2^-5", "2^-3"]}',
        "aspect_ratio=512",
        # The compiler takes minutes a trial on a CPU.
        environment={"NANOCHAT_BASE_DIR": "{clones}/nanochat_base", "TORCHDYNAMO_DISABLE": "1"},
    ),
    Program(
        "run_clm",
        "huggingface/transformers",
        "1d185d43cfcef350bf51798956a39f4f7e860c21",
        "python run_clm.py --model_type gpt2 --tokenizer_name ../torchtitan/tests/assets/tokenizer "
        "--config_overrides n_embd={n_embd},n_layer=2,n_head=2,n_positions=64,vocab_size=2048 "
        "--train_file ../text/valid.txt --validation_file ../text/short.txt --block_size 64 --do_train "
        "--do_eval --max_steps 30 --logging_steps 10 --per_device_train_batch_size 8 --use_cpu "
        "--save_strategy no --report_to none --output_dir {folder} --learning_rate {learning_rate}",
        'scale = {n_embd = [16, 32, 64]}\ntune = {learning_rate = ["2^-8", "2^-6", "2^-4"]}',
        "n_embd=768",
    ),
    Program(
        "litgpt",
        "Lightning-AI/litgpt",
        "26857050fe3ff627cd714fe92f5838f51a3d5efa",
        "litgpt pretrain --config {config} --out_dir {folder}",
        'config = "{out}/base.yaml"\nscale = {"model_config.n_embd" = [16, 32, 64]}\n'
        'tune = {"optimizer.init_args.lr" = ["2^-9", "2^-7", "2^-5", "2^-3"]}',
        "model_config.n_embd=768",
        config="""\
model_name: pythia-14m
model_config:
  {name: toy, block_size: 64, n_layer: 2, n_head: 2, n_embd: 32, vocab_size: 2000, padded_vocab_size: 2048}
precision: 32-true
data:
  class_path: litgpt.data.TextFiles
  init_args: {train_data_path: ../text2, val_data_path: ../text2v, num_workers: 0}
train:
  {max_tokens: 20000, global_batch_size: 8, micro_batch_size: 8, lr_warmup_steps: 5, max_norm: 1.0, min_lr: 0}
eval: {interval: 20, max_iters: 5, final_validation: true}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.01}}
tokenizer_dir: ../torchtitan/tests/assets/tokenizer
seed: 42
""",
    ),
    Program(
        "makemore",
        "karpathy/makemore",
        "988aa59e4d8fefa526d06f3b453ad116258398d4",
        "python makemore.py --n-layer 2 --n-head 2 --max-steps 501 -n 0 -o {folder} --n-embd {n_embd} "
        "--learning-rate {learning_rate} --seed {seed}",
        'scale = {n_embd = [8, 16, 32]}\ntune = {learning_rate = ["2^-11", "2^-9", "2^-7", "2^-5"]}',
        "n_embd=256",
    ),
    Program(
        "lightning-hydra-template",
        "ashleve/lightning-hydra-template",
        "bddbc24b82ab6ccfa6243e815a49dc5bfe8d4144",
        "python src/train.py trainer.max_epochs=1 +trainer.limit_train_batches=50 "
        "+trainer.limit_val_batches=5 test=False hydra.run.dir={folder} "
        "model.net.lin1_size={width} model.net.lin2_size={width} "
        "model.optimizer.lr={learning_rate} seed={seed}",
        'scale = {width = [16, 32, 64]}\ntune = {learning_rate = ["2^-11", "2^-9", "2^-7", "2^-5"]}',
        "width=512",
    ),
    Program(
        "lightning-cli",
        "Lightning-AI/pytorch-lightning",
        "7f0c3436cd3f6ad3753125672024fc415cbcb414",
        "python backbone_image_classifier.py --trainer.max_epochs=1 --trainer.limit_train_batches=50 "
        "--trainer.limit_val_batches=5 --trainer.limit_test_batches=20 --trainer.limit_predict_batches=1 "
        "--trainer.accelerator=cpu --trainer.default_root_dir={folder} --model.backbone=__main__.Backbone "
        "--model.backbone.init_args.hidden_dim={width} --model.learning_rate={learning_rate} "
        "--seed_everything={seed}",
        'scale = {width = [16, 32, 64]}\ntune = {learning_rate = ["2^-10", "2^-8", "2^-6"]}',
        "width=512",
        folder="examples/pytorch/basics",
    ),
    Program(
        "nanodo",
        "google-deepmind/nanodo",
        "10aefdeed40a63293daf112b91a5538cd24fa3a4",
        "python nanodo/main.py --config=nanodo/configs/default.py --config.workdir={folder} "
        "--config.vocab_path=../nanodo_sp.model --config.model.L=64 --config.model.H=2 --config.model.N=2 "
        "--config.model.dtype=float32 --config.batch_size=8 --config.pygrain_worker_count=0 "
        "--config.opt.num_train_steps=40 --config.opt.warmup_steps=5 --config.eval_every_steps=20 "
        "--config.eval_steps=5 --config.eval_max_target_length=64 --config.checkpoint=False "
        "--config.model.D={D} --config.model.F={F} --config.opt.peak_learning_rate={learning_rate}",
        'tune = {learning_rate = ["2^-9", "2^-7", "2^-5"]}\nmeasured_by = "D"\n'
        "[[scale]]\nD = 16\nF = 64\n[[scale]]\nD = 32\nF = 128\n[[scale]]\nD = 64\nF = 256\n",
        "D=512",
        environment={"PYTHONPATH": ".", "TFDS_DATA_DIR": "{clones}/tfds"},
    ),
]


def _mup_tpu(*words: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", "mup_tpu", *map(str, words)]


def _output(*words: str | Path) -> str:
    done = subprocess.run(_mup_tpu(*words), capture_output=True, check=False, text=True)
    return done.stdout or done.stderr


def _rows(results: Path) -> int:
    try:
        return len(load_runs(results))
    except MupTpuError:  # it does not exist yet
        return 0


def _left(results: Path) -> list[str]:
    """Return the command lines of processes that name the results folder, 5 seconds from now."""
    time.sleep(5)
    lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(results) in line]


def measure(program: Program, clones: Path, out: Path) -> list[str]:
    """Sweep a program, kill the driver with -9 after a third of the trials, go on and judge; return a row."""
    out.mkdir(parents=True)
    clone, results, log = clones / program.clone, out / "results", out / "sweep.txt"
    study = f'experiment = "{program.name}"\n{program.study}\n'
    (out / "study.toml").write_text(study.replace("{out}", str(out)))
    (out / "base.yaml").write_text(program.config)
    words = _mup_tpu("sweep", out / "study.toml", "--results", results, "--trainer", program.trainer)
    more = {name: text.format(clones=clones) for name, text in program.environment.items()}
    with log.open("w") as file:
        start = partial(
            subprocess.Popen, words, stdout=file, stderr=file, cwd=clone / program.folder,
            env={**os.environ, "PATH": f"{clone}/.venv/bin:{os.environ['PATH']}", **more},
        )  # fmt: skip
        began = time.monotonic()
        driver = start()
        trials = math.inf
        while driver.poll() is None and 3 * _rows(results) < trials:
            if shown := re.search(r": (\d+) trials", log.read_text()):
                trials = int(shown[1])
            time.sleep(1)
        driver.kill()
        driver.wait()
        stored, left, code = _rows(results), _left(results), start().wait()
    minutes = (time.monotonic() - began) / 60
    loss = re.search(r"^loss: `(.*?)`", log.read_text(), re.M)
    statuses = load_runs(results)["status"].value_counts().items() if _rows(results) else ()
    verdict, prediction = _output("analyze", results), _output("predict", results, "--at", program.at)
    (out / "verdict.txt").write_text(verdict + prediction)
    return [
        program.name,
        program.commit[:8],
        loss[1] if loss else "none",
        f"{stored} rows, {len(left)} processes",
        ", ".join(f"{count} {status}" for status, count in statuses),
        str(code),
        ", ".join(dict.fromkeys(re.findall(r"TRANSFERS|MOVES AT NO COST|DRIFTS|OPEN", verdict))),
        next((line for line in prediction.splitlines() if not line.startswith("note")), ""),
        f"{minutes:.1f}",
    ]


def main(clones: Positional[Path], out: Positional[Path], names: Positional[tuple[str, ...]] = (), /) -> None:
    """Sweep the programs of these names, or all, and print a table."""
    print("program | commit | loss | left by kill -9 | rows | exit | verdict | prediction | minutes")
    for program in PROGRAMS:
        if not names or program.name in names:
            print(*measure(program, clones.resolve(), out.resolve() / program.name), sep=" | ", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
