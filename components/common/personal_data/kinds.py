"""The kinds of personal data and secrets that are found: for each a cheap sign, the search and its checks, and a placeholder."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from components.common.personal_data import phones, secrets

Span = tuple[int, int]

LETTERS = "A-Za-z\u00c0-\u024f"
EMAIL = re.compile(
    rf"[{LETTERS}0-9_](?<![{LETTERS}0-9_@].)(?P<local>[{LETTERS}0-9._%+'-]{{0,63}}+)@"
    rf"(?P<domain>(?:[{LETTERS}0-9][{LETTERS}0-9-]{{0,62}}+\.){{1,8}})(?P<top>[A-Za-z]{{2,24}}+)(?![{LETTERS}0-9_@(])"
)
FILES = frozenset(
    {
        *("bmp", "conf", "css", "csv", "gif", "gz", "html", "ico", "jpeg", "jpg", "js", "json", "md", "mp3"),
        *("mp4", "pdf", "php", "png", "py", "svg", "tar", "tgz", "txt", "webp", "xml", "yaml", "yml", "zip"),
    }
)

# Issuers by prefix, with the lengths of their numbers (ISO/IEC 7812 ranges as the networks publish them).
CARDS: tuple[tuple[range, frozenset[int]], ...] = (
    (range(4000, 5000), frozenset({13, 16, 19})),  # Visa
    (range(5100, 5600), frozenset({16})),  # Mastercard
    (range(2221, 2721), frozenset({16})),
    (range(3400, 3500), frozenset({15})),  # American Express
    (range(3700, 3800), frozenset({15})),
    (range(6011, 6012), frozenset(range(16, 20))),  # Discover
    (range(6440, 6600), frozenset(range(16, 20))),
    (range(3000, 3060), frozenset({14, 16})),  # Diners Club
    (range(3095, 3096), frozenset({14, 16})),
    (range(3600, 3700), frozenset({14, 16})),
    (range(3800, 4000), frozenset({14, 16})),
    (range(3528, 3590), frozenset(range(16, 20))),  # JCB
    (range(2131, 2132), frozenset({15})),
    (range(1800, 1801), frozenset({15})),
    (range(6200, 6300), frozenset(range(16, 20))),  # UnionPay
    *((range(n, n + 1), frozenset(range(12, 20))) for n in (5018, 5020, 5038, 5893, 6304, 6759, 6761, 6762, 6763)),  # Maestro
)
CARD_PREFIXES = frozenset(str(prefix) for prefixes, _ in CARDS for prefix in prefixes)
CARD_GROUPS = frozenset({(4, 4, 4, 4), (4, 4, 4, 4, 3), (4, 6, 5), (4, 6, 4), (4, 4, 5), (4, 3, 3, 3)})
CARD_RUN = re.compile(r"[0-9](?<![\w./+-][0-9])(?=(?:[ -]?[0-9]){11})[0-9]*+(?:[ -][0-9]++)*+")
CARD_DIGITS = (12, 19)
CARD_SHORT = 14  # digits below which a number is old or rare, and has to be called a card: by chance one in ten has a right check digit
CARD_SAID = re.compile(r"card|visa|master|maestro|credit|debit|payment", re.IGNORECASE)
CARD_REACH = 60  # characters

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

SSN = re.compile(r"[0-8](?<![\w./+$#-].)[0-9]{2}(?P<gap>[ -]?)[0-9]{2}(?P=gap)[0-9]{4}(?![\w]|[.-][0-9])")
SSN_SAID = re.compile(r"\bssn\b|social\s?-?security", re.IGNORECASE)
SSN_REACH = 60  # characters

IPV4 = re.compile(r"[0-9](?<![\w.-][0-9])[0-9]{0,2}(?:\.[0-9]{1,3}){3}(?![\w]|[.-]\w)")
IPV6 = re.compile(r"[23](?<![\w:.][23])[0-9A-Fa-f]{3}:[0-9A-Fa-f:]{2,35}(?![\w:])")
VERSION = re.compile(
    r"(?:(?<![A-Za-z])v\.?|version|ver\.|release|build|firmware|driver|update|section|chapter|§|[A-Za-z]/)[\s:=]{0,3}$", re.IGNORECASE
)
ADDRESS_SAID = re.compile(r"(?<![A-Za-z])(?:ip|ipv4|address|host|server|dns|ping|proxy|gateway|client|remote)(?![A-Za-z])", re.IGNORECASE)

# Seven digits with little between them: what is shorter is no card, no phone number and no social security number.
DIGITS = re.compile(r"[0-9](?:[^0-9\n]{0,3}[0-9]){6}")


@dataclass(frozen=True)
class Detector:
    """How a kind is found: what stands in its place, a cheap sign of it, and the search. `digits`: only where DIGITS matches."""

    placeholder: str
    may: Callable[[str], bool]
    spans: Callable[[str], Iterable[Span]]
    digits: bool = False


def emails(text: str) -> Iterator[Span]:
    """E-mail addresses; not users in URLs, handles such as @name@server, `git@host:path`, or names of files such as icon@2x.png."""
    for found in EMAIL.finditer(text):
        user_of_url = text.endswith("://", 0, found.start())
        git = text.startswith("git@", found.start()) and text.startswith(":", found.end())
        if not (user_of_url or git or found["top"].lower() in FILES):
            yield found.span()


def luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of the others (ISO/IEC 7812-1, annex B)."""
    doubled = "0246813579"
    total = sum(int(d) for d in digits[::-2]) + sum(int(doubled[int(d)]) for d in digits[-2::-2])
    return total % 10 == 0


def is_card(digits: str) -> bool:
    """Whether the digits are a card's number: an issuer's prefix, one of its lengths, and the check digit."""
    prefix = int(digits[:4])
    return any(prefix in prefixes and len(digits) in lengths for prefixes, lengths in CARDS) and luhn(digits)


