"""A reporter for tests of notes."""

from __future__ import annotations

from components.common.runtime.reporters import SilentReporter


class NoteRecorder(SilentReporter):
    """Records notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
