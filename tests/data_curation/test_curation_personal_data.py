import base64
import itertools
import json
import random
import re
import string
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from components.common.errors import ConfigurationError
from components.common.personal_data import PLACEHOLDERS, find, redact
from components.common.personal_data.config import NamesConfig
from components.common.personal_data.kinds import CARDS, IBAN_LENGTHS, KINDS, is_card, luhn, mod97
from components.data_curation import readers, work
from components.data_curation.cleaning import Drop
from components.data_curation.config import DataCurationConfig, PersonalDataConfig
from components.data_curation.formats import rows_of
from components.data_curation.readers import Record, Unread
from components.data_curation.scrubbing import scrub
from components.data_curation.sources import list_sources

DEFAULT = PersonalDataConfig()
ALL = list(KINDS)


def random_text(length, alphabet=string.ascii_letters + string.digits, seed=1):
    return "".join(random.Random(seed).choices(alphabet, k=length))


def jwt(header, parts=2):
    encoded = [base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in (header, *['{"sub":"1"}'] * parts)]
    return ".".join(encoded)


# Keys are put together here, so that no scanner takes the shape of one in this file for a real one.
KEYS = {
    "aws": "AKIA" + random_text(16, string.ascii_uppercase + "234567"),
    "aws session": "ASIA" + random_text(16, string.ascii_uppercase + "234567"),
    "github": "ghp_" + random_text(36),
    "github oauth": "gho_" + random_text(36),
    "github fine-grained": "github_pat_" + random_text(22) + "_" + random_text(59),
    "gitlab": "glpat-" + random_text(20),
    "slack": "xoxb-" + random_text(12, string.digits) + "-" + random_text(24),
    "google": "AIza" + random_text(35),
    "openai": "sk-" + random_text(48),
    "openai project": "sk-proj-" + random_text(60),
    "anthropic": "sk-ant-api03-" + random_text(93) + "AA",
    "hugging face": "hf_" + random_text(34),
    "stripe": "sk_live_" + random_text(24),
    "stripe restricted": "rk_live_" + random_text(24),
    "npm": "npm_" + random_text(36),
    "sendgrid": "SG." + random_text(22) + "." + random_text(43),
    "twilio": "SK" + random_text(32, "0123456789abcdef"),
    "azure": "AccountKey=" + random_text(86) + "==",
}
BODY = "\n".join(random_text(64, seed=n) for n in range(5)) + "\n" + random_text(21) + "=\n"
BEGIN, END = "-----BEGIN RSA PRIVATE KEY-----\n", "-----END RSA PRIVATE KEY-----"


