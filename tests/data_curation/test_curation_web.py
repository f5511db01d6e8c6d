"""Web sources: HTML pages and WARC and WET archives, complete and damaged."""

import gzip
import io
import re

import pytest

from components.common.runtime.errors import ConfigurationError
from components.data_curation.config import DataCurationConfig
from components.data_curation.reading.file_readers import read_records
from components.data_curation.reading.raw_records import Record, UnreadableRecord
from components.data_curation.reading.record_formats import parse_record
from components.data_curation.reading.source_files import list_sources

SENTENCES = [
    "The lighthouse on the northern cape was built in the spring of 1874 by masons from the village.",
    "Its lamp burned oil of rape until the keepers were given an electric one, forty years later.",
    "Fishermen still set their course by it when the fog comes down from the mountains in autumn.",
]
MARKUP = re.compile(r"<[a-z/!]|&(nbsp|amp|lt);|\{[^}]*:|function\s*\(", re.IGNORECASE)


def build_page(sentences=SENTENCES, *, head="", title="The lighthouse"):
    body = "".join(f"<p>{sentence} It is <b>well</b> worth a visit &amp; a walk.</p>\n" for sentence in sentences)
    return f"""<!DOCTYPE html>
<html><head>{head}<title>{title}</title><style>p {{ color: red; }}</style><script>function track() {{ return 1; }}</script></head>
<body><nav><ul><li><a href="/">Home</a></li><li><a href="/shop">Shop</a></li></ul></nav>
<article><h1>{title}</h1>{body}</article><footer>All rights reserved. Imprint. Cookies.</footer></body></html>"""


def build_record(kind, content_type, body, url="http://example.org/page", *, length=None):
    fields = {
        "WARC-Type": kind,
        "WARC-Target-URI": url,
        "WARC-Date": "2024-01-01T00:00:00Z",
        "Content-Type": content_type,
    }
    fields["WARC-Record-ID"] = "<urn:uuid:12345678-1234-1234-1234-123456789abc>"
    fields["Content-Length"] = str(len(body) if length is None else length)
    return b"WARC/1.0\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items()).encode() + b"\r\n" + body + b"\r\n\r\n"


def build_response(page, content_type="text/html; charset=utf-8", status="200 OK", **headers):
    page = page.encode() if isinstance(page, str) else page
    lines = [f"HTTP/1.1 {status}", *([f"Content-Type: {content_type}"] if content_type else [])]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return build_record("response", "application/http; msgtype=response", "\r\n".join([*lines, "", ""]).encode() + page)


WARCINFO = build_record("warcinfo", "application/warc-fields", b"software: a crawler\r\n")
REQUEST = build_record(
    "request", "application/http; msgtype=request", b"GET /page HTTP/1.1\r\nHost: example.org\r\n\r\n"
)
METADATA = build_record("metadata", "application/warc-fields", b"fetchTimeMs: 12\r\n")
CONVERSION = build_record("conversion", "text/plain", "Ein Satz über das Meer.\nUnd noch einer.\n".encode())


@pytest.fixture
def read_source(tmp_path):
    def run(name, data, **config):
        (tmp_path / name).write_bytes(data)
        (source,) = list_sources([name], tmp_path)
        return list(read_records(source, DataCurationConfig(**config)))

    return run


def check_text(text, sentences=SENTENCES):
    assert all(sentence in text for sentence in sentences)
    assert "a visit & a walk" in text
    assert not MARKUP.search(text)
    assert "Shop" not in text
    assert "Imprint" not in text


@pytest.mark.parametrize("name", ["page.html", "page.htm", "page.html.gz", "page.HTML.zst"])
def test_main_text_and_title_of_a_page_are_read(read_source, name):
    import zstandard

    compress = {"gz": gzip.compress, "zst": zstandard.compress}.get(name.rpartition(".")[2], bytes)
    (record,) = read_source(name, compress(build_page().encode()))
    assert (record.line, record.extracted_from, record.fields["title"]) == (1, "html", "The lighthouse")
    check_text(record.fields["text"])
    (row,) = parse_record(record)
    assert (row.kind, row.format, row.meta) == ("text", "html", {"title": "The lighthouse"})
    assert row.content == {"text": record.fields["text"]}


