"""Detection of secrets: API keys, assigned secrets, private keys, JSON Web Tokens, and credentials in URLs.

Every regular expression is bounded or possessive, so the time is linear in the length of the text.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter
from collections.abc import Iterator

from components.common.personal_data.text_profile import TextProfile

Span = tuple[int, int]  # start (inclusive) and end (exclusive), in characters

# Minimum entropy of a secret, in bits per character: 3.0 for hexadecimal strings (truffleHog, detect-secrets), 3.5 for
# others (the generic rule of gitleaks).
HEX_ENTROPY = 3.0
ENTROPY = 3.5
TOKEN_ENTROPY = 3.0  # after a known prefix
# Prefix of a secret, and the format that its issuer documents. The format is searched for only if the prefix occurs.
TOKENS = {
    sign: re.compile(rf"(?<![A-Za-z0-9_]){shape}(?![A-Za-z0-9_])")
    for sign, shape in {
        "AKIA": r"AKIA[A-Z2-7]{16}",  # AWS access keys: long-lived, then temporary
        "ASIA": r"ASIA[A-Z2-7]{16}",
        "ghp_": r"ghp_[A-Za-z0-9]{36,255}+",  # GitHub: personal, OAuth, user, server, refresh, fine-grained
        "gho_": r"gho_[A-Za-z0-9]{36,255}+",
        "ghu_": r"ghu_[A-Za-z0-9]{36,255}+",
        "ghs_": r"ghs_[A-Za-z0-9]{36,255}+",
        "ghr_": r"ghr_[A-Za-z0-9]{36,255}+",
        "github_pat_": r"github_pat_[A-Za-z0-9_]{22,255}+",
        "glpat-": r"glpat-[A-Za-z0-9_.-]{19,255}[A-Za-z0-9_]",  # GitLab
        "xox": r"xox[abeoprs]-[A-Za-z0-9-]{9,255}[A-Za-z0-9]",  # Slack
        "xapp-": r"xapp-[A-Za-z0-9-]{9,255}[A-Za-z0-9]",
        "hooks.slack.com/": r"hooks\.slack\.com/(?:services|workflows)/[A-Za-z0-9/+]{40,100}+",
        "AIza": r"AIza[A-Za-z0-9_-]{35}(?!-)",  # Google
        # Anthropic, OpenAI, OpenRouter
        "sk-": r"sk-(?:ant-|proj-|svcacct-|admin-|or-v1-)?[A-Za-z0-9_-]{19,255}[A-Za-z0-9_]",
        "hf_": r"hf_[A-Za-z0-9]{30,64}+",  # Hugging Face
        "k_live_": r"[sr]k_live_[A-Za-z0-9]{16,255}+",  # Stripe
        "k_test_": r"[sr]k_test_[A-Za-z0-9]{16,255}+",
        "npm_": r"npm_[A-Za-z0-9]{36}",
        "pypi-AgE": r"pypi-AgE[A-Za-z0-9_-]{50,500}+",
        "SG.": r"SG\.[A-Za-z0-9_-]{16,32}\.[A-Za-z0-9_-]{16,64}(?!-)",  # SendGrid
        "SK": r"SK[0-9a-f]{32}",  # Twilio
        "AccountKey=": r"AccountKey=[A-Za-z0-9+/]{86}==",  # Azure storage
        "dop_v1_": r"dop_v1_[0-9a-f]{64}",  # DigitalOcean
        "dapi": r"dapi[0-9a-f]{32}",  # Databricks
        ":AA": r"[0-9]{8,10}:AA[A-Za-z0-9_-]{33}(?!-)",  # Telegram
    }.items()
}
# Names of secrets. NAMES is a fast check, in lower case, before the regular expression.
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
BREAK = r"(?:\s|\\[nrt]|[\"'+,>#*|])"  # between the lines of a key; the key may be in a string literal or a quotation
# (?>...) and not a possessive group, see CARD_RUN in detectors.py.
KEY = re.compile(rf"-----BEGIN {LABEL}-----(?P<body>(?>(?:[^-]++|-(?!----))*))(?P<end>-----END {LABEL}-----)?")
HEADERS = re.compile(rf"(?>{BREAK}*)(?>(?:(?:Proc-Type|DEK-Info|Version|Comment|Hash|Charset):[^\n\\]*+(?>{BREAK}*))*)")
RUNS = re.compile(rf"(?>(?:(?>{BREAK}*){KEY_RUN})+)(?:(?>{BREAK}+)[A-Za-z0-9+/]{{0,15}}={{1,2}})?")
TAIL = re.compile(rf"-----END {LABEL}-----")
TOKEN = re.compile(KEY_RUN)
TAIL_WINDOW = 20_000  # characters; a 16,384-bit RSA key has about 12,700

URL = re.compile(r"://(?P<credentials>[^\s/@:<>\"'`?#\\]{0,256}+:(?P<password>[^\s/<>\"'`\\]{1,256}))@(?=[\w\[])")
NO_PASSWORD = re.compile(r"[*.x•…]+|[$%{\[(].*")


def compute_entropy(text: str) -> float:
    """Return the Shannon entropy of the characters, in bits per character."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values()) if text else 0.0


