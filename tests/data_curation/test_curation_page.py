"""The curation report page and the statistics behind it."""

import re
from collections import Counter
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from components.common.runtime.reporters import SilentReporter
from components.data_curation import dataset_writer, prepared_chunks, report
from components.data_curation.config import DataCurationConfig, DecontaminationConfig
from components.data_curation.filters.reject_reasons import CONTAMINATED, NEAR_DUPLICATE, REJECT_REASONS
from components.data_curation.reading.raw_records import Source, UnreadableRecord
from components.data_curation.report_statistics import (
    MAX_EXAMPLES_PER_REASON,
    MAX_UNREADABLE_RECORDS,
    CurationStatistics,
    PersonalDataCount,
)
from components.data_curation.rows import choose_sample
from components.data_curation.stage import curate, list_sources, preview_curation, summarize_rows
from components.data_curation.token_statistics import compute_statistics

SOURCES = [
    Source(uri="/data/tickets.jsonl", sha256="a" * 64, bytes=1234),
    Source(uri="/data/web/tickets.jsonl", sha256="b" * 64, bytes=6),
]
SUMMARY = {
    "rows": {
        "in": 1000,
        "kept": 900,
        "quarantined": 4,
        "rejected": {
            "exact_duplicate": 50,
            "near_duplicate": 20,
            "contaminated": 6,
            "gopher_duplicate_lines": 15,
            "short_answer": 5,
        },
    },
    "splits": {"train": 830, "validation": 25, "test": 45},
    "rows_kind": "sft",
}


def build_statistics():
    statistics = CurationStatistics(
        evaluation_sets={"gsm8k.jsonl": {"items": 70, "unsearchable": 2, "unreadable": 0, "rejected_rows": 6}},
        notes=["one file is empty"],
    )
    for characters in (40, 60, 99_999):
        statistics.count_kept("tickets.jsonl", characters)
    statistics.count_kept("tickets.jsonl", 300)
    statistics.languages.update(en=2, und=1)
    statistics.count_rejected(
        CONTAMINATED.reject("shares 15 words with gsm8k.jsonl:17: 3 of 40 n-grams of its question"),
        "tickets.jsonl",
        7,
        "Natalia <sold> clips",
    )
    statistics.count_rejected(NEAR_DUPLICATE.reject("similarity 0.812 to abc"), "tickets.jsonl", 9, "It rains again")
    statistics.count_unreadable(UnreadableRecord("tickets.jsonl", 3, "invalid JSON"))
    statistics.personal = {"email": PersonalDataCount(3, 2, "redact"), "credit_card": PersonalDataCount(1, 1, "drop")}
    statistics.tokens = compute_statistics([100, 200, 300, 700], 256, model="my-llama", rows=900, sampled=4)
    return statistics


def extract_words(html):
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", html, flags=re.DOTALL)).split())


@pytest.fixture(scope="module")
def page_text():
    return extract_words(report.render(SUMMARY, SOURCES, build_statistics()))


@pytest.mark.parametrize(
    "expected",
    [
        "900 of 1,000 rows kept; row kind: sft",
        "one file is empty",
        "evaluation items 6",  # the flow chart
        "duplicates 70",
        "web heuristics 15",
        "empty, short or long 5",
        "quarantined 4",
        "near_duplicate is nearly equal to a kept row 20 2.0%",
        "gsm8k.jsonl 6 70 2",
        "email 3 2 replaced by a placeholder",
        "credit card 1 1 row rejected",
        "train 830 92.2%",
        "rows beyond the maximum 50.0%",
        "Tokens are counted in a sample of 4 of 900 rows, with the chat template and tokenizer of my-llama",
        "Orange: longer than the maximum row length of 256 tokens. Training truncates these rows. Exceptions: the objective "
        "text splits them; grpo, rloo and distill leave out rows whose prompt is longer.",
        "257–512",
        "undetermined",
        "A sample of 3 of 4 kept rows. ISO 639 codes",
        "contaminated · 6 rows tickets.jsonl:7: shares 15 words with gsm8k.jsonl:17: 3 of 40 n-grams of its question Natalia <sold> clips",
        "tickets.jsonl 3 invalid JSON",
        "quarantine.jsonl lists 4 quarantined records in total.",
        "tickets.jsonl 7 4 100.0% 2 1 1,240",
        "b" * 64,
    ],
)
def test_page_contains(page_text, expected):
    assert expected in page_text


