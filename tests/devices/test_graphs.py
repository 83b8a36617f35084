"""Steps traced to plain operations and repeated by a recorder come to what calling them comes to."""

import os

import pytest
import torch
from graphs_on_cpu import GraphsOnCpu, StrictRecorder

from mup_tpu.config import Trial
from mup_tpu.devices import get_device
from mup_tpu.devices.base import one_by_one
from mup_tpu.devices.cuda import CudaDevice
from mup_tpu.devices.graphs import compiled
from mup_tpu.optimizers import UPDATE_RULES
from mup_tpu.training.pack import Pack

STEPS = 4


class Refusing(StrictRecorder):
    """Cannot record."""

    def record(self, act):
        raise RuntimeError("operation not permitted when stream is capturing")


class Eager(CudaDevice):
    """A GPU without graphs."""

    def repeated(self, step):
        return one_by_one(step)


def train(execution, recorder=None, micro_batches=1, forms=(), rules=("mup", "sp"), device=None, **fields):
    """Losses_SK of two stretches of steps, and the losses_K of an evaluation."""
    shape = {
        "width": 32,
        "base_width": 16,
        "head_size": 16,
        "depth": 1,
        "batch_size": 4,
        "sequence_length": 16,
    }
    base = Trial().replace(**shape | {"precision": "float64"} | fields)
    trials = [
        base.replace(learning_rate=2.0 ** (i - 9), parametrization=name, seed=i)
        for i, name in enumerate(rules)
    ]
    device = device or (GraphsOnCpu(recorder=recorder) if recorder else get_device("cpu"))
    pack = Pack(trials, 64, device, execution, micro_batches=micro_batches, forms=dict(forms))
    generator = torch.Generator().manual_seed(0)

    def drawn(count):
        tokens_SBT1 = torch.randint(0, 64, (count, 4, 17), generator=generator)
        return device.place_stack(tokens_SBT1, "data", count)

    losses = [pack.read(pack.train(drawn(STEPS), STEPS)) for _ in range(2)]
    return torch.cat(losses), pack.read(pack.evaluate(drawn(3)))


