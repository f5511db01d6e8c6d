import re
from collections import Counter
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from components.common.progress import Silent
from components.data_curation import page, staging, writing
from components.data_curation.config import DataCurationConfig, DecontaminationConfig
from components.data_curation.drops import Drop
from components.data_curation.facts import EXAMPLES, PLACES, Facts, Personal
from components.data_curation.readers import Unread
from components.data_curation.sources import Source
from components.data_curation.stage import counts, curate, list_sources, survey
from components.data_curation.tokens import statistics

SOURCES = [Source(uri="/data/tickets.jsonl", sha256="a" * 64, bytes=1234), Source(uri="/data/web/tickets.jsonl", sha256="b" * 64, bytes=6)]
SUMMARY = {
    "rows": {
        "in": 1000,
        "kept": 900,
        "quarantined": 4,
        "rejected": {"exact_duplicate": 50, "near_duplicate": 20, "contaminated": 6, "gopher_duplicate_lines": 15, "short_answer": 5},
    },
    "splits": {"train": 830, "validation": 25, "test": 45},
    "rows_kind": "sft",
}


def filled():
    made = Facts(sets={"gsm8k.jsonl": {"items": 70, "too_short": 2, "unreadable": 0}}, notes=["one file is empty"])
    for characters in (40, 60, 99_999):
        made.keep("tickets.jsonl", characters, "en")
    made.keep("tickets.jsonl", 300, "und")
    made.reject(
        Drop("contaminated", "shares 15 words with gsm8k.jsonl:17: 3 of its 40 n-grams"), "tickets.jsonl", 7, "Natalia <sold> clips"
    )
    made.reject(Drop("near_duplicate", "similarity 0.812 to abc"), "tickets.jsonl", 9, "It rains again")
    made.miss(Unread("tickets.jsonl", 3, "invalid JSON"))
    made.personal = {"email": Personal(3, 2, "redact"), "credit_card": Personal(1, 1, "drop")}
    made.tokens = statistics([100, 200, 300, 700], 256, model="my-llama", rows=900, looked_at=4)
    return made


def words_of(html):
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", html, flags=re.DOTALL)).split())


@pytest.fixture(scope="module")
def shown():
    return words_of(page.render(SUMMARY, SOURCES, filled()))


@pytest.mark.parametrize(
    "told",
    [
        "900 of 1,000 rows kept; kind of rows: sft",
        "one file is empty",
        "evaluation items 6",  # the flow
        "duplicates 70",
        "web heuristics 15",
        "empty, short or long 5",
        "unreadable 4",
        "near_duplicate says nearly the same as a row that is kept 20 2.0%",
        "gsm8k.jsonl 1 70 2",
        "email 3 2 replaced by a placeholder",
        "credit card 1 1 the row was dropped",
        "train 830 92.2%",
        "rows that are cut there 50.0%",
        "Estimated from 4 of 900 rows with the chat template and tokenizer of my-llama",
        "Orange: longer than the training length of 256, and cut there.",
        "257–512",
        "undetermined",
        "contaminated · 6 rows tickets.jsonl:7: shares 15 words with gsm8k.jsonl:17: 3 of its 40 n-grams Natalia <sold> clips",
        "tickets.jsonl 3 invalid JSON",
        "4 in all; quarantine.jsonl lists every one.",
        "tickets.jsonl 7 4 2 1 1,240",
        "b" * 64,
    ],
)
def test_the_page_says(shown, told):
    assert told in shown


def test_groups_of_the_flow_add_up_to_the_rows_that_were_dropped():
    rejected = dict.fromkeys([*page.GROUPS, "exact_duplicate", "long_row", "a_reason_of_tomorrow"], 2)
    assert sum(page._grouped(rejected).values()) == 2 * len(rejected)


def test_reasons_that_only_sound_like_duplicates_are_not_among_them(shown):
    assert "gopher_duplicate_lines" not in shown.split("Duplicates")[1].split("Evaluation sets")[0]


