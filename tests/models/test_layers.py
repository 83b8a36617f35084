"""Layers in fast forms, against torch's own."""

import pytest
import torch

from mup_tpu.models.kernels.pointwise import _LayerNorm


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
