"""Chat templates and tokenizers that do not end, or fill the memory, are refused (fast tier: a tiny model)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from components.common.models import model_loading, tokenization_check
from components.common.models.tokenization_check import check_tokenization
from components.common.runtime.errors import ConfigurationError
from tests.tiny import CHATML, tiny_model

NESTED_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("original") / "tiny")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (NESTED_LOOPS, "takes more than 1 seconds for short conversations"),
        ("{{ 'a' * 10**10 }}", "needs more than 2 GiB of memory"),
        ("{{ 'a' * 10**7 }}", "renders a short conversation as 10,000,000 characters"),
    ],
    ids=["time", "memory", "length"],
)
@pytest.mark.parametrize("file", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_template_beyond_a_limit_is_refused(folder: Path, file: str, template: str, problem: str) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(template)
    with pytest.raises(ConfigurationError, match=f"the chat template of mine {problem}"):
        check_tokenization(folder, "mine", cpu_seconds=1)


@pytest.mark.parametrize(
    ("kind", "pattern", "problem"),
    [
        ("pre_tokenizer", "^(a+)+$", "fails for a text of 10,000 characters that repeats 'a': Onig: .* retry-limit"),
        ("normalizer", "a", "ends the process with code -6: memory allocation"),
    ],
    ids=["catastrophic backtracking", "replacement"],
)
def test_tokenizer_beyond_a_limit_is_refused(folder: Path, kind: str, pattern: str, problem: str) -> None:
    path = folder / "tokenizer.json"
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    if kind == "normalizer":
        step = {"type": "Replace", "pattern": {"Regex": pattern}, "content": "b" * 1_000_000}
    path.write_text(json.dumps({**json.loads(path.read_text()), kind: step}))
    with pytest.raises(ConfigurationError, match=f"the tokenizer of mine {problem}"):
        check_tokenization(folder, "mine")


@pytest.mark.parametrize("template", [CHATML, "{{ raise_exception('no system messages') }}", "{{ 1 / 0 }}", "{% if %}"])
def test_template_that_ends_is_not_refused(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    check_tokenization(folder, "mine")


def test_equal_files_are_checked_once_and_changed_ones_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    check_tokenization(folder, "mine")
    with monkeypatch.context() as patch:
        patch.setattr(tokenization_check.subprocess, "run", lambda *_, **__: pytest.fail("checked again"))
        check_tokenization(Path(shutil.copytree(folder, folder.with_name("copy"))), "copy")
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        changed = Path(shutil.copytree(folder, folder.with_name(f"changed-{Path(name).stem}")))
        (changed / name).parent.mkdir(exist_ok=True)
        (changed / name).write_text("{{ 'a' * 10**7 }}")
        with pytest.raises(ConfigurationError, match="renders a short conversation"):
            check_tokenization(changed, "mine")


def test_hostile_template_is_refused_wherever_a_base_model_enters(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ 'a' * 10**7 }}")
    with pytest.raises(ConfigurationError, match="renders a short conversation"):
        model_loading.check_base_model(model_loading.resolve_base_model(str(folder)))
    with pytest.raises(ConfigurationError, match="renders a short conversation"):
        model_loading.open_model(folder)


@pytest.mark.parametrize(
    ("name", "limit"), [("chat_template.jinja", 10**6), ("tokenizer_config.json", 10**7), ("tokenizer.json", 10**8)]
)
def test_large_file_is_refused_before_it_is_read(folder: Path, name: str, limit: int) -> None:
    with (folder / name).open("r+b") as file:
        file.truncate(limit + 1)
    with pytest.raises(ConfigurationError, match=f"{name} of .* has {limit + 1:,} bytes; expected at most {limit:,}"):
        model_loading.resolve_base_model(str(folder))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_deeply_nested_json_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text('{"a":' * 100_000)
    with pytest.raises(ConfigurationError):
        model_loading.check_base_model(model_loading.resolve_base_model(str(folder)))