def test_flow_counts_every_reason_in_its_group():
    rejected = dict.fromkeys(REJECT_REASONS, 1)
    groups = Counter(reason.group for reason in REJECT_REASONS.values())
    rows = {"in": 100, "kept": 100 - len(rejected), "quarantined": 0, "rejected": rejected}
    html = extract_words(report.render({**SUMMARY, "rows": rows}, SOURCES, CurationStatistics()))
    assert all(f"{group} {count}" in html for group, count in groups.items())


def test_duplicate_line_heuristic_is_not_listed_under_duplicates(page_text):
    assert "gopher_duplicate_lines" not in page_text.split("Duplicates")[1].split("Evaluation sets")[0]


def test_page_states_that_no_row_was_rejected():
    summary = {
        "rows": {"in": 2, "kept": 2, "quarantined": 0, "rejected": {}},
        "splits": {"train": 1, "test": 1},
        "rows_kind": "text",
    }
    statistics = CurationStatistics()
    statistics.count_kept("a.txt", 10)
    page = extract_words(report.render(summary, SOURCES[:1], statistics))
    for sentence in (
        "No row was rejected.",
        "No personal data or secrets found.",
        "data_curation.decontamination.sets is empty",
    ):
        assert sentence in page
    assert "Tokens" not in page
    assert "A sample of" not in page
    assert "Examples of dropped rows" not in page


def test_page_states_that_no_row_is_truncated():
    statistics = build_statistics()
    statistics.tokens = compute_statistics([3, 9, 100], 300, model="m", rows=3, sampled=3)
    page = extract_words(report.render(SUMMARY, SOURCES, statistics))
    assert "No row is longer than the maximum row length of 300 tokens." in page
    assert "Tokens are counted in all 3 rows" in page


def test_page_shows_how_similar_the_dropped_rows_were():
    statistics = build_statistics()
    statistics.similarities = {"near_duplicate": [0.72, 0.85, 0.86, 1.0]}
    page = extract_words(report.render(SUMMARY, SOURCES, statistics))
    assert "near_duplicate: similarity to the kept row." in page
    shown = page[: page.index("near_duplicate: similarity")]
    assert all(shown.count(f"0.{low}–0.{low + 5}") == 1 for low in (70, 75, 80, 85, 90))
    assert "0.65–0.70" not in shown


def test_equal_statistics_give_equal_pages():
    assert report.render(SUMMARY, SOURCES, build_statistics()) == report.render(SUMMARY, SOURCES, build_statistics())


def test_charts_have_a_readable_minimum_width():
    page = report.render(SUMMARY, SOURCES, build_statistics())
    assert len(re.findall(r"<figure[^>]*><span class=\"hint\">[^<]*</span><svg ", page)) == 5
    min_width = re.search(r"figure svg {[^}]*min-width: (\d+)rem", page)
    assert min_width
    assert int(min_width[1]) >= 40  # at which labels have 11 pixels; on a narrow screen the figure scrolls


def test_long_source_list_is_cut_and_counted():
    many = [Source(uri=f"/data/part-{i:05}.warc.gz", sha256=f"{i:064}", bytes=1) for i in range(5000)]
    page = extract_words(report.render(SUMMARY, many, build_statistics()))
    assert "The table shows the first 40 of 5,000 files. manifest.json lists all files." in page
    assert "part-04999" not in page


def test_examples_are_the_first_of_each_reason_and_shortened():
    statistics = CurationStatistics()
    for line in range(10):
        statistics.count_rejected(
            REJECT_REASONS["short_answer"].reject(f"{line}"),
            "f",
            line,
            "x" * 1000 if line else "\n".join("abcdefghijklmnop"),
        )
    assert [example.location for example in statistics.examples["short_answer"]] == ["f:0", "f:1", "f:2"]
    assert [example.text for example in statistics.examples["short_answer"][:2]] == [
        "\n".join("abcdefghijkl") + " …",
        "x" * 300 + " …",
    ]
    assert statistics.by_source == {"f": Counter(rejected=10)}


