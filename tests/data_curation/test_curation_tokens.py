"""Token statistics: chat templates, sampling, truncation and packing."""

import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.common.models import standalone_tokenizer
from components.common.models.standalone_tokenizer import ChatTemplate
from components.common.runtime.reporters import SilentReporter
from components.data_curation.config import TokensConfig
from components.data_curation.rows import Row
from components.data_curation.token_statistics import (
    compute_statistics,
    count_packed_sequences,
    measure_tokens,
)
from tests.datasets import write_split

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}<{{ message.role }}> {{ message.content }}{% endif %} {% endfor %}"
)


@pytest.fixture
def model(tmp_path):
    """Create a model folder with a word tokenizer and a chat template."""
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


def build_row(number, question, answer):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Row("sft", {"messages": messages}, "", "rows", {}, "rows.jsonl", number, id=f"row{number}")


@pytest.fixture
def make_split(tmp_path):
    """Return the function that writes rows of a kind as a split and returns its path."""

    def write(rows, kind="sft", name="train"):
        write_split(tmp_path / f"{name}.parquet", kind, rows)
        return tmp_path / f"{name}.parquet"

    return write


def count_tokens(splits, model, kind="sft", max_length=8, sample=1000):
    config = TokensConfig.model_construct(base_model=str(model), max_length=max_length, sample=sample)
    return measure_tokens(splits, kind, config, SilentReporter())


def test_tokens_are_counted_with_the_chat_template(make_split, model):
    # <s> <user> + words of the question + words of the answer + </s>
    rows = [build_row(1, "a b c", "d"), build_row(2, "a", "b c d e f g h i")]
    statistics = count_tokens([make_split(rows)], model)
    assert (statistics.rows, statistics.measured, statistics.refused_by_template, statistics.is_estimated) == (
        2,
        2,
        0,
        False,
    )
    assert (statistics.total, statistics.mean, statistics.longest) == (7 + 12, 9.5, 12)
    assert statistics.histogram == {8: 1, 16: 1}
    assert (statistics.truncated_rows, statistics.truncated_tokens) == (0.5, 4 / 19)
    assert (statistics.sequences, statistics.packed_utilization) == (2, 15 / 16)


def test_rows_of_all_splits_are_counted(make_split, model):
    parts = [make_split([build_row(i, "a", "b")], name=f"part{i}") for i in range(3)]
    assert count_tokens(parts, model).rows == 3


def test_counting_needs_neither_torch_nor_transformers(make_split, model, monkeypatch):
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    assert count_tokens([make_split([build_row(1, "a", "b")])], model).total == 5


def test_sample_is_independent_of_order_and_its_total_is_scaled(make_split, model):
    rows = [build_row(i, "word " * (i % 7 + 1), "answer") for i in range(400)]
    sample = count_tokens([make_split(rows, name="one")], model, sample=100)
    reversed_sample = count_tokens([make_split(rows[::-1], name="other")], model, sample=100)
    assert sample == reversed_sample
    assert (sample.rows, sample.sampled, sample.measured, sample.is_estimated) == (400, 100, 100, True)
    full_statistics = count_tokens([make_split(rows)], model)
    assert sample.total == pytest.approx(full_statistics.total, rel=0.1)
    assert sample.total == round(sample.mean * 400)


def test_rows_that_the_template_refuses_are_counted_separately(make_split, model):
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% if messages|length > 2 %}{{ raise_exception('two turns only') }}{% endif %}" + TEMPLATE
    )
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    long_row = build_row(2, "a", "b")
    long_row.content["messages"] *= 2
    statistics = count_tokens([make_split([build_row(1, "a", "b"), long_row])], model)
    assert (statistics.rows, statistics.measured, statistics.refused_by_template, statistics.total) == (2, 1, 1, 5)