def test_format_of_other_rows_is_unchanged():
    assert parse_record(Record("a.jsonl", 1, {"text": "one"}))[0].format == "text"
    assert parse_record(Record("a.jsonl", 1, {"prompt": "one", "completion": "two"}))[0].format == "prompt_completion"


def test_table_is_read_without_its_borders(read_source):
    table = "<table><tr><th>Year</th><th>Keeper</th></tr><tr><td>1874</td><td>Anna Berg</td></tr></table>"
    (record,) = read_source("page.html", build_page().replace("</article>", table + "</article>").encode())
    assert "1874 | Anna Berg" in record.fields["text"]
    assert not re.search(r"^\||\|$|---", record.fields["text"], re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (b"<html><head><title>Nothing</title></head><body></body></html>", "no main text was found in the page"),
        (
            b"<html><body><nav><a href='/'>Home</a></nav><script>var x = {};</script></body></html>",
            "no main text was found in the page",
        ),
        (b" \n\n ", "no main text was found in the page"),
        (
            b"\x1f\x8b\x08 not named so",
            "the file is gzip data without the .gz suffix; it is skipped",
        ),
        (b"%PDF-1.4 \0\0\0\0\x01\x02" * 50, "binary data, not a page"),
    ],
    ids=["empty body", "navigation only", "white space", "gzip", "binary"],
)
def test_page_without_text_is_quarantined(read_source, page, reason):
    assert read_source("page.html", page) == [UnreadableRecord("page.html", 1, reason)]


def test_empty_html_file_has_no_rows(read_source):
    assert read_source("page.html", b"") == []


def test_overlong_page_is_quarantined(read_source):
    (record,) = read_source("page.html", build_page(SENTENCES * 20).encode(), max_line_bytes=2000)
    assert record.reason == "longer than the 2,000 bytes of data_curation.max_line_bytes"


def test_truncated_page_is_read_and_its_truncation_is_reported(read_source):
    import random

    noise = "".join(random.Random(1).choices("abcdefghij ", k=20_000))
    compressed = gzip.compress(build_page([*SENTENCES, noise]).encode())
    record, unreadable = read_source("page.html.gz", compressed[:-2000])
    assert SENTENCES[0] in record.fields["text"]
    assert (unreadable.line, unreadable.reason) == (1, "the compressed file is truncated")


GERMAN = [
    "Müde Möwen äußerten über dem grünen Dünengras größte Höflichkeit gegenüber Rüdiger.",
    "Später fraßen sie Küchenkräuter für fünf Öre.",
]
CYRILLIC = [
    "Старый маяк на северном мысе построили каменщики из деревни весной 1874 года.",
    "Рыбаки и сегодня держат курс по нему осенью.",
]


@pytest.mark.parametrize(
    ("sentences", "encoding", "declared"),
    [
        (GERMAN, "utf-8", ""),
        (GERMAN, "utf-8", "iso-8859-1"),  # wrong: the page is UTF-8
        (GERMAN, "cp1252", "iso-8859-1"),
        (GERMAN, "cp1252", "utf-8"),  # wrong: the page is not UTF-8
        (GERMAN, "cp1252", "no-such-charset"),
        (GERMAN, "utf-16", ""),
        (CYRILLIC, "cp1251", "windows-1251"),
        (CYRILLIC, "koi8-r", "koi8-r"),
        (CYRILLIC, "cp1251", "utf-8"),
        (
            ["灯台は一八七四年の春に村の石工によって北の岬に建てられました。漁師は今もそれを頼りにしています。"],
            "shift_jis",
            "Shift_JIS",
        ),
        (["灯塔建于一八七四年春天，由村里的石匠在北角建造。渔民至今仍以它为航标。"], "gbk", "gb2312"),
    ],
)
@pytest.mark.parametrize("declared_in", ["meta", "header"])
def test_page_is_read_in_its_encoding_despite_a_wrong_declaration(
    read_source, sentences, encoding, declared, declared_in
):
    head = (
        f'<meta http-equiv="Content-Type" content="text/html; charset={declared}">'
        if declared and declared_in == "meta"
        else ""
    )
    page = build_page(sentences, head=head).encode(encoding)
    content_type = f"text/html; charset={declared}" if declared and declared_in == "header" else "text/html"
    (record,) = read_source("pages.warc", build_response(page, content_type))
    assert all(sentence in record.fields["text"] for sentence in sentences)