def found(text):
    return [(one.kind, text[one.start : one.end]) for one in find(text)]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("email", "write to john.doe+news@mail.example.co.uk.", "john.doe+news@mail.example.co.uk"),
        ("email", "<mailto:MUELLER@web.de>", "MUELLER@web.de"),
        ("email", "联系foo@bar.com谢谢", "foo@bar.com"),
        ("phone", "at +44 (0)20 7946 0958 or", "+44 (0)20 7946 0958"),
        ("phone", "+491701234567", "+491701234567"),
        ("phone", "Fax: 001-420-335-7509x38548", "001-420-335-7509x38548"),
        ("phone", "(555) 123-4567", "(555) 123-4567"),
        ("phone", "1-800-555-0199 now", "1-800-555-0199"),
        ("phone", "910.538.0115.", "910.538.0115"),
        ("phone", "on (07) 5331 0577?", "(07) 5331 0577"),
        ("phone", "020 7946 0958", "020 7946 0958"),
        ("phone", "Mobile: 041-412-293", "041-412-293"),
        ("phone", "call me on 21 212 133 2727", "21 212 133 2727"),
        ("phone", "69 987 88 37 office", "69 987 88 37"),
        ("phone", 'phone="5551234567"', "5551234567"),
        ("phone", "please call 555-1234 today", "555-1234"),
        ("phone", "call me at 698 049 837", "698 049 837"),
        ("phone", "the area of 0141 4960157", "0141 4960157"),
        ("phone", "+61.7.2003.9717", "+61.7.2003.9717"),
        ("credit_card", "card 4111 1111 1111 1111 12/27", "4111 1111 1111 1111"),
        ("credit_card", "3782-822463-10005", "3782-822463-10005"),
        ("credit_card", "6011111111111117,123", "6011111111111117"),
        ("credit_card", "Visa 4222222222222", "4222222222222"),
        ("iban", "GB82 WEST 1234 5698 7654 32 IS MINE", "GB82 WEST 1234 5698 7654 32"),
        ("iban", "de89370400440532013000", "de89370400440532013000"),
        ("us_ssn", "my number is 531-21-7351.", "531-21-7351"),
        ("us_ssn", "SSN 531 21 7351", "531 21 7351"),
        ("us_ssn", "social security number: 531217351", "531217351"),
        ("ip_address", "http://58.74.121.78:8080/a", "58.74.121.78"),
        ("ip_address", "the server 8.8.8.8 answers", "8.8.8.8"),
        ("ip_address", "from 2a00:1450:4001:82f::200e.", "2a00:1450:4001:82f::200e"),
        ("url_credentials", "postgresql://admin:p4ss!word@db.internal:5432/x", "admin:p4ss!word"),
        ("url_credentials", "redis://:secret@cache/0", ":secret"),
        ("private_key", f"key:\n{BEGIN}{BODY}{END}\nend", f"{BEGIN}{BODY}{END}"),
        ("private_key", json.dumps(BEGIN + BODY + END), json.dumps(BEGIN + BODY + END)[1:-1]),
        ("private_key", f"a cut one: {BEGIN}{BODY}", f"{BEGIN}{BODY}".rstrip()),
        ("private_key", f"{BEGIN}{BODY}And so it goes on.", f"{BEGIN}{BODY}".rstrip()),
        ("private_key", f"the rest of it:\n{BODY}{END}", f"{BODY}{END}"),
        ("jwt", f"Cookie: t={jwt(json.dumps({'alg': 'HS256', 'typ': 'JWT'}))}; a=1", jwt(json.dumps({"alg": "HS256", "typ": "JWT"}))),
        ("jwt", jwt('{"alg": "none"}', 1) + ".", jwt('{"alg": "none"}', 1) + "."),
        ("api_key", f"aws_secret_access_key = {random_text(40)}", random_text(40)),
        ("api_key", f'"api_key": "{random_text(32, "0123456789abcdef")}"', random_text(32, "0123456789abcdef")),
        ("api_key", f"Authorization: Bearer {random_text(40)}", random_text(40)),
        *(("api_key", f"it is '{key}'.", key) for key in KEYS.values()),
    ],
)
def test_a_value_is_found_from_its_first_character_to_its_last(kind, text, value):
    assert found(text) == [(kind, value)]


