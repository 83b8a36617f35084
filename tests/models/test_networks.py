"""All networks: stock in float64 to rounding, and exports that need none of our code."""

import pytest
import torch
import transformers as hf
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mup_tpu.config import ModelConfig, Trial
from mup_tpu.devices import get_device
from mup_tpu.models import Forms, architecture_of, declare, forward_factors
from mup_tpu.models.architectures import mlp_width
from mup_tpu.models.networks import export_stock, folded
from mup_tpu.training import schedule_factor
from mup_tpu.training.pack import Pack

VOCAB, T = 40, 16


def llama(**changes) -> Trial:
    """A trial of Llama, twice as wide as its base unless it says otherwise."""
    usual = {"width": 64, "base_width": 32, "head_size": 8, "depth": 2, "init_std": 0.05}
    return Trial().replace(**({"architecture": "llama"} | usual | changes))


def moe(**changes) -> Trial:
    """A trial of a mixture of experts."""
    return llama(**({"architecture": "moe", "num_experts": 4} | changes))


def gpt2(**changes) -> Trial:
    return llama(**({"architecture": "gpt2", "head_size": 16} | changes))


TRIALS = [
    gpt2(alpha_in=1.7, alpha_out=0.6, alpha_attn=1.3),
    gpt2(width=128, growing_dimension="head_size", tied=False, alpha_in=0.5, alpha_attn=0.8),
    gpt2(width=96, head_size=8, parametrization="sp", alpha_out=3.0),
    gpt2(depth=4, base_depth=1, parametrization="completep", alpha_in=1.2),
    gpt2(depth=4, base_depth=1, parametrization="completedp", tied=False),
    llama(alpha_in=1.7, alpha_out=0.6, alpha_attn=1.3),
    llama(growing_dimension="head_size", alpha_in=0.5, query_group_size=4),
    llama(tied=False, qk_norm=True, alpha_in=2.0, alpha_attn=0.8),
    llama(width=96, growing_dimension="head_size", qk_norm=True, query_group_size=2, alpha_attn=1.5),
    llama(parametrization="sp", alpha_out=3.0, query_group_size=2),
    llama(depth=4, base_depth=1, parametrization="completep", qk_norm=True, alpha_in=1.2),
    llama(depth=4, base_depth=1, parametrization="completedp", tied=False),
    moe(alpha_in=1.7, alpha_out=0.6, balance_loss=0.3),
    moe(num_experts=6, experts_per_token=3, shared_experts=2, expert_granularity=8, tied=False),
    moe(qk_norm=True, query_group_size=2, experts_per_token=1, alpha_attn=0.8, balance_loss=0.0),
    moe(depth=3, base_depth=1, parametrization="completep", num_experts=3, shared_experts=1),
]
STOCK = {
    ("gpt2", False, 0): "GPT2LMHeadModel",
    ("llama", False, 0): "Llama", ("llama", True, 0): "Qwen3", ("moe", False, 0): "Mixtral",
    ("moe", True, 0): "Qwen3Moe", ("moe", False, 1): "Qwen2Moe", ("moe", False, 2): "Qwen2Moe",
}  # fmt: skip
"""Stock class by architecture, QK norms and shared experts."""


def stock_name(trial: Trial) -> str:
    m = trial.model
    return STOCK[m.architecture, m.qk_norm, m.shared_experts]


ONE_OF_EACH = [*{stock_name(trial): trial for trial in reversed(TRIALS)}.values()]
"""A trial for each stock class; among them are all factors, and grouped heads."""


class Unrounded(TorchFunctionMode):
    """transformers' norms and routers go through float32 whatever comes in; here float64 stays as it is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float or func is torch.Tensor.to and args[1:] == (torch.float32,):
                return args[0]
            if func is functional.softmax and kwargs.get("dtype") == torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def weights(trial: Trial) -> dict[str, torch.Tensor]:
    """Random float64 weights; gains are off 1, so that a factor folded wrongly shows."""
    generator = torch.Generator().manual_seed(1)
    parameters = declare(trial.model, VOCAB, T).parameters
    return {
        name: (1.0 + 0.3 * draw if p.role == "norm" else 0.3 * draw).requires_grad_()
        for name, p in parameters.items()
        for draw in [torch.randn(p.shape, generator=generator, dtype=torch.float64)]
    }


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, T + 1), generator=torch.Generator().manual_seed(0))


def cross_entropy(logits_BTV: torch.Tensor, tokens_BT1: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT1[:, 1:].flatten())


def stock_outcome(trial: Trial, model: torch.nn.Module, tokens_BT1) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and training loss of a stock class; transformers' balance loss, of each layer and sequence."""
    m = trial.model
    with Unrounded():
        if m.architecture != "moe":
            logits = model(tokens_BT1[:, :-1]).logits
            return logits, cross_entropy(logits, tokens_BT1)
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        found = model(tokens_BT1[:, :-1], output_router_logits=True)
        balance = [
            load_balancing_loss_func((of_sequence,), m.num_experts, m.experts_per_token)
            for of_layer in found.router_logits
            for of_sequence in of_layer.unflatten(0, (len(tokens_BT1), -1))
        ]
        loss = cross_entropy(found.logits, tokens_BT1)
        return found.logits, loss + m.balance_loss * torch.stack(balance).mean()