def test_declared_codecs_that_are_not_web_encodings_are_ignored(read_source):
    for label in ("rot13", "unicode_escape", "utf-7", "zlib", "idna"):
        (record,) = read_source("pages.warc", build_response(build_page().encode(), f"text/html; charset={label}"))
        check_text(record.fields["text"])


@pytest.mark.parametrize(
    "compress", [lambda records: b"".join(records), lambda records: b"".join(map(gzip.compress, records))]
)
def test_archive_pages_are_rows_and_other_records_are_not(read_source, compress):
    name = "crawl.warc" if compress([b""]) == b"" else "crawl.warc.gz"
    records = read_source(
        name,
        compress(
            [
                WARCINFO,
                REQUEST,
                build_response(build_page()),
                METADATA,
                REQUEST,
                build_response(build_page(title="Another")),
                METADATA,
            ]
        ),
    )
    assert [
        (record.line, record.extracted_from, record.fields["url"], record.fields["title"]) for record in records
    ] == [
        (3, "warc", "http://example.org/page", "The lighthouse"),
        (6, "warc", "http://example.org/page", "Another"),
    ]
    check_text(records[0].fields["text"])


def test_bodies_are_dechunked_and_decompressed(read_source):
    page = build_page().encode()
    chunked = b"%x\r\n" % len(page) + page + b"\r\n0\r\n\r\n"
    compressed = gzip.compress(page)
    both = b"%x\r\n" % len(compressed) + compressed + b"\r\n0\r\n\r\n"
    import zlib

    responses = [
        build_response(chunked, Transfer_Encoding="chunked"),
        build_response(compressed, Content_Encoding="gzip"),
        build_response(both, Transfer_Encoding="chunked", Content_Encoding="gzip"),
        build_response(zlib.compress(page), Content_Encoding="deflate"),
        build_response(page, Content_Encoding="gzip"),  # a crawler that decompresses the body and keeps the header
        build_response(page, Content_Encoding="br"),
    ]
    records = read_source("crawl.warc", b"".join(responses))
    assert len({record.fields["text"] for record in records}) == 1
    assert [record.line for record in records] == [1, 2, 3, 4, 5, 6]
    check_text(records[0].fields["text"])


