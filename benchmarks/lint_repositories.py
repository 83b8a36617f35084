"""What the check says of models of other repositories under μP, built from their own code on a CPU.

python benchmarks/lint_repositories.py CLONES      rows of `benchmarks/lint_models.md` (minutes)

CLONES has nanochat/, litgpt/, torchtitan/ and OLMo-core/; the last two import more than torch. Two layers,
heads of 16 that grow in number.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional

from mup_tpu.parametrize import coord_check

HEAD, VOCAB_SIZE, LENGTH = 16, 64, 32


def nanochat(width: int) -> nn.Module:
    import nanochat.gpt as gpt

    gpt.COMPUTE_DTYPE = torch.float32
    heads = {"n_head": width // HEAD, "n_kv_head": width // HEAD}
    config = gpt.GPTConfig(
        sequence_len=LENGTH, vocab_size=VOCAB_SIZE, n_layer=2, n_embd=width, window_pattern="L", **heads
    )
    return drawn(gpt.GPT(config), "init_weights")


def litgpt(name: str, width: int) -> nn.Module:
    from litgpt.model import GPT, Config

    config = Config.from_name(
        name, n_layer=2, n_embd=width, n_head=width // HEAD, n_query_groups=width // HEAD, head_size=HEAD,
        intermediate_size=2 * width, vocab_size=VOCAB_SIZE, padded_vocab_size=VOCAB_SIZE, block_size=LENGTH,
    )  # fmt: skip
    model = GPT(config)
    return model.apply(model._init_weights) if not is_meta(model) else model


def torchtitan(width: int) -> nn.Module:
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    arguments = TransformerModelArgs(
        dim=width, n_layers=2, n_heads=width // HEAD, vocab_size=VOCAB_SIZE, max_seq_len=LENGTH,
        multiple_of=16,
    )  # fmt: skip
    return drawn(Transformer(arguments), "init_weights")


def olmo_core(width: int) -> nn.Module:
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig

    config = TransformerConfig.llama_like(
        vocab_size=VOCAB_SIZE, d_model=width, n_layers=2, n_heads=width // HEAD, hidden_size_multiple_of=16,
        qk_norm=True, block_name=TransformerBlockType.reordered_norm, layer_norm_eps=1e-6,
    )  # fmt: skip
    device = torch.empty(0).device
    model = config.build(init_device=device.type)
    if device.type == "cpu":
        model.init_weights(device=device)
    return model


MODELS: dict[str, Any] = {
    "nanochat's GPT": nanochat,
    "litgpt's Pythia": lambda width: litgpt("pythia-14m", width),
    "litgpt's Llama 3.2": lambda width: litgpt("Llama-3.2-1B", width),
    "torchtitan's Llama 3": torchtitan,
    "OLMo-core's": olmo_core,
}


def is_meta(model: nn.Module) -> bool:
    return next(model.parameters()).is_meta


def drawn(model: nn.Module, method: str) -> nn.Module:
    if not is_meta(model):
        getattr(model, method)()
    return model


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    before, after = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if type(model).__module__.startswith("nanochat"):
        value: Tensor = model(before, after)
        return value
    return functional.cross_entropy(model(before).flatten(0, 1), after.flatten())


class _Anything(types.ModuleType):
    """A package that a repository imports and a model does not use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def main(
    clones: Annotated[Path, tyro.conf.Positional], part: str = "", steps: int = 4, seeds: int = 2
) -> None:
    """Print a row a model.

    Args:
        clones: folder of the repositories.
        part: part of the names of models to try.
        steps: steps of training.
        seeds: seeds of the init.
    """
    torch.set_num_threads(1)
    os.environ["NANOCHAT_DTYPE"] = "float32"
    for name in ("torchdata", "torchdata.stateful_dataloader", "torch.utils.tensorboard"):
        sys.modules[name] = _Anything(name)
        sys.modules[name].__path__ = []
    sys.path[:0] = [str(clones / folder) for folder in ("nanochat", "litgpt", "torchtitan", "OLMo-core/src")]
    tokens = torch.randint(0, VOCAB_SIZE, (4, 17), generator=torch.Generator().manual_seed(0))
    for name, build in MODELS.items():
        if part not in name:
            continue
        report = coord_check(
            build, tokens, loss, widths=(32, 64, 128, 256), base_width=32, lr=2**-8, rules=["mup"],
            steps=steps, seeds=seeds, progress=lambda doing, share: None,
        ).reports["mup"]  # fmt: skip
        effects = report.table()["effect"].dropna()
        said = "flat" if report.passes else report.sentence
        print(f"| {name} | {said}, {effects.min():.2f} ({effects.idxmin()}) to {effects.max():.2f} "
              f"({effects.idxmax()}) |", flush=True)  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main)
