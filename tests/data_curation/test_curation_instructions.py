"""Conversation filters: turn order, placeholders, echoes, refusals and cut answers."""

import pytest

from components.data_curation.config import DataCurationConfig, InstructionConfig
from components.data_curation.filters.conversation_filters import CONVERSATION_FILTERS
from components.data_curation.filters.measured_row import MeasuredRow
from components.data_curation.reading.raw_records import Record
from components.data_curation.reading.record_formats import parse_record


def parse_row(record):
    (row,) = parse_record(Record("f", 1, record))
    return row


def build_chat(*turns, **fields):
    """Build a conversation from strings such as "user: hello"."""
    roles_and_contents = [turn.split(": ", 1) for turn in turns]
    return parse_row(
        {"messages": [{"role": role, "content": content} for role, content in roles_and_contents], **fields}
    )


def build_question_row(question, answer):
    return parse_row({"prompt": question, "completion": answer})


def find_rejection(row, **config):
    settings = DataCurationConfig(instructions=InstructionConfig(**config))
    rejection = CONVERSATION_FILTERS.find_rejection(MeasuredRow(row), settings)
    return (rejection.reason, rejection.detail) if rejection else None


QUESTION = "What would you like to know about the weather in Hamburg?"
CUT_SETTINGS = {"cut_answers": True, "min_cut_characters": 20}


# --- order of turns ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "turns",
    [
        ["user: q", "assistant: a"],
        ["system: s", "user: q", "assistant: a", "user: q", "assistant: a"],
        ["user: q", "assistant: call", "tool: result", "assistant: a"],
        [
            "user: q",
            "assistant: calls",
            "tool: one",
            "tool: two",
            "assistant: call",
            "tool: three",
            "assistant: a",
            "user: q",
            "assistant: a",
        ],
    ],
)
def test_turns_in_order_are_kept(turns):
    assert find_rejection(build_chat(*turns)) is None


@pytest.mark.parametrize(
    ("turns", "detail"),
    [
        (["user: q", "user: q", "assistant: a"], "turn 2 has the role user; expected assistant"),
        (["user: q", "assistant: a", "assistant: a"], "turn 3 has the role assistant; expected tool or user"),
        (["assistant: a", "user: q", "assistant: a"], "turn 1 has the role assistant; expected system or user"),
        (["system: s", "assistant: a", "user: q", "assistant: a"], "turn 2 has the role assistant; expected user"),
        (
            ["user: q", "assistant: a", "system: s", "user: q", "assistant: a"],
            "turn 3 has the role system; expected tool or user",
        ),
        (["user: q", "tool: r", "assistant: a"], "turn 2 has the role tool; expected assistant"),
        (
            ["user: q", "assistant: call", "tool: r", "user: q", "assistant: a"],
            "turn 4 has the role user; expected assistant or tool",
        ),
        (["user: q", "assistant: a", "user: thanks"], "the last turn has the role user; expected assistant"),
        (["user: q", "assistant: call", "tool: r"], "the last turn has the role tool; expected assistant"),
    ],
)
def test_turns_out_of_order_are_rejected_with_the_first_fault(turns, detail):
    assert find_rejection(build_chat(*turns)) == ("broken_roles", detail)
    assert find_rejection(build_chat(*turns), broken_roles=False) is None


def test_both_answers_of_a_pair_must_fit_the_prompt():
    good = [{"role": "assistant", "content": "Yes."}]
    bad = [{"role": "user", "content": "Yes."}]
    assert find_rejection(parse_row({"prompt": "q", "chosen": good, "rejected": "No."})) is None
    assert find_rejection(parse_row({"prompt": "q", "chosen": good, "rejected": [*good, *good]})) == (
        "broken_roles",
        "turn 3 has the role assistant; expected tool or user",
    )
    prompt = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert find_rejection(parse_row({"prompt": prompt, "chosen": "c", "rejected": "d"}))[0] == "broken_roles"
    row = parse_row({"prompt": "q", "completion": "a", "label": True})
    assert find_rejection(row) is None
    row.content["completion"] = bad
    assert find_rejection(row) == ("broken_roles", "turn 2 has the role user; expected assistant")


