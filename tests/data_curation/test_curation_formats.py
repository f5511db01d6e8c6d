import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data_curation import formats
from components.data_curation.formats import ShapeError, rows_of
from components.data_curation.readers import Record

USER = {"role": "user", "content": "Why?"}
ASSISTANT = {"role": "assistant", "content": "Because."}
SYSTEM = {"role": "system", "content": "Be brief."}
ALPACA = "Below is an instruction.\n\n### Instruction:\nWhy?\n\n### Response:\n"


def row(fields, form="auto"):
    (only,) = rows_of(Record("file.jsonl", 7, fields), form)
    return only


@pytest.mark.parametrize(
    "fields",
    [
        {"instruction": "Why?", "input": "", "output": "Because.", "text": "Below is an instruction …"},
        {"instruction": "Why?", "context": "", "response": "Because.", "category": "open_qa"},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
        {"messages": [USER, ASSISTANT]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}, ASSISTANT]},
        {"prompt": "Why?", "completion": "Because."},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": "Why?", "response": "Because."},
        {"question": "Why?", "answer": "Because."},
        {"instruction": "Why?", "instances": [{"input": "", "output": "Because."}]},
        {"text": "\n\nHuman: Why?\n\nAssistant: Because."},
        {"prompt": "\n\nHuman: Why?\n\nAssistant:", "response": "Because."},
    ],
    ids=[
        "alpaca",
        "dolly",
        "sharegpt",
        "openai",
        "parts",
        "completion",
        "conversational",
        "response",
        "question",
        "instances",
        "transcript",
        "hh-prompt",
    ],
)
def test_every_sft_format_gives_the_same_conversation(fields):
    assert row(fields).kind == "sft"
    assert row(fields).content["messages"] == [USER, ASSISTANT]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "Why?", "chosen": "Because.", "rejected": "No."},
        {"question": "Why?", "response_j": "Because.", "response_k": "No."},
        {"chosen": [USER, ASSISTANT], "rejected": [USER, {"role": "assistant", "content": "No."}]},
        {"prompt": "Why?", "chosen": [USER, ASSISTANT], "rejected": [USER, {"role": "assistant", "content": "No."}]},
        {
            "conversations": [{"from": "human", "value": "Why?"}],
            "chosen": {"from": "gpt", "value": "Because."},
            "rejected": {"from": "gpt", "value": "No."},
        },
        {"chosen": "\n\nHuman: Why?\n\nAssistant: Because.", "rejected": "\n\nHuman: Why?\n\nAssistant: No."},
        {"instruction": "Why?", "output_1": "No.", "output_2": "Because.", "preference": 1.9},
    ],
    ids=["strings", "paired", "conversations", "both", "sharegpt", "hh", "scored"],
)
def test_every_preference_format_gives_the_same_pair(fields):
    assert row(fields).kind == "preference"
    pair = row(fields).content
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ([USER], [ASSISTANT], [{"role": "assistant", "content": "No."}])


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER, ASSISTANT], "label": True},
        {"prompt": "Why?", "completion": "Because.", "label": "true"},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}], "kto_tag": 1},
    ],
)
def test_labelled_rows_become_unpaired_rows(fields):
    assert row(fields).kind == "unpaired"
    assert row(fields).content == {"prompt": [USER], "completion": [ASSISTANT], "label": True, "tools": None}


def test_a_pair_of_longer_conversations_keeps_what_they_share_as_the_prompt():
    more = [USER, ASSISTANT, {"role": "user", "content": "Really?"}]
    parted = row({"chosen": [*more, ASSISTANT], "rejected": [*more, {"role": "assistant", "content": "No."}]}).content
    assert (parted["prompt"], parted["chosen"]) == (more, [ASSISTANT])


