"""The first step: what this customization depends on, as digests, so that every later step's cache key is complete.

It is never cached. It lists the sources and takes their digests, those of each stage's code, of the base model and of the model in
service, and hands every stage a plan: all that its result depends on, and nothing that another stage depends on.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from components.common import hashing, models, places
from components.common.places import Workdir
from components.common.progress import Reporter
from components.data_curation.stage import list_sources
from components.model_registry.stage import champion
from components.triton_packaging import engine
from pipelines.config import Customization

DEMO = "demo:python-docs"


@dataclass(frozen=True)
class Plans:
    """One plan a stage."""

    data_curation: dict[str, Any]
    data_versioning: dict[str, Any]
    fine_tuning: dict[str, Any]
    evaluation: dict[str, Any]
    triton_packaging: dict[str, Any]
    model_registry: dict[str, Any]

    def as_json(self) -> dict[str, str]:
        """The plans as canonical JSON by stage: equal plans are equal parameters."""
        return {stage: hashing.canonical_json(plan).decode() for stage, plan in asdict(self).items()}


def resolve(config: Customization, workdir: Workdir, reporter: Reporter) -> Plans:
    """Look at everything the customization depends on. Raises ConfigurationError for a source or a model that is not there."""
    reporter.step("looking at the sources")
    sources = [s.model_dump() for s in list_sources(expand_demo(config.data_curation.sources, workdir), Path.cwd())]
    reporter.step("looking at the base model")
    base = models.base_model(config.fine_tuning.base_model, reporter)
    curation = {**_plan("data_curation", config), "sources": sources}
    tuning = {**_plan("fine_tuning", config), "base_sha256": base.sha256, "threads": os.environ.get("TUNELINE_THREADS", "")}
    finetune_key = hashing.digest([curation, tuning])
    reporter.step("looking at the model in service")
    incumbent = _incumbent(config, workdir, finetune_key, reporter)
    return Plans(
        data_curation=curation,
        data_versioning=_plan("data_versioning", config),
        fine_tuning=tuning,
        evaluation={**_plan("evaluation", config), "incumbent": incumbent},
        triton_packaging={**_plan("triton_packaging", config), "unproven": _unproven(config, reporter)},
        model_registry={**_plan("model_registry", config), "finetune_key": finetune_key, "incumbent": incumbent},
    )


def _unproven(config: Customization, reporter: Reporter) -> str | None:
    """Why no server can prove the package here. Said now: whoever waits for a champion should not learn it at the end."""
    reason = engine.availability() if config.triton_packaging.prove else "triton_packaging.prove is off"
    if reason:
        reporter.note(f"the model will be packaged unproven and not be promoted: {reason}. {engine.hint()}")
    return reason


def _plan(stage: str, config: Customization) -> dict[str, Any]:
    return {"config": getattr(config, stage).model_dump(mode="json"), "seed": config.seed, "code": hashing.code_sha256(stage)}


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


def _incumbent(config: Customization, workdir: Workdir, finetune_key: str, reporter: Reporter) -> str | None:
    """Digest of the model in service, to be compared with.

    Where the champion came of the very recipe that runs now, the candidate will be the champion again. Then the incumbent is the one
    the champion itself was compared with, so that the evaluation it passed is found in the cache.
    """
    found = champion(config.model_registry.name)
    if found is None:
        return None
    if found.finetune_key == finetune_key:
        return found.incumbent_sha256
    if not (workdir.store / found.model_sha256 / "manifest.json").exists():
        reporter.note(f"the champion, version {found.version}, is not in this store and is fetched from the registry")
        places.adopt(workdir.store, found.fetch(workdir.store / "unfinished" / f"incumbent-{found.model_sha256[:16]}"))
    return found.model_sha256
