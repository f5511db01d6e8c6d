"""Attestations of steps: an in-toto statement with SLSA provenance for each artifact, built from its manifest."""

from __future__ import annotations

from typing import Any

from components.common.artifacts.artifact_folder import ArtifactInput, Manifest

Json = dict[str, Any]
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"


def build_statement(manifest: Manifest, manifest_sha256: str) -> Json:
    """Return the statement that the step of the manifest built the artifact from its inputs.

    The configuration and the seed are external parameters. The cache key is the digest of inputs, configuration and the
    stage's code, so it is the digest of the code that the statement gives.
    """
    produced_by = dict(manifest.produced_by)
    key = str(produced_by.pop("key", ""))
    commit = produced_by.get("git_commit")
    source = [{"name": "source", "digest": {"gitCommit": str(commit)}}] if commit else []
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": manifest.kind, "digest": {"sha256": manifest.content_sha256}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"urn:tuneline:step:{manifest.kind}:v1",
                "externalParameters": {"config": manifest.config, "seed": manifest.seed},
                "internalParameters": {
                    "config_sha256": manifest.config_sha256,
                    "manifest_sha256": manifest_sha256,
                    "code_and_inputs_sha256": key,
                    "environment": produced_by,
                },
                "resolvedDependencies": [*map(_describe_input, manifest.inputs), *source],
            },
            "runDetails": {
                "builder": {"id": "urn:tuneline:stage", "version": {"tuneline": produced_by.get("tuneline", "")}}
            },
        },
    }


def _describe_input(source: ArtifactInput) -> Json:
    return {"name": source.kind, "uri": source.uri, "digest": {"sha256": source.content_sha256}}


def describes(statement: Json, manifest: Manifest, manifest_sha256: str) -> bool:
    """Return whether a statement is about this artifact: its digest, its inputs, its configuration and its manifest.

    Other fields may differ, as another version of tuneline may have built the statement.
    """
    expected = build_statement(manifest, manifest_sha256)
    try:
        definition, wanted = statement["predicate"]["buildDefinition"], expected["predicate"]["buildDefinition"]
        internal = definition["internalParameters"]
        return bool(
            all(statement[name] == expected[name] for name in ("_type", "subject", "predicateType"))
            and definition["externalParameters"] == wanted["externalParameters"]
            and definition["resolvedDependencies"] == wanted["resolvedDependencies"]
            and internal["manifest_sha256"] == manifest_sha256
        )
    except (KeyError, TypeError):
        return False
