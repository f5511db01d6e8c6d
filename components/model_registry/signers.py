"""The signer of this process: a key, or an identity that a Sigstore certifies."""

from __future__ import annotations

import os

from components.common.runtime.errors import ConfigurationError
from components.model_registry import signing_keys, sigstore_signing
from components.model_registry.signing_keys import KEY_VARIABLE, SigningKey
from components.model_registry.sigstore_signing import SIGSTORE_VARIABLE, SigstoreSigner
from components.model_registry.trust_root import Trust

Signer = SigningKey | SigstoreSigner
HINT = f"Set {KEY_VARIABLE} to the file of a private key or to a pkcs11: URI, or {SIGSTORE_VARIABLE} for Sigstore."


def is_signing() -> bool:
    """Return whether this process has a signer."""
    return bool(os.environ.get(KEY_VARIABLE) or os.environ.get(SIGSTORE_VARIABLE))


def load_signer() -> Signer | None:
    """Return the signer that the environment configures; None if it configures none.

    Raises:
        ConfigurationError: the key or the identity cannot be used, or both are set.
        EngineMissingError: the packages for signatures are not installed, or a service does not answer.
    """
    if os.environ.get(KEY_VARIABLE) and os.environ.get(SIGSTORE_VARIABLE):
        raise ConfigurationError(
            f"{KEY_VARIABLE} and {SIGSTORE_VARIABLE} are both set; expected one of them",
            hint="Unset one: a process signs with a key or with an identity.",
        )
    return signing_keys.load_signing_key() or sigstore_signing.load_sigstore_signer()


def build_own_trust(signer: Signer) -> Trust:
    """Return the trust in a signer alone."""
    return signer.trust if isinstance(signer, SigstoreSigner) else Trust({signer.key_id: signer.public_key})
