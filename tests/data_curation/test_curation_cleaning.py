"""Text normalization and the order of the row filters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from components.data_curation import text_normalization
from components.data_curation.config import DataCurationConfig, Fractions, LanguageConfig, QualityConfig
from components.data_curation.filters import row_filters
from components.data_curation.filters.filter_family import FilterFamily
from components.data_curation.filters.measured_row import MeasuredRow
from components.data_curation.filters.reject_reasons import REJECT_REASONS, SIZE_GROUP, RejectReason, register_reason
from components.data_curation.reading.raw_records import Record
from components.data_curation.reading.record_formats import parse_record


def parse_rows(*records):
    return [row for record in records for row in parse_record(Record("f", 1, record))]


def build_record(question, answer, **fields):
    return {"prompt": question, "completion": answer, **fields}


@pytest.mark.parametrize(
    ("raw", "normalized"),
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
def test_text_is_normalized_and_keeps_its_indentation(raw, normalized):
    assert text_normalization.normalize_text(raw) == normalized
    assert text_normalization.normalize_text(normalized) == normalized


@pytest.mark.parametrize(
    ("misread", "expected"),
    [
        ("âœ” No problems", "✔ No problems"),
        ("The Mona Lisa doesnÃƒÂ¢Ã¢â€šÂ¬Ã¢â€žÂ¢t have eyebrows.", "The Mona Lisa doesn’t have eyebrows."),
        ("РїСЂРёРІРµС‚ РјРёСЂ", "привет мир"),
        ("Belle Ã\x89poque, PrÃ\xadncipe", "Belle Époque, Príncipe"),
        ("don\x92t", "don’t"),
    ],
)
def test_mojibake_is_repaired(misread, expected):
    assert text_normalization.normalize_text(misread) == expected
    assert text_normalization.normalize_text(f"你好\n{misread}\nПривет") == f"你好\n{expected}\nПривет"


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
def test_valid_text_is_unchanged(text):
    assert text_normalization.normalize_text(text) == text


@pytest.mark.parametrize(
    ("raw", "normalized"),
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
def test_invisible_and_control_characters_are_replaced_or_removed(raw, normalized):
    assert text_normalization.normalize_text(raw) == normalized


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
def test_invisible_characters_that_scripts_or_emoji_need_are_kept(text):
    assert text_normalization.normalize_text(text) == text


def test_direction_override_is_removed():
    assert text_normalization.normalize_text("עברית \u202eabc\u202c") == "עברית abc\u202c"


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
@given(
    st.lists(st.one_of(st.sampled_from(SPECIAL), st.characters(exclude_categories=["Cs"])), max_size=40).map("".join)
)
def test_normalization_is_idempotent(text):
    normalized = text_normalization.normalize_text(text)
    assert text_normalization.normalize_text(normalized) == normalized
    assert not any(c in normalized for c in "\r\x0b\x0c\x00\ufeff\u2028\xa0")
    assert " \n" not in normalized
    assert "\n\n\n\n" not in normalized


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=80))
def test_plain_ascii_loses_only_trailing_spaces(text):
    assert text_normalization.normalize_text(text) == text.rstrip(" ")


def test_long_runs_of_spaces_are_normalized():
    assert text_normalization.normalize_text("a" + " " * 300_000 + "b" + "\xa0" * 300_000) == "a" + " " * 300_000 + "b"


def test_turns_are_normalized_and_tools_are_not():
    (row,) = parse_rows(
        {
            "messages": [{"role": "user", "content": "a\u00a0b?"}, {"role": "assistant", "content": "cafe\u0301 "}],
            "tools": '[{"n": "x"}]',
        }
    )
    text_normalization.normalize_row(row)
    assert [m["content"] for m in row.content["messages"]] == ["a b?", "café"]
    assert row.content["tools"] == '[{"n": "x"}]'


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (build_record(" ", "An answer."), "empty_prompt"),
        (build_record("A question?", "\n"), "empty_answer"),
        ({"messages": [{"role": "user", "content": "Hello?"}]}, "empty_answer"),
        (build_record("Hm", "A good answer."), "short_prompt"),
        (build_record("A question?", "No"), "short_answer"),
        (build_record("A question?", "long " * 50), "long_row"),
        ({"text": " "}, "empty_text"),
        ({"text": "tiny"}, "short_text"),
        ({"prompt": "A question?", "chosen": "The same.", "rejected": "The same."}, "no_preference"),
        (build_record("A question?", "A good answer."), None),
    ],
)
def test_filter_rejects_with_its_reason(record, reason):
    (row,) = parse_rows(record)
    text_normalization.normalize_row(row)
    rejection = row_filters.find_rejection(
        MeasuredRow(row), DataCurationConfig(min_prompt_characters=3, min_answer_characters=5, max_row_characters=200)
    )
    assert (rejection.reason if rejection else None) == reason


def test_first_filter_in_documented_order_gives_the_reason():
    german = "Das ist eine ganz normale deutsche Antwort auf die Frage nach dem Wetter in Hamburg."
    config = DataCurationConfig(language=LanguageConfig(keep=["en"]), min_answer_characters=5)
    for answer, reason in (
        ("No", "short_answer"),
        ("Wie ist denn das Wetter in Hamburg?", "echoed_answer"),
        (german, "language"),
    ):
        (row,) = parse_rows(build_record("Wie ist denn das Wetter in Hamburg?", answer))
        assert row_filters.find_rejection(MeasuredRow(row), config).reason == reason


def test_language_is_identified_once():
    (row,) = parse_rows(
        build_record("What is the weather like in Hamburg today?", "It rains, as it does on most days in November.")
    )
    config = DataCurationConfig(language=LanguageConfig(keep=["en"]))
    measured = MeasuredRow(row)
    assert row_filters.find_rejection(measured, config) is None
    measured.language = ("de", 0.9)
    assert row_filters.find_rejection(measured, config).detail == "de (0.90); expected en"


def test_web_heuristics_apply_to_other_texts_only_if_configured():
    (row,) = parse_rows({"text": "Home\nAbout us\nContact\nCart (0)"})
    assert row_filters.find_rejection(MeasuredRow(row), DataCurationConfig()) is None
    assert (
        row_filters.find_rejection(MeasuredRow(row), DataCurationConfig(quality=QualityConfig(apply_to="text"))).reason
        == "gopher_word_count"
    )
    row.format = "warc"
    assert row_filters.find_rejection(MeasuredRow(row), DataCurationConfig()).reason == "gopher_word_count"
    assert (
        row_filters.find_rejection(MeasuredRow(row), DataCurationConfig(quality=QualityConfig(apply_to="none"))) is None
    )


def test_fractions_must_add_up():
    with pytest.raises(ValidationError, match=r"is 1\.1; expected 1"):
        Fractions(train=0.9, validation=0.1, test=0.1)


def test_reject_reason_without_a_group_cannot_be_declared():
    with pytest.raises(ValueError, match="the reject reason too_shiny has no group"):
        FilterFamily("", lambda config: config).register("too_shiny")
    with pytest.raises(TypeError, match="group"):
        RejectReason("too_shiny")
    assert "too_shiny" not in REJECT_REASONS


def test_reject_reason_is_in_one_group():
    with pytest.raises(ValueError, match="empty_answer is in the group 'shine'; expected 'empty, short or long'"):
        register_reason("empty_answer", "shine")
    assert register_reason("empty_answer", SIZE_GROUP) is REJECT_REASONS["empty_answer"]


@pytest.mark.parametrize(
    ("question", "answer"), [("你好", "您好！"), ("几点开门？", "九点。"), ("返品したい", "はい。"), ("ราคา?", "ฟรี")]
)
def test_short_conversation_in_a_language_without_spaces_is_kept(question, answer):
    (row,) = parse_rows(build_record(question, answer))
    config = DataCurationConfig(language=LanguageConfig(keep=["zh", "ja", "th"]))
    assert row_filters.find_rejection(MeasuredRow(row), config) is None
