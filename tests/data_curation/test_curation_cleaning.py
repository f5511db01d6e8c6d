import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from components.data_curation import cleaning
from components.data_curation.config import DataCurationConfig, Fractions, LanguageConfig, QualityConfig
from components.data_curation.formats import rows_of
from components.data_curation.readers import Record


def rows(*records):
    return [row for record in records for row in rows_of(Record("f", 1, record))]


def ask(question, answer, **more):
    return {"prompt": question, "completion": answer, **more}


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        ("a\r\nb\rc", "a\nb\nc"),
        ("cafe\u0301", "café"),
        ("code:  \n    indented\t\n", "code:\n    indented"),
        ("a\n\n\n\n\n\nb", "a\n\n\nb"),
        ("    first line keeps its indentation", "    first line keeps its indentation"),
        ("nul\x00 and mark\ufeff", "nul and mark"),
        (" \n\t\n", ""),
    ],
)
def test_text_is_normalised_and_indentation_kept(raw, normal):
    assert cleaning.normalise(raw) == normal
    assert cleaning.normalise(normal) == normal


@pytest.mark.parametrize(
    ("misread", "meant"),
    [
        ("âœ” No problems", "✔ No problems"),
        ("The Mona Lisa doesnÃƒÂ¢Ã¢â€šÂ¬Ã¢â€žÂ¢t have eyebrows.", "The Mona Lisa doesn’t have eyebrows."),
        ("РїСЂРёРІРµС‚ РјРёСЂ", "привет мир"),
        ("Belle Ã\x89poque, PrÃ\xadncipe", "Belle Époque, Príncipe"),
        ("don\x92t", "don’t"),
    ],
)
def test_utf8_that_was_read_in_another_encoding_is_repaired(misread, meant):
    assert cleaning.normalise(misread) == meant
    assert cleaning.normalise(f"你好\n{misread}\nПривет") == f"你好\n{meant}\nПривет"


@pytest.mark.parametrize(
    "text",
    [
        "“Quotes”, ‘too’ — and ﬁ, ① and &amp; stay.",
        "à propos: «É», ÖSTERREICH… œuvre, São Tomé, Ã and Â",
        "в» №5 – “да”",
        "fullwidth ＡＢＣ１２３，half-width ｶﾅ",
        "x² ½ ™ ℃",
        "    def f():\n\treturn 'a  b'\n\n\nprint(f())",
    ],
)
def test_what_is_not_broken_is_not_mended(text):
    assert cleaning.normalise(text) == text


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        ("a\u00a0b\u2009c\u3000d\u202fe", "a b c d e"),
        ("one\u2028two\u2029three\x0bfour\x0cfive\x85six", "one\ntwo\nthree\nfour\nfive…six"),
        ("zero\u200bwidth\u2060 soft\u00adhyphen \ufffc", "zerowidth softhyphen"),
        ("\x1b[1;31mError\x1b[0m: no", "Error: no"),
        ("a\u202eb\u202c \u200ec", "ab c"),
        ("hidden\U000e0041\U000e0042 tags", "hidden tags"),
        ("Ã\u200b©", "é"),
        ("ASCII\u200dwith\u200cjoiners", "ASCIIwithjoiners"),
    ],
)
def test_characters_that_nobody_means_are_replaced_or_removed(raw, normal):
    assert cleaning.normalise(raw) == normal


@pytest.mark.parametrize(
    "text",
    [
        "می\u200cخواهم",  # Persian: a non-joiner within a word
        "क्\u200dष and ക്\u200c",  # Indic conjuncts
        "👩\u200d👩\u200d👧 ❤\ufe0f\u200d🔥 🏳\ufe0f\u200d🌈 👩🏽\u200d🚀",
        "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",  # the flag of England
        "ภาษา\u200bไทย",  # Thai: where a line may break
        "שלום (C++\u200e) \u2067עברית\u2069",
    ],
)
def test_invisible_characters_stay_where_a_script_or_an_emoji_needs_them(text):
    assert cleaning.normalise(text) == text


def test_an_override_of_the_direction_is_never_kept():
    assert cleaning.normalise("עברית \u202eabc\u202c") == "עברית abc\u202c"


