"""Declaration of each parameter of a module: role by module type and by growing axes.

Yang et al. 2022 (Tensor Programs V, arXiv:2203.03466), Table 8: a matrix with two growing axes is hidden;
with growing inputs alone it is a readout, with growing outputs alone an input layer (an embedding).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, get_args

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from mup_tpu.errors import ConfigError
from mup_tpu.parametrize.survey import Found, Owner
from mup_tpu.rules.parameter import Parameter, Role

if TYPE_CHECKING:
    from mup.infshape import InfShape

ROLES: tuple[str, ...] = get_args(Role)

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
_MATRICES = (nn.Linear, _ConvNd, nn.MultiheadAttention, nn.RNNBase)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is linear up to a bias, so that a factor may go before it."""
    return isinstance(module, nn.Linear | _ConvNd) or _is_conv1d(module)


def outputs_first(found: Found, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A parameter's shape with its axis of outputs first, as in torch's Linear and as mup takes it."""
    owner = found.owners[-1].module  # the readout, if an embedding is tied
    inputs_lead = _is_conv1d(owner) or isinstance(owner, _ConvTransposeNd)
    return (shape[1], shape[0], *shape[2:]) if inputs_lead and len(shape) >= 2 else shape


def declared(
    found: Found,
    axes: InfShape,
    roles: Mapping[str, str] = {},
    in_block: bool = False,
    init_depth_exponent: float = 0.0,
) -> Parameter:
    """Declaration of one parameter."""
    given = [role for pattern, role in roles.items() if any(fnmatchcase(n, pattern) for n in found.names)]
    if given and given[0] not in ROLES:
        raise ConfigError(f"role {given[0]!r} of {found.names[0]!r} is not one of {', '.join(ROLES)}")
    if given and given[0] == "readout" and _embedding_of(found):
        raise ConfigError(
            f"{found.names[-1]!r} is the same matrix as the embedding {found.names[0]!r}, so that it cannot "
            "have a readout's factors of its own; leave it out of roles: the matrix has the embedding's "
            "factors, and the logits have their 1/m all the same"
        )
    role: Role = given[0] if given else _role(found, axes)  # type: ignore[assignment]
    sizes = [dim.dim for dim in axes]
    kernel = math.prod(sizes[2:])
    vector = len(sizes) < 2
    return Parameter(
        shape=found.shape,
        role=role,
        fan_in=1 if vector else sizes[1] * kernel,
        fan_out=sizes[0] * kernel if sizes else 1,
        in_block=in_block,
        init_depth_exponent=init_depth_exponent,
    )


def require_used(roles: Mapping[str, str], parameters: Mapping[str, Found]) -> None:
    """Refuse roles of a parameter that is not there."""
    names = [name for found in parameters.values() for name in found.names]
    for pattern in roles:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"roles has {pattern!r}, but the module has no such parameter; it has {_some(names)}"
            )


def _role(found: Found, axes: InfShape) -> Role:
    grows = [dim.isinf() for dim in axes]
    owner = found.owners[-1]
    if _embedding_of(found) and not (grows[0] and len(grows) == 2):
        return "token_embedding"
    is_norm = isinstance(owner.module, _NORMS) or type(owner.module).__name__.endswith("Norm")
    if len(grows) == 1 and is_norm:
        return "bias" if _is_bias(owner) else "norm"
    if len(grows) == 1 and _is_bias(owner):
        return "bias"
    if sum(grows) == 2:
        return "hidden"
    if not any(grows):  # no factor of width depends on this
        return "hidden" if len(grows) >= 2 else "bias"
    if (
        len(grows) >= 2
        and sum(grows) == 1
        and (isinstance(owner.module, _MATRICES) or is_linear(owner.module))
    ):
        if grows[1]:
            return "readout"
        if grows[0]:
            # A kernel for each channel is no input layer: the module's input grows.
            grouped = isinstance(owner.module, _ConvNd) and owner.module.groups > 1
            return "hidden" if grouped else "token_embedding"
    why = "one axis grows with width, as of an embedding, an input layer, a readout, a norm's gain and a bias"
    if sum(grows) > 2:
        why = f"{sum(grows)} of its axes grow with width, and rules are for two at most"
    raise ConfigError(
        f"the role of parameter {found.names[0]!r} of {type(owner.module).__name__}, shape {found.shape}, "
        f"cannot be told: {why}; say roles={{{found.names[0]!r}: ...}} with one of {', '.join(ROLES)}"
    )


def _embedding_of(found: Found) -> Owner | None:
    tables = [o for o in found.owners if isinstance(o.module, nn.Embedding | nn.EmbeddingBag)]
    return tables[0] if tables else None


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, a linear layer that is stored (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _is_bias(owner: Owner) -> bool:
    return "bias" in owner.attribute


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
