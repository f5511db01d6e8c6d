"""CycloneDX 1.6 bill of materials of a model version (ML-BOM): model card, data, base models, software, dependencies."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.counts import format_count
from pipelines.provenance.exports.version_facts import (
    UNKNOWN,
    JSONObject,
    VersionFacts,
    format_number,
    is_on_hub,
    shorten_uri,
)
from pipelines.provenance.lineage import Link

# Identifiers of SPDX by their names on model hubs; CycloneDX accepts other licences as names only.
SPDX_IDS = {
    name.lower(): name
    for name in (
        "Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "ISC", "Zlib", "Unlicense", "WTFPL", "MS-PL", "MPL-2.0", "Artistic-2.0",
        "CC0-1.0", "CC-BY-2.0", "CC-BY-3.0", "CC-BY-4.0", "CC-BY-SA-3.0", "CC-BY-SA-4.0", "CC-BY-NC-4.0", "CDLA-Permissive-1.0",
        "CDLA-Permissive-2.0", "ODC-By-1.0", "PSF-2.0",
    )
}  # fmt: skip
COMPONENT_TYPES = {"base_model": "machine-learning-model", "model": "machine-learning-model", "repository": "file"}
DATA_TYPES = {"dataset": "dataset", "raw": "dataset", "evaluation": "other"}


def render_ml_bom(facts: VersionFacts) -> str:
    """Return the bill of materials as JSON. Its timestamp is the time of the registration."""
    links: dict[str, Link] = {}
    for link in facts.chain:  # a base model that is a tuned model is in the chain twice
        if link.sha256 and link.kind not in ("version", "revision"):
            links.setdefault(link.sha256, link)
    software: dict[str, JSONObject] = {}
    dependencies: dict[str, list[str]] = {}
    components = []
    for link in links.values():
        used = {one["bom-ref"]: one for one in _list_software(link)}
        software |= used
        dependencies[_get_ref(link)] = sorted(
            {_get_ref(links[one]) for one in link.inputs if one in links} | used.keys()
        )
        components.append(_describe_link(link, facts))
    model_sha256 = facts.registered.model_sha256
    [model] = [one for one in components if one["bom-ref"] == f"model:{model_sha256}"]
    components.remove(model)
    bom: JSONObject = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": facts.registered.registered_at,
            "tools": {"components": [{"type": "application", "name": "tuneline"}]},
            "component": model,
        },
        "components": [*components, *(software[ref] for ref in sorted(software))],
        "dependencies": [{"ref": ref, "dependsOn": refs} for ref, refs in dependencies.items()],
        # Never "complete": manifests record the packages that results depend on, not the whole environment.
        "compositions": [
            {"aggregate": "incomplete" if facts.missing_links else "unknown", "dependencies": [model["bom-ref"]]}
        ],
    }
    bom["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bom))}"  # one number for each content
    return json.dumps(bom, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _get_ref(link: Link) -> str:
    return f"{link.kind}:{link.sha256}"


def _describe_link(link: Link, facts: VersionFacts) -> JSONObject:
    """Return the component of a link, with the digests of its payload files."""
    is_model = link is facts.find_link("model")
    component: JSONObject = {
        "type": COMPONENT_TYPES.get(link.kind, "data"),
        "bom-ref": _get_ref(link),
        "name": _get_name(link, facts),
        "hashes": [_describe_hash(link.sha256)],
        "properties": _list_properties({"tuneline:kind": link.kind}),
    }
    if link.artifact:
        component["components"] = list(_list_files(link.artifact))
        component["properties"] += _list_properties(_describe_origin(link.artifact))
    if is_model:
        component |= {
            "name": facts.registered.name,
            "version": facts.registered.version,
            "modelCard": _describe_model(facts),
        }
        component["licenses"] = _describe_licence(facts.base_licence)
        component["properties"] += _list_properties(
            {"tuneline:verdict": facts.registered.tags.get("tuneline.verdict", UNKNOWN)}
        )
    elif link is facts.find_link("base_model"):
        component |= {
            "name": facts.base_name,
            "version": facts.base_revision,
            "licenses": _describe_licence(facts.base_licence),
        }
        if is_on_hub(link.uri):
            revision = "" if facts.base_revision == UNKNOWN else f"@{facts.base_revision}"
            component["purl"] = f"pkg:huggingface/{facts.base_name}{revision}"
    elif link is facts.find_link("dataset"):
        component |= {"name": facts.data_name, "licenses": _describe_licence(facts.data_licence)}
    if link.kind in ("base_model", "dataset", "model"):
        component.setdefault("licenses", _describe_licence(UNKNOWN))
    if component["type"] == "data":
        component["data"] = [_describe_data(link)]
    return component


def _get_name(link: Link, facts: VersionFacts) -> str:
    """Return the name of a base model or a raw file as the lineage records it, and a name from the digest of an artifact."""
    if link.kind not in ("raw", "base_model"):
        return f"{link.kind}-{link.sha256[:12]}"
    sources = [one for linked in facts.chain if linked.artifact for one in linked.artifact.manifest.inputs]
    return shorten_uri(next((one.uri for one in sources if one.content_sha256 == link.sha256), link.uri)) or UNKNOWN


def _describe_data(link: Link) -> JSONObject:
    """Return the kind of a data component, and the personal data that a curation found in a dataset."""
    data: JSONObject = {"type": DATA_TYPES.get(link.kind, "other"), "name": link.title}
    summary = link.artifact.manifest.summary if link.artifact else {}
    if splits := summary.get("splits"):
        data["description"] = ", ".join(f"{name}: {format_count(rows, 'row')}" for name, rows in splits.items())
    if found := [
        f"{kind}: {one['found']} found, action {one['action']}"
        for kind, one in summary.get("personal_data", {}).items()
    ]:
        data["sensitiveData"] = found
    return data


def _describe_model(facts: VersionFacts) -> JSONObject:
    """Return the model card: architecture, data, metrics with slices and intervals, and limits."""
    recipe, training = facts.get_config("model"), facts.get_summary("model")
    datasets = dict.fromkeys(_get_ref(link) for link in facts.chain if link.kind == "dataset" and link.sha256)
    parameters: JSONObject = {
        "task": facts.task,
        "architectureFamily": facts.architecture.get("model_type", UNKNOWN),
        "modelArchitecture": ", ".join(facts.architecture.get("architectures") or [UNKNOWN]),
        "datasets": [{"ref": ref} for ref in datasets],
        "inputs": [{"format": "text"}],
        "outputs": [{"format": "text"}],
    }
    if rows := facts.get_summary("dataset").get("rows_kind"):
        parameters["approach"] = {"type": "self-supervised" if rows == "text" else "supervised"}
    limits = [f"Training rows have at most {recipe['max_length']} tokens."] if recipe.get("max_length") else []
    limits += [f"Evaluation: {reason}" for reason in facts.reasons]
    values = {name: format_number(training.get(name)) for name in ("steps", "tokens", "device")}
    return {
        "modelParameters": parameters,
        "quantitativeAnalysis": {"performanceMetrics": list(_list_metrics(facts))},
        "considerations": {"technicalLimitations": limits or [UNKNOWN], "useCases": [UNKNOWN], "users": [UNKNOWN]},
        "properties": _list_properties(
            {
                "tuneline:objective": str(recipe.get("objective", UNKNOWN)),
                "tuneline:adaptation": str(recipe.get("adaptation", UNKNOWN)),
                **{f"tuneline:training:{name}": value for name, value in values.items()},
                "tuneline:training:flop": format_number(facts.training_flops),
                "tuneline:training:energy": UNKNOWN,
            }
        ),
    }


def _list_metrics(facts: VersionFacts) -> Iterator[JSONObject]:
    """Yield each score and its difference to the base model; the interval is that of the difference."""
    for score in facts.list_scores():
        part = {"slice": score.slice} if score.slice else {}
        name = f"{score.task}.{score.metric}"
        yield {"type": name, "value": format_number(score.values.get("candidate")), **part}
        if score.difference is not None:
            metric: JSONObject = {
                "type": f"{name}, difference from the base model",
                "value": format_number(score.difference),
                **part,
            }
            if interval := score.values.get("ci95"):
                low, high = map(format_number, interval)
                metric["confidenceInterval"] = {"lowerBound": low, "upperBound": high}
            yield metric


def _list_software(link: Link) -> Iterator[JSONObject]:
    """Yield the software that made an artifact: Python, tuneline, packages, and the Triton server."""
    made = link.artifact.manifest.produced_by if link.artifact else {}
    proof = link.artifact.manifest.summary.get("proof") if link.artifact else None
    applications = {
        "tuneline": made.get("tuneline"),
        "Python": made.get("python"),
        "tritonserver": (proof or {}).get("server_version"),
    }
    for name, version in applications.items():
        if version:
            yield {"type": "application", "bom-ref": f"{name}@{version}", "name": name, "version": version}
    for name, version in made.get("packages", {}).items():
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{quote(version)}"
        yield {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _list_files(artifact: Artifact) -> Iterator[JSONObject]:
    for file in artifact.manifest.files:
        if file.payload:
            yield {
                "type": "file",
                "bom-ref": f"{artifact.manifest.kind}:{artifact.sha256}/{file.path}",
                "name": file.path,
                "hashes": [_describe_hash(file.sha256)],
            }


def _describe_origin(artifact: Artifact) -> dict[str, str]:
    manifest = artifact.manifest
    values = {
        "manifest_sha256": manifest.manifest_sha256,
        "config_sha256": manifest.config_sha256,
        "seed": str(manifest.seed),
        "git_commit": manifest.produced_by.get("git_commit"),
    }
    return {f"tuneline:{name}": value or UNKNOWN for name, value in values.items()}


def _describe_hash(sha256: str) -> JSONObject:
    return {"alg": "SHA-256", "content": sha256}


def _describe_licence(name: str) -> list[JSONObject]:
    spdx = SPDX_IDS.get(name.lower())
    return [{"license": {"id": spdx} if spdx else {"name": name}}]


def _list_properties(values: Mapping[str, str]) -> list[JSONObject]:
    return [{"name": name, "value": value} for name, value in values.items()]