def find_api_keys(text: str) -> Iterator[Span]:
    """Yield the positions of API keys, and of high-entropy values assigned to a name such as api_key or password."""
    for sign, pattern in TOKENS.items():
        for found in pattern.finditer(text) if sign in text else ():
            # The rest of a key is random, unlike repeated characters or words (`sk-learn-contrib-something`).
            rest = found.group().partition(sign)[2]
            if compute_entropy(rest) >= TOKEN_ENTROPY and (sign != "sk-" or MIXED.search(rest)):
                yield found.span()
    if can_contain_assignment(text):
        for found in ASSIGNED.finditer(text):  # values of 16 or more characters
            value = found["value"]
            least = HEX_ENTROPY if HEX.fullmatch(value) else ENTROPY
            if MIXED.search(value) and compute_entropy(value) >= least:
                yield found.span("value")


def can_contain_assignment(text: str) -> bool:
    """Return whether the text contains a name from NAMES, and an assignment operator or a bearer token."""
    if "=" not in text and ":" not in text and "earer " not in text:
        return False
    lower = text.lower()
    return any(name in lower for name in NAMES)


def can_contain_key(profile: TextProfile) -> bool:
    """Return whether a long run contains a prefix from TOKENS, or can be an assigned secret."""
    runs = profile.long_runs
    if not runs:
        return False
    is_mixed = MIXED.search(runs) is not None
    return (is_mixed and can_contain_assignment(profile.text)) or any(sign in runs for sign in TOKENS)


def find_json_web_tokens(text: str) -> Iterator[Span]:
    """Yield the positions of JSON Web Tokens (RFC 7519, RFC 7516), whose header is a JSON object with `alg`."""
    for found in JWT.finditer(text):
        part = found.group().partition(".")[0]
        try:
            header = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        except (ValueError, RecursionError):
            continue
        if isinstance(header, dict) and isinstance(header.get("alg"), str):
            yield found.span()


def find_private_keys(text: str) -> Iterator[Span]:
    """Yield the positions of PEM private keys, including keys that are truncated at either end."""
    done = 0
    for found in KEY.finditer(text):
        yield from _find_key_ends(text, done, found.start())
        done = found.start()
        body_start, body_end = found.span("body")
        if found["end"]:
            end = found.end() if TOKEN.search(found["body"]) else 0
        else:
            headers = HEADERS.match(text, body_start, body_end)
            runs = RUNS.match(text, headers.end() if headers else body_start, body_end)
            end = runs.end() if runs else 0
        if end:  # 0 for a BEGIN line without a key
            yield found.start(), end
            done = end
    yield from _find_key_ends(text, done, len(text))


def _find_key_ends(text: str, start: int, end: int) -> Iterator[Span]:
    """Yield the key lines before an END line without a BEGIN line, between two positions."""
    for found in TAIL.finditer(text, start, end):
        window = max(start, found.start() - TAIL_WINDOW)
        key_start, has_key = 0, False
        for word in reversed(list(re.finditer(r"[^\s\\]++", text[window : found.start()]))):
            line = word.group().strip("\"'+,>#*|nr")
            if line and not line.endswith("=") and not TOKEN.fullmatch(line):
                break
            key_start, has_key = word.start(), has_key or bool(TOKEN.search(word.group()))
        if has_key:
            yield window + key_start, found.end()
        start = found.end()


def find_url_credentials(text: str) -> Iterator[Span]:
    """Yield the positions of `user:password` in URLs."""
    for found in URL.finditer(text):
        has_scheme = text[max(0, found.start() - 1) : found.start()].isalnum()
        if has_scheme and not NO_PASSWORD.fullmatch(found["password"]):
            yield found.span("credentials")
