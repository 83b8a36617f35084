"""Does the best learning rate of a two-layer network stay as it grows wider? Plain NumPy, SGD, two rules.

    python examples/numpy_mlp.py

"standard" takes one learning rate for all weights, and its best one halves with each doubling of the width.
"mup" follows Table 3 of Yang et al. 2022 (Tensor Programs V) for SGD: with m = width / base, the first
layer's rate is × m, the second's / m, and its init / √m. Its best learning rate stays.
"""

import sys

import numpy as np

from mup_tpu import Study, octaves


def samples(count, seed, noise=0.0):
    """Inputs, and a function of the first of them with noise."""
    generator = np.random.default_rng(seed)
    inputs_SI = generator.standard_normal((count, 8))
    return inputs_SI, np.abs(inputs_SI[:, :1]) - 0.8 + noise * generator.standard_normal((count, 1))


def train(trial, report):
    """Train a network of the trial's width; return half its mean squared error on held-out samples."""
    generator = np.random.default_rng(trial.seed)
    m = trial.width / trial.base if trial.rule == "mup" else 1.0
    first_IW = generator.standard_normal((8, trial.width)) / np.sqrt(8)
    second_WO = generator.standard_normal((trial.width, 1)) / np.sqrt(trial.width * m)
    inputs_SI, targets_SO = samples(8192, seed=1, noise=0.5)
    held_out_SI, wanted_SO = samples(2048, seed=2)
    losses = []
    for step in range(1, trial.steps + 1):
        batch = generator.integers(0, len(inputs_SI), 16)
        before_BW = inputs_SI[batch] @ first_IW
        active_BW = np.maximum(before_BW, 0)
        error_BO = (active_BW @ second_WO - targets_SO[batch]) / len(batch)
        back_BW = (error_BO @ second_WO.T) * (before_BW > 0)
        first_IW = first_IW - trial.learning_rate * m * inputs_SI[batch].T @ back_BW
        second_WO = second_WO - trial.learning_rate / m * active_BW.T @ error_BO
        if step % 5 == 0 and step > trial.steps / 2:
            output_SO = np.maximum(held_out_SI @ first_IW, 0) @ second_WO
            losses.append(np.mean((output_SO - wanted_SO) ** 2) / 2)
            report(step=step, steps=trial.steps, loss=losses[-1])
    return np.mean(losses)  # over the second half of the steps: small batches are noisy


def study_in(folder, widths=(128, 256, 512, 1024), exponents=(-8.5, -2.5)):
    """The study; a smaller one with fewer widths or learning rates."""
    return Study(
        folder,
        name="numpy_mlp",
        scale={"width": widths},
        tune={"learning_rate": octaves(*exponents, step=0.5)},
        compare={"rule": ["standard", "mup"]},
        seeds=2,
        settings={"steps": 200, "base": 64},
    )


if __name__ == "__main__":
    study = study_in(sys.argv[1] if len(sys.argv) > 1 else "runs/numpy_mlp")
    study.run(train)
    print(study.verdict())