def outcome(trial: Trial, parameters: dict, **forms) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Logits, training loss and gradients of our network."""
    network = architecture_of(trial.model).network(trial.model, VOCAB, T, Forms(**forms))
    buffers = {n: torch.tensor(v, dtype=torch.float64) for n, v in forward_factors(trial).items()}
    added: list[torch.Tensor] = []
    logits = functional_call(network, parameters | buffers, (tokens()[:, :-1], added), tie_weights=True)
    loss = cross_entropy(logits, tokens()) + sum(added)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return logits, loss, dict(zip(parameters, gradients, strict=True))


def stock(trial: Trial, parameters: dict) -> torch.nn.Module:
    """The class of transformers with these weights, in their precision."""
    model = (
        architecture_of(trial.model).stock(trial.model, VOCAB, T).to(next(iter(parameters.values())).dtype)
    )
    if trial.model.architecture == "moe":
        model.set_experts_implementation("eager")  # grouped products take no float64
    model.load_state_dict(parameters, strict=False)
    model.tie_weights()
    return model


def ids(trial: Trial) -> str:
    m = trial.model
    named = (m.architecture, m.parametrization, m.growing_dimension, f"group{m.query_group_size}")
    own = [] if m.architecture != "moe" else [f"{m.experts_per_token}of{m.num_experts}and{m.shared_experts}"]
    return "-".join([*named, *own, *(["qk"] if m.qk_norm else []), *(["tied"] if m.tied else [])])


@pytest.mark.parametrize("trial", TRIALS, ids=ids)
def test_logits_loss_and_gradients_are_those_of_the_stock_class_with_folded_factors(trial):
    parameters = weights(trial)
    logits, loss, gradients = outcome(trial, parameters)
    model = stock(trial, folded(trial, parameters))
    name = stock_name(trial)
    assert type(model).__name__ == (name if name == "GPT2LMHeadModel" else f"{name}ForCausalLM")
    theirs, their_loss = stock_outcome(trial, model, tokens())
    their_loss.backward()
    torch.testing.assert_close(logits, theirs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loss, their_loss, rtol=1e-9, atol=1e-9)
    named = dict(model.named_parameters())
    assert named.keys() == gradients.keys()
    factors = folded(trial, {name: torch.ones_like(p) for name, p in parameters.items()})
    for name, gradient in gradients.items():
        expected = named[name].grad * factors[name]  # the chain rule through the fold
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-10, msg=name)


STACKED = [
    {"attention": "matmul"}, {"attention": "recomputed", "one_pass_norms": True, "vmapped": True},
]  # fmt: skip


@pytest.mark.parametrize(
    ("trial", "forms"),
    [
        *((trial, forms) for trial in ONE_OF_EACH for forms in STACKED),
        *((trial, {"gathered": True}) for trial in TRIALS if trial.model.architecture == "moe"),
    ],
    ids=lambda of: ids(of) if isinstance(of, Trial) else str(of),
)
def test_every_form_is_the_same_function_with_the_same_gradients(trial, forms):
    parameters = weights(trial)
    for found, expected in zip(outcome(trial, parameters, **forms), outcome(trial, parameters), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("trial", ONE_OF_EACH, ids=stock_name)
def test_exported_checkpoint_has_our_logits_in_a_class_of_transformers(trial, tmp_path):
    """`tests/cli/test_train.py` loads exports in a process without mup_tpu."""
    export_stock(trial, weights(trial), VOCAB, T, 0, tmp_path)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1, "others can read some files only"
    assert type(model).__module__.startswith("transformers.models.")
    assert "auto_map" not in model.config.to_dict(), "code of its own"
    theirs = model(tokens()[:, :-1]).logits.detach()
    ours = outcome(trial, weights(trial))[0].float()
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


def module_of(name: str, parameter: torch.Tensor) -> str:
    """By the names of transformers' GPT-2 and Llama."""
    if parameter.dim() == 1:
        return "norm"
    if "lm_head" in name:
        return "readout"
    return "embedding" if any(part in name for part in ("wte", "wpe", "embed_tokens")) else "hidden"


