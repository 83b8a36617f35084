"""Packs of test_xla.py, for it and for the processes that train on XLA."""

import torch

from mup_tpu.config import Trial
from mup_tpu.devices.base import Device
from mup_tpu.training.pack import Pack

STEPS = 26
CHUNK = 12


def trials(corpus: str, precision: str, architecture: str = "gpt2", optimizer: str = "adamw") -> list[Trial]:
    """Three members, which no mesh of four devices divides; warm-up, decay and clipping included.

    Llama has norms of queries and keys, and shared key-value heads; experts have a shared one beside them.
    """
    own = {
        "gpt2": {},
        "llama": {"qk_norm": True, "query_group_size": 2, "head_size": 8},
        "moe": {"shared_experts": 1, "balance_loss": 0.1},
    }[architecture]
    base = Trial().replace(
        corpus=corpus, width=32, base_width=16, head_size=16, base_depth=1, sequence_length=16, batch_size=4,
        steps=STEPS, warmup=0.2, schedule="linear", init_std=0.08, eval_batches=2, precision=precision,
        optimizer=optimizer, depth=1,
    ).replace(architecture=architecture, **own)  # fmt: skip
    return [base.replace(learning_rate=lr, weight_decay=0.1) for lr in (0.003, 0.01, 0.03)]


def micro_batches(device: Device, parts: int) -> list[float]:
    """Losses of three steps and an evaluation in float64, of batches in this number of parts."""
    base = Trial().replace(
        width=32, depth=1, base_width=16, head_size=16, sequence_length=16, batch_size=4, precision="float64",
        grad_clip=0.1, learning_rate=0.01,
    )  # fmt: skip
    tokens = torch.randint(0, 256, (3, 4, 17), generator=torch.Generator().manual_seed(0))
    pack = Pack([base, base.replace(seed=1)], 256, device, micro_batches=parts)
    trained = pack.read(pack.train(device.place_stack(tokens, "data", 3), 3))
    held_out = pack.read(pack.evaluate(device.place_stack(tokens[:1], "data", 1)))
    return [*trained.flatten().tolist(), *held_out.tolist()]
