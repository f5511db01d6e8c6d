"""Exports in standard formats from facts that are known, unknown or private.

The exports of a real chain are tested in test_lineage.py, which builds one.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.model_registry.stage import RegisteredModel
from pipelines.provenance.exports import croissant, dossier, hub_card, ml_bom
from pipelines.provenance.exports.annex_items import ANNEXES
from pipelines.provenance.exports.version_facts import UNKNOWN, VersionFacts, shorten_uri
from pipelines.provenance.lineage import MISSING, UNCHECKED, Link
from tests.model_registry.evidence_builder import build_dataset, build_evaluation

COMMIT, BASE_SHA256 = "5" * 40, "ba5e" * 16
REGISTERED_AT = "2026-11-02T10:00:00+00:00"


def check_bom(text: str) -> dict[str, Any]:
    """Validate a bill of materials against the strict schema of CycloneDX 1.6, and return it."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    validator, bom = JsonStrictValidator(SchemaVersion.V1_6), json.loads(text)
    assert validator.validate_str(text) is None
    assert validator.validate_str(json.dumps({**bom, "surprise": 1})) is not None, "the validator is not strict"
    references = [bom["metadata"]["component"]["bom-ref"], *(one["bom-ref"] for one in bom["components"])]
    assert not [name for name, count in Counter(references).items() if count > 1]
    assert {ref for one in bom["dependencies"] for ref in (one["ref"], *one["dependsOn"])} <= set(references)
    return dict(bom)


def build_model(folder: Path, dataset: Artifact) -> Artifact:
    artifact_folder.claim_folder(folder, "model")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    (folder / "README.md").write_text(
        "---\nlicense: apache-2.0\n---\n\n# sft × lora\n\n## Inputs\n\ndvc:///home/ann/data-repository@5:d\n"
    )
    base = ArtifactInput(kind="base_model", content_sha256=BASE_SHA256, uri=f"hf://org/base@{COMMIT}")
    return artifact_folder.publish(
        folder,
        "model",
        payload=["adapter_model.safetensors"],
        inputs=[dataset.as_input("dvc:///home/ann/data@1:datasets/d"), base],
        config={"objective": "sft", "adaptation": "lora", "max_length": 128, "card": {"data_licence": "CC-BY-4.0"}},
        seed=1,
        key="model",
        summary={"steps": 3, "tokens": 100, "parameters": {"all": 10, "trainable": 2}},
    )


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    folder = tmp_path_factory.mktemp("exports")
    dataset = build_dataset(folder / "dataset")
    summary = {
        "rows": {"in": 20, "kept": 18, "quarantined": 0, "rejected": {"duplicate": 2}},
        "personal_data": {"email": {"found": 3, "rows": 2, "action": "redact"}},
    }
    dataset.manifest.summary.update(summary)
    dataset.manifest.inputs.append(ArtifactInput(kind="raw", content_sha256="4" * 64, uri="/home/ann/raw.jsonl"))
    model = build_model(folder / "model", dataset)
    evaluation = build_evaluation(folder / "evaluation", model.manifest, dataset)
    path = evaluation.path / "evaluation.json"
    content = json.loads(path.read_text())
    scores = {**content["metrics"]["held_out"]["loss"], "ci95": [-1.5, -0.5]}
    content["metrics"]["held_out"]["loss"] = scores
    content["slices"] = {"held_out": {"loss": [{"slice": "source a", **scores}]}}
    path.write_text(json.dumps(content))
    return {"evaluation": evaluation, "model": model, "dataset": dataset}


