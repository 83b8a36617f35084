"""Run by test_xla.py in a process of its own: a pack on PJRT_DEVICE=CPU. Prints what came of it as JSON.

python xla_program.py MESH PRECISION CORPUS CHECKPOINTS
"""

import json
import sys
import threading
from pathlib import Path

import torch

from mup_tpu import data
from mup_tpu.config import RunOptions, Trial
from mup_tpu.devices import get_device, xla
from mup_tpu.training.loop import PackRun, run_to_end
from mup_tpu.training.pack import Pack

STEPS = 50


def trials(corpus: str, precision: str) -> list[Trial]:
    """Three members, which no mesh of four devices divides; warm-up, decay and clipping included."""
    base = Trial().replace(
        corpus=corpus, width=32, base_width=16, head_size=16, depth=1, sequence_length=16, batch_size=4,
        steps=STEPS, warmup=0.2, schedule="linear", init_std=0.08, eval_batches=2, precision=precision,
    )  # fmt: skip
    return [base.replace(learning_rate=lr, weight_decay=0.1) for lr in (0.003, 0.01, 0.03)]


def backward_threads(pack: Pack, tokens: torch.Tensor) -> list[str]:
    """Which threads a step's gradients are computed in, as one layer of the model sees them."""
    found = []

    class Probe(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, gradient):
            found.append(threading.current_thread().name)
            return gradient.clone()

    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: Probe.apply(output) if isinstance(module, torch.nn.LayerNorm) else None
    )
    pack.step(tokens)
    hook.remove()
    return sorted(set(found))


def main(mesh: str, precision: str, corpus: str, checkpoints: str) -> None:
    """Count over bare steps, then train through the loop, stop half-way and go on."""
    members = trials(corpus, precision)
    dataset = data.load(members[0].data, progress=False)
    device = get_device("xla").arrange(len(members), members[0].data.batch_size, mesh)
    pack = Pack(members, dataset.vocab_size, device)
    batches = [device.place_batch(torch.from_numpy(dataset.train_batch(s))) for s in range(STEPS)]
    held_out = [device.place_batch(torch.from_numpy(b)) for b in dataset.validation_batches(2)]
    device.synchronize()
    losses = [pack.step(batches[s]) for s in range(2)]
    device.synchronize()
    after_two = xla.report()
    losses += [pack.step(batches[s]) for s in range(2, STEPS)]
    device.synchronize()
    after_all = xla.report()
    first = pack.read(pack.evaluate(held_out)).tolist()
    after_evaluation = xla.report()
    again = pack.read(pack.evaluate(held_out)).tolist()
    after_second = xla.report()
    threads = backward_threads(pack, batches[0])

    options = RunOptions(device="xla", mesh=mesh, eval_every=STEPS // 2, checkpoint_every=STEPS // 2)
    stopped = PackRun(members, dataset, options, Path(checkpoints), None)
    for event in stopped.steps():
        if event.step == STEPS // 2:
            stopped.save()
            break
    resumed = run_to_end(PackRun(members, dataset, options, Path(checkpoints), None).steps())
    print(
        json.dumps(
            {
                "mesh": [device.mesh.trial, device.mesh.data],
                "losses": [pack.read(losses_K).tolist() for losses_K in losses],
                "evaluations": [first, again],
                "steps": {name: after_all[name] - after_two[name] for name in after_all},
                "second evaluation": {n: after_second[n] - after_evaluation[n] for n in after_second},
                "fallbacks": after_second["fallbacks"],
                "backward_threads": threads,
                "rows": [row["loss"] for row in resumed.rows],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