def train_plainly(trial: Trial, batches: list[torch.Tensor]) -> tuple[torch.nn.Module, list[float]]:
    """The stock class, torch.optim and nothing of ours but the starting weights; valid at the base width.

    Returns losses without the balance loss, as we report them.
    """
    model = stock(trial, Pack([trial], VOCAB, get_device("cpu")).member_parameters(0))
    o, precision = trial.optimizer, trial.train.precision
    groups = [
        {"params": [p], "weight_decay": o.weight_decay if p.dim() > 1 else 0.0,
         "factor": o.module_lr_factor if o.module in ("all", module_of(name, p)) else 1.0}
        for name, p in model.named_parameters()
    ]  # fmt: skip
    if o.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.eps)
    else:
        optimizer = torch.optim.SGD(groups, lr=o.learning_rate, momentum=o.momentum)
    losses = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = group["factor"] * o.learning_rate * schedule_factor(trial.train, step)
        with torch.autocast("cpu", torch.bfloat16, precision == "bf16"):
            logits, loss = stock_outcome(trial, model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(cross_entropy(logits.to(next(model.parameters()).dtype), batch).item())
    return model, losses


TIED, UNTIED = {"architecture": "gpt2"}, {"architecture": "gpt2", "tied": False}
QK, GROUPED = {"qk_norm": True, "tied": False}, {"query_group_size": 2}
MIXTURE = {"architecture": "moe", "num_experts": 4, "shared_experts": 1, "balance_loss": 0.1}
WITHIN = {"float64": 1e-9, "float32": 1e-4, "bf16": 2e-3}
"""In bf16 both round each product; they differ in the rounding of GELU and of attention's weights alone."""


@pytest.mark.parametrize(
    ("shape", "precision", "optimizer", "execution"),
    [
        (TIED, "float64", "adamw", "loop"),
        (TIED, "float64", "sgd", "vmap"),
        (UNTIED, "float64", "sgd", "loop"),
        (UNTIED, "float64", "adamw", "vmap"),
        (UNTIED, "float32", "adamw", "vmap"),
        (TIED, "float32", "sgd", "loop"),
        (TIED, "bf16", "sgd", "loop"),
        (QK, "float64", "adamw", "loop"),
        (QK, "float64", "sgd", "vmap"),
        (GROUPED, "float64", "adamw", "vmap"),
        (MIXTURE, "float64", "adamw", "loop"),
        (MIXTURE, "float64", "sgd", "vmap"),
        (UNTIED | {"module": "embedding", "module_lr_factor": 4.0}, "float64", "adamw", "vmap"),
        (UNTIED | {"module": "hidden", "module_lr_factor": 0.25}, "float64", "adamw", "vmap"),
        (UNTIED | {"module": "readout", "module_lr_factor": 4.0}, "float64", "sgd", "loop"),
        (UNTIED | {"module": "norm", "module_lr_factor": 4.0}, "float64", "adamw", "vmap"),
        (TIED | {"module": "all", "module_lr_factor": 0.5}, "float64", "adamw", "loop"),
    ],
    ids=str,
)
def test_member_equals_the_stock_class_with_torch_optim(shape, precision, optimizer, execution):
    rates = {"adamw": {"learning_rate": 0.01}, "sgd": {"learning_rate": 0.3, "momentum": 0.9}}[optimizer]
    trial = llama(
        width=32, sequence_length=T, batch_size=4, steps=6, warmup=0.2, precision=precision,
        optimizer=optimizer, weight_decay=0.1, grad_clip=0.5, **rates, **shape,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randint(0, VOCAB, (4, T + 1), generator=generator) for _ in range(6)]
    pack = Pack([trial.replace(learning_rate=0.003, seed=5), trial], VOCAB, get_device("cpu"), execution)
    losses = [float(pack.step(batch)[1]) for batch in batches]
    model, expected = train_plainly(trial, batches)
    assert losses == pytest.approx(expected, rel=WITHIN[precision])
    if precision == "float64":
        theirs = dict(model.named_parameters())
        for name, p in pack.member_parameters(1).items():
            torch.testing.assert_close(p.detach(), theirs[name].detach(), rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("trial", TRIALS, ids=ids)
def test_the_network_has_the_declared_parameters_in_the_declared_order(trial):
    network = architecture_of(trial.model).network(trial.model, VOCAB, T)
    declared = declare(trial.model, VOCAB, T)
    assert [(n, tuple(p.shape)) for n, p in network.named_parameters()] == list(declared.shapes.items())
    for module in declared.blocks:
        network.get_submodule(module)
    assert {name for name, _ in network.named_buffers()} == forward_factors(trial).keys()


def test_the_mlp_is_as_wide_as_llama_s_and_grows_as_the_model_does():
    """transformers' LlamaConfig has 11008 at 4096, that of 65B 22016 at 8192: ⌈⌊8/3·D⌋/256⌉·256."""
    assert mlp_width(4096) == 11008 and mlp_width(8192) == 22016
    assert [mlp_width(width) / width for width in (32, 64, 96, 128, 1024)] == [43 / 16] * 5


def test_parameter_counts_match_the_closed_form():
    """A layer's matrices: 2·D² of queries and output, 2·D²/group of keys and values, 3·D·I of the MLP."""
    config = ModelConfig("llama", width=64, base_width=32, head_size=8, depth=3, query_group_size=4)
    declared = declare(config, VOCAB, T)
    matrices = 2 * 64**2 + 2 * 64 * 16 + 3 * 64 * 172
    assert declared.non_embedding == 3 * (matrices + 2 * 64) + 64
    assert declared.total - declared.non_embedding == VOCAB * 64
    assert declared.flops_per_token(VOCAB, T) == 6 * (3 * matrices + VOCAB * 64) + 12 * 3 * 64 * T
