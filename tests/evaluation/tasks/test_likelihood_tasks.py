"""Multiple choice, perplexity, last words and preferences, compared with log-likelihood sums of single requests."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components.common.models import chat_templates
from components.common.runtime.errors import InputError
from components.common.runtime.reporters import SilentReporter
from components.evaluation.task_interface import Continuation
from components.evaluation.tasks import item_encoding
from components.evaluation.tasks.last_word import LastWord, LastWordTask
from components.evaluation.tasks.multiple_choice import MultipleChoice, MultipleChoiceTask
from components.evaluation.tasks.perplexity import Perplexity, PerplexityTask, split_windows
from components.evaluation.tasks.preference import Preference, PreferenceTask
from tests.datasets import dataset_of, small_dataset
from tests.evaluation.tasks.fake_engines import PlainEngine, build_context


def write_rows(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in records))
    return str(path)


def logprob(engine: PlainEngine, context: str, continuation: str) -> float:
    """Return the log-likelihood of a continuation; context and continuation must not share a token."""
    context_ids = engine.tokenizer(context, add_special_tokens=False)["input_ids"]
    ids = engine.tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
    assert ids[: len(context_ids)] == context_ids
    scored = [False] * len(context_ids) + [True] * (len(ids) - len(context_ids))
    return engine.compute_likelihoods([Continuation(ids, scored)], SilentReporter())[0].logprob


QUESTIONS = (
    {"id": "1", "query": "The fox jumps over the", "choices": ["dog", "list of every module", "file"], "gold": 2},
    {
        "id": "2",
        "query": "What does it return?",
        "choices": ["None", "the function, when the list is empty"],
        "gold": "None",
    },
    {"id": "3", "query": "Open the", "choices": ["file", "lazy dog"], "gold": "B", "category": "verbs"},
)


def test_most_likely_option_by_sum_and_by_length(engine: PlainEngine, tmp_path: Path) -> None:
    task = MultipleChoiceTask(MultipleChoice(data=write_rows(tmp_path / "q.jsonl", *QUESTIONS)))
    items = task.items(build_context(engine.tokenizer))
    scores = task.score(engine, items, build_context(engine.tokenizer), None)
    right, right_norm = [], []
    for question, gold in zip(QUESTIONS, (2, 0, 1), strict=True):
        sums = [logprob(engine, question["query"], " " + choice) for choice in question["choices"]]
        right.append(float(sums.index(max(sums)) == gold))
        by_length = [total / len(choice) for total, choice in zip(sums, question["choices"], strict=True)]
        right_norm.append(float(by_length.index(max(by_length)) == gold))
    assert scores.values == {"acc": right, "acc_norm": right_norm}
    assert [item.reference for item in items] == ["file", "None", "lazy dog"]


def test_one_continuation_of_several_contexts(engine: PlainEngine, tmp_path: Path) -> None:
    schema = {
        "context_options": ["The fox saw the dog and the fox", "The fox saw the dog and the dog"],
        "continuation": "was lazy.",
    }
    data = write_rows(tmp_path / "w.jsonl", {**schema, "id": "1", "gold": 0}, {**schema, "id": "2", "gold": 1})
    task = MultipleChoiceTask(MultipleChoice(data=data))
    items = task.items(build_context(engine.tokenizer))
    scores = task.score(engine, items, build_context(engine.tokenizer), None)
    sums = [logprob(engine, context, " was lazy.") for context in schema["context_options"]]
    assert scores.values["acc"] == scores.values["acc_norm"] == ([1.0, 0.0] if sums[0] > sums[1] else [0.0, 1.0])
    assert items[0].prompt == "The fox saw the dog and the… was lazy."


def test_examples_precede_every_option(engine: PlainEngine, tmp_path: Path) -> None:
    examples_file = write_rows(tmp_path / "shown.jsonl", {"query": "Close the", "choices": ["dog", "file"], "gold": 1})
    settings = MultipleChoice(
        data=write_rows(tmp_path / "q.jsonl", *QUESTIONS), examples=examples_file, shots=1, delimiter="\nAnswer: "
    )
    items = MultipleChoiceTask(settings).items(build_context(engine.tokenizer))
    assert items[2].request["pairs"][0] == ["Close the\nAnswer: file\n\nOpen the", "\nAnswer: file"]


@pytest.mark.parametrize("gold", [3, -1, "D", "dogs", None, True, 1.0])
def test_invalid_gold_is_refused(tmp_path: Path, engine: PlainEngine, gold: object) -> None:
    data = write_rows(tmp_path / "q.jsonl", QUESTIONS[0], {**QUESTIONS[0], "id": "x", "gold": gold})
    with pytest.raises(InputError, match=r"q\.jsonl:2: the row has .* in gold; expected the index"):
        MultipleChoiceTask(MultipleChoice(data=data)).items(build_context(engine.tokenizer))


def test_trailing_spaces_move_to_continuation(engine: PlainEngine) -> None:
    assert item_encoding.encode_pair(engine.tokenizer, "Open the ", "file") == item_encoding.encode_pair(
        engine.tokenizer, "Open the", " file"
    )


def test_empty_context_starts_with_start_token(engine: PlainEngine) -> None:
    start = engine.tokenizer.bos_token_id
    ids = engine.tokenizer("Open", add_special_tokens=False)["input_ids"]
    assert item_encoding.encode_pair(engine.tokenizer, "", "Open") == ([start], ids)
    assert item_encoding.encode_pair(engine.tokenizer, "", engine.tokenizer.bos_token + "Open") == ([start], ids)


def test_long_context_is_truncated_at_beginning(engine: PlainEngine, tmp_path: Path) -> None:
    long_question = {**QUESTIONS[0], "id": "0", "query": "word " * 50 + "end", "gold": 0}
    narrow = PlainEngine(engine.model, engine.tokenizer, max_input_tokens=16)
    task = MultipleChoiceTask(MultipleChoice(data=write_rows(tmp_path / "q.jsonl", long_question, *QUESTIONS)))
    task.score(narrow, task.items(build_context(engine.tokenizer)), build_context(engine.tokenizer), None)
    assert max(len(request.ids) for request in narrow.requests) == 17, (
        "sixteen are read, and the last is predicted from them"
    )
    assert all(any(request.scored) and not request.scored[0] for request in narrow.requests)


def test_perplexity_counts_words_and_bytes(engine: PlainEngine, tmp_path: Path) -> None:
    texts = ("The quick brown fox  jumps.", "Größe und Maß: 3 €")
    task = PerplexityTask(
        Perplexity(
            data=write_rows(tmp_path / "t.jsonl", *({"id": str(n), "text": text} for n, text in enumerate(texts)))
        )
    )
    scores = task.score(engine, task.items(build_context(engine.tokenizer)), build_context(engine.tokenizer), None)
    nats = [-logprob(engine, engine.tokenizer.bos_token, text) for text in texts]
    assert scores.values["word_perplexity"] == scores.values["byte_perplexity"] == pytest.approx(nats)
    assert scores.values["bits_per_byte"] == pytest.approx([value / math.log(2) for value in nats])
    assert scores.weights["word_perplexity"] == [5, 5]
    assert scores.weights["byte_perplexity"] == scores.weights["bits_per_byte"] == [27, 23]


@pytest.mark.parametrize(("count", "longest"), [(1, 4), (4, 4), (5, 4), (8, 4), (10, 4), (3, 7), (50, 2)])
def test_windows_score_every_token_once(count: int, longest: int) -> None:
    ids = list(range(1, count + 1))
    windows = list(split_windows(ids, 0, longest))
    assert [
        token for window in windows for token, is_scored in zip(window.ids, window.scored, strict=True) if is_scored
    ] == ids
    assert all(len(window.ids) <= longest + 1 and not window.scored[0] for window in windows)
    assert len(windows) == math.ceil(count / longest)
    assert all(len(window.ids) == longest + 1 for window in windows[1:]), "a later window is always full"


def test_long_text_is_scored_in_windows(engine: PlainEngine, tmp_path: Path) -> None:
    text = "Open the file, read every line, and close it again when you are done. " * 3
    data = write_rows(tmp_path / "t.jsonl", {"id": "1", "text": text}, {"id": "2", "text": "Short."})
    task = PerplexityTask(Perplexity(data=data, window=8))
    scores = task.score(engine, task.items(build_context(engine.tokenizer)), build_context(engine.tokenizer), None)
    ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    likelihoods = engine.compute_likelihoods(
        list(split_windows(ids, engine.tokenizer.bos_token_id, 8)), SilentReporter()
    )
    assert scores.values["word_perplexity"][0] == pytest.approx(-sum(likelihood.logprob for likelihood in likelihoods))
    assert sum(likelihood.tokens for likelihood in likelihoods) == len(ids)


def test_last_word_matches_greedy_answer(engine: PlainEngine, tmp_path: Path) -> None:
    context = "The quick brown fox jumps over the"
    answer = engine.generate([engine.tokenizer(context)["input_ids"]], _decode_one_token(), SilentReporter())[0]
    data = write_rows(
        tmp_path / "l.jsonl",
        {"id": "1", "context": context, "continuation": "zebra"},
        {"id": "2", "text": f"{context} lazy"},
    )
    task = LastWordTask(LastWord(data=data))
    scores = task.score(engine, task.items(build_context(engine.tokenizer)), build_context(engine.tokenizer), None)
    assert scores.values["perplexity"] == pytest.approx(
        [-logprob(engine, context, f" {word}") for word in ("zebra", "lazy")]
    )
    assert scores.values["acc"] == [0.0, float(answer == " lazy")]


def _decode_one_token() -> Any:
    from components.evaluation.task_interface import Decoding

    return Decoding(1)


def test_greedy_word_is_correct(engine: PlainEngine, tmp_path: Path) -> None:
    """The greedy continuation of the model is always the correct last word."""
    next_words = {}
    for word in ("Open", "The", "What", "Explain", "read", "close", "module"):
        ids = engine.tokenizer(word)["input_ids"]
        answer = engine.generate([ids], _decode_one_token(), SilentReporter())[0]
        if (
            answer.startswith(" ")
            and answer.strip()
            and engine.tokenizer(word + answer)["input_ids"][: len(ids)] == ids
        ):
            next_words[word] = answer.strip()
    items = [
        {"id": str(n), "context": word, "continuation": continuation}
        for n, (word, continuation) in enumerate(next_words.items())
    ]
    if len(items) < 2:
        pytest.skip("this random model never goes on with a word")
    task = LastWordTask(LastWord(data=write_rows(tmp_path / "l.jsonl", *items)))
    assert task.score(
        engine, task.items(build_context(engine.tokenizer)), build_context(engine.tokenizer), None
    ).values["acc"] == [1.0] * len(items)


TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
PAIRS = (
    {"id": "1", "prompt": "What is it?", "chosen": "A list.", "rejected": "It is the quick brown fox."},
    {"id": "2", "prompt": "Open it?", "chosen": "Read every line of the file.", "rejected": "No."},
)


def test_preference_compares_sum_and_per_token(engine: PlainEngine, tmp_path: Path) -> None:
    task = PreferenceTask(Preference(data=write_rows(tmp_path / "p.jsonl", *PAIRS)))
    scores = task.score(engine, task.items(build_context(engine.tokenizer)), build_context(engine.tokenizer), None)
    for index, pair in enumerate(PAIRS):
        sums, means = [], []
        for side in ("chosen", "rejected"):
            prompt = [{"role": "user", "content": pair["prompt"]}]
            opening = chat_templates.render_conversation(engine.tokenizer, prompt, prompt=True)
            answer = pair[side] + "<|im_end|>"
            sums.append(logprob(engine, opening, answer))
            means.append(sums[-1] / len(engine.tokenizer(answer, add_special_tokens=False)["input_ids"]))
        assert scores.values["margin"][index] == pytest.approx(sums[0] - sums[1])
        assert scores.values["margin_per_token"][index] == pytest.approx(means[0] - means[1])
        assert scores.values["accuracy"][index] == float(sums[0] > sums[1])
        assert scores.values["accuracy_per_token"][index] == float(means[0] > means[1])


def test_preference_reads_dataset_test_split(engine: PlainEngine, tmp_path: Path) -> None:
    context = build_context(engine.tokenizer, dataset_of("preference", tmp_path / "pairs", test=3))
    task = PreferenceTask(Preference())
    scores = task.score(engine, task.items(context), context, None)
    assert all(len(values) == 3 and all(map(math.isfinite, values)) for values in scores.values.values())
    with pytest.raises(InputError, match="has sft rows; expected preference rows"):
        task.items(build_context(engine.tokenizer, small_dataset(tmp_path / "rows")))


def test_pair_of_equal_answers_is_refused(engine: PlainEngine, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "p.jsonl", PAIRS[0], {**PAIRS[1], "rejected": PAIRS[1]["chosen"]})
    with pytest.raises(InputError, match=r"p\.jsonl:2: the row has the same answer as chosen and as rejected"):
        PreferenceTask(Preference(data=data)).items(build_context(engine.tokenizer))


@pytest.mark.parametrize(
    "wrong", [{}, {"data": ""}, {"data": "q.jsonl", "shots": 3}, {"data": "q.jsonl", "max_items": 1}]
)
def test_invalid_multiple_choice_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MultipleChoice.model_validate(wrong)


def test_tools_as_list_or_text_reach_chat_template(engine: PlainEngine, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + str(
        tokenizer.chat_template
    )
    with_tools = PlainEngine(engine.model, tokenizer)
    values = {}
    for name, tools in {"list": TOOLS, "text": json.dumps(TOOLS), "none": None, "empty": ""}.items():
        data = write_rows(tmp_path / f"{name}.jsonl", *({**pair, "tools": tools} for pair in PAIRS))
        task = PreferenceTask(Preference(data=data))
        values[name] = task.score(
            with_tools, task.items(build_context(tokenizer)), build_context(tokenizer), None
        ).values
    assert values["list"] == values["text"] != values["none"] == values["empty"]


@pytest.mark.parametrize("tools", ["no json", "{}", {"type": "function"}, ["look_up"], 3])
def test_invalid_tools_are_refused_with_line(engine: PlainEngine, tmp_path: Path, tools: object) -> None:
    data = write_rows(
        tmp_path / "p.jsonl", *PAIRS, {"id": "9", "prompt": "Say.", "chosen": "a", "rejected": "b", "tools": tools}
    )
    with pytest.raises(InputError, match=rf"p\.jsonl:{len(PAIRS) + 1}: the row .*tools"):
        PreferenceTask(Preference(data=data)).items(build_context(engine.tokenizer))
