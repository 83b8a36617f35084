"""Steps traced to plain operations and repeated by a recorder come to what calling them comes to."""

import dataclasses

import pytest
import torch

from mup_tpu.config import Trial
from mup_tpu.devices import get_device
from mup_tpu.devices.graphs import GraphSteps, Recorder
from mup_tpu.training.pack import Pack

STEPS = 4


class Refusing(Recorder):
    """Cannot record."""

    def record(self, act):
        raise RuntimeError("operation not permitted when stream is capturing")


class Counting(Recorder):
    """Counts what is recorded, and recordings that are repeated."""

    def __init__(self):
        self.warm_ups = self.recorded = self.repeated = 0

    def warm_up(self, act):
        self.warm_ups += 1
        act()

    def record(self, act):
        self.recorded += 1

        def repeat():
            self.repeated += 1
            act()

        return repeat


def with_graphs(device, recorder):
    """The CPU, its steps as CUDA has them."""
    kind = type("Graphs", (type(device),), {"repeated": lambda self, step: GraphSteps(step, recorder)})
    return kind(**{f.name: getattr(device, f.name) for f in dataclasses.fields(device)})


def train(execution, recorder=None, micro_batches=1, forms=(), depth=1, **fields):
    """Losses_SK of two stretches of steps, and the losses_K of an evaluation."""
    base = Trial().replace(
        width=32, base_width=16, head_size=16, depth=depth, batch_size=4, sequence_length=16,
        precision="float64", **fields,
    )  # fmt: skip
    trials = [
        base.replace(learning_rate=2.0 ** (i - 9), parametrization=name, seed=i)
        for i, name in enumerate(("mup", "sp"))
    ]
    device = get_device("cpu").arrange(len(trials), 4)
    device = device if recorder is None else with_graphs(device, recorder)
    pack = Pack(trials, 64, device, execution, micro_batches=micro_batches, forms=dict(forms))
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(2):
        tokens_SBT1 = torch.randint(0, 64, (STEPS, 4, 17), generator=generator)
        losses.append(pack.read(pack.train(tokens_SBT1, STEPS)))
    held_out = torch.randint(0, 64, (3, 4, 17), generator=generator)
    return torch.cat(losses), pack.read(pack.evaluate(held_out))


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
    traced, traced_held_out = train("vmap", Counting(), micro_batches, {"attention": "folded"}, **fields)
    # Muon's products are in bfloat16, and those of a stack are summed in another order.
    tolerance = 2e-2 if optimizer == "muon" else 1e-9
    torch.testing.assert_close(traced, losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(traced_held_out, held_out, rtol=tolerance, atol=tolerance)


def test_a_step_is_recorded_once_and_repeated_from_then_on():
    counting = Counting()
    train("vmap", counting)
    assert (counting.warm_ups, counting.recorded) == (4, 2), "training and evaluation, two warm-ups each"
    assert counting.repeated == 2 * STEPS - 2 + 3 - 2


def test_where_recording_fails_steps_are_called_and_the_log_says_why(caplog):
    expected, _ = train("vmap")
    losses, _ = train("vmap", Refusing())
    assert torch.equal(losses, expected)
    assert "not permitted when stream is capturing" in caplog.text


def test_a_stack_of_other_members_is_recorded_anew():
    counting = Counting()
    trials = [
        Trial().replace(width=32, head_size=16, depth=1, batch_size=4, sequence_length=16, seed=s)
        for s in range(4)
    ]
    pack = Pack(trials, 64, with_graphs(get_device("cpu").arrange(4, 4), counting), "vmap")
    tokens_SBT1 = torch.randint(0, 64, (4, 4, 17))
    pack.train(tokens_SBT1, 4)
    pack.end(0, 1)
    assert pack.train(tokens_SBT1, 4).shape == (4, 2)
    assert counting.recorded == 2
