"""Factors and the check of modules that are sharded, split, compiled or prepared by accelerate."""

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
