"""Signed envelopes (DSSE) of JSON values."""

from __future__ import annotations

import copy
import json
from typing import Any

from components.common.artifacts import hashing
from components.model_registry.signing_keys import SigningKey
from components.model_registry.trust_root import SignatureInvalidError, Trust

Json = dict[str, Any]


def sign_envelope(key: SigningKey, payload: Json, payload_type: str) -> Json:
    """Return a DSSE envelope of a payload, as JSON values."""
    from securesystemslib.dsse import Envelope

    envelope = Envelope(hashing.canonical_json(payload), payload_type, {})
    envelope.sign(key.signer)
    signed: Json = envelope.to_dict()
    return signed


def open_envelope(envelope: Json, payload_type: str, trust: Trust, key_id: str = "") -> Json:
    """Return the payload of a DSSE envelope after verifying its only signature.

    Args:
        key_id: ID of the key, for an envelope that does not state it.

    Raises:
        SignatureInvalidError: the signature is not valid, or its key is not trusted.
    """
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
        raise SignatureInvalidError(f"its signature is not one of key {stated[:12]}: forged or damaged") from None
    return payload


def read_key_id(envelope: Json) -> str:
    """Return the ID of the key that an envelope states; "" if it states none."""
    try:
        return str(envelope["signatures"][0]["keyid"])
    except (KeyError, IndexError, TypeError):
        return ""
