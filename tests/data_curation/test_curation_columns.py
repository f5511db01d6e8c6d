"""Settings of a source: columns, template, condition, delimiter and encoding. Fast tier: small files, in-process."""

import csv
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from pydantic import ValidationError

from components.common.runtime.errors import ConfigurationError, InputError
from components.common.runtime.validation_errors import describe_validation_error
from components.data_curation.config import DataCurationConfig
from components.data_curation.reading import column_mapping
from components.data_curation.reading.file_readers import read_records
from components.data_curation.reading.raw_records import Record, UnreadableRecord
from components.data_curation.reading.record_formats import parse_record
from components.data_curation.reading.row_condition import RowCondition
from components.data_curation.reading.source_files import list_sources
from components.data_curation.source_preview import check_columns, find_hint, preview_source

COLUMNS = ["ticket_id", "status", "subject", "body", "agent_reply"]
MAPPING = {"prompt": "subject", "context": "body", "completion": "agent_reply"}


@pytest.fixture
def tickets(tmp_path: Path) -> Path:
    """Write 60 support tickets with column names that no format knows; every third ticket is open."""
    path = tmp_path / "tickets.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for i in range(60):
            reply = " ".join(f"reply{i}x{j}" for j in range(12))
            writer.writerow(
                [f"T-{i}", "closed" if i % 3 else "open", f"Topic {i}", f"The screen shows error {i}.", reply]
            )
    return path


def list_entry(base, **entry):
    return list_sources(DataCurationConfig(sources=[entry]).sources, base)


def read_entry(base, **entry):
    config = DataCurationConfig(sources=[entry])
    return [one for source in list_sources(config.sources, base) for one in read_records(source, config)]


def read_row(base, **entry):
    (record,) = read_entry(base, **entry)
    (row,) = parse_record(record, record.format or "auto")
    return row


def test_csv_with_unknown_columns_becomes_a_dataset_by_the_suggested_mapping(tickets, curate_files, read_rows):
    with pytest.raises(InputError) as error:
        curate_files(tickets, out="unmapped")
    assert "unknown format: keys agent_reply, body" in error.value.message
    entry = f"[{{path: {tickets}, columns: {{prompt: subject, context: body, completion: agent_reply}}}}]"
    assert f"has the columns {', '.join(COLUMNS)}; map them with data_curation.sources: {entry}" in error.value.hint

    other = tickets.with_name("untitled.csv")
    other.write_text("a,b\n1,2\n")
    with pytest.raises(InputError) as error:
        curate_files(tickets, other, out="unmapped")
    assert f"to read it, add {entry[1:-1]} to data_curation.sources" in error.value.hint

    dataset = curate_files({"path": str(tickets), "columns": MAPPING})
    counts = dataset.manifest.summary["rows"]
    assert (counts["in"], counts["kept"], counts["quarantined"]) == (60, 60, 0)
    rows = {row["messages"][0]["content"]: row for split in ("train", "test") for row in read_rows(dataset, split)}
    row = rows["Topic 7\n\nThe screen shows error 7."]
    assert row["messages"][1]["content"].startswith("reply7x0 reply7x1")
    assert json.loads(row["meta"]) == {"status": "closed", "ticket_id": "T-7"}
    assert dataset.manifest.inputs[0].settings == {"columns": MAPPING}


def test_condition_rejects_the_other_rows_with_a_reason(tickets, curate_files, read_rows):
    entry = {"path": str(tickets), "columns": {**MAPPING, "id": "ticket_id"}, "where": "status = 'closed'"}
    dataset = curate_files(entry)
    counts = dataset.manifest.summary["rows"]
    assert counts == {"in": 60, "kept": 40, "quarantined": 0, "rejected": {"not_selected": 20}}
    rejected = read_rows(dataset, "rejected")
    assert {row["detail"] for row in rejected} == {"status = 'closed'"}
    assert json.loads(rejected[0]["text"])["status"] == "open"
    assert any(row["id"] == "T-1" for split in ("train", "test") for row in read_rows(dataset, split))


def test_condition_that_selects_no_row_is_an_error(tickets, curate_files):
    with pytest.raises(InputError, match="no row is kept: 60 rejected as not_selected"):
        curate_files({"path": str(tickets), "columns": MAPPING, "where": "status = 'lost'"})


