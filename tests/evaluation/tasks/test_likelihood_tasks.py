"""Multiple choice, perplexity, last words and preferences: scored by a real model, checked against sums worked out plainly."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components.common import chat
from components.common.errors import InputError
from components.common.progress import Silent
from components.evaluation.task import Continuation
from components.evaluation.tasks import asking
from components.evaluation.tasks.config import LastWord, MultipleChoice, Perplexity, Preference
from components.evaluation.tasks.last_word import LastWordTask
from components.evaluation.tasks.multiple_choice import MultipleChoiceTask
from components.evaluation.tasks.perplexity import PerplexityTask, windows
from components.evaluation.tasks.preference import PreferenceTask
from tests.datasets import dataset_of, small_dataset
from tests.evaluation.tasks.plain_engine import PlainEngine, given


def rows(path: Path, *some: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return str(path)


def logprob(engine: PlainEngine, text: str, after: str) -> float:
    """Of `after` given `text`, token by token, when both are read as one text and the boundary lies between two tokens."""
    before = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = engine.tokenizer(text + after, add_special_tokens=False)["input_ids"]
    assert whole[: len(before)] == before
    counted = [False] * len(before) + [True] * (len(whole) - len(before))
    return engine.likelihoods([Continuation(whole, counted)], Silent())[0].logprob


QUESTIONS = (
    {"id": "1", "query": "The fox jumps over the", "choices": ["dog", "list of every module", "file"], "gold": 2},
    {"id": "2", "query": "What does it return?", "choices": ["None", "the function, when the list is empty"], "gold": "None"},
    {"id": "3", "query": "Open the", "choices": ["file", "lazy dog"], "gold": "B", "category": "verbs"},
)


def test_the_likeliest_option_is_chosen_by_its_sum_and_by_its_length(engine: PlainEngine, tmp_path: Path) -> None:
    task = MultipleChoiceTask(MultipleChoice(data=rows(tmp_path / "q.jsonl", *QUESTIONS)))
    items = task.items(given(engine.tokenizer))
    scores = task.score(engine, items, given(engine.tokenizer), None)
    right, right_norm = [], []
    for question, gold in zip(QUESTIONS, (2, 0, 1), strict=True):
        sums = [logprob(engine, question["query"], " " + choice) for choice in question["choices"]]
        right.append(float(sums.index(max(sums)) == gold))
        by_length = [one / len(choice) for one, choice in zip(sums, question["choices"], strict=True)]
        right_norm.append(float(by_length.index(max(by_length)) == gold))
    assert scores.values == {"acc": right, "acc_norm": right_norm}
    assert [item.reference for item in items] == ["file", "None", "lazy dog"]


def test_one_continuation_of_several_contexts_is_a_question_too(engine: PlainEngine, tmp_path: Path) -> None:
    schema = {"context_options": ["The fox saw the dog and the fox", "The fox saw the dog and the dog"], "continuation": "was lazy."}
    data = rows(tmp_path / "w.jsonl", {**schema, "id": "1", "gold": 0}, {**schema, "id": "2", "gold": 1})
    task = MultipleChoiceTask(MultipleChoice(data=data))
    items = task.items(given(engine.tokenizer))
    scores = task.score(engine, items, given(engine.tokenizer), None)
    sums = [logprob(engine, context, " was lazy.") for context in schema["context_options"]]
    assert scores.values["acc"] == scores.values["acc_norm"] == ([1.0, 0.0] if sums[0] > sums[1] else [0.0, 1.0])
    assert items[0].prompt == "The fox saw the dog and the… was lazy."


def test_examples_stand_before_every_option_with_their_right_answers(engine: PlainEngine, tmp_path: Path) -> None:
    shown = rows(tmp_path / "shown.jsonl", {"query": "Close the", "choices": ["dog", "file"], "gold": 1})
    settings = MultipleChoice(data=rows(tmp_path / "q.jsonl", *QUESTIONS), examples=shown, shots=1, delimiter="\nAnswer: ")
    items = MultipleChoiceTask(settings).items(given(engine.tokenizer))
    assert items[2].ask["pairs"][0] == ["Close the\nAnswer: file\n\nOpen the", "\nAnswer: file"]


@pytest.mark.parametrize("gold", [3, -1, "D", "dogs", None, True, 1.0])
def test_a_right_option_that_is_none_is_told(tmp_path: Path, engine: PlainEngine, gold: object) -> None:
    data = rows(tmp_path / "q.jsonl", QUESTIONS[0], {**QUESTIONS[0], "id": "x", "gold": gold})
    with pytest.raises(InputError, match=r"q\.jsonl:2: the row says in gold that"):
        MultipleChoiceTask(MultipleChoice(data=data)).items(given(engine.tokenizer))


def test_spaces_at_the_end_of_a_context_are_scored_with_what_follows(engine: PlainEngine) -> None:
    assert asking.pair(engine.tokenizer, "Open the ", "file") == asking.pair(engine.tokenizer, "Open the", " file")


def test_what_stands_at_the_beginning_is_given_the_mark_of_a_beginning(engine: PlainEngine) -> None:
    start = engine.tokenizer.bos_token_id
    ids = engine.tokenizer("Open", add_special_tokens=False)["input_ids"]
    assert asking.pair(engine.tokenizer, "", "Open") == ([start], ids)
    assert asking.pair(engine.tokenizer, "", engine.tokenizer.bos_token + "Open") == ([start], ids)


def test_a_context_longer_than_the_model_reads_loses_its_beginning(engine: PlainEngine, tmp_path: Path) -> None:
    long = {**QUESTIONS[0], "id": "0", "query": "word " * 50 + "end", "gold": 0}
    narrow = PlainEngine(engine.model, engine.tokenizer, room=16)
    task = MultipleChoiceTask(MultipleChoice(data=rows(tmp_path / "q.jsonl", long, *QUESTIONS)))
    task.score(narrow, task.items(given(engine.tokenizer)), given(engine.tokenizer), None)
    assert max(len(one.ids) for one in narrow.asked) == 17, "sixteen are read, and the last is predicted from them"
    assert all(any(one.counted) and not one.counted[0] for one in narrow.asked)


def test_perplexity_counts_words_and_bytes_of_every_text(engine: PlainEngine, tmp_path: Path) -> None:
    texts = ("The quick brown fox  jumps.", "Größe und Maß: 3 €")
    task = PerplexityTask(Perplexity(data=rows(tmp_path / "t.jsonl", *({"id": str(n), "text": text} for n, text in enumerate(texts)))))
    scores = task.score(engine, task.items(given(engine.tokenizer)), given(engine.tokenizer), None)
    nats = [-logprob(engine, engine.tokenizer.bos_token, text) for text in texts]
    assert scores.values["word_perplexity"] == scores.values["byte_perplexity"] == pytest.approx(nats)
    assert scores.values["bits_per_byte"] == pytest.approx([one / math.log(2) for one in nats])
    assert scores.weights["word_perplexity"] == [5, 5]
    assert scores.weights["byte_perplexity"] == scores.weights["bits_per_byte"] == [27, 23]


@pytest.mark.parametrize(("count", "longest"), [(1, 4), (4, 4), (5, 4), (8, 4), (10, 4), (3, 7), (50, 2)])
def test_windows_count_every_token_once_with_as_much_before_it_as_fits(count: int, longest: int) -> None:
    ids = list(range(1, count + 1))
    found = list(windows(ids, 0, longest))
    assert [token for one in found for token, counted in zip(one.ids, one.counted, strict=True) if counted] == ids
    assert all(len(one.ids) <= longest + 1 and not one.counted[0] for one in found)
    assert len(found) == math.ceil(count / longest)
    assert all(len(one.ids) == longest + 1 for one in found[1:]), "a later window is always full"


def test_a_text_in_windows_is_scored_window_by_window(engine: PlainEngine, tmp_path: Path) -> None:
    text = "Open the file, read every line, and close it again when you are done. " * 3
    data = rows(tmp_path / "t.jsonl", {"id": "1", "text": text}, {"id": "2", "text": "Short."})
    task = PerplexityTask(Perplexity(data=data, window=8))
    scores = task.score(engine, task.items(given(engine.tokenizer)), given(engine.tokenizer), None)
    ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    found = engine.likelihoods(list(windows(ids, engine.tokenizer.bos_token_id, 8)), Silent())
    assert scores.values["word_perplexity"][0] == pytest.approx(-sum(one.logprob for one in found))
    assert sum(one.tokens for one in found) == len(ids)


def test_a_last_word_is_right_when_the_model_would_say_it(engine: PlainEngine, tmp_path: Path) -> None:
    context = "The quick brown fox jumps over the"
    said = engine.answers([engine.tokenizer(context)["input_ids"]], _one_token(), Silent())[0]
    data = rows(
        tmp_path / "l.jsonl",
        {"id": "1", "context": context, "continuation": "zebra"},
        {"id": "2", "text": f"{context} lazy"},
    )
    task = LastWordTask(LastWord(data=data))
    scores = task.score(engine, task.items(given(engine.tokenizer)), given(engine.tokenizer), None)
    assert scores.values["perplexity"] == pytest.approx([-logprob(engine, context, f" {word}") for word in ("zebra", "lazy")])
    assert scores.values["acc"] == [0.0, float(said == " lazy")]


def _one_token() -> Any:
    from components.evaluation.task import Decoding

    return Decoding(1)


def test_greedy_words_count_as_right(engine: PlainEngine, tmp_path: Path) -> None:
    """Asked for the very word that the model goes on with, the answer is right, whatever word that is."""
    found = {}
    for word in ("Open", "The", "What", "Explain", "read", "close", "module"):
        ids = engine.tokenizer(word)["input_ids"]
        answer = engine.answers([ids], _one_token(), Silent())[0]
        if answer.startswith(" ") and answer.strip() and engine.tokenizer(word + answer)["input_ids"][: len(ids)] == ids:
            found[word] = answer.strip()
    items = [{"id": str(n), "context": word, "continuation": said} for n, (word, said) in enumerate(found.items())]
    if len(items) < 2:
        pytest.skip("this random model never goes on with a word")
    task = LastWordTask(LastWord(data=rows(tmp_path / "l.jsonl", *items)))
    assert task.score(engine, task.items(given(engine.tokenizer)), given(engine.tokenizer), None).values["acc"] == [1.0] * len(items)


TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
PAIRS = (
    {"id": "1", "prompt": "What is it?", "chosen": "A list.", "rejected": "It is the quick brown fox."},
    {"id": "2", "prompt": "Open it?", "chosen": "Read every line of the file.", "rejected": "No."},
)


def test_preference_compares_both_answers_in_sum_and_per_token(engine: PlainEngine, tmp_path: Path) -> None:
    task = PreferenceTask(Preference(data=rows(tmp_path / "p.jsonl", *PAIRS)))
    scores = task.score(engine, task.items(given(engine.tokenizer)), given(engine.tokenizer), None)
    for place, pair in enumerate(PAIRS):
        sums, means = [], []
        for side in ("chosen", "rejected"):
            prompt = [{"role": "user", "content": pair["prompt"]}]
            opening = chat.render(engine.tokenizer, prompt, prompt=True)
            answer = pair[side] + "<|im_end|>"
            sums.append(logprob(engine, opening, answer))
            means.append(sums[-1] / len(engine.tokenizer(answer, add_special_tokens=False)["input_ids"]))
        assert scores.values["margin"][place] == pytest.approx(sums[0] - sums[1])
        assert scores.values["margin_per_token"][place] == pytest.approx(means[0] - means[1])
        assert scores.values["accuracy"][place] == float(sums[0] > sums[1])
        assert scores.values["accuracy_per_token"][place] == float(means[0] > means[1])


def test_preferences_of_the_datasets_test_split(engine: PlainEngine, tmp_path: Path) -> None:
    asked = given(engine.tokenizer, dataset_of("preference", tmp_path / "pairs", test=3))
    task = PreferenceTask(Preference())
    scores = task.score(engine, task.items(asked), asked, None)
    assert all(len(values) == 3 and all(map(math.isfinite, values)) for values in scores.values.values())
    with pytest.raises(InputError, match="holds sft rows, no preference pairs"):
        task.items(given(engine.tokenizer, small_dataset(tmp_path / "rows")))


def test_a_pair_of_equal_answers_is_refused(engine: PlainEngine, tmp_path: Path) -> None:
    data = rows(tmp_path / "p.jsonl", PAIRS[0], {**PAIRS[1], "rejected": PAIRS[1]["chosen"]})
    with pytest.raises(InputError, match=r"p\.jsonl:2: the row has the same answer as chosen and as rejected"):
        PreferenceTask(Preference(data=data)).items(given(engine.tokenizer))


@pytest.mark.parametrize("wrong", [{}, {"data": ""}, {"data": "q.jsonl", "shots": 3}, {"data": "q.jsonl", "max_items": 1}])
def test_settings_of_questions_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MultipleChoice.model_validate(wrong)


def test_tools_are_the_same_as_a_list_and_as_text_and_reach_the_chat_template(engine: PlainEngine, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + str(tokenizer.chat_template)
    told = PlainEngine(engine.model, tokenizer)
    found = {}
    for name, tools in {"list": TOOLS, "text": json.dumps(TOOLS), "none": None, "empty": ""}.items():
        data = rows(tmp_path / f"{name}.jsonl", *({**pair, "tools": tools} for pair in PAIRS))
        task = PreferenceTask(Preference(data=data))
        found[name] = task.score(told, task.items(given(tokenizer)), given(tokenizer), None).values
    assert found["list"] == found["text"] != found["none"] == found["empty"]


@pytest.mark.parametrize("tools", ["no json", "{}", {"type": "function"}, ["look_up"], 3])
def test_tools_that_are_no_list_of_objects_are_told_by_their_line(engine: PlainEngine, tmp_path: Path, tools: object) -> None:
    data = rows(tmp_path / "p.jsonl", *PAIRS, {"id": "9", "prompt": "Say.", "chosen": "a", "rejected": "b", "tools": tools})
    with pytest.raises(InputError, match=rf"p\.jsonl:{len(PAIRS) + 1}: the row .*tools"):
        PreferenceTask(Preference(data=data)).items(given(engine.tokenizer))
