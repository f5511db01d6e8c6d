"""Small documents for tests: PDF files by a writer of text, rules and images, and Office files by zipfile."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

PAGE_WIDTH, PAGE_HEIGHT = 595, 842  # points: A4
WORD_NAMESPACE = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
RELATIONSHIPS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PACKAGE = "http://schemas.openxmlformats.org/package/2006"


def pdf_text(text: str, x: float, y: float, size: float = 10) -> str:
    """Return the content stream of a text at a position in points from the lower left corner."""
    escaped = text.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")
    return f"BT /F1 {size} Tf {x} {y} Td ({escaped}) Tj ET\n"


def pdf_lines(lines: Sequence[str], x: float, y: float, size: float = 10) -> str:
    """Return the content stream of lines below one another."""
    return "".join(pdf_text(line, x, y - number * size * 1.2, size) for number, line in enumerate(lines))


def pdf_grid(rows: Sequence[Sequence[str]], x: float, y: float, width: float = 100, height: float = 20) -> str:
    """Return the content stream of a table with a rule around every cell; (x, y) is its upper left corner."""
    columns = len(rows[0])
    rules = [f"{x} {y - i * height} m {x + columns * width} {y - i * height} l S\n" for i in range(len(rows) + 1)]
    rules += [f"{x + i * width} {y} m {x + i * width} {y - len(rows) * height} l S\n" for i in range(columns + 1)]
    cells = [
        pdf_text(cell, x + column * width + 4, y - row * height - 14)
        for row, one in enumerate(rows)
        for column, cell in enumerate(one)
    ]
    return "".join([*rules, *cells])


SCANNED_PAGE = f"q {PAGE_WIDTH} 0 0 {PAGE_HEIGHT} 0 0 cm /I1 Do Q\n"


Image = tuple[int, int, bytes]  # width, height and gray values
WHITE_PIXEL: Image = (1, 1, b"\xff")


def build_pdf(
    pages: Sequence[str],
    *,
    title: str = "",
    page_count: int = 0,
    is_encrypted: bool = False,
    image: Image = WHITE_PIXEL,
) -> bytes:
    """Return a PDF file.

    Args:
        pages: the content streams of the pages.
        title: the title in the metadata.
        page_count: repeats the last page up to this number of pages.
        is_encrypted: adds an encryption dictionary with an unknown password.
        image: the image of the pages with SCANNED_PAGE.
    """
    count = max(page_count, len(pages))
    width, height, values = image
    pixels = zlib.compress(values).hex() + ">"
    first = 6
    kids = [first + 2 * min(number, len(pages) - 1) for number in range(count)]
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {count} /Kids [{' '.join(f'{kid} 0 R' for kid in kids)}] >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
        f"<< /Type /XObject /Subtype /Image /Width {width} /Height {height} /ColorSpace /DeviceGray /BitsPerComponent 8 "
        f"/Filter [/ASCIIHexDecode /FlateDecode] /Length {len(pixels)} >>\nstream\n{pixels}\nendstream",
        f"<< /Title ({title}) >>",
    ]
    for number, stream in enumerate(pages):
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {PAGE_WIDTH} {PAGE_HEIGHT}] /Contents {first + 2 * number + 1} 0 R "
            "/Resources << /Font << /F1 3 0 R >> /XObject << /I1 4 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(stream.encode('cp1252'))} >>\nstream\n{stream}endstream")
    file = io.BytesIO()
    file.write(b"%PDF-1.7\n")
    offsets = []
    for number, text in enumerate(objects, 1):
        offsets.append(file.tell())
        file.write(f"{number} 0 obj\n{text}\nendobj\n".encode("cp1252"))
    start = file.tell()
    file.write(f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode())
    file.write(b"".join(f"{offset:010} 00000 n \n".encode() for offset in offsets))
    key = "41" * 32
    encryption = (
        f"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{key}> /U <{key}> >> /ID [<00> <00>]" * is_encrypted
    )
    trailer = f"<< /Size {len(objects) + 1} /Root 1 0 R /Info 5 0 R {encryption} >>"
    file.write(f"trailer\n{trailer}\nstartxref\n{start}\n%%EOF\n".encode())
    return file.getvalue()


def build_zip(members: Mapping[str, str | bytes]) -> bytes:
    """Return a ZIP archive."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def word_paragraph(text: str, style: str = "") -> str:
    """Return a paragraph, or with the style Heading1 a heading, of a Word document."""
    properties = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f'<w:p>{properties}<w:r><w:t xml:space="preserve">{escape(text)}</w:t></w:r></w:p>'