@pytest.fixture
def facts(artifacts: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> VersionFacts:
    """Facts of a version whose artifacts were all found."""
    monkeypatch.setenv("TUNELINE_WORKDIR", str(tmp_path))
    return describe(artifacts, tmp_path)


def describe(artifacts: dict[str, Artifact | None], store: Path) -> VersionFacts:
    chain = [Link("version", "1" * 64, "models:/helper/3")]
    for kind, artifact in artifacts.items():
        chain.append(Link(kind, artifact.sha256 if artifact else kind.encode().hex().zfill(64), "", artifact=artifact))
        if artifact is None:
            chain[-1].status, chain[-1].detail = MISSING, "not found in /store"
    chain.append(Link("base_model", BASE_SHA256, f"hf://org/base@{COMMIT}"))
    chain.append(Link("raw", "4" * 64, "file:///home/ann/raw.jsonl"))
    sha256 = next(link.sha256 for link in chain if link.kind == "model")
    chain[1].inputs = [sha256]
    registered = RegisteredModel(
        name="helper",
        version="3",
        model_sha256=sha256,
        incumbent_sha256=None,
        finetune_key="",
        store_uri="",
        registered_at=REGISTERED_AT,
        tags={"tuneline.verdict": "accepted"},
    )
    return VersionFacts(registered, chain, store)


def test_bill_of_materials_has_the_known_facts(facts: VersionFacts) -> None:
    bom = check_bom(ml_bom.render_ml_bom(facts))
    model = bom["metadata"]["component"]
    components = {one["bom-ref"].partition(":")[0]: one for one in bom["components"]}
    assert bom["metadata"]["timestamp"] == REGISTERED_AT
    assert bom["compositions"][0]["aggregate"] == "unknown"
    assert model["hashes"] == [{"alg": "SHA-256", "content": facts.registered.model_sha256}]
    assert model["modelCard"]["modelParameters"]["modelArchitecture"] == "LlamaForCausalLM"
    assert components["base_model"]["purl"] == f"pkg:huggingface/org/base@{COMMIT}"
    assert components["base_model"]["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert components["dataset"]["licenses"] == [{"license": {"id": "CC-BY-4.0"}}]
    assert components["dataset"]["data"][0]["sensitiveData"] == ["email: 3 found, action redact"]
    assert components["raw"]["name"] == "raw.jsonl"
    assert "pkg" in components, "the pinned packages are missing"
    metrics = model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    interval = {"lowerBound": "-1.5", "upperBound": "-0.5"}
    difference = {
        "type": "held_out.loss, difference from the base model",
        "value": "-1",
        "confidenceInterval": interval,
    }
    value = {"type": "held_out.loss", "value": "1"}
    assert metrics == [value, difference, {**value, "slice": "source a"}, {**difference, "slice": "source a"}]


def test_base_model_that_is_a_tuned_model_is_one_component(facts: VersionFacts) -> None:
    facts.chain[-1].parent = facts.chain[-2]
    chain = [*facts.chain, Link("model", BASE_SHA256, "models:/earlier/1"), Link("dataset", "6" * 64, "store:6")]
    bom = check_bom(ml_bom.render_ml_bom(VersionFacts(facts.registered, chain, facts.store)))
    assert [one["bom-ref"] for one in bom["components"] if BASE_SHA256 in one["bom-ref"]] == [
        f"base_model:{BASE_SHA256}"
    ]
    assert len(bom["metadata"]["component"]["modelCard"]["modelParameters"]["datasets"]) == 2


def test_model_card_has_the_metadata_of_the_hub(facts: VersionFacts) -> None:
    text = hub_card.render_card(facts)
    card = ModelCard(text)
    assert card.data.base_model == "org/base"
    assert card.data.license == "apache-2.0"
    assert card.data.library_name == "peft"
    [result] = card.data.eval_results
    assert (result.metric_name, result.metric_value, result.verified) == ("held_out.loss", 1.0, False)
    assert result.metric_args["ci95_of_difference_to_base"] == [-1.5, -0.5]
    assert "| held_out.loss | source a | 1 | 2 | – | -1 (-1.5 to -0.5) | 4 |" in text
    assert "### Inputs" in text, "the card of the training is missing"
    assert "/home/ann" not in text


def test_croissant_states_files_columns_and_personal_data(facts: VersionFacts) -> None:
    dataset = facts.find_artifact("dataset")
    assert dataset is not None
    description = json.loads(croissant.render_croissant(dataset, name="dataset-v2", licence="CC-BY-4.0"))
    digests = {file.path: file.sha256 for file in dataset.manifest.files if file.payload}
    assert {one["contentUrl"]: one["sha256"] for one in description["distribution"]} == digests
    assert description["version"] == "2.0.0"
    assert "datePublished" not in description, "mlcroissant refuses other values than dates"
    assert description["rai:personalSensitiveInformation"] == ["email: 3 found in 2 rows, action redact"]
    assert description["isBasedOn"] == ["raw.jsonl"]
    fields = {one["@id"]: one for one in description["recordSet"][0]["field"]}
    messages = fields[f"{description['recordSet'][0]['@id']}/messages"]
    assert messages["repeated"]
    assert [one["@id"].rpartition("/")[2] for one in messages["subField"]] == ["role", "content"]


def test_missing_artifacts_are_stated_as_unknown(facts: VersionFacts, artifacts: dict[str, Artifact]) -> None:
    without = describe(dict.fromkeys(artifacts), facts.store)
    without.chain[-2].status = UNCHECKED  # the base model is not on this machine
    bom = check_bom(ml_bom.render_ml_bom(without))
    assert bom["compositions"][0]["aggregate"] == "incomplete"
    assert bom["metadata"]["component"]["licenses"] == [{"license": {"name": UNKNOWN}}]
    assert "approach" not in bom["metadata"]["component"]["modelCard"]["modelParameters"]
    assert bom["serialNumber"] != json.loads(ml_bom.render_ml_bom(facts))["serialNumber"]
    card = ModelCard(hub_card.render_card(without))
    assert (card.data.license, card.data.eval_results) == (UNKNOWN, None)
    document = dossier.render_dossier(without)
    assert document.items[dossier.FILLED] == []
    assert {link.kind for link in without.missing_links} == {*artifacts, "base_model"}
    assert all(f"- {link.title} `{link.sha256}`" in document.text for link in without.missing_links)
    assert "/store" not in document.text
    assert "- rows by split: unknown" in document.text


def test_dossier_lists_every_item_once_with_its_state(facts: VersionFacts) -> None:
    document = dossier.render_dossier(facts)
    numbers = [f"{annex} {item.number}" for annex, items in ANNEXES.items() for item in items]
    assert len(numbers) == len(set(numbers)) == 37
    assert sorted(number for state in document.items.values() for number in state) == sorted(numbers)
    counts = [len(document.items[state]) for state in (dossier.FILLED, dossier.PARTIAL, dossier.OPEN)]
    assert f"**{counts[0]} of 37 items filled, {counts[1]} partly filled, {counts[2]} open.**" in document.text
    assert "XI 1.1(d)" in document.items[dossier.FILLED]  # architecture and number of parameters
    assert "IV 2(d)" in document.items[dossier.PARTIAL]  # the data owner knows how the sources were collected
    assert "IV 5" in document.items[dossier.OPEN]
    assert "risk management file (usually from the risk manager)" in document.text
    assert "- curation: see IV 2(d)" in document.text
    page = dossier.render_html(document)
    assert "<h2>Annex XI</h2>" in page


def test_names_with_line_breaks_add_no_section(facts: VersionFacts) -> None:
    hostile = "slice a\n\n## Annex V\n"
    scores = {"candidate": 1.0, "base": 2.0, "n": 4}
    facts.__dict__["evaluation"] = {
        "reasons": [hostile],
        "metrics": {"held_out": {"loss": scores}},
        "slices": {"held_out": {"loss": [{"slice": hostile, **scores}]}},
    }
    for text in (dossier.render_dossier(facts).text, hub_card.render_card(facts)):
        assert "slice a ## Annex V" in text
        assert "\n## Annex V" not in text


def test_file_that_the_manifest_omits_is_not_read(facts: VersionFacts, artifacts: dict[str, Artifact]) -> None:
    (artifacts["model"].path / "added.json").write_text("{}")
    assert facts.find_file("model", "config.json") == artifacts["model"].path / "config.json"
    assert facts.find_file("model", "added.json") is None


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("/home/ann/tiny", "tiny"),
        ("/home/ann@company/tiny", "tiny"),
        ("customers/tiny", "tiny"),
        ("file:///home/ann/raw.jsonl", "raw.jsonl"),
        ("dvc:///home/ann@company/data@5:datasets/d", "dvc://data@5:datasets/d"),
        ("dvc://git@host:team/data@5:datasets/d", "dvc://git@host:team/data@5:datasets/d"),
        ("s3://bucket/data.jsonl", "s3://bucket/data.jsonl"),
        ("hf://org/name@main", "hf://org/name@main"),
        ("embedded:tiny", "embedded:tiny"),
    ],
)
def test_exported_address_has_no_local_folder(uri: str, shown: str) -> None:
    assert shorten_uri(uri) == shown
