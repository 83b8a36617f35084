"""Roles told from a module, and one sentence wherever something is wrong with it."""

import warnings

import pytest
import torch
import transformers as hf
from torch import nn

from mup_tpu.errors import ConfigError
from mup_tpu.parametrize import parametrize


class Custom(nn.Module):
    """With a parameter of its own, beside a hidden matrix."""

    def __init__(self, width: int, shape: tuple[int, ...] = (), extra: str = "") -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.own = nn.Parameter(torch.ones(shape or (1, 7, width)))
        if extra:
            setattr(self, extra, nn.Linear(width, width))


def of(build, **more):
    return parametrize(build, **({"width": 64, "base_width": 16} | more))


def roles(build, **more) -> dict[str, str]:
    return {name: p.role for name, p in of(build, **more).parameters.items()}


def test_roles_of_torchs_layers():
    def build(width):
        return nn.ModuleDict(
            {
                "table": nn.Embedding(5, width),
                "patches": nn.Conv2d(3, width, 2),
                "mix": nn.Conv2d(width, width, 3),
                "depthwise": nn.Conv2d(width, width, 3, groups=width),
                "up": nn.ConvTranspose2d(width, 2 * width, 2),
                "image": nn.ConvTranspose2d(width, 3, 2),
                "batch": nn.BatchNorm2d(width),
                "rms": nn.RMSNorm(width),
                "attention": nn.MultiheadAttention(width, width // 8),
                "memory": nn.LSTM(width, width),
                "head": nn.Linear(width, 5),
                "fixed": nn.Linear(4, 4),
            }
        )

    found = roles(build)
    expected = {
        "token_embedding": "table.weight patches.weight",
        "hidden": "mix.weight depthwise.weight up.weight fixed.weight attention.in_proj_weight "
        "attention.out_proj.weight memory.weight_hh_l0",
        "readout": "head.weight image.weight",
        "norm": "batch.weight rms.weight",
        "bias": "patches.bias batch.bias attention.in_proj_bias memory.bias_ih_l0 head.bias",
    }
    for role, names in expected.items():
        assert {name: found[name] for name in names.split()} == dict.fromkeys(names.split(), role)
    scaled = of(build)
    assert scaled.parameters["mix.weight"].fan_in == 64 * 9
    assert scaled.scalings["depthwise.weight"].learning_rate == 1
    assert {f.module: f.factor for f in scaled.forward} == {"head": 0.25, "image": 0.25}


def test_a_projection_to_few_heads_that_is_said_to_be_hidden_has_a_hidden_matrixs_factors():
    def build(width):  # as keys of grouped-query attention, whose number of heads stays
        return nn.ModuleDict({"q_proj": nn.Linear(width, width), "k_proj": nn.Linear(width, 8)})

    assert roles(build)["k_proj.weight"] == "readout"
    for optimizer, rate in (("adamw", 1 / 4), ("sgd", 1 / 4)):
        scaled = of(build, roles={"*k_proj.weight": "hidden"}, optimizer=optimizer)
        assert scaled.scalings["k_proj.weight"].learning_rate == rate
        assert scaled.scalings["k_proj.weight"].init == 0.5
        assert not scaled.forward


def tied(width, **more):
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=40, n_positions=8, n_embd=width, n_layer=1, n_head=2, bos_token_id=None,
                   eos_token_id=None, **more)
    )  # fmt: skip


def test_a_tied_readout_has_the_embeddings_factors_and_its_logits_the_readouts():
    scaled = of(tied)
    assert "lm_head.weight" not in scaled.parameters
    assert scaled.parameters["transformer.wte.weight"].role == "token_embedding"
    (readout,) = [f for f in scaled.forward if f.place == "input"]
    assert (readout.module, readout.factor) == ("lm_head", 0.25)


class Growing(nn.Module):
    """Attention whose heads grow, which says their size or not."""

    def __init__(self, width: int, scaling: bool) -> None:
        super().__init__()
        self.head_dim = width // 2
        self.queries = nn.Linear(width, width)
        if scaling:
            self.scaling = self.head_dim**-0.5


