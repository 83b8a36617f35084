"""Layers in fast forms, against torch's own."""

import math

import pytest
import torch

from mup_tpu.models.kernels.pointwise import FastGelu, _LayerNorm


def test_fast_gelu_is_gpt2s_gelu_and_so_is_its_gradient():
    x = torch.linspace(-12, 12, 300_001, dtype=torch.float64, requires_grad=True)  # more than a block
    fast = FastGelu()
    ours, torchs = fast(x), torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (ours, torchs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)
    far = torch.tensor([-1e4, 1e4, math.nan], requires_grad=True)
    torch.testing.assert_close(fast(far), torch.nn.functional.gelu(far, approximate="tanh"), equal_nan=True)
    assert torch.autograd.grad(fast(far).sum(), far)[0][:2].tolist() == [0, 1]


def test_fast_gelu_in_bf16_rounds_output_and_slope_once():
    """Against float64 on inputs of bf16; half a unit in the last place is 2^-8 of a number at most."""
    x = torch.linspace(-12, 12, 300_001).bfloat16().requires_grad_()
    exact = x.detach().double().requires_grad_()
    ours, torchs = FastGelu()(x), torch.nn.functional.gelu(exact, approximate="tanh")
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), torchs, rtol=2**-8, atol=2**-20)
    slope, expected = (torch.autograd.grad(y.sum(), i)[0] for y, i in ((ours, x), (torchs, exact)))
    torch.testing.assert_close(slope.double(), expected, rtol=2**-8, atol=2**-20)


@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_one_pass_norm_is_torch_s_and_so_are_its_gradients(offset):
    """Under vmap, as it is used, against torch's own in float64; rows whose mean is far from 0 too."""
    generator = torch.Generator().manual_seed(0)
    x_KND = offset + torch.randn(2, 7, 32, generator=generator)
    weight_KD, bias_KD = torch.randn(2, 2, 32, generator=generator)

    def loss(norm, x_ND, weight_D, bias_D):
        return norm(x_ND, weight_D, bias_D).pow(3).mean()

    def ours(x_ND, weight_D, bias_D):
        return _LayerNorm.apply(x_ND, weight_D, bias_D, 1e-5)[0]

    def torchs(x_ND, weight_D, bias_D):
        return torch.nn.functional.layer_norm(x_ND, (32,), weight_D, bias_D)

    def gradients(norm, *tensors):
        differentiated = torch.func.grad(lambda *t: loss(norm, *t), argnums=(0, 1, 2))
        return torch.func.vmap(differentiated)(*tensors)

    found = gradients(ours, x_KND, weight_KD, bias_KD)
    expected = gradients(torchs, x_KND.double(), weight_KD.double(), bias_KD.double())
    for got, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)
    one_value_N = torch.full((3, 32), 1e4, requires_grad=True)
    assert ours(one_value_N, weight_KD[0], bias_KD[0]).isfinite().all()
