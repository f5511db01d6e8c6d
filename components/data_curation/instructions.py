"""Filters for conversations: turns out of order, answers that say nothing, repeat the question, refuse by rote or break off."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from components.data_curation.config import InstructionConfig
from components.data_curation.drops import Drop
from components.data_curation.rows import Message, Row

# Who may speak after whom; "" is the beginning. A tool answers a call, which is an assistant's turn; several calls give several results.
NEXT = {
    "": {"system", "user"},
    "system": {"user"},
    "user": {"assistant"},
    "assistant": {"user", "tool"},
    "tool": {"tool", "assistant"},
}
# What stands for no answer in published sets: Alpaca's marker, an empty cell written by pandas, dots.
PLACEHOLDER = re.compile(r"<?\[?no[ _]?output\]?>?\.?|(?-i:nan)|[\s.…_]+", re.IGNORECASE)
MIN_ECHO = 20  # characters; shorter answers may rightly equal the question: a greeting, a word to repeat
NOT_WORDS = re.compile(r"[\W_]+")

# A refusal as models write it by rote: they say what they are and then what they cannot do, in the first sentence; or the stock phrase.
_APOLOGY = r"(?:unfortunately,? |(?:i(?:['’]?m| am) (?:very |so |really )?sorry|i apologi[sz]e|sorry|my apologies)[,.;:]? ?(?:but )?)?"
_MODEL = r"an? (?:artificial intelligence|ai|(?:large |ai )?language model)\b(?: (?:language )?(?:model|assistant|chatbot|system|program))?"
_SELF = (
    rf"(?:as {_MODEL}(?=,| i\b| (?:created|developed|trained|made|built|without)\b)"
    rf"|i(?:['’]?m| am) (?:just |only |merely )?{_MODEL}(?=,| (?:and|so|that|without|created|developed|trained|made|built)\b))"
)
_CANNOT = (
    r"(?:cannot|can ?not|can['’]t|could not|couldn['’]t|will not|won['’]t|(?:do not|don['’]t) (?:have|possess)"
    r"|(?:am|['’]m) (?:not (?:able|capable|allowed|permitted|programmed|equipped)|unable|incapable)"
    r"|(?:do not|don['’]t) \w+ (?:personal )?(?:opinions?|beliefs?|feelings?))"
)
_STOCK = (
    r"i(?: cannot|['’]?m unable to| am unable to|['’]?m not able to| am not able to| can['’]t| can ?not| won['’]t be able to) "
    r"(?:assist|help|comply|fulfil?l|answer|complete|process|provide (?:that|this)|do (?:that|this))\b(?: you)?"
    r"(?: with| to| on)?(?: (?:that|this|your|the|these|those)\b[^.!?\n]{0,60})?[.!?]"
    r"(?=\s*(?:\Z|is there|(?:how )?(?:else )?(?:can|may) i|please|let me know|if you|feel free))"
)
REFUSAL = re.compile(rf"{_APOLOGY}(?:{_SELF}[^.!?\n]{{0,80}}?\bi?\b ?{_CANNOT}|{_STOCK})", re.IGNORECASE)
# What follows a refusal that is none: the answer all the same.
HELPS = re.compile(
    r"\b(?:however|but|that said|nevertheless|instead|based on|here (?:is|are)|here['’]s|for example|(?<!else )i can|i could|if i|generally"
    r"|typically|some|you can|you could|let me|would be)\b|\n\s*(?:[-*•]|\d+[.)])|```",
    re.IGNORECASE,
)

# Words after which no sentence of a long answer ends. Not "in", "on", "to", "with", "for": "what it is for" is a good ending.
ARTICLES = {"a", "an", "the", "every", "such", "your", "our", "their", "its"}
CONJUNCTIONS = {"and", "or", "nor", "but", "because", "although", "whereas", "if", "than", "as", "which"}
OPEN_WORDS = ARTICLES | CONJUNCTIONS | {"of", "into", "by", "is", "are", "was", "were", "has", "have"}
# A comma after several words of a line, so neither "Sincerely," nor "Best regards,"; or what opens a bracket or a quotation.
OPEN_SIGN = re.compile(r"[^\s,.]+[ \t]+[^\s,.]+[ \t]+[^\s,.]+,\Z|[(\[“‘«]\Z")
LAST_WORD = re.compile(r"(?:\A|[\s(])([A-Za-z]+)\Z")
CODE = re.compile(r"```|^(?: {4}|\t)|[{};=]\s*$|</\w+>", re.MULTILINE)


def drop(row: Row, config: InstructionConfig) -> Drop | None:
    """Why a clean conversation is not kept, or None; a text always stays. The rules are asked in the order of RULES."""
    if row.kind == "text":
        return None
    for switch, reason, rule in RULES:
        if getattr(config, switch) and (detail := rule(row, config)):
            return Drop(reason, detail)
    return None


# --- the order of turns -----------------------------------------------------------------------------------------------------------


def _broken_roles(row: Row, config: InstructionConfig) -> str | None:
    content = row.content
    if row.kind == "sft":
        return _fault(content["messages"])
    answers = [content[name] for name in ("chosen", "rejected", "completion") if name in content]
    return next((fault for answer in answers if (fault := _fault([*content["prompt"], *answer]))), None)


def _fault(messages: Sequence[Message]) -> str | None:
    """What is wrong with the order of turns, or None."""
    before = ""
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in NEXT[before]:
            return f"turn {number} is the {role}'s " + (f"after the {before}'s" if before else "and nobody asked")
        before = role
    return None if before == "assistant" else f"the last turn is the {before}'s"


# --- what an answer says ----------------------------------------------------------------------------------------------------------


def _placeholder(row: Row, config: InstructionConfig) -> str | None:
    found = next((answer for answer in row.answers() if len(answer) < 40 and PLACEHOLDER.fullmatch(answer.strip())), None)
    return f"an answer is only {found.strip()[:20]!r}" if found else None


def _echo(row: Row, config: InstructionConfig) -> str | None:
    prompt = row.prompt()
    if len(prompt) < MIN_ECHO:
        return None
    for answer in row.answers():
        if _repeats(answer, prompt):
            return "an answer only repeats the question"
    return None


def _repeats(answer: str, prompt: str) -> bool:
    """Whether an answer is the question, once or several times, but for case and signs."""
    opening = prompt[:1].casefold()
    if (
        len(answer) < MIN_ECHO
        or len(answer) < len(prompt) // 2
        or (opening.isalnum() and answer.lstrip("\"'“‘*_ ")[:1].casefold() != opening)
    ):
        return False
    said, asked = (NOT_WORDS.sub(" ", text.casefold()).strip() for text in (answer, prompt))
    times = (len(said) + 1) // (len(asked) + 1) if asked else 0
    return times > 0 and said == " ".join([asked] * times)


def _refusal(row: Row, config: InstructionConfig) -> str | None:
    """Refusals in supervised rows without tools: what no tool can do is what rows with tools teach."""
    if row.kind != "sft" or row.content.get("tools") or any(m["role"] == "tool" for m in row.content["messages"]):
        return None
    answers = row.answers()
    refused = sum(_refuses(answer, config.max_refusal_characters) for answer in answers)
    return f"{refused} of {len(answers)} answers refuse by rote" if refused and 2 * refused >= len(answers) else None


def _refuses(answer: str, longest: int) -> bool:
    found = REFUSAL.match(answer) if len(answer) <= longest else None
    return found is not None and not HELPS.search(answer, found.end())


# --- answers that break off -------------------------------------------------------------------------------------------------------


def _cut(row: Row, config: InstructionConfig) -> str | None:
    """Whether the answer to learn (of a pair, the chosen one) breaks off."""
    answers = row.answers()
    answer = answers[0 if row.kind == "preference" else -1].rstrip() if answers else ""
    return _breaks_off(answer) if len(answer) >= config.min_cut_characters else None


def _breaks_off(answer: str) -> str | None:
    """Why an answer seems to break off, or None: signs after which something must come."""
    if answer.count("```") % 2:  # a fence too many may also be a slip: then the answer ends like others do
        return None if answer.endswith((".", "!", "?", ":", "`")) else "an answer ends within a code block"
    end = answer[-80:]
    word = LAST_WORD.search(end)
    if word and word[1] in OPEN_WORDS:
        what = f"an answer ends with the word {word[1]!r}"
    elif OPEN_SIGN.search(end):
        what = f"an answer ends with {answer[-1]!r}"
    else:
        return None
    return None if CODE.search(answer) else what


# By switch: the reason and its rule.
RULES: tuple[tuple[str, str, Callable[[Row, InstructionConfig], str | None]], ...] = (
    ("broken_roles", "broken_roles", _broken_roles),
    ("placeholders", "empty_answer", _placeholder),
    ("echoes", "echoed_answer", _echo),
    ("refusals", "boilerplate_refusal", _refusal),
    ("cut_answers", "cut_answer", _cut),
)
