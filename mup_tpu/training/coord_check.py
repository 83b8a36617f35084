"""The coordinate check: how large each layer's activations and their updates are, width by width.

Yang et al. 2022 (Tensor Programs V), appendix D.1: after a few steps, no coordinate of any activation should
grow with width. Measured as the root mean square of each module's output on a fixed batch, and of its change
since init.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pandas as pd
import torch
from torch import Tensor
from torch.func import functional_call

from mup_tpu.config import Trial
from mup_tpu.data import TokenDataset
from mup_tpu.devices import get_device
from mup_tpu.errors import StoreError
from mup_tpu.models import Forms, architecture_of
from mup_tpu.training.pack import Pack

CELL = ("setting", "parametrization", "width", "seed")
"""Columns that name what was trained."""


def measure(
    trial: Trial,
    dataset: TokenDataset,
    widths: Sequence[int],
    parametrizations: Sequence[str],
    num_seeds: int,
    stored: pd.DataFrame | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[pd.DataFrame]:
    """Train each (parametrization, width, seed), measuring before each step and at the end.

    Args:
        trial: what to train; its width, parametrization and seed are replaced.
        dataset: batches; the probe is the first held-out batch.
        widths: model widths.
        parametrizations: keys of `mup_tpu.parametrization.PARAMETRIZATIONS`.
        num_seeds: seeds from 0.
        stored: what was measured before, of these trials or others; it is not measured again.
        say: told which width is being measured.

    Yields:
        After each width and parametrization all measurements so far, those stored first; at least once.
        Tidy table: setting (an id of the trial but for width, parametrization and seed), parametrization,
        optimizer, tied, width, seed, step, layer, quantity ("activation" or "update"), rms. Steps count the
        updates made.

    Raises:
        StoreError: trials of the same optimizer and tying, otherwise of another setting, are stored, or
            something else.
    """
    alike = trial.replace(width=trial.model.base_width, parametrization="mup", seed=0)
    setting = alike.trial_id(dataset.fingerprint)
    table = stored if stored is not None else pd.DataFrame()
    if len(table):
        if not {*CELL, "optimizer", "tied"} <= set(table):
            raise StoreError("what is stored there is no coordinate check; give another --results")
        same = (table["optimizer"] == trial.optimizer.optimizer) & (table["tied"] == trial.model.tied)
        if not (table[same]["setting"] == setting).all():
            raise StoreError(
                f"a coordinate check of {trial.optimizer.optimizer}, tied {trial.model.tied}, but with other "
                "options is stored there; give another --results"
            )
    done = set(zip(*(table[c] for c in CELL), strict=True)) if len(table) else set()
    yield table
    probe_BT = torch.from_numpy(dataset.validation_batches(1))[0, :, :-1]
    for width in widths:
        for parametrization in parametrizations:
            members = [
                trial.replace(width=width, parametrization=parametrization, seed=seed)
                for seed in range(num_seeds)
                if (setting, parametrization, width, seed) not in done
            ]
            if not members:
                continue
            say(f"width {width}, {parametrization}")
            shared = {
                "setting": setting,
                "parametrization": parametrization,
                "optimizer": trial.optimizer.optimizer,
                "tied": trial.model.tied,
                "width": width,
            }
            points = [shared | point for point in _measure_pack(members, dataset, probe_BT)]
            table = pd.concat([table, pd.DataFrame(points)], ignore_index=True)
            yield table


def _measure_pack(members: list[Trial], dataset: TokenDataset, probe_BT: Tensor) -> list[dict]:
    pack = Pack(members, dataset.vocab_size, get_device("cpu"), "loop")
    probed = _Probed(pack, probe_BT)
    points = []
    start = [probed.activations(k) for k in range(len(members))]
    for step in range(members[0].train.steps + 1):
        if step:
            pack.step(torch.from_numpy(dataset.train_batch(step - 1)))
        for k, member in enumerate(members):
            now = probed.activations(k)
            for layer, activation in now.items():
                sizes = {"activation": activation}
                if step:
                    sizes["update"] = activation - start[k][layer]
                for quantity, tensor in sizes.items():
                    rms = float(tensor.double().square().mean().sqrt())
                    points.append(
                        {
                            "seed": member.train.seed,
                            "step": step,
                            "layer": layer,
                            "quantity": quantity,
                            "rms": rms,
                        }
                    )
    return points


class _Probed:
    """A pack's network, with a forward hook on each module that its architecture declares as a probe."""

    def __init__(self, pack: Pack, probe_BT: Tensor) -> None:
        self._pack, self._probe_BT = pack, probe_BT
        first = pack.trials[0]
        self._network = architecture_of(first.model).network(
            first.model,
            pack.vocab_size,
            first.data.sequence_length,
            Forms(scaled_branches=pack.forms.scaled_branches),
        )
        self._outputs: dict[str, Tensor] = {}
        for label, module in pack.declaration.probes.items():
            self._network.get_submodule(module).register_forward_hook(self._keep(label))

    def _keep(self, name: str) -> Callable:
        return lambda module, inputs, output: self._outputs.__setitem__(name, output.detach())

    @torch.no_grad()
    def activations(self, member: int) -> dict[str, Tensor]:
        """Output of each part of a member's network, in order from input to logits."""
        pack = self._pack
        values = pack.member_parameters(member) | {name: b[member] for name, b in pack.buffers.items()}
        logits = functional_call(self._network, values, (self._probe_BT,), tie_weights=True)
        return self._outputs | {"logits": logits}
