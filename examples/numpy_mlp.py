"""Does the best learning rate of a two-layer network stay as it grows wider? Plain NumPy, SGD, two rules.

    python examples/numpy_mlp.py

"standard" takes one learning rate for all weights. "mup" follows Table 3 of Yang et al. 2022 (Tensor Programs
V) for SGD: with m = width / base, the first layer's rate is × m, the second's / m, and its init / √m.
"""

import sys

import numpy as np

from mup_tpu import Study, octaves


def samples(count, seed):
    """Inputs, and targets that a fixed function gives them."""
    inputs_SI = np.random.default_rng(seed).standard_normal((count, 8))
    return inputs_SI, np.sin(inputs_SI[:, :3].sum(axis=1, keepdims=True))


def train(trial, report):
    """Train a network of the trial's width; its mean squared error on held-out samples."""
    generator = np.random.default_rng(trial.seed)
    m = trial.width / trial.base if trial.rule == "mup" else 1.0
    first_IW = generator.standard_normal((8, trial.width)) / np.sqrt(8)
    second_WO = generator.standard_normal((trial.width, 1)) / np.sqrt(trial.width * m)
    inputs_SI, targets_SO = samples(2048, seed=1)
    for step in range(1, trial.steps + 1):
        batch = generator.integers(0, len(inputs_SI), 64)
        before_BW = inputs_SI[batch] @ first_IW
        active_BW = np.maximum(before_BW, 0)
        error_BO = (active_BW @ second_WO - targets_SO[batch]) / 64
        back_BW = (error_BO @ second_WO.T) * (before_BW > 0)
        first_IW = first_IW - trial.learning_rate * m * inputs_SI[batch].T @ back_BW
        second_WO = second_WO - trial.learning_rate / m * active_BW.T @ error_BO
        if step % 10 == 0:
            report(step=step, steps=trial.steps, loss=64 * np.mean(error_BO**2) * 64)
    inputs_SI, targets_SO = samples(2048, seed=2)
    return np.mean((np.maximum(inputs_SI @ first_IW, 0) @ second_WO - targets_SO) ** 2)


def study_in(folder, widths=(32, 64, 128, 256), exponents=(-9, 0)):
    """The study; a smaller one with fewer widths or learning rates."""
    return Study(
        folder,
        name="numpy_mlp",
        scale={"width": widths},
        tune={"learning_rate": octaves(*exponents)},
        compare={"rule": ["standard", "mup"]},
        seeds=2,
        settings={"steps": 300, "base": 32},
    )


if __name__ == "__main__":
    study = study_in(sys.argv[1] if len(sys.argv) > 1 else "runs/numpy_mlp")
    study.run(train)
    print(study.verdict())