@pytest.mark.parametrize(
    "text",
    [
        "@app.route('/') and x@W.transpose() and a@b and @name@social.example and git@github.com:org/repo.git",
        "icon@2x.png and ssh://git@example.com/repo.git",
        "on 2024-05-18, 18.05.2024 and 05/18/2024, called on 01-02-2003 10:30",
        "from 1897-1901, call it 2003-2004; phone lines in 1990-1995",
        "version 1.2.3.4567 and 10.0.19041.1 and 3.11.5",
        "12 345 678 people called, $1,200,000.00 and 1 200 000 000 EUR",
        "a book of 500-1000 pages; cut down this number by 500-1000 calories",
        "ISBN 978-3-16-148410-0 or ISBN 0-306-40615-2, ISSN 1234-5678",
        "Phys. Rev. Lett. (1998) 1234-1240 and J. Math. 12 (34) 123-145",
        "472547338\n+960397912423686\n-------\n",
        "01 02 03 04 05 and 16 17 18 19 20 21 22",
        "phone (000) 000-0000",
        "id 4111111111111112, 0.4111111111111111 and /4111111111111111/",
        "a sum of 626720691 + 1646615806005 = 4212883012996",
        "GB82 WEST 1234 5698 7654 33, DE8937040044053201300",
        "000-12-3456 666-12-3456 900-12-3456 123-00-4567 123-45-0000",
        "a number of 531 21 7351 and 531217351",
        "127.0.0.1, 10.0.0.1, 192.168.1.1, 169.254.1.1, 192.0.2.1, 203.0.113.7, 224.0.0.1, 255.255.255.255",
        "version 58.74.121.78, v58.74.121.78, Chrome/58.74.121.78, 1.2.3.4 Introduction, 1.3.6.1.4.1, 300.1.1.1",
        "::1, fe80::1, fd00::1, 2001:db8::1, std::vector, a::b, 2020:10:11, 12:30:45",
        "https://user:<password>@host/ https://user:${PASSWORD}@host/ https://user:***@host https://example.com:80/a@b",
        "https://user@example.com/path",
        "ghp_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx sk-learn-contrib-and-some-more-words sk-xxxxxxxxxxxxxxxxxxxxxxxx",
        "api_key = 'YOUR_API_KEY_GOES_HERE' and password = getpass.getpass() and token: max_new_tokens_2024",
        'secret_key = os.environ["APPLICATION_SECRET_KEY"]; api_key=xxxxxxxxxxxxxxxxxxxxxxxx; password: correct-horse-battery',
        f"a key begins with {BEGIN} and ends with {END}",
        "-----BEGIN PUBLIC KEY-----\n" + BODY + "-----END PUBLIC KEY-----",
        "eyJhbGciOi.abc.def " + jwt('{"typ": "JWT"}') + " " + jwt("[1]"),
        " ".join(PLACEHOLDERS.values()),
    ],
)
def test_what_only_looks_alike_is_left_alone(text):
    assert found(text) == []
    assert redact(text, ALL) == (text, {})


def test_a_redacted_text_reads_on_and_the_url_stays():
    text = "Mail john@example.com or call +1 650-253-0000; clone https://me:pw123@host.org/r.git from 58.74.121.78."
    clean, counts = redact(text, ALL)
    assert clean == "Mail <EMAIL> or call <PHONE>; clone https://<URL_CREDENTIALS>@host.org/r.git from <IP_ADDRESS>."
    assert counts == {"email": 1, "phone": 1, "url_credentials": 1, "ip_address": 1}


def test_a_number_that_comes_near_its_word_by_redaction_is_redacted_at_once():
    text = "call " + " or ".join(f"555 123 45{n}" for n in range(10, 30))
    clean, counts = redact(text, ALL)
    assert redact(clean, ALL) == (clean, {})
    assert counts["phone"] == clean.count("<PHONE>")


PARTS = st.sampled_from(
    [
        *(
            "john@example.com",
            "call",
            "tel:",
            "+44 20 7946 0958",
            "555 123 4567",
            "555-1234",
            "4111 1111 1111 1111",
            "GB82WEST12345698765432",
        ),
        *(
            "531-21-7351",
            "ssn",
            "58.74.121.78",
            "://",
            "a:b@",
            "version",
            "api_key=",
            random_text(40),
            BEGIN,
            BODY,
            END,
            "01 02",
            "(07)",
            "x",
        ),
    ]
)


@given(st.lists(st.one_of(PARTS, st.text(max_size=8)), max_size=12), st.sampled_from(["", " ", "\n", "-"]))
def test_redacting_twice_is_redacting_once_and_what_surrounds_a_finding_stays(parts, gap):
    text = gap.join(parts)
    clean, counts = redact(text, ALL)
    assert redact(clean, ALL) == (clean, {})
    assert (clean == text) == (not counts)
    places = find(text)
    assert all(a.end <= b.start for a, b in itertools.pairwise(places))
    assert all(0 <= one.start < one.end <= len(text) for one in places)
    if counts.total() == len(places):
        kept = [text[a:b] for a, b in zip([0, *(p.end for p in places)], [*(p.start for p in places), len(text)], strict=True)]
        marks = [PLACEHOLDERS[p.kind] for p in places]
        assert clean == "".join(part for pair in zip(kept, [*marks, ""], strict=True) for part in pair)


@given(st.text(alphabet=st.characters(exclude_categories=["Nd", "Cs"], exclude_characters="@:="), max_size=300))
def test_a_text_without_digits_and_signs_stays_as_it_is(text):
    assert redact(text, ALL) == (text, {})


