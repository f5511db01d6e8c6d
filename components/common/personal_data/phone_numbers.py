"""Detection of phone numbers in international and national format; dates, versions and amounts are excluded.

A number counts as a phone number if it has the format of a phone number, or follows a word such as "call" or "fax".
"""

# Formats: a plus sign with an assigned country code, an area code in brackets, North American or Russian groups, a
# leading zero with groups, 10 to 13 digits with one leading zero, or the country code 44 or 91 with 10 digits.

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from components.common.personal_data import check_digits

Span = tuple[int, int]  # start (inclusive) and end (exclusive), in characters

# Country calling codes assigned by ITU-T E.164. Zones 1 and 7 are complete; the codes of other zones have two digits
# (ZONES) or three (REGIONS).
ZONES = {"2": "07", "3": "0123469", "4": "01346789", "5": "12345678", "6": "0123456", "8": "1246", "9": "0123458"}
TWO_DIGIT_CODES = frozenset(zone + second for zone, seconds in ZONES.items() for second in seconds)
REGIONS = {"2": "1234569", "3": "578", "4": "2", "5": "09", "6": "789", "8": "0578", "9": "679"}
THREE_DIGIT_CODES = frozenset(zone + second for zone, seconds in REGIONS.items() for second in seconds)
MAX_DIGITS = 15  # limit of E.164
MAX_UNGROUPED_DIGITS = 13  # a longer run is an amount or an ID
CONTEXT_CHARACTERS = 40  # before a number, searched for a word that labels it
ROW_CHARACTERS = 200  # on each side of a number, searched for the other fields of a CSV row

