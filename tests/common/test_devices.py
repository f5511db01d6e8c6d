"""Which device computes, and what is known of it.

The machine that runs these tests may have no accelerator. What cannot run here is tested at the seam: the functions of torch that are asked
are replaced by ones that answer as the device's own would. That real GPUs and Gaudis answer so is not shown here.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import psutil
import pytest
import torch

from components.common import devices
from components.common.errors import ConfigurationError

Fake = types.SimpleNamespace
GAUDI = {"get_device_name": lambda: "GAUDI2", "mem_get_info": lambda: (90_000_000_000, 96_000_000_000), "is_available": lambda: True}


def only(monkeypatch: pytest.MonkeyPatch, *there: str) -> None:
    """Let these devices, and the processor, be the ones of this machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in there)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in there)
    monkeypatch.setitem(devices.HERE, "hpu", (lambda: "hpu" in there, devices.HERE["hpu"][1]))


@pytest.fixture
def habana(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Habana's packages: torch.hpu is there once habana_frameworks.torch.core was imported, and not before."""
    package = tmp_path / "site" / "habana_frameworks"
    (package / "torch").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "torch" / "__init__.py").touch()
    (package / "torch" / "core.py").write_text("import torch\ntorch.hpu = torch.hpu_to_be\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(torch, "hpu_to_be", Fake(**GAUDI), raising=False)
    monkeypatch.setattr(torch, "hpu", None, raising=False)
    monkeypatch.delattr(torch, "hpu")
    for name in ("habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.core"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (("cuda", "hpu", "mps"), "cuda"),
        (("hpu", "mps"), "hpu"),
        (("cuda", "mps"), "cuda"),
        (("mps",), "mps"),
        ((), "cpu"),
    ],
)
def test_auto_is_nvidia_before_gaudi_before_apple_before_the_processor(
    there: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, *there)
    assert devices.choose() == devices.choose("auto") == chosen


@pytest.mark.parametrize(("name", "reason"), [("cuda", "nvidia-smi"), ("hpu", "habana_frameworks"), ("mps", "no Apple GPU")])
def test_a_device_that_is_named_and_not_here_is_refused_with_the_reason(name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    with pytest.raises(ConfigurationError, match=f"fine_tuning.device is {name}: .*{reason}") as refused:
        devices.choose(name)
    assert "device: auto" in refused.value.hint
    only(monkeypatch, name)
    assert devices.choose(name) == name


def test_the_processor_may_be_named_beside_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "cuda")
    assert devices.choose("cpu") == "cpu"


@pytest.mark.usefixtures("habana")
def test_a_gaudi_is_found_by_its_package_and_asked_through_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not hasattr(torch, "hpu"), "without importing Habana's package there is no torch.hpu"
    assert devices.choose("auto") == devices.choose("hpu") == "hpu"
    assert devices.title("hpu") == "GAUDI2"
    assert devices.peak_flops(devices.title("hpu")) == 432e12
    assert devices.free_memory("hpu") == 90_000_000_000


@pytest.mark.usefixtures("habana")
def test_habana_s_package_without_a_device_is_no_gaudi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.hpu_to_be, "is_available", lambda: False)
    assert devices.choose("auto") != "hpu"
    with pytest.raises(ConfigurationError, match="no Gaudi is found"):
        devices.choose("hpu")


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
        ("HL-225", None),  # a board's name, which torch.hpu does not give
        ("NVIDIA GeForce RTX 4090", None),
        ("mps", None),
        ("cpu", None),
    ],
)
def test_the_published_peak_is_found_by_the_name_a_driver_gives(title: str, peak: float | None) -> None:
    assert devices.peak_flops(title) == peak


@pytest.mark.parametrize(("title", "other"), [("NVIDIA A10G", "A10"), ("NVIDIA A1000", "A100"), ("NVIDIA GB200", "B200")])
def test_a_device_with_a_longer_name_is_not_taken_for_the_one_whose_name_it_begins_or_ends_with(title: str, other: str) -> None:
    assert other in devices.PEAKS
    assert devices.peak_flops(title) is None


def test_an_nvidia_gpu_is_asked_for_its_name_its_free_and_its_peak_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7, 9))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5)
    assert (devices.title("cuda"), devices.free_memory("cuda"), devices.peak_memory("cuda")) == ("NVIDIA H200", 7, 5)


def test_where_a_device_tells_no_memory_it_is_that_of_the_machine() -> None:
    assert devices.title("cpu") == "cpu"
    assert 0 < devices.free_memory("cpu") <= psutil.virtual_memory().total
    resident = psutil.Process().memory_info().rss
    assert resident / 2 < devices.peak_memory("cpu") < psutil.virtual_memory().total
    assert devices.module("cpu") is None
    assert devices.title("mps") == "mps"
