"""The demo dataset: questions about the Python standard library, answered by the documentation strings on this machine.

    python -m data.python_docs -o python_docs.jsonl

Sources are parsed, never imported; only the C-implemented modules of COMPILED, which have no source here and whose import does nothing
but load them, are read from memory. The same Python gives the same bytes, whatever the folder, locale or hash seed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import inspect
import json
import os
import platform
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.errors import InputError

# Not the language's own library, not written for its users, or packaged apart by some distributions of the same Python.
SKIPPED = {
    *("__phello__", "__pycache__", "_distutils_hack", "_distutils_system_mod.py", "dist-packages", "distutils", "ensurepip", "idlelib"),
    *(
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "sitecustomize.py",
        "test",
        "tests",
        "tkinter",
        "turtle.py",
        "turtledemo",
        "usercustomize.py",
    ),
}
COMPILED = (
    *(
        "_bisect",
        "_collections",
        "_csv",
        "_datetime",
        "_decimal",
        "_functools",
        "_heapq",
        "_io",
        "_json",
        "_operator",
        "_random",
        "_struct",
    ),
    *("_thread", "_weakref", "array", "binascii", "builtins", "cmath", "gc", "itertools", "math", "time", "unicodedata", "zlib"),
)
LONGEST = 1200  # characters of an answer: 96% of the rows then fit 256 tokens of SmolLM2's, question and template included
SHORTEST = 2  # words of an answer

QUESTIONS = {
    "function": (
        "What does the Python function `{shown}` do?",
        "Explain Python's `{shown}`.",
        "I found a call of `{name}` in a Python program. What does `{shown}` do?",
        "Describe the standard library function `{shown}`.",
    ),
    "method": (
        "What does the Python method `{shown}` do?",
        "Explain the method `{shown}` of Python's standard library.",
        "What happens when I call the method `{shown}` in Python?",
        "Document the Python method `{shown}`.",
    ),
    "class": (
        "What is the Python class `{shown}` for?",
        "Describe the class `{shown}` of Python's standard library.",
        "When would I use Python's `{shown}` class?",
        "Explain the Python class `{shown}`.",
    ),
    "module": (
        "What is Python's `{shown}` module for?",
        "Describe the standard library module `{shown}`.",
        "What can I do with the Python module `{shown}`?",
    ),
}


@dataclass(frozen=True)
class Documented:
    """Something with a documentation string: what it is, its bare name, its signature with brackets, and where it stands."""

    kind: str
    name: str
    signature: str
    doc: str
    place: str


def build(output: Path) -> int:
    """Write the dataset as JSON lines and return the number of rows.

    A row is {"messages": [user, assistant], "source": "python-<version>/json/decoder.py:JSONDecoder.decode"}. The file appears by
    rename, whole or not at all. Raises InputError where this Python carries no library sources.
    """
    rows = list(_rows())
    if not rows:
        raise InputError(
            f"this Python has no readable library sources in {_library()}",
            hint="Use a Python that is installed with its .py files, or your own data: data_curation.sources.",
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="\n")
    temporary.replace(output)
    return len(rows)


def _rows() -> Iterator[dict[str, Any]]:
    release = f"python-{platform.python_version()}"
    for found in [*_parsed(_library()), *_loaded()]:
        answer = shorten(found.doc)
        if len(answer.split()) < SHORTEST or not _is_text(answer + found.signature):
            continue
        messages = [{"role": "user", "content": question(found)}, {"role": "assistant", "content": answer}]
        yield {"messages": messages, "source": f"{release}/{found.place}"}


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _is_text(text: str) -> bool:
    """False for the few strings that hold lone surrogates, which no UTF-8 file can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def question(found: Documented) -> str:
    """A user's question from kind, bare name and signature: equal ones are asked alike, so what is documented twice is there twice."""
    shown = found.name + found.signature
    phrasings = QUESTIONS[found.kind]
    choice = int.from_bytes(hashlib.sha256(f"{found.kind} {shown}".encode()).digest()[:4], "big") % len(phrasings)
    return phrasings[choice].format(name=found.name, shown=shown)