GAP = r"[ .\-/\u00a0\u2010\u2011]"
LETTERS = r"A-Za-z_\u00c0-\u1fff"  # without Chinese, Japanese and Korean, which have no spaces between words
# A number starts after a space, sign or Chinese character; after a comma if it can have a format; after "=" or "-" if
# the letters before can end a phone word (phone, mobile, tel, fax, number, cell, sms); after "/" if it is a second number.
START = (
    rf"[+(0-9](?<![{LETTERS}0-9+.@&%$€£¥\u2010\u2011].)(?:(?<![,=/-].)|(?<=,.)(?:(?<=[+(0])|(?=[0-9]{{0,2}}[ .()-]))"
    r"|(?<=(?:one|ile|tel|fax|ber|ell|sms)[=-].)|(?<=[0-9]{7}/.))"
)
# (?>...) and not a possessive group, see CARD_RUN in detectors.py.
NUMBER = re.compile(
    rf"{START}"
    r"(?:(?<=\+)(?P<plus>\(?[1-9][0-9]{0,3}\)?(?>(?:[ .\-/()\u00a0\u2010\u2011]{0,2}[0-9]){6,14}))"
    rf"|(?<=\()(?P<bracket>\+?[0-9]{{2,5}}\)[ .\-]?[0-9]{{2,5}}(?>(?:{GAP}?[0-9]{{2,4}}){{1,3}}))"
    r"|(?<=[0-9])(?P<national>(?:(?<=0)[1-9][0-9]{0,2}|(?<=4)4 ?[1-37-9]|(?<=9)1 ?[6-9])[0-9]{9}(?![0-9]))"
    rf"|(?<=[0-9])(?P<plain>[0-9]*+(?>(?:{GAP}?\([0-9]{{1,4}}\)[0-9]*+|{GAP}[0-9]+){{0,5}})))"
    r"(?P<extension>[ ,]{0,2}(?:x|ext\.?|extension|#)[ .:]{0,2}[0-9]{1,6}+)?",
    re.IGNORECASE,
)
LETTER = re.compile(r"[^\W\d_]")
GROUP = re.compile(r"[0-9]+")
AMOUNT = re.compile(r"[^0-9/-]*[0-9]{1,3}(?:[^0-9/-]+[0-9]{3})+[^0-9/-]*")  # 12 345 678
YEAR = re.compile(r"(?:19|20)[0-9]{2}")
WORD_OR_UNIT = re.compile(rf"[{LETTERS}0-9%°€$£@]|[.+-][{LETTERS}0-9.+-]{{0,64}}@")  # also the rest of an address
BAD_END = re.compile(r"[.:/=\-][0-9]")
AMOUNT_AFTER = re.compile(
    r"[.:][0-9]|[ \u00a0](?:[kKMGT]i?B|[Bb](?:yte|it)s?|[mnµ]?s|seconds?|EUR|USD|GBP|INR|[€$£₹])(?![A-Za-z])"
)
BEFORE_COUNTRY_CODE = re.compile(  # the start of a line, a letter, or another number
    r"(?:^|\n)[ \t*•-]*$|[^\W\d_][ \t]?$|(?:44|91)[0-9]{10}[,;/] ?$"
)
PHONE_WORDS = (
    r"phone(?:[ _-]?number)?|mobile(?:[ _-]?number)?|cell(?:ular|[ _-]?phone)?|fax|whatsapp|hotline|pager"
    r"|telefon|tel[ée]fono|t[ée]l(?:[ée]phone)?|mobil|handy|rufnummer|m[óo]vil|celular|cellulare|portable|telefone|telefax"
    r"|(?:手机|手機|电话|電話|热线|传真|携帯)(?:号码?|號碼|番号)?[是为は]?|(?:전화|휴대폰)(?:번호)?|телефон|тел|моб|факс"
)
LIKELY_WORDS = r"call(?:s|ed|ing|[ _-]?back)?|dial(?:led|ling)?|sms|reach(?:ed)?|contact|desk|office|answer(?:ing)?"
PHONE_WORD_BEFORE = re.compile(rf"(?<![A-Za-z<])(?:{PHONE_WORDS})\b(?!>)[^\n]*$", re.IGNORECASE)
PHONE_WORD_DIRECTLY_BEFORE = re.compile(
    rf"(?<![A-Za-z<])(?:{PHONE_WORDS})[ _-]?(?:no\.?|nr\.?|number|num)?[\"'\s:：=#.()]{{0,6}}(?:is )?[\"' ]?$",
    re.IGNORECASE,
)
CALL_REQUEST_BEFORE = re.compile(
    r"(?<![A-Za-z<])(?:(?:call|dial|sms|text|ring|reach|contact|answering)(?: (?:me|us|him|her|them|back))?"
    r"(?: (?:at|on|under))?:?|(?:desk|office|home|work):)[ -]$",
    re.IGNORECASE,
)
LIKELY_BEFORE = re.compile(rf"(?<![A-Za-z<])(?:{PHONE_WORDS}|{LIKELY_WORDS})\b(?!>)[^\n]*$", re.IGNORECASE)
AFTER = re.compile(rf"[\s-]?\(?(?:{PHONE_WORDS}|office|home|work|desk|(?:call|ring|text) me)\b", re.IGNORECASE)
OTHER_NUMBER = re.compile(
    r"(?:isbn|issn|doi|pmid|arxiv|version|serial|part no|order|invoice|patent)[^\n]{0,14}$", re.IGNORECASE
)
NHS_BEFORE = re.compile(r"\bnhs\b[^\n]*$", re.IGNORECASE)
NHS_NUMBER = re.compile(r"[0-9]{3}[ -][0-9]{3}[ -][0-9]{4}")  # no British phone number has these groups
DATE = re.compile(
    r"(?:[0-9]{1,2}([./ -])[0-9]{1,2}\1(?:19|20)[0-9]{2}|(?:19|20)[0-9]{2}([./ -])[0-9]{2}\2[0-9]{2})(?![0-9])"
)
NORTH_AMERICA = re.compile(r"(?:1[ .\-]|1(?=\())?(?:\([2-9][0-9]{2}\)[ .\-]?|[2-9][0-9]{2}[.\-])[0-9]{3}[.\- ][0-9]{4}")
TRUNK = re.compile(r"0[1-9][0-9]{0,5}(?:[ .\-/][0-9]{2,5}){2,5}")
NORTH_AMERICA_SPACED = re.compile(r"[2-9][0-9]{2} [2-9][0-9]{2} [0-9]{2}(?!00)[0-9]{2}")
TRUNK_AND_REST = re.compile(r"0[1-9](?:[0-9]{1,3}[ \-/][0-9]{5,8}|-[0-9]{8})")
TRUNK_UNGROUPED = re.compile(r"0[1-9][0-9]{8}")  # can also be an ISBN-10
SWEDEN = re.compile(r"0[1-9][0-9]{0,2}-[0-9]{2,3}(?: [0-9]{2}){2}")
CHINA_MOBILE = re.compile(r"1[3-9][0-9]{9}")  # as an ID or an amount in other languages
CHINESE = re.compile(r"[\u4e00-\u9fff]")
RUSSIA = re.compile(r"8[ -]?(?:\([3489][0-9]{2}\)[ -]?|[3489][0-9]{2}[ -])[0-9]{3}[ -]?[0-9]{2}[ -]?[0-9]{2}")
INTERNATIONAL_PREFIX = re.compile(r"00[1-9][0-9]{0,3}(?:[ .\-/][0-9]{2,4}){2,4}")


