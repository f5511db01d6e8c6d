"""Detection and redaction of personal data and secrets."""

import base64
import itertools
import json
import random
import re
import string
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from components.common import personal_data
from components.common.personal_data import PLACEHOLDERS, find, redact
from components.common.personal_data.check_digits import has_luhn_check_digit
from components.common.personal_data.detectors import (
    CARDS,
    DETECTORS,
    IBAN_LENGTHS,
    compute_iban_remainder,
    is_card_number,
    select_detectors,
)
from components.common.personal_data.names_config import NamesConfig
from components.common.runtime.errors import ConfigurationError
from components.data_curation import chunk_worker
from components.data_curation.config import DataCurationConfig, PersonalDataConfig
from components.data_curation.filters.redaction import redact_row
from components.data_curation.filters.reject_reasons import PERSONAL_DATA
from components.data_curation.reading import file_readers
from components.data_curation.reading.raw_records import Record, UnreadableRecord
from components.data_curation.reading.record_formats import parse_record
from components.data_curation.reading.source_files import list_sources

DEFAULT = PersonalDataConfig()
ALL = list(DETECTORS)


def make_random_text(length, alphabet=string.ascii_letters + string.digits, seed=1):
    return "".join(random.Random(seed).choices(alphabet, k=length))


def make_jwt(header, parts=2):
    encoded = [
        base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in (header, *['{"sub":"1"}'] * parts)
    ]
    return ".".join(encoded)


# Keys are assembled here, so that secret scanners do not report this file.
KEYS = {
    "aws": "AKIA" + make_random_text(16, string.ascii_uppercase + "234567"),
    "aws session": "ASIA" + make_random_text(16, string.ascii_uppercase + "234567"),
    "github": "ghp_" + make_random_text(36),
    "github oauth": "gho_" + make_random_text(36),
    "github fine-grained": "github_pat_" + make_random_text(22) + "_" + make_random_text(59),
    "gitlab": "glpat-" + make_random_text(20),
    "slack": "xoxb-" + make_random_text(12, string.digits) + "-" + make_random_text(24),
    "google": "AIza" + make_random_text(35),
    "openai": "sk-" + make_random_text(48),
    "openai project": "sk-proj-" + make_random_text(60),
    "anthropic": "sk-ant-api03-" + make_random_text(93) + "AA",
    "hugging face": "hf_" + make_random_text(34),
    "stripe": "sk_live_" + make_random_text(24),
    "stripe restricted": "rk_live_" + make_random_text(24),
    "npm": "npm_" + make_random_text(36),
    "sendgrid": "SG." + make_random_text(22) + "." + make_random_text(43),
    "twilio": "SK" + make_random_text(32, "0123456789abcdef"),
    "azure": "AccountKey=" + make_random_text(86) + "==",
}
BODY = "\n".join(make_random_text(64, seed=n) for n in range(5)) + "\n" + make_random_text(21) + "=\n"
BEGIN, END = "-----BEGIN RSA PRIVATE KEY-----\n", "-----END RSA PRIVATE KEY-----"


