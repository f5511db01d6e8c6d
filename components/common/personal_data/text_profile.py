"""The prefilter of all detectors: a text is scanned once, and each detector decides by the result whether to search it.

The scan maps the UTF-8 bytes of the text to classes of characters, in which the properties are then found as substrings.
This takes about a microsecond for 600 characters, a tenth of the detectors' regular expressions.
"""

from __future__ import annotations

import re
import string
from functools import cached_property

# Every secret contains a run of at least 15 of these characters: a Slack token has 15, the value of an assignment and a
# line of a private key have 16, and so has the shortest JSON Web Token with `alg`. Characters beyond ASCII count too:
# with IGNORECASE, [A-Z] also matches four of them.
RUN_CHARACTERS = (string.ascii_letters + string.digits + "_+/=.:-").encode() + bytes(range(0x80, 0x100))
LONG_RUN = b"x" * 15
RUN_CLASSES = bytes(ord("x") if byte in RUN_CHARACTERS else ord(" ") for byte in range(256))
# Digits become 0 and ASCII letters become a; the other characters of IP addresses remain.
CLASSES = bytes(
    ord("0" if chr(byte) in string.digits else "a" if chr(byte) in string.ascii_letters else " ")
    if byte not in b".:"
    else byte
    for byte in range(256)
)
# Between the digits are only characters that separate the groups of card, phone and social security numbers.
SEVEN_DIGITS = re.compile(r"[0-9](?:[ .\-/()\u00a0\u2010\u2011]{0,3}[0-9]){6}")


class TextProfile:
    """Properties of a text that are necessary for findings.

    Attributes:
        text: the text.
        has_at: whether the text contains an at sign, as in every e-mail address and URL with credentials.
        has_digit: whether the text contains an ASCII digit.
        long_runs: the runs of characters that are as long as a secret, with spaces between them.
    """

    def __init__(self, text: str) -> None:
        encoded = text.encode(errors="replace")
        self.text = text
        self._classes = encoded.translate(CLASSES)
        self.has_at = "@" in text
        self.has_digit = b"0" in self._classes
        self.long_runs = _join_long_runs(encoded)

    @cached_property
    def has_seven_digits(self) -> bool:
        """Whether seven digits are close together: the minimum of card, phone and social security numbers."""
        return self._classes.count(b"0") >= 7 and SEVEN_DIGITS.search(self.text) is not None

    @property
    def can_contain_iban(self) -> bool:
        """Whether two letters are followed by two digits."""
        return b"aa00" in self._classes

    @property
    def can_contain_ip_address(self) -> bool:
        """Whether the text has three dots before digits, as an IPv4 address does, or a digit and two colons."""
        return self._classes.count(b".0") >= 3 or (self.has_digit and self._classes.count(b":") >= 2)


def _join_long_runs(encoded: bytes) -> str:
    classes, runs, end = encoded.translate(RUN_CLASSES), list[bytes](), 0
    while (start := classes.find(LONG_RUN, end)) >= 0:
        end = classes.find(b" ", start)
        end = len(classes) if end < 0 else end
        runs.append(encoded[start:end])
    return b" ".join(runs).decode()
