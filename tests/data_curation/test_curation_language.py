import socket

import pytest
from pydantic import ValidationError

from components.data_curation import language
from components.data_curation.config import LANGUAGES, LanguageConfig
from components.data_curation.rows import Row

TEXTS = {
    "en": "The committee met on Tuesday to decide whether the old bridge should be repaired or replaced.",
    "de": "Der Ausschuss traf sich am Dienstag, um über die Zukunft der alten Brücke zu entscheiden.",
    "fr": "Le comité s'est réuni mardi pour décider si le vieux pont devait être réparé ou remplacé.",
    "zh": "委员会星期二开会，决定这座老桥应该修理还是更换，并讨论了所需要的费用和时间安排。",
    "ru": "Комитет собрался во вторник, чтобы решить, следует ли отремонтировать старый мост.",
    "ar": "اجتمعت اللجنة يوم الثلاثاء لتقرر ما إذا كان ينبغي إصلاح الجسر القديم أو استبداله.",
}


@pytest.mark.parametrize("code", TEXTS)
def test_common_languages_are_identified_with_confidence(code):
    found, confidence = language.identify(TEXTS[code])
    assert found == code
    assert 0.8 < confidence <= 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "OK.",
        "12345 67890 == 3.14; {} [] () 100%",
        "```python\nfor item in items:\n    total += item.price\n```",
        "https://example.org/the/committee/met/on/tuesday",
    ],
)
def test_what_has_too_few_letters_outside_of_code_and_addresses_is_undetermined(text):
    assert language.identify(text) == ("und", 0.0)


def test_lines_capitals_and_code_do_not_hide_the_language():
    assert language.identify(TEXTS["de"].replace(" ", "\n"))[0] == "de"
    assert language.identify(TEXTS["en"].upper())[0] == "en"
    assert language.identify(f"```\nint main(void) {{ return 0; }}\n```\n{TEXTS['fr']}")[0] == "fr"


def test_only_the_beginning_counts_so_a_long_text_costs_no_more():
    assert language.identify(TEXTS["en"] * 3 + TEXTS["zh"] * 1000) == language.identify(TEXTS["en"] * 3)


def test_the_model_is_read_from_the_installed_package_and_never_fetched(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    language._detector.cache_clear()
    assert language.identify(TEXTS["en"])[0] == "en"


def test_the_codes_that_can_be_configured_are_those_of_the_model():
    labels, _ = language._detector()._get_model(low_memory=True).predict("hello", k=500, threshold=-1.0)
    assert {label.removeprefix("__label__") for label in labels} == LANGUAGES


def test_a_code_that_cannot_be_identified_is_refused():
    with pytest.raises(ValidationError, match="'english': not among the 176 codes that can be identified, such as en, de, zh"):
        LanguageConfig(keep=["en", "english"])


def test_a_text_in_another_language_is_dropped_with_what_was_found_and_wanted():
    found = language.drop(TEXTS["de"], LanguageConfig(keep=["en", "fr"]))
    assert found.reason == "language"
    assert found.detail.startswith("de (0.9")
    assert found.detail.endswith("wanted en, fr")
    assert language.drop(TEXTS["fr"], LanguageConfig(keep=["en", "fr"])) is None
    assert language.drop(TEXTS["de"], LanguageConfig()) is None


def test_an_undetermined_text_is_kept_unless_told_otherwise():
    unsure = ("it", 0.31)
    assert language.judge(unsure, LanguageConfig(keep=["en"])) is None
    assert language.judge(("und", 0.0), LanguageConfig(keep=["en"])) is None
    strict = language.judge(unsure, LanguageConfig(keep=["en"], drop_undetermined=True))
    assert strict.detail == "undetermined (it 0.31), wanted en"
    assert language.judge(unsure, LanguageConfig(keep=["en"], min_confidence=0.2)).detail == "it (0.31), wanted en"


def test_a_conversation_has_the_language_of_its_beginning():
    messages = [{"role": "user", "content": TEXTS["ru"]}, {"role": "assistant", "content": TEXTS["ru"]}]
    row = Row("sft", {"messages": messages, "tools": None}, "", "s", {}, "f", 1)
    assert language.of(row)[0] == "ru"
    assert language.of(Row("text", {"text": TEXTS["ar"]}, "", "s", {}, "f", 1))[0] == "ar"
    silent = Row("sft", {"messages": [{"role": "user", "content": TEXTS["zh"]}], "tools": None}, "", "s", {}, "f", 1)
    assert language.of(silent)[0] == "zh"
