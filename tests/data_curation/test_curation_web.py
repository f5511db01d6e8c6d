"""Web pages and archives as sources: HTML, WARC and WET, whole and damaged."""

import gzip
import io
import re

import pytest

from components.common.errors import ConfigurationError
from components.data_curation.config import DataCurationConfig
from components.data_curation.formats import rows_of
from components.data_curation.readers import Record, Unread, read
from components.data_curation.sources import list_sources

SENTENCES = [
    "The lighthouse on the northern cape was built in the spring of 1874 by masons from the village.",
    "Its lamp burned oil of rape until the keepers were given an electric one, forty years later.",
    "Fishermen still set their course by it when the fog comes down from the mountains in autumn.",
]
MARKUP = re.compile(r"<[a-z/!]|&(nbsp|amp|lt);|\{[^}]*:|function\s*\(", re.IGNORECASE)


def html(sentences=SENTENCES, *, head="", title="The lighthouse"):
    body = "".join(f"<p>{sentence} It is <b>well</b> worth a visit &amp; a walk.</p>\n" for sentence in sentences)
    return f"""<!DOCTYPE html>
<html><head>{head}<title>{title}</title><style>p {{ color: red; }}</style><script>function track() {{ return 1; }}</script></head>
<body><nav><ul><li><a href="/">Home</a></li><li><a href="/shop">Shop</a></li></ul></nav>
<article><h1>{title}</h1>{body}</article><footer>All rights reserved. Imprint. Cookies.</footer></body></html>"""


def record(kind, content_type, body, url="http://example.org/page", *, length=None):
    fields = {"WARC-Type": kind, "WARC-Target-URI": url, "WARC-Date": "2024-01-01T00:00:00Z", "Content-Type": content_type}
    fields["WARC-Record-ID"] = "<urn:uuid:12345678-1234-1234-1234-123456789abc>"
    fields["Content-Length"] = str(len(body) if length is None else length)
    return b"WARC/1.0\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items()).encode() + b"\r\n" + body + b"\r\n\r\n"


def response(page, content_type="text/html; charset=utf-8", status="200 OK", **headers):
    page = page.encode() if isinstance(page, str) else page
    lines = [f"HTTP/1.1 {status}", *([f"Content-Type: {content_type}"] if content_type else [])]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return record("response", "application/http; msgtype=response", "\r\n".join([*lines, "", ""]).encode() + page)


INFO = record("warcinfo", "application/warc-fields", b"software: a crawler\r\n")
ASKED = record("request", "application/http; msgtype=request", b"GET /page HTTP/1.1\r\nHost: example.org\r\n\r\n")
TOLD = record("metadata", "application/warc-fields", b"fetchTimeMs: 12\r\n")
CONVERTED = record("conversion", "text/plain", "Ein Satz über das Meer.\nUnd noch einer.\n".encode())


@pytest.fixture
def read_all(tmp_path):
    def run(name, data, **config):
        (tmp_path / name).write_bytes(data)
        (source,) = list_sources([name], tmp_path)
        return list(read(source, DataCurationConfig(**config)))

    return run


def check_text(text, sentences=SENTENCES):
    assert all(sentence in text for sentence in sentences)
    assert "a visit & a walk" in text
    assert not MARKUP.search(text)
    assert "Shop" not in text
    assert "Imprint" not in text


@pytest.mark.parametrize("name", ["page.html", "page.htm", "page.html.gz", "page.HTML.zst"])
def test_of_a_page_the_main_text_is_read_with_its_title(read_all, name):
    import zstandard

    pack = {"gz": gzip.compress, "zst": zstandard.compress}.get(name.rpartition(".")[2], bytes)
    (one,) = read_all(name, pack(html().encode()))
    assert (one.line, one.form, one.fields["title"]) == (1, "html", "The lighthouse")
    check_text(one.fields["text"])
    (row,) = rows_of(one)
    assert (row.kind, row.form, row.meta) == ("text", "html", {"title": "The lighthouse"})
    assert row.content == {"text": one.fields["text"]}


def test_the_form_of_other_rows_stays_the_name_of_their_format():
    assert rows_of(Record("a.jsonl", 1, {"text": "one"}))[0].form == "text"
    assert rows_of(Record("a.jsonl", 1, {"prompt": "one", "completion": "two"}))[0].form == "prompt_completion"


