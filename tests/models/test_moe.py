"""Mixtures of experts beside what they share with Llama (test_networks.py): counts, routing, packs."""

import dataclasses

import pytest
import torch
from torch.func import functional_call

from mup_tpu.config import ModelConfig, Trial
from mup_tpu.devices import get_device
from mup_tpu.models import Forms, architecture_of, declare, sizes
from mup_tpu.training import pack_key
from mup_tpu.training.pack import Pack

VOCAB, T = 40, 16
TRIAL = Trial().replace(
    architecture="moe", width=32, base_width=32, head_size=8, num_experts=4, init_std=0.1, sequence_length=T,
    batch_size=6, steps=4, warmup=0.0, precision="float64", learning_rate=0.01,
)  # fmt: skip


def test_counts_match_the_closed_form():
    """Mixtral 8x7B has 46.7 B parameters, of which a token uses 12.9 B; both with 0.26 B of embeddings."""
    config = ModelConfig(
        "moe", width=4096, base_width=1024, head_size=128, depth=32, query_group_size=4, tied=False,
        num_experts=8, experts_per_token=2, expert_granularity=1,
    )  # fmt: skip
    # Its experts are 14336 = 3.5·D wide, ours 4·D: the difference is 8 or 2 experts' three matrices a layer.
    wider = 32 * 3 * 4096 * (4 * 4096 - 14336)
    declared = declare(config, 32_000, T)
    assert declared.non_embedding - 8 * wider == 46_702_792_704 - 2 * 32_000 * 4096
    assert declared.active - 2 * wider == 12_879_925_248 - 2 * 32_000 * 4096
    matrices = declared.active - 65 * 4096
    assert declared.flops_per_token(32_000, T) == 6 * (matrices + 32_000 * 4096) + 12 * 32 * 4096 * T


def test_rows_tell_active_from_all_parameters():
    found = sizes(TRIAL, VOCAB)
    assert (
        found["params_non_embedding"] - found["params_active"] == 2 * 2 * 3 * 32 * 32
    )  # 2 of 4 experts, 2 layers
    dense = sizes(TRIAL.replace(architecture="llama"), VOCAB)
    assert dense["params_active"] == dense["params_non_embedding"]


def mixture(trial: Trial, **forms) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A block's experts with their router, and fresh weights of them."""
    network = architecture_of(trial.model).network(trial.model, VOCAB, T, Forms(**forms))
    parameters = Pack([trial], VOCAB, get_device("cpu")).member_parameters(0)
    start = "model.layers.0.mlp."
    own = {n.removeprefix(start): p for n, p in parameters.items() if n.startswith(start)}
    return network.get_submodule("model.layers.0.mlp"), own


@pytest.mark.parametrize("forms", [{}, {"gathered": True}], ids=str)
def test_equal_experts_are_one_wherever_tokens_go(forms):
    """Weights of the chosen add up to 1."""
    module, own = mixture(TRIAL, **forms)
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        own[name] = own[name][:1].expand_as(own[name])
    x = torch.randn(2 * T, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = functional_call(module, own | {"balance.factor": torch.ones(())}, (x, T, []))
    gate, up = (x @ own["experts.gate_up_proj"][0].T).chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up) @ own["experts.down_proj"][0].T
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_balance_loss_is_least_where_all_experts_are_as_likely():
    """With probabilities of 1/E, E·Σ f·p is k, whatever is chosen; with 1 and 0, E."""
    module, own = mixture(TRIAL)
    one = torch.ones((), dtype=torch.float64)
    x = torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).expand(T, 32)
    toward_first = torch.outer(torch.tensor([1.0, 0, 0, 0], dtype=torch.float64), 100 * x[0])
    added: list[torch.Tensor] = []
    for gate in (0 * toward_first, toward_first):
        functional_call(module, own | {"gate.weight": gate, "balance.factor": one}, (x, T, added))
    assert [float(term) for term in added] == pytest.approx([2, 4])


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_parts_of_a_batch_train_as_the_whole(execution):
    """Tokens are balanced in each sequence, so that memory does not decide the result."""
    trials = [TRIAL.replace(balance_loss=0.5, seed=seed) for seed in range(2)]
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, VOCAB, (6, T + 1), generator=generator) for _ in range(4)]
    whole, parts = (
        Pack(trials, VOCAB, get_device("cpu"), execution, micro_batches=count) for count in (1, 4)
    )
    for batch in batches:
        torch.testing.assert_close(whole.step(batch), parts.step(batch), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("own", [{"experts_per_token": 1}, {"num_experts": 8}, {"expert_granularity": 8}])
def test_members_of_a_pack_have_experts_of_one_shape(own):
    assert pack_key(TRIAL) != pack_key(TRIAL.replace(**own))


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_members_of_a_pack_may_differ_in_the_weight_of_the_balance_loss(execution):
    trials = [TRIAL.replace(balance_loss=weight) for weight in (0.0, 0.5)]
    tokens = torch.randint(0, VOCAB, (6, T + 1), generator=torch.Generator().manual_seed(0))
    together = Pack(trials, VOCAB, get_device("cpu"), execution)
    alone = [Pack([trial], VOCAB, get_device("cpu"), execution) for trial in trials]
    for _ in range(4):
        found, expected = together.step(tokens), torch.cat([pack.step(tokens) for pack in alone])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert abs(found[0] - found[1]) > 1e-6, "the weight does something"


def test_fields_of_experts_do_not_change_the_name_of_other_trials():
    default = Trial()
    assert dataclasses.replace(default.model, num_experts=8) == default.model
    assert Trial().replace(architecture="llama").trial_id("x") == TRIAL.replace(
        **Trial().replace(architecture="llama").flat()
    ).trial_id("x")