def find_phone_numbers(text: str) -> Iterator[Span]:
    """Yield the positions of phone numbers in the text."""
    position = 0
    while found := NUMBER.search(text, position):
        if _is_phone(text, found):
            yield found.span()
            position = found.end()
        else:  # continue after its first group
            rest = GROUP.match(text, found.start() + 1, found.end())
            position = rest.end() if rest else found.start() + 1


def _is_phone(text: str, found: re.Match[str]) -> bool:
    number = text[found.start() : found.end() if not found["extension"] else found.start("extension")]
    digits = "".join(filter(str.isdigit, number))
    if not _can_be_phone(text, found, number, digits):
        return False
    before = text[max(0, found.start() - CONTEXT_CHARACTERS) : found.start()]
    after = text[found.end() : found.end() + 12]
    has_format = _has_phone_format(found, number, digits, before, after)
    if not has_format and (found["plus"] or not _can_be_labelled(before, after)):
        return False
    if number.isdigit() and _is_fraction(text, found):
        return False
    is_announced = _is_announced(number, digits, before)
    if not is_announced and (_is_joined(found, before) or _is_other_number(number, before)):
        return False
    return (has_format or _is_labelled(number, digits, is_announced, before, after)) and not _is_in_url(text, found)


def _can_be_phone(text: str, found: re.Match[str], number: str, digits: str) -> bool:
    """Return whether the digits and the characters next to them are possible for a phone number."""
    if not 7 <= len(digits) <= MAX_DIGITS or len(set(digits)) == 1 or WORD_OR_UNIT.match(text, found.end()):
        return False
    if not found["national"] and (BAD_END.match(text, found.end()) or _is_part_of_row(text, found, number)):
        return False
    return bool(found["plus"]) or DATE.match(number.lstrip("(")) is None


def _is_joined(found: re.Match[str], before: str) -> bool:
    """Return whether a sign joins the number to the text before it, except to a first number: 07946746291/07880867867."""
    is_second = found["national"] and before.endswith("/") and before[-2:-1].isdigit()
    return before.endswith(("=", "-", "/")) and not is_second


def _can_be_labelled(before: str, after: str) -> bool:
    """Return whether a word is near; a number in a list such as 1,200 or a row of a CSV file has no label."""
    is_in_list = before.endswith(",") or (after[:1] == "," and after[1:2].isdigit())
    return not is_in_list and LETTER.search(before + after) is not None


def _can_be_country_code(before: str, after: str) -> bool:
    """Return whether 44 or 91 can start a phone number, not an amount or an ID: arn:aws:iam::918765432109."""
    if AMOUNT_AFTER.match(after):
        return False
    return bool(BEFORE_COUNTRY_CODE.search(before) or LIKELY_BEFORE.search(before))


def _is_fraction(text: str, found: re.Match[str]) -> bool:
    """Return whether the number follows a decimal comma, as in 1,0471975512, and is not a field of a CSV row."""
    before = text[max(0, found.start() - ROW_CHARACTERS) : found.start()].rpartition("\n")[2]
    if not (before.endswith(",") and before[-2:-1].isdigit()):
        return False
    after = text[found.end() : found.end() + ROW_CHARACTERS].partition("\n")[0].rstrip("\r")
    row = before + after
    return after[:1] not in ("", ",") or row.count(",") <= 1 or ";" in row or "\t" in row


def _is_in_url(text: str, found: re.Match[str]) -> bool:
    word = re.split(r"\s", text[max(0, found.start() - 200) : found.start()])[-1]
    return "://" in word or word.startswith("www.")


def _is_other_number(number: str, before: str) -> bool:
    """Return whether a word before the number identifies an ISBN, an NHS number or another number."""
    is_nhs_number = NHS_NUMBER.fullmatch(number) and NHS_BEFORE.search(before)
    return bool(is_nhs_number or OTHER_NUMBER.search(before))


def _is_part_of_row(text: str, found: re.Match[str], number: str) -> bool:
    """Return whether the number is part of a longer row of numbers."""
    gaps = set(re.sub(r"[0-9()+]", "", number)) or {" "}
    before, after = text[max(0, found.start() - 2) : found.start()], text[found.end() : found.end() + 2]
    neighbours = (before[::-1], after)  # in the direction away from the number
    return any(len(two) == 2 and two[0] in gaps and two[1].isdigit() for two in neighbours)


def _is_international(digits: str) -> bool:
    if digits[0] == "1":
        return len(digits) == 11 and digits[1] in "23456789"
    known = digits[0] == "7" or digits[:2] in TWO_DIGIT_CODES or digits[:2] in THREE_DIGIT_CODES
    return known and len(digits) >= 8 and not digits.endswith("000000")


