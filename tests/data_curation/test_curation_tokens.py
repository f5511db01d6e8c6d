import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.common.progress import Silent
from components.data_curation import tokens
from components.data_curation.rows import Row
from components.data_curation.tokens import Template, measure, packed, statistics
from tests.datasets import write_split

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}<{{ message.role }}> {{ message.content }}{% endif %} {% endfor %}"
)


@pytest.fixture
def model(tmp_path):
    """A folder with a tokenizer of words and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "<s>": 1, "</s>": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def conversation(number, question, answer):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Row("sft", {"messages": messages}, "", "rows", {}, "rows.jsonl", number, id=f"row{number}")


@pytest.fixture
def split(tmp_path):
    """Write rows of a kind as a split and return its path."""

    def write(rows, kind="sft", name="train"):
        write_split(tmp_path / f"{name}.parquet", kind, rows)
        return tmp_path / f"{name}.parquet"

    return write


def counted(splits, model, kind="sft", max_length=8, sample=1000):
    return measure(splits, kind, str(model), max_length, sample=sample, reporter=Silent())


def test_tokens_are_those_of_the_chat_template(split, model):
    # <s> <user> + words of the question + words of the answer + </s>
    rows = [conversation(1, "a b c", "d"), conversation(2, "a", "b c d e f g h i")]
    found = counted([split(rows)], model)
    assert (found.rows, found.measured, found.refused, found.estimated) == (2, 2, 0, False)
    assert (found.total, found.mean, found.longest) == (7 + 12, 9.5, 12)
    assert found.histogram == {8: 1, 16: 1}
    assert (found.truncated, found.lost) == (0.5, 4 / 19)
    assert (found.sequences, found.filled) == (2, 15 / 16)


def test_rows_of_all_splits_count(split, model):
    parts = [split([conversation(i, "a", "b")], name=f"part{i}") for i in range(3)]
    assert counted(parts, model).rows == 3


def test_neither_torch_nor_transformers_is_needed(split, model, monkeypatch):
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    assert counted([split([conversation(1, "a", "b")])], model).total == 5


def test_a_sample_is_the_same_in_any_order_and_its_total_is_scaled(split, model):
    rows = [conversation(i, "word " * (i % 7 + 1), "answer") for i in range(400)]
    one = counted([split(rows, name="one")], model, sample=100)
    other = counted([split(rows[::-1], name="other")], model, sample=100)
    assert one == other
    assert (one.rows, one.looked_at, one.measured, one.estimated) == (400, 100, 100, True)
    whole = counted([split(rows)], model)
    assert one.total == pytest.approx(whole.total, rel=0.1)
    assert one.total == round(one.mean * 400)


def test_rows_that_the_template_refuses_are_counted_apart(split, model):
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% if messages|length > 2 %}{{ raise_exception('two turns only') }}{% endif %}" + TEMPLATE
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    long = conversation(2, "a", "b")
    long.content["messages"] *= 2
    found = counted([split([conversation(1, "a", "b"), long])], model)
    assert (found.rows, found.measured, found.refused, found.total) == (2, 1, 1, 5)


def test_when_the_template_refuses_every_row_the_note_says_so(split, model):
    (model / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert counted([split([conversation(1, "a", "b")])], model) == (
        "No row could be written by the model's chat template, so tokens were not counted."
    )


def test_of_pairs_the_chosen_answer_counts(split, model):
    said = lambda role, text: [{"role": role, "content": text}]  # noqa: E731
    content = {"prompt": said("user", "a b"), "chosen": said("assistant", "c"), "rejected": said("assistant", "d e f g")}
    found = counted([split([Row("preference", content, "", "s", {}, "f", 1, id="x")], "preference")], model, "preference")
    assert found.total == 6


def test_answers_labelled_bad_are_in_no_figure(split, model):
    said = lambda role, text: [{"role": role, "content": text}]  # noqa: E731
    rows = [
        Row("unpaired", {"prompt": said("user", "a"), "completion": said("assistant", "b"), "label": good}, "", "s", {}, "f", i, id=f"{i}")
        for i, good in enumerate((True, False, False))
    ]
    found = counted([split(rows, "unpaired")], model, "unpaired")
    assert (found.rows, found.measured, found.total, found.estimated) == (3, 1, 5, False)


def test_plain_text_counts_with_the_token_that_ends_it(split, model):
    row = Row("text", {"text": "one two three "}, "", "s", {}, "f", 1, id="x")
    assert counted([split([row], "text")], model, "text").total == 4


def test_tools_are_written_with_the_template_for_them(model):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = Template.of(model)
    assert template.write([{"role": "user", "content": "x"}], [{"name": "ü<"}]) == '[{"name": "ü<"}]'
    assert template.write([{"role": "user", "content": "x"}]) == "plain"


def test_without_a_template_the_plain_one_is_used(model):
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    written = Template.of(model).write(messages)
    assert written.startswith("User: Hi")
    assert written.strip().endswith("Assistant: Hello</s>")


@pytest.mark.parametrize(
    ("base_model", "told"),
    [
        ("", "Tokens were not counted: no base model is named (data_curation.tokens.base_model)."),
        ("/nowhere/model", "Tokens were not counted: the tokenizer.json of /nowhere/model is not on this machine."),
        ("hf://nobody/model", "Tokens were not counted: fine_tuning.base_model: hf://nobody/model does not name a revision."),
        ("embedded:other", "Tokens were not counted: fine_tuning.base_model: there is no embedded model embedded:other."),
    ],
)
def test_where_there_is_no_tokenizer_a_sentence_says_why(split, base_model, told):
    assert counted([split([conversation(1, "a", "b")])], base_model) == told


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("tokenizer.json", "{}", "tokenizer.json cannot be read: "),
        ("chat_template.jinja", "{% if %}", "its chat template is none: "),
        ("tokenizer_config.json", "{", "Expecting property name"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_told_and_stops_nothing(split, model, name, text, told):
    (model / name).write_text(text)
    found = counted([split([conversation(1, "a", "b")])], model)
    assert found.startswith(f"The tokenizer of {model} cannot be used, so tokens were not counted: {told}")


def test_a_template_cannot_reach_out_of_its_sandbox(model):
    (model / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    assert Template.of(model).write([{"role": "user", "content": "x"}]) is None


def test_rows_are_packed_largest_first_into_the_fullest_sequence_that_has_room():
    assert packed([5, 3, 3, 2, 2, 1], 8) == 2
    assert packed([8, 8, 1], 8) == 3
    assert packed([4, 4, 4], 7) == 3


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_packing_stays_between_the_bounds_that_hold_for_any(lengths):
    least = math.ceil(sum(lengths) / 20)
    assert least <= packed(lengths, 20) <= min(len(lengths), math.ceil(11 / 9 * least) + 1 + sum(n > 10 for n in lengths))


def test_percentiles_and_classes_of_known_lengths():
    found = statistics(list(range(1, 101)), 1000, model="m", rows=100, looked_at=100)
    assert found.percentiles == {50: 50, 90: 90, 99: 99}
    assert found.histogram == {1: 1, 2: 1, 4: 2, 8: 4, 16: 8, 32: 16, 64: 32, 128: 36}
    assert (found.truncated, found.lost, found.longest) == (0, 0, 100)


@pytest.mark.model
def test_conversations_are_written_as_transformers_writes_them(model):
    from components.common import chat, models

    messages = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
    real = models.base_model("embedded:smollm2-135m-instruct").path
    for folder in (model, real):
        tokenizer = models.load_tokenizer(folder)
        written = Template.of(folder).write(messages)
        assert written == chat.render(tokenizer, messages)
        ids = tokens._tokenizer(folder).encode(written, add_special_tokens=False).ids
        assert ids == chat.encode(tokenizer, messages, max_length=1000).input_ids