# --- content of answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer", ["<nooutput>", "<noinput>".replace("in", "out"), "No output.", "[no output]", "nan", "...", "… …", "___"]
)
def test_placeholder_answer_counts_as_empty(answer):
    reason, detail = find_rejection(build_question_row(QUESTION, answer))
    assert reason == "empty_answer"
    assert detail == f"an answer consists only of {answer!r}"
    assert find_rejection(build_question_row(QUESTION, answer), placeholders=False) is None


@pytest.mark.parametrize(
    "answer", ["None", "0", "-3", "?", "N/A", "NaN is not a number.", "No", "Nancy", "👍", "[]", "NaN"]
)
def test_short_meaningful_answers_are_kept(answer):
    assert find_rejection(build_question_row(QUESTION, answer)) is None


@pytest.mark.parametrize(
    "answer",
    [
        QUESTION,
        QUESTION.lower(),
        f'"{QUESTION}"',
        f"{QUESTION}\n{QUESTION}",
        "What would you like to know — about the weather in Hamburg",
        f"**{QUESTION}**",
    ],
)
def test_answer_that_only_repeats_the_question_is_rejected(answer):
    assert find_rejection(build_question_row(QUESTION, answer)) == (
        "echoed_answer",
        "an answer only repeats the question",
    )
    assert find_rejection(build_question_row(QUESTION, answer), echoes=False) is None


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (QUESTION, f"{QUESTION} Everything!"),
        (QUESTION, "What would you like to know?"),
        ("Hello there!", "Hello there!"),
        ("Repeat after me: the cat sat on the mat.", "The cat sat on the mat."),
        ("?????????????????????????", "!!!!!!!!!!!!!!!!!!!!!!!!!"),
    ],
)
def test_longer_answer_or_greeting_is_not_an_echo(question, answer):
    assert find_rejection(build_question_row(question, answer)) is None


def test_conversation_of_several_questions_is_not_an_echo():
    assert (
        find_rejection(build_chat(f"user: {QUESTION}", "assistant: Rain.", "user: Why?", "assistant: Clouds.")) is None
    )


@pytest.mark.parametrize(
    "answer",
    [
        "As an AI language model, I cannot browse the internet.",
        "I'm sorry, but as an AI language model, I don't have access to real-time data.",
        "I’m sorry, I’m an AI language model and do not have access to real-time market data. Please consult a broker.",
        "I am just an AI and I am not able to taste food.",
        "As a large language model, I do not have personal opinions.",
        "As an artificial intelligence assistant, I'm not capable of feeling love.",
        "As an AI, I am programmed to be helpful, so I can't do that.",
        "I'm sorry, but I can't assist with that.",
        "I’m sorry, but I cannot fulfill this request. Is there anything else I can help with?",
        "Sorry, I am unable to help with this question.",
    ],
)
def test_boilerplate_refusal_is_rejected(answer):
    reason, detail = find_rejection(build_question_row(QUESTION, answer))
    assert reason == "boilerplate_refusal"
    assert detail == "boilerplate refusals in 1 of 1 answer"
    assert find_rejection(build_question_row(QUESTION, answer), refusals=False) is None


@pytest.mark.parametrize(
    "answer",
    [
        "As an AI language model, I do not have feelings. However, I can describe what poets say of love.",
        "As an AI assistant, I do not possess personal preferences, but I can certainly offer some suggestions.",
        "As an AI, I cannot draw. Here are the steps:\n1. Take a pencil.",
        "As an AI assistant developed by the team, I got the name Ada.",
        "As an AI researcher, I cannot recommend that library.",
        "I'm sorry that you are not happy with your purchase. We would like to offer you a refund.",
        "I'm sorry, but the website is unavailable.",
        "Unfortunately, I can't answer that question. Pounds and kilograms are both units of weight.",
        "I cannot help with that knot. Rain shrinks the rope.",
        "AI language models cannot feel.",
        "As an AI language model, I cannot choose. "
        + "The first sport has a long history and the second is younger. " * 8,
    ],
)
def test_helpful_answer_with_refusal_wording_is_kept(answer):
    assert find_rejection(build_question_row(QUESTION, answer)) is None


