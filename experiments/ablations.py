"""What breaks transfer, and by how much: common mistakes, each a small sweep beside μP as it is meant.

python experiments/ablations.py                                   runs all, or whatever of them is missing
python experiments/ablations.py --names sqrt_attention warmup_0.9     runs some
python experiments/ablations.py --widths 128 512 2048 --num-seeds 3 --results results/ablations_h200
                                                                  on such a GPU, where more should break
"""

from mup_tpu.cli import run_ablations
from mup_tpu.config import Sweep, Trial

BASE = Trial().replace(
    depth=2,
    head_size=32,
    base_width=64,
    init_std=0.06,
    sequence_length=64,
    batch_size=8,
    steps=100,
    warmup=0.3,
    eval_batches=16,
)
GROWING_HEAD_SIZE = {"growing_dimension": "head_size"}

ABLATIONS = {
    name: Sweep(
        experiment=name,
        base=BASE.replace(**changes),
        parametrizations=(parametrization,),
        widths=(64, 128, 256),
        learning_rates=tuple(2.0**e for e in range(-11, -4)),
        num_seeds=2,
    )
    for name, parametrization, changes in (
        ("mup", "mup", {}),
        ("sp", "sp", {}),
        # Attention 1/√d instead of 1/d, which only a growing head size can tell apart.
        ("growing_head_size", "mup", GROWING_HEAD_SIZE),
        ("sqrt_attention", "mup_sqrt_attention", GROWING_HEAD_SIZE),
        # μP's init and learning rates, but logits that grow with width.
        ("unscaled_readout", "mup_unscaled_readout", {}),
        ("untied", "mup", {"tied": False}),
        ("untied_zero_readout", "mup", {"tied": False, "readout_zero_init": True}),
        # A step shrinks weights by lr·λ (coupled) or by λ whatever the learning rate (independent): these two
        # agree at lr 2^-7.
        ("decay_coupled", "mup", {"weight_decay": 0.5}),
        ("decay_independent", "mup", {"weight_decay": 0.5 * 2.0**-7, "decay_mode": "independent"}),
        ("warmup_0.9", "mup", {"warmup": 0.9}),
        # μP's gradients shrink with width, Adam's ε does not.
        ("eps_1e-5", "mup", {"eps": 1e-5}),
        ("bf16", "mup", {"precision": "bf16"}),
    )
}

if __name__ == "__main__":
    run_ablations(ABLATIONS, __doc__)