def test_an_equal_pair_of_conversations_still_has_its_answers():
    parted = row({"chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT]}).content
    assert (parted["prompt"], parted["chosen"], parted["rejected"]) == ([USER], [ASSISTANT], [ASSISTANT])


def test_a_system_prompt_comes_first():
    assert row({"system": "Be brief.", "instruction": "Why?", "output": "Because."}).content["messages"] == [SYSTEM, USER, ASSISTANT]


def test_the_input_follows_the_instruction():
    assert row({"instruction": "Sum up.", "input": "A text.", "output": "It."}).content["messages"][0]["content"] == "Sum up.\n\nA text."


@pytest.mark.parametrize("key", ["instruction", "prompt", "question"])
@pytest.mark.parametrize("about", ["input", "context"])
@pytest.mark.parametrize(
    ("answers", "prompt"),
    [
        ({"output": "It."}, "messages"),
        ({"completion": "It."}, "messages"),
        ({"response": "It."}, "messages"),
        ({"response": "It.", "label": False}, "prompt"),
        ({"chosen": "It.", "rejected": "No."}, "prompt"),
    ],
    ids=["output", "completion", "response", "kto", "preference"],
)
def test_what_a_question_is_about_follows_it_in_every_format(key, about, answers, prompt):
    found = row({key: "Sum up.", about: "A text.", **answers})
    assert found.content[prompt][0] == {"role": "user", "content": "Sum up.\n\nA text."}
    assert found.meta == {}


def test_a_prompt_that_holds_its_input_already_is_left_as_it_is():
    found = row({"prompt": "Sum up:\nA text.\nBriefly.", "input": "A text.", "completion": "It."})
    assert found.content["messages"][0]["content"] == "Sum up:\nA text.\nBriefly."
    assert found.meta == {"input": "A text."}


def test_a_second_thing_that_a_question_is_about_and_one_that_is_no_text_stand_in_meta():
    assert row({"instruction": "Sum up.", "input": "A text.", "context": "More.", "output": "It."}).meta == {"context": "More."}
    assert row({"question": "Why?", "context": ["a", "b"], "answer": "It."}).meta == {"context": ["a", "b"]}


def test_a_number_is_what_an_instruction_is_about_too():
    assert row({"instruction": "Double it.", "input": 5, "output": "10"}).content["messages"][0]["content"] == "Double it.\n\n5"


def test_an_id_or_source_that_is_no_name_stands_in_meta():
    found = row({"prompt": "Why?", "completion": "Because.", "id": {"$oid": "a0"}, "source": ["a", "b"]})
    assert (found.own_id, found.source) == ("", "file.jsonl")
    assert found.meta == {"id": {"$oid": "a0"}, "source": ["a", "b"]}


def test_what_a_turn_holds_beside_its_words_stands_in_meta_under_the_key_of_the_turns():
    found = row({"messages": [{**USER, "name": "Ann"}, {**ASSISTANT, "reasoning_content": "Hm.", "refusal": None}]})
    assert found.content["messages"] == [USER, ASSISTANT]
    assert found.meta == {"messages": [{"name": "Ann"}, {"reasoning_content": "Hm."}]}


def test_alpacas_ready_made_text_is_left_out_only_where_it_repeats_the_rest():
    fields = {"instruction": "Why?", "input": "It.", "output": "Because."}
    assert row({**fields, "text": f"{ALPACA}\nIt.\nBecause."}).meta == {}
    assert row({**fields, "text": f"{ALPACA}\nBecause."}).meta == {"text": f"{ALPACA}\nBecause."}


def test_an_answer_that_brings_other_turns_than_the_prompt_keeps_them_in_meta():
    longer = [SYSTEM, USER, ASSISTANT]
    found = row({"prompt": "Why?", "chosen": longer, "rejected": [USER, {"role": "assistant", "content": "No."}]})
    assert (found.content["prompt"], found.content["chosen"]) == ([USER], [ASSISTANT])
    assert found.meta == {"chosen": longer}


def test_an_old_function_call_of_openai_becomes_the_assistants_text():
    call = {"role": "assistant", "content": None, "function_call": {"name": "rain", "arguments": "{}"}}
    found = row({"messages": [USER, call], "functions": [{"name": "rain"}]})
    assert json.loads(found.content["messages"][1]["content"]) == {"name": "rain", "arguments": {}}
    assert (json.loads(found.content["tools"]), found.meta) == ([{"name": "rain"}], {})


def test_a_template_in_the_prompt_is_kept_as_it_stands():
    assert row({"prompt": ALPACA, "response": "Because."}).content["messages"][0]["content"] == ALPACA


def test_sharegpt_tools_calls_and_observations_are_kept():
    turns = [("human", "Rain?"), ("function_call", '{"name": "rain", "arguments": {}}'), ("observation", "yes"), ("gpt", "It rains.")]
    found = row({"conversations": [{"from": a, "value": b} for a, b in turns], "tools": '[{"name": "rain"}]'})
    assert [m["role"] for m in found.content["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert json.loads(found.content["tools"]) == [{"name": "rain"}]


def test_openai_tool_calls_become_the_assistants_text():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "rain", "arguments": '{"where": "here"}'}}]}
    found = row({"messages": [USER, call], "tools": [{"type": "function"}]})
    assert json.loads(found.content["messages"][1]["content"]) == {"name": "rain", "arguments": {"where": "here"}}


def test_several_instances_of_a_task_are_several_rows():
    fields = {"id": "t", "instruction": "Add.", "instances": [{"input": "1", "output": "2"}, {"input": "2", "output": "3"}]}
    assert [r.own_id for r in rows_of(Record("f", 1, fields))] == ["t.1", "t.2"]


def test_plain_text_is_a_text_row_with_the_rest_as_meta():
    found = row({"text": "Once upon a time.", "url": "u", "id": 3, "source": "book"})
    assert (found.kind, found.content, found.meta, found.own_id, found.source) == (
        "text",
        {"text": "Once upon a time."},
        {"url": "u"},
        "3",
        "book",
    )


def test_a_forced_format_reads_what_would_be_recognised_otherwise():
    fields = {"instruction": "Why?", "output": "Because.", "text": "Why? Because."}
    assert row(fields).kind == "sft"
    assert row(fields, "text").content == {"text": "Why? Because."}


