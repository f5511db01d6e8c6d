"""Items are read from files of every kind; what cannot be read is told with file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard

from components.common.errors import ConfigurationError, InputError
from components.evaluation.tasks import reading, sources
from components.evaluation.tasks.config import Generation, LMEval

ROWS = [{"id": "a", "prompt": "2 + 2?", "reference": "4"}, {"id": "b", "prompt": "Größe?", "reference": "XL"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def write(folder: Path, name: str) -> str:
    path, kind = folder / name, name.removesuffix(".gz").removesuffix(".zst")
    if kind.endswith(".parquet"):
        parquet.write_table(pa.Table.from_pylist(ROWS), path)
        return str(path)
    text = {
        "rows.jsonl": LINES,
        "rows.json": json.dumps({"rows": ROWS}),
        "array.json": json.dumps(ROWS),
        "rows.csv": "id,prompt,reference\na,2 + 2?,4\nb,Größe?,XL\n",
        "rows.tsv": "id\tprompt\treference\na\t2 + 2?\t4\nb\tGröße?\tXL\n",
    }[kind].encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else zstandard.compress(text) if name.endswith(".zst") else text)
    return str(path)


@pytest.mark.parametrize(
    "name",
    ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.json", "array.json", "rows.csv", "rows.csv.gz", "rows.tsv", "rows.parquet"],
)
def test_rows_are_the_same_from_every_format(tmp_path: Path, name: str) -> None:
    found = reading.records(write(tmp_path, name))
    assert [(one.id, one.text("prompt"), one.texts("reference")) for one in found] == [("a", "2 + 2?", ["4"]), ("b", "Größe?", ["XL"])]


def refused(tmp_path: Path, name: str, content: bytes | str) -> str:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError) as error:
        reading.records(str(path))
    return error.value.message.replace(f"{path}", name)


def test_a_line_that_is_no_json_is_told_by_its_number(tmp_path: Path) -> None:
    assert refused(tmp_path, "rows.jsonl", LINES + '\n{"id": "c",\n').startswith("rows.jsonl:4: this is no JSON")
    assert refused(tmp_path, "rows.jsonl", LINES + "[1, 2]\n").startswith("rows.jsonl:3: a row has to be a JSON object, not list")


def test_ids_that_stand_twice_are_told_with_both_places(tmp_path: Path) -> None:
    assert refused(tmp_path, "rows.jsonl", LINES + LINES) == "rows.jsonl:3: the id a stands already at rows.jsonl:1"


def test_equal_rows_without_ids_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Hello"}\n' * 3)
    first, second, third = (one.id for one in reading.records(str(path)))
    assert (second, third) == (f"{first}-2", f"{first}-3")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, "rows.jsonl", "\n\n") == "rows.jsonl holds no rows"
    assert refused(tmp_path, "rows.json", "[]") == "rows.json holds no rows"


@pytest.mark.parametrize(("name", "compress"), [("rows.jsonl.gz", gzip.compress), ("rows.jsonl.zst", zstandard.compress)])
def test_a_compressed_file_that_breaks_off_is_told(tmp_path: Path, name: str, compress: object) -> None:
    whole = compress((LINES * 200).replace('"a"', "1").encode())  # type: ignore[operator]
    assert "breaks off here or is damaged" in refused(tmp_path, name, whole[: len(whole) // 2])
    assert "breaks off here or is damaged" in refused(tmp_path, name, b"not compressed at all")


def test_text_that_is_not_utf_8_is_told_by_its_line(tmp_path: Path) -> None:
    assert refused(tmp_path, "rows.jsonl", LINES.encode("latin-1")) == "rows.jsonl:2: the text is not UTF-8"


def test_a_csv_row_of_other_length_is_told_by_its_line(tmp_path: Path) -> None:
    assert refused(tmp_path, "rows.csv", "prompt,reference\na,b\nc\n").startswith("rows.csv:3: the row has not as many fields")


def test_a_file_that_is_no_parquet_is_told(tmp_path: Path) -> None:
    assert "is no Parquet file" in refused(tmp_path, "rows.parquet", LINES)


def test_a_file_that_is_not_there_or_of_no_known_kind_is_a_matter_of_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"data: .*rows\.jsonl is not there"):
        reading.records(str(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.xlsx").write_bytes(b"PK")
    with pytest.raises(ConfigurationError, match="no ending of a format that is read"):
        reading.records(str(tmp_path / "rows.xlsx"))


def test_a_text_file_is_one_document_and_rows_of_texts_are_several(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("One.\n\nTwo.\n")
    (tmp_path / "books.jsonl").write_text('{"text": "One."}\n{"text": "Two."}\n')
    assert [one.text("text") for one in reading.document(str(tmp_path / "book.txt"))] == ["One.\n\nTwo.\n"]
    assert [one.text("text") for one in reading.document(str(tmp_path / "books.jsonl"))] == ["One.", "Two."]


def test_the_files_that_tasks_read_have_digests_and_a_missing_one_names_its_field(tmp_path: Path) -> None:
    data = write(tmp_path, "rows.jsonl")
    tasks = [Generation(), Generation(data=data)]
    assert list(sources.digests(tasks)) == [data]
    before = sources.digests(tasks)[data]
    Path(data).write_text(LINES + "\n")
    assert sources.digests(tasks)[data] != before
    with pytest.raises(ConfigurationError, match=r"evaluation\.tasks\[1\]\.examples: .* is not there"):
        sources.digests([Generation(), Generation(data=data, examples=str(tmp_path / "no.jsonl"), shots=1)])


def test_everything_that_a_task_file_names_is_among_its_sources(tmp_path: Path) -> None:
    data = write(tmp_path, "rows.jsonl")
    (tmp_path / "base.yaml").write_text("dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: rows.jsonl\n")
    (tmp_path / "helpers.py").write_text("def clean(doc):\n    return doc\n")
    (tmp_path / "mine.yaml").write_text("include: base.yaml\ntask: mine\nprocess_docs: !function helpers.clean\n")
    found = sources.digests([LMEval(task=str(tmp_path / "mine.yaml"))])
    assert sorted(Path(path).name for path in found) == ["base.yaml", "helpers.py", "mine.yaml", "rows.jsonl"]
    Path(data).unlink()
    with pytest.raises(ConfigurationError, match=r"evaluation\.tasks\[0\]\.task: .*rows\.jsonl is not there"):
        sources.digests([LMEval(task=str(tmp_path / "mine.yaml"))])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1e999"])
@pytest.mark.parametrize("field", ["prompt", "reference"])
def test_a_number_that_is_none_is_no_text(tmp_path: Path, number: str, field: str) -> None:
    (tmp_path / "rows.jsonl").write_text(LINES + f'{{"id": "c", "{field}": {number}}}\n')
    last = reading.records(str(tmp_path / "rows.jsonl"))[-1]
    for read in (last.text, last.texts):
        with pytest.raises(InputError, match=rf"rows\.jsonl:3: the row has -?(nan|inf) in {field}"):
            read(field)
