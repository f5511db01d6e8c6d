"""Translation of system errors, and text that is safe for a terminal (fast tier: no engine)."""

from __future__ import annotations

import pytest

from components.common.reporting import html_report
from components.common.runtime.errors import ConfigurationError, DiskFullError, TunelineError, translate_system_error


@pytest.mark.parametrize(
    "message",
    [
        "[enforce fail at inline_container.cc:672] . unexpected pos 2082368 vs 2082320",
        "basic_ios::clear: iostream error",
        "write(): fd 3 failed with No space left on device",
        "Error while serializing: I/O error: No space left on device (os error 28)",
    ],
)
def test_messages_of_torch_and_safetensors_on_a_full_disk_are_recognized(message: str) -> None:
    """Torch 2.13 raised these messages when it wrote a checkpoint to a full tmpfs."""
    error = RuntimeError(message)
    assert isinstance(translate_system_error(error), DiskFullError)
    assert translate_system_error(RuntimeError("unexpected position of the head")) is None


def test_escape_sequences_in_names_do_not_reach_the_terminal() -> None:
    error = ConfigurationError("missing: \x1b[2Jmodel\x9b31m.weight\r\n\ttwo lines")
    assert error.message == str(error) == "missing: \\x1b[2Jmodel\\x9b31m.weight\\x0d\n\ttwo lines"
    recorded = TunelineError.from_dict({"message": "\x07", "hint": "\x1b[2J"})
    assert (recorded.message, recorded.hint) == ("\\x07", "\\x1b[2J")


def test_plot_labels_are_text_and_never_formulas() -> None:
    plot = html_report.plot_lines({r"$\frac{$": ([0, 1], [1, 2])}, x="$x$", y=r"\alpha$", caption="")
    assert all(f"{label}</text>" in plot for label in (r"$\frac{$", "$x$", r"\alpha$"))
