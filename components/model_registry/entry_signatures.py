"""Signatures of history entries, each over the entry's content and its seal.

The seal covers all entries before, so their deletion or change invalidates the signature. The content is signed as well,
because the seal of an entry after a deleted one cannot be computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from components.common.artifacts import hashing
from components.model_registry import signed_envelopes, signers
from components.model_registry.trust_root import SignatureInvalidError, Trust

PAYLOAD_TYPE = "application/vnd.tuneline.history+json"


def sign_entry(model: str, number: int, seal: str, content_sha256: str) -> str:
    """Return the signed envelope of an entry as text; "" if this process has no signer.

    Args:
        content_sha256: digest of the entry without seal and signature.
    """
    signer = signers.load_signer()
    if signer is None:
        return ""
    payload = {"model": model, "entry": number, "seal": seal, "content_sha256": content_sha256}
    return hashing.canonical_json(signed_envelopes.sign_envelope(signer, payload, PAYLOAD_TYPE)).decode()


def check_entry(signature: str, expected: Mapping[str, object], trust: Trust) -> None:
    """Raise SignatureInvalidError, with the reason as a clause, if the signature is not one of this entry.

    Args:
        expected: fields that the signed payload must have: model, entry, seal, content_sha256.
    """
    try:
        envelope = json.loads(signature)
    except (ValueError, RecursionError):
        envelope = {}
    payload = signed_envelopes.open_envelope(envelope, PAYLOAD_TYPE, trust)
    if any(payload.get(name) != value for name, value in expected.items()):
        stated = f"entry {payload.get('entry')} of {payload.get('model')}"
        raise SignatureInvalidError(f"its signature is for other content: {stated}")
