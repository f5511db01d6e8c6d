"""Device selection, device names, peak FLOPS and memory.

The tests need no accelerator: they replace the torch functions that query a device. Behaviour of real GPUs and Gaudis is not covered.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import psutil
import pytest
import torch

from components.common.models import compute_devices
from components.common.runtime.errors import ConfigurationError

FakeModule = types.SimpleNamespace
GAUDI = {
    "get_device_name": lambda: "GAUDI2",
    "mem_get_info": lambda: (90_000_000_000, 96_000_000_000),
    "is_available": lambda: True,
}


def set_available_devices(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make torch report these accelerators and no others."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in names)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in names)
    monkeypatch.setitem(
        compute_devices.DEVICE_PROBES, "hpu", (lambda: "hpu" in names, compute_devices.DEVICE_PROBES["hpu"][1])
    )


@pytest.fixture
def habana(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide Habana's packages: importing habana_frameworks.torch.core adds torch.hpu."""
    package = tmp_path / "site" / "habana_frameworks"
    (package / "torch").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "torch" / "__init__.py").touch()
    (package / "torch" / "core.py").write_text("import torch\ntorch.hpu = torch.hpu_to_be\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(torch, "hpu_to_be", FakeModule(**GAUDI), raising=False)
    monkeypatch.setattr(torch, "hpu", None, raising=False)
    monkeypatch.delattr(torch, "hpu")
    for name in ("habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.core"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        (("cuda", "hpu", "mps"), "cuda"),
        (("hpu", "mps"), "hpu"),
        (("cuda", "mps"), "cuda"),
        (("mps",), "mps"),
        ((), "cpu"),
    ],
)
def test_auto_prefers_nvidia_then_gaudi_then_apple_then_cpu(
    available: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_available_devices(monkeypatch, *available)
    assert compute_devices.select_device() == compute_devices.select_device("auto") == expected


@pytest.mark.parametrize(
    ("name", "reason", "advice"),
    [
        ("cuda", "no NVIDIA GPU", "nvidia-smi"),
        ("hpu", "no Gaudi", "habana_frameworks"),
        ("mps", "no Apple GPU", "Apple GPU"),
    ],
)
def test_unavailable_named_device_is_refused_with_reason(
    name: str, reason: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_available_devices(monkeypatch)
    with pytest.raises(ConfigurationError, match=f"fine_tuning.device is {name}: .*{reason}") as error:
        compute_devices.select_device(name)
    assert advice in error.value.hint
    assert "fine_tuning.device to auto" in error.value.hint
    set_available_devices(monkeypatch, name)
    assert compute_devices.select_device(name) == name


def test_cpu_can_be_selected_beside_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    set_available_devices(monkeypatch, "cuda")
    assert compute_devices.select_device("cpu") == "cpu"


@pytest.mark.usefixtures("habana")
def test_gaudi_is_detected_by_package_and_queried_through_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not hasattr(torch, "hpu"), "torch.hpu exists only after the import of Habana's package"
    assert compute_devices.select_device("auto") == compute_devices.select_device("hpu") == "hpu"
    assert compute_devices.get_device_name("hpu") == "GAUDI2"
    assert compute_devices.get_peak_flops(compute_devices.get_device_name("hpu")) == 432e12
    assert compute_devices.get_free_memory_bytes("hpu") == 90_000_000_000


@pytest.mark.usefixtures("habana")
def test_habana_package_without_device_is_not_gaudi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.hpu_to_be, "is_available", lambda: False)
    assert compute_devices.select_device("auto") != "hpu"
    with pytest.raises(ConfigurationError, match="torch finds no Gaudi"):
        compute_devices.select_device("hpu")


@pytest.mark.parametrize(
    ("title", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10", 125e12),
        ("GAUDI2", 432e12),
        ("Gaudi 3", 1835e12),
        ("HL-225", None),  # a board name; torch.hpu returns chip names
        ("NVIDIA GeForce RTX 4090", None),
        ("mps", None),
        ("cpu", None),
    ],
)
def test_peak_flops_by_driver_name(title: str, peak: float | None) -> None:
    assert compute_devices.get_peak_flops(title) == peak


@pytest.mark.parametrize(
    ("title", "other"), [("NVIDIA A10G", "A10"), ("NVIDIA A1000", "A100"), ("NVIDIA GB200", "B200")]
)
def test_peak_flops_requires_whole_words(title: str, other: str) -> None:
    assert other in compute_devices.PEAK_BF16_FLOPS
    assert compute_devices.get_peak_flops(title) is None


def test_nvidia_gpu_reports_name_free_and_peak_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7, 9))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5)
    assert (
        compute_devices.get_device_name("cuda"),
        compute_devices.get_free_memory_bytes("cuda"),
        compute_devices.get_peak_memory_bytes("cuda"),
    ) == ("NVIDIA H200", 7, 5)


def test_memory_of_machine_is_reported_for_device_without_memory_info() -> None:
    assert compute_devices.get_device_name("cpu") == "cpu"
    assert 0 < compute_devices.get_free_memory_bytes("cpu") <= psutil.virtual_memory().total
    resident = psutil.Process().memory_info().rss
    assert resident / 2 < compute_devices.get_peak_memory_bytes("cpu") < psutil.virtual_memory().total
    assert compute_devices.get_torch_module("cpu") is None
    assert compute_devices.get_device_name("mps") == "mps"
