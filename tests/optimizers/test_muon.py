"""Muon against torch.optim.Muon bit for bit, and against its definition by singular values in float64.

Shapes: K members, R rows, C columns.
"""

import math

import pytest
import torch

from mup_tpu.config import OptimizerConfig, Trial
from mup_tpu.errors import ConfigError
from mup_tpu.models import declare, parameter_scalings
from mup_tpu.optimizers import UPDATE_RULES, Group, StackedParameter, constants
from mup_tpu.optimizers.muon import orthogonalised, scale_of
from mup_tpu.rules.parametrization import Parameter, Slice
from mup_tpu.training.members import state_slots
from mup_tpu.training.record import applied

MUON = UPDATE_RULES["muon"]
LR, DECAY = 0.02, 0.1
SHAPES = [(24, 24), (16, 64), (64, 16)]
SCALES = ["spectral", "match_rms_adamw"]
MATCHED = {"muon_scale": "match_rms_adamw"}
VOCAB = 48


def by_singular_values(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """What Newton-Schulz steps do, by definition: each singular value, over the norm of all, goes through the
    polynomial; the singular vectors stay."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


def gradients(shape: tuple[int, ...], count: int, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(count)]


def trained(
    parameter: Parameter, config: OptimizerConfig, given: list[torch.Tensor],
    start: torch.Tensor | None = None, factor: float = 1.0, decay: float = DECAY,
) -> torch.Tensor:  # fmt: skip
    """A parameter after an update by each gradient; by default it starts at the first one's numbers."""
    leaf = (given[0] if start is None else start).clone().requires_grad_()
    buffers = {"momentum_buffer": [torch.zeros_like(leaf)]}
    group = Group([parameter], [leaf], buffers, [torch.tensor(0.0)], factor, decay, 0)
    shared = constants(Trial(optimizer=config), [MUON])["muon"]
    for gradient in given:
        leaf.grad = gradient.clone()
        with torch.no_grad():
            MUON.update_member(group, shared, LR)
    return leaf.detach()


def torchs(given: list[torch.Tensor], **options) -> torch.Tensor:
    leaf = given[0].clone().contiguous().requires_grad_()
    optimizer = torch.optim.Muon([leaf], lr=LR, weight_decay=DECAY, **options)
    for gradient in given:
        leaf.grad = gradient.clone().contiguous()
        optimizer.step()
    return leaf.detach()


@pytest.mark.parametrize(
    ("shape", "ours", "theirs"),
    [
        *((shape, {"muon_momentum": 0.9, "muon_nesterov": nesterov, "newton_schulz_steps": 4, **MATCHED},
           {"momentum": 0.9, "nesterov": nesterov, "ns_steps": 4, "adjust_lr_fn": "match_rms_adamw"})
          for shape in SHAPES for nesterov in (True, False)),
        ((64, 16), {}, {}),
    ],
)  # fmt: skip
def test_in_bfloat16_a_member_is_torch_optim_muon_bit_for_bit(shape, ours, theirs):
    """Also by the defaults: the spectral scale is torch's "original" where outputs are as many as inputs or
    more, for matrices that it takes to be stored (out, in)."""
    config = OptimizerConfig(optimizer="muon", newton_schulz_dtype="bfloat16", **ours)
    given = gradients(shape, 6)
    found = trained(Parameter(shape, "hidden", fan_in=shape[1], fan_out=shape[0]), config, given)
    assert torch.equal(found, torchs(given, **theirs))


@pytest.mark.parametrize("steps", [1, 5, 9])
@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_is_its_polynomial_of_the_singular_values(shape, steps):
    """Alone, and in one batch with its transpose and others."""
    matrices = gradients(shape, 3, torch.float64)
    stack, turned, alone = orthogonalised(
        [torch.stack(matrices[:2]), matrices[0].T, matrices[2]], steps, "float32"
    )
    for ours, matrix in zip(
        (*stack, turned, alone), (*matrices[:2], matrices[0].T, matrices[2]), strict=True
    ):
        torch.testing.assert_close(ours, by_singular_values(matrix, steps), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_above_a_hundredth_of_the_norm_come_near_one(shape, dtype):
    (matrix,) = gradients(shape, 1)
    u, before, vh = torch.linalg.svd(matrix, full_matrices=False)
    found = torch.diag(u.T @ orthogonalised([matrix], 5, dtype)[0].float() @ vh.T)
    large = found[before > 0.01 * before.norm()]
    assert len(large) > len(found) - 2
    assert large.min() > 0.6 and large.max() < 1.3


def test_a_gradient_of_zeros_changes_nothing_and_nan_stays_in_its_matrix():
    (matrix,) = gradients((8, 8), 1)
    zeros, nan = torch.zeros(8, 8), torch.full((8, 8), math.nan)
    found = orthogonalised([zeros, nan, matrix], 5, "float32")
    assert torch.equal(found[0], zeros) and found[1].isnan().all()
    assert torch.equal(found[2], orthogonalised([zeros, zeros, matrix], 5, "float32")[2])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "slices",
    [
        {},
        {"a": Slice(0, 12), "b": Slice(12, 24), "c": Slice(24, 36)},
        {"a": Slice(0, 24), "b": Slice(24, 36)},
    ],
    ids=["whole", "three alike", "two unlike"],
)
def test_a_stack_is_its_members_one_by_one(slices, dtype, scale):
    parameter = Parameter((12, 36), "hidden", 12, 36, slices=slices)
    config = OptimizerConfig(optimizer="muon", muon_scale=scale, newton_schulz_dtype=dtype)
    shared = constants(Trial(optimizer=config), [MUON])["muon"]
    given = gradients((3, 12, 36), 4, torch.float64)
    ours, slots = given[0].clone(), {"momentum_buffer": torch.zeros_like(given[0])}
    factors_K11 = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64).view(3, 1, 1)
    factors = factors_K11, torch.full_like(factors_K11, DECAY), 0 * factors_K11
    for gradient in given:
        rate = torch.full_like(factors_K11, LR)
        MUON.update_stack(StackedParameter(parameter, ours, gradient, slots, (rate,), *factors), shared)
    for k, factor in enumerate(factors_K11.flatten().tolist()):
        alone = trained(parameter, config, [gradient[k] for gradient in given], factor=factor)
        # A product of many matrices may sum in another order, which in bfloat16 is half a per cent.
        tolerance = 1e-13 if dtype == "float32" else 0.01 * LR * len(given)
        torch.testing.assert_close(ours[k], alone, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("parameter", "columns", "spectral"),
    [
        (Parameter((32, 128), "hidden", fan_in=32, fan_out=128), 128, 2.0),  # as GPT-2 stores it
        (Parameter((128, 32), "hidden", fan_in=32, fan_out=128), 32, 2.0),  # as torch.nn.Linear does
        (Parameter((128, 32), "hidden", fan_in=128, fan_out=32), 32, 0.5),
        (Parameter((32, 128), "hidden", fan_in=128, fan_out=32), 128, 0.5),
        (Parameter((32, 96), "hidden", fan_in=32, fan_out=96), 32, 1.0),  # a third of queries, keys, values
        (Parameter((32, 32), "hidden", fan_in=32, fan_out=32), 32, 1.0),
        (Parameter((32, 64), "hidden", fan_in=32, fan_out=64), 8, 0.5),  # grouped keys of a fused matrix
    ],
)
def test_scales_are_of_outputs_over_inputs_however_a_matrix_is_stored(parameter, columns, spectral):
    assert scale_of(parameter, columns, "spectral") == pytest.approx(spectral)
    largest = max(columns, parameter.shape[0])
    assert scale_of(parameter, columns, "match_rms_adamw") == pytest.approx(0.2 * largest**0.5)


