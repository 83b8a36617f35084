"""μP in the Trainer of Hugging Face: one configuration, any width, a checkpoint for the stock class.

    python examples/hf_trainer.py FOLDER

Needs `pip install accelerate`. Where torch_xla is installed, the Trainer would train on XLA devices:
USE_TORCH_XLA=0, set before transformers is imported, keeps it on the CPU or GPU.
"""

import os
import sys

os.environ.setdefault("USE_TORCH_XLA", "0")

import torch
from transformers import GPT2Config, LlamaConfig, Trainer, TrainingArguments

from mup_tpu.parametrize import from_config

BASES = {
    "gpt2": GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    ),
    "llama": LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=None, eos_token_id=None,
    ),
}  # fmt: skip


def train(name: str, folder: str, width: int = 128, lr: float = 2**-7, steps: int = 10) -> float:
    """Train a wide stock model with a learning rate tuned at the base; return its training loss."""
    torch.manual_seed(0)
    grown = from_config(BASES[name], width=width)
    print(grown)
    model = grown.model()
    optimizer = torch.optim.AdamW(grown.mup.param_groups(model, lr=lr, weight_decay=0.1))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    tokens = torch.randint(0, 32, (8 * steps, 32))
    trainer = Trainer(
        model,
        TrainingArguments(folder, max_steps=steps, report_to=[], save_strategy="no", disable_tqdm=True),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        optimizers=(optimizer, schedule),
    )
    loss = trainer.train().training_loss
    grown.mup.bake_(model, untie=True).save_pretrained(folder)  # now from_pretrained computes the same
    return loss


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/hf_trainer.py FOLDER")
    print(*(train(name, f"{sys.argv[1]}/{name}") for name in BASES))
