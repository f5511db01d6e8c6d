"""`tuneline synthesize --template answer@1`: a teacher answers the prompts of rows.

Long tier: a local teacher answers the prompts of a dataset.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts.hashing import sha256_file
from components.data_curation.reading.raw_records import Record
from components.data_curation.reading.record_formats import parse_record
from tests.pipelines.command import answer_in_process, refusal
from tests.pipelines.synthesis.stand_in_teacher import Reply, StandInTeacher, build_reply, serve_teacher
from tests.tiny import tiny_model

TOPICS = ("pumps", "turbines", "belts", "valves", "ovens", "cranes", "lathes", "mixers")


def answer_prompt(body: dict[str, Any]) -> Reply:
    """Answer every prompt with a sentence about its last word; the judge rates an answer about belts 2, others 9."""
    assert ("score" in json.dumps(body.get("response_format", {}))) == ("response_format" in body)
    asked = body["messages"][-1]["content"]
    if "response_format" in body:
        return build_reply(json.dumps({"score": 2 if "belts" in asked else 9, "reason": "rule"}))
    return build_reply(f"The best that I know about {asked.split()[-1].rstrip('?')}.")


def list_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"id": f"row-{n}", "prompt": f"What should a new colleague know about {topic}?", "completion": "No idea.", "source": "desk"}
        for n, topic in enumerate(TOPICS)
    ]  # fmt: skip
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "My name is mary@example.com. Which machine is loud?"},
        {"role": "assistant", "content": "The crusher."},
        {"role": "user", "content": "And which one is quiet?"},
        {"role": "assistant", "content": "The old answer."},
    ]
    tool = {"type": "function", "function": {"name": "find", "parameters": {}}}
    return [
        *rows,
        rows[0] | {"id": "again", "completion": "Another answer."},
        {"messages": conversation, "topic": "noise"},
        {"messages": conversation[1:3], "tools": [tool]},
        {"messages": [{"role": "user", "content": "A prompt without an answer, about silence?"}]},
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with rows in `rows.jsonl`."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in list_rows()))
    return tmp_path


def synthesize(folder: Path, teacher: StandInTeacher, *options: object) -> dict[str, Any]:
    command = ("synthesize", "rows.jsonl", "-o", "out", "--template", "answer@1", "--teacher", teacher.url)
    return answer_in_process(*command, *options, cwd=folder)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_prompt_is_answered_once_with_provenance(folder: Path) -> None:
    with serve_teacher(answer_prompt) as teacher:
        result = synthesize(folder, teacher)
        sent = [request["messages"] for request in teacher.requests]
        assert synthesize(folder, teacher) == result
        assert len(teacher.requests) == len(sent) == 10
    assert result["rows"] == {"requested": 100, "accepted": 10, "rejected": {}}
    assert result["rejected_passages"] == {"exact_duplicate": 1, "has_tools": 1}
    assert (result["prompts"], result["documents"], result["yield"]) == (10, 1, 1.0)
    assert "all prompts were used" in result["note"]
    rows = {row["messages"][-2]["content"]: row for row in read_lines(folder / "out" / "rows.jsonl")}
    pumps = rows["What should a new colleague know about pumps?"]
    assert [turn["role"] for turn in pumps["messages"]] == ["user", "assistant"]
    assert pumps["messages"][1]["content"] == "The best that I know about pumps."
    assert pumps["source"] == "desk"
    assert (
        pumps["meta"] | {"document_sha256": sha256_file(folder / "rows.jsonl"), "prompt": 1, "row_id": "row-0"}
        == pumps["meta"]
    )
    assert pumps["meta"]["template"] == "answer@1"
    assert "evidence" not in pumps["meta"]
    (read,) = parse_record(Record("rows.jsonl", 1, pumps), "auto")  # as curation reads it
    assert (read.kind, read.source, read.meta["meta"]) == ("sft", "desk", pumps["meta"])
    quiet = rows["And which one is quiet?"]
    assert [turn["role"] for turn in quiet["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert quiet["messages"][-1]["content"] == "The best that I know about quiet."
    assert quiet["meta"]["row_meta"] == {"topic": "noise"}
    assert "mary@example.com" not in json.dumps(sent)  # redacted before it is sent
    assert "The old answer." not in json.dumps(sent)
    report = (folder / "out" / "report.html").read_text()
    assert "Prompts" in report
    assert "The best that I know about pumps." in report


def test_instructions_of_a_template_are_sent_but_not_learned(folder: Path) -> None:
    own = "kind: answer\nsystem: Think twice.\nstyles: [in one sentence, in two sentences]\nuser: 'Answer {style}. {prompt}'\n"
    (folder / "own.yaml").write_text(own)
    with serve_teacher(answer_prompt) as teacher:
        command = ("synthesize", "rows.jsonl", "-o", "out", "--template", "own.yaml", "--teacher", teacher.url)
        result = answer_in_process(*command, "--per-passage", 2, "--rows", 20, cwd=folder)
    assert result["rows"]["accepted"] == 20
    sent = [request["messages"] for request in teacher.requests]
    assert {messages[0]["content"] for messages in sent} == {"Think twice.", "Think twice.\n\nBe brief."}
    assert sent[0][-1]["content"] == "Answer in one sentence. What should a new colleague know about pumps?"
    rows = (folder / "out" / "rows.jsonl").read_text()
    assert "Think twice" not in rows
    assert "in two sentences" not in rows


def test_limit_stops_and_no_answer_is_paid_for_twice(folder: Path) -> None:
    options = ("--input-price", 10_000, "--concurrency", 1)
    with serve_teacher(answer_prompt) as teacher:
        command = (
            "synthesize",
            "rows.jsonl",
            "-o",
            "out",
            "--template",
            "answer@1",
            "--teacher",
            teacher.url,
            *options,
        )
        stopped = refusal(75, *command, "--max-cost", 4, cwd=folder)
        assert "--max-cost is 4" in stopped["message"]
        assert 0 < len(teacher.requests) <= 4  # each costs 1
        estimate = synthesize(folder, teacher, *options, "--dry-run")
        assert (estimate["prompts"], estimate["rows"], estimate["basis"]) == (10, 10, "assumed")
        assert estimate["max_cost"] >= estimate["cost"] > 0
        result = synthesize(folder, teacher, *options, "--max-cost", 100)
    assert result["requests"] == len(teacher.requests) == 10
    assert max(Counter(request["seed"] for request in teacher.requests).values()) == 1


def test_contaminated_prompts_are_not_paid_for(folder: Path) -> None:
    (folder / "exam.jsonl").write_text(json.dumps({"question": list_rows()[2]["prompt"], "answer": "All."}) + "\n")
    with serve_teacher(answer_prompt) as teacher:
        result = synthesize(folder, teacher, "--set", 'data_curation.decontamination.sets=["exam.jsonl"]')
    assert result["rejected_passages"]["contaminated"] == 1
    assert not any("belts" in request["messages"][-1]["content"] for request in teacher.requests)
    inputs = json.loads((folder / "out" / "manifest.json").read_text())["inputs"]
    assert {"evaluation_set", "raw", "template", "teacher_endpoint"} == {one["kind"] for one in inputs}


def test_personal_data_in_the_replaced_answer_rejects_no_prompt(folder: Path) -> None:
    rows = [row | {"completion": "Ask max@example.com."} if "completion" in row else row for row in list_rows()]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serve_teacher(answer_prompt) as teacher:
        result = synthesize(folder, teacher, "--set", "data_curation.personal_data.email=drop")
    assert result["rejected_passages"] == {"exact_duplicate": 1, "personal_data": 2}
    assert result["prompts"] == len(TOPICS) + 1


def test_empty_truncated_and_badly_rated_answers_are_rejected_without_repair(folder: Path) -> None:
    def reply(body: dict[str, Any]) -> Reply:
        asked = body["messages"][-1]["content"]
        if asked.endswith("pumps?"):
            return build_reply(" ")
        return build_reply("Too lo", finish="length") if asked.endswith("valves?") else answer_prompt(body)

    with serve_teacher(reply) as teacher:
        result = synthesize(folder, teacher, "--judge", teacher.url)
        rated = [request["messages"] for request in teacher.requests if "response_format" in request]
        assert len(teacher.requests) == 10 + len(rated)
    assert result["rows"]["rejected"] == {"low_judge_score": 1, "structure": 1, "truncated": 1}
    assert result["rows"]["accepted"] == 7
    assert "Correctness" in rated[0][0]["content"]
    assert "[passage]" not in rated[0][1]["content"]


def test_templates_and_sources_that_do_not_fit_are_errors(folder: Path) -> None:
    (folder / "notes.md").write_text(
        "# Notes\n\nThe anchor of the Kelby ferry weighs ninety tonnes in all, say the notes.\n"
    )
    (folder / "own.yaml").write_text("{kind: answer, user: a}")
    with serve_teacher(answer_prompt) as teacher:

        def refuse(code: int, source: str, *options: object) -> dict[str, str]:
            return refusal(code, "synthesize", source, "-o", "no", "--teacher", teacher.url, *options, cwd=folder)

        mixed = refuse(2, "rows.jsonl", "--template", "answer@1", "--template", "qa@1")
        assert mixed["message"] == "--template: answer@1 (prompts) and qa@1 (passages) read different sources"
        assert refuse(2, "rows.jsonl", "--template", "own.yaml")["message"].endswith("user has no placeholder {prompt}")
        documents = refuse(1, "notes.md", "--template", "answer@1")
        assert documents["message"].startswith("the sources contain no prompt: 1 unreadable, the first notes.md:1: ")
        rows = refuse(1, "rows.jsonl")
        assert "a row of kind sft; expected plain text or a document" in rows["message"]
        assert not teacher.requests


@pytest.mark.long
@pytest.mark.daft
def test_local_teacher_answers_the_training_prompts_of_a_dataset(tmp_path: Path) -> None:
    """Tune the teacher, so that its answers end."""
    base = tiny_model(tmp_path / "base")
    rows = [{"prompt": f"What is step {n} of the {topic} manual?", "completion": "See the manual."} for n in range(10) for topic in TOPICS]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loose = ("--set", "data_curation.near_duplicate_threshold=1")
    dataset = answer_in_process("curate", "rows.jsonl", "-o", "dataset", *loose, cwd=tmp_path)
    tuning = {"base_model": base, "adaptation": "full", "learning_rate": 5e-3, "max_steps": 30}
    sets = [part for key, value in tuning.items() for part in ("--set", f"fine_tuning.{key}={value}")]
    answer_in_process("finetune", "dataset", "-o", "teacher", *sets, cwd=tmp_path)
    command = ("synthesize", "dataset", "-o", "answers", "--template", "answer@1", "--teacher", "teacher")
    made = answer_in_process(*command, "--rows", 20, "--answer-tokens", 16, "--temperature", 0, cwd=tmp_path)
    assert made["prompts"] == dataset["splits"]["train"]
    assert made["rows"]["accepted"] == 20
    answers = read_lines(tmp_path / "answers" / "rows.jsonl")
    assert {row["messages"][-1]["content"] for row in answers} == {"See the manual."}