def test_template_that_refuses_every_row_is_reported(make_split, model):
    (model / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert count_tokens([make_split([build_row(1, "a", "b")])], model) == (
        f"Tokens were not counted: the sample contains no row that training uses and that the chat template of {model} accepts."
    )


def test_only_the_chosen_answer_of_a_pair_is_counted(make_split, model):
    make_turns = lambda role, text: [{"role": role, "content": text}]  # noqa: E731
    content = {
        "prompt": make_turns("user", "a b"),
        "chosen": make_turns("assistant", "c"),
        "rejected": make_turns("assistant", "d e f g"),
    }
    statistics = count_tokens(
        [make_split([Row("preference", content, "", "s", {}, "f", 1, id="x")], "preference")], model, "preference"
    )
    assert statistics.total == 6


def test_answers_with_a_negative_label_are_not_counted(make_split, model):
    make_turns = lambda role, text: [{"role": role, "content": text}]  # noqa: E731
    rows = [
        Row(
            "unpaired",
            {"prompt": make_turns("user", "a"), "completion": make_turns("assistant", "b"), "label": label},
            "",
            "s",
            {},
            "f",
            i,
            id=f"{i}",
        )
        for i, label in enumerate((True, False, False))
    ]
    statistics = count_tokens([make_split(rows, "unpaired")], model, "unpaired")
    assert (statistics.rows, statistics.measured, statistics.total, statistics.is_estimated) == (3, 1, 5, False)


def test_plain_text_is_counted_with_its_end_token(make_split, model):
    row = Row("text", {"text": "one two three "}, "", "s", {}, "f", 1, id="x")
    assert count_tokens([make_split([row], "text")], model, "text").total == 4


def test_tools_are_rendered_with_the_tool_template(model):
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = ChatTemplate.load(model)
    assert template.render([{"role": "user", "content": "x"}], [{"name": "ü<"}]) == '[{"name": "ü<"}]'
    assert template.render([{"role": "user", "content": "x"}]) == "plain"


def test_default_template_is_used_if_the_model_has_none(model):
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rendered = ChatTemplate.load(model).render(messages)
    assert rendered.startswith("User: Hi")
    assert rendered.strip().endswith("Assistant: Hello</s>")


@pytest.mark.parametrize(
    ("base_model", "message"),
    [
        ("", "Tokens were not counted: no base model is set (data_curation.tokens.base_model)."),
        ("/nowhere/model", "Tokens were not counted: the tokenizer.json of /nowhere/model is not on this machine."),
        (
            "hf://nobody/model",
            "Tokens were not counted: fine_tuning.base_model: hf://nobody/model is not of the form hf://org/name@revision.",
        ),
        (
            "embedded:other",
            "Tokens were not counted: fine_tuning.base_model: embedded model embedded:other does not exist.",
        ),
    ],
)
def test_missing_tokenizer_is_explained(make_split, base_model, message):
    assert count_tokens([make_split([build_row(1, "a", "b")])], base_model) == message


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json cannot be read: "),
        ("chat_template.jinja", "{% if %}", "invalid chat template: "),
        ("tokenizer_config.json", "{", "Expecting property name"),
    ],
)
def test_unusable_tokenizer_is_reported_without_failing(make_split, model, name, text, message):
    (model / name).write_text(text)
    statistics = count_tokens([make_split([build_row(1, "a", "b")])], model)
    assert statistics.startswith(f"Tokens were not counted: the tokenizer of {model} cannot be used: {message}")


def test_hostile_template_is_reported_without_failing(make_split, model):
    (model / "chat_template.jinja").write_text("{{ 'a' * 10**10 }}")
    assert "needs more than 2 GiB of memory" in count_tokens([make_split([build_row(1, "a", "b")])], model)


def test_additional_template_is_used_for_tools(model):
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} tools")
    assert ChatTemplate.load(model).render([{"role": "user", "content": "x"}], [{}]) == "1 tools"


def test_template_is_sandboxed(model):
    (model / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    assert ChatTemplate.load(model).render([{"role": "user", "content": "x"}]) is None


def test_rows_are_packed_best_fit_decreasing():
    assert count_packed_sequences([5, 3, 3, 2, 2, 1], 8) == 2
    assert count_packed_sequences([8, 8, 1], 8) == 3
    assert count_packed_sequences([4, 4, 4], 7) == 3


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_packing_stays_within_the_bin_packing_bounds(lengths):
    lower_bound = math.ceil(sum(lengths) / 20)
    assert (
        lower_bound
        <= count_packed_sequences(lengths, 20)
        <= min(len(lengths), math.ceil(11 / 9 * lower_bound) + 1 + sum(n > 10 for n in lengths))
    )


def test_percentiles_and_histogram_of_known_lengths():
    statistics = compute_statistics(list(range(1, 101)), 1000, model="m", rows=100, sampled=100)
    assert statistics.percentiles == {50: 50, 90: 90, 99: 99}
    assert statistics.histogram == {1: 1, 2: 1, 4: 2, 8: 4, 16: 8, 32: 16, 64: 32, 128: 36}
    assert (statistics.truncated_rows, statistics.truncated_tokens, statistics.longest) == (0, 0, 100)


@pytest.mark.model
def test_conversations_are_rendered_as_in_transformers(model):
    from components.common.models import chat_templates, model_loading

    messages = [
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    real = model_loading.resolve_base_model("embedded:smollm2-135m-instruct").path
    for folder in (model, real):
        tokenizer = model_loading.load_tokenizer(folder)
        rendered = ChatTemplate.load(folder).render(messages)
        assert rendered == chat_templates.render_conversation(tokenizer, messages)
        ids = standalone_tokenizer.load_tokenizer(folder).encode(rendered, add_special_tokens=False).ids
        assert ids == chat_templates.encode_conversation(tokenizer, messages, max_length=1000).input_ids