@pytest.mark.parametrize(
    ("architecture", "optimizer", "micro_batches"),
    [
        ("gpt2", "muon", 2),
        ("llama", "sgd", 1),
        pytest.param("gpt2", "adamw", 1, marks=pytest.mark.nightly),
        pytest.param("llama", "adamw", 2, marks=pytest.mark.nightly),
    ],
)
def test_traced_steps_equal_members_in_turns(architecture, optimizer, micro_batches):
    fields = {"architecture": architecture, "optimizer": optimizer, "depth": 3 - micro_batches}
    losses, held_out = train("loop", micro_batches=micro_batches, **fields)
    traced, traced_held_out = train(
        "vmap", StrictRecorder(), micro_batches, {"attention": "folded"}, **fields
    )
    # Muon's products are in bfloat16, and those of a stack are summed in another order.
    tolerance = 2e-2 if optimizer == "muon" else 1e-9
    torch.testing.assert_close(traced, losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(traced_held_out, held_out, rtol=tolerance, atol=tolerance)


PRECISIONS = ("float32", "bf16")


@pytest.mark.parametrize(
    ("optimizer", "architecture", "precision"),
    [
        pytest.param(
            rule, architecture, PRECISIONS[(i + j) % 2], marks=pytest.mark.nightly if (i + j) % 3 else ()
        )
        for i, rule in enumerate(UPDATE_RULES)
        for j, architecture in enumerate(("gpt2", "llama", "moe"))
    ],
)
def test_steps_of_every_update_rule_and_architecture_can_be_recorded(
    optimizer, architecture, precision, caplog
):
    """A lone trial in bf16, two in float32; attention as a GPU has it. `--device cuda` has real graphs."""
    fields = {"optimizer": optimizer, "architecture": architecture, "precision": precision}
    fields |= {"forms": {"attention": "folded"}, "rules": ("mup",) if precision == "bf16" else ("mup", "sp")}
    recorder, tolerance = StrictRecorder(), 0.0
    graphs, eager = GraphsOnCpu(recorder=recorder), get_device("cpu")
    if on_gpu := os.environ.get("MUP_TPU_TEST_DEVICE") == "cuda":
        graphs, tolerance = get_device("cuda"), 1e-3
        eager = Eager(graphs.name, graphs.torch_device)
    found, wanted = (train("vmap", device=device, **fields) for device in (graphs, eager))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert "one by one" not in caplog.text
    assert on_gpu or (recorder.recorded, recorder.repeated) == (2, 2 * STEPS - 2 + 3 - 2)


def test_a_step_is_recorded_once_and_repeated_from_then_on():
    recorder = StrictRecorder()
    train("vmap", recorder)
    assert (recorder.warm_ups, recorder.recorded) == (4, 2), "training and evaluation, two warm-ups each"
    assert recorder.repeated == 2 * STEPS - 2 + 3 - 2


def test_where_recording_fails_steps_are_called_and_the_log_says_why(caplog):
    expected, _ = train("vmap")
    losses, _ = train("vmap", Refusing())
    assert torch.equal(losses, expected)
    assert "not permitted when stream is capturing" in caplog.text


def test_a_stack_of_other_members_is_recorded_anew():
    recorder = StrictRecorder()
    trials = [
        Trial().replace(width=32, head_size=16, depth=1, batch_size=4, sequence_length=16, seed=s)
        for s in range(4)
    ]
    pack = Pack(trials, 64, GraphsOnCpu(recorder=recorder), "vmap")
    tokens_SBT1 = torch.randint(0, 64, (4, 4, 17))
    pack.train(tokens_SBT1, 4)
    pack.end(0, 1)
    assert pack.train(tokens_SBT1, 4).shape == (4, 2)
    assert recorder.recorded == 2


@pytest.mark.parametrize(
    "step",
    [
        lambda changed, fixed, item: changed[0].add_(item[0].sum().item()),
        lambda changed, fixed, item: changed[0].add_(torch.tensor(2.0)),
        lambda changed, fixed, item: changed[0].add_(torch.ones(3)),
        lambda changed, fixed, item: changed[0].add_(item[0][item[0] > 0].sum()),
        lambda changed, fixed, item: changed[0].add_(float(bool(item[0].any()))),
    ],
    ids=["item", "a number of the host", "a tensor of the host", "a shape by values", "a branch by values"],
)
def test_the_strict_recorder_refuses_what_cuda_does_not_capture(step):
    steps = GraphsOnCpu().repeated(step)
    with pytest.raises((AssertionError, RuntimeError)):  # Refused, or not traced
        steps((torch.zeros(3),), (), (torch.ones(4, 3),), 4)


def test_a_step_is_compiled_as_its_gradients_and_its_update(monkeypatch):
    """By a compiler that says what it is given: in one piece, inductor would keep all activations."""
    given, changes = [], []

    class Compiled(torch.nn.Module):
        def __init__(self, part, **_):
            super().__init__()
            given.append(part)
            self._part = part

        def forward(self, *tensors):
            before = [x._version for x in tensors]
            out = self._part(*tensors)
            changes.append([x._version for x in tensors] != before)
            return out

    monkeypatch.setattr(torch, "compile", Compiled)
    monkeypatch.setattr("graphs_on_cpu.without_constants", compiled)
    losses, held_out = train("vmap", StrictRecorder(), depth=2)
    monkeypatch.undo()
    expected, expected_held_out = train("vmap", StrictRecorder(), depth=2)
    assert torch.equal(losses, expected)
    assert torch.equal(held_out, expected_held_out)
    names = [[node.target.__name__ for node in part.graph.nodes if callable(node.target)] for part in given]
    assert [any("backward" in name for name in part) for part in names] == [True, False]
    assert changes[:2] == [False, True]


@pytest.mark.nightly
def test_where_torchs_compiler_fails_the_traced_step_is_called(caplog, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/nowhere/g++",))
    monkeypatch.setattr("torch._inductor.config.fx_graph_cache", False)
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x.sin().sum())(torch.ones(3))
    call = compiled(traced)
    for _ in range(2):
        assert call(torch.ones(3)) == torch.ones(3).sin().sum()
    assert caplog.text.count("torch's compiler failed") == 1


def test_ctrl_c_while_torch_compiles_is_no_other_error(monkeypatch):
    def interrupted(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", interrupted)
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x.sin().sum())(torch.ones(3))
    with pytest.raises(KeyboardInterrupt):
        compiled(traced)(torch.ones(3))
