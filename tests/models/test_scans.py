"""Blocks as one loop against blocks one after another, by a loop of Python in place of the compiler's."""

import pytest
import torch
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional

from mup_tpu.config import Trial
from mup_tpu.models import Forms, architecture_of, declare, forward_factors

VOCAB, T = 40, 8


def scan(step, carry, stacks, reverse):
    """As torch_xla's: stacks' items in order or from the last, and results in the order of the items."""
    order = range(len(stacks[0]))
    results = {}
    for i in reversed(order) if reverse else order:
        carry, results[i] = step(carry, [stack[i] for stack in stacks])
    return carry, [torch.stack(of) for of in zip(*(results[i] for i in order), strict=True)]


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_one_loop_over_the_blocks_is_the_same_function_with_the_same_gradients(architecture):
    trial = Trial().replace(
        architecture=architecture, width=32, base_width=16, head_size=16, depth=3, base_depth=1,
        parametrization="completep", sequence_length=T,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    shapes = declare(trial.model, VOCAB, T).shapes
    parameters = {
        name: 0.3 * torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    factors = {
        name: torch.tensor([factor, 1.3 * factor], dtype=torch.float64)
        for name, factor in forward_factors(trial).items()
    }
    tokens = torch.randint(0, VOCAB, (3, T + 1), generator=generator)

    def outcome(forms):
        network = architecture_of(trial.model).network(trial.model, VOCAB, T, forms)

        def loss(parameters, buffers):
            logits = functional_call(network, parameters | buffers, (tokens[:, :-1],), tie_weights=True)
            return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

        return vmap(grad_and_value(loss))(parameters, factors)

    in_turn, looped = (outcome(Forms("matmul", vmapped=True, scan=loop)) for loop in (None, scan))
    torch.testing.assert_close(looped, in_turn, rtol=1e-12, atol=1e-13)