def test_refusals_in_pairs_labelled_rows_and_tool_use_are_kept():
    refusal = "I'm sorry, but I can't assist with that."
    assert find_rejection(parse_row({"prompt": QUESTION, "chosen": "It rains.", "rejected": refusal})) is None
    assert find_rejection(parse_row({"prompt": QUESTION, "completion": refusal, "label": False})) is None
    assert (
        find_rejection(build_chat(f"user: {QUESTION}", f"assistant: {refusal}", tools=[{"name": "order_pizza"}]))
        is None
    )
    assert (
        find_rejection(build_chat(f"user: {QUESTION}", "assistant: call", "tool: r", f"assistant: {refusal}")) is None
    )


def test_conversation_is_rejected_if_half_of_its_answers_refuse():
    refusal, good = "assistant: I'm sorry, but I can't assist with that.", "assistant: It rains."
    question = f"user: {QUESTION}"
    assert find_rejection(build_chat(question, good, question, refusal))[1].startswith(
        "boilerplate refusals in 1 of 2 answers"
    )
    assert find_rejection(build_chat(question, good, question, refusal, question, good)) is None


# --- cut answers -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        ("The bridge was built of iron, stone, and a lot of wood,", "an answer ends with ','"),
        (
            "The bridge was built of iron and stone, which serves as a reminder of the importance of",
            "an answer ends with the word 'of'",
        ),
        ("The bridge was built of iron and of stone and it was the", "an answer ends with the word 'the'"),
        ("The bridge was built of several materials (", "an answer ends with '('"),
        ("Here is the program:\n```python\ndef bridge():\n    return iron +", "an answer ends in an open code block"),
    ],
)
def test_cut_answer_is_rejected_if_configured(answer, detail):
    assert find_rejection(build_question_row(QUESTION, answer), **CUT_SETTINGS) == ("cut_answer", detail)
    assert find_rejection(build_question_row(QUESTION, answer)) is None
    assert find_rejection(build_question_row(QUESTION, answer), cut_answers=True, min_cut_characters=200) is None


@pytest.mark.parametrize(
    "answer",
    [
        "The bridge was built of iron and of stone.",
        "Dear Ada,\nthank you for your letter about the bridge.\n\nSincerely,",
        "Dear Ada,\nthank you for your letter about the bridge.\n\nBest regards,",
        "Mountains in the list:\n- Makalu, in Nepal and China",
        "The bridge carries cars and the trains that we all know it is for",
        "A question of grammar: the answer is vitamin A",
        "Some code follows here\n    values = [1, 2, three, four,",
        "Here it is:\n```python\nx = 1\n```\nand then once more:\n```\nThat is all, good luck!",
        "See https://example.org/the/bridge/of",
        "The total cost of the bridge is 1,234",
    ],
)
def test_answer_with_a_regular_end_is_kept(answer):
    assert find_rejection(build_question_row(QUESTION, answer), **CUT_SETTINGS) is None


def test_only_the_chosen_answer_of_a_pair_is_checked_for_cuts():
    good, cut = "The bridge was built of iron and of stone.", "The bridge was built of iron and of the"
    assert find_rejection(parse_row({"prompt": QUESTION, "chosen": good, "rejected": cut}), **CUT_SETTINGS) is None
    assert (
        find_rejection(parse_row({"prompt": QUESTION, "chosen": cut, "rejected": good}), **CUT_SETTINGS)[0]
        == "cut_answer"
    )


def test_conversation_filters_ignore_texts():
    assert find_rejection(parse_row({"text": "..."}), **CUT_SETTINGS) is None
