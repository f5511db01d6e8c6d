"""Scores of words equal those of prompts that are written without them and scored one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from components.common.models import chat_templates
from components.common.runtime.errors import InputError
from components.common.runtime.reporters import SilentReporter
from components.evaluation.task_interface import Likelihood
from components.evaluation.transformers_engine import TransformersEngine
from pipelines.explanation import text_units, word_attribution
from pipelines.explanation.explained_answer import ExplainedAnswer, Question, build_answer, score_answer
from pipelines.explanation.word_attribution import LEAVE_ONE_OUT, RANDOM, attribute_words

REPORTER = SilentReporter()
ANSWER = "It returns None."


def ask(*turns: str, system: str = "") -> Question:
    messages = [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
    return Question([*([{"role": "system", "content": system}] if system else []), *messages])


def compute_logprob(loaded: Any, tokenizer: Any, messages: list[dict[str, Any]]) -> float:
    """Return the log-probability of ANSWER with its end of turn, from one forward pass of the rendered conversation."""
    import torch

    prompt = chat_templates.render_conversation(tokenizer, messages, prompt=True)
    opening = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([tokenizer(f"{prompt}{ANSWER}<|im_end|>", add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        values = torch.log_softmax(loaded(input_ids=ids, use_cache=False).logits[0].double(), -1)
    return sum(float(values[position - 1, ids[0, position]]) for position in range(len(opening), ids.shape[1]))


def test_scores_equal_a_recomputation_of_every_shortened_prompt(
    engine: TransformersEngine, loaded: Any, tokenizer: Any
) -> None:
    question = ask("Open the file, please.", "Done.", "What does it return?", system="Answer in one sentence.")
    answer = build_answer(engine, question, ANSWER, 8, REPORTER)
    found = attribute_words(engine, loaded, answer, "word", 0, REPORTER)
    whole = compute_logprob(loaded, tokenizer, question.messages)
    assert found.logprob == pytest.approx(whole, abs=1e-3)
    first = ["Open", "the", "file,", "please."]
    last = ["What", "does", "it", "return?"]
    assert [unit.text for unit in found.units] == [*first, *last]
    for number, score in enumerate(found.scores):
        turn, own = (1, first) if number < len(first) else (3, last)
        kept = " ".join(word for place, word in enumerate(own) if place != number % len(first))
        messages = [*question.messages[:turn], {"role": "user", "content": kept}, *question.messages[turn + 1 :]]
        assert score == pytest.approx(whole - compute_logprob(loaded, tokenizer, messages), abs=1e-3)


def test_deletion_figures_equal_a_recomputation(engine: TransformersEngine, loaded: Any, tokenizer: Any) -> None:
    question = ask("What does the quick brown fox return?")
    answer = build_answer(engine, question, ANSWER, 8, REPORTER)
    found = attribute_words(engine, loaded, answer, "word", 0, REPORTER)
    words = ["What", "does", "the", "quick", "brown", "fox", "return?"]
    order = sorted(range(len(words)), key=lambda number: -found.scores[number])
    effect = next(one for one in found.effects if one.method == LEAVE_ONE_OUT and one.share == 0.4)
    for removed, loss in ((order[:3], effect.removed), (order[3:], effect.kept)):
        kept = " ".join(word for number, word in enumerate(words) if number not in removed)
        rest = compute_logprob(loaded, tokenizer, ask(kept).messages)
        assert loss == pytest.approx(found.logprob - rest, abs=1e-3)
    errors = {one.method: one.removed_error for one in found.effects}
    assert errors[LEAVE_ONE_OUT] is None
    assert errors[RANDOM] is not None


def test_gradient_scores_sum_to_the_change_along_the_embeddings(
    engine: TransformersEngine, loaded: Any, tokenizer: Any
) -> None:
    """A scaled embedding changes the log-probability by the sum of gradient × input, to first order."""
    import torch

    question = ask("What does the file return?")
    answer = build_answer(engine, question, ANSWER, 8, REPORTER)
    units = text_units.split_units(question.messages, "word")
    scores = word_attribution.compute_gradient_scores(loaded, tokenizer, answer, units)
    assert scores is not None
    encoded = answer.encode(tokenizer, question.messages)
    ids = torch.tensor([[*encoded.prompt_ids, *encoded.answer_ids]])
    start, changed = len(encoded.prompt_ids), dict[float, float]()
    inside = [n for n, token in enumerate(encoded.prompt_ids) if "file" in tokenizer.decode([token])]
    for factor in (0.999, 1.001):
        embedded = loaded.get_input_embeddings()(ids).detach().clone()
        embedded[0, inside] *= factor
        with torch.no_grad():
            logits = loaded(inputs_embeds=embedded, use_cache=False).logits[0, start - 1 : -1].double()
        changed[factor] = float(torch.log_softmax(logits, -1).gather(1, ids[0, start:, None]).sum())
    slope = (changed[1.001] - changed[0.999]) / 0.002
    assert scores[[unit.text for unit in units].index("file")] == pytest.approx(slope, rel=0.05, abs=0.05)


def test_words_that_the_template_also_contains_are_located_in_the_message(tokenizer: Any) -> None:
    question = ask("user", "user", " assistant ")
    answer = ExplainedAnswer(question, ANSWER, False, True)
    positions = word_attribution._locate_units(tokenizer, answer, text_units.split_units(question.messages, "word"))
    assert positions is not None
    ids = answer.encode(tokenizer, question.messages).prompt_ids
    assert [tokenizer.decode([ids[n] for n in own]).strip() for own in positions] == ["user", "assistant"]
    before = [tokenizer.decode(ids[: own[0]]) for own in positions]
    assert before[0] == "<|im_start|>user\n"
    assert before[1].rstrip(" ").endswith("<|im_end|>\n<|im_start|>user\n")


def test_model_without_finite_numbers_is_refused(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = build_answer(engine, ask("Hello"), ANSWER, 8, REPORTER)
    monkeypatch.setattr(engine, "compute_likelihoods", lambda *_: [Likelihood(math.nan, 3, False)])
    with pytest.raises(InputError, match="the log-probability of the answer is nan, not a finite"):
        score_answer(engine, answer, [answer.question.messages], REPORTER)


@pytest.mark.parametrize(
    ("text", "unit", "expected"),
    [
        ("One, two. Three!  Four", "sentence", ["One, two.", "Three!", "Four"]),
        ("Pi is 3.14. Yes", "sentence", ["Pi is 3.14.", "Yes"]),
        ("Zeile eins\nZeile zwei", "sentence", ["Zeile eins", "Zeile zwei"]),
        ("os.path.join  joins", "word", ["os.path.join", "joins"]),
        ("東京は。 Tokyo", "word", ["東", "京", "は。", "Tokyo"]),
    ],
)
def test_units_of_a_text(text: str, unit: text_units.UnitName, expected: list[str]) -> None:
    messages = ask(text).messages
    units = text_units.split_units(messages, unit)
    assert [one.text for one in units] == expected
    assert text_units.remove_units(messages, units)[0]["content"] == ""
    assert text_units.remove_units(messages, units[1:])[0]["content"] == expected[0]
    assert messages[0]["content"] == text


def test_generated_answer_states_whether_it_was_cut_off(engine: TransformersEngine) -> None:
    answer = build_answer(engine, ask("What does it return?"), None, 3, REPORTER)
    assert answer.is_generated
    assert not answer.is_complete
    encoded = answer.encode(engine.tokenizer, answer.question.messages)
    whole = ExplainedAnswer(answer.question, answer.text, True, True).encode(engine.tokenizer, answer.question.messages)
    assert whole.answer_ids == [*encoded.answer_ids, engine.tokenizer.eos_token_id]


def test_prompt_and_answer_beyond_the_context_are_refused(engine: TransformersEngine) -> None:
    with pytest.raises(InputError, match=r"the prompt has 4,\d+ tokens; the model's context has 2,048"):
        build_answer(engine, ask("zq " * 1500), None, 8, REPORTER)
    with pytest.raises(InputError, match=r"the prompt and the answer have 3,\d+ tokens; the model's context has 2,048"):
        build_answer(engine, ask("Hello"), "zq " * 1000, 8, REPORTER)
    with pytest.raises(InputError, match="the answer is empty"):
        build_answer(engine, ask("Hello"), " ", 8, REPORTER)
