"""`tuneline verify` and `tuneline signing`: signatures of model versions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.common.runtime.counts import format_count
from components.common.runtime.errors import UsageError
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    JsonOption,
    OutputOption,
    TrackingUriOption,
    WorkdirOption,
    app,
    open_workdir,
    print_result,
)

if TYPE_CHECKING:
    from components.model_registry.provenance_bundle import Verification, VerifiedArtifact

signing_app = typer.Typer(no_args_is_help=True, help="Keys for signatures of artifacts and of the history.")
app.add_typer(signing_app, name="signing")


@signing_app.command()
def keygen(output: OutputOption = Path("keys"), as_json: JsonOption = False) -> None:
    """Create a key pair: signing.key, readable by this user only, and signing.pub.

    The private key is encrypted if TUNELINE_SIGNING_KEY_PASSWORD is set.
    """
    from components.model_registry import signing_keys

    private, public, key_id = signing_keys.generate_key_pair(output)
    result = {"private_key": str(private), "public_key": str(public), "key_id": key_id}
    print_result(result, as_json, [f"private key {private}, public key {public}, key ID {key_id}"])


@signing_app.command()
def show(as_json: JsonOption = False) -> None:
    """Check the signer of this process, and print its ID and public key, or the identity that Sigstore certifies.

    For a key, the output without --json is a public key file for --trust.
    """
    from components.model_registry import signers, signing_keys
    from components.model_registry.sigstore_signing import SigstoreSigner

    signer = signers.load_signer()
    if signer is None:
        raise UsageError("this process has no signer", hint=signers.HINT)
    result: dict[str, object] = {"key_id": signer.key_id, "public_key": None, "identity": None, "issuer": None}
    if isinstance(signer, SigstoreSigner):
        result.update(identity=signer.identity.identity, issuer=signer.identity.issuer)
        lines = [f"identity {signer.identity}", f"ID {signer.key_id}"]
    else:
        public = signing_keys.format_public_key(signer.public_key)
        result.update(public_key=public)
        lines = [f"key ID {signer.key_id}", public.rstrip()]
    print_result(result, as_json, lines)


@app.command()
def verify(
    reference: Annotated[
        str, typer.Argument(metavar="NAME[@ALIAS]|BUNDLE", help="Model version, or the folder of an exported bundle.")
    ],
    trust: Annotated[
        list[Path],
        typer.Option(
            "--trust",
            readable=False,
            help="Public key, or certificate of an authority, in PEM format, or a YAML file that lists trusted "
            "signers. Repeatable. Default: TUNELINE_TRUST.",
        ),
    ] = [],  # noqa: B006
    export: Annotated[
        Path | None,
        typer.Option(
            "--export", help="Write a bundle to this new folder. It can be verified without the store and MLflow."
        ),
    ] = None,
    tracking_uri: TrackingUriOption = "",
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Verify signatures, attestations, evaluation, promotion and history of a version.

    Exit with status 1 if a check fails.

    A bundle contains no weights: the files of an artifact are hashed only if the workdir's store contains the artifact.
    """
    from components.model_registry import provenance_bundle, signature_checks, trust_root

    pinned = trust_root.load_trust(trust) if trust else trust_root.load_configured_trust()
    if not pinned and (export is None or trust):
        raise UsageError("verify requires a trusted key", hint="Pass a public key with --trust, or set TUNELINE_TRUST.")
    is_bundle = provenance_bundle.is_bundle(Path(reference))
    if not is_bundle and Path(reference).is_dir():
        raise UsageError(
            f"{reference} has no {provenance_bundle.INDEX_FILENAME}",
            hint="Pass the folder of an exported bundle, or NAME@champion for a registered model.",
        )
    with open_workdir("verify", as_json, workdir, None if is_bundle else tracking_uri) as (reporter, _):
        if is_bundle:
            bundle = provenance_bundle.read(Path(reference))
        else:
            from pipelines.provenance.lineage import parse_reference

            bundle = provenance_bundle.collect(*parse_reference(reference))
        if export is not None:
            provenance_bundle.write(bundle, export)
        if not pinned:
            print_result({"bundle": str(export), "verified": None}, as_json, [f"{export}: exported, not verified"])
            return
        reporter.step(f"verifying {bundle.index.name} version {bundle.index.version}")
        result = provenance_bundle.verify(bundle, pinned, signature_checks.find_artifact)
    fields = {**result.model_dump(), "bundle": str(export) if export else None}
    print_result(fields, as_json, _format_verification(result))
    if not result.verified:
        raise typer.Exit(1)


def _format_signer(artifact: VerifiedArtifact) -> str:
    signer, key = artifact.signer, f"key {artifact.key_id[:12]}"
    if signer.kind == "sigstore":
        return f"identity {signer.identity} of {signer.issuer}"
    return f"{key} of {signer.identity}" if signer.identity else key


def _format_verification(result: Verification) -> list[str]:
    forced = result.forced
    lines = [
        f"✔ {one.kind} {one.sha256[:12]}, {_format_signer(one)}{'' if one.hashed else ', files not hashed'}"
        for one in result.artifacts
    ]
    lines += [f"  input without attestation: {one.kind} {one.sha256[:12]} {one.uri}" for one in result.leaves]
    lines += [f"✘ {objection}" for objection in result.objections]
    lines += [f"! {note}" for note in result.notes]
    if forced:
        lines.append(f"! PROMOTED BY FORCE by {forced.by} in entry {forced.entry}, despite: {forced.objections}")
        if not forced.overrules:
            lines.append(
                "! the forced promotion does not override the verdict: it has no valid signature, or refers to another evaluation"
            )
        lines.append(f"! reason of the forced promotion: {forced.reason}")
    title = f"{result.name}{f'@{result.alias}' if result.alias else ''}, version {result.version}"
    verdict = (
        f"verified {format_count(len(result.artifacts), 'artifact')} and "
        f"{format_count(result.entries, 'history entry', 'history entries')}"
    )
    verdict = f"{verdict}, promoted with --force" if forced else verdict
    refusal = f"refused, {format_count(len(result.objections), 'objection')}"
    return [*lines, f"{title}: {verdict if result.verified else refusal}"]
