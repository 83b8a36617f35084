"""Common mistakes that break transfer, and their costs: each is a small sweep beside correct μP.

mup-tpu sweep experiments/ablations.py:sp --results results/ablations/sp     one of the sweeps below
mup-tpu analyze results/ablations

Init and multipliers come from quickstart.py; with default ones, seeds would differ by more than mistakes
cost.
"""

from quickstart import SWEEP as QUICKSTART

from mup_tpu.config import Sweep

GROWING_HEAD_SIZE = {"growing_dimension": "head_size"}
WIDTHS = [point["width"] for point in QUICKSTART.points]
WIDER = ("growing_head_size", "sqrt_attention", "unscaled_readout", "hidden_embedding")
"""Sweeps to ten times the base width: six times does not tell these mistakes from their reference."""

ABLATIONS = {
    name: Sweep(
        experiment=name,
        base=QUICKSTART.base.replace(**changes),
        compare={"parametrization": (parametrization,)},
        scale={"width": (*WIDTHS, 640) if name in WIDER else WIDTHS},
        tune={"learning_rate": tuple(2.0**e for e in range(-10, -2))},
        num_seeds=2,
    )
    for name, parametrization, changes in (
        ("mup", "mup", {}),
        ("sp", "sp", {}),
        # Attention 1/√d instead of 1/d; only a growing head size shows a difference.
        ("growing_head_size", "mup", GROWING_HEAD_SIZE),
        ("sqrt_attention", "mup_sqrt_attention", GROWING_HEAD_SIZE),
        # μP's init and learning rates, but logits that grow with width.
        ("unscaled_readout", "mup_unscaled_readout", {}),
        # Embeddings have one growing axis; a common mistake scales them like matrices with two.
        ("hidden_embedding", "mup_hidden_embedding", {}),
        # A deepcopy, or weights loaded into a new model, loses attributes of tensors: m = 1 for the
        # optimizer.
        ("lost_multipliers", "mup_lost_multipliers", {}),
        ("untied", "mup", {"tied": False}),
        # A zero readout has to grow first: after 100 steps its loss is still far behind, and noisy.
        ("untied_zero_readout", "mup", {"tied": False, "readout_zero_init": True, "steps": 400}),
        # A step shrinks weights by lr·λ (coupled) or by λ at any learning rate (independent); both agree at
        # lr 2^-7.
        ("decay_coupled", "mup", {"weight_decay": 0.5}),
        ("decay_independent", "mup", {"weight_decay": 0.5 * 2.0**-7, "decay_mode": "independent"}),
        ("warmup_0.9", "mup", {"warmup": 0.9}),
        # Gradients shrink with width in μP, and Adam's ε does not.
        ("eps_1e-5", "mup", {"eps": 1e-5}),
    )
}

globals().update(ABLATIONS)  # for experiments/ablations.py:NAME
