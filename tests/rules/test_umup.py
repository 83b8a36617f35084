"""Growth of u-μP's forward factors, learning rates and residual branches, against its authors' package."""

import math

import pytest
import torch

from mup_tpu.rules.parametrization import PARAMETRIZATIONS, Growth, Parameter, infer_infshapes, scaling

VOCAB, WIDTH, DEPTH = 50, 32, 2


def of_the_package(width, depth):
    """Factor in the forward pass and Adam's learning rate, (A, C) of Table 2; all inits are 1."""
    uu = pytest.importorskip("unit_scaling")
    from unit_scaling.optim import lr_scale_func_adam

    def block():
        norm, fc = uu.LayerNorm(width, elementwise_affine=True), uu.Linear(width, 4 * width, constraint=None)
        return torch.nn.ModuleDict({"norm": norm, "fc": fc})

    blocks = uu.DepthModuleList([block() for _ in range(depth)])
    readout = uu.LinearReadout(width, VOCAB, constraint=None)
    x = torch.randn(7, width)

    def forward(linear):
        ratios = linear(x) / (x @ linear.weight.T)
        assert float(ratios.std().detach()) < 1e-5
        return float(ratios.mean().detach())

    return {
        "wte": (1.0, lr_scale_func_adam(uu.Embedding(VOCAB, width).weight)),
        "norm": (1.0, lr_scale_func_adam(blocks[0]["norm"].weight)),
        "fc": (forward(blocks[0]["fc"]), lr_scale_func_adam(blocks[0]["fc"].weight)),
        "head": (forward(readout), lr_scale_func_adam(readout.weight)),
    }


def branch_of_the_package(depth):
    """Factor on each residual branch over the embedding's, if the stream keeps its growing scale."""
    from unit_scaling.core.functional import transformer_residual_scaling_rule

    tau, stream, branches = transformer_residual_scaling_rule(), 1.0, []
    for index in range(2 * depth):
        ratio = tau(index, 2 * depth)
        stream /= math.hypot(1, ratio)
        branches.append(ratio / math.hypot(1, ratio) / stream)
    assert max(branches) == pytest.approx(min(branches))
    return branches[0]


def shapes(width):
    return {"wte": (VOCAB, width), "norm": (width,), "fc": (4 * width, width), "head": (VOCAB, width)}


@pytest.mark.parametrize(("width", "depth"), [(32, 8), (64, 2), (256, 32)])
def test_growth_is_that_of_the_authors_package(width, depth):
    """With a weight W = A·θ: init ∝ A and learning rate ∝ A·C. The readout's A stays on the logits."""
    base, grown = of_the_package(WIDTH, DEPTH), of_the_package(width, depth)
    growth = Growth(width=width / WIDTH, depth=depth / DEPTH)
    forward = PARAMETRIZATIONS["umup"].forward(growth)
    infshapes = infer_infshapes(shapes(WIDTH), shapes(2 * WIDTH), shapes(width))
    parameters = {
        "wte": Parameter((VOCAB, width), "token_embedding", VOCAB, width),
        "norm": Parameter((width,), "norm", 1, width, in_block=True, init="ones"),
        "fc": Parameter((4 * width, width), "hidden", width, 4 * width, in_block=True),
        "head": Parameter((VOCAB, width), "readout", width, VOCAB),
    }
    for name, parameter in parameters.items():
        found = scaling("umup", "adamw", parameter, infshapes[name], growth)
        (a, c), (a_0, c_0) = grown[name], base[name]
        behind = forward.logits if name == "head" else 1.0
        assert found.init * behind == pytest.approx(a / a_0, rel=1e-5), name
        assert found.learning_rate * behind == pytest.approx(a * c / (a_0 * c_0), rel=1e-5), name
        assert found.weight_decay * found.learning_rate == pytest.approx(1.0), "a step's decay is the base's"
    assert forward.residual == pytest.approx(branch_of_the_package(depth) / branch_of_the_package(DEPTH))
