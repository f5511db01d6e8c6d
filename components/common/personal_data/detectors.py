"""Detectors of personal data and secrets: a fast check, a validating search and a placeholder per kind."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from components.common.personal_data import credentials, phone_numbers
from components.common.personal_data.check_digits import has_luhn_check_digit
from components.common.personal_data.text_profile import TextProfile

Span = tuple[int, int]  # start (inclusive) and end (exclusive), in characters

LETTERS = "A-Za-z\u00c0-\u024f"
EMAIL = re.compile(
    rf"[{LETTERS}0-9_](?<![{LETTERS}0-9_@].)(?P<local>[{LETTERS}0-9._%+'-]{{0,63}}+)@"
    rf"(?P<domain>(?:[{LETTERS}0-9][{LETTERS}0-9-]{{0,62}}+\.){{1,8}})(?P<top>[A-Za-z]{{2,24}}+)(?![{LETTERS}0-9_@(])"
)
MESSAGE_ID_HEADER = re.compile(
    r"(?P<name>message-id|in-reply-to|references|content-id):(?:\s*<[^<>\s]+>)*\s*<$", re.IGNORECASE
)
MESSAGE_ID_HEADER_CHARACTERS = 400  # searched before an ID; a header can list several
# "References:" is also a heading of a CV. It is a header of a message only in a block with one of these headers.
MAIL_HEADER = re.compile(r"(?<![A-Za-z])(?:message-id|in-reply-to|mime-version):", re.IGNORECASE)
BLANK_LINE = re.compile(r"\n[ \t\r]*\n")
# A timestamp with seconds or an ID, Mozilla's hexadecimal time, Java's and qmail's IDs, and Gmail's domain, which has
# no mailboxes. Other digits can be a phone number or a student number as the name of a mailbox.
MESSAGE_ID = re.compile(
    r"(?:19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])(?:[01][0-9]|2[0-3])[0-5][0-9](?:[0-5][0-9]|\.\w)"
    r"|(?=[0-9]*[A-F])[0-9A-F]{8}\.[0-9]{6,8}@|[^@]*(?:\.(?:JavaMail|qmail)\b|@mail\.gmail\.com$)"
)
FILE_EXTENSIONS = frozenset({
    "bmp", "conf", "css", "csv", "gif", "gz", "html", "ico", "jpeg", "jpg", "js", "json", "md", "mp3",
    "mp4", "pdf", "php", "png", "py", "svg", "tar", "tgz", "txt", "webp", "xml", "yaml", "yml", "zip",
})  # fmt: skip

# Prefixes of card issuers, with the lengths of their numbers (ISO/IEC 7812 ranges as published by the networks).
CARDS: tuple[tuple[range, Sequence[int]], ...] = (
    (range(4000, 5000), (13, 16, 19)),  # Visa
    (range(5100, 5600), (16,)),  # Mastercard
    (range(2221, 2721), (16,)),
    (range(3400, 3500), (15,)),  # American Express
    (range(3700, 3800), (15,)),
    (range(6011, 6012), range(16, 20)),  # Discover
    (range(6440, 6600), range(16, 20)),
    (range(3000, 3060), (14, 16)),  # Diners Club
    (range(3095, 3096), (14, 16)),
    (range(3600, 3700), (14, 16)),
    (range(3800, 4000), (14, 16)),
    (range(3528, 3590), range(16, 20)),  # JCB
    (range(2131, 2132), (15,)),
    (range(1800, 1801), (15,)),
    (range(6200, 6300), range(16, 20)),  # UnionPay
    *((range(n, n + 1), range(12, 20)) for n in (5018, 5020, 5038, 5893, 6304, 6759, 6761, 6762, 6763)),  # Maestro
)
CARD_PREFIXES = frozenset(str(prefix) for prefixes, _ in CARDS for prefix in prefixes)
CARD_GROUPS = frozenset({(4, 4, 4, 4), (4, 4, 4, 4, 3), (4, 6, 5), (4, 6, 4), (4, 4, 5), (4, 3, 3, 3)})
# Python before 3.11.5 matches a possessive repetition of a group wrongly (CPython issue 106052); (?>...) is right there.
CARD_RUN = re.compile(
    r"[0-9](?<![\w./+-][0-9])"
    r"(?:[0-9]{3}(?:\.[0-9]{3,6}){2,4}(?![0-9]|\.[0-9])|(?=(?:[ -]?[0-9]){11})[0-9]*+(?>(?:[ -][0-9]++)*))"
)
CARD_DIGITS = (12, 19)
# A shorter number counts only near a keyword: such cards are rare, and one number in ten has a valid check digit.
MIN_UNLABELLED_CARD_DIGITS = 14
CARD_KEYWORDS = re.compile(r"card|visa|master|maestro|credit|debit|payment", re.IGNORECASE)
CARD_KEYWORD_DISTANCE = 60  # characters

# Lengths of an IBAN by country, from SWIFT's IBAN registry (ISO 13616).
IBAN_COUNTRIES = {
    15: "NO",
    16: "BE",
    18: "DK FO FI GL NL SD FK",
    19: "MK SI",
    20: "AT BA EE KZ XK LT LU MN",
    21: "CR HR LV LI CH",
    22: "BH BG GE DE IE ME RS GB VA",
    23: "GI IQ IL TL AE OM SO",
    24: "AD CZ MD PK RO SA SK ES SE TN VG",
    25: "LY PT ST",
    26: "IS TR",
    27: "FR GR IT MC MR SM BI DJ",
    28: "AL AZ BY CY DO GT HU LB PL SV NI",
    29: "BR EG PS QA UA",
    30: "JO KW MU YE",
    31: "MT SC",
    32: "LC",
    33: "RU",
}
IBAN_LENGTHS = {country: length for length, countries in IBAN_COUNTRIES.items() for country in countries.split()}
IBAN = re.compile(r"[0-9]{2}(?<=[A-Za-z]{2}[0-9]{2})(?<![A-Za-z0-9_].{4})")

SSN = re.compile(r"[0-8](?<![\w./+$-].)[0-9]{2}(?P<gap>[ -]?)[0-9]{2}(?P=gap)[0-9]{4}(?![\w]|[.-][0-9])")
SSN_KEYWORDS = re.compile(r"\bssn\b|social\s?-?security", re.IGNORECASE)
SSN_KEYWORD_DISTANCE = 60  # characters

IPV4 = re.compile(r"[0-9](?<![\w.-][0-9])[0-9]{0,2}(?:\.[0-9]{1,3}){3}(?![\w]|[.-]\w)")
IPV6 = re.compile(r"[23](?<![\w:.][23])[0-9A-Fa-f]{3}:[0-9A-Fa-f:]{2,35}(?![\w:])")
VERSION_PREFIX = re.compile(
    r"(?:(?<![A-Za-z])v\.?|version|ver\.|release|build|firmware|driver|update|section|chapter|§|[A-Za-z]/)[\s:=]{0,3}$",
    re.IGNORECASE,
)
IP_KEYWORDS = re.compile(
    r"(?<![A-Za-z])(?:ip|ipv4|address|host|server|dns|ping|proxy|gateway|client|remote)(?![A-Za-z])", re.IGNORECASE
)


@dataclass(frozen=True)
class Detector:
    """The detector of a kind of personal data.

    Attributes:
        placeholder: replacement of a finding in a redacted text.
        find_spans: returns the positions of the findings in a text.
        can_contain: whether a text with this profile can contain a finding; otherwise it is not searched.
    """

    placeholder: str
    find_spans: Callable[[str], Iterable[Span]]
    can_contain: Callable[[TextProfile], bool]


def find_emails(text: str) -> Iterator[Span]:
    """Yield the positions of e-mail addresses.

    Users in URLs, handles such as @name@server, `git@host:path`, file names such as icon@2x.png and IDs of messages
    are excluded.
    """
    for found in EMAIL.finditer(text):
        is_url_user = text.endswith("://", 0, found.start())
        is_git_remote = text.startswith("git@", found.start()) and text.startswith(":", found.end())
        is_file = found["top"].lower() in FILE_EXTENSIONS
        if not (is_url_user or is_git_remote or is_file or _is_message_id(text, found)):
            yield found.span()


def _is_message_id(text: str, found: re.Match[str]) -> bool:
    """Return whether the address is the ID of a message (RFC 5322, section 3.6.4)."""
    if MESSAGE_ID.match(found.group()):
        return True
    if not (text.startswith(">", found.end()) and text.endswith("<", 0, found.start())):
        return False
    before = text[max(0, found.start() - MESSAGE_ID_HEADER_CHARACTERS) : found.start()]
    header = MESSAGE_ID_HEADER.search(before)
    if header is None or header["name"].lower() != "references":
        return header is not None
    after = text[found.end() : found.end() + MESSAGE_ID_HEADER_CHARACTERS]
    block = BLANK_LINE.split(before)[-1] + BLANK_LINE.split(after)[0]
    return MAIL_HEADER.search(block) is not None


def is_card_number(digits: str) -> bool:
    """Return whether the digits have the prefix and length of an issuer, and a valid check digit."""
    prefix = int(digits[:4])
    is_issued = any(prefix in prefixes and len(digits) in lengths for prefixes, lengths in CARDS)
    return is_issued and has_luhn_check_digit(digits)


def find_cards(text: str) -> Iterator[Span]:
    """Yield the positions of payment card numbers, with or without grouping."""
    for found in CARD_RUN.finditer(text):
        run, after = found.group(), text[found.end() : found.end() + 2]
        groups = [group.span() for group in re.finditer("[0-9]+", run)]
        if after[:1].isalpha() or after[:1] == "_" or (after[:1] == "." and after[1:].isdigit()):
            groups.pop()
        keyword = CARD_KEYWORDS.search(text, max(0, found.start() - CARD_KEYWORD_DISTANCE), found.start())
        least = CARD_DIGITS[0] if keyword else MIN_UNLABELLED_CARD_DIGITS
        first = 0
        while first < len(groups):
            last = _find_last_group(run, groups, first, least)
            if last is not None:
                yield found.start() + groups[first][0], found.start() + groups[last][1]
                first = last
            first += 1


def _find_last_group(run: str, groups: list[Span], first: int, least: int) -> int | None:
    """Return the last group of the longest card number that starts with this group and has at least `least` digits."""
    # A complete run may have any regular grouping; a part of a run must have a grouping in CARD_GROUPS.
    start, end = groups[first]
    if first and (end - start < 4 or run[start : start + 4] not in CARD_PREFIXES):
        return None
    found = None
    for last in range(first, len(groups)):
        digits = re.sub("[ .-]", "", run[start : groups[last][1]])
        if len(digits) > CARD_DIGITS[1]:
            break
        sizes = tuple(b - a for a, b in groups[first : last + 1])
        is_whole = (first, last) == (0, len(groups) - 1)
        is_grouped = len(sizes) == 1 or sizes in CARD_GROUPS or (is_whole and min(sizes) >= 2)
        has_one_gap = len({run[b] for _, b in groups[first:last]}) <= 1
        if len(digits) >= least and is_grouped and has_one_gap and is_card_number(digits):
            found = last
    return found


def find_ibans(text: str) -> Iterator[Span]:
    """Yield the positions of IBANs, with or without grouping.

    An IBAN has the length of its country (ISO 13616) and the remainder 1 modulo 97 (ISO 7064).
    """
    done = 0
    for found in IBAN.finditer(text):
        start = found.start() - 2
        if start >= done and (end := _find_iban_end(text, start)):
            yield start, end
            done = end


def _find_iban_end(text: str, start: int) -> int:
    """Return the end of the IBAN that starts here, or 0."""
    length = IBAN_LENGTHS.get(text[start : start + 2].upper(), 0)
    iban, end = "", start
    while len(iban) < length and end < len(text):
        if text[end].isascii() and text[end].isalnum():
            iban += text[end]
        elif text[end] not in " -\u00a0" or not text[end - 1].isalnum():
            return 0
        end += 1
    is_complete = 0 < length == len(iban) and not text[end : end + 1].isalnum()
    is_uniform = iban.isupper() or iban.islower()
    return end if is_complete and is_uniform and compute_iban_remainder(iban) == 1 else 0


def compute_iban_remainder(iban: str) -> int:
    """Return the remainder modulo 97 of an IBAN with the first four characters at the end and letters as 10 to 35."""
    return int("".join(str(int(c, 36)) for c in iban[4:] + iban[:4])) % 97


def find_ssns(text: str) -> Iterator[Span]:
    """Yield the positions of US social security numbers.

    A number must contain dashes or follow a keyword. Numbers that are never issued are skipped.
    """
    for found in SSN.finditer(text):
        digits = re.sub("[ -]", "", found.group())
        is_issued = digits[:3] not in ("000", "666") and digits[3:5] != "00" and digits[5:] != "0000"
        window_start = max(0, found.start() - SSN_KEYWORD_DISTANCE)
        is_grouped = found["gap"] == "-" and not text.endswith("#", 0, found.start())  # not an issue: #531-21-7351
        if is_issued and (is_grouped or SSN_KEYWORDS.search(text, window_start, found.start())):
            yield found.span()


def find_ip_addresses(text: str) -> Iterator[Span]:
    """Yield the positions of globally routed IP addresses; version numbers are excluded."""
    for found in IPV4.finditer(text):
        before = text[max(0, found.start() - 40) : found.start()]
        is_short = len(found.group()) <= len("1.2.3.44")  # also the number of a section
        is_version = VERSION_PREFIX.search(before) or (is_short and not IP_KEYWORDS.search(before))
        if not is_version and _is_routed(found.group()):
            yield found.span()
    if ":" in text:
        # IPV6 matches 2000::/3, the assigned global unicast range (IANA), which excludes names such as a::b.
        yield from (found.span() for found in IPV6.finditer(text) if _is_routed(found.group()))


def _is_routed(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return address.is_global and not address.is_multicast


def has_seven_digits(profile: TextProfile) -> bool:
    """Return whether a text can contain a card, phone or social security number."""
    return profile.has_seven_digits


DETECTORS: dict[str, Detector] = {
    "private_key": Detector(
        "<PRIVATE_KEY>",
        credentials.find_private_keys,
        lambda profile: bool(profile.long_runs) and " PRIVATE KEY" in profile.text,
    ),
    "jwt": Detector("<JWT>", credentials.find_json_web_tokens, lambda profile: "eyJ" in profile.long_runs),
    "url_credentials": Detector(
        "<URL_CREDENTIALS>",
        credentials.find_url_credentials,
        lambda profile: profile.has_at and "://" in profile.text,
    ),
    "api_key": Detector("<API_KEY>", credentials.find_api_keys, credentials.can_contain_key),
    "email": Detector("<EMAIL>", find_emails, lambda profile: profile.has_at),
    "iban": Detector("<IBAN>", find_ibans, lambda profile: profile.can_contain_iban),
    "credit_card": Detector("<CREDIT_CARD>", find_cards, has_seven_digits),
    "us_ssn": Detector("<US_SSN>", find_ssns, has_seven_digits),
    "ip_address": Detector("<IP_ADDRESS>", find_ip_addresses, lambda profile: profile.can_contain_ip_address),
    "phone": Detector("<PHONE>", phone_numbers.find_phone_numbers, has_seven_digits),
}


def select_detectors(text: str) -> list[tuple[str, Detector]]:
    """Return the kinds and detectors of the personal data that the text can contain."""
    profile = TextProfile(text)
    if not (profile.has_digit or profile.has_at or profile.long_runs):
        return []
    return [(kind, detector) for kind, detector in DETECTORS.items() if detector.can_contain(profile)]