def test_records_that_are_not_selected_may_have_any_format(write_rows, curate_files, make_distinct_row):
    events = [{"event": "login", "user": i} for i in range(30)]
    path = write_rows([*map(make_distinct_row, range(40)), *events])
    dataset = curate_files({"path": str(path), "where": "messages IS NOT NULL"})
    counts = dataset.manifest.summary["rows"]
    assert counts == {"in": 70, "kept": 40, "quarantined": 0, "rejected": {"not_selected": 30}}


def test_settings_change_the_key_and_the_path_does_not(tickets, curate_files, tmp_path):
    first = curate_files({"path": str(tickets), "columns": MAPPING})
    (tmp_path / "moved").mkdir()
    moved = tickets.rename(tmp_path / "moved" / "tickets.csv")
    again = curate_files({"path": str(moved), "columns": MAPPING})
    assert again.manifest.produced_by == first.manifest.produced_by  # the same artifact, not a new one
    other = curate_files({"path": str(moved), "columns": {**MAPPING, "context": "status"}}, overwrite=True)
    assert other.sha256 != first.sha256


@pytest.mark.parametrize(
    ("fields", "entry", "content", "meta"),
    [
        ({"q": "Why?", "a": "So."}, {"columns": {"prompt": "q", "completion": "a"}}, ["Why?", "So."], {}),
        ({"Q ": "Why?", "a": None}, {"columns": {"prompt": "q", "completion": "A"}}, ["Why?", ""], {}),
        ({"q": 7, "a": True}, {"columns": {"prompt": "q", "completion": "a"}}, ["7", "True"], {}),
        (
            {"ticket": {"q": "Why?", "n": 1}, "a": "So."},
            {"columns": {"prompt": "ticket.q", "completion": "a"}},
            ["Why?", "So."],
            {"ticket": {"q": "Why?", "n": 1}},
        ),
        (
            {"q": "Why?", "a": "So.", "output": "x", "text": "y"},
            {"columns": {"prompt": "q", "completion": "a"}},
            ["Why?", "So."],
            {"output": "x", "text": "y"},
        ),
        (
            {"s": "A", "b": "B {x}", "a": "So.", "n": 3},
            {"columns": {"completion": "a"}, "template": "{s}: {b} {{n}} {n}"},
            ["A: B {x} {n} 3", "So."],
            {},
        ),
        ({"m": '[{"role": "user", "content": "Hi"}]'}, {"columns": {"messages": "m"}}, ["Hi"], {}),
    ],
    ids=["renamed", "spelling-null", "numbers", "nested", "other-known-keys", "template", "json-text"],
)
def test_columns_get_their_roles(tmp_path, write_rows, fields, entry, content, meta):
    path = write_rows([fields])
    row = read_row(tmp_path, path=str(path), **entry)
    assert [message["content"] for message in row.content["messages"]] == content
    assert row.meta == meta


def test_template_without_an_answer_builds_the_text(tmp_path, write_rows):
    path = write_rows([{"title": "Leave", "body": "Ask your manager.", "id": 7}])
    row = read_row(tmp_path, path=str(path), template="# {title}\n{body}")
    assert (row.kind, row.content, row.own_id) == ("text", {"text": "# Leave\nAsk your manager."}, "7")


def test_preference_columns_and_format(tmp_path, write_rows):
    path = write_rows([{"q": "Why?", "good": "So.", "bad": "No."}])
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    assert read_row(tmp_path, path=str(path), columns=columns).kind == "preference"
    assert read_row(tmp_path, path=str(path), columns=columns, format="preference").format == "preference"


def test_nested_parquet_columns(tmp_path):
    rows = [{"case": {"question": "Why?", "replies": [{"role": "assistant", "content": "So."}]}, "n": 1}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "cases.parquet")
    row = read_row(tmp_path, path="cases.parquet", columns={"prompt": "case.question", "completion": "case.replies"})
    assert [message["content"] for message in row.content["messages"]] == ["Why?", "So."]


def test_record_without_a_column_is_quarantined(tmp_path, write_rows):
    path = write_rows([{"q": "Why?", "a": "So."}, {"q": "Why not?"}])
    _, record = read_entry(tmp_path, path=str(path), columns={"prompt": "q", "completion": "a"})
    assert record == UnreadableRecord("rows.jsonl", 2, "no column 'a'; the record has the keys q")


