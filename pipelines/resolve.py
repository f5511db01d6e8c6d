"""The first step: what this customization depends on, as digests, so that every later step's cache key is complete.

It is never cached. It lists the sources and takes their digests, those of each stage's code, of the base model and of the model in
service, and hands every stage a plan: all that its result depends on, and nothing that another stage depends on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from components.common import hashing, models, places
from components.common.launch import settings
from components.common.places import Workdir
from components.common.progress import Reporter
from components.evaluation import loading
from components.evaluation.tasks import checking, sources
from components.evaluation.tasks.checking import Asked
from components.model_registry.stage import Champion, champion, with_model
from components.triton_packaging import engine
from pipelines import material
from pipelines.config import Customization, check_whole
from pipelines.material import Material

PROOF_OFF = "triton_packaging.prove is off"


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
    check_whole(config)
    reporter.step("looking at the sources")
    found = material.look_at(config, workdir, reporter)
    material.fetch_earlier(config, found.earlier, workdir, reporter)
    reporter.step("looking at the base model")
    base = models.base_model(config.fine_tuning.base_model, reporter)
    asked = asked_by_tasks(config, lambda: (models.load_tokenizer(base.path), models.configuration(base.path)), reporter)
    reporter.step("looking at the model in service")
    reason = unproven(config)
    if reason:
        reporter.note(unproven_note(reason))
    return plan(config, found, base.sha256, lambda key: _incumbent(config, workdir, key, reporter), reason, asked)


def asked_by_tasks(config: Customization, base: Callable[[], tuple[Any, Any]], reporter: Reporter) -> list[Asked]:
    """What the evaluation's tasks will ask; `base` gives the base model's tokenizer and configuration.

    Raises what the evaluation would raise itself after the training, as far as that shows without a dataset.
    """
    settings = config.evaluation
    loading.check_installed(settings.engine)
    if not checking.needed(settings.tasks):
        return []
    reporter.step("looking at the evaluation's tasks")
    tokenizer, configuration = base()
    context = getattr(configuration.get_text_config(decoder=True), "max_position_embeddings", None)
    return checking.look(settings.tasks, tokenizer, config.seed, settings.max_length, reporter, context)


def plan(
    config: Customization,
    found: Material,
    base_sha256: str,
    incumbent_of: Callable[[str], str | None],
    reason: str | None,
    asked: Sequence[Asked],
) -> Plans:
    """The plans that follow from what was found. `incumbent_of` gives, for the recipe's key, the digest of the model to compare with;
    `reason` is why the package cannot be proven here."""
    curation, tuning = curation_plan(config, found), tuning_plan(config, base_sha256)
    # The same recipe on another device comes to another model, in its last bits: it is compared with the champion like any other.
    finetune_key = hashing.digest([counting(curation), counting(tuning), models.arithmetic()])
    incumbent = incumbent_of(finetune_key)
    return Plans(
        data_curation=curation,
        data_versioning=_plan("data_versioning", config),
        fine_tuning=tuning,
        evaluation=evaluation_plan(config, incumbent, asked),
        triton_packaging=packaging_plan(config, reason),
        model_registry={**_plan("model_registry", config), "finetune_key": finetune_key, "incumbent": incumbent},
    )


def curation_plan(config: Customization, found: Material) -> dict[str, Any]:
    """The curation's plan; nothing of the result depends on `where`."""
    curation = {**_plan("data_curation", config), **found.as_plan()}
    return {**curation, "where": {name: curation["config"].pop(name) for name in ("engine", "ray_address", "workers")}}


def counting(plan: dict[str, Any]) -> dict[str, Any]:
    """What of a plan the step's result depends on, as its key has it: all but `where`."""
    return {name: value for name, value in plan.items() if name != "where"}


def tuning_plan(config: Customization, base_sha256: str) -> dict[str, Any]:
    """The fine-tuning's plan; nothing of the result depends on `where`, which only a sweep has."""
    where = settings.from_environment()
    elsewhere = {"launcher": where.arithmetic()} if where.kind != "process" else {}
    tuning = {**_plan("fine_tuning", config), "base_sha256": base_sha256, "threads": os.environ.get("TUNELINE_THREADS", ""), **elsewhere}
    sweep = tuning["config"].get("sweep")
    return {**tuning, "where": {"parallel": sweep.pop("parallel")}} if sweep else tuning