def cards(text: str) -> Iterator[Span]:
    """Numbers of payment cards, plain or in groups."""
    for run in CARD_RUN.finditer(text):
        after = text[run.end() : run.end() + 2]
        groups = [group.span() for group in re.finditer("[0-9]+", run.group())]
        if after[:1].isalpha() or after[:1] == "_" or (after[:1] == "." and after[1:].isdigit()):
            groups.pop()
        said = CARD_SAID.search(text, max(0, run.start() - CARD_REACH), run.start())
        least = CARD_DIGITS[0] if said else CARD_SHORT
        yield from ((run.start() + start, run.start() + end) for start, end in _cards_of(run.group(), groups, least))


def _cards_of(run: str, groups: list[Span], least: int) -> Iterator[Span]:
    """Cards of at least `least` digits among the groups of a run: the whole run in any even grouping, a part of it in a usual one."""
    first = 0
    while first < len(groups):
        last = _last_of_card(run, groups, first, least)
        if last is not None:
            yield groups[first][0], groups[last][1]
        first = (first if last is None else last) + 1


def _last_of_card(run: str, groups: list[Span], first: int, least: int) -> int | None:
    """The last group of the longest card that begins with this group."""
    start, end = groups[first]
    if first and (end - start < 4 or run[start : start + 4] not in CARD_PREFIXES):
        return None
    found = None
    for last in range(first, len(groups)):
        count = groups[last][1] - start - (last - first)
        if count > CARD_DIGITS[1]:
            break
        if count >= least and _may_be_card(run, groups, first, last):
            found = last
    return found


def _may_be_card(run: str, groups: list[Span], first: int, last: int) -> bool:
    sizes = tuple(b - a for a, b in groups[first : last + 1])
    whole = first == 0 and last == len(groups) - 1
    if not (len(sizes) == 1 or sizes in CARD_GROUPS or (whole and min(sizes) >= 2)):
        return False
    gaps = {run[b] for _, b in groups[first:last]}
    return len(gaps) <= 1 and is_card(re.sub("[ -]", "", run[groups[first][0] : groups[last][1]]))


def ibans(text: str) -> Iterator[Span]:
    """International bank account numbers, plain or in groups: a country's length, and the remainder 1 by 97 (ISO 13616, ISO 7064)."""
    done = 0
    for found in IBAN.finditer(text):
        start = found.start() - 2
        end = _end_of_iban(text, start) if start >= done else 0
        if end:
            yield start, end
            done = end


def _end_of_iban(text: str, start: int) -> int:
    """Where the IBAN ends that begins here, or 0."""
    length = IBAN_LENGTHS.get(text[start : start + 2].upper(), 0)
    taken, place = "", start
    while len(taken) < length and place < len(text):
        if text[place].isascii() and text[place].isalnum():
            taken += text[place]
        elif text[place] not in " -\u00a0" or not text[place - 1].isalnum():
            return 0
        place += 1
    if not taken or len(taken) < length or text[place : place + 1].isalnum() or not (taken.isupper() or taken.islower()):
        return 0
    return place if mod97(taken) == 1 else 0


def mod97(iban: str) -> int:
    """The remainder of an IBAN, its first four characters moved to its end and its letters read as 10 to 35."""
    return int("".join(str(int(c, 36)) for c in iban[4:] + iban[:4])) % 97


def ssns(text: str) -> Iterator[Span]:
    """US social security numbers: with dashes, or where the text says what they are with spaces or plain. Never issued ones are none."""
    for found in SSN.finditer(text):
        digits = re.sub("[ -]", "", found.group())
        issued = digits[:3] not in ("000", "666") and digits[3:5] != "00" and digits[5:] != "0000"
        said = found["gap"] == "-" or SSN_SAID.search(text, max(0, found.start() - SSN_REACH), found.start())
        if issued and said:
            yield found.span()


def addresses(text: str) -> Iterator[Span]:
    """IP addresses that are routed on the internet; not private, local and documentation ones, and not versions."""
    yield from (found.span() for found in IPV4.finditer(text) if _is_routed(found.group()) and not _is_version(text, found))
    if ":" in text:
        # 2000::/3 is all that IANA has assigned for global unicast, and keeps names such as a::b out.
        yield from (found.span() for found in IPV6.finditer(text) if _is_routed(found.group()))


def _is_routed(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return address.is_global and not address.is_multicast


def _is_version(text: str, found: re.Match[str]) -> bool:
    before = text[max(0, found.start() - 40) : found.start()]
    if VERSION.search(before):
        return True
    return len(found.group()) == len("1.2.3.4") and not ADDRESS_SAID.search(before)


KINDS: dict[str, Detector] = {
    "private_key": Detector("<PRIVATE_KEY>", lambda text: " PRIVATE KEY" in text, secrets.private_keys),
    "jwt": Detector("<JWT>", lambda text: "eyJ" in text, secrets.tokens),
    "url_credentials": Detector("<URL_CREDENTIALS>", lambda text: "://" in text and "@" in text, secrets.urls),
    "api_key": Detector("<API_KEY>", secrets.may_have_key, secrets.api_keys),
    "email": Detector("<EMAIL>", lambda text: "@" in text, emails),
    "iban": Detector("<IBAN>", lambda text: True, ibans),
    "credit_card": Detector("<CREDIT_CARD>", lambda text: True, cards, digits=True),
    "us_ssn": Detector("<US_SSN>", lambda text: True, ssns, digits=True),
    "ip_address": Detector("<IP_ADDRESS>", lambda text: "." in text or ":" in text, addresses),
    "phone": Detector("<PHONE>", lambda text: True, phones.phones, digits=True),
}
