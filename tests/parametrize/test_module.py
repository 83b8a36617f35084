"""What happens to a module after it is parametrized: copies, casts, state dicts, compilation, sharding."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from mup_tpu.errors import ConfigError
from mup_tpu.jobs.this_machine import start_process
from mup_tpu.parametrize import lint, parametrize

WIDTH, BASE = 64, 16


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(3, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


X = torch.linspace(-1, 1, 12).reshape(4, 3)
RATES = [(1.0, 0.1, 2), (1.0, 0.0, 6), (0.25, pytest.approx(0.4), 2)]


def scaled(width=WIDTH):
    return parametrize(Net, width=width, base_width=BASE)


def fresh(width=WIDTH) -> Net:
    torch.manual_seed(0)
    return scaled(width).init_(Net(width))


def rates(module: nn.Module) -> list[tuple[float, float, int]]:
    """(learning rate, weight decay, number of parameters) of each group."""
    groups = scaled().param_groups(module, lr=1.0, weight_decay=0.1)
    return [(g["lr"], g["weight_decay"], len(g["params"])) for g in groups]


def test_copies_pickles_and_casts_compute_with_the_factors():
    module, y = fresh(), fresh()(X)
    for other in (
        copy.deepcopy(module),
        copy.deepcopy(module).to("cpu", torch.float64).float(),
        pickle.loads(pickle.dumps(module)),
    ):
        torch.testing.assert_close(other(X), y)
        assert rates(other) == RATES
    plain = Net(WIDTH)
    plain.load_state_dict(module.state_dict())
    assert not torch.allclose(plain(X), y)


def test_the_state_dict_is_that_of_the_module_as_built():
    module = fresh()
    assert module.state_dict().keys() == Net(WIDTH).state_dict().keys()
    other = scaled().forward_(Net(WIDTH))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(X), module(X))
    assert torch.equal(scaled().forward_(other)(X), module(X)), "factors twice are those once"


def test_the_logits_factor_goes_before_the_readouts_bias():
    module = fresh()
    features: list[torch.Tensor] = []
    module.head.register_forward_pre_hook(lambda head, inputs: features.append(inputs[0]), prepend=True)
    torch.testing.assert_close(module(X), features[0] @ module.head.weight.T / 4 + module.head.bias)


def test_a_module_that_got_memory_later_is_drawn_at_the_rules_size():
    with torch.device("meta"):
        module = Net(1024)
    wide = parametrize(Net, width=1024, base_width=256)
    torch.manual_seed(0)
    wide.init_(module.to_empty(device="cpu"), std=0.1)
    assert module.up.weight.std().item() == pytest.approx(0.1 / 2, rel=0.01)
    assert module.head.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert not module.up.bias.any()
    assert torch.equal(module.norm.weight, torch.ones(1024))
    assert module.head._forward_pre_hooks


def test_a_second_init_is_refused():
    mup, module = scaled(), Net(WIDTH)
    mup.init_(module)
    with pytest.raises(ConfigError, match="would scale them twice"):
        mup.init_(module)


def test_schedules_of_torch_keep_the_factors():
    optimizer = torch.optim.AdamW(scaled().param_groups(fresh(), lr=1.0))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.5 * g["lr_factor"] for g in optimizer.param_groups]


def test_groups_of_a_module_without_init_and_forward_factors_are_refused():
    """Learning rates alone are half of a rule: logits then grow as the root of the width."""
    mup = scaled()
    with pytest.raises(ConfigError, match="lacks the init and the forward factors of rule 'mup'"):
        mup.param_groups(Net(WIDTH), lr=1.0)
    with pytest.raises(ConfigError, match="before param_groups; a baked one does not train"):
        mup.param_groups(mup.bake_(fresh()), lr=1.0)
    other = parametrize(Net, width=WIDTH, base_width=BASE, rule="sp").init_(Net(WIDTH))
    with pytest.raises(ConfigError, match="by rule 'sp' for width 64, and these groups are for rule 'mup'"):
        mup.param_groups(other, lr=1.0)
    assert mup.param_groups(mup.forward_(Net(WIDTH)), lr=1.0)


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.middle = nn.Linear(3, width), nn.Linear(width, width)
        self.experts = nn.Parameter(torch.randn(4, width, width) / width**0.5)
        self.head = nn.Linear(width, 2)


def test_groups_of_muon_are_torchs_for_matrices_and_adamws_for_the_rest():
    """Matrices at η, or η/√m by rms; stacked experts, which torch's Muon refuses, by AdamW at η/m."""
    for optimizer, rate in (("muon", 1.0), ("muon_match_rms_adamw", 0.5)):
        mup = parametrize(Experts, width=WIDTH, base_width=BASE, optimizer=optimizer)
        module = mup.init_(Experts(WIDTH))
        names = {id(p): name for name, p in module.named_parameters()}
        groups = mup.param_groups(module, lr=0.1, adamw_lr=0.01, weight_decay=0.1)
        of = {names[id(p)]: (g["use_muon"], g["lr"]) for g in groups for p in g["params"]}
        assert of.pop("middle.weight") == (True, pytest.approx(0.1 * rate))
        assert of.pop("experts") == (False, pytest.approx(0.01 / 4))
        assert set(of.values()) == {(False, 0.01)}
        torch.optim.Muon([g for g in groups if g["use_muon"]])
        torch.optim.AdamW([g for g in groups if not g["use_muon"]])
    lion = parametrize(Net, width=WIDTH, base_width=BASE, optimizer="lion")
    groups = lion.param_groups(lion.init_(Net(WIDTH)), lr=1.0)
    assert {g["lr"] for g in groups} == {1.0, 0.25} and not any("eps" in g for g in groups)