def test_a_table_is_read_without_its_frame(read_all):
    table = "<table><tr><th>Year</th><th>Keeper</th></tr><tr><td>1874</td><td>Anna Berg</td></tr></table>"
    (one,) = read_all("page.html", html().replace("</article>", table + "</article>").encode())
    assert "1874 | Anna Berg" in one.fields["text"]
    assert not re.search(r"^\||\|$|---", one.fields["text"], re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (b"<html><head><title>Nothing</title></head><body></body></html>", "no main text was found in the page"),
        (b"<html><body><nav><a href='/'>Home</a></nav><script>var x = {};</script></body></html>", "no main text was found in the page"),
        (b" \n\n ", "no main text was found in the page"),
        (b"\x1f\x8b\x08 not named so", "the file is compressed with gzip, which its name does not say; nothing of it is read"),
        (b"%PDF-1.4 \0\0\0\0\x01\x02" * 50, "binary data, not a page"),
    ],
    ids=["empty body", "navigation only", "white space", "gzip", "binary"],
)
def test_a_page_without_text_is_quarantined(read_all, page, why):
    assert read_all("page.html", page) == [Unread("page.html", 1, why)]


def test_an_empty_file_of_html_holds_no_row(read_all):
    assert read_all("page.html", b"") == []


def test_a_page_longer_than_a_line_may_be_is_quarantined(read_all):
    (one,) = read_all("page.html", html(SENTENCES * 20).encode(), max_line_bytes=2000)
    assert one.why == "longer than the 2,000 bytes of data_curation.max_line_bytes"


def test_of_a_truncated_page_what_is_there_is_read_and_it_is_said_where_it_breaks_off(read_all):
    import random

    noise = "".join(random.Random(1).choices("abcdefghij ", k=20_000))
    whole = gzip.compress(html([*SENTENCES, noise]).encode())
    one, broken = read_all("page.html.gz", whole[:-2000])
    assert SENTENCES[0] in one.fields["text"]
    assert (broken.line, broken.why) == (1, "the compressed file breaks off here: its end is missing")


GERMAN = [
    "Müde Möwen äußerten über dem grünen Dünengras größte Höflichkeit gegenüber Rüdiger.",
    "Später fraßen sie Küchenkräuter für fünf Öre.",
]
CYRILLIC = ["Старый маяк на северном мысе построили каменщики из деревни весной 1874 года.", "Рыбаки и сегодня держат курс по нему осенью."]


@pytest.mark.parametrize(
    ("sentences", "encoding", "declared"),
    [
        (GERMAN, "utf-8", ""),
        (GERMAN, "utf-8", "iso-8859-1"),  # wrong: it is UTF-8
        (GERMAN, "cp1252", "iso-8859-1"),
        (GERMAN, "cp1252", "utf-8"),  # wrong: it is not
        (GERMAN, "cp1252", "no-such-charset"),
        (GERMAN, "utf-16", ""),
        (CYRILLIC, "cp1251", "windows-1251"),
        (CYRILLIC, "koi8-r", "koi8-r"),
        (CYRILLIC, "cp1251", "utf-8"),
        (["灯台は一八七四年の春に村の石工によって北の岬に建てられました。漁師は今もそれを頼りにしています。"], "shift_jis", "Shift_JIS"),
        (["灯塔建于一八七四年春天，由村里的石匠在北角建造。渔民至今仍以它为航标。"], "gbk", "gb2312"),
    ],
)
@pytest.mark.parametrize("where", ["meta", "header"])
def test_a_page_is_read_in_the_encoding_it_has_also_where_a_wrong_one_is_declared(read_all, sentences, encoding, declared, where):
    head = f'<meta http-equiv="Content-Type" content="text/html; charset={declared}">' if declared and where == "meta" else ""
    page = html(sentences, head=head).encode(encoding)
    told = f"text/html; charset={declared}" if declared and where == "header" else "text/html"
    (one,) = read_all("pages.warc", response(page, told))
    assert all(sentence in one.fields["text"] for sentence in sentences)


def test_no_codec_that_is_no_encoding_of_pages_is_used(read_all):
    for label in ("rot13", "unicode_escape", "utf-7", "zlib", "idna"):
        (one,) = read_all("pages.warc", response(html().encode(), f"text/html; charset={label}"))
        check_text(one.fields["text"])


@pytest.mark.parametrize("pack", [lambda records: b"".join(records), lambda records: b"".join(map(gzip.compress, records))])
def test_pages_of_an_archive_are_rows_and_its_envelope_is_none(read_all, pack):
    name = "crawl.warc" if pack([b""]) == b"" else "crawl.warc.gz"
    found = read_all(name, pack([INFO, ASKED, response(html()), TOLD, ASKED, response(html(title="Another")), TOLD]))
    assert [(one.line, one.form, one.fields["url"], one.fields["title"]) for one in found] == [
        (3, "warc", "http://example.org/page", "The lighthouse"),
        (6, "warc", "http://example.org/page", "Another"),
    ]
    check_text(found[0].fields["text"])


