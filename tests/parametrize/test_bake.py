"""Baked checkpoints: stock classes of transformers compute the logits of the trained module."""

import pytest
import torch
import transformers as hf
from torch import nn

from mup_tpu.errors import ConfigError
from mup_tpu.parametrize import parametrize

TOKENS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def gpt2(width):
    """Heads grow in size: two at any width. Readout and embedding are tied."""
    shape = {"vocab_size": 64, "n_positions": 16, "n_embd": width, "n_layer": 2, "n_head": 2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**shape, bos_token_id=None, eos_token_id=None))


def llama(width, kind="Llama", tied=False):
    return getattr(hf, f"{kind}ForCausalLM")(
        getattr(hf, f"{kind}Config")(
            vocab_size=64, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, head_dim=width // 2, attention_bias=True,
            tie_word_embeddings=tied, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def qwen3(width):
    """Norms stand between the projection of queries and the logits of attention."""
    return llama(width, "Qwen3", tied=True)


@pytest.mark.parametrize("build", [gpt2, llama, qwen3])
def test_a_baked_checkpoint_of_a_stock_class_computes_the_same_logits(build, tmp_path):
    torch.manual_seed(0)
    mup = parametrize(
        build, width=64, base_width=16, roles={"*_norm.weight": "norm"} if build is qwen3 else {}
    )
    model = mup.init_(build(64)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # no weight or bias at 0, as after training
            parameter.add_(0.3 * torch.randn_like(parameter))
    logits = model(TOKENS).logits
    assert (build(64).eval()(TOKENS).logits - logits).abs().max() > 0.1
    mup.bake_(model, untie=build is not llama).save_pretrained(tmp_path)
    stock = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(stock(TOKENS).logits, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mup.bake_(model)(TOKENS).logits, logits, rtol=1e-4, atol=1e-4)


def test_a_branch_bakes_into_its_last_layer_and_another_module_cannot():
    class Net(nn.Module):
        def __init__(self, width, depth, end=nn.Linear):
            super().__init__()
            self.first = nn.Linear(4, width)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(width, width), end(width, width)) for _ in range(depth)
            )

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            return x

    def of(build):
        sizes = {"width": 32, "base_width": 8, "depth": 4, "base_depth": 2}
        return parametrize(build, rule="completep", roles={"blocks.*.1": "branch"}, **sizes)

    module, x = of(Net).init_(Net(32, 4)), torch.randn(3, 4)
    before = module(x)
    assert not any(part._forward_hooks for part in of(Net).bake_(module).modules())
    torch.testing.assert_close(module(x), before)

    def other(width, depth):
        return Net(width, depth, lambda inputs, outputs: nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU()))

    with pytest.raises(ConfigError, match=r"factor of 'blocks.0.1' \(Sequential\) cannot be baked"):
        of(other).bake_(of(other).init_(other(32, 4)))


class Tied(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(50, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.middle(self.embedding(tokens))))


@pytest.mark.parametrize("build", [Tied, gpt2, qwen3])
def test_a_tied_readout_is_baked_only_where_the_caller_unties_it(build):
    """A fresh tied module takes all keys of the baked one, and computes something else."""
    roles = {"*_norm.weight": "norm"} if build is qwen3 else {}
    mup = parametrize(build, width=64, base_width=16, roles=roles)
    model = mup.init_(build(64)).eval()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    head = "head" if build is Tied else "lm_head"
    with pytest.raises(ConfigError, match=f"the module '{head}' is tied to '.*bake_\\(module, untie=True"):
        mup.bake_(model)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    baked = mup.bake_(model, untie=True)
    assert baked.get_submodule(head).weight is not next(baked.parameters())
    at_base = parametrize(build, width=16, base_width=16, roles=roles)
    at_base.bake_(at_base.init_(build(16)))  # a factor of 1 leaves nothing to untie
