"""Phone numbers: international and national forms, told from dates, versions, amounts and page ranges by their shape and their context.

A number alone is no phone number. One counts when it is written as one (a plus sign with an assigned country code, brackets around the
area, the groups of the North American plan, a leading zero with groups) or when a word such as "call" or "fax" stands near it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

Span = tuple[int, int]

# Country calling codes assigned by ITU-T E.164: all of zone 1 and 7; in the others those of two digits, the rest have three.
ZONES = {"2": "07", "3": "0123469", "4": "01346789", "5": "12345678", "6": "0123456", "8": "1246", "9": "0123458"}
TWO_DIGITS = frozenset(zone + second for zone, seconds in ZONES.items() for second in seconds)
REGIONS = {"2": "1234569", "3": "578", "4": "2", "5": "09", "6": "789", "8": "0578", "9": "679"}
THREE_DIGITS = frozenset(zone + second for zone, seconds in REGIONS.items() for second in seconds)
LONGEST = 15  # digits, by E.164
LONGEST_PLAIN = 13  # of one run without gaps: a longer one is an amount or an id
REACH = 40  # characters before a number in which a word says what it is

GAP = r"[ .\-/\u00a0\u2010\u2011]"
NUMBER = re.compile(
    r"[+(0-9](?<![\w+.,/=@&%$€£¥\u2010\u2011-].)"
    r"(?:(?<=\+)(?P<plus>\(?[1-9][0-9]{0,3}\)?(?:[ .\-/()\u00a0\u2010\u2011]{0,2}[0-9]){6,14}+)"
    rf"|(?<=\()(?P<bracket>\+?[0-9]{{2,5}}\)[ .\-]?[0-9]{{2,5}}(?:{GAP}?[0-9]{{2,4}}){{1,3}}+)"
    rf"|(?<=[0-9])(?P<plain>[0-9]*+(?:{GAP}?\([0-9]{{1,4}}\)|{GAP}[0-9]+){{0,5}}+))"
    r"(?P<extension>[ ,]{0,2}(?:x|ext\.?|extension|#)[ .:]{0,2}[0-9]{1,6}+)?",
    re.IGNORECASE,
)
BAD_END = re.compile(r"[\w%°€$£]|[.,:/=\-][0-9]")
SURE = (
    r"phone(?:[ _-]?number)?|telephone|tel|mobile(?:[ _-]?number)?|cell(?:ular|[ _-]?phone)?|fax|whatsapp|hotline|pager"
    r"|telefon|tel[ée]fono|t[ée]l[ée]phone|mobil|handy|rufnummer|m[óo]vil|celular|cellulare|portable|telefone|telefax"
)
LIKELY = r"call(?:s|ed|ing|[ _-]?back)?|dial(?:led|ling)?|sms|reach(?:ed)?|contact|desk|office"
SURELY = re.compile(rf"(?<![A-Za-z<])(?:{SURE})\b(?!>)[^\n]*$", re.IGNORECASE)
RIGHT_BEFORE = re.compile(rf"(?<![A-Za-z<])(?:{SURE})[ _-]?(?:no\.?|nr\.?|number|num)?[\"'\s:=#.()]{{0,6}}(?:is )?[\"' ]?$", re.IGNORECASE)
ASKED = re.compile(
    r"(?<![A-Za-z<])(?:call|dial|sms|text|ring|reach|contact)(?: (?:me|us|him|her|them|back))?(?: (?:at|on|under))?:? $", re.IGNORECASE
)
LIKELY_BEFORE = re.compile(rf"(?<![A-Za-z<])(?:{SURE}|{LIKELY})\b(?!>)[^\n]*$", re.IGNORECASE)
AFTER = re.compile(rf"\s?\(?(?:{SURE}|office|home|work|desk)\b", re.IGNORECASE)
OTHER_NUMBER = re.compile(r"(?:isbn|issn|doi|pmid|arxiv|version|serial|part no|order|invoice|patent)[^\n]{0,14}$", re.IGNORECASE)
DATE = re.compile(r"(?:[0-9]{1,2}([./ -])[0-9]{1,2}\1(?:19|20)[0-9]{2}|(?:19|20)[0-9]{2}([./ -])[0-9]{2}\2[0-9]{2})(?![0-9])")
NORTH_AMERICA = re.compile(r"(?:1[ .\-])?(?:\([2-9][0-9]{2}\)[ .\-]?|[2-9][0-9]{2}[.\-])[0-9]{3}[.\- ][0-9]{4}")
TRUNK = re.compile(r"0[1-9][0-9]{0,4}(?:[ .\-/][0-9]{2,5}){2,5}")
NORTH_AMERICA_SPACED = re.compile(r"[2-9][0-9]{2} [2-9][0-9]{2} [0-9]{2}(?!00)[0-9]{2}")
TRUNK_AND_REST = re.compile(r"0[1-9][0-9]{1,3}[ \-/][0-9]{5,8}")
ABROAD = re.compile(r"00[1-9][0-9]{0,3}(?:[ .\-/][0-9]{2,4}){2,4}")


def phones(text: str) -> Iterator[Span]:
    """Where phone numbers stand in the text."""
    place = 0
    while found := NUMBER.search(text, place):
        if _is_phone(text, found):
            yield found.span()
            place = found.end()
        else:
            place = _next_group(text, found)


def _next_group(text: str, found: re.Match[str]) -> int:
    """Where to look on after a number that is none: behind its first group, since another may begin there."""
    place = found.start() + 1
    while place < found.end() and text[place].isdigit():
        place += 1
    return place


def _is_phone(text: str, found: re.Match[str]) -> bool:
    number = text[found.start() : found.end() if not found["extension"] else found.start("extension")]
    digits = "".join(filter(str.isdigit, number))
    if not 7 <= len(digits) <= LONGEST or len(set(digits)) == 1 or BAD_END.match(text, found.end()) or _in_a_row(text, found, number):
        return False
    before = text[max(0, found.start() - REACH) : found.start()]
    if OTHER_NUMBER.search(before) or _in_url(text, found.start()) or (not found["plus"] and DATE.match(number.lstrip("("))):
        return False
    if found["plus"]:
        return _is_international(digits) and (len(digits) <= LONGEST_PLAIN or len(number) > len(digits) + 1)
    return _is_written_so(number, digits) or _is_said_so(number, digits, before, text[found.end() : found.end() + 12])


def _in_a_row(text: str, found: re.Match[str], number: str) -> bool:
    """Whether the number goes on before or after, so that it is a part of a row of numbers."""
    gaps = set(re.sub(r"[0-9()+]", "", number)) or {" "}
    before, after = text[max(0, found.start() - 2) : found.start()], text[found.end() : found.end() + 2]
    return any(len(two) == 2 and two[gap] in gaps and two[1 - gap].isdigit() for two, gap in ((before, 1), (after, 0)))


def _in_url(text: str, place: int) -> bool:
    """Whether the number is a part of an address on the web."""
    begun = text[max(0, place - 200) : place]
    word = begun[len(begun) - len(re.split(r"\s", begun)[-1]) :]
    return "://" in word or word.startswith("www.")


def _is_international(digits: str) -> bool:
    if digits[0] == "1":
        return len(digits) == 11 and digits[1] in "23456789"
    known = digits[0] == "7" or digits[:2] in TWO_DIGITS or digits[:2] in THREE_DIGITS
    return known and len(digits) >= 8 and not digits.endswith("000000")


def _is_written_so(number: str, digits: str) -> bool:
    """Whether the shape alone tells that this is a phone number."""
    if NORTH_AMERICA.fullmatch(number) or NORTH_AMERICA_SPACED.fullmatch(number):
        return True
    if number[0] == "(":
        return _is_bracketed(number, digits)
    if ABROAD.fullmatch(number):
        return len(digits) >= 10 and _is_international(digits[2:])
    grouped = TRUNK.fullmatch(number) or TRUNK_AND_REST.fullmatch(number)
    return bool(grouped) and 9 <= len(digits) <= 13 and _is_even(number) and not _counts_up(number)


def _is_bracketed(number: str, digits: str) -> bool:
    """An area in brackets; but not a year, or a volume with its pages: (1998) 123-145."""
    area, _, rest = number[1:].partition(")")
    groups = re.findall(r"[0-9]+", rest)
    if len(digits) < 8 or (len(area) == 4 and area[:2] in ("19", "20")):
        return False
    pages = len(groups) == 2 and rest.count("-") == 1 and len(groups[0]) == len(groups[1]) and groups[0] <= groups[1]
    return not pages and _is_even(rest.strip())


def _is_said_so(number: str, digits: str, before: str, after: str) -> bool:
    """Whether a word near it makes a number a phone number."""
    groups = re.findall(r"[0-9]+", number)
    called = bool(RIGHT_BEFORE.search(before)) or (len(digits) >= 8 and bool(ASKED.search(before)))
    if len(groups) == 1:
        return len(digits) <= 12 and called
    if (
        not _is_even(number)
        or (_is_amount(number, groups) and not called)
        or all(re.fullmatch("(?:19|20)[0-9]{2}", group) for group in groups)
    ):
        return False
    likely = LIKELY_BEFORE.search(before) or AFTER.match(after)
    if len(groups) == 2 and not (len(groups[0]) == 3 and len(groups[1]) == 4 and likely):
        return bool(SURELY.search(before)) and len(groups[0]) <= 5
    return bool(likely) and all(2 <= len(group) <= 5 for group in groups[1:])


def _is_even(number: str) -> bool:
    """Whether its groups are kept apart in one way, but for the first, which may be the area."""
    gaps = re.findall(r"[^0-9()]+", number)
    return len(set(gaps[1:])) <= 1


def _is_amount(number: str, groups: list[str]) -> bool:
    """Whether it is written as an amount: 12 345 678."""
    return "-" not in number and "/" not in number and len(groups[0]) <= 3 and all(len(group) == 3 for group in groups[1:])


def _counts_up(number: str) -> bool:
    """Whether its groups are a list: 01 02 03 04 05."""
    return all(int(b) - int(a) == 1 for a, b in pairwise(re.findall(r"[0-9]+", number)))
