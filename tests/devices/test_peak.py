"""Facts about devices, against their makers' pages; units for bfloat16 by the CPU's flags and the device."""

import math
import re

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


@pytest.mark.parametrize(
    ("name", "bf16", "float32"),
    [
        ("NVIDIA H100 80GB HBM3", 989, 67), ("NVIDIA H100 PCIe", 756, 51), ("h100-pcie", 756, 51),
        ("NVIDIA H20", 148, 44), ("H800", 989, 67), ("NVIDIA GB200", 2500, 80), ("NVIDIA B300", 2250, 75),
        ("NVIDIA B200", 2250, 75), ("NVIDIA A100-SXM4-80GB", 312, 19.5), ("NVIDIA A10G", 125, 31.2),
        ("NVIDIA L40S", 362, 91.6), ("NVIDIA L4", 121, 30.3), ("Tesla T4", 65, 8.1),
        ("Tesla V100-SXM2-16GB", 125, 15.7), ("Tesla V100-PCIE-16GB", 112, 14),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6), ("RTX4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 3090", 71, 35.6), ("NVIDIA RTX A6000", 154.8, 38.7),
        ("NVIDIA RTX 6000 Ada Generation", 364.2, 91.1), ("AMD Instinct MI300X", 1307.4, 163.4),
    ],
)  # fmt: skip
def test_peaks_of_gpus_are_those_of_their_makers_data_sheets(name, bf16, float32):
    """Dense, in TFLOP/s, float32 without TF32."""
    assert peak.gpu_peak_flops(name, "bf16") == bf16 * 1e12
    assert peak.gpu_peak_flops(name, "float32") == float32 * 1e12
    assert peak.gpu_peak_flops(name, "float64") is None


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "GTX 1080", "Z100", "H2000", "A1000", ""]
)
def test_a_gpu_that_is_not_known_has_no_peak(name):
    assert peak.gpu_peak_flops(name, "bf16") is None


@pytest.mark.parametrize(
    ("kind", "tflops", "gib", "cores"),
    [
        ("v2", 45, 16, 2), ("v3", 123, 32, 2), ("v4", 275, 32, 1), ("v5litepod", 197, 16, 1),
        ("v5p", 459, 95, 1), ("v6e", 918, 32, 1), ("v7", 2307, 192, 2),
    ],
)  # fmt: skip
def test_chips_are_those_of_google_s_pages(kind, tflops, gib, cores):
    """A chip of v2, v3 and v7 is two devices, each with half of its memory and arithmetic."""
    chip = peak.tpu_generation(f"{kind}-8")
    assert chip.device_flops * cores == tflops * 1e12
    assert chip.device_hbm_bytes * cores == gib * 2**30


@pytest.mark.parametrize("tpu", peak.TPU_TYPES.values(), ids=lambda tpu: tpu.accelerator_type)
def test_a_type_has_the_devices_of_its_name_and_topology(tpu):
    """The number in a name counts cores up to v5p, which have two a chip, and chips after."""
    chips = math.prod(map(int, tpu.topology.partition(":")[2].split("x")))
    assert tpu.devices == chips * tpu.generation.devices
    number = int(tpu.accelerator_type.partition("-")[2])
    assert number == (chips if re.match("v5litepod|v6e", tpu.accelerator_type) else 2 * chips)


def test_both_names_of_google_for_a_v5e_are_known_and_no_name_is_no_peak():
    assert peak.tpu_type("v5e-8") is peak.tpu_type("v5litepod-8")
    assert peak.tpu_peak_flops("v3-8") == 61.5e12 and math.isnan(peak.tpu_peak_flops(""))
