import json

import pytest

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
