"""Secrets in text: keys of known services, secrets that are assigned to a name, private keys, JSON Web Tokens, credentials in URLs.

Every expression is bounded or possessive, so that a text of any length and any content takes time in proportion to its length.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile

Span = tuple[int, int]

# Entropy in bits a character below which a value is a word or a row of x. 3.0 for hexadecimal strings is the limit of truffleHog and
# detect-secrets, 3.5 for others that of gitleaks' generic rule.
HEX_ENTROPY = 3.0
ENTROPY = 3.5
TOKEN_ENTROPY = 3.0  # behind a prefix that says what the value is
# Signs of a secret, and the shape its issuer documents: a text without the sign is not searched for the shape.
TOKENS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (sign, re.compile(rf"(?<![A-Za-z0-9_]){shape}(?![A-Za-z0-9_])"))
    for sign, shape in (
        ("AKIA", r"AKIA[A-Z2-7]{16}"),  # AWS access keys: long-lived, then temporary
        ("ASIA", r"ASIA[A-Z2-7]{16}"),
        ("ghp_", r"ghp_[A-Za-z0-9]{36,255}+"),  # GitHub: personal, OAuth, user, server, refresh, fine-grained
        ("gho_", r"gho_[A-Za-z0-9]{36,255}+"),
        ("ghu_", r"ghu_[A-Za-z0-9]{36,255}+"),
        ("ghs_", r"ghs_[A-Za-z0-9]{36,255}+"),
        ("ghr_", r"ghr_[A-Za-z0-9]{36,255}+"),
        ("github_pat_", r"github_pat_[A-Za-z0-9_]{22,255}+"),
        ("glpat-", r"glpat-[A-Za-z0-9_.-]{19,255}[A-Za-z0-9_]"),  # GitLab
        ("xox", r"xox[abeoprs]-[A-Za-z0-9-]{9,255}[A-Za-z0-9]"),  # Slack
        ("xapp-", r"xapp-[A-Za-z0-9-]{9,255}[A-Za-z0-9]"),
        ("hooks.slack.com/", r"hooks\.slack\.com/(?:services|workflows)/[A-Za-z0-9/+]{40,100}+"),
        ("AIza", r"AIza[A-Za-z0-9_-]{35}(?!-)"),  # Google
        ("sk-", r"sk-(?:ant-|proj-|svcacct-|admin-|or-v1-)?[A-Za-z0-9_-]{19,255}[A-Za-z0-9_]"),  # Anthropic, OpenAI, OpenRouter
        ("hf_", r"hf_[A-Za-z0-9]{30,64}+"),  # Hugging Face
        ("k_live_", r"[sr]k_live_[A-Za-z0-9]{16,255}+"),  # Stripe
        ("k_test_", r"[sr]k_test_[A-Za-z0-9]{16,255}+"),
        ("npm_", r"npm_[A-Za-z0-9]{36}"),
        ("pypi-AgE", r"pypi-AgE[A-Za-z0-9_-]{50,500}+"),
        ("SG.", r"SG\.[A-Za-z0-9_-]{16,32}\.[A-Za-z0-9_-]{16,64}(?!-)"),  # SendGrid
        ("SK", r"SK[0-9a-f]{32}"),  # Twilio
        ("AccountKey=", r"AccountKey=[A-Za-z0-9+/]{86}=="),  # Azure storage
        ("dop_v1_", r"dop_v1_[0-9a-f]{64}"),  # DigitalOcean
        ("dapi", r"dapi[0-9a-f]{32}"),  # Databricks
        (":AA", r"[0-9]{8,10}:AA[A-Za-z0-9_-]{33}(?!-)"),  # Telegram
    )
)
# The signs by a character that each of a group has: one look for an underscore spares a dozen for what it is in.
MARKS = {mark: tuple(sign for sign, _ in TOKENS if mark == next((m for m in "_-" if m in sign), "")) for mark in ("_", "-", "")}
# Names that a secret is assigned to. The words in NAMES are looked for first, in lower case.
NAMES = ("key", "secret", "token", "passw", "bearer ")
ASSIGNED = re.compile(
    r"(?:api[_ -]?key|access[_ -]?key|auth[_ -]?key|account[_ -]?key|private[_ -]?key|secret[_ -]?key|secret|token|passw(?:or)?d|bearer)"
    r"""(?:[_-]?(?:key|id|value|prod|live))?(?:["'`\]]{0,2}\s{0,3}(?:=>|:=|==?|:)\s{0,3}(?:bearer\s)?|(?<=bearer)\s{1,3})["'`]{0,3}"""
    r"(?P<value>[A-Za-z0-9_+/=-]{16,512}+)(?![\w.(\[<])",
    re.IGNORECASE,
)
MIXED = re.compile(r"[A-Za-z][0-9]+[A-Za-z]|[0-9][A-Za-z]+[0-9]")
HEX = re.compile(r"[0-9a-fA-F-]+")

JWT = re.compile(r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}+(?:\.[A-Za-z0-9_-]*+){2,4}")

LABEL = r"(?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?"
KEY_RUN = r"[A-Za-z0-9+/=]{16,}+"
BREAK = r"(?:\s|\\[nrt]|[\"'+,>#*|])"  # between the lines of a key; also as they stand in strings and quotations
KEY = re.compile(rf"-----BEGIN {LABEL}-----(?P<body>(?:[^-]|-(?!----))*+)(?P<end>-----END {LABEL}-----)?")
HEADERS = re.compile(rf"{BREAK}*+(?:(?:Proc-Type|DEK-Info|Version|Comment|Hash|Charset):[^\n\\]*+{BREAK}*+)*+")
RUNS = re.compile(rf"(?:{BREAK}*+{KEY_RUN})++(?:{BREAK}++[A-Za-z0-9+/]{{0,15}}={{1,2}})?")
TAIL = re.compile(rf"-----END {LABEL}-----")
TOKEN = re.compile(KEY_RUN)
TAIL_WINDOW = 20_000  # characters: a 16,384-bit RSA key has some 12,700

URL = re.compile(r"://(?P<who>[^\s/@:<>\"'`?#\\]{0,256}+:(?P<password>[^\s/<>\"'`\\]{1,256}))@(?=[\w\[])")
NO_PASSWORD = re.compile(r"[*.x•…]+|[$%{\[(].*")


def entropy(text: str) -> float:
    """Shannon entropy of the characters, in bits a character."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values()) if text else 0.0


def api_keys(text: str) -> Iterator[Span]:
    """Keys of known services, and values of high entropy that are assigned to a name such as api_key or password."""
    for sign, pattern in TOKENS:
        if sign in text:
            yield from (found.span() for found in pattern.finditer(text) if _is_token(sign, found.group()))
    if may_assign(text):
        yield from (found.span("value") for found in ASSIGNED.finditer(text) if is_random(found["value"]))


def may_assign(text: str) -> bool:
    """Whether a name of a secret stands in the text, with a sign of assignment somewhere."""
    if "=" not in text and ":" not in text and "earer " not in text:
        return False
    lower = text.lower()
    return any(name in lower for name in NAMES)


def may_have_key(text: str) -> bool:
    """Whether a sign of a secret stands in the text."""
    return may_assign(text) or any(sign in text for mark, signs in MARKS.items() if mark in text for sign in signs)


def _is_token(sign: str, token: str) -> bool:
    """Whether what stands behind the sign is random: not a row of x, and not words as in `sk-learn-contrib-something`."""
    rest = token.partition(sign)[2]
    return entropy(rest) >= TOKEN_ENTROPY and (sign != "sk-" or bool(MIXED.search(rest)))


def is_random(value: str) -> bool:
    """Whether a value of 16 and more characters is a secret by its entropy: letters and digits mixed, as no words are."""
    if not MIXED.search(value):
        return False
    return entropy(value) >= (HEX_ENTROPY if HEX.fullmatch(value) else ENTROPY)


def tokens(text: str) -> Iterator[Span]:
    """JSON Web Tokens (RFC 7519; also the five parts of RFC 7516): the first part decodes to a JSON object that names an algorithm."""
    return (found.span() for found in JWT.finditer(text) if _has_algorithm(found.group().partition(".")[0]))


def _has_algorithm(part: str) -> bool:
    try:
        header = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        return False
    return isinstance(header, dict) and isinstance(header.get("alg"), str)


def private_keys(text: str) -> Iterator[Span]:
    """Private keys in PEM form, whole ones and those of which the end or the beginning is cut off."""
    done = 0
    for found in KEY.finditer(text):
        yield from _tails(text, done, found.start())
        done = found.start()
        end = _end_of_key(text, found)
        if end:
            yield found.start(), end
            done = end
    yield from _tails(text, done, len(text))


def _end_of_key(text: str, found: re.Match[str]) -> int:
    """Where a key ends that begins here; 0 where a heading stands without a key, as in a text about keys."""
    if found["end"]:
        return found.end() if TOKEN.search(found["body"]) else 0
    headers = HEADERS.match(text, found.start("body"), found.end("body"))
    runs = RUNS.match(text, headers.end() if headers else found.start("body"), found.end("body"))
    return runs.end() if runs else 0


def _tails(text: str, start: int, end: int) -> Iterator[Span]:
    """Ends of keys between two places: the lines of a key right before an END line whose BEGIN is not there."""
    for found in TAIL.finditer(text, start, end):
        window = max(start, found.start() - TAIL_WINDOW)
        words = list(re.finditer(r"[^\s\\]++", text[window : found.start()]))
        mine = list(takewhile(lambda word: _is_key_line(word.group()), reversed(words)))
        if any(TOKEN.search(word.group()) for word in mine):
            yield window + mine[-1].start(), found.end()
        start = found.end()


def _is_key_line(word: str) -> bool:
    word = word.strip("\"'+,>#*|nr")
    return bool(TOKEN.fullmatch(word)) or word.endswith("=") or not word


def urls(text: str) -> Iterator[Span]:
    """User and password of URLs: scheme, host and path stay, since they say what the text is about."""
    for found in URL.finditer(text):
        scheme = text[max(0, found.start() - 1) : found.start()].isalnum()
        if scheme and not NO_PASSWORD.fullmatch(found["password"]):
            yield found.span("who")