@pytest.mark.parametrize(
    ("raw_record", "reason"),
    [
        (build_response(build_page(), status="404 Not Found"), "HTTP status '404'; expected 200"),
        (build_response(build_page(), status="301 Moved"), "HTTP status '301'; expected 200"),
        (build_response(b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "image/png"), "image/png; expected HTML or text/plain"),
        (build_response(b"%PDF-1.7", "application/pdf"), "application/pdf; expected HTML or text/plain"),
        (build_response(b"\x01\x02\x03", ""), "unknown media type; expected HTML or text/plain"),
        (build_response(b"", "text/html"), "an empty page"),
        (build_response(b"<html><body></body></html>"), "no main text was found in the page"),
        (
            build_response(gzip.compress(build_page().encode())[:100], Content_Encoding="gzip"),
            "the compressed body is truncated",
        ),
        (build_response(b"\x1f\x8b\x08" + b"!" * 50, Content_Encoding="gzip"), "the compressed body is damaged"),
        (
            build_response(b"\x0b\x02\x80", Content_Encoding="br"),
            "unsupported Content-Encoding 'br'; supported: gzip, deflate",
        ),
        (build_record("response", "application/http", b""), "an empty HTTP response"),
        (build_record("conversion", "text/plain", b"caf\xe9"), "not UTF-8: byte 0xe9 at position 3"),
        (build_record("conversion", "text/plain", b" \n "), "a conversion without any text"),
        (build_record("conversion", "image/png", b"\x89PNG"), "a conversion to image/png; expected text/plain"),
        (
            build_record("continuation", "application/http", b"the rest"),
            "a segment of a record; segmented records are not supported",
        ),
        (
            build_record("resource", "text/html", b"<p>" + b"x" * 5000 + b"</p>"),
            "longer than the 4,000 bytes of data_curation.max_line_bytes",
        ),
        (
            build_record("response", "text/html", b"x", length="many"),
            "the Content-Length is 'many'; expected a number of bytes; skipped 5 bytes to the next",
        ),
        (
            b"garbage\r\nmore of it\r\n\r\n",
            "expected the beginning of a record, found 'garbage'; skipped 14 bytes to the next record",
        ),
        (b"WARC/3.0\r\nWARC-Type: response\r\n\r\n", "expected the beginning of a record, found 'WARC/3.0'"),
    ],
)
def test_record_without_a_page_is_quarantined_and_the_others_are_read(read_source, raw_record, reason):
    before, unreadable, after = read_source(
        "crawl.warc", build_response(build_page()) + raw_record + CONVERSION, max_line_bytes=4000
    )
    assert isinstance(before, Record)
    assert (unreadable.file, unreadable.line) == ("crawl.warc", 2)
    assert unreadable.reason.startswith(reason)
    assert after == Record(
        "crawl.warc", 3, {"text": "Ein Satz über das Meer.\nUnd noch einer.", "url": "http://example.org/page"}, "wet"
    )


def test_plain_text_and_resource_records_are_pages(read_source):
    plain = build_response("Grüße vom Meer.\n".encode("latin-1"), "text/plain; charset=iso-8859-1")
    records = read_source(
        "crawl.warc", plain + build_record("resource", "text/html", build_page().encode(), "<file:///page.html>")
    )
    assert records[0].fields["text"] == "Grüße vom Meer."
    assert records[1].fields["url"] == "file:///page.html"
    check_text(records[1].fields["text"])


def test_crawler_log_records_are_not_rows(read_source):
    assert (
        read_source(
            "crawl.warc",
            WARCINFO
            + build_record(
                "resource", "text/plain", b"--12:00:00-- http://example.org/", "metadata://gnu.org/wget.log"
            ),
        )
        == []
    )


@pytest.mark.parametrize(
    "name", ["texts.wet", "texts.warc.wet.gz", "texts.warc", "texts.warc.gz", "texts.txt", "texts.txt.gz", "texts.md"]
)
def test_wet_texts_are_rows_under_any_file_name(read_source, name):
    data = WARCINFO + CONVERSION + CONVERSION
    records = read_source(name, gzip.compress(data) if name.endswith(".gz") else data)
    assert [(record.line, record.extracted_from) for record in records] == [(2, "wet"), (3, "wet")]
    assert parse_record(records[0])[0].format == "wet"
    assert records[0].fields == {"text": "Ein Satz über das Meer.\nUnd noch einer.", "url": "http://example.org/page"}


def test_wet_file_with_changed_line_endings_is_read(read_source):
    data = (WARCINFO + CONVERSION + build_record("conversion", "text/plain", b"The last one.")).replace(b"\r\n", b"\n")
    records = read_source("texts.wet.txt", data)
    assert [record.fields["text"] for record in records] == [
        "Ein Satz über das Meer.\nUnd noch einer.",
        "The last one.",
    ]


