"""A pack's members against each other, and against NaN; test_networks.py has them against stock classes."""

import os
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from mup_tpu.config import Trial
from mup_tpu.devices import Device, get_device
from mup_tpu.errors import ConfigError
from mup_tpu.models import declare
from mup_tpu.optimizers import UPDATE_RULES
from mup_tpu.rules.parametrization import PARAMETRIZATIONS, ForwardScaling, Parametrization
from mup_tpu.training import schedule_factor
from mup_tpu.training.pack import Pack, compilation_pays, plain_step_s

VOCAB = 48
DEVICE = get_device(os.environ.get("MUP_TPU_TEST_DEVICE", "cpu"))
"""Where packs train: `pytest --device cuda` sets it."""
IN_TURNS = get_device("cpu") if DEVICE.torch_device.type == "tpu" else DEVICE
"""Where members take turns, which TPUs' do not."""

TINY = Trial().replace(
    width=32, base_width=32, head_size=16, depth=1, sequence_length=24, batch_size=4, steps=6, warmup=0.2,
    init_std=0.05,
)  # fmt: skip
OWN = {"adamw": {}, "sgd": {"momentum": 0.9}, "muon": {}, "adamh": {}, "muonh": {}}
"""Hyperparameters that an update rule alone reads."""


def batches(trial: Trial, count: int = 6, device: Device = DEVICE) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (trial.data.batch_size, trial.data.sequence_length + 1)
    drawn = (torch.randint(0, VOCAB, shape, generator=generator) for _ in range(count))
    return [tokens_BT1.to(device.torch_device) for tokens_BT1 in drawn]


def train(
    trials: list[Trial], execution: str = "loop", count: int = 6, micro_batches: int = 1
) -> tuple[Pack, torch.Tensor]:
    device = IN_TURNS if execution == "loop" else DEVICE
    pack = Pack(trials, VOCAB, device, execution, micro_batches=micro_batches)
    return pack, torch.stack([pack.read(pack.step(batch)) for batch in batches(trials[0], count, device)])


