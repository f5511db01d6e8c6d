import pytest

from components.data_curation import instructions
from components.data_curation.config import InstructionConfig
from components.data_curation.formats import rows_of
from components.data_curation.readers import Record


def row(record):
    (made,) = rows_of(Record("f", 1, record))
    return made


def chat(*turns, **more):
    """A conversation from strings such as "user: hello"."""
    parted = [turn.split(": ", 1) for turn in turns]
    return row({"messages": [{"role": role, "content": content} for role, content in parted], **more})


def ask(question, answer):
    return row({"prompt": question, "completion": answer})


def found(made, **config):
    drop = instructions.drop(made, InstructionConfig(**config))
    return (drop.reason, drop.detail) if drop else None


QUESTION = "What would you like to know about the weather in Hamburg?"
CUT = {"cut_answers": True, "min_cut_characters": 20}


# --- the order of turns -----------------------------------------------------------------------------------------------------------


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
    assert found(chat(*turns)) is None


@pytest.mark.parametrize(
    ("turns", "detail"),
    [
        (["user: q", "user: q", "assistant: a"], "turn 2 is the user's after the user's"),
        (["user: q", "assistant: a", "assistant: a"], "turn 3 is the assistant's after the assistant's"),
        (["assistant: a", "user: q", "assistant: a"], "turn 1 is the assistant's and nobody asked"),
        (["system: s", "assistant: a", "user: q", "assistant: a"], "turn 2 is the assistant's after the system's"),
        (["user: q", "assistant: a", "system: s", "user: q", "assistant: a"], "turn 3 is the system's after the assistant's"),
        (["user: q", "tool: r", "assistant: a"], "turn 2 is the tool's after the user's"),
        (["user: q", "assistant: call", "tool: r", "user: q", "assistant: a"], "turn 4 is the user's after the tool's"),
        (["user: q", "assistant: a", "user: thanks"], "the last turn is the user's"),
        (["user: q", "assistant: call", "tool: r"], "the last turn is the tool's"),
    ],
)
def test_turns_out_of_order_are_dropped_with_the_first_fault(turns, detail):
    assert found(chat(*turns)) == ("broken_roles", detail)
    assert found(chat(*turns), broken_roles=False) is None


def test_both_answers_of_a_pair_must_fit_the_prompt():
    good = [{"role": "assistant", "content": "Yes."}]
    bad = [{"role": "user", "content": "Yes."}]
    assert found(row({"prompt": "q", "chosen": good, "rejected": "No."})) is None
    assert found(row({"prompt": "q", "chosen": good, "rejected": [*good, *good]})) == (
        "broken_roles",
        "turn 3 is the assistant's after the assistant's",
    )
    prompt = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert found(row({"prompt": prompt, "chosen": "c", "rejected": "d"}))[0] == "broken_roles"
    made = row({"prompt": "q", "completion": "a", "label": True})
    assert found(made) is None
    made.content["completion"] = bad
    assert found(made) == ("broken_roles", "turn 2 is the user's after the user's")


# --- what an answer says ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer", ["<nooutput>", "<noinput>".replace("in", "out"), "No output.", "[no output]", "nan", "...", "… …", "___"]
)
def test_an_answer_that_stands_for_none_is_empty(answer):
    reason, detail = found(ask(QUESTION, answer))
    assert reason == "empty_answer"
    assert detail == f"an answer is only {answer!r}"
    assert found(ask(QUESTION, answer), placeholders=False) is None


@pytest.mark.parametrize("answer", ["None", "0", "-3", "?", "N/A", "NaN is not a number.", "No", "Nancy", "👍", "[]", "NaN"])
def test_short_answers_that_say_something_are_kept(answer):
    assert found(ask(QUESTION, answer)) is None


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
def test_an_answer_that_only_repeats_the_question_is_dropped(answer):
    assert found(ask(QUESTION, answer)) == ("echoed_answer", "an answer only repeats the question")
    assert found(ask(QUESTION, answer), echoes=False) is None


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
def test_an_answer_that_says_more_or_a_greeting_is_no_echo(question, answer):
    assert found(ask(question, answer)) is None


def test_an_answer_that_repeats_the_first_of_several_questions_is_no_echo_of_all():
    assert found(chat(f"user: {QUESTION}", "assistant: Rain.", "user: Why?", "assistant: Clouds.")) is None


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
def test_a_boilerplate_refusal_is_dropped(answer):
    reason, detail = found(ask(QUESTION, answer))
    assert reason == "boilerplate_refusal"
    assert detail == "1 of 1 answers refuse by rote"
    assert found(ask(QUESTION, answer), refusals=False) is None


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
        "As an AI language model, I cannot choose. " + "The first sport has a long history and the second is younger. " * 8,
    ],
)
def test_an_answer_that_helps_all_the_same_or_is_no_refusal_is_kept(answer):
    assert found(ask(QUESTION, answer)) is None


def test_refusals_stay_in_pairs_in_labelled_rows_and_beside_tools():
    refusal = "I'm sorry, but I can't assist with that."
    assert found(row({"prompt": QUESTION, "chosen": "It rains.", "rejected": refusal})) is None
    assert found(row({"prompt": QUESTION, "completion": refusal, "label": False})) is None
    assert found(chat(f"user: {QUESTION}", f"assistant: {refusal}", tools=[{"name": "order_pizza"}])) is None
    assert found(chat(f"user: {QUESTION}", "assistant: call", "tool: r", f"assistant: {refusal}")) is None


def test_a_conversation_goes_when_half_of_its_answers_refuse():
    refusal, good = "assistant: I'm sorry, but I can't assist with that.", "assistant: It rains."
    ask_ = f"user: {QUESTION}"
    assert found(chat(ask_, good, ask_, refusal))[1].startswith("1 of 2 answers refuse")
    assert found(chat(ask_, good, ask_, refusal, ask_, good)) is None


# --- answers that break off -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        ("The bridge was built of iron, stone, and a lot of wood,", "an answer ends with ','"),
        ("The bridge was built of iron and stone, which serves as a reminder of the importance of", "an answer ends with the word 'of'"),
        ("The bridge was built of iron and of stone and it was the", "an answer ends with the word 'the'"),
        ("The bridge was built of several materials (", "an answer ends with '('"),
        ("Here is the program:\n```python\ndef bridge():\n    return iron +", "an answer ends within a code block"),
    ],
)
def test_an_answer_that_breaks_off_is_dropped_when_told(answer, detail):
    assert found(ask(QUESTION, answer), **CUT) == ("cut_answer", detail)
    assert found(ask(QUESTION, answer)) is None
    assert found(ask(QUESTION, answer), cut_answers=True, min_cut_characters=200) is None


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
def test_an_answer_that_ends_as_answers_do_is_kept(answer):
    assert found(ask(QUESTION, answer), **CUT) is None


def test_of_a_pair_only_the_chosen_answer_is_judged_to_be_cut():
    good, cut = "The bridge was built of iron and of stone.", "The bridge was built of iron and of the"
    assert found(row({"prompt": QUESTION, "chosen": good, "rejected": cut}), **CUT) is None
    assert found(row({"prompt": QUESTION, "chosen": cut, "rejected": good}), **CUT)[0] == "cut_answer"


def test_a_text_is_no_conversation():
    assert found(row({"text": "..."}), **CUT) is None
