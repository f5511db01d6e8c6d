"""Signatures of history entries: one over the intent before the move, one over the closed entry and its seal.

The seal covers all entries before, so their deletion or change invalidates the signature. The content is signed as well,
because the seal of an entry after a deleted one cannot be computed. Another process closes the entry of a killed one; the
signature of the intent shows it that the entry is not forged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from components.common.artifacts import hashing
from components.model_registry import signed_envelopes, signers
from components.model_registry.signed_envelopes import Json
from components.model_registry.trust_root import SignatureInvalidError, Trust

PAYLOAD_TYPE = "application/vnd.tuneline.history+json"
INTENT_TYPE = "application/vnd.tuneline.history-intent+json"


def sign_entry(model: str, number: int, seal: str, content_sha256: str) -> str:
    """Return the signed envelope of an entry as text; "" if this process has no signer.

    Args:
        content_sha256: digest of the entry without seal and signature.
    """
    payload = {"model": model, "entry": number, "seal": seal, "content_sha256": content_sha256}
    return _sign(payload, PAYLOAD_TYPE)


def sign_intent(model: str, intent_sha256: str) -> str:
    """Return the signed envelope of an intent as text; "" if this process has no signer."""
    return _sign({"model": model, "intent_sha256": intent_sha256}, INTENT_TYPE)


def _sign(payload: Json, payload_type: str) -> str:
    signer = signers.load_signer()
    if signer is None:
        return ""
    return hashing.canonical_json(signed_envelopes.sign_envelope(signer, payload, payload_type)).decode()


def check_entry(signature: str, expected: Mapping[str, object], trust: Trust) -> None:
    """Raise SignatureInvalidError, with the reason as a clause, if the signature is not one of this entry.

    Args:
        expected: fields that the signed payload must have: model, entry, seal, content_sha256.
    """
    payload = _open(signature, PAYLOAD_TYPE, trust)
    if any(payload.get(name) != value for name, value in expected.items()):
        stated = f"entry {payload.get('entry')} of {payload.get('model')}"
        raise SignatureInvalidError(f"its signature is for other content: {stated}")


def is_intent_signed(signature: str, model: str, intent_sha256: str, trust: Trust) -> bool:
    """Return whether a trusted signer signed the intent of an entry."""
    try:
        payload = _open(signature, INTENT_TYPE, trust)
    except SignatureInvalidError:
        return False
    return payload.get("model") == model and payload.get("intent_sha256") == intent_sha256


def _open(signature: str, payload_type: str, trust: Trust) -> Json:
    try:
        envelope = json.loads(signature)
    except (ValueError, RecursionError):
        envelope = {}
    return signed_envelopes.open_envelope(envelope, payload_type, trust)
