"""Size of the init of a module's parameters, exact and without a draw: third quartiles.

While a module is built, each random draw is replaced by the third quartile of its distribution. Operations on
single elements (scales, shifts, truncation) take quartiles to quartiles. So the ratio of a parameter's values
at two widths is the ratio of the standard deviations for any init, with no noise from the draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mup_tpu.parametrize.survey import Build, call

_NORMAL = 0.6744897501960817
"""Third quartile of the standard normal distribution."""

_aten = torch.ops.aten
_DRAWS: Mapping[Any, tuple[tuple[float, float], Callable[[float, float], float]]] = {
    _aten.normal_.default: ((0.0, 1.0), lambda mean, std: mean + _NORMAL * std),
    _aten.uniform_.default: ((0.0, 1.0), lambda low, high: low + 0.75 * (high - low)),
}
"""In-place draws: default arguments, and the quartile as a function of the arguments."""


class _Quartiles(TorchDispatchMode):
    """Puts third quartiles in place of draws."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DRAWS:  # arguments that are missing are at their defaults
            default, quartile = _DRAWS[func]
            return args[0].fill_(quartile(*args[1:], *default[len(args) - 1 :]))
        drawn = func(*args, **(kwargs or {}))
        if func.overloadpacket in (_aten.randn, _aten.randn_like):
            drawn.fill_(_NORMAL)
        elif func.overloadpacket in (_aten.rand, _aten.rand_like):
            drawn.fill_(0.75)
        return drawn


def init_sizes(build: Build, width: int, depth: int | None) -> dict[str, float]:
    """Size of each parameter's init at one size of the module, by name; only ratios have a meaning.

    An init that mixes elements, such as an orthogonal one, is drawn once; its root mean square is taken.
    """
    with torch.random.fork_rng(devices=[]), _Quartiles():
        module = call(build, width, depth)
    sizes = {name: _quartile(parameter) for name, parameter in module.named_parameters()}
    if None in sizes.values():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = call(build, width, depth)
        sizes = {n: _rms(p) if sizes[n] is None else sizes[n] for n, p in module.named_parameters()}
    return {name: size or 0.0 for name, size in sizes.items()}


@torch.no_grad()
def _quartile(parameter: nn.Parameter) -> float | None:
    """Value of most elements, without rows that stay 0, as for padding; None if elements differ."""
    if not parameter.numel():
        return 0.0
    values = parameter.abs().flatten()
    quartile = values.median()
    alike = bool((values == quartile).double().mean() >= 0.5)
    zeros_tell = parameter.dim() < 2 and not values.any()
    return float(quartile) if alike and (quartile > 0 or zeros_tell) else None


@torch.no_grad()
def _rms(parameter: nn.Parameter) -> float:
    return float(parameter.double().square().mean().sqrt())