def update_norms(width: int, scale: str, parametrization: str) -> dict[str, float]:
    """Spectral norm of one update of each hidden matrix (slice by slice), over √(out/in)."""
    trial = Trial().replace(
        optimizer="muon", muon_scale=scale, parametrization=parametrization, width=width, base_width=32,
        head_size=16, depth=1, learning_rate=LR,
    )  # fmt: skip
    scalings, found = parameter_scalings(trial, 16, 8), {}
    for name, parameter in declare(trial.model, 16, 8).parameters.items():
        if not MUON.takes(parameter):
            continue
        start, factor = torch.zeros(parameter.shape), scalings[name].learning_rate
        step = trained(parameter, trial.optimizer, gradients(parameter.shape, 1), start, factor, 0.0)
        slices = parameter.slices or {"": Slice(0, parameter.shape[-1])}
        for part, its in slices.items():
            matrix = step[:, its.start : its.stop]
            norm = torch.linalg.matrix_norm(matrix, 2) / LR / (matrix.shape[1] / matrix.shape[0]) ** 0.5
            found[f"{name} {part}"] = float(norm)
    return found


@pytest.mark.parametrize("scale", SCALES)
def test_in_mup_updates_keep_to_the_spectral_condition_at_every_width(scale):
    """Yang et al. 2023, Condition 1: ‖ΔW‖ ∝ √(out/in). Newton-Schulz leaves norms within ±20 %."""
    narrow, wide = (update_norms(width, scale, "mup") for width in (32, 256))
    assert len(narrow) == 6
    for name, norm in narrow.items():
        assert wide[name] == pytest.approx(norm, rel=0.25), name
        assert scale != "spectral" or norm == pytest.approx(1, rel=0.25)


