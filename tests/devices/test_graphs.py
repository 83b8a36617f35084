"""Traced steps through torch's compiler, on the CPU; test_cuda.py has the rest."""

import pytest
import torch

from mup_tpu.devices.base import one_by_one
from mup_tpu.devices.cuda import GraphSteps, compiled


class Recorder:
    """Calls what a GPU would record."""

    warm_ups = recorded = 0

    def warm_up(self, act):
        self.warm_ups += 1
        act()

    def record(self, act):
        self.recorded += 1
        return act


def test_replays_change_what_single_steps_change_and_are_recorded_once_for_the_same_tensors():
    def step(changed, fixed, item):
        changed["w"].mul_(fixed[0]).add_(item[0])
        return changed["w"].sum() + item[1]

    recorder, stacks = Recorder(), (torch.arange(15.0).view(5, 3), torch.arange(5.0))
    replays, fixed = GraphSteps(step, recorder), (torch.tensor(0.5),)
    for recordings in (1, 2):  # a smaller stack of members has other tensors
        mine, theirs = ({"w": torch.ones(3)} for _ in range(2))
        for steps in (5, 2, 4):
            found = replays(mine, fixed, stacks, steps)[:steps]
            assert torch.equal(found, one_by_one(step)(theirs, fixed, stacks, steps))
            assert torch.equal(mine["w"], theirs["w"])
        assert (recorder.warm_ups, recorder.recorded) == (2 * recordings, recordings)


def whole(weights, x):
    loss = (weights * x).square().sin()
    weights.sub_(loss.sum() * x)
    return loss.mean() + weights.sum()


def in_micro_batches(weights, x):
    mean = (weights * x).sin().mul_(0.5)
    mean.add_((weights * x).cos(), alpha=0.5)
    weights.sub_(mean.square() * x)
    return mean.sum()


@pytest.mark.parametrize(
    ("step", "expected"),
    [(whole, [["sin"], ["sub_"]]), (in_micro_batches, [["sin"], ["cos"], ["pow"], ["sub_"]])],
)
def test_a_step_is_compiled_as_its_gradients_by_micro_batches_and_its_update(step, expected, monkeypatch):
    """In one piece inductor would mix micro-batches, and keep all activations until the update."""
    parts = []
    monkeypatch.setattr(torch, "compile", lambda part, **_: parts.append(part.__self__) or part)
    weights, x = torch.ones(3), torch.arange(3.0)
    traced = torch.fx.experimental.proxy_tensor.make_fx(step)(weights.clone(), x)
    result = step(weights.clone(), x)
    assert compiled(traced)(weights, x) == result
    names = ("sin", "cos", "pow", "sub_") if step is in_micro_batches else ("sin", "sub_")
    found = [[name for name in names if f"aten.{name}." in str(part.graph)] for part in parts]
    assert found == expected


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


@pytest.mark.nightly  # it imports torch's compiler
def test_ctrl_c_while_torch_compiles_is_no_other_error(monkeypatch):
    def interrupted(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", interrupted)
    monkeypatch.setattr("torch._dynamo.config.disable", False)  # TORCH_COMPILE_DISABLE
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x.sin().sum())(torch.ones(3))
    with pytest.raises(KeyboardInterrupt):
        compiled(traced)(torch.ones(3))