@pytest.mark.parametrize(
    ("entry", "message", "hint"),
    [
        (
            {"columns": {"prompt": "subjct", "completion": "agent_reply"}},
            "has no column 'subjct'",
            "Write subject instead of",
        ),
        ({"template": "{subject} {zzz}"}, "has no column 'zzz'", "Use the names of columns"),
        ({"where": "stats = 'open'"}, "has no column 'stats'", "Write status instead of stats."),
    ],
)
def test_misspelled_column_is_an_error_before_any_work(tickets, tmp_path, entry, message, hint):
    sources = list_entry(tmp_path, path=str(tickets), **entry)
    with pytest.raises(ConfigurationError) as error:
        check_columns(sources, DataCurationConfig())
    assert message in error.value.message
    assert hint in error.value.hint


def test_encoding_and_delimiter(tmp_path):
    (tmp_path / "fragen.txt").write_bytes("Frage|Antwort\nWie groß?|Größe 7 €\n".encode("cp1252"))
    columns = {"prompt": "Frage", "completion": "Antwort"}
    row = read_row(tmp_path, path="fragen.txt", columns=columns, encoding="cp1252", delimiter="|")
    assert [message["content"] for message in row.content["messages"]] == ["Wie groß?", "Größe 7 €"]
    (tmp_path / "wide.jsonl").write_bytes('{"text": "Grüße"}\n{"text": "zwei"}\n'.encode("utf-16"))
    assert [one.fields["text"] for one in read_entry(tmp_path, path="wide.jsonl", encoding="utf-16")] == [
        "Grüße",
        "zwei",
    ]


def test_bytes_outside_the_encoding_cost_their_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\nbad \x81\ngr\xfc\xdfe\n")
    first, second, third = read_entry(tmp_path, path="a.txt", encoding="cp1252")
    assert (first.fields["text"], third.fields["text"]) == ("good", "grüße")
    assert "byte 0x81" in second.reason
    (tmp_path / "b.txt").write_bytes("one\n".encode("utf-16-le") + b"\x00\xd8\x00\xd8")
    assert any(
        isinstance(one, UnreadableRecord) and "not utf-16-le" in one.reason
        for one in read_entry(tmp_path, path="b.txt", encoding="utf-16-le")
    )


def test_file_with_settings_is_read_once_for_each(tickets, tmp_path):
    mapped, other = ({"path": str(tickets), "columns": {"text": name}} for name in ("body", "subject"))
    config = DataCurationConfig(sources=[str(tmp_path), mapped, other, mapped])
    sources = list_sources(config.sources, tmp_path)
    assert sorted(source.settings.columns["text"] for source in sources) == ["body", "subject"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (7, "expected a path, or a mapping such as"),
        ({"columns": {"prompt": "q"}}, "Field required"),
        ({"path": "a", "columns": {"prmpt": "q"}}, "'prompt', 'context'"),
        ({"path": "a", "format": "xml"}, "unknown format 'xml'; expected auto, alpaca"),
        ({"path": "a", "where": "status ="}, "'status =' is not an SQL condition"),
        ({"path": "a", "where": "load_extension('x')"}, "not authorized"),
        ({"path": "a", "template": "Hello"}, "contains no column"),
        ({"path": "a", "template": "{a!r}"}, "without a plain column name"),
        (
            {
                "path": "a",
                "template": "{a",
            },
            "expected '}'",
        ),
        ({"path": "a", "template": "{a}", "columns": {"text": "b"}}, "template and columns.text are both set"),
        ({"path": "a", "encoding": "klingon"}, "expected a text encoding"),
        ({"path": "a", "encoding": "base64"}, "expected a text encoding"),
        ({"path": "a", "delimiter": "||"}, "expected one character"),
    ],
)
def test_wrong_settings_are_refused(entry, message):
    with pytest.raises(ValidationError) as error:
        DataCurationConfig(sources=[entry])
    assert message in str(error.value)


def test_setting_without_effect_is_refused(tmp_path, write_rows):
    write_rows([{"text": "a"}])
    with pytest.raises(ConfigurationError, match="has the setting delimiter, which applies to"):
        list_entry(tmp_path, path="rows.jsonl", delimiter=";")