def test_bodies_are_unchunked_and_unpacked(read_all):
    page = html().encode()
    chunked = b"%x\r\n" % len(page) + page + b"\r\n0\r\n\r\n"
    packed = gzip.compress(page)
    both = b"%x\r\n" % len(packed) + packed + b"\r\n0\r\n\r\n"
    import zlib

    records = [
        response(chunked, Transfer_Encoding="chunked"),
        response(packed, Content_Encoding="gzip"),
        response(both, Transfer_Encoding="chunked", Content_Encoding="gzip"),
        response(zlib.compress(page), Content_Encoding="deflate"),
        response(page, Content_Encoding="gzip"),  # a crawler that unpacks and keeps the header
        response(page, Content_Encoding="br"),
    ]
    found = read_all("crawl.warc", b"".join(records))
    assert len({one.fields["text"] for one in found}) == 1
    assert [one.line for one in found] == [1, 2, 3, 4, 5, 6]
    check_text(found[0].fields["text"])


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (response(html(), status="404 Not Found"), "the server answered '404', not with the page"),
        (response(html(), status="301 Moved"), "the server answered '301', not with the page"),
        (response(b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "image/png"), "image/png, not a page of text"),
        (response(b"%PDF-1.7", "application/pdf"), "application/pdf, not a page of text"),
        (response(b"\x01\x02\x03", ""), "content of an unknown type, not a page of text"),
        (response(b"", "text/html"), "an empty page"),
        (response(b"<html><body></body></html>"), "no main text was found in the page"),
        (response(gzip.compress(html().encode())[:100], Content_Encoding="gzip"), "its compressed body breaks off: its end"),
        (response(b"\x1f\x8b\x08" + b"!" * 50, Content_Encoding="gzip"), "its compressed body is damaged"),
        (response(b"\x0b\x02\x80", Content_Encoding="br"), "a body compressed with br, which is not read"),
        (record("response", "application/http", b""), "an empty answer of the server"),
        (record("conversion", "text/plain", b"caf\xe9"), "not UTF-8: byte 0xe9 at position 3"),
        (record("conversion", "text/plain", b" \n "), "a conversion without any text"),
        (record("conversion", "image/png", b"\x89PNG"), "a conversion to image/png, not to text"),
        (record("continuation", "application/http", b"the rest"), "a part of a record that was cut into several, which are not joined"),
        (record("resource", "text/html", b"<p>" + b"x" * 5000 + b"</p>"), "longer than the 4,000 bytes of data_curation.max_line_bytes"),
        (record("response", "text/html", b"x", length="many"), "a record that does not say how long it is; 5 bytes up to the next"),
        (b"garbage\r\nmore of it\r\n\r\n", "no record begins here, but 'garbage'; 14 bytes up to the next record are passed over"),
        (b"WARC/3.0\r\nWARC-Type: response\r\n\r\n", "no record begins here, but 'WARC/3.0'"),
    ],
)
def test_a_record_that_gives_no_page_is_quarantined_with_the_reason_and_the_others_are_read(read_all, one, why):
    before, found, after = read_all("crawl.warc", response(html()) + one + CONVERTED, max_line_bytes=4000)
    assert isinstance(before, Record)
    assert (found.file, found.line) == ("crawl.warc", 2)
    assert found.why.startswith(why)
    assert after == Record("crawl.warc", 3, {"text": "Ein Satz über das Meer.\nUnd noch einer.", "url": "http://example.org/page"}, "wet")


def test_a_plain_text_of_the_web_and_a_resource_are_pages_too(read_all):
    plain = response("Grüße vom Meer.\n".encode("latin-1"), "text/plain; charset=iso-8859-1")
    found = read_all("crawl.warc", plain + record("resource", "text/html", html().encode(), "<file:///page.html>"))
    assert found[0].fields["text"] == "Grüße vom Meer."
    assert found[1].fields["url"] == "file:///page.html"
    check_text(found[1].fields["text"])


def test_lines_of_a_crawlers_own_log_are_no_rows(read_all):
    assert (
        read_all("crawl.warc", INFO + record("resource", "text/plain", b"--12:00:00-- http://example.org/", "metadata://gnu.org/wget.log"))
        == []
    )


