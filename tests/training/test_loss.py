"""The loss of a member: cross-entropy, and terms that a network adds to its gradient."""

import torch
from torch import nn
from torch.func import grad_and_value, vmap
from torch.nn import functional

from mup_tpu.training.loss import member_loss

VOCAB = 7


class Penalised(nn.Module):
    """Logits of each token by itself, with the squared weights as an added loss."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(VOCAB, VOCAB))

    def forward(self, tokens_BT, added=None):
        if added is not None:
            added.append(3 * self.table.square().sum())
        return self.table[tokens_BT]


def test_terms_that_a_network_adds_are_in_the_gradient_and_not_in_the_value():
    generator = torch.Generator().manual_seed(0)
    tables = torch.randn(2, VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, VOCAB, (3, 6), generator=generator)
    loss = member_loss(Penalised(), VOCAB, "float64", torch.device("cpu"))
    gradients, values = vmap(grad_and_value(loss), in_dims=(0, None, None))({"table": tables}, {}, tokens)
    for table, gradient, value in zip(tables, gradients["table"], values, strict=True):
        alone = table.clone().requires_grad_()
        plain = functional.cross_entropy(alone[tokens[:, :-1]].flatten(0, 1), tokens[:, 1:].flatten())
        torch.testing.assert_close(value, plain.detach(), rtol=1e-12, atol=0.0)
        (expected,) = torch.autograd.grad(plain + 3 * alone.square().sum(), alone)
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