def test_path_alone_is_dumped_as_text():
    config = DataCurationConfig(sources=["a.jsonl", {"path": "b.csv"}, {"path": "c.csv", "columns": {"text": "t"}}])
    dumped = config.model_dump(mode="json")["sources"]
    assert dumped == ["a.jsonl", "b.csv", {"columns": {"text": "t"}, "path": "c.csv"}]
    assert DataCurationConfig(sources=dumped) == config


@pytest.mark.parametrize(
    ("expression", "fields", "selected"),
    [
        ("n > 9", {"n": "10"}, True),
        ("n > 9", {"n": 9}, False),
        ("zip = '007'", {"zip": "007"}, True),
        ("status IN ('a', 'b')", {"Status": "b"}, True),
        ("status != 'a'", {}, False),
        ("reply IS NULL", {"other": 1}, True),
        ("\"Ticket Status\" = 'open' -- note", {"Ticket Status": "open"}, True),
        ("json_extract(customer, '$.tier') = 'gold'", {"customer": {"tier": "gold"}}, True),
        ("flag", {"flag": True}, True),
    ],
)
def test_condition(expression, fields, selected):
    assert RowCondition(expression).selects(fields) is selected


@pytest.mark.parametrize(
    "expression",
    [
        "1 UNION SELECT 2",
        "1; DROP TABLE record",
        "1) FROM sqlite_master --",
        "readfile('/etc/passwd')",
        "length(zeroblob(900000000)) > 1",
    ],
)
def test_condition_is_an_expression_only(expression):
    with pytest.raises(ValueError, match="is not an SQL condition"):
        RowCondition(expression)


@pytest.mark.parametrize(
    "expression", ["created > date('now', '-90 days')", "created > CURRENT_DATE", "random() % 2", "a < datetime()"]
)
def test_condition_does_not_depend_on_the_time_or_on_chance(expression):
    with pytest.raises(ValueError, match="expected a condition on columns and fixed values"):
        RowCondition(expression)
    assert RowCondition("status = 'known' AND date(created) > '2026-01-31'").columns == ["status", "created"]


@pytest.mark.parametrize(
    ("columns", "suggestion"),
    [
        (["subject", "body", "agent_reply"], {"prompt": "subject", "context": "body", "completion": "agent_reply"}),
        (["CustomerMessage", "SupportAnswer"], {"prompt": "CustomerMessage", "completion": "SupportAnswer"}),
        (["description", "resolution"], {"prompt": "description", "completion": "resolution"}),
        (["name", "note", "solution"], {"prompt": "note", "completion": "solution"}),
        (["article", "author"], {"text": "article"}),
    ],
)
def test_suggested_columns(columns, suggestion):
    lengths = {"name": 5, "author": 6}
    record = {name: "word " * lengths.get(name, 20) for name in columns} | {
        "created": "2026-01-01",
        "code": "X1",
        "n": 5,
    }
    assert column_mapping.suggest_columns([record]) == suggestion
    assert column_mapping.suggest_columns([{"n": 5, "created": "2026-01-01"}]) == {}


def test_preview_shows_redacted_rows_and_reasons(tmp_path, write_rows):
    write_rows([{"q": "I am ann@example.org", "a": "So."}, {"q": "x"}, {"q": "Later", "a": "No."}])
    entry = {"path": "rows.jsonl", "columns": {"prompt": "q", "completion": "a"}, "where": "q != 'Later'"}
    (source,) = list_entry(tmp_path, **entry)
    preview = preview_source(source, DataCurationConfig(), 10)
    assert (preview.read, preview.not_selected, preview.formats) == (3, 1, {"prompt_completion": 1})
    assert preview.rows[0]["messages"][0]["content"] == "I am <EMAIL>"
    assert [one.line for one in preview.unreadable] == [2]
    assert preview.format_suggestion() == ""


def test_nested_columns_are_suggested_by_their_path(tmp_path, write_rows):
    write_rows(
        [{"id": 1, "ticket": {"subject": "Printer is broken", "agent_reply": "Restart it, please.", "tags": []}}]
    )
    (source,) = list_entry(tmp_path, path="rows.jsonl")
    preview = preview_source(source, DataCurationConfig(), 10)
    assert preview.columns == ["id", "ticket.subject", "ticket.agent_reply", "ticket.tags"]
    assert preview.suggestion == {"prompt": "ticket.subject", "completion": "ticket.agent_reply"}
    (source,) = list_entry(tmp_path, path="rows.jsonl", columns=preview.suggestion)
    assert preview_source(source, DataCurationConfig(), 10).formats == {"prompt_completion": 1}


