"""Survey of a module that a function builds, and the declaration of each of its parameters.

Yang et al. 2022 (Tensor Programs V, arXiv:2203.03466), Table 8: a matrix with two growing axes is hidden;
with growing inputs alone it is a readout, with growing outputs alone an input layer (an embedding).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from mup_tpu.config import OptimizerConfig
from mup_tpu.errors import ConfigError, first_line
from mup_tpu.rules.parametrization import Parameter, Role

if TYPE_CHECKING:
    from mup.infshape import InfShape

Build = Callable[..., nn.Module]
"""Function that makes a module at a width, or at a width and depth: build(width) or build(width, depth)."""

BRANCH, BY_HAND, POWER = "branch", "by hand", r"width\^(-?\d+(?:\.\d+)?)"
"""Roles of submodules: the end of a residual branch; a forward factor that the caller's code applies; a power
of the width by which the module's class multiplies, such as "width^0.5" of Gemma's embedding."""

ROLES: tuple[str, ...] = get_args(Role)

# Parts of names from FSDP, torch.compile and activation checkpointing.
_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")

# Update rules whose factors those of an optimizer are. Adam and Lion, too, take steps of one size.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"optimizer": "adamw"},
    "adam": {"optimizer": "adamw"},
    "lion": {"optimizer": "adamw"},
    "sgd": {"optimizer": "sgd"},
    "muon": {"optimizer": "muon", "muon_scale": "spectral"},
    "muon_match_rms_adamw": {"optimizer": "muon", "muon_scale": "match_rms_adamw"},
}


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
_MATRICES = (nn.MultiheadAttention, nn.RNNBase)

# Names that classes give to their own parameters: tokens and tables that join the stream, but no readout's;
# a gain or a shift of each channel.
_TABLE = re.compile(
    r"(?!.*(unemb|head|logit|out))(.*[._])?(pos|emb|.*embed|.*token|latent|probe|quer(y|ies)|register|prompt)",
    re.IGNORECASE,
)
_GAIN = re.compile(r"(^|_)(g|gain|gamma|scale|ls|lambda)_?\d*$|layer_?scale", re.IGNORECASE)
_SHIFT = re.compile(r"bias|beta|shift", re.IGNORECASE)


@dataclass(frozen=True)
class Owner:
    """A module that holds a parameter."""

    name: str
    module: nn.Module
    attribute: str  # Name of the parameter in the module


@dataclass(frozen=True)
class Built:
    """One parameter of a module that was built."""

    shape: tuple[int, ...]
    owners: tuple[Owner, ...]  # Several if the parameter is tied

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{o.name}.{o.attribute}".removeprefix(".") for o in self.owners)


def parameters_of(module: nn.Module) -> dict[str, Built]:
    """Return the parameters of a module, by their names in `named_parameters`."""
    tensors: dict[int, nn.Parameter] = {}
    owners: dict[int, list[Owner]] = {}
    for name, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                tensors[id(parameter)] = parameter
                owners.setdefault(id(parameter), []).append(Owner(unwrapped(name), owner, attribute))
    built = [Built(tuple(tensors[key].shape), tuple(of)) for key, of in owners.items()]
    return {b.names[0]: b for b in built}


def build_on_meta(build: Build, width: int, depth: int | None) -> nn.Module:
    """Build a module without its values, or with them if its code reads values while it builds."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return call(build, width, depth)
        except ConfigError as error:
            if isinstance(error.__cause__, RuntimeError):
                return call(build, width, depth)
            raise


def require_function(build: object) -> None:
    """Refuse what is no function of the width, such as a module that is built already."""
    if isinstance(build, nn.Module) or not callable(build):
        raise ConfigError(
            f"build is a {type(build).__name__}; give the function that makes the module at any width, as "
            "lambda width: Model(width)"
        )


def call(build: Build, width: int, depth: int | None) -> nn.Module:
    """Build a module at a size, on the current device."""
    require_function(build)
    size = (width,) if depth is None else (width, depth)
    name = f"build({', '.join(map(str, size))})"
    try:
        module = build(*size)
    except Exception as error:
        raise ConfigError(
            f"{name} fails ({first_line(error)}); it must build its module at the width to train, the base "
            "width and twice the base width"
        ) from error
    if not isinstance(module, nn.Module):
        alone = ", without an optimizer: rules make their own, and a check of no rule takes yours"
        raise ConfigError(
            f"{name} returns {type(module).__name__}; it must return a torch.nn.Module"
            + alone * isinstance(module, tuple)
        )
    return module


