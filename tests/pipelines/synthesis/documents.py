"""Documents for tests: pages about invented machines, each sentence with its own fact."""

from __future__ import annotations

from pathlib import Path

from tests.data_curation.document_files import build_pdf, pdf_lines

MACHINES = ("pump", "turbine", "compressor", "conveyor", "furnace", "centrifuge")
PARTS = ("gasket", "bearing", "filter", "valve", "sensor", "coupling", "impeller", "rotor")
ACTIONS = ("replaced", "inspected", "lubricated", "calibrated", "cleaned", "tightened", "drained", "tested")
PLACES = ("Bergen", "Lisbon", "Graz", "Tampere", "Nantes", "Ostrava")


def list_sentences(machine: int) -> list[str]:
    """Return the sentences about a machine."""
    name, place = MACHINES[machine], PLACES[machine]
    return [
        f"The {part} of the {place} {name} is {ACTIONS[(number + machine) % 8]} every {3 + number * 7 + machine} days "
        f"by team {chr(65 + (number * 5 + machine) % 26)}{number}."
        for number, part in enumerate(PARTS)
    ]


def write_documents(folder: Path, count: int = 4) -> Path:
    """Write Markdown files with a section of four sentences each; the last document is a PDF file of two pages."""
    folder.mkdir(parents=True, exist_ok=True)
    for machine in range(count - 1):
        sentences = list_sentences(machine)
        sections = [
            f"## Care, part {part + 1}\n\n{' '.join(sentences[4 * part : 4 * part + 4])}\n" for part in range(2)
        ]
        (folder / f"{MACHINES[machine]}.md").write_text(f"# The {MACHINES[machine]}\n\n" + "\n".join(sections))
    sentences = list_sentences(count - 1)
    pages = [pdf_lines(sentences[4 * page : 4 * page + 4], 60, 700) for page in range(2)]
    (folder / f"{MACHINES[count - 1]}.pdf").write_bytes(build_pdf(pages))
    return folder