@pytest.mark.parametrize("name", ["texts.wet", "texts.warc.wet.gz", "texts.warc", "texts.warc.gz", "texts.txt", "texts.txt.gz", "texts.md"])
def test_texts_of_a_wet_file_are_rows_whatever_it_is_called(read_all, name):
    data = INFO + CONVERTED + CONVERTED
    found = read_all(name, gzip.compress(data) if name.endswith(".gz") else data)
    assert [(one.line, one.form) for one in found] == [(2, "wet"), (3, "wet")]
    assert rows_of(found[0])[0].form == "wet"
    assert found[0].fields == {"text": "Ein Satz über das Meer.\nUnd noch einer.", "url": "http://example.org/page"}


def test_a_wet_file_whose_line_ends_were_changed_is_read_though_its_lengths_are_wrong(read_all):
    data = (INFO + CONVERTED + record("conversion", "text/plain", b"The last one.")).replace(b"\r\n", b"\n")
    found = read_all("texts.wet.txt", data)
    assert [one.fields["text"] for one in found] == ["Ein Satz über das Meer.\nUnd noch einer.", "The last one."]


def test_a_wat_file_is_told_by_what_it_holds_and_refused_by_its_name(read_all, tmp_path):
    data = INFO + record("metadata", "application/json", b'{"Envelope": {}}') * 3
    why = "the file is a WAT file, which holds a crawl's metadata and no text; nothing of it is read"
    assert read_all("crawl.warc.gz", gzip.compress(data)) == [Unread("crawl.warc.gz", 2, why)]
    (tmp_path / "crawl.warc.wat.gz").write_bytes(gzip.compress(data))
    with pytest.raises(ConfigurationError) as error:
        list_sources(["crawl.warc.wat.gz"], tmp_path)
    assert error.value.message == "data_curation.sources: 'crawl.warc.wat.gz' has the suffix '.wat', which no reader knows"
    assert error.value.hint == "A WAT file holds a crawl's metadata and no text: name the WARC or WET file of the same crawl."


def test_of_a_truncated_archive_the_whole_records_are_read_and_the_cut_one_is_told(read_all):
    data = INFO + response(html()) + response(html())
    one, cut = read_all("crawl.warc", data[:-200])
    check_text(one.fields["text"])
    assert cut == Unread("crawl.warc", 3, "the file ends in the middle of this record")


def test_of_a_truncated_gzip_of_an_archive_the_whole_records_are_read_and_it_is_said_where_it_breaks_off(read_all):
    members = [gzip.compress(one) for one in (INFO, response(html()), response(html()))]
    one, broken = read_all("crawl.warc.gz", b"".join(members)[:-150])
    check_text(one.fields["text"])
    assert broken == Unread("crawl.warc.gz", 3, "the compressed file breaks off here: its end is missing")
    (damaged,) = read_all("crawl.warc.gz", b"no gzip at all, but called so")
    assert damaged.line == 1
    assert "damaged" in damaged.why


def test_an_archive_that_is_none_is_one_unreadable_place(read_all):
    (only,) = read_all("crawl.warc", b"<html><body>not an archive</body></html>" * 1000)
    assert only.line == 1
    assert only.why.startswith("no record begins here, but a text of 40000 characters")
    assert read_all("crawl.warc", b"") == []


def test_an_archive_needs_the_memory_of_a_record_not_of_the_file(tmp_path):
    import tracemalloc

    huge = record("response", "image/png", b"\0" * 30_000_000)
    with (tmp_path / "crawl.warc.gz").open("wb") as file:
        file.write(gzip.compress(INFO) + gzip.compress(huge) + gzip.compress(CONVERTED))
    (source,) = list_sources(["crawl.warc.gz"], tmp_path)
    tracemalloc.start()
    try:
        long, last = read(source, DataCurationConfig(max_line_bytes=1_000_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert long.why == "longer than the 1,000,000 bytes of data_curation.max_line_bytes"
    assert last.form == "wet"
    assert peak < 8_000_000


def test_an_archive_read_in_pieces_of_any_size_is_the_same(tmp_path):
    from components.data_curation.web import archive

    data = INFO + response(html()) + b"junk\r\nWARC/ is not enough\r\n" + CONVERTED + response(html(), status="500 Error") + CONVERTED
    whole = list(archive("a", iter([data]), 10**6))
    assert [type(one) for one in whole] == [Record, Unread, Record, Unread, Record]
    for size in (1, 7, 100, 4096):
        stream = io.BytesIO(data)
        assert list(archive("a", iter(lambda size=size, stream=stream: stream.read(size), b""), 10**6)) == whole
