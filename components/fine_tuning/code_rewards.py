"""Reward for Python code that passes the unit tests of its row, in the format of HumanEval (Chen et al., arXiv 2107.03374)."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from components.common.artifacts import hashing
from components.common.runtime import code_sandbox, cpu_cores
from components.common.runtime.code_sandbox import Program
from components.fine_tuning import score_files

DEFAULT_CPU_SECONDS, DEFAULT_MEMORY_MB = 10, 512
VERDICTS_PREFIX = "verdicts-"  # of the files with the verdicts of each process
CODE_BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
PYTHON_LABELS = ("", "py", "python", "python3")


def check_tests(fields: Mapping[str, Any]) -> None:
    """Check the fields test and entry_point of a row.

    Raises:
        ValueError: a field is missing or invalid. The message begins with a verb.
    """
    test, entry_point = fields.get("test"), fields.get("entry_point", "")
    if not isinstance(test, str) or not test.strip():
        raise ValueError(f"has {test!r:.60} in test; expected Python code")
    try:
        statements = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"has no valid Python code in test: {error}") from None
    is_name = isinstance(entry_point, str) and entry_point.isidentifier() and not keyword.iskeyword(entry_point)
    if not is_name and entry_point != "":
        raise ValueError(f"has {entry_point!r:.60} in entry_point; expected the name of a function")
    defined = {statement.name for statement in statements if isinstance(statement, ast.FunctionDef)}
    if entry_point and "check" not in defined:
        raise ValueError("has an entry_point, and test does not define check(candidate)")


def extract_code(answer: str, entry_point: str) -> str:
    """Return the first Python code block of an answer that defines the tested function, or the first, or the answer."""
    blocks = [code for label, code in CODE_BLOCK.findall(answer) if label.lower() in PYTHON_LABELS]
    return next((code for code in blocks if entry_point in _list_functions(code)), blocks[0] if blocks else answer)


def build_program(question: str, answer: str, entry_point: str) -> str:
    """Return the code of an answer. If the question begins the function, as in HumanEval, the answer may continue it."""
    code = extract_code(answer, entry_point)
    return f"{question.rstrip()}\n{code}" if entry_point in _list_functions(question) else code


def _list_functions(code: str) -> set[str]:
    """Return the names of the functions that Python code defines; none for other text."""
    try:
        return {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()


def build_scorer(
    cpu_seconds: int | None, memory_mb: int | None, folder: Path | None
) -> Callable[[Sequence[tuple[str, str, Mapping[str, Any]]]], list[float]]:
    """Return a function that returns 1 for each answer that passes its tests, and 0 for others.

    Its argument has the question, the answer and the fields of each row. It raises InterruptedRunError if the isolation
    does not start.

    Args:
        cpu_seconds: Processor time of an answer and its tests. None: DEFAULT_CPU_SECONDS.
        memory_mb: Memory of an answer and its tests in MB. None: DEFAULT_MEMORY_MB.
        folder: Folder of the training's state, with the verdicts so far: the result of an answer may depend on the time.
            None: none are stored.
    """
    known: dict[str, bool] = {}
    for line in score_files.read_all(folder, VERDICTS_PREFIX) if folder else ():
        known.setdefault(line["key"], line["passed"])

    def score(answers: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[float]:
        programs = [
            Program(
                build_program(question, answer, fields.get("entry_point", "")),
                fields["test"],
                fields.get("entry_point", ""),
                cpu_seconds or DEFAULT_CPU_SECONDS,
                (memory_mb or DEFAULT_MEMORY_MB) * 10**6,
            )
            for question, answer, fields in answers
        ]
        keys = [hashing.digest(asdict(program)) for program in programs]
        unknown = {key: program for key, program in zip(keys, programs, strict=True) if key not in known}
        with ThreadPoolExecutor(cpu_cores.get_thread_count()) as pool:
            for key, passed in zip(unknown, pool.map(code_sandbox.passes_tests, unknown.values()), strict=True):
                known[key] = passed
                if folder:
                    values = {"key": key, "passed": passed}
                    score_files.append(score_files.get_own_file(folder, VERDICTS_PREFIX), values)
        return [float(known[key]) for key in keys]

    return score