def find_values(text):
    return [(finding.kind, text[finding.start : finding.end]) for finding in find(text)]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("email", "write to john.doe+news@mail.example.co.uk.", "john.doe+news@mail.example.co.uk"),
        ("email", "<mailto:MUELLER@web.de>", "MUELLER@web.de"),
        ("email", "联系foo@bar.com谢谢", "foo@bar.com"),
        ("email", "References: see <ada.20@example.com>", "ada.20@example.com"),
        ("email", "mail 13800138000@163.com", "13800138000@163.com"),
        ("email", "an Egyptian mobile: 201001234567@yahoo.com", "201001234567@yahoo.com"),
        ("email", "190012345678@163.com", "190012345678@163.com"),
        ("email", "12345678.1234567@students.uni.de", "12345678.1234567@students.uni.de"),
        ("email", "References: <jane.doe@example.org>", "jane.doe@example.org"),
        ("email", "References: <jane85@example.org>\n\nMessage-ID: <a@b.example>", "jane85@example.org"),
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
        ("phone", "Smith,751-954-9268,Boston", "751-954-9268"),
        ("phone", "34,+41 (0)69 979 80 58,12", "+41 (0)69 979 80 58"),
        ("phone", "phone=7519549268", "7519549268"),
        ("phone", "a=1; tel=+491701234567", "+491701234567"),
        ("phone", "Tél : 0612345678", "0612345678"),
        ("phone", "手机13800138000", "13800138000"),
        ("phone", "请拨打电话：13800138000联系我", "13800138000"),
        ("phone", "тел. 4951234567", "4951234567"),
        ("phone", "8 (495) 123-45-67", "8 (495) 123-45-67"),
        ("phone", "8-495-123-45-67", "8-495-123-45-67"),
        ("phone", "8(495)123-45-67", "8(495)123-45-67"),
        ("phone", "1(800)555-0199", "1(800)555-0199"),
        ("phone", "Phone: 8 (641) 744-63-23", "8 (641) 744-63-23"),
        ("phone", "Call me on 9472 7916?", "9472 7916"),
        ("phone", "Phone: 2345-6789", "2345-6789"),
        ("phone", "They are not answering at 374 780 163", "374 780 163"),
        ("phone", "They are not answering at 785 8949", "785 8949"),
        ("phone", "082 490 1693-Office", "082 490 1693"),
        ("phone", "2546712361 fax", "2546712361"),
        ("phone", "Desk: 5403926876", "5403926876"),
        ("phone", "send STOP to 82324. 08706091795.2stop", "08706091795"),
        ("phone", "Mobile8 08001950382 16", "08001950382"),
        ("phone", "stop sms-08718727870", "08718727870"),
        ("phone", "from 447801259231", "447801259231"),
        ("phone", "447801259231 Ms Smith", "447801259231"),
        ("phone", "\n- 919876543210.", "919876543210"),
        ("phone", "WhatsApp (UK): 447801259231", "447801259231"),
        ("phone", "Main St 5,0471975512,34", "0471975512"),
        ("phone", "34,020 7946 0958", "020 7946 0958"),
        ("phone", "Smith,34,0471975512\n", "0471975512"),
        ("phone", "name,0422718032,city", "0422718032"),
        ("phone", "It is 015112345678 now", "015112345678"),
        ("phone", "just call 087104711148 now", "087104711148"),
        ("phone", "please call the number 0306406152", "0306406152"),
        ("phone", "王伟，13800138000，北京", "13800138000"),
        ("phone", "8 959 679 02 56", "8 959 679 02 56"),
        ("phone", "08-91 15 55", "08-91 15 55"),
        ("phone", "0125698789 ring me", "0125698789"),
        ("phone", "chat at 0871750.77.11", "0871750.77.11"),
        ("phone", "The NHS answers at 020 7946 0958", "020 7946 0958"),
        ("phone", "order by phone: 9472 7916", "9472 7916"),
        ("credit_card", "card 4111 1111 1111 1111 12/27", "4111 1111 1111 1111"),
        ("credit_card", "3782-822463-10005", "3782-822463-10005"),
        ("credit_card", "6011111111111117,123", "6011111111111117"),
        ("credit_card", "Visa 4222222222222", "4222222222222"),
        ("credit_card", "4111.1111.1111.1111", "4111.1111.1111.1111"),
        ("credit_card", "paid by 3782.822463.10005.", "3782.822463.10005"),
        ("iban", "GB82 WEST 1234 5698 7654 32 IS MINE", "GB82 WEST 1234 5698 7654 32"),
        ("iban", "de89370400440532013000", "de89370400440532013000"),
        ("us_ssn", "my number is 531-21-7351.", "531-21-7351"),
        ("us_ssn", "SSN 531 21 7351", "531 21 7351"),
        ("us_ssn", "social security number: 531217351", "531217351"),
        ("us_ssn", "SSN#123-45-6789", "123-45-6789"),
        ("us_ssn", "social security #531217351", "531217351"),
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
        (
            "jwt",
            f"Cookie: t={make_jwt(json.dumps({'alg': 'HS256', 'typ': 'JWT'}))}; a=1",
            make_jwt(json.dumps({"alg": "HS256", "typ": "JWT"})),
        ),
        ("jwt", make_jwt('{"alg": "none"}', 1) + ".", make_jwt('{"alg": "none"}', 1) + "."),
        ("api_key", f"aws_secret_access_key = {make_random_text(40)}", make_random_text(40)),
        (
            "api_key",
            f'"api_key": "{make_random_text(32, "0123456789abcdef")}"',
            make_random_text(32, "0123456789abcdef"),
        ),
        ("api_key", f"Authorization: Bearer {make_random_text(40)}", make_random_text(40)),
        *(("api_key", f"it is '{key}'.", key) for key in KEYS.values()),
    ],
)
def test_value_is_found_with_its_exact_span(kind, text, value):
    assert find_values(text) == [(kind, value)]


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
        "J. Chem. 12(3)456-789 and 114(15)7891-7899",
        "Phys. Rev. Lett. (1998) 1234-1240 and J. Math. 12 (34) 123-145",
        "472547338\n+960397912423686\n-------\n",
        "01 02 03 04 05 and 16 17 18 19 20 21 22",
        "phone (000) 000-0000",
        "The phone can hold 10800-2500 songs, a mobile 10800-2500; we call 1000-1500 people a day",
        "a mobile with 2004 3000 songs",
        "a=7519549268, b=+491701234567 and ?page=751-954-9268",
        "1,200,751 and 3,5512,9268 and 0101101001,01",
        "NHS 943 476 5919, NHS number (England): 943 476 5919 and nhs no. is 943-476-5919",
        "urn:uuid:616F6005-E014-4447-B847-051775828114",
        "INV-07781482378, bits 01001011011, 0306406152, 17179869184, 036000291452, 0036000291452 and 060432891236",
        "id 4111111111111112, 0.4111111111111111 and /4111111111111111/",
        "a sum of 626720691 + 1646615806005 = 4212883012996",
        "GB82 WEST 1234 5698 7654 33, DE8937040044053201300",
        "000-12-3456 666-12-3456 900-12-3456 123-00-4567 123-45-0000",
        "a number of 531 21 7351 and 531217351 and issue #531-21-7351",
        "0.4111.1111.1111.1111 and 4111.1111.1111.1112 and 4111.1111.1111.1111.1",
        "Message-ID: <abc.def@mail.example.com>, In-Reply-To: <1@x.example> References: <a@b.example> <c@d.example>",
        "<20010615112233.12345.qmail@web.example> and <3D5C1234.5060708@example.com> and <CAK+x=1@mail.gmail.com>",
        "Message-ID: <200106151122.33-751-954-9268@example.com>",
        "<20010615112233.GA1234@example.com> and <20010615112233@example.com> and <200106151122.f5FB12@example.com>",
        "References: <a.b@c.example>\r\n <d@e.example>\r\nIn-Reply-To: <d@e.example>",
        "Pi/3 ist ungefähr 1,0471975512",
        "1,0471975512 und 2,0943951023.",
        "a;1,0471975512;2,0943951023",
        "arn:aws:iam::918765432109:user/bob and [918765432109]",
        "919876543210 bytes, 919876543210 Bytes",
        "Umsatz 441234567890.55 EUR, Umsatz 441234567890 EUR, at 919876543210:80",
        "HTML5 says in 8.2.4.44 that",
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
        "eyJhbGciOi.abc.def " + make_jwt('{"typ": "JWT"}') + " " + make_jwt("[1]"),
        " ".join(PLACEHOLDERS.values()),
    ],
)
def test_lookalike_values_are_not_redacted(text):
    assert find_values(text) == []
    assert redact(text, ALL) == (text, {})


