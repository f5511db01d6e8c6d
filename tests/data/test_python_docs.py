import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from components.common.process import module_command, python_environment
from data import python_docs
from data.python_docs import LONGEST, Documented, build, question, shorten


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("docs") / "python_docs.jsonl"
    assert build(path) == len(path.read_text(encoding="utf-8").splitlines())
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_dataset_has_thousands_of_rows_and_hundreds_of_exact_duplicates(rows):
    different = {json.dumps(row["messages"]) for row in rows}
    assert len(rows) > 4_000
    assert len(rows) - len(different) > 500


def test_every_row_is_a_question_and_an_answer_that_is_not_too_long(rows):
    for row in rows:
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
        assert 0 < len(row["messages"][1]["content"]) <= LONGEST


def test_sources_name_the_python_version_and_a_place_in_its_library(rows):
    sources = {row["source"] for row in rows}
    version = f"python-{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    assert {f"{version}/json/decoder.py:JSONDecoder.decode", f"{version}/math:sqrt", f"{version}/json/__init__.py"} <= sources


def test_an_answer_is_the_documentation_string_itself(rows):
    import json.decoder

    answers = {row["source"].split("/", 1)[1]: row["messages"][1]["content"] for row in rows}
    assert answers["json/decoder.py:JSONDecoder.raw_decode"].split() == json.decoder.JSONDecoder.raw_decode.__doc__.split()


def test_another_hash_seed_folder_and_locale_give_the_same_bytes(tmp_path):
    build(tmp_path / "here.jsonl")
    environment = python_environment(PYTHONHASHSEED="77", LC_ALL="C", LANG="C", PYTHONUTF8="0")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(python_docs.__file__).parents[1]), environment.get("PYTHONPATH")]))
    command = module_command("data.python_docs", "-o", str(tmp_path / "there.jsonl"))
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()


def test_nothing_is_left_beside_the_file(tmp_path):
    build(tmp_path / "docs.jsonl")
    assert [p.name for p in tmp_path.iterdir()] == ["docs.jsonl"]


def test_what_is_documented_alike_in_two_places_is_asked_alike():
    here = Documented("method", "close", "(self)", "Close the file.", "a.py:A.close")
    there = Documented("method", "close", "(self)", "Close the file.", "b.py:B.close")
    assert question(here) == question(there)
    assert "`close(self)`" in question(here)


def test_questions_are_phrased_in_more_than_one_way():
    shapes = Counter(question(Documented("function", f"name{i}", "()", "", "")).replace(f"name{i}", "name") for i in range(100))
    assert len(shapes) == 4


def test_a_long_documentation_string_is_cut_after_a_whole_paragraph():
    paragraphs = ["one " * 20, "two " * 20, "three " * 20]
    assert shorten("\n\n".join(p.strip() for p in paragraphs), longest=200) == "\n\n".join(p.strip() for p in paragraphs[:2])


def test_a_paragraph_that_is_too_long_by_itself_is_cut_after_a_line():
    assert shorten("first line\nsecond line\nthird line", longest=24) == "first line\nsecond line"


def test_a_line_without_an_end_gives_no_answer():
    assert shorten("x" * 500, longest=100) == ""
