"""Near-duplicates among rows that share a system prompt, a retrieved passage or a template."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from components.common.row_comparison.prompt_lines import PromptLines
from components.common.row_comparison.words import WORD_PATTERN, find_words
from components.data_curation import chunk_worker
from components.data_curation.comparison import recurring_context
from components.data_curation.config import DataCurationConfig
from components.data_curation.normalized_words import normalize_answer, normalize_words, split_row_words
from components.data_curation.reading.raw_records import Record
from components.data_curation.rows import Row
from tests.data_curation.conftest import build_conversation, build_distinct_row


def build_words(seed, count):
    """Return words of a vocabulary of 2,000, like a text without templates."""
    rng = random.Random(seed)
    return [f"v{rng.randrange(2000)}" for _ in range(count)]


def build_text(seed, count):
    return " ".join(build_words(seed, count))


def edit(text, position):
    words = text.split()
    return " ".join([*words[:position], "edited", *words[position + 1 :]])


def add_system(row, system):
    return {"messages": [{"role": "system", "content": system}, *row["messages"]]}


def build_sets():
    """Return datasets of 300 rows with a common context, by name. Each has contexts of its own."""
    yes_or_no = [("yes", "no")[n % 3 == 0] for n in range(300)]
    questions = ["Any city?", *(build_text(f"fixed{n}", 8) for n in range(4))]
    prefix = build_text("prefix", 120)

    def passage(name, n):
        return build_text(f"{name} passage {n // 5}", 120)

    prompted = [build_conversation(build_text(f"q{n}", 12), build_text(f"a{n}", 20)) for n in range(300)]
    system = build_text("system", 349)
    return {
        "one system prompt": [add_system(row, system) for row in prompted],
        "five questions": [
            build_conversation(f"{build_text(f'f{n % 5}', 9)}\n\n{passage('five', n)}", build_text(f"b{n}", 15))
            for n in range(300)
        ],
        "short answers": [
            build_conversation(f"{build_text(f'own{n}', 10)}\n\n{passage('short', n)}", yes_or_no[n])
            for n in range(300)
        ],
        "five fixed questions": [
            add_system(build_conversation(questions[n % 5], yes_or_no[n]), passage("fixed", n)) for n in range(300)
        ],
        "a template": [
            build_conversation(f"Context:\n{passage('in', n)}\n\nQuestion: {questions[n % 5]}", yes_or_no[n])
            for n in range(300)
        ],
        "one beginning": [
            build_conversation(f"{prefix} {build_text(f'p{n}', 10)}", build_text(f"c{n}", 10)) for n in range(300)
        ],
    }


@pytest.mark.daft
def test_rows_with_a_common_context_are_kept_and_edited_answers_are_found(write_rows, curate_files, read_rows):
    sets, edited, files = build_sets(), {}, []
    for name, rows in sets.items():
        edited[name] = []
        for row in rows[:40:4]:
            *prompt, answer = row["messages"]
            if len(answer["content"]) > 5:  # an edited "no" is another answer
                content = edit(answer["content"], -1)
                edited[name].append({"messages": [*prompt, {"role": "assistant", "content": content}]})
        files.append(write_rows([*rows, *edited[name]], f"{name}.jsonl"))
    rejected = read_rows(curate_files(*files), "rejected")
    for name, rows in sets.items():
        lines = {row["line"] for row in rejected if row["source"] == f"{name}.jsonl"}
        assert len([line for line in lines if line <= len(rows)]) <= 0.05 * len(rows), name
        assert lines >= set(range(len(rows) + 1, len(rows) + len(edited[name]) + 1)), name


@pytest.mark.daft
def test_edited_copies_of_rows_without_common_context_are_compared_whole(write_rows, curate_files, read_rows):
    rows = [
        build_conversation(edit(build_text(f"q{n}", 60), copy * 7), build_text(f"a{n}", 30))
        for n in range(30)
        for copy in range(2)
    ]
    rejected = read_rows(curate_files(write_rows([*rows, *map(build_distinct_row, range(150))])), "rejected")
    assert [row["line"] for row in rejected] == list(range(2, 61, 2))


@pytest.mark.daft
def test_edited_copies_of_a_prompt_with_several_lines_are_found(write_rows, curate_files, read_rows):
    rows = []
    for n in range(20):
        lines = [build_text(f"q{n}line{line}", 20) for line in range(6)]
        answer = build_text(f"a{n}", 8)
        for copy in range(6):
            prompt = "\n".join([*lines[:copy], edit(lines[copy], 10), *lines[copy + 1 :]])
            rows.append(build_conversation(prompt, answer))
    rejected = read_rows(curate_files(write_rows([*rows, *map(build_distinct_row, range(150))])), "rejected")
    assert [row["line"] for row in rejected] == [line for line in range(1, 121) if line % 6 != 1]


def test_chunk_without_recurring_lines_is_compared_whole(tmp_path):
    rows = [[add_system(build_distinct_row(n), build_text("system", 30)) for n in range(4)], [build_distinct_row(9)]]
    for number, chunk in enumerate(rows):
        records = [Record("f", line, row) for line, row in enumerate(chunk)]
        chunk_worker.prepare_chunk(number, records, "sft", DataCurationConfig(), None, tmp_path)
    compared = recurring_context.write_compared_texts(sorted(tmp_path.glob("texts-*.parquet")))
    words = [parquet.read_table(file)["words"].to_pylist() for file in compared]
    assert all(text.startswith("=") and len(text.split()) < 30 for text in words[0])
    assert words[1] == [normalize_words("What is thing number 9? " + build_distinct_row(9)["messages"][1]["content"])]


def build_row(*messages):
    content = [{"role": role, "content": text} for role, text in messages]
    return Row("sft", {"messages": content}, "", "", {}, "f", 1)


def test_row_is_normalized_line_by_line_like_its_text():
    row = build_row(("system", "Be kind.\n\nBe Short!"), ("user", "Sag's\nauf 日本語"), ("assistant", "Ja — gut."))
    words, lines = split_row_words(row)
    assert " ".join(words) == normalize_words(row.text()) == "be kind be short sag s auf 日 本 語 ja gut"
    assert (lines.ends, lines.turn_start) == ([2, 4, 6, 10], 4)
    words, lines = split_row_words(build_row(("user", "?!"), ("assistant", "…  —")))
    assert (words, lines) == (["?!", "…", "—"], PromptLines([], 0))


@given(st.text(st.characters(max_codepoint=0x7F)))
def test_words_of_ascii_are_those_of_the_pattern(text):
    assert find_words(text) == WORD_PATTERN.findall(text.lower())


MESSAGES = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text("aB1 _?\n京é", max_size=12)), max_size=5
)


@given(MESSAGES)
def test_words_of_answers_are_those_of_their_text(messages):
    row = build_row(*messages)
    answer = normalize_answer(row, 1, *split_row_words(row))
    assert answer == normalize_words("\n".join(row.answers()))
    assert normalize_answer(row, 99, *split_row_words(row)) is None


def test_preference_pair_and_text_have_their_answer_whole():
    content = {
        "prompt": [{"role": "user", "content": "one two"}],
        "chosen": [{"role": "assistant", "content": "three"}],
        "rejected": [{"role": "assistant", "content": "four"}],
    }
    words, lines = split_row_words(Row("preference", content, "", "", {}, "f", 1))
    assert (words, lines) == (["one", "two", "three", "four"], PromptLines([2], 0))
    words, lines = split_row_words(Row("text", {"text": "one\ntwo"}, "", "", {}, "f", 1))
    assert (words, lines) == (["one", "two"], PromptLines([], 0))


def test_recurring_lines_are_left_out_of_the_prompt_only():
    words = [*build_words("context", 20), *build_words("own", 8), *build_words("context", 20)]
    lines = PromptLines([20, 28], 0)
    assert lines.select_words(words, PromptLines([20], 0).list_keys(words))[1:] == words[20:]
    assert lines.select_words(words, []) == words


def test_shared_beginning_of_a_line_is_left_out():
    shared, question, answer = build_words("shared", 40), build_words("q", 7), build_words("a", 5)
    lines = PromptLines([47], 0)
    keys = [set(PromptLines([40 + n], 0).list_keys([*shared, *build_words(f"o{n}", n)])) for n in (5, 6)]
    selected = lines.select_words([*shared, *question, *answer], keys[0] & keys[1])
    assert selected[1:] == [*question, *answer]
    assert selected[0].startswith("=")


def test_last_user_turn_of_recurring_lines_matches_only_equal_turns():
    passage, question, other = (build_words(name, 12) for name in ("passage", "question", "other"))
    answer = build_words("answer", 5)
    recurring = PromptLines([12, 24, 36], 0).list_keys([*passage, *question, *other])

    def select(*lines):
        words = [word for line in lines for word in line]
        return PromptLines([12 * (n + 1) for n in range(len(lines))], 0).select_words([*words, *answer], recurring)

    one, again, another = select(passage, question), select(passage, question), select(passage, other)
    assert one == again
    assert set(one) & set(another) == set(answer)
    assert len(one) == 29