def test_redaction_keeps_the_surrounding_text_and_url():
    text = "Mail john@example.com or call +1 650-253-0000; clone https://me:pw123@host.org/r.git from 58.74.121.78."
    redacted, counts = redact(text, ALL)
    assert redacted == "Mail <EMAIL> or call <PHONE>; clone https://<URL_CREDENTIALS>@host.org/r.git from <IP_ADDRESS>."
    assert counts == {"email": 1, "phone": 1, "url_credentials": 1, "ip_address": 1}


@pytest.mark.parametrize("gap", ["/", ", ", "; "])
def test_numbers_with_a_country_code_are_found_in_a_list(gap):
    text = f"from 447801259231{gap}919876543210"
    assert find_values(text) == [("phone", "447801259231"), ("phone", "919876543210")]


def test_number_moved_near_its_keyword_by_redaction_is_redacted():
    text = "call " + " or ".join(f"555 123 45{n}" for n in range(10, 30))
    redacted, counts = redact(text, ALL)
    assert redact(redacted, ALL) == (redacted, {})
    assert counts["phone"] == redacted.count("<PHONE>")


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
            make_random_text(40),
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
def test_redaction_is_idempotent_and_keeps_the_surrounding_text(parts, gap):
    text = gap.join(parts)
    redacted, counts = redact(text, ALL)
    assert redact(redacted, ALL) == (redacted, {})
    assert (redacted == text) == (not counts)
    findings = find(text)
    assert all(earlier.end <= later.start for earlier, later in itertools.pairwise(findings))
    assert all(0 <= finding.start < finding.end <= len(text) for finding in findings)
    if counts.total() == len(findings):
        gaps = [
            text[start:end]
            for start, end in zip(
                [0, *(p.end for p in findings)], [*(p.start for p in findings), len(text)], strict=True
            )
        ]
        placeholders = [PLACEHOLDERS[p.kind] for p in findings]
        assert redacted == "".join(part for pair in zip(gaps, [*placeholders, ""], strict=True) for part in pair)