def test_examples_contain_no_personal_data():
    statistics = CurationStatistics()
    padding, email = "x" * 280, "jane.roe@corp.com"
    statistics.count_rejected(
        NEAR_DUPLICATE.reject(f"similarity 0.9 to {email}"),
        "f",
        1,
        f"{padding} write to {email} or +1 650-253-0000",
    )
    (example,) = statistics.examples["near_duplicate"]
    assert example.detail == "similarity 0.9 to <EMAIL>"
    assert example.text == f"{padding} write to <EMAIL> or <PHONE>"[:300] + " …"


ACTIONS, FILES = st.sampled_from(["keep", "reject", "miss"]), st.sampled_from(["a", "b"])


@given(st.lists(st.tuples(ACTIONS, FILES, st.integers(1, 400)), max_size=80))
def test_each_row_is_counted_once_and_examples_are_limited(events):
    statistics, reasons = CurationStatistics(), list(REJECT_REASONS.values())
    for line, (action, file, number) in enumerate(events):
        if action == "keep":
            statistics.count_kept(file, number * 40)
        elif action == "reject":
            statistics.count_rejected(reasons[number % 3].reject("why"), file, line, f"text {line}")
        else:
            statistics.count_unreadable(UnreadableRecord(file, line, "why"))
    assert sum(outcomes.total() for outcomes in statistics.by_source.values()) == len(events)
    assert statistics.lengths.total() == sum(action == "keep" for action, _, _ in events)
    unreadable_lines = [line for line, (action, _, _) in enumerate(events) if action == "miss"]
    assert [item.line for item in statistics.unread] == unreadable_lines[:MAX_UNREADABLE_RECORDS]
    for reason, examples in statistics.examples.items():
        rejected_lines = [
            line
            for line, (action, _, number) in enumerate(events)
            if action == "reject" and reason == reasons[number % 3].name
        ]
        assert [item.text for item in examples] == [f"text {line}" for line in rejected_lines[:MAX_EXAMPLES_PER_REASON]]


