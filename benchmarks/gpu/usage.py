"""Use and memory of the GPU, sampled while a stage computes."""

from __future__ import annotations

import threading
from typing import Any

INTERVAL_SECONDS = 0.1


class UsageSampler:
    """Samples the driver's figures in a thread between `start` and `stop`; empty without an NVIDIA GPU."""

    def __init__(self) -> None:
        self._stop, self._samples, self._thread = threading.Event(), list[int](), None

    def start(self) -> None:
        """Begin to sample, and discard earlier samples."""
        try:
            import pynvml  # type: ignore[import-not-found] # nvidia-ml-py, on GPU machines only

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:  # no package, no driver or no GPU
            return
        self._samples.clear()
        self._stop.clear()

        def sample() -> None:
            while not self._stop.wait(INTERVAL_SECONDS):
                self._samples.append(int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu))

        self._thread: Any = threading.Thread(target=sample, daemon=True)
        self._thread.start()

    def stop(self) -> float | None:
        """End, and return the mean share of time in which a kernel ran, from 0 to 1."""
        self._stop.set()
        if self._thread is None or not self._samples:
            return None
        self._thread.join()
        return round(sum(self._samples) / len(self._samples) / 100, 3)