@st.composite
def cards(draw):
    """A card's number of any issuer and length, and one way to group it."""
    prefixes, lengths = draw(st.sampled_from(CARDS))
    length = draw(st.sampled_from(sorted(lengths)))
    digits = str(draw(st.sampled_from(prefixes)))
    digits += "".join(draw(st.lists(st.sampled_from(string.digits), min_size=length - 5, max_size=length - 5)))
    digits = next(digits + check for check in string.digits if luhn(digits + check))
    gap, sizes = draw(st.sampled_from(["", " ", "-"])), []
    while sum(sizes) < length:
        size = draw(st.integers(2, 6))
        sizes.append(size if length - sum(sizes) - size >= 2 or length - sum(sizes) == size else length - sum(sizes))
    places = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    return gap.join(digits[a:b] for a, b in itertools.pairwise(places))


@given(cards())
def test_a_card_with_a_right_check_digit_is_found_in_any_grouping(card):
    assert found(f"my card {card}, thanks") == [("credit_card", card)]


@given(cards(), st.integers(0, 30), st.integers(1, 9))
def test_a_card_with_one_wrong_digit_is_no_card(card, place, step):
    place = [i for i, c in enumerate(card) if c.isdigit()][place % sum(c.isdigit() for c in card)]
    wrong = card[:place] + str((int(card[place]) + step) % 10) + card[place + 1 :]
    assert not is_card(wrong.replace(" ", "").replace("-", ""))
    assert ("credit_card", wrong) not in found(f"my card {wrong}, thanks")


@st.composite
def ibans(draw):
    country = draw(st.sampled_from(sorted(IBAN_LENGTHS)))
    size = IBAN_LENGTHS[country] - 4
    account = "".join(draw(st.lists(st.sampled_from(string.digits + string.ascii_uppercase), min_size=size, max_size=size)))
    return f"{country}{98 - mod97(country + '00' + account):02}{account}"


@given(ibans(), st.sampled_from(["", " ", "-"]))
def test_an_iban_of_every_country_is_found_plain_and_in_groups(iban, gap):
    written = gap.join(iban[i : i + 4] for i in range(0, len(iban), 4))
    assert found(f"to {written}.") == [("iban", written)]


@given(ibans(), st.integers(0, 33), st.integers(1, 35))
def test_an_iban_with_one_wrong_character_is_none(iban, place, step):
    place = 4 + place % (len(iban) - 4)
    letters = string.digits + string.ascii_uppercase
    wrong = iban[:place] + letters[(letters.index(iban[place]) + step) % 36] + iban[place + 1 :]
    if mod97(wrong) != 1:  # a letter is two digits, so that a few changes of one keep the remainder
        assert ("iban", wrong) not in found(f"to {wrong}.")


def test_every_country_of_the_registry_has_its_length_once():
    assert IBAN_LENGTHS["NO"] == 15
    assert IBAN_LENGTHS["DE"] == 22
    assert IBAN_LENGTHS["RU"] == 33
    assert len(IBAN_LENGTHS) == 88


SECRET = "john@example.com"


def row(**fields):
    (made,) = rows_of(Record("f.jsonl", 1, fields))
    return made


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": f"I am {SECRET}"}, {"role": "assistant", "content": f"Hello {SECRET}"}]},
        {"prompt": f"I am {SECRET}", "chosen": f"Hello {SECRET}", "rejected": f"No {SECRET}"},
        {"messages": [{"role": "user", "content": SECRET}, {"role": "assistant", "content": SECRET}], "label": True},
        {"text": f"I am {SECRET}"},
        {
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
            "tools": [{"name": "send", "description": f"mails {SECRET}", "parameters": {"default": [SECRET, 5]}}],
        },
        {"text": "nothing here", "author": {"mail": [SECRET, None, {"deep": SECRET}]}, "score": 3},
    ],
    ids=["conversation", "pair", "label", "text", "tools", "meta"],
)
def test_every_text_of_a_row_is_redacted_and_the_rest_stays(fields):
    made = row(**fields)
    counts, why = scrub(made, DEFAULT)
    said = json.dumps([made.content, made.meta])
    assert SECRET not in said
    assert counts == {"email": json.dumps(fields).count(SECRET)} == {"email": said.count("<EMAIL>")}
    assert why is None
    again = json.dumps([made.content, made.meta])
    assert scrub(made, DEFAULT) == ({}, None)
    assert json.dumps([made.content, made.meta]) == again == said