SPECIAL = [
    *" \t\n\r\x0b\x0c\x85\x00\x1b\x84\x92[m3;\xa0\xad\u200b\u200c\u200d\u200e\u2028\u202e\u2060\u3000\ufeff\ufffc\ufffe",
    *"Ã©Â¢â€šÂ¬™žœРїСЂÐ¿Ñ€ـمیक्षไ👩❤\ufe0f🏴\U000e0067\U000e007fe\u0301\u0958אa.",
    "Ã©",
    "â€™",
    "\x1b[",
    "\r\n",
    "\n\n\n\n",
]


@settings(max_examples=400)
@given(st.lists(st.one_of(st.sampled_from(SPECIAL), st.characters(exclude_categories=["Cs"])), max_size=40).map("".join))
def test_a_normal_text_is_left_as_it_is(text):
    normal = cleaning.normalise(text)
    assert cleaning.normalise(normal) == normal
    assert not any(c in normal for c in "\r\x0b\x0c\x00\ufeff\u2028\xa0")
    assert " \n" not in normal
    assert "\n\n\n\n" not in normal


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=80))
def test_plain_ascii_loses_nothing_but_trailing_spaces(text):
    assert cleaning.normalise(text) == text.rstrip(" ")


def test_a_very_long_run_of_spaces_takes_no_time():
    assert cleaning.normalise("a" + " " * 300_000 + "b" + "\xa0" * 300_000) == "a" + " " * 300_000 + "b"


def test_every_turn_is_cleaned_and_tools_are_not():
    (row,) = rows(
        {"messages": [{"role": "user", "content": "a\u00a0b?"}, {"role": "assistant", "content": "cafe\u0301 "}], "tools": '[{"n": "x"}]'}
    )
    cleaning.clean(row)
    assert [m["content"] for m in row.content["messages"]] == ["a b?", "café"]
    assert row.content["tools"] == '[{"n": "x"}]'


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (ask(" ", "An answer."), "empty_prompt"),
        (ask("A question?", "\n"), "empty_answer"),
        ({"messages": [{"role": "user", "content": "Hello?"}]}, "empty_answer"),
        (ask("Hm", "A good answer."), "short_prompt"),
        (ask("A question?", "No"), "short_answer"),
        (ask("A question?", "long " * 50), "long_row"),
        ({"text": " "}, "empty_text"),
        ({"text": "tiny"}, "short_text"),
        ({"prompt": "A question?", "chosen": "The same.", "rejected": "The same."}, "no_preference"),
        (ask("A question?", "A good answer."), None),
    ],
)
def test_the_filters_give_their_reasons(record, reason):
    (row,) = rows(record)
    cleaning.clean(row)
    found = cleaning.drop(row, DataCurationConfig(min_prompt_characters=3, min_answer_characters=5, max_row_characters=200))
    assert (found.reason if found else None) == reason


def test_the_first_reason_counts_in_the_documented_order():
    german = "Das ist eine ganz normale deutsche Antwort auf die Frage nach dem Wetter in Hamburg."
    config = DataCurationConfig(language=LanguageConfig(keep=["en"]), min_answer_characters=5)
    for answer, reason in (("No", "short_answer"), ("Wie ist denn das Wetter in Hamburg?", "echoed_answer"), (german, "language")):
        (row,) = rows(ask("Wie ist denn das Wetter in Hamburg?", answer))
        assert cleaning.drop(row, config).reason == reason


def test_a_language_that_is_known_already_is_not_identified_again():
    (row,) = rows(ask("What is the weather like in Hamburg today?", "It rains, as it does on most days in November."))
    config = DataCurationConfig(language=LanguageConfig(keep=["en"]))
    assert cleaning.drop(row, config) is None
    assert cleaning.drop(row, config, ("de", 0.9)).detail == "de (0.90), wanted en"


def test_web_pages_are_judged_by_the_heuristics_and_other_texts_only_when_asked():
    (row,) = rows({"text": "Home\nAbout us\nContact\nCart (0)"})
    assert cleaning.drop(row, DataCurationConfig()) is None
    assert cleaning.drop(row, DataCurationConfig(quality=QualityConfig(apply_to="text"))).reason == "gopher_word_count"
    row.form = "warc"
    assert cleaning.drop(row, DataCurationConfig()).reason == "gopher_word_count"
    assert cleaning.drop(row, DataCurationConfig(quality=QualityConfig(apply_to="none"))) is None


def test_fractions_must_add_up():
    with pytest.raises(ValidationError, match=r"add up to 1\.1"):
        Fractions(train=0.9, validation=0.1, test=0.1)
