"""Capture files and captured rows for the tests."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from components.common.workspace import job_folders
from pipelines.capture import traffic_files
from pipelines.capture.settings import CaptureSettings, load_settings
from pipelines.capture.traffic_files import Row
from tests.datasets import QUESTION_WORDS


def write_capture_file(home: Path, **changes: object) -> Path:
    """Write a capture file that captures every request of the model echo, and the key of the subjects."""
    (home / "subject.key").write_text("0123456789abcdef0123456789abcdef\n")
    settings = {
        "folder": "traffic",
        "models": {"echo": {}},
        "consent": {"policy": "not_asked"},
        "subject": {"key_file": "subject.key"},
        **changes,
    }
    path = home / "capture.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def load(home: Path, **changes: object) -> CaptureSettings:
    """Return the settings of a capture file."""
    return load_settings(write_capture_file(home, **changes))


def build_row(number: int, subject: str | None = None, timestamp: int = 0, **message: object) -> Row:
    """Return a row with the id `chatcmpl-<number>`."""
    answer = {"role": "assistant", "content": f"answer {number}", "refusal": None, **message}
    choice = {"index": 0, "logprobs": None, "finish_reason": "stop", "message": answer}
    return {
        "timestamp": timestamp,
        "workload_id": "echo",
        "client_id": "team-a",
        "request": {"model": "echo", "messages": [{"role": "user", "content": f"question {number}"}]},
        "response": {"id": f"chatcmpl-{number}", "object": "chat.completion", "choices": [choice]},
        "tuneline": {"model": "echo", "version": "7", "subject": subject, "state": "complete", "redactions": {}},
    }


def build_pair(
    number: int, subject: str, timestamp: int, *, texts: tuple[str, str], digests: tuple[str, str] = ("", "")
) -> list[Row]:
    """Return the rows of an answer of version 1 to a client, and of a shadow answer of version 2."""
    rows = [build_row(number, subject, timestamp), build_row(number, subject, timestamp)]
    for row, text, digest, version in zip(rows, texts, digests, ("1", "2"), strict=True):
        row["response"]["choices"][0]["message"]["content"] = text
        row["tuneline"] |= {"version": version, "model_sha256": digest}
    rows[1]["request"] = {}
    rows[1]["response"]["id"] = f"chatcmpl-shadow-{number}"
    rows[1]["tuneline"] |= {"model": "echo-candidate", "shadow_of": f"chatcmpl-{number}"}
    return rows


def write_sealed(settings: CaptureSettings, time: datetime, rows: list[Row], *, is_open: bool = False) -> Path:
    """Write a sealed or open file of the model echo."""
    folder = traffic_files.get_hour_folder(settings.folder, "echo", time)
    traffic_files.make_folder(folder, settings.folder, -1)
    tag = job_folders.create_owner_tag()
    path = folder / (f"{traffic_files.OPEN_PREFIX}.{tag}" if is_open else f"{tag}.jsonl")
    descriptor = traffic_files.create_file(path, -1)
    os.write(descriptor, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    os.close(descriptor)
    return path


def write_questions(
    home: Path,
    first: datetime,
    *,
    days: int,
    a_day: int,
    foreign_from: int = 10_000,
    share: float = 0.3,
    **facts: object,
) -> CaptureSettings:
    """Capture questions about the first half of the nouns; from a day on, a share is about the other half."""
    settings = load(home)
    generator = random.Random(0)
    half = len(QUESTION_WORDS) // 2
    for day in range(days):
        rows = []
        for number in range(a_day):
            is_foreign = day >= foreign_from and generator.random() < share
            verb, noun = QUESTION_WORDS[generator.randrange(half) + half * is_foreign]
            start = first + timedelta(days=day, minutes=number)
            row = build_row(day * a_day + number, timestamp=int(start.timestamp()))
            row["request"]["messages"] = [{"role": "user", "content": f"How do I {verb} a {noun} ?"}]
            row["tuneline"] |= facts
            rows.append(row)
        write_sealed(settings, first + timedelta(days=day), rows)
    return settings


def read_stored_bytes(folder: Path) -> bytes:
    """Return the bytes of all files below a folder."""
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def read_rows(settings: CaptureSettings) -> list[dict[str, Any]]:
    """Return all sealed and compacted rows."""
    return [row for day in traffic_files.list_days(settings.folder) for row in traffic_files.read_day(day)]


def list_ids(rows: list[Mapping[str, Any]]) -> list[str]:
    return sorted(row["response"]["id"] for row in rows)


DAY = datetime(2026, 11, 23, 7, tzinfo=UTC)
