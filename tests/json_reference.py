"""The keys in docs/reference/json.md, compared with the JSON that commands print."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "json.md"
HEADING = re.compile(r"^### (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(#([\w-]+)\)")
# Types of a row that stands for all keys inside its key.
WHOLE_TYPE = re.compile(r"as |list$|(list of (\w+ )?)?objects?\b")


@dataclass
class Section:
    """The documented keys of one command.

    Attributes:
        keys: segments of each key; a segment in capital letters stands for any key.
        whole: those keys that stand for all keys inside them.
        links: anchors of the sections whose keys the object has too.
    """

    keys: list[tuple[str, ...]] = field(default_factory=list)
    whole: list[tuple[str, ...]] = field(default_factory=list)
    links: list[str] = field(default_factory=list)


def find_undocumented_keys(arguments: Sequence[object], result: object) -> list[str]:
    """Return the keys of a command's result that its section does not list.

    Args:
        arguments: arguments of `tuneline`, without the program.
        result: the object that the command printed.
    """
    sections = read_sections()
    heading = find_heading([str(argument) for argument in arguments])
    if heading is None:
        return [f"no section of {PAGE.name} is about tuneline {' '.join(map(str, arguments[:2]))}"]
    linked = _follow_links(heading, set()) - {heading}
    others = [sections[other] for other in linked]
    # An object can have the keys of an entry of another object's list, and each entry of its list those of another object.
    entries = [Section([key[2:] for key in each.keys], [key[2:] for key in each.whole]) for each in others]
    return sorted(
        ".".join(path).replace(".[]", "[]")
        for path in set(_flatten(result))
        if not any(_lists(each, path) for each in (sections[heading], *others, *entries))
        and not any(_lists(each, path[2:]) for each in others if path[1:2] == ("[]",))
    )


@cache
def read_sections() -> dict[str, Section]:
    """Return the sections by their heading, such as "`tuneline promote`, `tuneline rollback`"."""
    _, *parts = HEADING.split(PAGE.read_text(encoding="utf-8"))
    return {heading: _read_section(text) for heading, text in zip(parts[::2], parts[1::2], strict=True)}


def _read_section(text: str) -> Section:
    section = Section()
    for line in text.splitlines():
        if not line.startswith("| `") or line.count(" | ") < 2:
            section.links += [] if line.startswith("|") else LINK.findall(line)
            continue
        names, type_, meaning = (cell.strip() for cell in line.strip("| ").split(" | ", 2))
        keys = [_split(key) for key in re.findall(r"`([^`]+)`", names)]
        if "same keys" in meaning:
            keys += [_split(key) for key in re.findall(r"`([\w.\[\]]+)`", meaning)]
        section.keys += keys
        if WHOLE_TYPE.match(type_) or "same keys" in meaning:
            section.whole += keys
    return section


def find_heading(arguments: list[str]) -> str | None:
    """Return the heading of the section about a command: the one that repeats most of its arguments."""
    best, best_words = None, 0
    names_run = len(arguments) > 1 and not arguments[1].startswith("-")
    for heading in read_sections():
        for name in re.findall(r"`tuneline ([^`]+)`", heading):
            words = name.split()
            subcommands = [word for word in words if re.match(r"[a-z]", word) and word != "gguf"]
            rest = [word for word in words if word not in subcommands]
            has_rest = all(word in arguments or (word == "RUN" and names_run) for word in rest)
            if arguments[: len(subcommands)] == subcommands and has_rest and len(words) > best_words:
                best, best_words = heading, len(words)
    return best


def _follow_links(heading: str, visited: set[str]) -> set[str]:
    """Return the headings of a section and of those to which its sentences link, directly or through others."""
    visited.add(heading)
    for other in read_sections():
        if _build_anchor(other) in read_sections()[heading].links and other not in visited:
            _follow_links(other, visited)
    return visited


def _build_anchor(heading: str) -> str:
    """Return the anchor that the documentation site gives a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _split(key: str) -> tuple[str, ...]:
    return tuple(part for name in key.split(".") for part in name.replace("[]", ".[]").split(".") if part)


def _flatten(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flatten(item, (*path, str(key)))
    elif isinstance(value, list) and value:
        for item in value:
            yield from _flatten(item, (*path, "[]"))
    else:
        yield path


def _lists(section: Section, path: tuple[str, ...]) -> bool:
    return any(_matches(key, path) for key in section.keys) or any(
        _matches(key, path[: len(key)]) for key in section.whole
    )


def _matches(key: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Compare a documented key with a key of the result; a list of values needs no `[]`, and an empty object no inner keys."""
    path = path[:-1] if path[-1:] == ("[]",) and len(path) > len(key) else path
    return len(key) >= len(path) and all(
        mine == theirs or (mine.isupper() and mine != "[]") for mine, theirs in zip(key, path, strict=False)
    )