def evaluation_plan(config: Customization, incumbent: str | None, asked: Sequence[Asked]) -> dict[str, Any]:
    """The evaluation's plan; `incumbent` is the digest of the model to compare with."""
    measured: dict[str, Any] = {"files": sources.digests(config.evaluation.tasks)}
    if others := {one.settings.name: one.digest for one in asked if not one.known_by_files}:
        measured["asked"] = others
    return {**_plan("evaluation", config), "incumbent": incumbent, **measured}


def packaging_plan(config: Customization, reason: str | None) -> dict[str, Any]:
    """The packaging's plan; `reason` is why the package cannot be proven."""
    return {**_plan("triton_packaging", config), "unproven": reason}


def alone(stage: str, config: Customization, workdir: Workdir, reporter: Reporter) -> tuple[str, str]:
    """The plan of one stage, and that of the dataset's versioning, as the JSON that a whole run hands on."""
    check_whole(config)
    plans = (plan_one(stage, config, workdir, reporter), _plan("data_versioning", config))
    found, versioning = (hashing.canonical_json(one).decode() for one in plans)
    return found, versioning


def plan_one(stage: str, config: Customization, workdir: Workdir, reporter: Reporter) -> dict[str, Any]:
    """The plan of one stage that is run alone, the same as in a whole run, after a look at what this stage depends on and nothing else.

    An evaluation compares with the model in service. Raises ConfigurationError for what is not there.
    """
    if stage == "data_curation":
        found = material.look_at(config, workdir, reporter)
        material.fetch_earlier(config, found.earlier, workdir, reporter)
        return curation_plan(config, found)
    if stage == "fine_tuning":
        return tuning_plan(config, models.base_model(config.fine_tuning.base_model, reporter).sha256)
    if stage == "evaluation":
        base = models.base_model(config.fine_tuning.base_model, reporter)
        asked = asked_by_tasks(config, lambda: (models.load_tokenizer(base.path), models.configuration(base.path)), reporter)
        return evaluation_plan(config, _incumbent(config, workdir, "", reporter), asked)
    return packaging_plan(config, unproven(config))


def unproven(config: Customization) -> str | None:
    """Why no server can prove the package here."""
    return engine.unproven(config.triton_packaging.backend) if config.triton_packaging.prove else PROOF_OFF


def unproven_note(reason: str) -> str:
    """Said before any work: whoever waits for a champion should not learn it at the end."""
    what_to_do = "Set triton_packaging.prove to true to have it proven." if reason == PROOF_OFF else engine.hint()
    return f"the model will be packaged unproven and not be promoted: {reason}. {what_to_do}"


def _plan(stage: str, config: Customization) -> dict[str, Any]:
    return {"config": getattr(config, stage).model_dump(mode="json"), "seed": config.seed, "code": hashing.code_sha256(stage)}


def compared_with(found: Champion | None, finetune_key: str) -> str | None:
    """Digest of the model that the candidate is compared with.

    It is the model in service. Where that came of the very recipe that runs now, the candidate will be it again: then it is the one that
    the champion itself was compared with, so that the evaluation it passed is found in the cache.
    """
    if found is None:
        return None
    return found.incumbent_sha256 if found.finetune_key == finetune_key else found.model_sha256


def _incumbent(config: Customization, workdir: Workdir, finetune_key: str, reporter: Reporter) -> str | None:
    """The model to compare with, fetched from the registry where it is not in this store."""
    found = champion(config.model_registry.name)
    incumbent = compared_with(found, finetune_key)
    if found is None or incumbent is None or _stored(workdir, incumbent):
        return incumbent
    holder = found if incumbent == found.model_sha256 else with_model(found.name, incumbent)
    if holder is None:
        reporter.note(f"what version {found.version} was compared with is neither here nor in the registry: it is compared with itself")
        holder = found
    if not _stored(workdir, holder.model_sha256):
        reporter.note(f"version {holder.version} of {holder.name}, to compare with, is not in this store and is fetched from the registry")
        with places.workplace(workdir.store) as own:
            places.adopt(workdir.store, holder.fetch(own / "incumbent"))
    return holder.model_sha256


def _stored(workdir: Workdir, sha256: str) -> bool:
    return places.holds(workdir.store, sha256)
