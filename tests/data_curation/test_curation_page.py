import json
import re
from collections import Counter
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.data_curation import facts, page
from components.data_curation.drops import Drop
from components.data_curation.facts import EXAMPLES, PLACES, Facts, Personal, from_json, merge
from components.data_curation.readers import Unread
from components.data_curation.sources import Source
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
    made.scrub({"email": 2, "credit_card": 1}, {"email": "redact", "credit_card": "drop"})
    made.scrub({"email": 1}, {"email": "redact", "credit_card": "drop"})
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
    assert page.render(SUMMARY, SOURCES, filled()) == page.render(SUMMARY, SOURCES, from_json(json.loads(json.dumps(filled().as_json()))))


def test_thousands_of_sources_are_cut_and_counted():
    many = [Source(uri=f"/data/part-{i:05}.warc.gz", sha256=f"{i:064}", bytes=1) for i in range(5000)]
    told = words_of(page.render(SUMMARY, many, filled()))
    assert "The first 40 of 5,000; manifest.json lists them all." in told
    assert "part-04999" not in told


def test_facts_go_through_json():
    assert from_json(json.loads(json.dumps(filled().as_json()))) == filled()
    assert from_json(json.loads(json.dumps(Facts().as_json()))) == Facts()


def test_examples_are_the_first_of_each_reason_and_short():
    made = Facts()
    for line in range(10):
        made.reject(Drop("short_answer", f"{line}"), "f", line, "x" * 1000 if line else "\n".join("abcdefghijklmnop"))
    assert [one.where for one in made.samples["short_answer"]] == ["f:0", "f:1", "f:2"]
    assert [one.text for one in made.samples["short_answer"][:2]] == ["\n".join("abcdefghijkl") + " …", "x" * 300 + " …"]
    assert made.by_source == {"f": Counter(rejected=10)}


def add(made, place, what, file, number):
    """Let one thing happen to the facts."""
    if what == "keep":
        made.keep(file, number * 40, "en" if number % 2 else "de")
    elif what == "reject":
        made.reject(Drop(f"reason{number % 3}", "why"), file, place, f"text {place}")
    elif what == "miss":
        made.miss(Unread(file, place, "why"))
    else:
        made.scrub({"email": number}, {"email": "redact"})


def happened(events):
    made = Facts()
    for event in events:
        add(made, *event)
    return made


WHAT, FILES = st.sampled_from(["keep", "reject", "miss", "scrub"]), st.sampled_from(["a", "b"])


@given(st.lists(st.tuples(st.integers(), WHAT, FILES, st.integers(1, 400)), max_size=80), st.integers(0, 80))
def test_merged_parts_equal_the_whole(events, cut):
    whole = happened(events)
    assert merge(happened(events[:cut]), happened(events[cut:])) == whole
    assert sum(counts.total() for counts in whole.by_source.values()) == sum(what != "scrub" for _, what, _, _ in events)
    assert len(whole.unread) <= PLACES
    assert all(len(some) <= EXAMPLES for some in whole.samples.values())


def test_merging_keeps_what_is_not_counted_by_row():
    made = merge(filled(), Facts(notes=["one file is empty", "another note"]))
    assert made.tokens == filled().tokens
    assert made.sets == filled().sets
    assert made.notes == ["one file is empty", "another note"]
    assert made.personal["credit_card"] == Personal(1, 1, "drop")


def test_facts_of_rows_at_hand_are_those_counted_one_by_one(samples):
    from components.data_curation.rows import Row

    rows = [Row("sft", samples[1](i), "", "s", {}, "f.jsonl", i) for i in range(4)]
    made = facts.of(rows[:2], [(rows[2], Drop("short_answer", "d"))], [Unread("f.jsonl", 9, "why")])
    assert made.by_source == {"f.jsonl": Counter(kept=2, rejected=1, quarantined=1)}
    assert made.lengths.total() == 2
