"""Record formats: parsing into rows without loss of text."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data_curation.reading import record_formats
from components.data_curation.reading.raw_records import Record
from components.data_curation.reading.record_formats import RecordFormatError, parse_record

USER = {"role": "user", "content": "Why?"}
ASSISTANT = {"role": "assistant", "content": "Because."}
SYSTEM = {"role": "system", "content": "Be brief."}
ALPACA = "Below is an instruction.\n\n### Instruction:\nWhy?\n\n### Response:\n"


def parse_row(fields, format_name="auto"):
    (row,) = parse_record(Record("file.jsonl", 7, fields), format_name)
    return row


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
def test_sft_formats_give_the_same_conversation(fields):
    assert parse_row(fields).kind == "sft"
    assert parse_row(fields).content["messages"] == [USER, ASSISTANT]


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
def test_preference_formats_give_the_same_pair(fields):
    assert parse_row(fields).kind == "preference"
    pair = parse_row(fields).content
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == (
        [USER],
        [ASSISTANT],
        [{"role": "assistant", "content": "No."}],
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER, ASSISTANT], "label": True},
        {"prompt": "Why?", "completion": "Because.", "label": "true"},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}], "kto_tag": 1},
    ],
)
def test_labelled_rows_become_unpaired_rows(fields):
    assert parse_row(fields).kind == "unpaired"
    assert parse_row(fields).content == {"prompt": [USER], "completion": [ASSISTANT], "label": True, "tools": None}


@pytest.mark.parametrize(
    "fields",
    [
        {"Instruction": "Why?", "Input": "", "OUTPUT": "Because."},
        {"Messages": [{"Role": "User", "Content": "Why?"}, {"ROLE": "Assistant", "CONTENT": "Because."}]},
        {"Conversations": [{"From": "Human", "Value": "Why?"}, {"From": "GPT", "Value": "Because."}]},
        {"Question": "Why?", "Answer": "Because."},
        {"Prompt": {"Role": "user", "Content": "Why?"}, "Completion": "Because."},
        {"Instruction": "Why?", "Instances": [{"Input": "", "Output": "Because."}]},
    ],
    ids=["alpaca", "openai", "sharegpt", "question", "turn", "instances"],
)
def test_case_of_keys_does_not_matter(fields):
    assert parse_row(fields).content["messages"] == [USER, ASSISTANT]


BUSINESS_COLUMNS = {
    "Tools": "hammer",
    "Functions": "sales",
    "System": "SAP ERP",
    "Label": "1",
    "History": "2024",
    "Preference": "phone",
}


@pytest.mark.parametrize(
    "fields",
    [
        {"Question": "Why?", "Answer": "Because.", **BUSINESS_COLUMNS},
        {"instruction": "Why?", "output": "Because.", "Context": "crm-7", "Input": "web", **BUSINESS_COLUMNS},
        {"prompt": "Why?", "completion": "Because.", "Messages": "none", "Text": "A note.", **BUSINESS_COLUMNS},
    ],
    ids=["title case", "context", "conversation"],
)
def test_columns_of_an_export_in_another_case_stay_in_meta(fields):
    row = parse_row(fields)
    assert (row.kind, row.content) == ("sft", {"messages": [USER, ASSISTANT], "tools": None})
    assert row.meta == {key: value for key, value in fields.items() if value not in ("Why?", "Because.")}


def test_configured_format_is_read_in_any_case_beside_keys_of_another_format():
    row = parse_row({"text": "A note.", "Prompt": "Why?", "Completion": "Because."}, "prompt_completion")
    assert (row.content["messages"], row.meta) == ([USER, ASSISTANT], {"text": "A note."})


def test_case_of_keys_does_not_matter_for_context_pairs_and_ids():
    assert parse_row({"Prompt": "Why?", "Chosen": "Because.", "Rejected": "No."}).kind == "preference"
    row = parse_row({"Instruction": "Why?", "Context": "It rains.", "Response": "Because."})
    assert row.content["messages"][0]["content"] == "Why?\n\nIt rains."
    row = parse_row({"Text": "Rain.", "ID": 7, "Source": "weather", "Region": "North"})
    assert (row.own_id, row.source, row.meta) == ("7", "weather", {"Region": "North"})


def test_of_keys_that_differ_in_case_the_lower_case_one_is_used_and_none_is_lost():
    row = parse_row({"Text": "A title", "text": "Rain.", "TEXT": "RAIN"})
    assert (row.content["text"], row.meta) == ("Rain.", {"Text": "A title", "TEXT": "RAIN"})
    row = parse_row({"Text": "Rain.", "TEXT": "RAIN"})
    assert (row.content["text"], row.meta) == ("Rain.", {"TEXT": "RAIN"})


def test_shared_turns_of_a_pair_become_the_prompt():
    shared = [USER, ASSISTANT, {"role": "user", "content": "Really?"}]
    pair = parse_row(
        {"chosen": [*shared, ASSISTANT], "rejected": [*shared, {"role": "assistant", "content": "No."}]}
    ).content
    assert (pair["prompt"], pair["chosen"]) == (shared, [ASSISTANT])


def test_equal_pair_of_conversations_keeps_its_answers():
    pair = parse_row({"chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT]}).content
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ([USER], [ASSISTANT], [ASSISTANT])


def test_system_prompt_comes_first():
    assert parse_row({"system": "Be brief.", "instruction": "Why?", "output": "Because."}).content["messages"] == [
        SYSTEM,
        USER,
        ASSISTANT,
    ]


def test_input_follows_the_instruction():
    assert (
        parse_row({"instruction": "Sum up.", "input": "A text.", "output": "It."}).content["messages"][0]["content"]
        == "Sum up.\n\nA text."
    )


@pytest.mark.parametrize("key", ["instruction", "prompt", "question"])
@pytest.mark.parametrize("context_key", ["input", "context"])
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
def test_input_or_context_follows_the_question_in_every_format(key, context_key, answers, prompt):
    row = parse_row({key: "Sum up.", context_key: "A text.", **answers})
    assert row.content[prompt][0] == {"role": "user", "content": "Sum up.\n\nA text."}
    assert row.meta == {}


def test_prompt_that_contains_its_input_is_unchanged():
    row = parse_row({"prompt": "Sum up:\nA text.\nBriefly.", "input": "A text.", "completion": "It."})
    assert row.content["messages"][0]["content"] == "Sum up:\nA text.\nBriefly."
    assert row.meta == {"input": "A text."}


def test_second_or_non_text_context_goes_to_meta():
    assert parse_row({"instruction": "Sum up.", "input": "A text.", "context": "More.", "output": "It."}).meta == {
        "context": "More."
    }
    assert parse_row({"question": "Why?", "context": ["a", "b"], "answer": "It."}).meta == {"context": ["a", "b"]}


def test_numeric_input_follows_the_instruction():
    assert (
        parse_row({"instruction": "Double it.", "input": 5, "output": "10"}).content["messages"][0]["content"]
        == "Double it.\n\n5"
    )


def test_structured_id_or_source_goes_to_meta():
    row = parse_row({"prompt": "Why?", "completion": "Because.", "id": {"$oid": "a0"}, "source": ["a", "b"]})
    assert (row.own_id, row.source) == ("", "file.jsonl")
    assert row.meta == {"id": {"$oid": "a0"}, "source": ["a", "b"]}


def test_extra_fields_of_turns_go_to_meta():
    row = parse_row({"messages": [{**USER, "name": "Ann"}, {**ASSISTANT, "reasoning_content": "Hm.", "refusal": None}]})
    assert row.content["messages"] == [USER, ASSISTANT]
    assert row.meta == {"messages": [{"name": "Ann"}, {"reasoning_content": "Hm."}]}


def test_alpaca_text_is_dropped_only_if_it_repeats_the_other_fields():
    fields = {"instruction": "Why?", "input": "It.", "output": "Because."}
    assert parse_row({**fields, "text": f"{ALPACA}\nIt.\nBecause."}).meta == {}
    assert parse_row({**fields, "text": f"{ALPACA}\nBecause."}).meta == {"text": f"{ALPACA}\nBecause."}


def test_answer_turns_that_differ_from_the_prompt_go_to_meta():
    longer = [SYSTEM, USER, ASSISTANT]
    row = parse_row({"prompt": "Why?", "chosen": longer, "rejected": [USER, {"role": "assistant", "content": "No."}]})
    assert (row.content["prompt"], row.content["chosen"]) == ([USER], [ASSISTANT])
    assert row.meta == {"chosen": longer}


def test_openai_function_call_becomes_assistant_text():
    call = {"role": "assistant", "content": None, "function_call": {"name": "rain", "arguments": "{}"}}
    row = parse_row({"messages": [USER, call], "functions": [{"name": "rain"}]})
    assert json.loads(row.content["messages"][1]["content"]) == {"name": "rain", "arguments": {}}
    assert (json.loads(row.content["tools"]), row.meta) == ([{"name": "rain"}], {})


def test_object_without_a_role_is_an_answer_in_json():
    for value, text in [
        ({"from": "Berlin", "seats": 2}, '{"from": "Berlin", "seats": 2}'),
        ([{"item": "Bär"}, {"item": "jar"}], '[{"item": "Bär"}, {"item": "jar"}]'),
        ({}, "{}"),
    ]:
        row = parse_row({"prompt": "Extract.", "completion": value})
        assert row.content["messages"][1] == {"role": "assistant", "content": text}
        assert row.meta == {}
    with pytest.raises(RecordFormatError, match="a turn without a role"):
        parse_row({"prompt": "Extract.", "completion": {"content": "an answer whose role is unknown"}})


def test_template_in_the_prompt_is_unchanged():
    assert parse_row({"prompt": ALPACA, "response": "Because."}).content["messages"][0]["content"] == ALPACA


def test_sharegpt_tools_calls_and_observations_are_kept():
    turns = [
        ("human", "Rain?"),
        ("function_call", '{"name": "rain", "arguments": {}}'),
        ("observation", "yes"),
        ("gpt", "It rains."),
    ]
    row = parse_row({"conversations": [{"from": a, "value": b} for a, b in turns], "tools": '[{"name": "rain"}]'})
    assert [m["role"] for m in row.content["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert json.loads(row.content["tools"]) == [{"name": "rain"}]


def test_openai_tool_calls_become_assistant_text():
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "rain", "arguments": '{"where": "here"}'}}],
    }
    row = parse_row({"messages": [USER, call], "tools": [{"type": "function"}]})
    assert json.loads(row.content["messages"][1]["content"]) == {"name": "rain", "arguments": {"where": "here"}}


def test_each_instance_of_a_task_becomes_a_row():
    fields = {
        "id": "t",
        "instruction": "Add.",
        "instances": [{"input": "1", "output": "2"}, {"input": "2", "output": "3"}],
    }
    assert [r.own_id for r in parse_record(Record("f", 1, fields))] == ["t.1", "t.2"]


def test_plain_text_becomes_a_text_row_with_meta():
    row = parse_row({"text": "Once upon a time.", "url": "u", "id": 3, "source": "book"})
    assert (row.kind, row.content, row.meta, row.own_id, row.source) == (
        "text",
        {"text": "Once upon a time."},
        {"url": "u"},
        "3",
        "book",
    )


def test_configured_format_overrides_detection():
    fields = {"instruction": "Why?", "output": "Because.", "text": "Why? Because."}
    assert parse_row(fields).kind == "sft"
    assert parse_row(fields, "text").content == {"text": "Why? Because."}


def test_configured_format_reports_the_missing_key():
    with pytest.raises(RecordFormatError, match="alpaca requires the key 'instruction'; found keys text"):
        parse_row({"text": "…"}, "alpaca")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"foo": 1, "bar": 2}, "unknown format: keys bar, foo"),
        ({"Question": "Why?", "Reply": "So."}, "unknown format: keys Question, Reply"),
        ({"x" * 70 + "@example.com": 1}, r"unknown format: keys \[82 characters\]$"),
        ({f"k{n}": 1 for n in range(10, 24)}, "k20, k21 and 2 more$"),
        ({"messages": []}, "messages of type list; expected a non-empty list of turns"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "a turn with the role 'alien'"),
        ({"messages": [{"role": "user", "content": 5}]}, "content of type int"),
        ({"messages": ["hello"]}, "a turn of type str; expected an object"),
        ({"instruction": "Why?", "output": None}, "output of type NoneType; expected text"),
        ({"prompt": "\ud800", "completion": "x"}, "lone surrogate"),
        ({"instruction": "Why?", "output_1": "a", "output_2": "b", "preference": 1.5}, "expected a number from 1"),
        ({"messages": [USER, ASSISTANT], "tools": "{not json"}, "invalid JSON in tools: "),
        ({"messages": [USER], "label": True}, "without a completion"),
    ],
)
def test_invalid_record_is_refused_with_the_reason(fields, message):
    with pytest.raises(RecordFormatError, match=message):
        parse_row(fields)


# Generated texts are numbered, so that each is in one place of a record.
NUMBER = 987654
VALUES = {
    "text": "{}",
    "number": NUMBER,
    "list": ["{}", "{}"],
    "object": {"inner": "{}"},
    "turn": {"role": "assistant", "content": "{}", "weight": "{}"},
    "turns": [
        {"role": "system", "content": "{}"},
        {"from": "human", "value": "{}", "name": "{}"},
        {"role": "assistant", "content": "{}"},
    ],
    "json": '[{{"name": "{}"}}]',
    "pairs": [["{}", "{}"]],
    "objects": [{"input": "{}", "output": "{}", "note": "{}", "id": "{}"}, {"output": "{}"}],
    "transcript": "\n\nHuman: {}\n\nAssistant: {}",
    "same_question": "\n\nHuman: Why?\n\nAssistant: {}",
    "yes": True,
    "nothing": None,
}
KEYS = [
    *record_formats.QUESTION_KEYS,
    *record_formats.ANSWER_KEYS,
    *record_formats.TEXT_KEYS,
    *record_formats.LABEL_KEYS,
    *record_formats.TOOL_KEYS,
    *record_formats.SYSTEM_KEYS,
]
KEYS += [
    "context",
    "history",
    "messages",
    "conversations",
    "conversation",
    "instances",
    "chosen",
    "rejected",
    "response_j",
    "response_k",
]
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


def build_record(shape):
    """Return a record of this shape and the texts in it."""
    texts = [f"word{number:03d}" for number in range(200)]
    unused_texts = iter(texts)
    record = {key: fill_template(VALUES[value], unused_texts) for key, value in shape.items()}
    return record, texts[: texts.index(next(unused_texts))] + [str(NUMBER)] * ("number" in shape.values())


def fill_template(value, unused_texts):
    if isinstance(value, str):
        return value.format(*itertools.islice(unused_texts, value.count("{}")))
    if isinstance(value, list):
        return [fill_template(inner, unused_texts) for inner in value]
    return (
        {key: fill_template(inner, unused_texts) for key, inner in value.items()} if isinstance(value, dict) else value
    )


def find_lost_texts(shape, format_name="auto"):
    """Return the texts of a record that none of its rows contains, or None if the record is quarantined."""
    record, texts = build_record(shape)
    try:
        rows = parse_record(Record("file", 1, record), format_name)
    except RecordFormatError:
        return None
    serialized = json.dumps([[r.content, r.own_id, r.source, r.meta] for r in rows])
    return [text for text in texts if text not in serialized]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape))
def test_recognised_record_with_any_extra_key_loses_no_text(shape):
    lost_by_extra = {
        (key, value): find_lost_texts({**shape, key: value}) for key in KEYS if key not in shape for value in VALUES
    }
    assert find_lost_texts(shape) == []
    assert {extra: lost for extra, lost in lost_by_extra.items() if lost} == {}
    assert sum(lost is not None for lost in lost_by_extra.values()) > len(lost_by_extra) * 0.8


@settings(max_examples=400)
@given(
    st.sampled_from(SHAPES),
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from(sorted(VALUES)), max_size=8),
    st.sampled_from(["auto", *record_formats.FORMATS]),
)
def test_no_record_loses_text_in_any_format(shape, extra, format_name):
    assert not find_lost_texts({**shape, **extra}, format_name)
