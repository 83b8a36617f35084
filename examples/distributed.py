"""μP under DDP, or under FSDP's `fully_shard`, on two processes of the CPU (gloo).

python examples/distributed.py [--shard]
"""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mup_tpu.parametrize import parametrize

WIDTH, BASE, WORLD = 256, 64, 2


def build(width: int) -> nn.Module:
    """A network of any width."""
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


def train(rank: int, shard: bool, steps: int = 20) -> float:
    """Train as one of the processes; mean squared error on the first batch in the end."""
    torch.manual_seed(0)  # one init on all ranks
    mup = parametrize(build, width=WIDTH, base_width=BASE)
    model = mup.init_(build(WIDTH))  # first the init, then the wrapper, then the groups
    if shard:
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (WORLD,)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(mup.param_groups(model, lr=2**-7))
    inputs = torch.randn(steps, 64, 8, generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        own = inputs[step].chunk(WORLD)[rank]
        loss = (model(own) - own.sum(1, keepdim=True).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return (model(inputs[0]) - inputs[0].sum(1, keepdim=True).sin()).square().mean().item()


def both(rank: int, rendezvous: str) -> None:
    """One of the processes."""
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD)
    errors = [train(rank, shard) for shard in (False, True)]
    if rank == 0:
        print(*errors)
    dist.destroy_process_group()


if __name__ == "__main__":
    rendezvous = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:29511"
    mp.start_processes(both, (rendezvous,), nprocs=WORLD, start_method="fork")
