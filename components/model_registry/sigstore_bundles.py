"""Verification of Sigstore bundles, offline: everything that a check needs is in the bundle and in the trust.

sigstore-python checks the chain of the certificate, its signed certificate timestamp, the inclusion proof of the log entry,
a signed time within the validity of the certificate, and the signature.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from components.model_registry import sigstore_identities
from components.model_registry.sigstore_identities import Identity
from components.model_registry.trust_root import SignatureInvalidError, Trust

Json = dict[str, Any]


def is_bundle(envelope: object) -> bool:
    """Return whether a signature is a Sigstore bundle with the certificate of an identity."""
    material = envelope.get("verificationMaterial") if isinstance(envelope, dict) else None
    return isinstance(material, dict) and "certificate" in material


def read_identity(bundle: Json) -> Identity:
    """Return the identity that the certificate of a bundle states, without verifying the certificate.

    Raises:
        SignatureInvalidError: the certificate is unreadable.
    """
    from cryptography import x509

    try:
        content = base64.b64decode(bundle["verificationMaterial"]["certificate"]["rawBytes"])
        return sigstore_identities.read_certificate(x509.load_der_x509_certificate(content))
    except (KeyError, TypeError, ValueError):
        raise SignatureInvalidError("the certificate of its signature is unreadable") from None


def open_bundle(bundle: Json, trust: Trust) -> tuple[str, bytes]:
    """Return the type and the content of a bundle's payload after verifying the bundle.

    Raises:
        SignatureInvalidError: the bundle does not verify, or its identity is not trusted.
    """
    from cryptography.x509 import ExtensionNotFound
    from sigstore.errors import Error
    from sigstore.models import Bundle
    from sigstore.verify import Verifier
    from sigstore.verify.policy import Identity as IdentityPolicy

    pinned = trust.get_identity(read_identity(bundle))
    root = sigstore_identities.parse_trust_config(pinned.trust_config).trusted_root
    policy = IdentityPolicy(identity=pinned.identity.identity, issuer=pinned.identity.issuer)
    try:
        return Verifier(trusted_root=root).verify_dsse(Bundle.from_json(json.dumps(bundle)), policy)
    except (Error, ExtensionNotFound, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise SignatureInvalidError(f"its signature was not made by {pinned.identity}: {reason}") from None
