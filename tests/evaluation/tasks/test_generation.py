"""Prompts of the generation task and scores of its answers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components.common.runtime.errors import InputError
from components.common.runtime.reporters import Reporter
from components.evaluation import score_cache
from components.evaluation.task_interface import Decoding, Item, Scores
from components.evaluation.tasks.generation import Generation, GenerationTask, estimate_pass_at
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
    with pytest.raises(InputError, match="has 1 item;"):
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


class DrawingEngine(ScriptedEngine):
    """An engine whose sampled answer depends on the prompt and the seed only, as required of every engine."""

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        self.decodings.append(decoding)
        words = list(self.script.values())
        return [words[(seed + sum(prompt)) % len(words)] for prompt, seed in decoding.pair_seeds(prompts)]


def build_sampling_task(path: Path, rows: Sequence[dict[str, Any]] = CAPITALS, **settings: Any) -> GenerationTask:
    values = {"data": write_rows(path / "q.jsonl", *rows), "temperature": 0.8, "metrics": ["exact_match", "f1"]}
    return GenerationTask(Generation.model_validate({**values, **settings}))


def score_samples(task: GenerationTask, *, seed: int = 0) -> tuple[list[Item], Scores, DrawingEngine]:
    engine = DrawingEngine(tiny_tokenizer(), {"": "Paris", "1": "Lima", "2": "Rome"})
    context = build_context(engine.tokenizer, seed=seed)
    items = task.items(context)
    return items, task.score(engine, items, context, None), engine


def test_samples_give_mean_and_pass_at_k(tmp_path: Path) -> None:
    task = build_sampling_task(tmp_path, samples=6, pass_at=[1, 3], top_p=0.9)
    _, scores, engine = score_samples(task)
    assert list(task.metrics) == ["exact_match", "f1", "exact_match_pass_at_1", "exact_match_pass_at_3"]
    assert not any(metric.is_binary for metric in task.metrics.values())
    assert [len(samples) for samples in scores.samples] == [6, 6]
    for index, capital in enumerate(("Paris", "Lima")):
        answers = [sample["answer"] for sample in scores.samples[index]]
        right = answers.count(capital)
        assert 0 < right < 6
        assert [sample["exact_match"] for sample in scores.samples[index]] == [float(a == capital) for a in answers]
        assert scores.values["exact_match"][index] == pytest.approx(right / 6)
        assert scores.values["exact_match_pass_at_1"][index] == pytest.approx(right / 6)
        drawn = [capital in chosen for chosen in combinations(answers, 3)]
        assert scores.values["exact_match_pass_at_3"][index] == pytest.approx(sum(drawn) / len(drawn))
        assert scores.answers[index] == answers[0]
    sampling = engine.decodings[0].sampling
    assert sampling
    assert (sampling.temperature, sampling.top_p, len(set(sampling.seeds))) == (0.8, 0.9, 12)


def test_samples_depend_on_seed_and_item_only(tmp_path: Path) -> None:
    settings = {"samples": 5, "seed": 7}
    _, scores, _ = score_samples(build_sampling_task(tmp_path, **settings))
    _, again, _ = score_samples(build_sampling_task(tmp_path, CAPITALS[::-1], **settings), seed=3)
    assert again == scores
    more = [*CAPITALS, {"id": "0", "prompt": "Capital of Italy?", "reference": "Rome"}]
    _, extended, _ = score_samples(build_sampling_task(tmp_path, more, **settings))
    assert extended.samples[1:] == scores.samples
    _, fewer, _ = score_samples(build_sampling_task(tmp_path, **{**settings, "samples": 3}))
    assert list(fewer.samples) == [samples[:3] for samples in scores.samples]
    _, other, _ = score_samples(build_sampling_task(tmp_path, **{**settings, "seed": 8}))
    assert other.samples != scores.samples


def test_seed_of_the_run_is_part_of_the_digest_of_sampled_tasks_only(tmp_path: Path) -> None:
    def digest(seed: int, **settings: Any) -> str:
        task = build_sampling_task(tmp_path, **settings)
        return score_cache.digest_task(task, task.items(build_context(tiny_tokenizer(), seed=seed)), [])

    assert digest(1, samples=2) != digest(2, samples=2)
    assert digest(1, temperature=0) == digest(2, temperature=0)
    assert not {"samples", "temperature", "top_p", "seed", "pass_at"} & set(Generation().model_dump())


def test_single_sampled_answer_is_binary(tmp_path: Path) -> None:
    task = build_sampling_task(tmp_path)
    _, scores, _ = score_samples(task)
    assert list(task.metrics) == ["exact_match", "f1"]
    assert task.metrics["exact_match"].is_binary
    assert set(scores.values["exact_match"]) <= {0.0, 1.0}
    assert scores.samples == ()


@pytest.mark.parametrize(
    ("metric", "settings", "right"),
    [
        ("final_number", {}, "It is #### 42"),
        ("marked_number", {}, "It is #### 42"),
        ("json_valid", {}, '{"a": 1}'),
        ("json_schema", {"json_schema": "schema.json"}, '{"a": 1}'),
    ],
)
def test_exact_graders_accept_samples(
    tmp_path: Path, metric: str, settings: dict[str, str], right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text('{"type": "object", "required": ["a"]}')
    rows = [{"id": name, "prompt": f"Six times {name}?", "reference": "#### 42"} for name in ("6", "7")]
    task = build_sampling_task(tmp_path, rows, metrics=[metric], samples=8, **settings)
    engine = DrawingEngine(tiny_tokenizer(), {"": right, "1": "nothing"})
    context = build_context(engine.tokenizer)
    scores = task.score(engine, task.items(context), context, None)
    for share, one, any_of_8, samples in zip(
        *(scores.values[name] for name in task.metrics), scores.samples, strict=True
    ):
        assert share == pytest.approx(one) == sum(sample["answer"] == right for sample in samples) / 8
        assert any_of_8 == float(share > 0)


@pytest.mark.parametrize("right", range(6))
def test_pass_at_is_share_of_draws_with_a_right_answer(right: int) -> None:
    outcomes = [True] * right + [False] * (5 - right)
    for k in range(1, 6):
        draws = [any(chosen) for chosen in combinations(outcomes, k)]
        assert estimate_pass_at(5, right, k) == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 3}, "samples is 3, and temperature is 0; expected a temperature above 0"),
        ({"top_p": 0.9}, "top_p is 0.9, and temperature is 0"),
        ({"temperature": 1e-39}, "temperature is 1e-39; expected 0 for greedy answers, or at least 0.01"),
        ({"seed": 1}, "seed is 1, and temperature is 0"),
        ({"temperature": 1, "pass_at": [1]}, "at least 2 samples"),
        ({"temperature": 1, "samples": 4, "pass_at": [5]}, "numbers from 1 to samples in pass_at"),
        ({"temperature": 1, "samples": 4, "pass_at": [2, 2]}, "expected distinct numbers"),
        ({"temperature": 1, "samples": 4, "pass_at": [2], "metrics": ["f1"]}, "expected at least one binary metric"),
    ],
)
def test_contradictory_sampling_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        Generation.model_validate(settings)
    assert message in str(error.value)
