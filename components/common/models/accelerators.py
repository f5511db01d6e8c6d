"""Published figures of accelerators: peak rates, memory, bandwidth and power, each with its source in accelerators.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from components.common.runtime.yaml_loading import load_yaml

TERA, GIGA = 10**12, 10**9
PRECISIONS = ("bf16", "fp8")


@dataclass(frozen=True)
class Accelerator:
    """Figures of one accelerator; see accelerators.yaml for the units. None: not known."""

    name: str
    bf16: float
    source: str
    node: int
    driver: str = ""
    fp8: float | None = None
    memory: float | None = None
    bandwidth: float | None = None
    watts: float | None = None

    def get_peak_flops(self, precision: str) -> float | None:
        """Return the dense FLOP/s in a precision of PRECISIONS; None if it is not known."""
        peak = self.fp8 if precision == "fp8" else self.bf16
        return peak * TERA if peak else None

    @property
    def memory_bytes(self) -> float | None:
        """The size of the memory in bytes."""
        return self.memory * GIGA if self.memory else None

    @property
    def bandwidth_bytes(self) -> float | None:
        """The bandwidth of the memory in bytes per second."""
        return self.bandwidth * TERA if self.bandwidth else None


@cache
def load_accelerators() -> dict[str, Accelerator]:
    """Return all accelerators by name."""
    rows = load_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    assert isinstance(rows, dict)
    return {name: Accelerator(name=name, **row) for name, row in rows.items()}
