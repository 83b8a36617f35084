"""A norm in a fast form, against torch's own; test_networks.py has all forms in networks, with gradients."""

import pytest
import torch

from mup_tpu.models.layers import _LayerNorm


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
