"""Prompts of the generation task and scores of its answers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components.common.runtime.errors import InputError
from components.evaluation.tasks.generation import Generation, GenerationTask
from tests.datasets import dataset_of, small_dataset
from tests.evaluation.tasks.fake_engines import PlainEngine, ScriptedEngine, build_context
from tests.tiny import tiny_tokenizer


def write_rows(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in records))
    return str(path)


CAPITALS = (
    {"id": "1", "prompt": "Capital of France?", "reference": "Paris", "category": "geo"},
    {"id": "2", "prompt": "Capital of Peru?", "references": ["Lima", "Lima, Peru"]},
)


def test_each_metric_scores_every_answer(tmp_path: Path) -> None:
    task = GenerationTask(
        Generation(data=write_rows(tmp_path / "q.jsonl", *CAPITALS), metrics=["exact_match", "f1"], max_new_tokens=7)
    )
    engine = ScriptedEngine(tiny_tokenizer(), {"France": " The Paris. ", "Peru": "Lima and Cusco"})
    items = task.items(build_context(engine.tokenizer))
    scores = task.score(engine, items, build_context(engine.tokenizer), None)
    assert scores.values["exact_match"] == [1.0, 0.0]
    assert scores.values["f1"] == [1.0, pytest.approx(0.5)]
    assert scores.answers == ["The Paris.", "Lima and Cusco"]
    assert [(item.reference, item.category) for item in items] == [("Paris", "geo"), ("Lima", "")]
    assert engine.decodings[0].max_new_tokens == 7


def test_chat_prompt_has_system_message_and_examples(tmp_path: Path) -> None:
    examples_file = write_rows(
        tmp_path / "shown.jsonl",
        {"prompt": "Capital of Spain?", "reference": "Madrid"},
        {"prompt": "Not shown?", "reference": "No"},
    )
    settings = Generation(
        data=write_rows(tmp_path / "q.jsonl", *CAPITALS), system="Be brief.", examples=examples_file, shots=1
    )
    engine = ScriptedEngine(tiny_tokenizer(), {})
    task = GenerationTask(settings)
    task.score(engine, task.items(build_context(engine.tokenizer)), build_context(engine.tokenizer), None)
    assert engine.prompts[0] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCapital of Spain?<|im_end|>\n<|im_start|>assistant\nMadrid<|im_end|>\n"
        "<|im_start|>user\nCapital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_prompt_without_chat_template_is_continued(tmp_path: Path) -> None:
    examples_file = write_rows(tmp_path / "shown.jsonl", {"prompt": "Q: Capital of Spain?\nA:", "reference": "Madrid"})
    data = write_rows(
        tmp_path / "q.jsonl",
        {"prompt": "Q: Capital of France?\nA:", "reference": "Paris"},
        {"prompt": "Q: Peru?\nA:", "reference": "Lima"},
    )
    settings = Generation(data=data, chat=False, examples=examples_file, shots=1, stop=["\n"])
    engine = ScriptedEngine(tiny_tokenizer(), {})
    task = GenerationTask(settings)
    task.score(engine, task.items(build_context(engine.tokenizer)), build_context(engine.tokenizer), None)
    assert "Q: Capital of Spain?\nA: Madrid\n\nQ: Capital of France?\nA:" in engine.prompts
    assert engine.decodings[0].stop == ("\n",)


def test_default_data_is_dataset_test_split(tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path / "dataset", test=5)
    task = GenerationTask(Generation(metrics=["f1"], max_items=3))
    items = task.items(build_context(tiny_tokenizer(), dataset))
    assert len(items) == 3
    assert items == sorted(items, key=lambda item: item.id)
    assert all(item.reference.startswith("It does") and item.source == "words" and item.length > 4 for item in items)


def test_dataset_without_conversations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="contains text rows"):
        GenerationTask(Generation()).items(build_context(tiny_tokenizer(), dataset_of("text", tmp_path / "texts")))


def test_custom_field_names(tmp_path: Path) -> None:
    data = write_rows(
        tmp_path / "gsm.jsonl",
        {"question": "6*7?", "answer": "6*7=42\n#### 42"},
        {"question": "1+1?", "answer": "#### 2"},
    )
    task = GenerationTask(
        Generation(
            data=data, prompt_field="question", reference_field="answer", metrics=["final_number", "marked_number"]
        )
    )
    engine = ScriptedEngine(tiny_tokenizer(), {"6*7": "So it is 42.0", "1+1": "Two of them\n#### 2"})
    scores = task.score(engine, task.items(build_context(engine.tokenizer)), build_context(engine.tokenizer), None)
    by_answer = dict(zip(scores.answers, zip(*scores.values.values(), strict=True), strict=True))
    assert by_answer == {"So it is 42.0": (1.0, 0.0), "Two of them\n#### 2": (1.0, 1.0)}


def test_json_answers_follow_schema_file(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "object", "required": ["city"]}))
    data = write_rows(tmp_path / "q.jsonl", {"id": "1", "prompt": "France?"}, {"id": "2", "prompt": "Peru?"})
    task = GenerationTask(Generation(data=data, metrics=["json_valid", "json_schema"], json_schema=str(schema)))
    engine = ScriptedEngine(tiny_tokenizer(), {"France": '```json\n{"city": "Paris"}\n```', "Peru": '{"town": "Lima"}'})
    scores = task.score(engine, task.items(build_context(engine.tokenizer)), build_context(engine.tokenizer), None)
    assert scores.values == {"json_valid": [1.0, 1.0], "json_schema": [1.0, 0.0]}


def test_changed_schema_changes_items(tmp_path: Path) -> None:
    schema, data = (
        tmp_path / "schema.json",
        write_rows(tmp_path / "q.jsonl", {"prompt": "France?"}, {"prompt": "Peru?"}),
    )
    task = GenerationTask(Generation(data=data, metrics=["json_schema"], json_schema=str(schema)))
    schema.write_text('{"type": "object"}')
    before = task.items(build_context(tiny_tokenizer()))
    schema.write_text('{"type": "array"}')
    assert before != task.items(build_context(tiny_tokenizer()))


def test_rows_without_usable_reference_are_refused(tmp_path: Path) -> None:
    data = write_rows(
        tmp_path / "q.jsonl",
        {"id": "1", "prompt": "How many?", "reference": "many"},
        {"id": "2", "prompt": "1+1?", "reference": "2"},
    )
    with pytest.raises(InputError, match="item 1 has no reference that final_number can compare"):
        GenerationTask(Generation(data=data, metrics=["final_number"])).items(build_context(tiny_tokenizer()))
    task = GenerationTask(Generation(data=write_rows(tmp_path / "q.jsonl", {"prompt": "How many?"})))
    with pytest.raises(InputError, match=r"q\.jsonl:1: the row has no text in references"):
        task.items(build_context(tiny_tokenizer()))


def test_single_item_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 1 items"):
        GenerationTask(Generation(data=write_rows(tmp_path / "q.jsonl", CAPITALS[0]))).items(
            build_context(tiny_tokenizer())
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"metrics": ["json_schema"]},
        {"metrics": ["f1", "f1"]},
        {"shots": 2},
        {"metrics": ["accuracy"]},
        {"json_schema": "s.json"},
    ],
)
def test_contradictory_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Generation.model_validate(wrong)


def test_long_prompt_is_truncated_at_beginning(tmp_path: Path) -> None:
    data = write_rows(
        tmp_path / "q.jsonl",
        {"prompt": "word " * 60 + "end?", "reference": "x"},
        {"prompt": "short?", "reference": "x"},
    )
    engine = ScriptedEngine(tiny_tokenizer(), {}, max_input_tokens=40)
    task = GenerationTask(Generation(data=data, chat=False, max_new_tokens=10))
    task.score(engine, task.items(build_context(engine.tokenizer)), build_context(engine.tokenizer), None)
    cut = next(text for text in engine.prompts if "end" in text)
    assert len(engine.tokenizer(cut)["input_ids"]) <= 30
    assert cut.endswith("word end?")


def test_real_model_answers_deterministically(engine: PlainEngine, tmp_path: Path) -> None:
    task = GenerationTask(
        Generation(data=write_rows(tmp_path / "q.jsonl", *CAPITALS), metrics=["chrf", "rouge_l"], max_new_tokens=6)
    )
    items = task.items(build_context(engine.tokenizer))
    first, second = (task.score(engine, items, build_context(engine.tokenizer), None) for _ in range(2))
    assert first == second
    assert all(answer for answer in first.answers)
    assert all(math.isfinite(value) for values in first.values.values() for value in values)


def test_row_tools_reach_chat_template(tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_tokenizer(), {})
    engine.tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + engine.tokenizer.chat_template
    )
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    task = GenerationTask(
        Generation(data=write_rows(tmp_path / "q.jsonl", {**CAPITALS[0], "tools": tools}, CAPITALS[1]))
    )
    task.score(engine, task.items(build_context(engine.tokenizer)), build_context(engine.tokenizer), None)
    assert [prompt.startswith("look_up ") for prompt in engine.prompts] == [True, False]
