"""Attention's forms against a float64 softmax over masked products, written out here."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap

from mup_tpu.models import attention
from mup_tpu.models.attention import ATTENTION

FORMS = [form for form in ATTENTION if form != "folded"]  # which is CUDA's: tests/devices/test_cuda.py


def written_out(qkv_BTX: Tensor, head_size: int, factor: float) -> Tensor:
    """One row after another, head by head."""
    b, t, x = qkv_BTX.shape
    query, key, value = qkv_BTX.view(b, t, 3, -1, head_size).unbind(2)
    rows = []
    for i in range(t):
        logits_BHS = (
            torch.einsum("bhd,bshd->bhs", query[:, i], key[:, : i + 1]) * factor / math.sqrt(head_size)
        )
        weights_BHS = logits_BHS.exp() / logits_BHS.exp().sum(-1, keepdim=True)
        rows.append(torch.einsum("bhs,bshd->bhd", weights_BHS, value[:, : i + 1]).reshape(b, x // 3))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("b", "t", "heads", "head_size"), [(2, 7, 3, 4), (3, 48, 1, 8), (2, 130, 2, 16)])
def test_every_form_is_softmax_attention_and_so_is_its_gradient(form, b, t, heads, head_size):
    generator = torch.Generator().manual_seed(0)
    shape = (b, t, 3 * heads * head_size)
    qkv = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    ours = ATTENTION[form](qkv, head_size, torch.tensor(1.7, dtype=torch.float64))
    theirs = written_out(qkv, head_size, 1.7)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    toward = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad(out, qkv, toward)[0] for out in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [1.0, 5.0])
def test_in_bf16_only_products_are_rounded(size):
    """Against float64 on the same inputs.

    Logits of queries and keys of size 5 reach 100, where bf16 is wrong by 0.25: in bf16 they would fail.
    """
    generator = torch.Generator().manual_seed(0)
    qkv = (size * torch.randn(2, 130, 3 * 64, generator=generator)).bfloat16().requires_grad_()
    exact = qkv.detach().double().requires_grad_()
    toward = torch.randn(2, 130, 64, generator=generator).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        ours = ATTENTION["fused"](qkv, 16, torch.tensor(1.0))
    theirs = written_out(exact, 16, 1.0)
    found, expected = (
        torch.autograd.grad(*of)[0] for of in ((ours, qkv, toward), (theirs, exact, toward.double()))
    )
    assert ours.dtype == found.dtype == torch.bfloat16
    for rounded, true in ((ours, theirs), *zip(found.chunk(3, -1), expected.chunk(3, -1), strict=True)):
        assert (rounded.double() - true).norm() < 2**-7 * true.norm()


@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_cpu_never_runs_the_slow_kernel_in_bf16(monkeypatch, is_autocast):
    seen, kernel = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        attention.functional, "scaled_dot_product_attention",
        lambda *given, **options: seen.append(kernel(*given, **options)) or seen[-1],
    )  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        ATTENTION["fused"](torch.ones(1, 4, 3 * 8).bfloat16(), 8, torch.tensor(1.0))
    assert [out.dtype for out in seen] == [torch.float32]


@pytest.mark.parametrize("form", ["matmul", "recomputed"])
def test_forms_for_stacked_members_are_so_for_each_of_them(form):
    """K members of a factor each, as vmap over gradients runs them."""
    generator = torch.Generator().manual_seed(0)
    qkv_KBTX = torch.randn(3, 2, 150, 3 * 8, generator=generator, dtype=torch.float64)
    factors_K = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)

    def loss(qkv: Tensor, factor: Tensor) -> Tensor:
        return ATTENTION[form](qkv, 8, factor).square().sum()

    stacked_KBTX = vmap(grad(loss))(qkv_KBTX, factors_K)
    for qkv, factor, ours in zip(qkv_KBTX, factors_K, stacked_KBTX, strict=True):
        qkv.requires_grad_()
        (theirs,) = torch.autograd.grad(written_out(qkv, 8, float(factor)).square().sum(), qkv)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_logits_beyond_exps_range_stay_finite(form):
    qkv = 200 * torch.randn(1, 60, 3 * 8, generator=torch.Generator().manual_seed(0))
    qkv.requires_grad_()
    out = ATTENTION[form](qkv, 8, torch.ones(()))
    (gradient,) = torch.autograd.grad(out.sum(), qkv)
    assert out.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_a_sequence_with_a_nan_leaves_the_others_alone(form):
    qkv = torch.randn(2, 50, 3 * 8, generator=torch.Generator().manual_seed(0))
    clean = ATTENTION[form](qkv, 8, torch.ones(()))
    qkv[0, 3] = math.nan
    out = ATTENTION[form](qkv, 8, torch.ones(()))
    assert out[0, 3:].isnan().all()
    torch.testing.assert_close(out[1], clean[1])


@pytest.mark.parametrize(
    ("dtype", "head_size", "capability", "kernel"),
    [
        (torch.bfloat16, 64, (8, 0), "flash"),
        (torch.bfloat16, 64, (7, 5), ""),  # torch has no kernel for it
        (torch.float32, 64, (7, 5), "efficient"),
        (torch.float32, 20, (9, 0), ""),
        (torch.float64, 64, (9, 0), ""),
    ],
)
def test_kernels_of_gpus_by_their_capability(dtype, head_size, capability, kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        query_BHTd = torch.empty(1, 2, 8, head_size, dtype=dtype, device="cuda")
    assert attention.kernel_for(query_BHTd) == kernel