@pytest.fixture
def write_two_files(write_rows, make_conversation, make_distinct_row, tmp_path):
    """Return the function that writes the dataset of two files with duplicate, empty and unreadable rows; it returns counts and statistics."""
    write_rows(
        [*map(make_distinct_row, range(120)), *map(make_distinct_row, range(5)), make_conversation("Who?", "")],
        "a.jsonl",
    )
    with write_rows(map(make_distinct_row, range(110, 130)), "b.jsonl").open("a") as file:
        file.write("{broken\n" * 2)
    sources = list_sources([str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")], tmp_path)

    def run(out):
        (tmp_path / out).mkdir()
        with preview_curation(sources, DataCurationConfig(), seed=1, reporter=SilentReporter()) as preview:
            return summarize_rows(preview), dataset_writer.write_dataset(
                preview.prepared, preview.verdicts, tmp_path / out
            )

    return run


def test_writing_the_dataset_collects_the_outcome_of_every_row(write_two_files):
    summary, statistics = write_two_files("out")
    assert summary["rows"] == {
        "in": 148,
        "kept": 130,
        "quarantined": 2,
        "rejected": {"empty_answer": 1, "exact_duplicate": 15},
    }
    assert statistics.by_source == {
        "a.jsonl": Counter(kept=120, rejected=6),
        "b.jsonl": Counter(kept=10, rejected=10, quarantined=2),
    }
    assert statistics.lengths.total() == statistics.languages.total() == 130
    assert [item.location for item in statistics.examples["exact_duplicate"]] == [
        "a.jsonl:121",
        "a.jsonl:122",
        "a.jsonl:123",
    ]
    assert statistics.examples["exact_duplicate"][0].text.startswith("What is thing number 0?")
    assert [(item.file, item.line) for item in statistics.unread] == [("b.jsonl", 21), ("b.jsonl", 22)]


def test_languages_are_counted_in_the_rows_with_the_smallest_hashes(write_two_files, monkeypatch):
    identified = []
    monkeypatch.setattr(
        dataset_writer, "identify_language", lambda text: (identified.append(text) or text.split("?")[0][-1], 1.0)
    )
    monkeypatch.setattr(dataset_writer, "LANGUAGE_SAMPLE_ROWS", 40)
    _, statistics = write_two_files("out")
    assert len(identified) == statistics.languages.total() == 40
    ids = [f"row-{number}" for number in range(500)]
    chosen = {ids[index] for index in choose_sample(ids, 40)}
    assert len(chosen) == 40
    assert chosen == {ids[::-1][index] for index in choose_sample(ids[::-1], 40)}


def test_rejected_row_records_its_file_and_own_source(write_rows, make_distinct_row, tmp_path):
    copies = [
        {**make_distinct_row(1), "source": "desk"},
        {**make_distinct_row(1), "source": "jane.roe@corp.com"},
        make_distinct_row(1),
    ]
    sources = list_sources([str(write_rows([*copies, *map(make_distinct_row, range(2, 150))]))], tmp_path)
    with preview_curation(sources, DataCurationConfig(), seed=1, reporter=SilentReporter()) as preview:
        dataset_writer.write_dataset(preview.prepared, preview.verdicts, tmp_path)
    rejected = parquet.read_table(tmp_path / "rejected.parquet")
    assert rejected.column_names == ["id", "source", "line", "reason", "detail", "text", "own_source"]
    assert [(row["source"], row["line"], row["own_source"]) for row in rejected.to_pylist()] == [
        ("rows.jsonl", 2, "<EMAIL>"),
        ("rows.jsonl", 3, "rows.jsonl"),
    ]


def test_statistics_are_independent_of_chunks(write_two_files, monkeypatch):
    expected = write_two_files("whole")
    monkeypatch.setattr(prepared_chunks, "MAX_CHUNK_ROWS", 7)
    assert write_two_files("parts") == expected


@pytest.mark.daft
def test_page_sums_the_counts_of_all_chunks(write_rows, tmp_path, make_conversation, make_distinct_row, monkeypatch):
    monkeypatch.setattr(prepared_chunks, "MAX_CHUNK_ROWS", 3)
    item = "A train leaves the station at noon with forty two passengers and a dog on board, how many legs are there?"
    evaluation_sets = list_sources(
        [str(write_rows([{"question": item, "answer": "88"}, {"question": "Why?"}], "exam.jsonl"))], tmp_path
    )
    rows = [
        make_conversation("Who answers?", "Write to jane.roe@corp.example.com or joe@corp.example.com, please."),
        *map(make_distinct_row, range(150)),
        make_conversation("And at night?", "Then it is night@corp.example.com alone."),
        make_conversation("Which card?", "It is card 4111 1111 1111 1111 of joe@corp.example.com."),
        make_conversation("Solve it.", f"Sure. {item} Let me think."),
    ]
    sources = list_sources([str(write_rows(rows))], tmp_path)
    actions = {"credit_card": "drop", "email": "keep"}
    config = DataCurationConfig(personal_data=actions, decontamination=DecontaminationConfig(sets=["exam.jsonl"]))
    artifact = curate(sources, tmp_path / "out", config, seed=1, reporter=SilentReporter(), benchmarks=evaluation_sets)
    page = extract_words((artifact.path / "report.html").read_text())
    assert "email 4 3 counted only" in page
    assert "credit card 1 1 row rejected" in page
    assert "It is card <CREDIT_CARD> of <EMAIL>." in page
    assert "corp.example.com" not in page
    assert artifact.manifest.summary["evaluation_sets"] == {
        "exam.jsonl": {"items": 2, "unsearchable": 1, "unreadable": 0, "rejected_rows": 1}
    }
    assert artifact.manifest.summary["personal_data"] == {
        "credit_card": {"found": 1, "rows": 1, "action": "drop"},
        "email": {"found": 4, "rows": 3, "action": "keep"},
    }
    assert "exam.jsonl 1 2 1" in page
