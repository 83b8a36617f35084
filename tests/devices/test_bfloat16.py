"""Units for bfloat16, by the CPU's flags and the kind of device."""

import pytest

from mup_tpu.devices import peak

AMD, PLAIN = "flags : fpu avx512f avx512_bf16 amx_bf16", "flags : fpu avx2"


@pytest.mark.parametrize(
    ("line", "found", "said"),
    [
        (AMD, ("avx512_bf16", "amx_bf16"), "this CPU has avx512_bf16, amx_bf16"),
        ("Features : fp asimd bf16", ("bf16",), "this CPU has bf16"),  # an Arm
        (PLAIN, (), "this CPU shows no units for bfloat16"),
    ],
)
def test_units_for_bfloat16_are_read_from_the_cpu_s_flags(line, found, said, tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(peak, "_CPUINFO", file)
    assert peak.cpu_bfloat16_units() is None and not peak.bfloat16_units("cpu")[0]
    file.write_text(f"processor : 0\n{line}\n")
    assert peak.cpu_bfloat16_units() == found
    assert peak.bfloat16_units("cpu") == (bool(found), said)


def test_a_tpu_has_units_and_xla_s_cpu_client_is_none(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert not peak.bfloat16_units("xla")[0]
    monkeypatch.delenv("PJRT_DEVICE")
    assert peak.bfloat16_units("xla")[0]


def test_a_gpu_has_units_by_its_capability():
    torch = pytest.importorskip("torch")
    has, said = peak.bfloat16_units("cuda")
    if torch.cuda.is_available():
        assert (
            has == (torch.cuda.get_device_properties(0).major >= 8) and torch.cuda.get_device_name() in said
        )
    else:
        assert (has, said) == (False, "torch sees no GPU here")
