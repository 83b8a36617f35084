"""Weights of a trial: fresh, or trained as a stock checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mup_tpu.config import Trial
from mup_tpu.models import Parameter, architecture_of, forward_scaling
from mup_tpu.rules.parametrization import Scaling


def init_parameters(
    parameters: Mapping[str, Parameter], scaling: Mapping[str, Scaling], init_std: float, seed: int
) -> dict[str, Tensor]:
    """Draw float32 weights on the CPU, by name: a function of the seed and each parameter's name and shape.

    `init_std` is the standard deviation at the base, without the architecture's factor.
    """
    weights = {}
    for name, parameter in parameters.items():
        if parameter.init != "normal":
            weights[name] = torch.full(parameter.shape, 1.0 if parameter.init == "ones" else 0.0)
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        std = init_std * parameter.init_factor * scaling[name].init
        weights[name] = torch.randn(parameter.shape, generator=generator) * std
    return weights


def folded(trial: Trial, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of a trial's weights with all factors folded in, for its stock class."""
    stock = {name: p.detach().clone() for name, p in weights.items()}
    for fold in architecture_of(trial.model).folds(trial.model, forward_scaling(trial)):
        if fold.parameter in stock:
            part = slice(fold.slice.start, fold.slice.stop) if fold.slice else slice(None)
            stock[fold.parameter][..., part] *= fold.factor
    return stock


def export_stock(
    trial: Trial,
    weights: Mapping[str, Tensor],
    vocab_size: int,
    sequence_length: int,
    separator: int,
    path: str | Path,
) -> Path:
    """Write a checkpoint folder that transformers' stock class loads without our code.

    `separator` is the token between documents: texts begin after it and end with it.
    """
    # accelerate (1.15), which models of transformers need, imports torch_xla wherever that is installed,
    # unless USE_TORCH_XLA is 0 at that moment: in 3 to 4 s, and torch_xla may take the machine's TPUs.
    is_quiet = "torch_xla" not in sys.modules and "USE_TORCH_XLA" not in os.environ
    if is_quiet:
        os.environ["USE_TORCH_XLA"] = "0"
    try:
        with contextlib.suppress(ImportError):
            import accelerate  # noqa: F401
    finally:
        if is_quiet:
            del os.environ["USE_TORCH_XLA"]
    from transformers import GenerationConfig

    exported = folded(trial, {name: p.detach().to("cpu", torch.float32) for name, p in weights.items()})
    model = architecture_of(trial.model).stock(trial.model, vocab_size, sequence_length)
    missing, unexpected = model.load_state_dict(exported, strict=False)
    assert not unexpected and set(missing) <= set(model._tied_weights_keys or ()), (missing, unexpected)
    model.tie_weights()
    ends = {name: separator for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.config.update(ends)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(path)
    mode = Path(path, "config.json").stat().st_mode
    for file in Path(path).glob("*.safetensors"):
        file.chmod(mode)  # safetensors lets only this user read them
    return Path(path)
