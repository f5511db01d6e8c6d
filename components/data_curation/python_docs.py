"""The demo dataset: questions about Python's standard library, answered by the documentation strings on this machine.

    python -m components.data_curation.python_docs -o python_docs.jsonl

Sources are parsed, never imported. Only the C modules of COMPILED, which have no sources here and whose import has no
side effects, are imported and inspected. The same Python gives the same bytes, whatever the folder, locale or hash
seed.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.runtime import filesystem
from components.common.runtime.errors import InputError

# Not the language's own library, not written for its users, or packaged apart by some distributions of the same Python.
SKIPPED = {
    "__phello__", "__pycache__", "_distutils_hack", "_distutils_system_mod.py", "dist-packages", "distutils",
    "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "sitecustomize.py", "test", "tests", "tkinter",
    "turtle.py", "turtledemo", "usercustomize.py",
}  # fmt: skip
COMPILED = (
    "_bisect", "_collections", "_csv", "_datetime", "_decimal", "_functools", "_heapq", "_io", "_json", "_operator",
    "_random", "_struct", "_thread", "_weakref", "array", "binascii", "builtins", "cmath", "gc", "itertools", "math",
    "time", "unicodedata", "zlib",
)  # fmt: skip
MAX_ANSWER_CHARACTERS = 1200  # 96% of the rows then fit 256 tokens of SmolLM2's, question and template included
MIN_ANSWER_WORDS = 2

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
class DocumentedObject:
    """A documented object: kind, bare name, signature with brackets, documentation string, and location."""

    kind: str
    name: str
    signature: str
    doc: str
    location: str


def build(output: Path) -> int:
    """Write the dataset as JSON lines and return the number of rows.

    A row is {"messages": [user, assistant], "source": "python-<version>/json/decoder.py:JSONDecoder.decode"}. The file
    appears by rename, complete or not at all.

    Raises:
        InputError: this Python has no library sources.
    """
    library, release = Path(sysconfig.get_path("stdlib")), f"python-{platform.python_version()}"
    lines = []
    for found in [*_parse_sources(library), *_inspect_compiled_modules()]:
        answer = shorten(found.doc)
        if len(answer.split()) < MIN_ANSWER_WORDS:
            continue
        messages = [{"role": "user", "content": build_question(found)}, {"role": "assistant", "content": answer}]
        row = {"messages": messages, "source": f"{release}/{found.location}"}
        with suppress(UnicodeEncodeError):  # the few strings with lone surrogates, which UTF-8 cannot represent
            lines.append((json.dumps(row, ensure_ascii=False) + "\n").encode())
    if not lines:
        raise InputError(
            f"this Python has no readable library sources in {library}",
            hint="Use a Python that is installed with its .py files, or your own data: data_curation.sources.",
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    temporary.write_bytes(b"".join(lines))
    filesystem.rename(temporary, output)
    return len(lines)


def build_question(found: DocumentedObject) -> str:
    """Return a user's question; objects of equal kind, name and signature have the same question."""
    shown = found.name + found.signature
    phrasings = QUESTIONS[found.kind]
    choice = int.from_bytes(hashlib.sha256(f"{found.kind} {shown}".encode()).digest()[:4], "big") % len(phrasings)
    return phrasings[choice].format(name=found.name, shown=shown)


def shorten(doc: str, max_characters: int = MAX_ANSWER_CHARACTERS) -> str:
    """Return the first paragraphs of a documentation string that fit, or else the first lines that fit."""
    text = inspect.cleandoc(doc).strip()
    if len(text) <= max_characters:
        return text
    for separator in ("\n\n", "\n"):
        if cut := text.rfind(separator, 0, max_characters + 1) + 1:
            return text[: cut - 1].rstrip()
    return ""


def _parse_sources(library: Path) -> Iterator[DocumentedObject]:
    """Yield the documented objects of the library's sources, in the order of their paths and then of the source."""
    for path in sorted(library.rglob("*.py"), key=lambda p: p.relative_to(library).as_posix()):
        relative = path.relative_to(library)
        if SKIPPED.intersection(relative.parts) or relative.parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, OSError):
            continue
        if doc := ast.get_docstring(tree):
            module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            yield DocumentedObject("module", module, "", doc, relative.as_posix())
        yield from _parse_definitions(tree.body, relative.as_posix(), ())


def _parse_definitions(body: list[ast.stmt], location: str, parents: tuple[str, ...]) -> Iterator[DocumentedObject]:
    """Yield public functions, classes and methods, also those under a condition; nothing local to a function."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _parse_definitions([*node.body, *node.orelse], location, parents)
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not _is_public(node.name):
            continue
        path = (*parents, node.name)
        if isinstance(node, ast.ClassDef):
            kind = "class"
            signature = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
        else:
            kind, signature = "method" if parents else "function", f"({ast.unparse(node.args)})"
        if doc := ast.get_docstring(node):
            yield DocumentedObject(kind, node.name, signature, doc, f"{location}:{'.'.join(path)}")
        if isinstance(node, ast.ClassDef):
            yield from _parse_definitions(node.body, location, path)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def _inspect_compiled_modules() -> Iterator[DocumentedObject]:
    """Yield the documented objects of the modules written in C, in alphabetical order."""
    for module_name in COMPILED:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # an optional module that this Python was built without
            continue
        own_modules = (module_name, module_name.lstrip("_"), "builtins")
        for name, value in sorted(vars(module).items()):
            if not _is_public(name):
                continue
            location = f"{module_name}:{name}"
            if isinstance(value, types.BuiltinFunctionType) and value.__doc__ and not name.startswith("__"):
                yield DocumentedObject("function", name, _text_signature(value), value.__doc__, location)
            # Not another module's type, an alias, or a class made by Python code, whose source was parsed.
            is_heap_type = isinstance(value, type) and value.__flags__ & 1 << 9
            if (
                isinstance(value, type)
                and not is_heap_type
                and value.__module__ in own_modules
                and value.__name__ == name
            ):
                yield from _inspect_type(value, location)


def _inspect_type(value: type, location: str) -> Iterator[DocumentedObject]:
    if isinstance(value.__doc__, str):
        yield DocumentedObject("class", value.__name__, _text_signature(value), value.__doc__, location)
    for name, member in sorted(vars(value).items()):
        doc, is_callable = getattr(member, "__doc__", None), callable(getattr(value, name, None))
        if _is_public(name) and isinstance(doc, str) and is_callable and name != "__class__":
            yield DocumentedObject("method", name, _text_signature(member), doc, f"{location}.{name}")


def _text_signature(value: Any) -> str:
    """Return the text signature of a C function in the syntax of Python."""
    text = getattr(value, "__text_signature__", None)
    if not isinstance(text, str):
        return ""
    for receiver in ("$module", "$self", "$cls", "$type"):
        text = text.replace(f"({receiver}, ", "(").replace(f"({receiver})", "()")
    return text.replace("(/, ", "(").replace("(/)", "()").replace("$", "")


def main() -> None:
    """Write the dataset to the file of -o and print the number of rows."""
    parser = argparse.ArgumentParser(
        prog="python -m components.data_curation.python_docs", description=__doc__.split("\n")[0]
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="JSONL file to write.")
    output = parser.parse_args().output
    print(f"{build(output):,} rows in {output}")


if __name__ == "__main__":
    main()
