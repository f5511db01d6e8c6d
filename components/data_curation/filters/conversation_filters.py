"""Filters for conversations: broken turn order, and answers that are placeholders, echoes, refusals or truncated."""

from __future__ import annotations

import re
from collections.abc import Sequence

from components.common.runtime.counts import format_count
from components.data_curation.config import InstructionConfig
from components.data_curation.filters.filter_family import FilterFamily
from components.data_curation.filters.measured_row import MeasuredRow
from components.data_curation.filters.reject_reasons import SIZE_GROUP
from components.data_curation.rows import Message

# Roles that may follow each role; "" is the beginning. A tool turn follows an assistant's call; several
# calls have several results.
ALLOWED_NEXT_ROLES = {
    "": {"system", "user"},
    "system": {"user"},
    "user": {"assistant"},
    "assistant": {"user", "tool"},
    "tool": {"tool", "assistant"},
}
# Placeholders in published datasets: Alpaca's marker, an empty cell written by pandas, dots.
PLACEHOLDER_ANSWER = re.compile(r"<?\[?no[ _]?output\]?>?\.?|(?-i:nan)|[\s.…_]+", re.IGNORECASE)
MAX_PLACEHOLDER_CHARACTERS = 39
MIN_ECHO_CHARACTERS = 20  # shorter answers may equal the question: a greeting, a word to repeat
NOT_WORDS = re.compile(r"[\W_]+")

# A boilerplate refusal: the first sentence mentions the model and something that it cannot do, or is a stock phrase.
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
REFUSAL_PATTERN = re.compile(rf"{_APOLOGY}(?:{_SELF}[^.!?\n]{{0,80}}?\bi?\b ?{_CANNOT}|{_STOCK})", re.IGNORECASE)
# Phrases that introduce an answer despite the refusal.
HELP_PATTERN = re.compile(
    r"\b(?:however|but|that said|nevertheless|instead|based on|here (?:is|are)|here['’]s|for example|(?<!else )i can|i could|if i|generally"
    r"|typically|some|you can|you could|let me|would be)\b|\n\s*(?:[-*•]|\d+[.)])|```",
    re.IGNORECASE,
)

# Words that do not end a sentence. "in", "on", "to", "with" and "for" may: "what it is for" is complete.
ARTICLES = {"a", "an", "the", "every", "such", "your", "our", "their", "its"}
CONJUNCTIONS = {"and", "or", "nor", "but", "because", "although", "whereas", "if", "than", "as", "which"}
OPEN_WORDS = ARTICLES | CONJUNCTIONS | {"of", "into", "by", "is", "are", "was", "were", "has", "have"}
# A comma after three words of a line (so not "Sincerely," or "Best regards,"), or an opening bracket or quotation mark.
OPEN_ENDING = re.compile(r"[^\s,.]+[ \t]+[^\s,.]+[ \t]+[^\s,.]+,\Z|[(\[“‘«]\Z")
LAST_WORD = re.compile(r"(?:\A|[\s(])([A-Za-z]+)\Z")
CODE_PATTERN = re.compile(r"```|^(?: {4}|\t)|[{};=]\s*$|</\w+>", re.MULTILINE)


CONVERSATION_FILTERS = FilterFamily[InstructionConfig](
    "conversations", lambda config: config.instructions, lambda row, config: row.row.kind != "text"
)


@CONVERSATION_FILTERS.register("broken_roles", "broken_roles")
def reject_broken_roles(row: MeasuredRow, config: InstructionConfig) -> str | None:
    """Reject conversations whose turns are out of order."""
    content = row.row.content
    if row.row.kind == "sft":
        return _find_turn_fault(content["messages"])
    answers = [content[name] for name in ("chosen", "rejected", "completion") if name in content]
    faults = (_find_turn_fault([*content["prompt"], *answer]) for answer in answers)
    return next((fault for fault in faults if fault), None)


def _find_turn_fault(messages: Sequence[Message]) -> str | None:
    before = ""
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in ALLOWED_NEXT_ROLES[before]:
            return f"turn {number} has the role {role}; expected {' or '.join(sorted(ALLOWED_NEXT_ROLES[before]))}"
        before = role
    return None if before == "assistant" else f"the last turn has the role {before}; expected assistant"


@CONVERSATION_FILTERS.register("empty_answer", "placeholders", group=SIZE_GROUP)
def reject_placeholder_answer(row: MeasuredRow, config: InstructionConfig) -> str | None:
    """Reject answers that only mark a missing answer."""
    for answer in row.answers:
        if len(answer) <= MAX_PLACEHOLDER_CHARACTERS and PLACEHOLDER_ANSWER.fullmatch(answer.strip()):
            return f"an answer consists only of {answer.strip()[:20]!r}"
    return None


@CONVERSATION_FILTERS.register("echoed_answer", "echoes")
def reject_echoed_answer(row: MeasuredRow, config: InstructionConfig) -> str | None:
    """Reject answers that only repeat the question."""
    if len(row.prompt) < MIN_ECHO_CHARACTERS:
        return None
    opening = row.prompt[:1].casefold()
    for answer in row.answers:
        if len(answer) < max(MIN_ECHO_CHARACTERS, len(row.prompt) // 2):
            continue
        if opening.isalnum() and answer.lstrip("\"'“‘*_ ")[:1].casefold() != opening:
            continue
        # The answer may be the question several times. Case and punctuation are ignored.
        reply, question = (NOT_WORDS.sub(" ", text.casefold()).strip() for text in (answer, row.prompt))
        times = (len(reply) + 1) // (len(question) + 1) if question else 0
        if times and reply == " ".join([question] * times):
            return "an answer only repeats the question"
    return None


@CONVERSATION_FILTERS.register("boilerplate_refusal", "refusals")
def reject_boilerplate_refusal(row: MeasuredRow, config: InstructionConfig) -> str | None:
    """Reject supervised rows whose answers are mostly refusals. Rows with tools teach limits of tools and are kept."""
    content = row.row.content
    if row.row.kind != "sft" or content.get("tools") or any(m["role"] == "tool" for m in content["messages"]):
        return None
    refusals = 0
    for answer in row.answers:
        match = REFUSAL_PATTERN.match(answer) if len(answer) <= config.max_refusal_characters else None
        refusals += match is not None and not HELP_PATTERN.search(answer, match.end())
    if not refusals or 2 * refusals < len(row.answers):
        return None
    return f"boilerplate refusals in {refusals} of {format_count(len(row.answers), 'answer')}"


@CONVERSATION_FILTERS.register("cut_answer", "cut_answers")
def reject_cut_answer(row: MeasuredRow, config: InstructionConfig) -> str | None:
    """Reject rows whose last answer (of a pair, the chosen answer) is truncated."""
    answer = row.answers[0 if row.row.kind == "preference" else -1].rstrip() if row.answers else ""
    if len(answer) < config.min_cut_characters:
        return None
    if answer.count("```") % 2:  # a complete ending shows that the extra fence is a mistake
        return None if answer.endswith((".", "!", "?", ":", "`")) else "an answer ends in an open code block"
    end = answer[-80:]
    word = LAST_WORD.search(end)
    if word and word[1] in OPEN_WORDS:
        detail = f"an answer ends with the word {word[1]!r}"
    elif OPEN_ENDING.search(end):
        detail = f"an answer ends with {answer[-1]!r}"
    else:
        return None
    return None if CODE_PATTERN.search(answer) else detail