def blocks_of(shallow: nn.Module, deep: nn.Module) -> tuple[str, ...]:
    """Return names of a module's blocks, each with its dot: members of lists that grow with depth."""
    lists = nn.ModuleList | nn.Sequential
    lengths = {name: len(m) for name, m in deep.named_modules() if isinstance(m, lists)}
    blocks = [
        f"{name}.{i}.".removeprefix(".")
        for name, module in shallow.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and lengths.get(name, len(module)) != len(module)
        for i in range(len(module))
    ]
    if not blocks:
        raise ConfigError(
            "depth is given, but no nn.ModuleList or nn.Sequential of the module gets longer with it; build "
            "must take (width, depth) and keep its blocks in one"
        )
    return tuple(blocks)


def by_name(module: nn.Module, expected: Mapping[str, object]) -> dict[str, nn.Parameter]:
    """Return the parameters of a module, wrapped or not, by their names as built."""
    parameters = {unwrapped(name): parameter for name, parameter in module.named_parameters()}
    if parameters.keys() != expected.keys() and all(name.startswith("module.") for name in parameters):
        parameters = {name.removeprefix("module."): p for name, p in parameters.items()}  # DataParallel, DDP
    if any(name.split(".")[-1].startswith("_flat_param") for name in parameters):
        raise ConfigError(
            "FSDP has joined parameters into _flat_param, which can have only one learning rate; wrap with "
            "FSDP(..., use_orig_params=True)"
        )
    if missing := [name for name in expected if name not in parameters]:
        raise ConfigError(
            f"the module has no parameter {missing[0]!r}, which build makes; give a module of the same build "
            "and depth"
        )
    if extra := [name for name in parameters if name not in expected]:
        raise ConfigError(
            f"the module has a parameter {extra[0]!r}, which build does not make; give a module of the same "
            "build and depth, and tie again the parameters that were tied"
        )
    return parameters


def unwrapped(name: str) -> str:
    name += "."
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removesuffix(".")