def test_wat_file_is_reported_by_content_and_refused_by_name(read_source, tmp_path):
    data = WARCINFO + build_record("metadata", "application/json", b'{"Envelope": {}}') * 3
    reason = "the file is a WAT file, which contains crawl metadata but no text; it is skipped"
    assert read_source("crawl.warc.gz", gzip.compress(data)) == [UnreadableRecord("crawl.warc.gz", 2, reason)]
    (tmp_path / "crawl.warc.wat.gz").write_bytes(gzip.compress(data))
    with pytest.raises(ConfigurationError) as error:
        list_sources(["crawl.warc.wat.gz"], tmp_path)
    assert error.value.message == "data_curation.sources: 'crawl.warc.wat.gz' has the unsupported suffix '.wat'"
    assert error.value.hint == "Use the WARC or WET file of the same crawl; a WAT file contains no text."


def test_truncated_archive_gives_complete_records_and_reports_the_cut(read_source):
    data = WARCINFO + build_response(build_page()) + build_response(build_page())
    record, cut = read_source("crawl.warc", data[:-200])
    check_text(record.fields["text"])
    assert (cut.file, cut.line) == ("crawl.warc", 3)
    assert re.fullmatch(r"the file ends after [\d,]+ of [\d,]+ bytes of this record", cut.reason)


def test_truncated_gzip_archive_gives_complete_records_and_the_position(read_source):
    members = [
        gzip.compress(record) for record in (WARCINFO, build_response(build_page()), build_response(build_page()))
    ]
    record, unreadable = read_source("crawl.warc.gz", b"".join(members)[:-150])
    check_text(record.fields["text"])
    assert unreadable == UnreadableRecord("crawl.warc.gz", 3, "the compressed file is truncated")
    (damaged,) = read_source("crawl.warc.gz", b"no gzip at all, but called so")
    assert damaged.line == 1
    assert "damaged" in damaged.reason


def test_invalid_archive_is_one_unreadable_record(read_source):
    (unreadable,) = read_source("crawl.warc", b"<html><body>not an archive</body></html>" * 1000)
    assert unreadable.line == 1
    assert unreadable.reason.startswith("expected the beginning of a record, found [40,000 characters]")
    assert read_source("crawl.warc", b"") == []


def test_archive_is_read_in_constant_memory(tmp_path):
    import tracemalloc

    huge = build_record("response", "image/png", b"\0" * 30_000_000)
    with (tmp_path / "crawl.warc.gz").open("wb") as file:
        file.write(gzip.compress(WARCINFO) + gzip.compress(huge) + gzip.compress(CONVERSION))
    (source,) = list_sources(["crawl.warc.gz"], tmp_path)
    tracemalloc.start()
    try:
        long, last = read_records(source, DataCurationConfig(max_line_bytes=1_000_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert long.reason == "longer than the 1,000,000 bytes of data_curation.max_line_bytes"
    assert last.extracted_from == "wet"
    assert peak < 8_000_000


def test_archive_result_is_independent_of_chunk_size(tmp_path):
    from components.data_curation.reading.file_lines import FileContent
    from components.data_curation.reading.web_pages import read_archive

    def read_chunks(chunks):
        return list(read_archive(FileContent("a", chunks), DataCurationConfig(max_line_bytes=10**6)))

    data = (
        WARCINFO
        + build_response(build_page())
        + b"junk\r\nWARC/ is not enough\r\n"
        + CONVERSION
        + build_response(build_page(), status="500 Error")
        + CONVERSION
    )
    expected = read_chunks(iter([data]))
    assert [type(record) for record in expected] == [Record, UnreadableRecord, Record, UnreadableRecord, Record]
    for size in (1, 7, 100, 4096):
        stream = io.BytesIO(data)
        assert read_chunks(iter(lambda size=size, stream=stream: stream.read(size), b"")) == expected
