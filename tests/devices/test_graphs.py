"""Traced steps through torch's compiler, on the CPU; test_cuda.py has the rest."""

import pytest
import torch

from mup_tpu.devices.graphs import compiled


def test_a_step_is_compiled_as_its_gradients_and_its_update(monkeypatch):
    """In one piece inductor would keep all activations until the update."""
    parts = []
    monkeypatch.setattr(torch, "compile", lambda part, **_: parts.append(part) or part)
    weights, x = torch.ones(3), torch.arange(3.0)

    def step(weights, x):
        loss = (weights * x).square()
        weights.sub_(loss.sum() * x)
        return loss.mean() + weights.sum()

    traced = torch.fx.experimental.proxy_tensor.make_fx(step)(weights.clone(), x)
    expected = step(weights.clone(), x)
    assert compiled(traced)(weights, x) == expected
    changing = [any("sub_" in str(node.target) for node in part.__self__.graph.nodes) for part in parts]
    assert changing == [False, True]


def test_a_step_is_compiled_by_micro_batches(monkeypatch):
    """In one piece inductor would mix them, and keep the activations of several."""
    parts = []
    monkeypatch.setattr(torch, "compile", lambda part, **_: parts.append(part.__self__) or part)
    weights, x = torch.ones(3), torch.arange(3.0)

    def step(weights, x):
        mean = (weights * x).sin().mul_(0.5)
        mean.add_((weights * x).cos(), alpha=0.5)
        weights.sub_(mean.square() * x)
        return mean.sum()

    traced = torch.fx.experimental.proxy_tensor.make_fx(step)(weights.clone(), x)
    expected = step(weights.clone(), x)
    assert compiled(traced)(weights, x) == expected
    found = [
        [name for name in ("sin", "cos", "pow", "sub_") if f"aten.{name}." in str(part.graph)]
        for part in parts
    ]
    assert found == [["sin"], ["cos"], ["pow"], ["sub_"]]


@pytest.mark.nightly
def test_where_torchs_compiler_fails_the_traced_step_is_called(caplog, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/nowhere/g++",))
    monkeypatch.setattr("torch._inductor.config.fx_graph_cache", False)
    monkeypatch.setattr("torch._dynamo.config.disable", False)  # TORCH_COMPILE_DISABLE
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x.sin().sum())(torch.ones(3))
    call = compiled(traced)
    for _ in range(2):
        assert call(torch.ones(3)) == torch.ones(3).sin().sum()
    assert caplog.text.count("torch's compiler failed") == 1


def test_ctrl_c_while_torch_compiles_is_no_other_error(monkeypatch):
    def interrupted(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", interrupted)
    monkeypatch.setattr("torch._dynamo.config.disable", False)  # TORCH_COMPILE_DISABLE
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x.sin().sum())(torch.ones(3))
    with pytest.raises(KeyboardInterrupt):
        compiled(traced)(torch.ones(3))