def test_in_sp_what_is_matched_to_adamw_outgrows_it_by_the_square_root_of_width():
    narrow, wide = (update_norms(width, "match_rms_adamw", "sp") for width in (32, 288))
    for name, norm in narrow.items():
        assert wide[name] / norm == pytest.approx(3, rel=0.25), name


MUON_TRIAL = Trial().replace(
    optimizer="muon", width=32, base_width=32, head_size=16, learning_rate=0.03, weight_decay=0.1
)


def test_state_is_one_buffer_a_hidden_matrix_and_two_of_everything_else():
    trial = MUON_TRIAL
    parameters = declare(trial.model, VOCAB, 24).parameters
    hidden = [n for n, p in parameters.items() if p.role == "hidden"]
    rest = [n for n in parameters if n not in hidden]
    assert state_slots(trial, parameters) == {"momentum_buffer": hidden, "exp_avg": rest, "exp_avg_sq": rest}


def test_rows_say_what_hidden_matrices_were_trained_with():
    """Learning rate and decay with the factors of all rules; a step's shrinking, η·λ, stays the base's."""
    trial = MUON_TRIAL.replace(parametrization="mup", width=128)
    assert applied(trial, VOCAB) == pytest.approx({"applied_lr": 0.03, "applied_weight_decay": 0.1})
    matched = applied(trial.replace(muon_scale="match_rms_adamw"), VOCAB)
    assert matched == pytest.approx({"applied_lr": 0.015, "applied_weight_decay": 0.2})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"adamw_lr_ratio": 0.0}, "adamw_lr_ratio 0.0 is not allowed: it must be above 0"),
        ({"muon_momentum": 1.0}, "muon_momentum 1.0 is not allowed: it must be below 1"),
        ({"newton_schulz_steps": 0}, "newton_schulz_steps 0 is not allowed: it must be 1 or more"),
        ({"newton_schulz_steps": 100}, "newton_schulz_steps 100 is not allowed: it must be at most 99"),
        ({"newton_schulz_dtype": "bf16"}, "newton_schulz_dtype 'bf16' is not one of 'float32', 'bfloat16'"),
        ({"muon_scale": "rms"}, "muon_scale 'rms' is not one of 'spectral', 'match_rms_adamw'"),
        ({"muon_nesterov": 1}, "muon_nesterov 1 is not true or false"),
        *(
            ({"muon_scale": scale, "parametrization": "sp_embedding"}, "'sp_embedding' has no rule for optim")
            for scale in SCALES
        ),
    ],
)
def test_bad_values_are_refused_in_one_sentence(changes, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        Trial().replace(optimizer="muon", **changes)
    assert "\n" not in str(caught.value)
