"""The example dataset built from the documentation of the Python library.

The tests marked `long` build the dataset again.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from components.common.runtime.process_control import build_module_command, build_python_environment
from components.data_curation import python_docs
from components.data_curation.python_docs import MAX_ANSWER_CHARACTERS, DocumentedObject, build, build_question, shorten
from tests.lost_answers import lose_answers


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("docs") / "python_docs.jsonl"
    with lose_answers(path.parent) as lost:
        count = build(path)
    assert "rename" in lost
    assert count == len(path.read_text(encoding="utf-8").splitlines())
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_dataset_has_thousands_of_rows_and_exact_duplicates(rows):
    distinct = {json.dumps(row["messages"]) for row in rows}
    assert len(rows) > 4_000
    assert len(rows) - len(distinct) > 500


def test_rows_have_question_and_answer_of_limited_length(rows):
    for row in rows:
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
        assert 0 < len(row["messages"][1]["content"]) <= MAX_ANSWER_CHARACTERS


def test_sources_name_python_version_and_object(rows):
    sources = {row["source"] for row in rows}
    version = f"python-{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    assert {
        f"{version}/json/decoder.py:JSONDecoder.decode",
        f"{version}/math:sqrt",
        f"{version}/json/__init__.py",
    } <= sources


def test_answer_is_the_docstring(rows):
    import json.decoder

    answers = {row["source"].split("/", 1)[1]: row["messages"][1]["content"] for row in rows}
    assert (
        answers["json/decoder.py:JSONDecoder.raw_decode"].split() == json.decoder.JSONDecoder.raw_decode.__doc__.split()
    )


@pytest.mark.long
def test_output_is_independent_of_hash_seed_folder_and_locale(tmp_path):
    build(tmp_path / "here.jsonl")
    environment = build_python_environment(PYTHONHASHSEED="77", LC_ALL="C", LANG="C", PYTHONUTF8="0")
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(python_docs.__file__).parents[2]), environment.get("PYTHONPATH")])
    )
    command = build_module_command("components.data_curation.python_docs", "-o", str(tmp_path / "there.jsonl"))
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()


@pytest.mark.long
def test_build_leaves_no_temporary_files(tmp_path):
    build(tmp_path / "docs.jsonl")
    assert [p.name for p in tmp_path.iterdir()] == ["docs.jsonl"]


def test_equal_docstrings_yield_equal_questions():
    first = DocumentedObject("method", "close", "(self)", "Close the file.", "a.py:A.close")
    second = DocumentedObject("method", "close", "(self)", "Close the file.", "b.py:B.close")
    assert build_question(first) == build_question(second)
    assert "`close(self)`" in build_question(first)


def test_questions_use_four_phrasings():
    phrasings = Counter(
        build_question(DocumentedObject("function", f"name{i}", "()", "", "")).replace(f"name{i}", "name")
        for i in range(100)
    )
    assert len(phrasings) == 4


def test_long_docstring_is_cut_after_a_paragraph():
    paragraphs = ["one " * 20, "two " * 20, "three " * 20]
    assert shorten("\n\n".join(p.strip() for p in paragraphs), max_characters=200) == "\n\n".join(
        p.strip() for p in paragraphs[:2]
    )


def test_long_paragraph_is_cut_after_a_line():
    assert shorten("first line\nsecond line\nthird line", max_characters=24) == "first line\nsecond line"


def test_single_overlong_line_yields_no_answer():
    assert shorten("x" * 500, max_characters=100) == ""