def test_a_page_of_nothing_dropped_says_so():
    summary = {"rows": {"in": 2, "kept": 2, "quarantined": 0, "rejected": {}}, "splits": {"train": 1, "test": 1}, "rows_kind": "text"}
    kept = Facts()
    kept.keep("a.txt", 10)
    told = words_of(page.render(summary, SOURCES[:1], kept))
    for sentence in (
        "No row was dropped.",
        "No row repeats another.",
        "None was found.",
        "None was named in data_curation.decontamination.sets",
    ):
        assert sentence in told
    assert "Tokens" not in told
    assert "Examples of dropped rows" not in told


def test_a_training_length_that_cuts_nothing_is_said():
    made = filled()
    made.tokens = statistics([3, 9, 100], 300, model="m", rows=3, looked_at=3)
    told = words_of(page.render(SUMMARY, SOURCES, made))
    assert "None is longer than the training length of 300." in told
    assert "Counted in all 3 rows" in told


def test_the_page_of_equal_facts_has_equal_bytes():
    assert page.render(SUMMARY, SOURCES, filled()) == page.render(SUMMARY, SOURCES, filled())


def test_every_chart_keeps_a_width_at_which_its_labels_can_be_read():
    made = page.render(SUMMARY, SOURCES, filled())
    assert len(re.findall(r"<figure[^>]*><svg ", made)) == 5
    least = re.search(r"figure svg {[^}]*min-width: (\d+)rem", made)
    assert least
    assert int(least[1]) >= 40  # at which labels have 11 pixels; on a narrow screen the figure scrolls


def test_thousands_of_sources_are_cut_and_counted():
    many = [Source(uri=f"/data/part-{i:05}.warc.gz", sha256=f"{i:064}", bytes=1) for i in range(5000)]
    told = words_of(page.render(SUMMARY, many, filled()))
    assert "The first 40 of 5,000; manifest.json lists them all." in told
    assert "part-04999" not in told


def test_examples_are_the_first_of_each_reason_and_short():
    made = Facts()
    for line in range(10):
        made.reject(Drop("short_answer", f"{line}"), "f", line, "x" * 1000 if line else "\n".join("abcdefghijklmnop"))
    assert [one.where for one in made.samples["short_answer"]] == ["f:0", "f:1", "f:2"]
    assert [one.text for one in made.samples["short_answer"][:2]] == ["\n".join("abcdefghijkl") + " …", "x" * 300 + " …"]
    assert made.by_source == {"f": Counter(rejected=10)}


def test_examples_show_no_personal_data_though_the_dataset_keeps_it():
    made = Facts()
    filling, mail = "x" * 280, "jane.roe@corp.com"
    made.reject(Drop("near_duplicate", f"similarity 0.9 to {mail}"), "f", 1, f"{filling} write to {mail} or +1 650-253-0000")
    (shown,) = made.samples["near_duplicate"]
    assert shown.detail == "similarity 0.9 to <EMAIL>"
    assert shown.text == f"{filling} write to <EMAIL> or <PHONE>"[:300] + " …"


WHAT, FILES = st.sampled_from(["keep", "reject", "miss"]), st.sampled_from(["a", "b"])


@given(st.lists(st.tuples(WHAT, FILES, st.integers(1, 400)), max_size=80))
def test_whatever_happens_is_counted_once_and_few_examples_are_held(events):
    made = Facts()
    for place, (what, file, number) in enumerate(events):
        if what == "keep":
            made.keep(file, number * 40, "en" if number % 2 else "de")
        elif what == "reject":
            made.reject(Drop(f"reason{number % 3}", "why"), file, place, f"text {place}")
        else:
            made.miss(Unread(file, place, "why"))
    assert sum(fates.total() for fates in made.by_source.values()) == len(events)
    assert made.lengths.total() == made.languages.total() == sum(what == "keep" for what, _, _ in events)
    missed = [place for place, (what, _, _) in enumerate(events) if what == "miss"]
    assert [one.line for one in made.unread] == missed[:PLACES]
    for reason, some in made.samples.items():
        dropped = [place for place, (what, _, number) in enumerate(events) if what == "reject" and reason == f"reason{number % 3}"]
        assert [one.text for one in some] == [f"text {place}" for place in dropped[:EXAMPLES]]