def _has_phone_format(found: re.Match[str], number: str, digits: str, before: str, after: str) -> bool:
    """Return whether the number has the format of a phone number."""
    if found["plus"]:
        return _is_international(digits) and (len(digits) <= MAX_UNGROUPED_DIGITS or len(number) > len(digits) + 1)
    if found["national"]:
        if digits[0] != "0" and not _can_be_country_code(before, after):
            return False
        return len(set(digits)) > 2 and not _is_card_or_product(digits)  # two digits: bits
    if any(pattern.fullmatch(number) for pattern in (NORTH_AMERICA, NORTH_AMERICA_SPACED, RUSSIA, SWEDEN)):
        return True
    if TRUNK_UNGROUPED.fullmatch(number):
        return len(set(digits)) > 2 and not _is_card_or_product(digits)
    if number[0] == "(":
        return _has_bracketed_area_code(number, digits)
    if INTERNATIONAL_PREFIX.fullmatch(number):
        return len(digits) >= 10 and _is_international(digits[2:])
    if not (TRUNK.fullmatch(number) or TRUNK_AND_REST.fullmatch(number)) or not 9 <= len(digits) <= 13:
        return False
    is_counting = all(int(b) - int(a) == 1 for a, b in pairwise(GROUP.findall(number)))  # a list: 01 02 03 04 05
    return not is_counting and _has_uniform_gaps(number)


def _has_bracketed_area_code(number: str, digits: str) -> bool:
    """Return whether brackets enclose an area code, not a year or a volume with pages: (1998) 123-145."""
    area, _, rest = number[1:].partition(")")
    if len(digits) < 8 or YEAR.fullmatch(area):
        return False
    groups = GROUP.findall(rest)
    pages = len(groups) == 2 and rest.count("-") == 1 and len(groups[0]) == len(groups[1]) and groups[0] <= groups[1]
    return not pages and _has_uniform_gaps(rest.strip())


def _is_announced(number: str, digits: str, before: str) -> bool:
    """Return whether the words directly before the number announce a phone number, not a range: mobile 500-1000."""
    if PHONE_WORD_DIRECTLY_BEFORE.search(before):
        return not _is_range(number) or before.rstrip(" \"'").endswith((":", "=", ".", "#", " is"))
    return len(digits) >= 8 and CALL_REQUEST_BEFORE.search(before) is not None and not _is_range(number)


def _is_range(number: str) -> bool:
    """Return whether the number can be a range or a resolution: 500-1000, 10800-2500."""
    first, dash, last = number.partition("-")
    return bool(dash and first.isdigit() and last.isdigit()) and (len(first) > 4 or int(first) < int(last))


def _is_labelled(number: str, digits: str, is_announced: bool, before: str, after: str) -> bool:
    """Return whether a nearby word identifies a phone number."""
    groups = GROUP.findall(number)
    first, *others = groups
    if not others:
        return (len(digits) <= 12 and is_announced) or _is_likely_ungrouped(digits, before, after)
    if (AMOUNT.fullmatch(number) and not is_announced) or not _has_uniform_gaps(number):
        return False
    if all(map(YEAR.fullmatch, groups)):
        return False
    sizes = {len(group) for group in others}
    is_likely = bool(LIKELY_BEFORE.search(before) or AFTER.match(after))
    if len(others) == 1 and not (is_likely and (len(first), sizes) == (3, {4})):
        is_phone_like = len(first) <= 5 and not (_is_range(number) or YEAR.fullmatch(first))
        return is_announced or (is_phone_like and PHONE_WORD_BEFORE.search(before) is not None)
    return is_likely and sizes <= {2, 3, 4, 5}


def _is_likely_ungrouped(digits: str, before: str, after: str) -> bool:
    """Return whether the text around an ungrouped number suggests a phone number."""
    if CHINA_MOBILE.fullmatch(digits) and CHINESE.search(before + after):
        return True
    if TRUNK_UNGROUPED.fullmatch(digits) and LIKELY_BEFORE.search(before):
        return True
    return 9 <= len(digits) <= 12 and AFTER.match(after) is not None


def _is_card_or_product(digits: str) -> bool:
    """Return whether an ungrouped number has the check digit of a payment card, book or product of its length."""
    if len(digits) == 10:
        return check_digits.has_isbn_check_digit(digits)
    is_checked = check_digits.has_bar_code_check_digit(digits) or check_digits.has_luhn_check_digit(digits)
    return len(digits) in (12, 13) and is_checked


def _has_uniform_gaps(number: str) -> bool:
    """Return whether all separators are equal, except the separator after the area code."""
    gaps = re.findall(r"[^0-9()]+", number[number.rfind(")") + 1 :].lstrip())
    return len(set(gaps[1:])) <= 1
