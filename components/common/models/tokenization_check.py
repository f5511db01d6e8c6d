"""Check that a model's chat template and tokenizer end in bounded time and memory.

Both come with the model and are programs: a template has loops, and a tokenizer has regular expressions. Neither can be
interrupted from Python, so a child process with limits runs them on short conversations and on long repetitive texts.
"""

# The check takes about 0.3 seconds. It finds templates and tokenizers that always, or for such texts, take too much; it
# cannot detect ones that exceed the limits only for specific rows.

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

from components.common.artifacts import hashing
from components.common.models.standalone_tokenizer import ChatTemplate, load_tokenizer
from components.common.runtime import process_control
from components.common.runtime.errors import ConfigurationError

CPU_SECONDS = 30  # a large tokenizer.json (34 MB) loads in 1 second
MEMORY_BYTES = 2 << 30  # address space; a large tokenizer.json needs 0.5 GiB
MAX_RENDERED_CHARACTERS = 1_000_000  # of a conversation of 200 characters
RUN_CHARACTERS = 10_000
# Long runs make the backtracking of a regular expression visible. "!" ends a run, so that a match of the whole text fails.
RUNS = ("a", "A", "0", " ", "\n", "\t", "-", "'", "é", "中", "aB", "a ", "1,", " \n")
TURNS = (("system", "Be brief."), ("user", "What is 2 + 2?"), ("assistant", "It is 4."), ("user", "And 3 + 3?"))
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


TOKENIZATION_FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
_passed_checks: set[tuple[str, int]] = set()  # digest of the files, limit


class _LimitError(Exception):
    """A text is too long, or the tokenizer gave up."""


def check_tokenization(folder: Path, uri: str, cpu_seconds: int = CPU_SECONDS) -> None:
    """Run the chat templates and the tokenizer of a model in a child process with limits.

    A template that rejects a conversation and a damaged file are not reported here: rows and loading report them.
    A process checks equal files once.

    Args:
        folder: Folder of the model.
        uri: Source of the model, for the message.
        cpu_seconds: Limit of the child's CPU time.

    Raises:
        ConfigurationError: the limits of time, memory or rendered text are exceeded, or the tokenizer fails.
    """
    check = (_digest_files(folder), cpu_seconds)
    if check in _passed_checks:
        return
    command = process_control.build_module_command(__name__, str(folder), str(cpu_seconds))
    environment = process_control.build_python_environment(TOKENIZERS_PARALLELISM="false", RUST_BACKTRACE="0")
    child = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if child.returncode == 0:
        if check[0]:
            _passed_checks.add(check)
        return
    part, _, problem = child.stdout.strip().rpartition("\n")[2].partition(": ")
    lines = child.stderr.strip().splitlines()
    if child.returncode == -signal.SIGXCPU:
        text = "short conversations" if part == "chat template" else f"texts of {RUN_CHARACTERS:,} characters"
        problem = f"takes more than {cpu_seconds} seconds for {text}"
    elif not problem:
        reason = (lines or ["no message"])[0 if child.returncode < 0 else -1]  # a signal, or a Python traceback
        problem = f"ends the process with code {child.returncode}: {reason[:300]}"
    raise ConfigurationError(
        f"fine_tuning.base_model: the {part or 'tokenizer'} of {uri} {problem}",
        hint="Correct the template or tokenizer.json, or choose another model.",
    )


def _digest_files(folder: Path) -> str:
    """Return the digest of the files that templates and tokenizer are loaded from, or "" if one cannot be read."""
    paths = [folder / name for name in TOKENIZATION_FILES]
    paths += folder.glob("additional_chat_templates/*.jinja")
    try:
        files = [(path.relative_to(folder).as_posix(), hashing.sha256_file(path)) for path in paths if path.is_file()]
    except OSError:
        return ""
    return hashing.content_sha256(files)


def main(folder: Path, cpu_seconds: int) -> int:
    """Render and tokenize under limits, and return the exit code; print the part that runs, and its problem."""
    limits = {resource.RLIMIT_CPU: cpu_seconds, resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_CORE: 0}
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    for part, run in (("chat template", _render_conversations), ("tokenizer", _tokenize_runs)):
        print(part, flush=True)
        try:
            run(folder)
        except MemoryError:
            print(f"{part}: needs more than {MEMORY_BYTES >> 30} GiB of memory")
            return 1
        except (OSError, ValueError):  # a damaged file
            continue
        except _LimitError as error:
            print(f"{part}: {' '.join(str(error).split())[:300]}")
            return 1
    return 0


def _render_conversations(folder: Path) -> None:
    """Render a conversation with each chat template, with and without system message, tools and prompt."""
    template = ChatTemplate.load(folder)
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in TURNS]
    for render, first, tools, prompt in product(template.templates.values(), (0, 1), (None, [TOOL]), (False, True)):
        values = {"messages": messages[first:], "tools": tools, "documents": None, "add_generation_prompt": prompt}
        try:
            text = render(**values, **template.tokens)
        except MemoryError:
            raise
        except Exception:  # noqa: S112 - rejects this conversation
            continue
        if len(text) > MAX_RENDERED_CHARACTERS:
            raise _LimitError(f"renders a short conversation as {len(text):,} characters")


def _tokenize_runs(folder: Path) -> None:
    if not (folder / "tokenizer.json").is_file():
        return
    tokenizer = load_tokenizer(folder)
    for run in RUNS:
        text = run * (RUN_CHARACTERS // len(run)) + "!"
        try:
            tokenizer.encode(text, add_special_tokens=False)
        except BaseException as error:  # PanicException, for example at the limit of backtracking steps
            raise _LimitError(
                f"fails for a text of {RUN_CHARACTERS:,} characters that repeats {run!r}: {error}"
            ) from None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