@given(st.text(alphabet=st.characters(exclude_categories=["Nd", "Cs"], exclude_characters="@:="), max_size=300))
def test_text_without_digits_and_signs_is_unchanged(text):
    assert redact(text, ALL) == (text, {})


@st.composite
def draw_card(draw):
    """Draw a card number of any issuer and length, in any grouping."""
    prefixes, lengths = draw(st.sampled_from(CARDS))
    length = draw(st.sampled_from(sorted(lengths)))
    digits = str(draw(st.sampled_from(prefixes)))
    digits += "".join(draw(st.lists(st.sampled_from(string.digits), min_size=length - 5, max_size=length - 5)))
    digits = next(digits + check for check in string.digits if has_luhn_check_digit(digits + check))
    gap, sizes = draw(st.sampled_from(["", " ", "-"])), []
    while sum(sizes) < length:
        size = draw(st.integers(2, 6))
        sizes.append(size if length - sum(sizes) - size >= 2 or length - sum(sizes) == size else length - sum(sizes))
    offsets = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    return gap.join(digits[start:end] for start, end in itertools.pairwise(offsets))


@given(draw_card())
def test_card_with_a_valid_check_digit_is_found_in_any_grouping(card):
    assert find_values(f"my card {card}, thanks") == [("credit_card", card)]


@given(draw_card(), st.integers(0, 30), st.integers(1, 9))
def test_card_with_a_wrong_digit_is_not_found(card, position, step):
    position = [i for i, c in enumerate(card) if c.isdigit()][position % sum(c.isdigit() for c in card)]
    wrong = card[:position] + str((int(card[position]) + step) % 10) + card[position + 1 :]
    assert not is_card_number(wrong.replace(" ", "").replace("-", ""))
    assert ("credit_card", wrong) not in find_values(f"my card {wrong}, thanks")


@st.composite
def draw_iban(draw):
    country = draw(st.sampled_from(sorted(IBAN_LENGTHS)))
    size = IBAN_LENGTHS[country] - 4
    account = "".join(
        draw(st.lists(st.sampled_from(string.digits + string.ascii_uppercase), min_size=size, max_size=size))
    )
    return f"{country}{98 - compute_iban_remainder(country + '00' + account):02}{account}"


@given(draw_iban(), st.sampled_from(["", " ", "-"]))
def test_iban_of_every_country_is_found_plain_and_in_groups(iban, gap):
    written = gap.join(iban[i : i + 4] for i in range(0, len(iban), 4))
    assert find_values(f"to {written}.") == [("iban", written)]