def test_attention_is_divided_by_the_head_size():
    module = of(lambda width: Growing(width, True)).init_(Growing(64, True))
    # 1/√8 at the base head size 8, then in proportion to 1/d
    assert module.scaling == pytest.approx(8**-0.5 * 8 / 32)
    plain = parametrize(lambda width: Growing(width, True), width=64, base_width=16, rule="sp")
    assert plain.init_(Growing(64, True)).scaling == 32**-0.5


class FunctionalReadout(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(3, width)
        self.readout = nn.Parameter(torch.ones(5, width))


def renamed(width):
    return Custom(width, (3,), extra=f"layer{width}")


def fails(width):
    return nn.Linear(width, 4 * (width // 48), device="nowhere") if width == 64 else nn.Linear(width, 3)


def deep(width, depth):
    return nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])


def rounded(width):  # to a multiple of 64, as makers of fast models do
    return nn.Sequential(nn.Linear(width, 64 * -(-width // 64)), nn.Linear(64 * -(-width // 64), 2))


def several(width):
    return nn.ModuleList([Custom(width), nn.Linear(width, width), Custom(width), Custom(width)])


@pytest.mark.parametrize(
    ("build", "more", "said"),
    [
        (several, {}, "'0.own' of Custom, .* is not known, nor that of 2.own, 3.own: one axis"),
        (rounded, {"width": 128}, "an axis of 64 at widths 16 and 32, but 128 at 128; give a base_width"),
        (Custom, {}, r"role of parameter 'own' of Custom, shape \(1, 7, 64\), is not known.*roles="),
        (lambda w: Custom(w, (w, w, w)), {}, "3 of its axes grow with width"),
        (Custom, {"roles": {"own": "gain"}}, "role 'gain' of 'own' is not one of token_embedding"),
        (Custom, {"roles": {"owm": "norm"}}, "roles has 'owm', but the module has no such parameter"),
        (lambda w: nn.Linear(8, 8), {}, r"build\(16\) and build\(32\) make parameters of the same shapes"),
        (renamed, {}, "parameter 'layer16.bias' exists at width 16, but not at 64"),
        (fails, {}, r"build\(64\) fails \(.*nowhere.*\); it must build its module at the width to train"),
        (nn.Linear(8, 8), {}, "build is a Linear; give the function that makes the module at any width"),
        (lambda w: w, {}, r"build\(16\) returns int; it must return a torch.nn.Module$"),
        (lambda w: (Custom(w), None), {}, "returns tuple; .* without an optimizer: rules make their own"),
        (tied, {"roles": {"lm_head.weight": "readout"}}, "same matrix as the embedding 'transformer.wte"),
        (FunctionalReadout, {"roles": {"readout": "readout"}}, "by 0.25 in your code.*roles={'': 'by"),
        (lambda w: Growing(w, False), {}, "grows from 8 to 32.*number of heads.*scale=.*{'': 'by"),
        (deep, {"rule": "completep"}, "rule 'completep' follows depth: give depth and base_depth"),
        (deep, {"depth": 2}, "depth and base_depth go together"),
        (deep, {"rule": "completep", "depth": 4, "base_depth": 2}, "multiplies residual branches by 0.5"),
        (deep, {"depth": 4, "base_depth": 2, "roles": {"no.*": "branch"}}, "no such submodule; it has ''"),
        (lambda w, d: Custom(w, (3,)), {"depth": 4, "base_depth": 2}, "gets longer with it"),
        (Custom, {"rule": "mu"}, "rule 'mu' is not one of 'mup', 'sp'"),
        (Custom, {"optimizer": "rmsprop"}, "optimizer 'rmsprop' is not one of 'adamw', 'adam'"),
        (Custom, {"width": 0}, "width 0 is not allowed"),
        (deep, {"rule": "completep", "depth": 2, "base_depth": 2, "optimizer": "sgd"}, "no rule for opti"),
    ],
)  # fmt: skip
def test_one_sentence_says_what_is_wrong(build, more, said):
    with pytest.raises(ConfigError, match=f"(?s){said}") as raised:
        of(build, **more)
    assert "\n" not in str(raised.value)


class Fixed(nn.Module):
    """Attention as in nanoGPT, with a number of heads that does not follow width."""

    def __init__(self, width):
        super().__init__()
        self.n_head = 4
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)


def test_heads_that_seem_to_grow_are_warned_of():
    with pytest.warns(
        UserWarning, match=r"'' \(Fixed\) has n_head 4 at every width, so its heads seem to grow"
    ):
        of(Fixed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of(Fixed, roles={"": "by hand"})


@pytest.mark.parametrize("name", ["attn", "a*"])
def test_what_is_done_by_hand_is_left_alone_and_told(name):
    def build(width):
        return nn.ModuleDict({"attn": Growing(width, False)})

    (factor,) = of(build, roles={name: "by hand"}).forward
    assert (factor.module, factor.place, factor.factor) == ("attn", "by hand", pytest.approx(0.5))


def test_a_module_of_another_build_is_refused():
    scaled = of(lambda width: Custom(width, (3,)))
    with pytest.raises(ConfigError, match="has no parameter 'own', which build makes"):
        scaled.init_(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="has a parameter 'more.weight', which build does not make"):
        scaled.param_groups(Custom(64, (3,), "more"), lr=1.0)
    with pytest.raises(
        ConfigError, match=r"'inner.weight' has shape \(32, 32\), at width 64 it is \(64, 64\)"
    ):
        scaled.init_(Custom(32, (3,)))
    with pytest.raises(ConfigError, match="learning_rate -1 is not allowed"):
        scaled.param_groups(Custom(64, (3,)), lr=-1.0)


class Named(nn.Module):
    """With one parameter of a name and shape, held by a module of a class's name."""

    def __init__(self, name: str, shape: tuple[int, ...], kind: str = "Part") -> None:
        super().__init__()
        part = type(kind, (nn.Module,), {})()
        part.register_parameter(name.rpartition(".")[2], nn.Parameter(torch.ones(shape)))
        part.in_channels, part.out_channels = shape[-1], shape[0]
        self.add_module(name.rpartition(".")[0] or "part", part)


@pytest.mark.parametrize(
    ("name", "shape", "kind", "role"),
    [
        ("cls_token", (1, 1, 0), "ViT", "position_embedding"),
        ("pos_embedding", (1, 17, 0), "ViT", "position_embedding"),
        ("positional_embedding", (16, 0), "CLIP", "position_embedding"),
        ("class_embedding", (0,), "VisionTransformer", "position_embedding"),
        ("cls_embedding.weight", (0,), "_CLSEmbedding", "position_embedding"),
        ("relative_position_bias_table", (49, 0), "WindowAttention", "position_embedding"),
        ("latents", (8, 0), "Perceiver", "position_embedding"),
        ("g", (1, 0, 1, 1), "RMSNorm", "norm"),
        ("b", (0,), "LayerNorm", "norm"),
        ("gamma", (0,), "LayerScale", "norm"),
        ("layer_scale", (0, 1, 1), "CNBlock", "norm"),
        ("gamma_1", (0,), "Block", "norm"),
        ("beta", (0,), "Scale", "bias"),
        ("bias", (1, 0, 1), "Conv", "bias"),
        ("weight", (0, 3), "Linear", "token_embedding"),
        ("weight", (3, 0), "Linear", "readout"),
        ("unembed.W_U", (0, 7), "Unembed", None),
        ("lm_head_token", (7, 0), "Head", None),
        ("att", (1, 0, 8), "GATConv", None),
        ("compose", (5, 0), "Part", None),
    ],
)
def test_a_name_shows_the_role_of_a_class_s_own_parameter(name, shape, kind, role):
    def build(width):
        module = Named(name, tuple(size or width for size in shape), kind)
        return nn.ModuleDict({"inner": nn.Linear(width, width), "own": module})

    if role is None:
        with pytest.raises(
            ConfigError, match=rf"role of parameter 'own\.\S+' of {kind}, .* is not known: one axis"
        ):
            roles(build)
    else:
        assert [r for n, r in roles(build).items() if n.startswith("own")] == [role]


def test_a_module_that_reads_values_while_it_is_built_is_built_with_values():
    class Reads(nn.Linear):
        def __init__(self, width: int) -> None:
            super().__init__(width, width)
            assert float(self.weight.detach().abs().max()) > 0

    assert roles(Reads)["weight"] == "hidden"
