"""A norm in a fast form, against torch's own; test_networks.py has all forms in networks, with gradients."""

import pytest
import torch
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional

from mup_tpu.config import Trial
from mup_tpu.devices import get_device
from mup_tpu.models import Forms, architecture_of, declare, forward_factors, layers
from mup_tpu.models.layers import _LayerNorm
from mup_tpu.training import members
from mup_tpu.training.pack import Pack


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_one_pass_norm_takes_rows_far_from_zero_and_rows_of_one_value(offset):
    x_ND = offset + torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    weight_D, bias_D = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    exact = torch.nn.functional.layer_norm(x_ND.double(), (32,), weight_D.double(), bias_D.double())
    torch.testing.assert_close(
        _LayerNorm.apply(x_ND, weight_D, bias_D, 1e-5)[0].double(), exact, rtol=2e-3, atol=1e-3
    )
    one_value_ND = torch.full((3, 32), 1e4, requires_grad=True)
    assert _LayerNorm.apply(one_value_ND, weight_D, bias_D, 1e-5)[0].isfinite().all()


VOCAB = 300
TRIAL = Trial().replace(
    width=32,
    base_width=32,
    head_size=16,
    depth=1,
    batch_size=4,
    sequence_length=64,
    steps=3,
    learning_rate=0.02,
)


def losses(trial, execution):
    """Losses of three steps and of an evaluation."""
    pack = Pack([trial, trial.replace(seed=1)], VOCAB, get_device("cpu"), execution)
    batches = torch.randint(VOCAB, (3, 4, 65), generator=torch.Generator().manual_seed(0))
    return torch.stack([*map(pack.step, batches), pack.evaluate(batches)])


@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-12), ("bf16", 2e-3)])
@pytest.mark.parametrize(("execution", "tied"), [("loop", True), ("vmap", False)])
def test_parts_of_the_logits_train_as_all_of_them(execution, tied, precision, tolerance, monkeypatch):
    trial = TRIAL.replace(precision=precision, tied=tied)
    whole = losses(trial, execution)
    for module in (layers, members):
        monkeypatch.setattr(module, "AT_ONCE", VOCAB * 130)  # two parts, the second smaller
    torch.testing.assert_close(losses(trial, execution), whole, rtol=0, atol=tolerance)


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
