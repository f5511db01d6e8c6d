"""Items are read from every file format; an unreadable row is reported with file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard

from components.common.runtime.errors import ConfigurationError, InputError
from components.evaluation.tasks import file_digests, record_files
from components.evaluation.tasks.generation import Generation
from components.evaluation.tasks.lm_eval import LMEval

ROWS = [{"id": "a", "prompt": "2 + 2?", "reference": "4"}, {"id": "b", "prompt": "Größe?", "reference": "XL"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def write_records(folder: Path, name: str) -> str:
    path, format_name = folder / name, name.removesuffix(".gz").removesuffix(".zst")
    if format_name.endswith(".parquet"):
        parquet.write_table(pa.Table.from_pylist(ROWS), path)
        return str(path)
    text = {
        "rows.jsonl": LINES,
        "rows.json": json.dumps({"rows": ROWS}),
        "array.json": json.dumps(ROWS),
        "rows.csv": "id,prompt,reference\na,2 + 2?,4\nb,Größe?,XL\n",
        "rows.tsv": "id\tprompt\treference\na\t2 + 2?\t4\nb\tGröße?\tXL\n",
    }[format_name].encode()
    path.write_bytes(
        gzip.compress(text) if name.endswith(".gz") else zstandard.compress(text) if name.endswith(".zst") else text
    )
    return str(path)


@pytest.mark.parametrize(
    "name",
    [
        "rows.jsonl",
        "rows.jsonl.gz",
        "rows.jsonl.zst",
        "rows.json",
        "array.json",
        "rows.csv",
        "rows.csv.gz",
        "rows.tsv",
        "rows.parquet",
    ],
)
def test_formats_give_equal_rows(tmp_path: Path, name: str) -> None:
    records = record_files.read_records(write_records(tmp_path, name))
    assert [(record.id, record.get_text("prompt"), record.get_texts("reference")) for record in records] == [
        ("a", "2 + 2?", ["4"]),
        ("b", "Größe?", ["XL"]),
    ]


def read_error_message(tmp_path: Path, name: str, content: bytes | str) -> str:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError) as error:
        record_files.read_records(str(path))
    return error.value.message.replace(f"{path}", name)


def test_invalid_json_line_is_refused_with_number(tmp_path: Path) -> None:
    assert read_error_message(tmp_path, "rows.jsonl", LINES + '\n{"id": "c",\n').startswith(
        "rows.jsonl:4: invalid JSON"
    )
    assert read_error_message(tmp_path, "rows.jsonl", LINES + "[1, 2]\n").startswith(
        "rows.jsonl:3: the row is of type list; expected a JSON object"
    )


def test_duplicate_id_is_refused_with_both_locations(tmp_path: Path) -> None:
    assert (
        read_error_message(tmp_path, "rows.jsonl", LINES + LINES)
        == "rows.jsonl:3: duplicate id a, first used at rows.jsonl:1"
    )


def test_equal_rows_without_ids_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Hello"}\n' * 3)
    first, second, third = (record.id for record in record_files.read_records(str(path)))
    assert (second, third) == (f"{first}-2", f"{first}-3")


def test_empty_file_is_refused(tmp_path: Path) -> None:
    assert read_error_message(tmp_path, "rows.jsonl", "\n\n") == "rows.jsonl has no rows"
    assert read_error_message(tmp_path, "rows.json", "[]") == "rows.json has no rows"


@pytest.mark.parametrize(
    ("name", "compress"), [("rows.jsonl.gz", gzip.compress), ("rows.jsonl.zst", zstandard.compress)]
)
def test_truncated_compressed_file_is_refused(tmp_path: Path, name: str, compress: object) -> None:
    compressed = compress((LINES * 200).replace('"a"', "1").encode())  # type: ignore[operator]
    assert "is truncated or damaged here" in read_error_message(tmp_path, name, compressed[: len(compressed) // 2])
    assert "is truncated or damaged here" in read_error_message(tmp_path, name, b"not compressed at all")


def test_invalid_utf_8_is_refused_with_line(tmp_path: Path) -> None:
    message = read_error_message(tmp_path, "rows.jsonl", LINES.encode("latin-1"))
    assert message == "rows.jsonl:2: the text is not UTF-8: byte 0xf6"


@pytest.mark.parametrize(("row", "found"), [("c", "1 field"), ("c,d,e,f", "4 fields")])
def test_csv_row_of_other_length_is_refused_with_line(tmp_path: Path, row: str, found: str) -> None:
    assert read_error_message(tmp_path, "rows.csv", f"prompt,reference\na,b\n{row}\n").startswith(
        f"rows.csv:3: the row has {found}; expected 2, as in the header"
    )


def test_invalid_parquet_is_refused(tmp_path: Path) -> None:
    assert "is not a valid Parquet file" in read_error_message(tmp_path, "rows.parquet", LINES)


def test_missing_or_unknown_file_is_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"data: .*rows\.jsonl does not exist"):
        record_files.read_records(str(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.xlsx").write_bytes(b"PK")
    with pytest.raises(ConfigurationError, match="has an unknown file format"):
        record_files.read_records(str(tmp_path / "rows.xlsx"))


def test_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("One.\n\nTwo.\n")
    (tmp_path / "books.jsonl").write_text('{"text": "One."}\n{"text": "Two."}\n')
    assert [record.get_text("text") for record in record_files.read_records(str(tmp_path / "book.txt"))] == [
        "One.\n\nTwo.\n"
    ]
    assert [record.get_text("text") for record in record_files.read_records(str(tmp_path / "books.jsonl"))] == [
        "One.",
        "Two.",
    ]


def test_task_files_are_digested_and_missing_file_names_field(tmp_path: Path) -> None:
    data = write_records(tmp_path, "rows.jsonl")
    tasks = [Generation(), Generation(data=data)]
    assert list(file_digests.digest_task_files(tasks)) == [data]
    before = file_digests.digest_task_files(tasks)[data]
    Path(data).write_text(LINES + "\n")
    assert file_digests.digest_task_files(tasks)[data] != before
    with pytest.raises(ConfigurationError, match=r"evaluation\.tasks\[1\]\.examples: .* does not exist"):
        file_digests.digest_task_files(
            [Generation(), Generation(data=data, examples=str(tmp_path / "no.jsonl"), shots=1)]
        )


def test_files_referenced_by_task_file_are_digested(tmp_path: Path) -> None:
    data = write_records(tmp_path, "rows.jsonl")
    (tmp_path / "base.yaml").write_text("dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: rows.jsonl\n")
    (tmp_path / "helpers.py").write_text("def clean(doc):\n    return doc\n")
    (tmp_path / "mine.yaml").write_text("include: base.yaml\ntask: mine\nprocess_docs: !function helpers.clean\n")
    digests = file_digests.digest_task_files([LMEval(task=str(tmp_path / "mine.yaml"))])
    assert sorted(Path(path).name for path in digests) == ["base.yaml", "helpers.py", "mine.yaml", "rows.jsonl"]
    Path(data).unlink()
    with pytest.raises(ConfigurationError, match=r"evaluation\.tasks\[0\]\.task: .*rows\.jsonl does not exist"):
        file_digests.digest_task_files([LMEval(task=str(tmp_path / "mine.yaml"))])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1e999"])
@pytest.mark.parametrize("field", ["prompt", "reference"])
def test_non_finite_number_is_not_text(tmp_path: Path, number: str, field: str) -> None:
    (tmp_path / "rows.jsonl").write_text(LINES + f'{{"id": "c", "{field}": {number}}}\n')
    record = record_files.read_records(str(tmp_path / "rows.jsonl"))[-1]
    for read in (record.get_text, record.get_texts):
        with pytest.raises(InputError, match=rf"rows\.jsonl:3: the row has -?(nan|inf) in {field}"):
            read(field)