def matches(name: str, role: str, roles: Mapping[str, str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern, given in roles.items() if given == role)


def own_power(name: str, roles: Mapping[str, str]) -> float:
    powers = (re.fullmatch(POWER, role) for pattern, role in roles.items() if fnmatchcase(name, pattern))
    return float(next((power[1] for power in powers if power), 0.0))


def is_linear(module: nn.Module) -> bool:
    """Whether a module is linear up to a bias, so that a factor may go before it."""
    return isinstance(module, nn.Linear | _ConvNd) or _is_conv1d(module) or _is_other_linear(module)


def config_for(optimizer: str, parameter: Parameter) -> OptimizerConfig:
    # torch.optim.Muon takes matrices of two axes only.
    is_matrix = parameter.role == "hidden" and len(parameter.shape) == 2
    name = "adamw" if optimizer.startswith("muon") and not is_matrix else optimizer
    return OptimizerConfig(**OPTIMIZERS[name])


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or type(module).__name__.endswith("Norm")


def outputs_first(built: Built, shape: tuple[int, ...]) -> tuple[int, ...]:
    # mup takes outputs first, as torch's Linear stores them.
    owner = built.owners[-1].module  # the readout, if an embedding is tied
    inputs_lead = _is_conv1d(owner) or isinstance(owner, _ConvTransposeNd)
    return (shape[1], shape[0], *shape[2:]) if inputs_lead and len(shape) >= 2 else shape


def role_of(built: Built, axes: InfShape, roles: Mapping[str, str]) -> Role | None:
    """Return the role that the caller gives a parameter, or that its module, axes and name show."""
    for pattern, role in roles.items():
        if role in ROLES and any(fnmatchcase(name, pattern) for name in built.names):
            return role  # type: ignore[return-value]
    return _shown_role(built, axes)


def declared(
    built: Built, axes: InfShape, role: Role, in_block: bool = False, init_depth_exponent: float = 0.0
) -> Parameter:
    """Declare one parameter."""
    sizes = [dim.dim for dim in axes]
    kernel = math.prod(sizes[2:])
    vector = len(sizes) < 2
    return Parameter(
        shape=built.shape,
        role=role,
        fan_in=1 if vector else sizes[1] * kernel,
        fan_out=sizes[0] * kernel if sizes else 1,
        in_block=in_block,
        init_depth_exponent=init_depth_exponent,
    )


def require_roles(
    shown: Mapping[str, Role | None], parameters: Mapping[str, Built], axes: Mapping[str, InfShape]
) -> dict[str, Role]:
    """Return the roles of parameters; refuse those that are not known, and a tied readout's own."""
    for name, role in shown.items():
        if role == "readout" and _embedding_of(built := parameters[name]):
            raise ConfigError(
                f"{built.names[-1]!r} is the same matrix as the embedding {name!r}, so that it cannot have "
                "a readout's factors of its own; leave it out of roles: the matrix has the embedding's "
                "factors, and the logits have their 1/m all the same"
            )
    if not (unknown := [name for name, role in shown.items() if role is None]):
        return {name: role for name, role in shown.items() if role}
    name = unknown[0]
    built, grown = parameters[name], axes[name].ninf()
    why = "one axis grows with width, as of an embedding, an input layer, a readout, a norm's gain and a bias"
    if grown > 2:
        why = f"{grown} of its axes grow with width, and rules are for two at most"
    more = f", nor that of {', '.join(unknown[1:5])}" + ", ..." * (len(unknown) > 5) if unknown[1:] else ""
    raise ConfigError(
        f"the role of parameter {name!r} of {type(built.owners[-1].module).__name__}, shape {built.shape}, "
        f"is not known{more}: {why}; give roles={{{name!r}: ...}} with one of {', '.join(ROLES)}"
    )


def require_used(roles: Mapping[str, str], module: nn.Module, parameters: Mapping[str, Built]) -> None:
    """Refuse roles that do not exist, and patterns that match no parameter or submodule."""
    names = {
        "parameter": [name for built in parameters.values() for name in built.names],
        "submodule": [name for name, _ in module.named_modules()],
    }
    for pattern, role in roles.items():
        if role not in (*ROLES, BRANCH, BY_HAND) and not re.fullmatch(POWER, role):
            allowed = ", ".join((*ROLES, BRANCH, BY_HAND, "width^0.5"))
            raise ConfigError(f"role {role!r} of {pattern!r} is not one of {allowed}")
        kind = "parameter" if role in ROLES else "submodule"
        if not any(fnmatchcase(name, pattern) for name in names[kind]):
            few = ", ".join(map(repr, names[kind][:4]))
            more = f" and {len(names[kind]) - 4} more" if len(names[kind]) > 4 else ""
            raise ConfigError(f"roles has {pattern!r}, but the module has no such {kind}; it has {few}{more}")


def _shown_role(built: Built, axes: InfShape) -> Role | None:
    grows = [dim.isinf() for dim in axes]
    owner = built.owners[-1]
    is_vector = sum(grows) == 1 and math.prod(built.shape) == max(built.shape)  # also (1, width, 1, 1)
    if _embedding_of(built) and not (grows[0] and len(grows) == 2):
        return "token_embedding"
    if (is_vector or len(grows) == 1) and (is_norm(owner.module) or "bias" in owner.attribute):
        return "bias" if _SHIFT.search(owner.attribute) else "norm"
    if sum(grows) == 2:
        return "hidden"
    if not any(grows):  # no factor of width depends on this
        return "hidden" if len(grows) >= 2 else "bias"
    if sum(grows) > 2:
        return None
    if len(grows) >= 2 and (isinstance(owner.module, _MATRICES) or is_linear(owner.module)):
        if grows[1]:
            return "readout"
        if grows[0]:
            # A kernel for each channel is no input layer: the module's input grows.
            grouped = isinstance(owner.module, _ConvNd) and owner.module.groups > 1
            return "hidden" if grouped else "token_embedding"
    if _TABLE.match(".".join(built.names[-1].split(".")[-2:])):
        return "position_embedding"
    if is_vector and _GAIN.search(owner.attribute):
        return "norm"
    return "bias" if is_vector and _SHIFT.search(owner.attribute) else None


def _embedding_of(built: Built) -> Owner | None:
    tables = [o for o in built.owners if isinstance(o.module, nn.Embedding | nn.EmbeddingBag)]
    return tables[0] if tables else None


def _is_other_linear(module: nn.Module) -> bool:
    """Whether a class of another library is a linear layer that stores outputs first."""
    shape = getattr(getattr(module, "weight", None), "shape", ())
    names = (("out_features", "in_features"), ("out_channels", "in_channels"))
    sizes = [tuple(getattr(module, name, None) for name in pair) for pair in names]
    return type(module).__name__.endswith("Linear") and tuple(shape) in sizes


def _is_conv1d(module: nn.Module) -> bool:
    # A linear layer that is stored (inputs, outputs), as in GPT-2 of transformers
    return type(module).__name__ == "Conv1D"
