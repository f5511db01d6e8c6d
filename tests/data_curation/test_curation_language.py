"""Language identification and the language filter."""

import socket

import pytest
from pydantic import ValidationError

from components.common import language_identification
from components.data_curation.config import LANGUAGES, DataCurationConfig, LanguageConfig
from components.data_curation.filters.language_filter import LANGUAGE_FILTERS
from components.data_curation.filters.measured_row import MeasuredRow
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
    language, confidence = language_identification.identify_language(TEXTS[code])
    assert language == code
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
def test_text_with_too_few_letters_is_undetermined(text):
    assert language_identification.identify_language(text) == ("und", 0.0)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("密码错误", "zh"),
        ("如何重置我的密码？", "zh"),
        ("订单已发货，请注意查收", "zh"),  # the model takes it for Japanese
        ("谢谢", "zh"),
        ("iPhone 订单", "zh"),
        ("列夫・托尔斯泰是谁？", "zh"),  # with a katakana middle dot
        ("优の良品", "zh"),
        ("森鷗外の小説", "ja"),  # 鷗 is not in JIS X 0208
        ("「谢谢」はありがとうです", "ja"),
        ("東京は日本の首都です", "ja"),
        ("ありがとう", "ja"),
        ("カメラ", "ja"),
        ("안녕하세요", "ko"),
        ("สวัสดี", "th"),
        ("ສະບາຍດີ", "lo"),
        ("ជំរាបសួរ", "km"),
        ("ကျေးဇူး", "my"),
    ],
)
def test_short_text_is_identified_by_its_script(text, language):
    assert language_identification.identify_language(text) == (language, 1.0)
    assert find_rejection(text, keep=[language], drop_undetermined=True) is None
    assert find_rejection(text, keep=["en"]).reason == "language"


@pytest.mark.parametrize("text", ["Translate 谢谢", "été", "да"])
def test_short_text_whose_script_does_not_decide_is_undetermined(text):
    assert language_identification.identify_language(text) == ("und", 0.0)
    assert find_rejection(text, keep=["en"]) is None


@pytest.mark.parametrize("text", ["東京都", "東京・大阪", "株式会社", "可以", "操作成功。", "日本語 (ok)"])
def test_short_text_that_is_chinese_or_japanese_is_kept_for_either(text):
    assert language_identification.identify_language(text) == ("und-Hani", 0.0)
    assert find_rejection(text, keep=["zh"], drop_undetermined=True) is None
    assert find_rejection(text, keep=["ja", "en"], drop_undetermined=True) is None
    assert find_rejection(text, keep=["en"]) is None
    assert (
        find_rejection(text, keep=["en"], drop_undetermined=True).detail == "undetermined (und-Hani 0.00); expected en"
    )


def test_line_breaks_capitals_and_code_do_not_affect_the_language():
    assert language_identification.identify_language(TEXTS["de"].replace(" ", "\n"))[0] == "de"
    assert language_identification.identify_language(TEXTS["en"].upper())[0] == "en"
    assert (
        language_identification.identify_language(f"```\nint main(void) {{ return 0; }}\n```\n{TEXTS['fr']}")[0] == "fr"
    )


def test_only_the_beginning_of_a_text_is_identified():
    assert language_identification.identify_language(
        TEXTS["en"] * 3 + TEXTS["zh"] * 1000
    ) == language_identification.identify_language(TEXTS["en"] * 3)


def test_language_model_is_loaded_without_network(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", fail)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    language_identification._load_model.cache_clear()
    assert language_identification.identify_language(TEXTS["en"])[0] == "en"


def test_configurable_codes_are_those_of_the_model():
    labels, _ = language_identification._load_model().predict("hello", k=500, threshold=-1.0)
    assert {label.removeprefix("__label__") for label in labels} == LANGUAGES


def test_unknown_language_code_is_refused():
    with pytest.raises(
        ValidationError, match="unknown language codes 'english'; expected ISO 639 codes such as en, de, zh"
    ):
        LanguageConfig(keep=["en", "english"])


def find_rejection(text, language=None, **config):
    row = MeasuredRow(Row("text", {"text": text}, "", "s", {}, "f", 1))
    if language:
        row.language = language
    return LANGUAGE_FILTERS.find_rejection(row, DataCurationConfig(language=LanguageConfig(**config)))


def test_text_in_another_language_is_rejected_with_the_wanted_ones():
    rejection = find_rejection(TEXTS["de"], keep=["en", "fr"])
    assert rejection.reason == "language"
    assert rejection.detail.startswith("de (0.9")
    assert rejection.detail.endswith("; expected en or fr")
    assert find_rejection(TEXTS["fr"], keep=["en", "fr"]) is None
    assert find_rejection(TEXTS["de"]) is None


def test_undetermined_text_is_kept_unless_configured():
    uncertain = ("it", 0.31)
    assert find_rejection("", uncertain, keep=["en"]) is None
    assert find_rejection("", ("und", 0.0), keep=["en"]) is None
    rejection = find_rejection("", uncertain, keep=["en"], drop_undetermined=True)
    assert rejection.detail == "undetermined (it 0.31); expected en"
    assert find_rejection("", uncertain, keep=["en"], min_confidence=0.2).detail == "it (0.31); expected en"


def test_language_comes_from_the_beginning_of_a_conversation():
    messages = [{"role": "user", "content": TEXTS["ru"]}, {"role": "assistant", "content": TEXTS["ru"]}]
    assert MeasuredRow(Row("sft", {"messages": messages, "tools": None}, "", "s", {}, "f", 1)).language[0] == "ru"
    assert MeasuredRow(Row("text", {"text": TEXTS["ar"]}, "", "s", {}, "f", 1)).language[0] == "ar"
    unanswered = {"messages": [{"role": "user", "content": TEXTS["zh"]}], "tools": None}
    assert MeasuredRow(Row("sft", unanswered, "", "s", {}, "f", 1)).language[0] == "zh"
