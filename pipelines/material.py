"""What curation works on: the raw files, the evaluation sets that are kept out, and the revisions published before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common import places
from components.common.personal_data.names import identity
from components.common.places import Workdir
from components.common.progress import Reporter
from components.data_curation.contamination import list_sets
from components.data_curation.stage import Earlier, Source, list_sources, planned_earlier
from components.data_versioning import stage as versioning
from components.data_versioning.repository import is_url
from pipelines.config import Customization

DEMO = "demo:python-docs"


@dataclass(frozen=True)
class Material:
    """The files with their digests, earlier revisions as (tag, content_sha256), and the digest of the model that finds names ("": none)."""

    sources: list[Source]
    benchmarks: list[Source]
    earlier: list[tuple[str, str]]
    names_model: str

    def as_plan(self) -> dict[str, Any]:
        """As the data curation step is given it."""
        files = {"sources": [one.model_dump() for one in self.sources], "benchmarks": [one.model_dump() for one in self.benchmarks]}
        return {**files, "earlier": [list(one) for one in self.earlier], "names_model": self.names_model}


def look_at(config: Customization, workdir: Workdir, reporter: Reporter, drawn: Workdir | None = None) -> Material:
    """Find the material. Raises ConfigurationError for a source that is not there. What has to be made or fetched goes to `drawn`."""
    curation = config.data_curation
    scratch = drawn or workdir
    sources = list_sources(expand_demo(curation.sources, scratch), Path.cwd(), obtain=_obtain(scratch, reporter))
    benchmarks = list_sets(curation.decontamination.sets, Path.cwd())
    names = identity(curation.personal_data.names)
    if curation.published == "ignore":
        return Material(sources, benchmarks, [], names)
    published = versioning.manifests(config.data_versioning, workdir=reading_root(config, workdir, scratch))
    return Material(sources, benchmarks, planned_earlier(sources, benchmarks, published, curation, config.seed), names)


def reading_root(config: Customization, workdir: Workdir, scratch: Workdir) -> Path:
    """The folder under which the data repository is read: of a URL's a mirror is made, which goes to `scratch`."""
    return (scratch if is_url(config.data_versioning.repository) else workdir).root


def stored_earlier(earlier: Sequence[tuple[str, str]], workdir: Workdir) -> list[Earlier]:
    """Those of the earlier revisions' datasets that are in the store."""
    there = [(tag, sha256) for tag, sha256 in earlier if places.holds(workdir.store, sha256)]
    return [Earlier(tag, places.stored(workdir.store, sha256, "dataset")) for tag, sha256 in there]


def fetch_earlier(config: Customization, earlier: Sequence[tuple[str, str]], workdir: Workdir, reporter: Reporter) -> list[Earlier]:
    """The earlier revisions' datasets from the store, into which those that are missing are fetched."""
    there = {one.label for one in stored_earlier(earlier, workdir)}
    for tag, _ in earlier:
        if tag not in there:
            reporter.step(f"fetching {tag}")
            with places.workplace(workdir.store) as own:
                made = versioning.fetch(tag, own / "earlier", config.data_versioning, workdir=workdir.root, reporter=reporter)
                places.adopt(workdir.store, made)
    return [Earlier(tag, places.stored(workdir.store, sha256, "dataset")) for tag, sha256 in earlier]


def _obtain(workdir: Workdir, reporter: Reporter) -> Callable[[str], Path]:
    """Fetch what a dvc:// source names."""
    folder = workdir.state / "data_curation" / "sources"
    return lambda uri: versioning.obtain(uri, folder, reporter)


def demo_path(workdir: Workdir) -> Path:
    """Where the demo dataset's raw file lies, once it was built."""
    return workdir.root / "demo" / "python-docs.jsonl"


def expand_demo(sources: list[str], workdir: Workdir) -> list[str]:
    """Replace demo:python-docs by the dataset that is built from this machine's Python."""
    if DEMO not in sources:
        return sources
    from data.python_docs import build

    path = demo_path(workdir)
    path.parent.mkdir(parents=True, exist_ok=True)
    build(path)
    return [str(path) if source == DEMO else source for source in sources]