def test_tools_stay_json_and_equal_where_nothing_is_found():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    plain = row(messages=messages, tools=[{"name": "a", "description": "b"}])
    before = plain.content["tools"]
    scrub(plain, DEFAULT)
    assert plain.content["tools"] == before
    found_in = row(messages=messages, tools=[{"name": "a", "description": f'say "{SECRET}"'}])
    scrub(found_in, DEFAULT)
    assert json.loads(found_in.content["tools"])[0]["description"] == 'say "<EMAIL>"'


def test_the_name_of_a_field_tells_what_its_number_is_and_the_sources_id_stays():
    made = row(text="A customer.", id="531-21-7351", phone="5551234567", ssn="531217351", count="5551234567")
    counts, _ = scrub(made, DEFAULT)
    assert made.meta == {"phone": "<PHONE>", "ssn": "<US_SSN>", "count": "5551234567"}
    assert counts == {"phone": 1, "us_ssn": 1}
    assert made.own_id == "531-21-7351"


def test_what_is_nested_as_deeply_as_it_can_be_read_is_redacted():
    deep = SECRET
    for _ in range(900):
        deep = [deep]
    made = row(text="nothing here", deep=deep)
    assert scrub(made, DEFAULT)[0] == {"email": 1}
    assert "<EMAIL>" in json.dumps(made.meta)
    assert SECRET in json.dumps(deep)  # what the source gave is not changed under another row's hands


def test_a_row_is_dropped_by_kind_and_carries_no_value_nor_does_its_reason():
    made = row(text=f"{SECRET} pays with 4111 1111 1111 1111")
    counts, why = scrub(made, PersonalDataConfig(credit_card="drop"))
    assert why == Drop("personal_data", "credit_card")
    assert counts == {"email": 1, "credit_card": 1}
    assert made.content["text"] == "<EMAIL> pays with <CREDIT_CARD>"
    both = row(text=f"{SECRET} pays with 4111 1111 1111 1111")
    assert scrub(both, PersonalDataConfig(credit_card="drop", email="drop"))[1] == Drop("personal_data", "email, credit_card")


def test_what_is_kept_is_counted_and_stays():
    made = row(text=f"{SECRET} and 58.74.121.78")
    counts, why = scrub(made, PersonalDataConfig(email="keep"))
    assert made.content["text"] == f"{SECRET} and <IP_ADDRESS>"
    assert (counts, why) == ({"email": 1, "ip_address": 1}, None)
    assert scrub(made, PersonalDataConfig(email="keep")) == ({"email": 1}, None)


def test_a_finding_and_a_drop_show_no_value():
    text = f"{SECRET} 4111 1111 1111 1111 {KEYS['github']}"
    assert not any(value in repr(find(text)) for value in (SECRET, "4111", "ghp_"))


def test_the_source_that_a_row_names_is_redacted_as_its_kind_says_and_a_files_name_stays():
    made = row(text="A letter.", source=f"letters of {SECRET}")
    assert scrub(made, DEFAULT) == ({"email": 1}, None)
    assert made.source == "letters of <EMAIL>"
    made = row(text="A letter.", source=SECRET)
    assert scrub(made, PersonalDataConfig(email="keep")) == ({"email": 1}, None)
    assert made.source == SECRET
    (named,) = rows_of(Record(f"{SECRET}.jsonl", 1, {"text": "A letter."}))
    assert scrub(named, DEFAULT) == ({}, None)
    assert named.source == f"{SECRET}.jsonl"


