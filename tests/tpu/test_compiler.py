"""Packs as torch_xla hands them over, compiled by the TPUs' own compiler on a machine without a TPU."""

import functools
from collections import Counter
from dataclasses import replace

import psutil
import pytest

from mup_tpu.cli import main
from mup_tpu.config import Trial
from mup_tpu.devices.peak import tpu_type
from mup_tpu.errors import ConfigError
from mup_tpu.models import declare
from mup_tpu.tpu import compiler
from mup_tpu.tpu.compiler import CASES, Compiled, compile_program, donated_parameters, faults, trace_pack
from mup_tpu.training.members import state_slots

# The wide one takes the compiler a minute as it is; its sequences stay long enough for attention in blocks.
SHORTER = {"width": 128, "sequence_length": 512, "batch_size": 2}
NARROW = tuple(
    replace(case, trial=case.trial.replace(**SHORTER)) if "wide" in case.name else case for case in CASES
)
# One layer each: another would be compiled as the first was, as it is by `doctor` below in the first case.
APART, SPLIT, LONG, MUON = (replace(case, trial=case.trial.replace(depth=1)) for case in NARROW)


@pytest.fixture(scope="module")
def handed_over():
    """What torch_xla hands over for so many devices of any kind, made once."""

    @functools.cache
    def handed_over(name: str, devices: int) -> str:
        (case,) = (case for case in (APART, SPLIT, LONG, MUON) if case.name == name)
        trials = [case.trial.replace(seed=seed) for seed in range(case.members(devices))]
        before = psutil.Process().children()
        program = trace_pack(trials, 4096, devices, case.mesh.format(n=devices))
        assert psutil.Process().children() == before, "the process that wrote it has ended"
        return program

    return handed_over


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "case"),
    [  # v4-16: two hosts
        ("v4-8", APART), ("v4-8", LONG), ("v4-8", MUON), ("v4-16", APART), ("v5litepod-4", SPLIT),
        ("v6e-4", APART), ("v2-8", SPLIT), ("v3-8", APART), ("v5p-8", SPLIT),
    ],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_the_tpu_s_compiler_takes_packs_as_they_are_promised(handed_over, kind, case, with_torch_xla):
    chips = tpu_type(kind)
    compiled = compile_program(handed_over(case.name, chips.devices), chips)
    apart = case.members(chips.devices) > 1
    assert compiled.collectives == (Counter() if apart else Counter({"all-reduce": 1}))
    gib = {"v2": 8, "v3": 16, "v4": 32, "v5litepod": 16, "v5p": 95, "v6e": 32}[kind.split("-")[0]]
    assert compiled.needed_bytes < gib * 2**30
    # Parameters and optimizer state of what a device has; the compiler stores the last two axes in tiles.
    parameters = declare(case.trial.model, 4096, case.trial.data.sequence_length).parameters
    slots = state_slots(case.trial, parameters).values()
    numbers = sum(parameters[name].size for names in (parameters, *slots) for name in names)
    members = case.members(chips.devices) // chips.devices if apart else 1
    state = members * numbers * 4
    assert state <= compiled.alias_bytes <= 1.2 * state
    assert compiled.output_bytes - compiled.alias_bytes < 2**16
    assert list(faults(case, compiled, chips)) == []


GIB = 2**30
GATHERS = "\n%a = f32[4] all-gather-start(%b)\n"


@pytest.mark.parametrize(
    ("case", "kind", "compiled", "expected"),
    [
        (APART, "v4-8", (2**30, 2**20, 40 * GIB, 2**19, GATHERS),
         ["passes data between chips by 1 all-gather, not by nothing",
          "needs 41.0 GiB, and a device of v4-8 has 32 GiB",
          "copies 524288 of 1048576 bytes of results, instead of updating in place"]),
        (SPLIT, "v4-8", (0, 0, 0, 0, ""), ["passes data between chips by nothing, not by 1 all-reduce"]),
        # Results of the size of losses may be copied: 64 KiB, and 2 % of all results.
        (APART, "v4-8", (0, 66_000, 0, 0, ""), []),
        (APART, "v4-8", (0, 68_000, 0, 0, ""),
         ["copies 68000 of 68000 bytes of results, instead of updating in place"]),
        # 13 GiB on a chip of 16: with the outputs counted again they would be 23. One device passes nothing.
        (SPLIT, "v5litepod-1", (10 * GIB, 10 * GIB, 3 * GIB, 10 * GIB, ""), []),
    ],
)  # fmt: skip
def test_what_is_not_as_promised_is_said(case, kind, compiled, expected):
    """Bytes of arguments, outputs and temporaries, those written over, and the program."""
    assert list(faults(case, Compiled(1.0, *compiled), tpu_type(kind))) == expected


def test_donated_parameters_are_read_from_the_header():
    header = "HloModule loop, buffer_donor={ (3, {}), (12, {}) }, entry_computation_layout={(s32[])->s32[]}\n"
    assert donated_parameters(header + "body") == {3, 12}
    assert donated_parameters("HloModule loop\nbuffer_donor={ (1, {}) }") == set()


def test_a_type_that_is_not_known_is_a_sentence(capsys):
    with pytest.raises(ConfigError, match="^TPU type 'v9-8' is not one of 'v2-8', 'v3-8', 'v4-8', 'v4-16'"):
        tpu_type("v9-8")
    with pytest.raises(SystemExit, match="^2$"):
        main(["doctor", "--tpu", "v9-8"])
    assert "TPU type 'v9-8' is not one of" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_pack_that_does_not_fit_the_chips_is_a_sentence(with_torch_xla):
    with pytest.raises(ConfigError, match="could not be made: .*mesh 'trial=3,data=1' has 3 places"):
        trace_pack([Trial()], 256, 4, "trial=3,data=1")


@pytest.mark.nightly
def test_doctor_compiles_for_a_tpu_that_is_not_here(capsys, monkeypatch, with_torch_xla):
    compiled = (NARROW[0], MUON)  # the others are, above
    monkeypatch.setattr(compiler, "CASES", compiled)
    main(["doctor", "--tpu", "v5litepod-1"])
    printed = capsys.readouterr().out
    for case in compiled:
        assert f"v5litepod-1  {case.name}: compiled in" in printed
    assert "exchanged: nothing" in printed
    assert printed.rstrip().endswith("no problems")
