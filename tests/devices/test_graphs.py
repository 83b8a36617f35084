"""Traced steps through torch's compiler, on the CPU; test_cuda.py has the rest."""

import pytest
import torch

from mup_tpu.devices.graphs import compiled


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