@given(draw_iban(), st.integers(0, 33), st.integers(1, 35))
def test_iban_with_a_wrong_character_is_not_found(iban, position, step):
    position = 4 + position % (len(iban) - 4)
    letters = string.digits + string.ascii_uppercase
    wrong = iban[:position] + letters[(letters.index(iban[position]) + step) % 36] + iban[position + 1 :]
    if compute_iban_remainder(wrong) != 1:  # a letter counts as two digits, so a few substitutions keep the remainder
        assert ("iban", wrong) not in find_values(f"to {wrong}.")


def test_iban_registry_has_the_length_of_each_country():
    assert IBAN_LENGTHS["NO"] == 15
    assert IBAN_LENGTHS["DE"] == 22
    assert IBAN_LENGTHS["RU"] == 33
    assert len(IBAN_LENGTHS) == 88


EMAIL = "john@example.com"


def parse_row(**fields):
    (row,) = parse_record(Record("f.jsonl", 1, fields))
    return row


@pytest.mark.parametrize(
    "fields",
    [
        {
            "messages": [
                {"role": "user", "content": f"I am {EMAIL}"},
                {"role": "assistant", "content": f"Hello {EMAIL}"},
            ]
        },
        {"prompt": f"I am {EMAIL}", "chosen": f"Hello {EMAIL}", "rejected": f"No {EMAIL}"},
        {"messages": [{"role": "user", "content": EMAIL}, {"role": "assistant", "content": EMAIL}], "label": True},
        {"text": f"I am {EMAIL}"},
        {
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
            "tools": [{"name": "send", "description": f"mails {EMAIL}", "parameters": {"default": [EMAIL, 5]}}],
        },
        {"text": "nothing here", "author": {"mail": [EMAIL, None, {"deep": EMAIL}]}, "score": 3},
    ],
    ids=["conversation", "pair", "label", "text", "tools", "meta"],
)
def test_every_text_of_a_row_is_redacted(fields):
    row = parse_row(**fields)
    counts, rejection = redact_row(row, DEFAULT)
    redacted = json.dumps([row.content, row.meta])
    assert EMAIL not in redacted
    assert counts == {"email": json.dumps(fields).count(EMAIL)} == {"email": redacted.count("<EMAIL>")}
    assert rejection is None
    before_second_pass = json.dumps([row.content, row.meta])
    assert redact_row(row, DEFAULT) == ({}, None)
    assert json.dumps([row.content, row.meta]) == before_second_pass == redacted


def test_redacted_tools_stay_valid_json():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    clean_row = parse_row(messages=messages, tools=[{"name": "a", "description": "b"}])
    before = clean_row.content["tools"]
    redact_row(clean_row, DEFAULT)
    assert clean_row.content["tools"] == before
    email_row = parse_row(messages=messages, tools=[{"name": "a", "description": f'say "{EMAIL}"'}])
    redact_row(email_row, DEFAULT)
    assert json.loads(email_row.content["tools"])[0]["description"] == 'say "<EMAIL>"'


def test_field_name_identifies_the_number_and_the_id_is_unchanged():
    row = parse_row(text="A customer.", id="531-21-7351", phone="5551234567", ssn="531217351", count="5551234567")
    counts, _ = redact_row(row, DEFAULT)
    assert row.meta == {"phone": "<PHONE>", "ssn": "<US_SSN>", "count": "5551234567"}
    assert counts == {"phone": 1, "us_ssn": 1}
    assert row.own_id == "531-21-7351"


def test_deeply_nested_value_is_redacted():
    nested = EMAIL
    for _ in range(900):
        nested = [nested]
    row = parse_row(text="nothing here", deep=nested)
    assert redact_row(row, DEFAULT)[0] == {"email": 1}
    assert "<EMAIL>" in json.dumps(row.meta)
    assert EMAIL in json.dumps(nested)  # redaction does not change the source's own object


def test_row_rejected_by_kind_contains_no_value():
    row = parse_row(text=f"{EMAIL} pays with 4111 1111 1111 1111")
    counts, rejection = redact_row(row, PersonalDataConfig(credit_card="drop"))
    assert rejection == PERSONAL_DATA.reject("credit_card")
    assert counts == {"email": 1, "credit_card": 1}
    assert row.content["text"] == "<EMAIL> pays with <CREDIT_CARD>"
    second_row = parse_row(text=f"{EMAIL} pays with 4111 1111 1111 1111")
    assert redact_row(second_row, PersonalDataConfig(credit_card="drop", email="drop"))[1] == PERSONAL_DATA.reject(
        "email, credit_card"
    )


