import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data_curation import quality
from components.data_curation.config import QualityConfig
from components.data_curation.rows import Row

NAMES = ["river", "engine", "garden", "letter", "window", "market", "teacher", "island", "doctor", "forest"]
VERBS = ["crosses", "repairs", "admires", "delivers", "opens", "follows", "describes", "guards", "measures", "paints"]


def sentence(i):
    """A sentence like no other: which words it has follows from its number."""
    one, two, verb = NAMES[i % 10], NAMES[(i * 7 + 3) % 10], VERBS[(i * 3 + i // 10) % 10]
    return f"The {one}{i} and that{i} {two} {verb} number{i} to be{i} of{i} some{i} use."


def prose(lines=6, each=2):
    return "\n".join(" ".join(sentence(line * each + i) for i in range(each)) for line in range(lines))


def reason(text, **config):
    found = quality.drop(text, QualityConfig(**config))
    return found.reason if found else None


def only(family, **config):
    return {name: name == family for name in ("gopher", "gopher_repetition", "c4", "fineweb")} | config


def test_ordinary_prose_is_kept():
    assert quality.drop(prose(), QualityConfig()) is None


@pytest.mark.parametrize(
    ("text", "expected", "detail"),
    [
        ("The end of the story.", "gopher_word_count", "5 words, 50 to 100,000 wanted"),
        ("of a to " * 30, "gopher_mean_word_length", "mean word length: 1.67 characters, 3 to 10 wanted"),
        (
            "the incomprehensibilities with characteristically " * 30,
            "gopher_mean_word_length",
            "mean word length: 11.50 characters, 3 to 10 wanted",
        ),
        (prose() + " #tag" * 20, "gopher_symbols", "hash signs for each word"),
        (prose() + " so…" * 40, "gopher_symbols", "ellipses for each word"),
        (
            "\n".join(f"- {line}" for line in prose().split("\n")),
            "gopher_bullet_lines",
            "lines that begin with a bullet: 1.000, at most 0.9",
        ),
        (
            prose(4) + "..\n" + prose(4, 3).replace(".\n", "…\n"),
            "gopher_ellipsis_lines",
            "0.500, at most 0.3",
        ),
        (prose() + " 1234" * 40, "gopher_alphabetic_words", "words with a letter: 0.7"),
        ("Small dogs bark loudly, big cats sleep. " * 20, "gopher_stop_words", "0 of the 8 stop words, 2 wanted"),
    ],
)
def test_gopher_quality(text, expected, detail):
    found = quality.drop(text, QualityConfig(**only("gopher")))
    assert found.reason == expected
    assert detail in found.detail


@pytest.mark.parametrize(
    ("text", "expected", "detail"),
    [
        (prose() + "\n" + "\n".join(["Read more"] * 4), "gopher_duplicate_lines", "repeated lines: 0.300"),
        (prose(4) + "\n" + prose(4).split("\n")[0] + "\n" + prose(4).split("\n")[1], "gopher_duplicate_lines", "repeated lines: 0.333"),
        ("\n\n".join([prose(2), "A\nB", "A\nB", "A\nC", "A\nC"]), "gopher_duplicate_lines", "repeated lines"),
        (prose(3) + " very good" * 40, "gopher_top_ngrams", "characters in the most common 2-gram: 0."),
        (
            prose(6, 1) + " " + " ".join(prose(6, 1).split()[20:36]),
            "gopher_duplicate_ngrams",
            "characters in repeated 5-grams: 0.",
        ),
    ],
)
def test_gopher_repetition(text, expected, detail):
    found = quality.drop(text, QualityConfig(**only("gopher_repetition", max_duplicate_lines=0.29)))
    assert found.reason == expected
    assert detail in found.detail


def test_repeated_paragraphs_are_found_where_their_lines_are_few():
    paragraphs = [prose(3), sentence(90), sentence(90), sentence(91), sentence(91)]
    text = "\n\n".join(paragraphs)
    config = QualityConfig(**only("gopher_repetition", max_duplicate_lines=0.35, max_duplicate_line_characters=0.6))
    found = quality.drop(text, config)
    assert found.reason == "gopher_duplicate_paragraphs"
    assert found.detail == "repeated paragraphs: 0.400, at most 0.35"


@pytest.mark.parametrize(
    ("text", "expected", "detail"),
    [
        (prose() + "\nLorem ipsum dolor sit amet.", "c4_lorem_ipsum", "lorem ipsum"),
        (prose() + "\nif (x) { y(); }", "c4_curly_bracket", f"a curly bracket at character {len(prose()) + 8}"),
        (sentence(1) + "\n" + sentence(2), "c4_sentences", "2 sentences in the 2 of 2 lines that C4 keeps, 3 wanted"),
        ("Please enable JavaScript. It helps. Do it. Now." + "\n" + sentence(2), "c4_sentences", "1 sentences in the 1 of 2 lines"),
        ("We use cookies. You agree. Fine. Good." + "\n" + sentence(2), "c4_sentences", "1 sentences in the 1 of 2 lines"),
        ("Wow!\nGreat!\nGo on!\nYes!", "c4_sentences", "0 sentences in the 0 of 4 lines"),
    ],
)
def test_c4(text, expected, detail):
    found = quality.drop(text, QualityConfig(**only("c4", curly_bracket=True)))
    assert found.reason == expected
    assert detail in found.detail


def test_c4_counts_only_lines_that_end_with_punctuation_when_told():
    text = "\n".join(f"{sentence(i)} {sentence(i + 20)} and more" for i in range(5))
    assert reason(text, **only("c4")) is None
    assert reason(text, **only("c4", terminal_punctuation=True)) == "c4_sentences"
    assert reason(prose() + " {", **only("c4")) is None


@pytest.mark.parametrize(
    ("text", "expected", "detail"),
    [
        ("\n".join(f"menu entry number {i} of the page" for i in range(10)), "fineweb_punctuated_lines", "0.000, more than 0.12 wanted"),
        (prose(8, 1) + "\n" + sentence(0), "fineweb_repeated_lines", "less than 0.1 wanted"),
        (
            "\n".join(f"Entry {i}." for i in range(10)),
            "fineweb_short_lines",
            "lines shorter than 30 characters: 1.000, less than 0.67 wanted",
        ),
    ],
)
def test_fineweb(text, expected, detail):
    found = quality.drop(text, QualityConfig(**only("fineweb")))
    assert found.reason == expected
    assert detail in found.detail


def test_one_long_line_is_no_page_of_menus():
    assert reason(prose().replace("\n", " ")[:-1], **only("fineweb")) is None


def test_thresholds_are_the_configurations():
    short = " ".join(prose().split()[:20])
    assert reason(short, **only("gopher")) == "gopher_word_count"
    assert reason(short, **only("gopher", min_words=20)) is None
    text = prose(9, 1) + "\n" + sentence(0)
    assert reason(text, **only("fineweb", max_repeated_line_characters=0.2)) is None
    assert reason(text, **only("fineweb", max_repeated_line_characters=0.01)) == "fineweb_repeated_lines"


def test_a_family_that_is_off_asks_nothing():
    assert quality.drop("Menu {", QualityConfig(gopher=False, gopher_repetition=False, c4=False, fineweb=False)) is None


def test_texts_in_scripts_without_spaces_are_not_judged_by_their_words():
    chinese = "委员会星期二开会，决定这座老桥应该修理还是更换。\n大家讨论了所需要的费用、时间和材料。\n最后他们同意先修理栏杆。"
    assert quality.drop(chinese, QualityConfig(), "zh") is None


def test_english_stop_words_are_asked_of_english_only():
    german = "Kleine Hunde bellen laut, große Katzen schlafen tief. " * 8
    assert quality.drop(german, QualityConfig(**only("gopher")), "de") is None
    assert quality.drop(german, QualityConfig(**only("gopher")), "en").reason == "gopher_stop_words"


@pytest.mark.parametrize(
    ("apply_to", "judged"),
    [
        ("none", ()),
        ("web", ("warc", "html", "wet")),
        ("text", ("warc", "html", "wet", "text")),
        ("all", ("warc", "html", "wet", "text", "alpaca")),
    ],
)
def test_which_rows_are_judged(apply_to, judged):
    config = QualityConfig(apply_to=apply_to)
    made = [Row("text", {"text": ""}, "", "s", {}, "f", 1, form=form) for form in ("html", "warc", "wet", "text")]
    made.append(Row("sft", {"messages": []}, "", "s", {}, "f", 1, form="alpaca"))
    assert {row.form for row in made if quality.applies(row, config)} == set(judged)


def test_every_rule_has_a_reason_of_its_own_and_a_switch():
    reasons = [reason for _, reason, _ in quality.RULES]
    assert len(set(reasons)) == len(reasons)
    assert {family for family, _, _ in quality.RULES} == set(only(""))


def ngram_share(words, n):
    """By definition: characters of words at a place that some earlier n-gram's repeat covers."""
    seen, covered = set(), set()
    for start in range(len(words) - n + 1):
        gram = tuple(words[start : start + n])
        if gram in seen:
            covered |= set(range(start, start + n))
        seen.add(gram)
    return sum(len(words[i]) for i in covered) / sum(map(len, words))


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["ab", "cde", "f", "ghij"]), min_size=5, max_size=60), st.integers(5, 10))
def test_repeated_ngrams_are_counted_as_their_definition_says(words, n):
    limits = [1.0] * 6
    limits[n - 5] = 0.0
    found = quality.drop(
        " ".join(words),
        QualityConfig(**only("gopher_repetition", max_top_ngram_characters=[9, 9, 9], max_duplicate_ngram_characters=limits)),
    )
    share = ngram_share(words, n)
    assert (found is None) == (share == 0)
    if found:
        assert found.detail == f"characters in repeated {n}-grams: {share:.3f}, at most 0"


@settings(max_examples=200)
@given(st.text(max_size=300))
def test_no_text_breaks_a_rule(text):
    everything = QualityConfig(min_words=0, min_mean_word_length=0, max_mean_word_length=10_000, min_stop_words=0, min_sentences=0)
    for language in ("en", "zh"):
        for config in (QualityConfig(), everything):
            found = quality.drop(text, config, language)
            assert found is None or (found.reason and found.detail)
