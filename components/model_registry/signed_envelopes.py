"""Signed envelopes of JSON values: DSSE of a key, or a Sigstore bundle of an identity.

Sigstore signs in-toto statements only, so it signs other content as the predicate of a statement.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from components.common.artifacts import hashing
from components.model_registry import attestations, sigstore_bundles
from components.model_registry.signers import Signer
from components.model_registry.sigstore_signing import SigstoreSigner
from components.model_registry.trust_root import SignatureInvalidError, Trust

Json = dict[str, Any]
WRAPPED_TYPE = "urn:tuneline:content:"  # predicate type of wrapped content, before its media type


def sign_envelope(signer: Signer, payload: Json, payload_type: str) -> Json:
    """Return a signed envelope of a payload, as JSON values.

    Raises:
        ConfigurationError, EngineMissingError: the signer cannot be used.
    """
    if isinstance(signer, SigstoreSigner):
        return signer.sign(payload if payload_type == attestations.PAYLOAD_TYPE else _wrap(payload, payload_type))
    from securesystemslib.dsse import Envelope

    envelope = Envelope(hashing.canonical_json(payload), payload_type, {})
    envelope.sign(signer.signer)
    signed: Json = envelope.to_dict()
    return signed


def _wrap(payload: Json, payload_type: str) -> Json:
    """Return an in-toto statement whose predicate is the payload."""
    subject = {"name": payload_type, "digest": {"sha256": hashing.digest(payload)}}
    return {
        "_type": attestations.STATEMENT_TYPE,
        "subject": [subject],
        "predicateType": f"{WRAPPED_TYPE}{payload_type}",
        "predicate": payload,
    }


def _open_bundle(bundle: Json, payload_type: str, trust: Trust, key_id: str) -> Json:
    found_type, content = sigstore_bundles.open_bundle(bundle, trust)
    if key_id and key_id != sigstore_bundles.read_identity(bundle).id:
        raise SignatureInvalidError("its signatures were made by two identities")
    statement = json.loads(content)
    is_wrapped = payload_type != attestations.PAYLOAD_TYPE
    if is_wrapped and isinstance(statement, dict):
        found_type = str(statement.get("predicateType")).removeprefix(WRAPPED_TYPE)
    if found_type != payload_type:
        raise SignatureInvalidError(f"its signature is for content of type {found_type}; expected {payload_type}")
    payload: Json = statement["predicate"] if is_wrapped else statement
    return payload


def open_envelope(envelope: Json, payload_type: str, trust: Trust, key_id: str = "") -> Json:
    """Return the payload of a signed envelope after verifying its only signature.

    Args:
        key_id: ID of the key, for an envelope that does not state it; ID that the identity of a bundle must have.

    Raises:
        SignatureInvalidError: the signature is not valid, or its key or identity is not trusted.
    """
    if sigstore_bundles.is_bundle(envelope):
        return _open_bundle(envelope, payload_type, trust, key_id)
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError
    from securesystemslib.signer import SSlibKey

    try:
        fields = copy.deepcopy(envelope)  # `from_dict` consumes its argument
        [signature] = fields["signatures"]
        stated = str(key_id or signature["keyid"])
        signature["keyid"] = stated
        parsed = Envelope.from_dict(fields)
        found_type = parsed.payload_type
    except (KeyError, TypeError, ValueError, AttributeError):
        raise SignatureInvalidError("its signature is not an envelope with one signature") from None
    key = trust.get_key(stated)
    if found_type != payload_type:
        raise SignatureInvalidError(f"its signature is for content of type {found_type}; expected {payload_type}")
    try:
        parsed.verify([SSlibKey.from_crypto(key, keyid=stated)], 1)
        payload: Json = json.loads(parsed.payload)
    except (VerificationError, ValueError):
        raise SignatureInvalidError(
            f"its signature was not made by key {stated[:12]}; it is forged or damaged"
        ) from None
    return payload


def read_key_id(envelope: Json) -> str:
    """Return the ID of the key or identity that an envelope states; "" if it states none."""
    try:
        if sigstore_bundles.is_bundle(envelope):
            return sigstore_bundles.read_identity(envelope).id
        return str(envelope["signatures"][0]["keyid"])
    except (KeyError, IndexError, TypeError, SignatureInvalidError):
        return ""