def test_kept_values_are_counted_and_unchanged():
    row = parse_row(text=f"{EMAIL} and 58.74.121.78")
    counts, rejection = redact_row(row, PersonalDataConfig(email="keep"))
    assert row.content["text"] == f"{EMAIL} and <IP_ADDRESS>"
    assert (counts, rejection) == ({"email": 1, "ip_address": 1}, None)
    assert redact_row(row, PersonalDataConfig(email="keep")) == ({"email": 1}, None)


def test_repr_of_a_finding_contains_no_value():
    text = f"{EMAIL} 4111 1111 1111 1111 {KEYS['github']}"
    assert not any(value in repr(find(text)) for value in (EMAIL, "4111", "ghp_"))


def test_own_source_is_redacted_and_file_name_is_not():
    row = parse_row(text="A letter.", source=f"letters of {EMAIL}")
    assert redact_row(row, DEFAULT) == ({"email": 1}, None)
    assert row.source == "letters of <EMAIL>"
    row = parse_row(text="A letter.", source=EMAIL)
    assert redact_row(row, PersonalDataConfig(email="keep")) == ({"email": 1}, None)
    assert row.source == EMAIL
    (file_row,) = parse_record(Record(f"{EMAIL}.jsonl", 1, {"text": "A letter."}))
    assert redact_row(file_row, DEFAULT) == ({}, None)
    assert file_row.source == f"{EMAIL}.jsonl"


@pytest.mark.parametrize("action", ["redact", "keep"])
def test_unreadable_reason_contains_no_personal_data(tmp_path, action):
    records = [
        Record("f.jsonl", 1, {"messages": [{"role": EMAIL, "content": "Hi"}]}),
        Record("f.jsonl", 2, {EMAIL: "Hi", KEYS["github"]: 1}),
        UnreadableRecord("f.jsonl", 3, f"a value that nobody knows: {EMAIL}"),
    ]
    chunk = chunk_worker.prepare_chunk(
        1,
        records,
        "sft",
        DataCurationConfig(personal_data={"email": action, "api_key": action}),
        None,
        tmp_path,
    )
    assert [unreadable.line for unreadable in chunk.unread] == [1, 2, 3]
    assert "a turn with the role '<EMAIL>'" in chunk.unread[0].reason
    assert set(chunk.unread[1].reason.removeprefix("unknown format: keys ").split(", ")) == {"<EMAIL>", "<API_KEY>"}
    assert chunk.unread[2].reason == "a value that nobody knows: <EMAIL>"


PHONE = "\u202a+49\u00a0170\u00a01234567\u202c"


@pytest.mark.parametrize(
    "name", [PHONE, "x\n+49 170 1234567", "a'b\n415-555-2671", "x" * 70 + EMAIL, "+49 170 1234567 " * 1000]
)
def test_quoted_names_in_reasons_contain_no_personal_data(tmp_path, name):
    (tmp_path / "rows.csv").write_text(f'"{name}","{name}",answer\nq,r,a\n')
    (source,) = list_sources(["rows.csv"], tmp_path)
    records = [
        Record("f.jsonl", 1, {"messages": [{"from": name, "value": "Hi"}]}),
        Record("f.jsonl", 2, {"instruction": "Why?", "output_1": "a", "output_2": "b", "preference": name}),
        *file_readers.read_records(source, DataCurationConfig()),
    ]
    chunk = chunk_worker.prepare_chunk(1, records, "sft", DataCurationConfig(), None, tmp_path)
    assert len(chunk.unread) == 3
    for unreadable in chunk.unread:
        assert not re.search(r"170|555|example", unreadable.reason), unreadable.reason
        assert len(unreadable.reason) < 250


def test_every_kind_is_configurable_and_unknown_actions_are_refused():
    assert set(DETECTORS) | {"names"} == set(PersonalDataConfig.model_fields)
    with pytest.raises(ValidationError, match=r"redact.*drop.*keep"):
        PersonalDataConfig(email="delete")


