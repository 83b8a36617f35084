"""What breaks transfer, and by how much: common mistakes, each a small sweep beside μP as it is meant.

python experiments/ablations.py --until-settled --budget 10m          buys each sweep's runs where they decide
python experiments/ablations.py --names sqrt_attention warmup_0.9     runs the whole grid of some
python experiments/ablations.py --widths 128 512 2048 --num-seeds 3 --results results/ablations_h200
                                                                  on such a GPU, where more should break

Init and multipliers are those of quickstart.py: at plain ones seeds differ by more than mistakes cost.
"""

from quickstart import SWEEP as QUICKSTART

from mup_tpu.cli import run_ablations
from mup_tpu.config import Sweep

GROWING_HEAD_SIZE = {"growing_dimension": "head_size"}
WIDER = ("growing_head_size", "sqrt_attention", "unscaled_readout", "hidden_embedding")
"""What six times the base width does not tell yet, and what it is held against: these go to ten times."""

ABLATIONS = {
    name: Sweep(
        experiment=name,
        base=QUICKSTART.base.replace(**changes),
        parametrizations=(parametrization,),
        widths=(*QUICKSTART.widths, 640) if name in WIDER else QUICKSTART.widths,
        learning_rates=tuple(2.0**e for e in range(-10, -2)),
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
        # Embeddings have one axis that grows; many scale them by hand as if both did.
        ("hidden_embedding", "mup_hidden_embedding", {}),
        # A deepcopy, or weights loaded into a new model, drops what the optimizer reads: m = 1 for it.
        ("lost_multipliers", "mup_lost_multipliers", {}),
        ("untied", "mup", {"tied": False}),
        # A readout of zeros first has to grow: after 100 steps it is still far behind, and noisy.
        ("untied_zero_readout", "mup", {"tied": False, "readout_zero_init": True, "steps": 400}),
        # A step shrinks weights by lr·λ (coupled) or by λ whatever the learning rate (independent): these two
        # agree at lr 2^-7.
        ("decay_coupled", "mup", {"weight_decay": 0.5}),
        ("decay_independent", "mup", {"weight_decay": 0.5 * 2.0**-7, "decay_mode": "independent"}),
        ("warmup_0.9", "mup", {"warmup": 0.9}),
        # μP's gradients shrink with width, Adam's ε does not.
        ("eps_1e-5", "mup", {"eps": 1e-5}),
    )
}

if __name__ == "__main__":
    run_ablations(ABLATIONS, __doc__)