def test_a_forced_format_says_which_key_is_missing():
    with pytest.raises(ShapeError, match="alpaca needs the key 'instruction'; found text"):
        row({"text": "…"}, "alpaca")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"foo": 1, "bar": 2}, "unknown shape: keys bar, foo"),
        ({"x" * 70 + "@example.com": 1}, "unknown shape: keys a text of 82 characters$"),
        ({f"k{n}": 1 for n in range(10, 24)}, "k20, k21 and 2 more$"),
        ({"messages": []}, "not a list of turns"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "a turn by 'alien'"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is a int"),
        ({"messages": ["hello"]}, "not an object"),
        ({"instruction": "Why?", "output": None}, "not text"),
        ({"prompt": "\ud800", "completion": "x"}, "lone surrogate"),
        ({"instruction": "Why?", "output_1": "a", "output_2": "b", "preference": 1.5}, "chooses neither"),
        ({"messages": [USER, ASSISTANT], "tools": "{not json"}, "tools that are not JSON"),
        ({"messages": [USER], "label": True}, "without a completion"),
    ],
)
def test_what_is_not_its_format_says_why(fields, why):
    with pytest.raises(ShapeError, match=why):
        row(fields)


# Texts are numbered as they are made, so that each stands in one place of a record.
NUMBER = 987654
VALUES = {
    "text": "{}",
    "number": NUMBER,
    "list": ["{}", "{}"],
    "object": {"inner": "{}"},
    "turn": {"role": "assistant", "content": "{}", "weight": "{}"},
    "turns": [{"role": "system", "content": "{}"}, {"from": "human", "value": "{}", "name": "{}"}, {"role": "assistant", "content": "{}"}],
    "json": '[{{"name": "{}"}}]',
    "pairs": [["{}", "{}"]],
    "objects": [{"input": "{}", "output": "{}", "note": "{}", "id": "{}"}, {"output": "{}"}],
    "transcript": "\n\nHuman: {}\n\nAssistant: {}",
    "same_question": "\n\nHuman: Why?\n\nAssistant: {}",
    "yes": True,
    "nothing": None,
}
KEYS = [*formats.QUESTION_KEYS, *formats.ANSWER_KEYS, *formats.TEXT_KEYS, *formats.LABEL_KEYS, *formats.TOOL_KEYS, *formats.SYSTEM_KEYS]
KEYS += ["context", "history", "messages", "conversations", "conversation", "instances", "chosen", "rejected", "response_j", "response_k"]
KEYS += ["output_1", "output_2", "id", "source", "url"]
SHAPES = [
    {"prompt": "text", "chosen": "text", "rejected": "text"},
    {"prompt": "text", "chosen": "turns", "rejected": "turns"},
    {"chosen": "same_question", "rejected": "same_question"},
    {"question": "text", "response_j": "text", "response_k": "text"},
    {"instruction": "text", "output_1": "text", "output_2": "text", "preference": "number"},
    {"instruction": "text", "response": "text", "label": "yes"},
    {"conversations": "turns", "kto_tag": "yes"},
    {"messages": "turns"},
    {"conversations": "turns"},
    {"instruction": "text", "response": "text"},
    {"instruction": "text", "output": "text"},
    {"instruction": "text", "instances": "objects"},
    {"prompt": "text", "completion": "text"},
    {"prompt": "turns", "completion": "turn"},
    {"input": "text", "output": "text"},
    {"text": "transcript"},
    {"text": "text"},
]


def made(shape):
    """A record of these values, and every text in it."""
    texts = [f"word{number:03d}" for number in range(200)]
    numbered = iter(texts)
    record = {key: filled(VALUES[value], numbered) for key, value in shape.items()}
    return record, texts[: texts.index(next(numbered))] + [str(NUMBER)] * ("number" in shape.values())


def filled(value, numbered):
    if isinstance(value, str):
        return value.format(*itertools.islice(numbered, value.count("{}")))
    if isinstance(value, list):
        return [filled(inner, numbered) for inner in value]
    return {key: filled(inner, numbered) for key, inner in value.items()} if isinstance(value, dict) else value


def missing(shape, form="auto"):
    """The texts of a record that none of its rows holds; None where it is quarantined."""
    record, texts = made(shape)
    try:
        rows = rows_of(Record("file", 1, record), form)
    except ShapeError:
        return None
    held = json.dumps([[r.content, r.own_id, r.source, r.meta] for r in rows])
    return [text for text in texts if text not in held]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape))
def test_of_a_recognised_record_no_text_is_lost_whatever_one_key_more_it_has(shape):
    found = {(key, value): missing({**shape, key: value}) for key in KEYS if key not in shape for value in VALUES}
    assert missing(shape) == []
    assert {more: lost for more, lost in found.items() if lost} == {}
    assert sum(lost is not None for lost in found.values()) > len(found) * 0.8


@settings(max_examples=400)
@given(
    st.sampled_from(SHAPES),
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from(sorted(VALUES)), max_size=8),
    st.sampled_from(["auto", *formats.FORMATS]),
)
def test_no_text_of_any_record_is_lost_in_any_format(shape, more, form):
    assert not missing({**shape, **more}, form)
