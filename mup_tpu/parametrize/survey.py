"""Survey of a module: its parameters by name, the modules that own them, its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from mup_tpu.errors import ConfigError, first_line

Build = Callable[..., nn.Module]
"""Function that makes a module at a width, or at a width and depth: build(width) or build(width, depth)."""

_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of names from FSDP, torch.compile and activation checkpointing."""


@dataclass(frozen=True)
class Owner:
    """A module that holds a parameter."""

    name: str
    module: nn.Module
    attribute: str
    """Name of the parameter in the module."""


@dataclass(frozen=True)
class Found:
    """One parameter of a module that was built."""

    shape: tuple[int, ...]
    owners: tuple[Owner, ...]
    """Several if the parameter is tied."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameter, the one in `named_parameters` first."""
        return tuple(f"{o.name}.{o.attribute}".removeprefix(".") for o in self.owners)


def parameters_of(module: nn.Module) -> dict[str, Found]:
    """Parameters of a module, by their names in `named_parameters`."""
    tensors: dict[int, nn.Parameter] = {}
    owners: dict[int, list[Owner]] = {}
    for name, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                tensors[id(parameter)] = parameter
                owners.setdefault(id(parameter), []).append(Owner(name, owner, attribute))
    found = [Found(tuple(tensors[key].shape), tuple(of)) for key, of in owners.items()]
    return {f.names[0]: f for f in found}


def build_on_meta(build: Build, width: int, depth: int | None) -> nn.Module:
    """A module at a size, without memory for its weights."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return call(build, width, depth)


def call(build: Build, width: int, depth: int | None) -> nn.Module:
    """A module at a size, on the current device."""
    said = f"build({width})" if depth is None else f"build({width}, {depth})"
    try:
        module = build(width) if depth is None else build(width, depth)
    except Exception as error:
        raise ConfigError(
            f"{said} fails ({first_line(error)}); it must build its module at the width to train, the base "
            "width and the delta width (twice the base width, if delta_width is not given), on the meta "
            "device too"
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{said} returns {type(module).__name__}; it must return a torch.nn.Module")
    return module


def blocks_of(shallow: nn.Module, deep: nn.Module) -> tuple[str, ...]:
    """Names of a module's blocks, each with its dot: members of lists that are longer in a deeper module."""
    lengths = {
        name: len(m) for name, m in deep.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)
    }
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
    """Parameters of a module, wrapped or not, by their names as built."""
    found = {}
    for name, parameter in module.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        found[name] = parameter
    if found.keys() != expected.keys() and all(name.startswith("module.") for name in found):
        found = {name.removeprefix("module."): p for name, p in found.items()}  # DataParallel and DDP
    if any(name.split(".")[-1].startswith("_flat_param") for name in found):
        raise ConfigError(
            "FSDP has joined parameters into _flat_param, which can have only one learning rate; wrap with "
            "FSDP(..., use_orig_params=True) or torch.distributed.fsdp.fully_shard"
        )
    if missing := [name for name in expected if name not in found]:
        raise ConfigError(
            f"the module has no parameter {missing[0]!r}, which build makes; give a module of the same build "
            "and depth"
        )
    if extra := [name for name in found if name not in expected]:
        raise ConfigError(
            f"the module has a parameter {extra[0]!r}, which build does not make; give a module of the same "
            "build and depth, and tie again the parameters that were tied"
        )
    return found