@pytest.mark.parametrize(
    "text",
    [
        "a@" * 5_000_000,
        "1234567890" * 1_000_000,
        "-----BEGIN" * 1_000_000,
        "-----BEGIN PRIVATE KEY-----" * 370_000,
        "a" * 10_000_000 + "@",
    ],
    ids=["at signs", "digits", "beginnings", "headings", "one word"],
)
def test_ten_million_characters_on_one_line_take_seconds(text):
    started = time.process_time()
    assert find(text) == []
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    "unit", ["4111 ", "1-", "(07) 123-", "2001:", "api_key=", "GB82 ", "://a:", "eyJhbGciOi.", "token: a"]
)
def test_search_time_does_not_grow_quadratically(unit):
    def measure_seconds(length):
        started = time.process_time()
        find(unit * (length // len(unit)))
        return time.process_time() - started

    measure_seconds(1_000)
    assert measure_seconds(400_000) < 40 * max(measure_seconds(40_000), 0.005)


def test_missing_name_model_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    for name, message in (("nowhere", "does not exist"), (".", "contains no spaCy model"), ("file", "is not a folder")):
        with pytest.raises(ConfigurationError) as error:
            redact_row(
                parse_row(text="Ada Lovelace"), PersonalDataConfig(names=NamesConfig(model=str(tmp_path / name)))
            )
        assert f"data_curation.personal_data.names.model: {tmp_path / name}".rstrip("/.") in error.value.message
        assert message in error.value.message
        assert "Set a local folder that contains config.cfg and meta.json" in error.value.hint
        assert error.value.exit_code == 2


def test_missing_presidio_is_reported_with_an_install_hint(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)  # makes the import fail, as if it were not installed
    for name in ("config.cfg", "meta.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigurationError) as error:
        find("Ada Lovelace", NamesConfig(model=str(tmp_path)))
    assert "requires presidio-analyzer and spaCy" in error.value.message
    assert "pip install presidio-analyzer spacy" in error.value.hint


def test_action_on_names_without_a_model_is_refused():
    with pytest.raises(ValidationError, match="require a model folder"):
        NamesConfig(person="redact")


FINDINGS = [
    *KEYS.values(),
    *(make_jwt(header) for header in ('{"alg":""}', '{"alg":"HS256"}')),
    BEGIN + BODY + END,
    BODY + END,
    "123456789:AA" + make_random_text(33),
    "xoxb-" + make_random_text(10),
    "xapp-" + make_random_text(10),
    "https://hooks.slack.com/services/" + make_random_text(44),
    "password: a1\u017f2bcdefgh3\u212ajkmnpq",
    "api_key=" + make_random_text(16),
    "bearer " + make_random_text(20),
    "postgres://u:p@h/db",
    "ann@b.co",
    "NO9386011117947",
    "MT84 MALT 0110 0001 2345 MTLC AST0 01S",
    "4111 1111 1111 1111",
    "SSN 078-05-1120",
    "172.217.16.142",
    "host 1.1.1.1",
    "2606:4700::1111",
    "+49 30 901820",
    "call me at 555-123-4567",
]


@given(
    st.lists(st.sampled_from(FINDINGS) | st.text(max_size=30), max_size=6),
    st.sampled_from(["", " ", "\n", "é", "x", "1"]),
)
def test_prefilter_skips_no_detector_with_a_finding(parts, separator):
    text = separator.join(parts)
    selected = {kind for kind, _ in select_detectors(text)}
    assert {kind for kind, detector in DETECTORS.items() if [*detector.find_spans(text)]} <= selected


@pytest.mark.parametrize("finding", FINDINGS)
def test_every_example_of_the_prefilter_test_is_found(finding):
    assert find(f"see {finding} there")


def test_patterns_have_no_possessive_repetition_of_a_group() -> None:
    """Python before 3.11.5, such as that of Debian 12, matches it wrongly: numbers and keys were not found."""
    folder = Path(personal_data.__file__).parent
    lines = [line for path in folder.glob("*.py") for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) > 500
    assert [line for line in lines if re.search(r"\)(?:[*+?]|\{{1,2}[0-9,]+\}{1,2})\+", line)] == []