def loss_of(module, x):
    return module(x).square().mean() + module(x)[:, 0].mean()


def losses(module: nn.Module) -> list[float]:
    """Losses of a few steps, by groups that are made of the module as it is now."""
    optimizer = torch.optim.AdamW(scaled().param_groups(module, lr=0.05, weight_decay=0.1))
    values = []
    for _ in range(4):
        loss = loss_of(module, X)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def fsdp(module: Net, **options: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    return FSDP(module, device_id=torch.device("cpu"), **options)


def sharded(module: Net) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    fully_shard(module.up, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def split(module: Net) -> nn.Module:
    """Tensor parallelism: columns of the first matrix, rows of the second."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(module, init_device_mesh("cpu", (2,)), plan)


WRAPPERS = {
    "fsdp": lambda module: fsdp(module, use_orig_params=True),
    "fully_shard": sharded,
    "ddp": DDP,
    "tensor parallel": split,
}


def checked(wrap):
    """Exponents of the effects of a check of wrapped modules, by parameter, and whether it passes."""

    def build(width):
        module = wrap(fresh(width))
        return module, torch.optim.AdamW(scaled(width).param_groups(module, lr=2**-6))

    report = lint(build, X, loss_of, widths=(16, 32, 64), seeds=1, steps=2)
    return report.table()["effect"].to_dict(), report.passes


def train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results = {name: (rates(wrap(fresh())), losses(wrap(fresh()))) for name, wrap in WRAPPERS.items()}
    checks = {name: checked(WRAPPERS[name]) for name in ("fully_shard", "ddp", "tensor parallel")}
    try:
        rates(fsdp(fresh()))
    except ConfigError as error:
        refusal = str(error)
    if rank == 0:
        with open(f"{folder}/results", "wb") as file:
            pickle.dump((results, checks, refusal), file)
    dist.destroy_process_group()


def test_over_two_processes_factors_losses_and_the_check_are_those_of_one(tmp_path):
    processes = [start_process(train, (rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    results, checks, refusal = pickle.loads((tmp_path / "results").read_bytes())
    expected = losses(fresh())
    for name, (groups, values) in results.items():
        assert groups == RATES, name
        assert values == pytest.approx(expected, rel=1e-5), name
    effects, passes = checked(lambda module: module)
    assert passes
    for name, (of_wrapped, is_right) in checks.items():
        assert is_right, name
        assert [*of_wrapped.values()] == pytest.approx([*effects.values()], abs=0.02), name
    assert "use_orig_params=True" in refusal


def compiled(module: Net) -> nn.Module:
    return torch.compile(module, backend="aot_eager", fullgraph=True)


def prepared(module: nn.Module) -> nn.Module:
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(module)


@pytest.mark.parametrize("wrap", [compiled, prepared])
def test_compiled_or_prepared_by_accelerate_it_is_checked_as_it_was(wrap):
    assert rates(wrap(fresh())) == RATES
    assert losses(wrap(fresh())) == pytest.approx(losses(fresh()), rel=1e-5)
    effects, passes = checked(lambda module: module)
    of_wrapped, is_right = checked(wrap)
    assert passes and is_right and of_wrapped == pytest.approx(effects, abs=0.02)


def test_the_check_steps_an_optimizer_of_accelerate():
    accelerate = pytest.importorskip("accelerate")

    def build(width):
        module = fresh(width)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        return accelerate.Accelerator(cpu=True).prepare(module, optimizer)

    report = lint(build, X, loss_of, widths=(16, 32, 64), seeds=1, steps=2)
    assert "SGD's learning rate not scaled" in report.causes, report