def test_columns_are_suggested_for_the_selected_rows(tmp_path, write_rows):
    write_rows([{"subject": "Printer is broken", "reply": f"Restart {n}", "status": n} for n in "abc"])
    (source,) = list_entry(tmp_path, path="rows.jsonl", where="status != 'a'")
    preview = preview_source(source, DataCurationConfig(), 10)
    assert (preview.not_selected, preview.missing) == (1, [])
    assert preview.build_suggestion()["where"] == "status != 'a'"
    assert preview.suggestion == {"prompt": "subject", "completion": "reply"}


def test_preview_reports_missing_columns(tmp_path, write_rows):
    write_rows([{"q": "Why?", "status": "open"}])
    (source,) = list_entry(tmp_path, path="rows.jsonl", where="staus = 'open'")
    preview = preview_source(source, DataCurationConfig(), 10)
    assert preview.missing == ["staus"]
    assert preview.format_missing() == "rows.jsonl has no column 'staus'; it has the columns q, status"


def test_local_copy_is_suggested_without_its_path(tmp_path, write_rows):
    write_rows([{"subject": "Printer is broken", "reply": "Restart it"}])
    (source,) = list_entry(tmp_path, path="rows.jsonl")
    extract = source.model_copy(update={"extract": "5" * 64})
    preview = preview_source(extract, DataCurationConfig(), 10)
    assert preview.format_suggestion() == "{columns: {prompt: subject, completion: reply}}"


def test_condition_on_a_nested_column_is_explained():
    with pytest.raises(ValueError, match=r"for a key of a nested column, use json_extract\(ticket, '\$\.status'\)$"):
        RowCondition("ticket.status = 'open'")
    assert RowCondition("json_extract(ticket, '$.status') = 'open'").selects({"ticket": {"status": "open"}})


def test_error_of_a_condition_shows_the_expression_only():
    with pytest.raises(ValueError, match=r"unrecognized token: \"'open$"):
        RowCondition("status = 'open")


def test_settings_reach_the_workers(tickets, curate_files):
    entry = {"path": str(tickets), "columns": MAPPING, "where": "status = 'closed'"}
    sources = list_entry(tickets.parent, **entry)
    (record, *_) = read_entry(tickets.parent, **entry)
    assert Record(**json.loads(json.dumps(vars(record)))) == record
    assert type(sources[0]).model_validate(json.loads(sources[0].model_dump_json())) == sources[0]


@pytest.mark.parametrize(
    "settings", [{"template": "{a"}, {"template": "none"}, {"template": "{a}", "columns": {"text": "b"}}]
)
def test_errors_of_a_source_do_not_repeat_its_address(settings):
    path = "sql+postgresql://reader@db.example/support?password=hunter2"
    with pytest.raises(ValidationError) as caught:
        DataCurationConfig(sources=[{"path": path, **settings}])
    message = describe_validation_error(caught.value, "c.yaml", DataCurationConfig)
    assert message.startswith("c.yaml: sources.0: template ")
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("data", "encoding"),
    [("größe,antwort\na,b".encode("cp1252"), "cp1252"), ("größe,antwort\na,b".encode("utf-16"), "UTF-16LE")],
)
def test_encoding_of_a_hint_reads_the_file(tmp_path, data, encoding):
    (tmp_path / "a.csv").write_bytes(data)
    (source,) = list_entry(tmp_path, path="a.csv")
    (record,) = preview_source(source, DataCurationConfig(), 10).unreadable
    assert f"[{{path: a.csv, encoding: {encoding}}}]" in find_hint(record)
    assert read_entry(tmp_path, path="a.csv", encoding=encoding)[0].fields == {"größe": "a", "antwort": "b"}


def test_columns_that_are_no_mapping_are_described():
    with pytest.raises(ValidationError) as caught:
        DataCurationConfig(sources=[{"path": "a.csv", "columns": ["prompt"]}])
    message = describe_validation_error(caught.value, "c.yaml", DataCurationConfig)
    assert message == "c.yaml: sources.0.columns: found ['prompt']; expected a mapping, for example {key: value}"