def word_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of a Word document."""
    cells = ("".join(f"<w:tc>{word_paragraph(cell)}</w:tc>" for cell in row) for row in rows)
    return f"<w:tbl>{''.join(f'<w:tr>{row}</w:tr>' for row in cells)}</w:tbl>"


def build_docx(body: str, *, prolog: str = "", **members: str | bytes) -> bytes:
    """Return a Word document.

    Args:
        body: the paragraphs and tables.
        prolog: inserted before the root element, such as a document type.
        members: further files in the archive.
    """
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="Heading{level}"><w:name w:val="heading {level}"/></w:style>'
        for level in range(1, 4)
    )
    return build_zip(
        {
            "[Content_Types].xml": f'<?xml version="1.0"?><Types xmlns="{PACKAGE}/content-types">'
            '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
            '<Default Extension="xml" ContentType="application/xml"/>'
            '<Override PartName="/word/document.xml" ContentType="application/vnd.openxmlformats-officedocument.'
            'wordprocessingml.document.main+xml"/></Types>',
            "_rels/.rels": f'<?xml version="1.0"?><Relationships xmlns="{PACKAGE}/relationships"><Relationship Id="r1" '
            f'Type="{RELATIONSHIPS}/officeDocument" Target="word/document.xml"/></Relationships>',
            "word/styles.xml": f'<?xml version="1.0"?><w:styles {WORD_NAMESPACE}>{styles}</w:styles>',
            "word/document.xml": f'<?xml version="1.0"?>{prolog}<w:document {WORD_NAMESPACE}><w:body>{body}</w:body></w:document>',
            **members,
        }
    )


def build_pptx(
    slides: Sequence[tuple[str, str]],
    order: Sequence[int] = (),
    notes: Mapping[int, str] | None = None,
    shapes: str = "",
) -> bytes:
    """Return a presentation with a title and a text on each slide.

    Args:
        slides: the title ("" for none) and the text of each slide; each line is a paragraph.
        order: the numbers of the slides from 1 in their order; () for the order of the files.
        notes: the speaker notes by number.
        shapes: further shapes of each slide.
    """
    drawing = (
        'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" '
        'xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main" '
        f'xmlns:r="{RELATIONSHIPS}"'
    )

    def shape(number: int, text: str, kind: str) -> str:
        paragraphs = "".join(f"<a:p><a:r><a:t>{escape(line)}</a:t></a:r></a:p>" for line in text.split("\n"))
        return (
            f'<p:sp><p:nvSpPr><p:cNvPr id="{number}" name="{kind}"/><p:cNvSpPr/><p:nvPr><p:ph type="{kind}"/></p:nvPr>'
            f"</p:nvSpPr><p:spPr/><p:txBody><a:bodyPr/>{paragraphs}</p:txBody></p:sp>"
        )

    numbers = range(1, len(slides) + 1)
    ids = "".join(f'<p:sldId id="{255 + number}" r:id="r{number}"/>' for number in order or numbers)
    links = "".join(
        f'<Relationship Id="r{number}" Type="{RELATIONSHIPS}/slide" Target="slides/slide{number}.xml"/>'
        for number in numbers
    )
    contents = {
        f"ppt/slides/slide{number}.xml": f'<?xml version="1.0"?><p:sld {drawing}><p:cSld><p:spTree><p:nvGrpSpPr>'
        '<p:cNvPr id="1" name=""/><p:cNvGrpSpPr/><p:nvPr/></p:nvGrpSpPr><p:grpSpPr/>'
        f"{shape(3, text, 'body')}{shape(2, title, 'title') if title else ''}{shapes}</p:spTree></p:cSld></p:sld>"
        for number, (title, text) in enumerate(slides, 1)
    }
    for number, note in (notes or {}).items():
        contents[f"ppt/slides/_rels/slide{number}.xml.rels"] = (
            f'<?xml version="1.0"?><Relationships xmlns="{PACKAGE}/relationships"><Relationship Id="r1" '
            f'Type="{RELATIONSHIPS}/notesSlide" Target="../notesSlides/notesSlide{number}.xml"/></Relationships>'
        )
        contents[f"ppt/notesSlides/notesSlide{number}.xml"] = (
            f'<?xml version="1.0"?><p:notes {drawing}><p:cSld><p:spTree>{shape(2, note, "body")}{shape(3, "7", "sldNum")}'
            "</p:spTree></p:cSld></p:notes>"
        )
    return build_zip(
        {
            "[Content_Types].xml": f'<?xml version="1.0"?><Types xmlns="{PACKAGE}/content-types">'
            '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
            '<Default Extension="xml" ContentType="application/xml"/></Types>',
            "_rels/.rels": f'<?xml version="1.0"?><Relationships xmlns="{PACKAGE}/relationships"><Relationship Id="r1" '
            f'Type="{RELATIONSHIPS}/officeDocument" Target="ppt/presentation.xml"/></Relationships>',
            "ppt/presentation.xml": f'<?xml version="1.0"?><p:presentation {drawing}><p:sldIdLst>{ids}</p:sldIdLst></p:presentation>',
            "ppt/_rels/presentation.xml.rels": f'<?xml version="1.0"?><Relationships xmlns="{PACKAGE}/relationships">{links}</Relationships>',
            **contents,
        }
    )


def build_epub(chapters: Sequence[str], title: str = "A book") -> bytes:
    """Return an EPUB file with chapters in XHTML."""
    names = [f"c{number}" for number in range(len(chapters))]
    manifest = "".join(f'<item id="{n}" href="{n}.xhtml" media-type="application/xhtml+xml"/>' for n in names)
    spine = "".join(f'<itemref idref="{name}"/>' for name in names)
    pages = {
        f"{name}.xhtml": f'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><body>{chapter}</body></html>'
        for name, chapter in zip(names, chapters, strict=True)
    }
    return build_zip(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": '<?xml version="1.0"?><container version="1.0" xmlns="urn:oasis:names:tc:opendocument:'
            'xmlns:container"><rootfiles><rootfile full-path="book.opf" media-type="application/oebps-package+xml"/></rootfiles>'
            "</container>",
            "book.opf": '<?xml version="1.0"?><package xmlns="http://www.idpf.org/2007/opf" version="3.0"><metadata '
            f'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>{title}</dc:title></metadata><manifest>{manifest}</manifest>'
            f"<spine>{spine}</spine></package>",
            **pages,
        }
    )


def build_xlsx(sheets: Mapping[str, Sequence[Sequence[object]]]) -> bytes:
    """Return a workbook. A date cell is `("date", days since 1899-12-30)`; None is an empty cell."""
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"

    def cell(place: str, value: object) -> str:
        match value:
            case bool():
                return f'<c r="{place}" t="b"><v>{int(value)}</v></c>'
            case int() | float():
                return f'<c r="{place}"><v>{value}</v></c>'
            case str():
                return f'<c r="{place}" t="inlineStr"><is><t>{escape(value)}</t></is></c>'
            case ("date", days):
                return f'<c r="{place}" s="1"><v>{days}</v></c>'
        return ""

    numbers = range(1, len(sheets) + 1)
    entries = "".join(
        f'<sheet name="{name}" sheetId="{n}" r:id="r{n}"/>' for n, name in zip(numbers, sheets, strict=True)
    )
    links = "".join(
        f'<Relationship Id="r{n}" Type="{RELATIONSHIPS}/worksheet" Target="worksheets/sheet{n}.xml"/>' for n in numbers
    )
    contents = {}
    for number, rows in enumerate(sheets.values(), 1):
        xml = "".join(
            f'<row r="{row}">{"".join(cell(f"{chr(65 + column)}{row}", value) for column, value in enumerate(cells))}</row>'
            for row, cells in enumerate(rows, 1)
        )
        contents[f"xl/worksheets/sheet{number}.xml"] = (
            f'<?xml version="1.0"?><worksheet xmlns="{main}"><sheetData>{xml}</sheetData></worksheet>'
        )
    return build_zip(
        {
            "[Content_Types].xml": f'<?xml version="1.0"?><Types xmlns="{PACKAGE}/content-types">'
            '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
            '<Default Extension="xml" ContentType="application/xml"/></Types>',
            "_rels/.rels": f'<?xml version="1.0"?><Relationships xmlns="{PACKAGE}/relationships"><Relationship Id="r1" '
            f'Type="{RELATIONSHIPS}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
            "xl/workbook.xml": f'<?xml version="1.0"?><workbook xmlns="{main}" xmlns:r="{RELATIONSHIPS}"><sheets>{entries}</sheets>'
            "</workbook>",
            "xl/_rels/workbook.xml.rels": f'<?xml version="1.0"?><Relationships xmlns="{PACKAGE}/relationships">{links}'
            f'<Relationship Id="s" Type="{RELATIONSHIPS}/styles" Target="styles.xml"/></Relationships>',
            "xl/styles.xml": f'<?xml version="1.0"?><styleSheet xmlns="{main}"><cellXfs count="2"><xf numFmtId="0"/>'
            '<xf numFmtId="14"/></cellXfs></styleSheet>',
            **contents,
        }
    )