@pytest.fixture
def surveyed(write, samples, tmp_path):
    """Write the dataset of two files, whose rows are kept, repeat each other, say nothing or cannot be read; returns counts and facts."""
    conversation, different = samples
    write([*map(different, range(120)), *map(different, range(5)), conversation("Who?", "")], "a.jsonl")
    with write(map(different, range(110, 130)), "b.jsonl").open("a") as file:
        file.write("{broken\n" * 2)
    sources = list_sources([str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")], tmp_path)

    def run(out):
        (tmp_path / out).mkdir()
        with survey(sources, DataCurationConfig(), seed=1, reporter=Silent()) as curated:
            return counts(curated), writing.write(curated.staged, curated.judged, tmp_path / out)

    return run


def test_writing_the_dataset_gathers_what_became_of_every_row(surveyed):
    summary, met = surveyed("out")
    assert summary["rows"] == {"in": 148, "kept": 130, "quarantined": 2, "rejected": {"empty_answer": 1, "exact_duplicate": 15}}
    assert met.by_source == {"a.jsonl": Counter(kept=120, rejected=6), "b.jsonl": Counter(kept=10, rejected=10, quarantined=2)}
    assert met.lengths.total() == met.languages.total() == 130
    assert [one.where for one in met.samples["exact_duplicate"]] == ["a.jsonl:121", "a.jsonl:122", "a.jsonl:123"]
    assert met.samples["exact_duplicate"][0].text.startswith("What is thing number 0?")
    assert [(one.file, one.line) for one in met.unread] == [("b.jsonl", 21), ("b.jsonl", 22)]


def test_a_dropped_row_says_its_file_and_what_it_calls_its_source(write, samples, tmp_path):
    twins = [{**samples[1](1), "source": "desk"}, {**samples[1](1), "source": "jane.roe@corp.com"}, samples[1](1)]
    sources = list_sources([str(write([*twins, *map(samples[1], range(2, 150))]))], tmp_path)
    with survey(sources, DataCurationConfig(), seed=1, reporter=Silent()) as curated:
        writing.write(curated.staged, curated.judged, tmp_path)
    dropped = parquet.read_table(tmp_path / "rejected.parquet")
    assert dropped.column_names == ["id", "source", "line", "reason", "detail", "text", "own_source"]
    assert [(row["source"], row["line"], row["own_source"]) for row in dropped.to_pylist()] == [
        ("rows.jsonl", 2, "<EMAIL>"),
        ("rows.jsonl", 3, "rows.jsonl"),
    ]


def test_chunks_make_no_difference_to_what_the_page_tells(surveyed, monkeypatch):
    whole = surveyed("whole")
    monkeypatch.setattr(staging, "CHUNK_ROWS", 7)
    assert surveyed("parts") == whole


@pytest.mark.daft
def test_the_page_adds_up_what_the_chunks_tell(write, tmp_path, samples, monkeypatch):
    monkeypatch.setattr(staging, "CHUNK_ROWS", 3)
    conversation, different = samples
    item = "A train leaves the station at noon with forty two passengers and a dog on board, how many legs are there?"
    exam = list_sources([str(write([{"question": item, "answer": "88"}, {"question": "Why?"}], "exam.jsonl"))], tmp_path)
    rows = [
        conversation("Who answers?", "Write to jane.roe@corp.example.com or joe@corp.example.com, please."),
        *map(different, range(150)),
        conversation("And at night?", "Then it is night@corp.example.com alone."),
        conversation("Which card?", "It is card 4111 1111 1111 1111 of joe@corp.example.com."),
        conversation("Solve it.", f"Sure. {item} Let me think."),
    ]
    sources = list_sources([str(write(rows))], tmp_path)
    actions = {"credit_card": "drop", "email": "keep"}
    config = DataCurationConfig(personal_data=actions, decontamination=DecontaminationConfig(sets=["exam.jsonl"]))
    made = curate(sources, tmp_path / "out", config, seed=1, reporter=Silent(), benchmarks=exam)
    told = words_of((made.path / "report.html").read_text())
    assert "email 4 3 counted and left as it is" in told
    assert "credit card 1 1 the row was dropped" in told
    assert "It is card <CREDIT_CARD> of <EMAIL>." in told
    assert "corp.example.com" not in told
    assert made.manifest.summary["personal_data"] == {
        "credit_card": {"found": 1, "rows": 1, "action": "drop"},
        "email": {"found": 4, "rows": 3, "action": "keep"},
    }
    assert "exam.jsonl 1 2 1" in told
