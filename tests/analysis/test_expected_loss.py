"""Losses at scales that were not run: their intervals hold what came out, in stored sweeps and in worlds."""

import itertools

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from mup_tpu.analysis.scaling_law import _ALPHA, _BEND, _SCATTER, expected_loss


@pytest.mark.parametrize(
    ("losses", "scales", "scale", "came"),
    [
        # results/horizon_transfer without a token rule: a law through the five says 1.231 to 1.246.
        ([2.2937, 1.9313, 1.6648, 1.4760, 1.3369], [250, 500, 1000, 2000, 4000], 8000, 1.261),
        # Step Law, 215 M parameters on 4 billion tokens: the loss turns along the batch size.
        ([2.6385, 2.6229, 2.6258, 2.6406], [32, 64, 128, 256], 512, 2.6836),
        ([2.6385, 2.6229, 2.6258, 2.6406], [32, 64, 128, 256], 1024, 2.7502),
    ],
)
def test_loss_that_came_out_lies_inside(losses, scales, scale, came):
    found = expected_loss(np.array(losses), np.array(scales), scale)
    assert found.holds(came)
    assert found.high - found.low < 0.16 * came


def test_interval_has_its_share_by_joint_densities():
    """The densities of all losses with one more, over those of the known alone, integrated over its value."""
    losses, octaves = np.array([2.116, 2.036, 1.976, 1.946]), np.array([-2.6, -1.6, -0.6, 0.0, 1.0])
    y = losses / losses[-1] - 1
    fine = np.linspace(-0.25, 0.15, 501)
    density = np.zeros(len(fine))

    def wandered(a, b):
        return (
            0.0
            if a * b <= 0
            else min(abs(a), abs(b)) ** 2 * (3 * max(abs(a), abs(b)) - min(abs(a), abs(b))) / 6
        )

    wander = np.array([[wandered(a, b) for b in octaves] for a in octaves])
    for alpha, bend, scatter in itertools.product(_ALPHA, _BEND, _SCATTER):
        prior = np.exp(
            -0.5 * ((alpha - 0.2) / 0.28) ** 2
            - 0.5 * (np.log(bend / 0.015) / 0.8) ** 2
            - 0.5 * np.log(scatter / 0.0015) ** 2
        )
        h = (1 - np.exp(-alpha * octaves)) / alpha
        covariance = 1 + 0.09 * np.outer(h, h) + bend**2 * wander + scatter**2 * np.eye(5)
        points = np.column_stack([np.tile(y, (len(fine), 1)), fine])
        density += prior * multivariate_normal(np.zeros(5), covariance).pdf(points)
    below = (np.cumsum(density) - density / 2) / density.sum()
    found = expected_loss(losses, 512 * 2 ** octaves[:-1], 1024)
    shares = np.interp(np.array([found.low, found.loss, found.high]) / losses[-1] - 1, fine, below)
    assert shares == pytest.approx([0.025, 0.5, 0.975], abs=0.015)


def test_unit_of_the_loss_does_not_matter():
    losses, scales = np.array([2.38, 2.35, 2.34]), np.array([64, 128, 256])
    nats, bits = expected_loss(losses, scales, 512), expected_loss(losses / np.log(2), scales, 512)
    assert bits.low * np.log(2) == pytest.approx(nats.low)


def test_laws_that_bend_lie_inside_two_octaves_ahead():
    """Worlds of another generator: E + A·N^-α whose exponent changes by 20 % beyond the sweep, and noise."""
    generator, inside, scales = np.random.default_rng(0), 0, 2.0 ** np.arange(6)
    for _ in range(100):
        alpha, share = generator.uniform(0.2, 0.6), generator.uniform(0.1, 0.5)
        later = alpha * generator.uniform(0.8, 1.2)
        term = np.r_[scales[:4] ** -alpha, scales[3] ** -alpha * (scales[4:] / scales[3]) ** -later]
        losses = (2 + 2 * share * term) * np.exp(0.003 * generator.standard_normal(6))
        inside += expected_loss(losses[:4], scales[:4], scales[5]).holds(losses[5])
    assert inside >= 92


@pytest.mark.parametrize(
    ("losses", "scale", "reason"),
    [
        ([2.4, 2.3], 8, "few optima"),
        ([2.4, 2.3, -1.0], 16, "loss not above 0"),
        ([2.4, 2.0, 1.7], 2e9, "loss interval too wide"),
    ],
)
def test_losses_from_which_none_is_predicted(losses, scale, reason):
    assert expected_loss(np.array(losses), 2.0 ** np.arange(len(losses)), scale).code == reason
