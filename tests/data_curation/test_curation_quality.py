"""Web heuristics: the rules of Gopher, C4 and FineWeb."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data_curation.config import DataCurationConfig, QualityConfig
from components.data_curation.filters import row_filters, web_heuristics
from components.data_curation.filters.measured_row import MeasuredRow
from components.data_curation.rows import Row
from tests.pipelines.command import ROOT

NAMES = ["river", "engine", "garden", "letter", "window", "market", "teacher", "island", "doctor", "forest"]
VERBS = ["crosses", "repairs", "admires", "delivers", "opens", "follows", "describes", "guards", "measures", "paints"]


def make_sentence(i):
    """Return a sentence that is unique to the number."""
    first, second, verb = NAMES[i % 10], NAMES[(i * 7 + 3) % 10], VERBS[(i * 3 + i // 10) % 10]
    return f"The {first}{i} and that{i} {second} {verb} number{i} to be{i} of{i} some{i} use."


def make_prose(lines=6, sentences_per_line=2):
    return "\n".join(
        " ".join(make_sentence(line * sentences_per_line + i) for i in range(sentences_per_line))
        for line in range(lines)
    )


def find_rejection(text, config, language="en"):
    row = MeasuredRow(Row("text", {"text": text}, "", "s", {}, "f", 1, format="html"))
    row.language = (language, 1.0)
    return web_heuristics.WEB_HEURISTICS.find_rejection(row, DataCurationConfig(quality=config))


def find_reason(text, **config):
    rejection = find_rejection(text, QualityConfig(**config))
    return rejection.reason if rejection else None


def enable_only(family, **config):
    return {switch: switch == family for _, switch, _ in web_heuristics.WEB_HEURISTICS.filters} | config


def test_ordinary_prose_is_kept():
    assert find_rejection(make_prose(), QualityConfig()) is None


@pytest.mark.parametrize(
    ("text", "expected", "detail"),
    [
        ("The end of the story.", "gopher_word_count", "5 words; expected 50 to 100,000"),
        ("of a to " * 30, "gopher_mean_word_length", "mean word length: 1.67 characters; expected 3 to 10"),
        (
            "the incomprehensibilities with characteristically " * 30,
            "gopher_mean_word_length",
            "mean word length: 11.50 characters; expected 3 to 10",
        ),
        (make_prose() + " #tag" * 20, "gopher_symbols", "hash signs per word"),
        (make_prose() + " so…" * 40, "gopher_symbols", "ellipses per word"),
        (
            "\n".join(f"- {line}" for line in make_prose().split("\n")),
            "gopher_bullet_lines",
            "share of lines that begin with a bullet: 1.000; expected at most 0.9",
        ),
        (
            make_prose(4) + "..\n" + make_prose(4, 3).replace(".\n", "…\n"),
            "gopher_ellipsis_lines",
            "0.500; expected at most 0.3",
        ),
        (make_prose() + " 1234" * 40, "gopher_alphabetic_words", "share of words with a letter: 0.7"),
        (
            "Small dogs bark loudly, big cats sleep. " * 20,
            "gopher_stop_words",
            "0 of the 8 stop words; expected at least 2",
        ),
    ],
)
def test_gopher_quality(text, expected, detail):
    rejection = find_rejection(text, QualityConfig(**enable_only("gopher")))
    assert rejection.reason == expected
    assert detail in rejection.detail


@pytest.mark.parametrize(
    ("text", "expected", "detail"),
    [
        (make_prose() + "\n" + "\n".join(["Read more"] * 4), "gopher_duplicate_lines", "repeated lines: 0.300"),
        (
            make_prose(4) + "\n" + make_prose(4).split("\n")[0] + "\n" + make_prose(4).split("\n")[1],
            "gopher_duplicate_lines",
            "repeated lines: 0.333",
        ),
        ("\n\n".join([make_prose(2), "A\nB", "A\nB", "A\nC", "A\nC"]), "gopher_duplicate_lines", "repeated lines"),
        (make_prose(3) + " very good" * 40, "gopher_top_ngrams", "share of characters in the most common 2-gram: 0."),
        (
            make_prose(6, 1) + " " + " ".join(make_prose(6, 1).split()[20:36]),
            "gopher_duplicate_ngrams",
            "share of characters in repeated 5-grams: 0.",
        ),
    ],
)
def test_gopher_repetition(text, expected, detail):
    rejection = find_rejection(text, QualityConfig(**enable_only("gopher_repetition", max_duplicate_lines=0.29)))
    assert rejection.reason == expected
    assert detail in rejection.detail


def test_repeated_paragraphs_are_found_among_few_repeated_lines():
    paragraphs = [make_prose(3), make_sentence(90), make_sentence(90), make_sentence(91), make_sentence(91)]
    text = "\n\n".join(paragraphs)
    config = QualityConfig(
        **enable_only("gopher_repetition", max_duplicate_lines=0.35, max_duplicate_line_characters=0.6)
    )
    rejection = find_rejection(text, config)
    assert rejection.reason == "gopher_duplicate_paragraphs"
    assert rejection.detail == "share of repeated paragraphs: 0.400; expected at most 0.35"


@pytest.mark.parametrize(
    ("text", "expected", "detail"),
    [
        (make_prose() + "\nLorem ipsum dolor sit amet.", "c4_lorem_ipsum", "lorem ipsum"),
        (
            make_prose() + "\nif (x) { y(); }",
            "c4_curly_bracket",
            f"a curly bracket at character {len(make_prose()) + 8}",
        ),
        (
            make_sentence(1) + "\n" + make_sentence(2),
            "c4_sentences",
            "2 sentences in the 2 of 2 lines that C4 keeps; expected at least 3",
        ),
        (
            "Please enable JavaScript. It helps. Do it. Now." + "\n" + make_sentence(2),
            "c4_sentences",
            "1 sentence in the 1 of 2 lines",
        ),
        (
            "We use cookies. You agree. Fine. Good." + "\n" + make_sentence(2),
            "c4_sentences",
            "1 sentence in the 1 of 2 lines",
        ),
        ("Wow!\nGreat!\nGo on!\nYes!", "c4_sentences", "0 sentences in the 0 of 4 lines"),
    ],
)
def test_c4(text, expected, detail):
    rejection = find_rejection(text, QualityConfig(**enable_only("c4", curly_bracket=True)))
    assert rejection.reason == expected
    assert detail in rejection.detail


def test_c4_counts_only_punctuated_lines_if_configured():
    text = "\n".join(f"{make_sentence(i)} {make_sentence(i + 20)} and more" for i in range(5))
    assert find_reason(text, **enable_only("c4")) is None
    assert find_reason(text, **enable_only("c4", terminal_punctuation=True)) == "c4_sentences"
    assert find_reason(make_prose() + " {", **enable_only("c4")) is None


@pytest.mark.parametrize(
    ("text", "expected", "detail"),
    [
        (
            "\n".join(f"menu entry number {i} of the page" for i in range(10)),
            "fineweb_punctuated_lines",
            "0.000; expected more than 0.12",
        ),
        (make_prose(8, 1) + "\n" + make_sentence(0), "fineweb_repeated_lines", "expected less than 0.1"),
        (
            "\n".join(f"Entry {i}." for i in range(10)),
            "fineweb_short_lines",
            "share of lines shorter than 30 characters: 1.000; expected less than 0.67",
        ),
    ],
)
def test_fineweb(text, expected, detail):
    rejection = find_rejection(text, QualityConfig(**enable_only("fineweb")))
    assert rejection.reason == expected
    assert detail in rejection.detail


def test_one_long_line_passes_fineweb():
    assert find_reason(make_prose().replace("\n", " ")[:-1], **enable_only("fineweb")) is None


def test_thresholds_come_from_the_configuration():
    short = " ".join(make_prose().split()[:20])
    assert find_reason(short, **enable_only("gopher")) == "gopher_word_count"
    assert find_reason(short, **enable_only("gopher", min_words=20)) is None
    text = make_prose(9, 1) + "\n" + make_sentence(0)
    assert find_reason(text, **enable_only("fineweb", max_repeated_line_characters=0.2)) is None
    assert find_reason(text, **enable_only("fineweb", max_repeated_line_characters=0.01)) == "fineweb_repeated_lines"


def test_disabled_families_reject_nothing():
    assert (
        find_rejection("Menu {", QualityConfig(gopher=False, gopher_repetition=False, c4=False, fineweb=False)) is None
    )


def test_word_rules_skip_scripts_without_spaces():
    chinese = "委员会星期二开会，决定这座老桥应该修理还是更换。\n大家讨论了所需要的费用、时间和材料。\n最后他们同意先修理栏杆。"
    assert find_rejection(chinese, QualityConfig(), "zh") is None


def test_stop_word_rule_applies_to_english_only():
    german = "Kleine Hunde bellen laut, große Katzen schlafen tief. " * 8
    assert find_rejection(german, QualityConfig(**enable_only("gopher")), "de") is None
    assert find_rejection(german, QualityConfig(**enable_only("gopher")), "en").reason == "gopher_stop_words"


@pytest.mark.parametrize(
    ("apply_to", "judged"),
    [
        ("none", ()),
        ("web", ("warc", "html", "wet")),
        ("text", ("warc", "html", "wet", "text")),
        ("all", ("warc", "html", "wet", "text", "alpaca")),
    ],
)
def test_apply_to_selects_the_judged_rows(apply_to, judged):
    config = QualityConfig(apply_to=apply_to)
    rows = [
        Row("text", {"text": ""}, "", "s", {}, "f", 1, format=format_name)
        for format_name in ("html", "warc", "wet", "text")
    ]
    rows.append(Row("sft", {"messages": []}, "", "s", {}, "f", 1, format="alpaca"))
    assert {row.format for row in rows if web_heuristics.is_selected(row, config)} == set(judged)


@pytest.mark.parametrize("family", row_filters.FAMILIES, ids=lambda family: family.group)
def test_every_switch_is_a_key_and_every_reason_is_unique_and_documented(family):
    section = family.section(DataCurationConfig())
    switches = {switch for _, switch, _ in family.filters} - {""}
    assert {switch: type(getattr(section, switch, None)) for switch in switches} == dict.fromkeys(switches, bool)
    reasons = [reason.name for reason, _, _ in family.filters]
    assert len(set(reasons)) == len(reasons)
    pages = "".join(
        (ROOT / "docs" / page).read_text(encoding="utf-8")
        for page in ("reference/filters.md", "how-to/data.md", "reference/configuration.md")
    )
    assert [reason for reason in reasons if f"`{reason}`" not in pages] == []


def compute_ngram_share(words, n):
    """Return the share of characters in words that a repeat of an earlier n-gram covers (the definition)."""
    seen, covered = set(), set()
    for start in range(len(words) - n + 1):
        gram = tuple(words[start : start + n])
        if gram in seen:
            covered |= set(range(start, start + n))
        seen.add(gram)
    return sum(len(words[i]) for i in covered) / sum(map(len, words))


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["ab", "cde", "f", "ghij"]), min_size=5, max_size=60), st.integers(5, 10))
def test_repeated_ngrams_match_their_definition(words, n):
    limits = [1.0] * 6
    limits[n - 5] = 0.0
    rejection = find_rejection(
        " ".join(words),
        QualityConfig(
            **enable_only(
                "gopher_repetition", max_top_ngram_characters=[9, 9, 9], max_duplicate_ngram_characters=limits
            )
        ),
    )
    share = compute_ngram_share(words, n)
    assert (rejection is None) == (share == 0)
    if rejection:
        assert rejection.detail == f"share of characters in repeated {n}-grams: {share:.3f}; expected at most 0"


@settings(max_examples=200)
@given(st.text(max_size=300))
def test_rules_accept_any_text(text):
    all_rules = QualityConfig(
        min_words=0, min_mean_word_length=0, max_mean_word_length=10_000, min_stop_words=0, min_sentences=0
    )
    for language in ("en", "zh"):
        for config in (QualityConfig(), all_rules):
            rejection = find_rejection(text, config, language)
            assert rejection is None or (rejection.reason and rejection.detail)