@pytest.mark.parametrize("action", ["redact", "keep"])
def test_the_reason_why_a_record_is_unreadable_quotes_no_personal_data(tmp_path, action):
    records = [
        Record("f.jsonl", 1, {"messages": [{"role": SECRET, "content": "Hi"}]}),
        Record("f.jsonl", 2, {SECRET: "Hi", KEYS["github"]: 1}),
        Unread("f.jsonl", 3, f"a value that nobody knows: {SECRET}"),
    ]
    done = work.prepare(1, records, work.Tools(DataCurationConfig(personal_data={"email": action, "api_key": action})), tmp_path)
    assert [one.line for one in done.unread] == [1, 2, 3]
    assert "a turn by '<EMAIL>'" in done.unread[0].why
    assert set(done.unread[1].why.removeprefix("unknown shape: keys ").split(", ")) == {"<EMAIL>", "<API_KEY>"}
    assert done.unread[2].why == "a value that nobody knows: <EMAIL>"


PHONE = "\u202a+49\u00a0170\u00a01234567\u202c"


@pytest.mark.parametrize("name", [PHONE, "x\n+49 170 1234567", "a'b\n415-555-2671", "x" * 70 + SECRET, "+49 170 1234567 " * 1000])
def test_personal_data_in_the_place_of_a_name_is_not_hidden_by_how_a_reason_quotes_it(tmp_path, name):
    (tmp_path / "rows.csv").write_text(f'"{name}","{name}",answer\nq,r,a\n')
    (source,) = list_sources(["rows.csv"], tmp_path)
    records = [
        Record("f.jsonl", 1, {"messages": [{"from": name, "value": "Hi"}]}),
        Record("f.jsonl", 2, {"instruction": "Why?", "output_1": "a", "output_2": "b", "preference": name}),
        *readers.read(source, DataCurationConfig()),
    ]
    done = work.prepare(1, records, work.Tools(DataCurationConfig()), tmp_path)
    assert len(done.unread) == 3
    for one in done.unread:
        assert not re.search(r"170|555|example", one.why), one.why
        assert len(one.why) < 250


def test_every_kind_has_a_knob_and_another_action_is_refused():
    assert set(KINDS) | {"names"} == set(PersonalDataConfig.model_fields)
    with pytest.raises(ValidationError, match=r"redact.*drop.*keep"):
        PersonalDataConfig(email="delete")


@pytest.mark.parametrize(
    "text",
    ["a@" * 5_000_000, "1234567890" * 1_000_000, "-----BEGIN" * 1_000_000, "-----BEGIN PRIVATE KEY-----" * 370_000, "a" * 10_000_000 + "@"],
    ids=["at signs", "digits", "beginnings", "headings", "one word"],
)
def test_ten_million_characters_on_one_line_take_seconds(text):
    started = time.process_time()
    assert find(text) == []
    assert time.process_time() - started < 10


@pytest.mark.parametrize("unit", ["4111 ", "1-", "(07) 123-", "2001:", "api_key=", "GB82 ", "://a:", "eyJhbGciOi.", "token: a"])
def test_time_grows_with_the_length_and_not_with_its_square(unit):
    def seconds(length):
        started = time.process_time()
        find(unit * (length // len(unit)))
        return time.process_time() - started

    seconds(1_000)
    assert seconds(400_000) < 40 * max(seconds(40_000), 0.005)


def test_a_model_that_is_not_there_is_told_before_anything_is_downloaded(tmp_path):
    (tmp_path / "file").write_text("")
    for name, what in (("nowhere", "is not there"), (".", "holds no spaCy model"), ("file", "is not a folder")):
        with pytest.raises(ConfigurationError) as refused:
            scrub(row(text="Ada Lovelace"), PersonalDataConfig(names=NamesConfig(model=str(tmp_path / name))))
        assert f"data_curation.personal_data.names.model: {tmp_path / name}".rstrip("/.") in refused.value.message
        assert what in refused.value.message
        assert "Name the folder of a spaCy model that lies on this machine" in refused.value.hint
        assert refused.value.exit_code == 2


def test_a_missing_presidio_is_told_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)  # importing it fails, as where it is not installed
    for name in ("config.cfg", "meta.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigurationError) as refused:
        find("Ada Lovelace", NamesConfig(model=str(tmp_path)))
    assert "needs presidio-analyzer and spaCy" in refused.value.message
    assert "pip install presidio-analyzer spacy" in refused.value.hint


def test_an_action_on_names_without_a_model_is_refused():
    with pytest.raises(ValidationError, match="name its folder in model"):
        NamesConfig(person="redact")