@pytest.mark.parametrize("optimizer", UPDATE_RULES)
def test_loop_and_vmap_give_the_same_numbers(optimizer):
    decay_mode = "independent" if optimizer in ("sgd", "muonh") else "coupled"
    base = TINY.replace(
        width=64, precision="float64", optimizer=optimizer, **OWN.get(optimizer, {}), decay_mode=decay_mode,
    )  # fmt: skip
    names = (
        "learning_rate", "parametrization", "seed", "schedule", "weight_decay", "grad_clip",
        "final_lr_fraction",
    )  # fmt: skip
    trials = [
        base.replace(**dict(zip(names, values, strict=True)))
        for values in (
            (0.01, "mup", 0, "cosine", 0.0, 1.0, 0.1),
            (0.02, "sp", 1, "linear", 0.02, 0.0, 0.0),
            (0.005, "mup", 2, "constant", 0.01, 0.1, 0.1),
        )
    ]
    loop, loop_losses = train(trials, "loop")
    stacked, stacked_losses = train(trials, "vmap")
    torch.testing.assert_close(loop_losses, stacked_losses, rtol=1e-10, atol=1e-10)
    for name, tensor in loop.tensors().items():
        torch.testing.assert_close(tensor, stacked.tensors()[name], rtol=1e-8, atol=1e-8)
    means = [pack.read(pack.evaluate(torch.stack(batches(base, 2, pack.device)))) for pack in (loop, stacked)]
    torch.testing.assert_close(*means, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("execution", "optimizer", "micro_batches"),
    [("loop", "adamw", 3), ("loop", "muon", 2), ("vmap", "adamw", 4), ("vmap", "muon", 3)],
)
def test_micro_batches_train_as_the_batch_does_whole(execution, optimizer, micro_batches):
    """Two members whose gradients are clipped at every step and at none; 3 of 4 sequences are 2, 1 and 1."""
    base = TINY.replace(precision="float64", optimizer=optimizer, weight_decay=0.1, **OWN.get(optimizer, {}))
    trials = [
        base.replace(learning_rate=lr, grad_clip=c, seed=s) for lr, c, s in ((0.01, 0.1, 0), (0.02, 0, 1))
    ]
    whole, expected = train(trials, execution, 4)
    split, losses = train(trials, execution, 4, micro_batches)
    torch.testing.assert_close(losses, expected, rtol=1e-11, atol=1e-11)
    for name, p in whole.parameters.items():
        torch.testing.assert_close(split.parameters[name], p, rtol=1e-8, atol=1e-8)
    held_out = torch.stack(batches(base, 2))
    torch.testing.assert_close(split.evaluate(held_out), whole.evaluate(held_out), rtol=1e-9, atol=1e-9)
    shorter = held_out[:1, :1]  # of fewer sequences than parts, as a short held-out text is
    torch.testing.assert_close(split.evaluate(shorter), whole.evaluate(shorter), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_no_more_than_a_micro_batch_goes_through_the_network_at_once(execution):
    pack = Pack([TINY], VOCAB, DEVICE, execution, micro_batches=2)
    seen = []
    pack.network.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[0]))
    pack.step(batches(TINY)[0])
    pack.evaluate(torch.stack(batches(TINY, 1)))
    assert seen == [2, 2, 2, 2]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_member_result_does_not_depend_on_its_pack(optimizer):
    """Stacked; test_trials.py has members in turns, bit for bit. Stacked products may sum in another order,
    which Adam amplifies in float32: float64 gives a bound."""
    base = TINY.replace(precision="float64", optimizer=optimizer)
    trials = [base.replace(learning_rate=lr, seed=s) for lr, s in ((0.01, 0), (0.001, 1), (0.03, 2))]
    together, _ = train(trials, "vmap")
    alone, _ = train(trials[1:2], "vmap")
    for name, p in alone.member_parameters(0).items():
        torch.testing.assert_close(p, together.member_parameters(1)[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("execution", "optimizer"), [("loop", "adamw"), *(("vmap", rule) for rule in UPDATE_RULES)]
)
def test_nan_in_one_member_leaves_the_others_bit_identical(execution, optimizer):
    trials = [TINY.replace(learning_rate=lr, optimizer=optimizer) for lr in (0.01, 0.002, 0.03)]
    clean, poisoned = (Pack(trials, VOCAB, DEVICE, execution) for _ in range(2))
    for p in poisoned.parameters.values():
        p[1].fill_(float("nan"))
    for batch in batches(TINY, 3):
        clean.step(batch)
        losses = poisoned.step(batch)
    assert losses.isnan().tolist() == [False, True, False]
    for member in (0, 2):
        for name, p in clean.member_parameters(member).items():
            assert torch.equal(p, poisoned.member_parameters(member)[name]), name


@pytest.mark.parametrize(
    ("execution", "optimizer", "decay_mode"),
    [("loop", "adamw", "coupled"), ("vmap", "sgd", "coupled"), ("vmap", "muon", "independent")],
)
def test_mup_and_sp_are_bit_identical_at_the_base_width(execution, optimizer, decay_mode):
    trial = TINY.replace(optimizer=optimizer, weight_decay=0.1, decay_mode=decay_mode)
    mup, sp = (train([trial.replace(parametrization=rule)], execution)[0] for rule in ("mup", "sp"))
    for name, p in mup.parameters.items():
        assert torch.equal(p, sp.parameters[name]), name


@pytest.mark.parametrize(
    ("execution", "later", "optimizer"),
    [
        ("loop", "loop", "adamw"),
        ("loop", "loop", "muon"),
        *(("vmap", "vmap", rule) for rule in UPDATE_RULES),
        ("loop", "vmap", "adamw"),
    ],
)
def test_resumed_pack_goes_on_bit_identically(execution, later, optimizer):
    """In the other execution, to sums in another order."""
    rates = (0.1, 0.2) if optimizer == "sgd" else (0.01, 0.02)
    base = TINY.replace(optimizer=optimizer, **OWN.get(optimizer, {}))
    if later != execution:
        base = base.replace(precision="float64")
    trials = [base.replace(learning_rate=lr) for lr in rates]
    whole, _ = train(trials, execution)
    first, _ = train(trials, execution, 3)
    resumed = Pack(trials, VOCAB, IN_TURNS if later == "loop" else DEVICE, later)
    resumed.load_tensors({name: t.clone() for name, t in first.tensors().items()}, first.members, 3)
    for batch in batches(TINY)[3:]:
        resumed.step(batch)
    tolerance = 0.0 if later == execution else 1e-8
    tensors = resumed.tensors()
    for name, tensor in whole.tensors().items():
        torch.testing.assert_close(tensor, tensors[name], rtol=tolerance, atol=tolerance)


def test_ended_member_trains_no_further():
    pack, _ = train([TINY, TINY.replace(seed=1), TINY.replace(seed=2)], "loop", 3)
    pack.end(0)
    frozen = {name: p.clone() for name, p in pack.member_parameters(0).items()}
    losses = pack.step(batches(TINY, device=IN_TURNS)[3])
    assert losses.isnan().tolist() == [True, False, False]
    assert all(torch.equal(p, frozen[name]) for name, p in pack.member_parameters(0).items())


@pytest.mark.parametrize(("execution", "optimizer"), [("loop", "muon"), ("vmap", "adamw")])
def test_members_that_ended_leave_the_stack_at_half_and_the_rest_go_on_as_if_alone(execution, optimizer):
    """Five members: nothing moves until two are left, then one."""
    base = TINY.replace(steps=8, precision="float64", weight_decay=0.01, optimizer=optimizer)
    trials = [base.replace(learning_rate=lr, seed=k) for k, lr in enumerate((0.01, 0.02, 0.005, 0.03, 0.001))]
    pack = Pack(trials, VOCAB, DEVICE, execution)
    whole, expected_SK = train(trials, execution, 8)
    losses, sizes = [], []
    for step, batch in enumerate(batches(base, 8)):
        if step == 2:
            pack.end(0, 3)
        elif step == 4:
            pack.end(4)
        elif step == 6:
            pack.end(1)
        losses.append(pack.read(pack.step(batch)))
        sizes.append(len(pack.parameters["transformer.wte.weight"]))
    assert sizes == [5] * 4 + [2] * 2 + [1] * 2
    losses_SK = torch.stack(losses)
    torch.testing.assert_close(losses_SK[:, 2], expected_SK[:, 2], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(losses_SK[:6, 1], expected_SK[:6, 1], rtol=1e-9, atol=1e-9)
    assert losses_SK[4:, [0, 3, 4]].isnan().all()
    for name, p in whole.member_parameters(2).items():
        torch.testing.assert_close(p, pack.member_parameters(2)[name], rtol=1e-8, atol=1e-8)

    held_out = torch.stack(batches(base, 2))
    mean_K = pack.read(pack.evaluate(held_out))
    assert mean_K.isnan().tolist() == [True, True, False, True, True]
    resumed = Pack(trials, VOCAB, DEVICE, execution)
    resumed.load_tensors(pack.tensors(), pack.members, pack.steps_done)
    assert torch.equal(resumed.read(resumed.evaluate(held_out))[2], mean_K[2])


def test_trials_of_different_shape_are_refused():
    with pytest.raises(ConfigError, match="must share shape"):
        Pack([TINY, TINY.replace(width=64)], VOCAB, DEVICE)


class Dtypes(TorchDispatchMode):
    """Dtypes of the floating tensors that each operation is given."""

    supports_higher_order_operators = True  # TorchTPU's loop; its step was seen when it was traced

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given, _ = tree_flatten((args, kwargs))
        floating = {t.dtype for t in given if isinstance(t, torch.Tensor) and t.is_floating_point()}
        if isinstance(operation, torch._ops.OpOverload):
            self.seen.setdefault(operation.overloadpacket.__name__, set()).update(floating)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("execution", "architecture"), [("loop", "gpt2"), ("vmap", "gpt2"), ("vmap", "llama")]
)
def test_bf16_multiplies_matrices_in_bf16_and_leaves_the_rest_in_float32(execution, architecture):
    trial = TINY.replace(precision="bf16", weight_decay=0.1, architecture=architecture)
    pack = Pack([trial] * 2, VOCAB, DEVICE, execution)
    with Dtypes() as dtypes:
        losses_K = pack.step(batches(TINY)[0])
    assert set().union(*(dtypes.seen.get(name, set()) for name in ("mm", "addmm", "bmm"))) == {torch.bfloat16}
    update = ("_fused_adamw_",) if execution == "loop" else ("lerp_", "addcmul_", "sqrt")
    is_fused = execution == "loop" or DEVICE.torch_device.type == "cuda"  # softmax is in fused attention
    softmaxes = () if is_fused else ("_softmax",)
    for name in ("_log_softmax", *softmaxes, *update):
        assert dtypes.seen[name] == {torch.float32}, name
    assert losses_K.dtype == torch.float32
    assert {t.dtype for t in pack.tensors().values()} == {torch.float32}


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_members_in_turns_cast_a_weight_to_bf16_once_a_step(micro_batches):
    pack = Pack([TINY.replace(precision="bf16")], VOCAB, IN_TURNS, "loop", micro_batches=micro_batches)
    shape = pack.parameters["transformer.h.0.mlp.c_fc.weight"].shape[1:]
    casts = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if kwargs.get("dtype") == torch.bfloat16 and args[0].shape == shape:
                casts.append(operation)
            return operation(*args, **kwargs)

    tokens_NBT1 = torch.stack(batches(TINY, 3, IN_TURNS))
    for act in (lambda: pack.step(tokens_NBT1[0]), lambda: pack.evaluate(tokens_NBT1)):
        casts.clear()
        with Casts():
            act()
        assert len(casts) == TINY.model.depth


def test_independent_decay_shrinks_by_schedule_times_lambda_whatever_the_learning_rate():
    """Closed form: with no gradient signal (ε huge: no Adam step) a weight shrinks by 1 - s_t·λ a step."""
    base = TINY.replace(
        width=64, eps=1e30, weight_decay=0.01, decay_mode="independent", schedule="linear",
        precision="float64",
    )  # fmt: skip
    trials = [base.replace(learning_rate=lr) for lr in (0.5, 0.001)]
    expected = 1.0
    for step in range(6):
        expected *= 1 - 0.01 * schedule_factor(base.train, step)
    for execution in ("loop", "vmap"):
        start = Pack(trials, VOCAB, IN_TURNS if execution == "loop" else DEVICE, execution)
        end, _ = train(trials, execution)
        for name in ("transformer.h.0.attn.c_attn.weight", "transformer.wte.weight"):
            ratio = end.parameters[name] / start.parameters[name]
            torch.testing.assert_close(ratio, torch.full_like(ratio, expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_members_may_differ_in_the_residual_factor(execution, monkeypatch):
    """One whose branches count half beside one in SP, whose factor is 1: each trains as it does alone."""
    half = Parametrization(
        "a rule of this test", PARAMETRIZATIONS["sp"].parameters,
        forward=lambda growth: ForwardScaling(residual=1 / growth.depth),
    )  # fmt: skip
    monkeypatch.setitem(PARAMETRIZATIONS, "half", half)  # type: ignore[arg-type]
    plain = TINY.replace(parametrization="sp", depth=2, base_depth=1)
    halved = plain.replace(parametrization="half")
    pack, together = train([plain, halved], execution)
    assert pack.buffers["residual_factor"].tolist() == [1.0, 0.5]
    tolerance = {"rtol": 0.0, "atol": 0.0} if execution == "loop" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(together[:, :1], train([plain], execution)[1], **tolerance)
    torch.testing.assert_close(together[:, 1:], train([halved], execution)[1], **tolerance)
    assert (together[1:, 0] - together[1:, 1]).abs().min() > 1e-4, "the factor does something"


TABLE = Path(__file__).parents[2] / "benchmarks" / "gpu_peers.csv"
BYTES, BATCH, LENGTH = 256, 16, 512


def declared(width):
    trial = Trial().replace(width=width, head_size=64, depth=2, batch_size=BATCH, sequence_length=LENGTH)
    return declare(trial.model, BYTES, LENGTH)


def test_seconds_of_a_step_are_those_of_an_h100():
    table = pd.read_csv(TABLE)
    graphs = table[table["peer"] == "graph"]
    assert len(graphs) >= 4
    for row in graphs.itertuples():
        tokens = row.members * BATCH * LENGTH
        found = plain_step_s(declared(row.width), BYTES, tokens)
        assert found == pytest.approx(tokens / row.tokens_per_s, rel=0.15)


def test_eight_trials_of_width_64_are_compiled_for_more_than_17_000_steps():
    """Of an H100's 4.6 ms a step."""
    tokens = 8 * BATCH * LENGTH
    worth = [compilation_pays(declared(64), BYTES, tokens, steps) for steps in (17_000, 18_000)]
    assert worth == [False, True]