def shorten(doc: str, longest: int = LONGEST) -> str:
    """The first paragraphs of a documentation string that fit, or the first lines of a paragraph that does not."""
    text = inspect.cleandoc(doc).strip()
    if len(text) <= longest:
        return text
    for separator in ("\n\n", "\n"):
        if cut := text.rfind(separator, 0, longest + 1) + 1:
            return text[: cut - 1].rstrip()
    return ""


def _parsed(library: Path) -> Iterator[Documented]:
    """What the library's sources document, in the order of their paths and then of the source."""
    for path in sorted(library.rglob("*.py"), key=lambda p: p.relative_to(library).as_posix()):
        relative = path.relative_to(library)
        if SKIPPED.intersection(relative.parts) or relative.parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, OSError):
            continue
        if doc := ast.get_docstring(tree):
            yield Documented("module", _module_name(relative), "", doc, relative.as_posix())
        yield from _definitions(tree.body, relative.as_posix(), ())


def _module_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _definitions(body: list[ast.stmt], place: str, within: tuple[str, ...]) -> Iterator[Documented]:
    """Public functions, classes and methods, also those defined under a condition; not what is local to a function."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _definitions([*node.body, *node.orelse], place, within)
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not _is_public(node.name):
            continue
        path = (*within, node.name)
        is_class = isinstance(node, ast.ClassDef)
        if doc := ast.get_docstring(node):
            kind = "class" if is_class else "method" if within else "function"
            yield Documented(kind, node.name, _signature(node), doc, f"{place}:{'.'.join(path)}")
        if is_class:
            yield from _definitions(node.body, place, path)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        return f"({', '.join(ast.unparse(base) for base in node.bases)})" if node.bases else ""
    return f"({ast.unparse(node.args)})"


def _loaded() -> Iterator[Documented]:
    """What the modules written in C document, in alphabetical order."""
    for name in COMPILED:
        try:
            module = importlib.import_module(name)
        except ImportError:  # an optional module that this Python was built without
            continue
        for attribute, value in sorted(vars(module).items()):
            if not _is_public(attribute) or not isinstance(value, types.BuiltinFunctionType | type):
                continue
            if isinstance(value, type):
                yield from _type(value, attribute, name)
            elif value.__doc__ and not attribute.startswith("__"):
                yield Documented("function", attribute, _text_signature(value), value.__doc__, f"{name}:{attribute}")


def _type(value: type, name: str, module: str) -> Iterator[Documented]:
    if value.__module__ not in (module, module.lstrip("_"), "builtins") or value.__name__ != name or value.__flags__ & 1 << 9:
        return  # another module's type, an alias, or a class made by Python code, whose source was parsed
    if isinstance(value.__doc__, str):
        yield Documented("class", name, _text_signature(value), value.__doc__, f"{module}:{name}")
    for attribute, member in sorted(vars(value).items()):
        doc = getattr(member, "__doc__", None)
        if _is_public(attribute) and isinstance(doc, str) and callable(getattr(value, attribute, None)) and attribute != "__class__":
            yield Documented("method", attribute, _text_signature(member), doc, f"{module}:{name}.{attribute}")


def _text_signature(value: Any) -> str:
    """The signature a C function carries as text, written as one would in Python."""
    text = getattr(value, "__text_signature__", None)
    if not isinstance(text, str):
        return ""
    for receiver in ("$module", "$self", "$cls", "$type"):
        text = text.replace(f"({receiver}, ", "(").replace(f"({receiver})", "()")
    return text.replace("(/, ", "(").replace("(/)", "()").replace("$", "")


def main() -> None:
    """Write the dataset to the file given with -o and say how many rows it has."""
    parser = argparse.ArgumentParser(prog="python -m data.python_docs", description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the JSONL file to write")
    output = parser.parse_args().output
    print(f"{build(output):,} rows in {output}")


if __name__ == "__main__":
    main()
