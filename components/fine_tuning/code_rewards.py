"""Reward for Python code that passes the unit tests of its row, in the format of HumanEval (Chen et al., arXiv 2107.03374)."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from components.common.runtime import code_sandbox, cpu_cores
from components.common.runtime.code_sandbox import Program

DEFAULT_CPU_SECONDS, DEFAULT_MEMORY_MB = 10, 512
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
    if not isinstance(entry_point, str) or not (entry_point.isidentifier() or not entry_point):
        raise ValueError(f"has {entry_point!r:.60} in entry_point; expected the name of a function")
    defined = {statement.name for statement in statements if isinstance(statement, ast.FunctionDef)}
    if entry_point and "check" not in defined:
        raise ValueError("has an entry_point, and test does not define check(candidate)")


def extract_code(answer: str) -> str:
    """Return the first Python code block of an answer; without one the whole answer."""
    blocks = [code for label, code in CODE_BLOCK.findall(answer) if label.lower() in PYTHON_LABELS]
    return blocks[0] if blocks else answer


def build_program(question: str, answer: str, entry_point: str) -> str:
    """Return the code of an answer. If the question begins the function, as in HumanEval, the answer may continue it."""
    code = extract_code(answer)
    try:
        begun = {node.name for node in ast.parse(question).body if isinstance(node, ast.FunctionDef)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        begun = set()
    return f"{question.rstrip()}\n{code}" if entry_point in begun else code


def score_code(
    answers: Sequence[tuple[str, str, Mapping[str, Any]]], cpu_seconds: int | None, memory_mb: int | None
) -> list[float]:
    """Return 1 for each answer that passes its tests, and 0 for others.

    Args:
        answers: Question, answer, and the fields of the row.
        cpu_seconds: Processor time of an answer and its tests. None: DEFAULT_CPU_SECONDS.
        memory_mb: Memory of an answer and its tests in MB. None: DEFAULT_MEMORY_MB.

    Raises:
        ConfigurationError: code cannot be isolated on this machine.
    """
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
    distinct = list(dict.fromkeys(programs))
    with ThreadPoolExecutor(cpu_cores.get_thread_count()) as pool:
        passed = dict(zip(distinct, pool.map(code_sandbox.passes_tests, distinct), strict=True))
    return [float(passed[program]) for program in programs]
