"""Signatures without a key: a site's Sigstore certifies the identity of an OpenID Connect token for each signature.

The token is that of the workload, such as a projected token of a Kubernetes service account, which the kubelet renews in its
file. It is read for every signature.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.artifacts import hashing
from components.common.runtime.errors import ConfigurationError, EngineMissingError
from components.model_registry import signing_keys, sigstore_bundles, sigstore_identities, trust_root
from components.model_registry.sigstore_identities import Identity, TrustedIdentity
from components.model_registry.trust_root import SignatureInvalidError, Trust

if TYPE_CHECKING:
    from sigstore.oidc import IdentityToken
    from sigstore.sign import Signer

Json = dict[str, Any]
SIGSTORE_VARIABLE = "TUNELINE_SIGNING_SIGSTORE_FILE"
TOKEN_FILE_VARIABLE, TOKEN_VARIABLE = "TUNELINE_SIGNING_TOKEN_FILE", "TUNELINE_SIGNING_TOKEN"
SERVICE_TIMEOUT_SECONDS = 30.0
MAX_REASON_CHARACTERS = 200
TOKEN_HINT = (
    "On Kubernetes, mount a projected service account token with the audience sigstore, and set "
    f"{TOKEN_FILE_VARIABLE} to its path."
)


@dataclass(frozen=True)
class SigstoreSigner:
    """A signer whose identity a Sigstore certifies.

    Attributes:
        identity: the identity in the certificate that the Sigstore issued for the token.
        trust_config: client trust configuration of the Sigstore, in JSON.
    """

    identity: Identity
    trust_config: str

    @property
    def key_id(self) -> str:
        """ID of the identity, in the place of a key's."""
        return self.identity.id

    @property
    def trust(self) -> Trust:
        """The trust in this signer alone."""
        return Trust(identities={self.identity.id: TrustedIdentity(self.identity, self.trust_config)})

    def sign(self, statement: Json) -> Json:
        """Sign an in-toto statement with a new certificate, and return the Sigstore bundle.

        Raises:
            ConfigurationError: the token cannot be used, or is for another identity than before.
            EngineMissingError: a service of the Sigstore fails, or its answer does not verify.
        """
        from sigstore.dsse import Statement

        with _open_signer(self.trust_config) as signer:
            bundle: Json = json.loads(signer.sign_dsse(Statement(hashing.canonical_json(statement))).to_json())
        try:
            sigstore_bundles.open_bundle(bundle, self.trust)
        except SignatureInvalidError as error:  # the log's answer was not verified before
            raise _service_error(f"its answer does not verify: {error.message}") from None
        return bundle


def load_sigstore_signer() -> SigstoreSigner | None:
    """Request a certificate from the Sigstore of TUNELINE_SIGNING_SIGSTORE_FILE; None if the variable is not set.

    The request shows that the Sigstore accepts the token, and as which identity. The certificate itself is not used.

    Raises:
        ConfigurationError: the configuration or the token cannot be used, or TUNELINE_TRUST does not pin the identity.
        EngineMissingError: the packages for signatures are not installed, or the Sigstore does not issue a certificate.
    """
    if not (name := os.environ.get(SIGSTORE_VARIABLE)):
        return None
    signing_keys.require_packages("signing")
    text = sigstore_identities.read_trust_config(Path(name), SIGSTORE_VARIABLE)
    with _open_signer(text) as signer:
        try:
            identity = sigstore_identities.read_certificate(signer._signing_cert())
        except ValueError as error:
            raise _service_error(str(error)) from None
    trust = trust_root.load_configured_trust()
    if trust:  # otherwise, the registration would write signatures that its own promotion refuses
        try:
            trust.get_identity(identity)
        except SignatureInvalidError as error:
            raise ConfigurationError(
                f"{trust_root.TRUST_VARIABLE} refuses the identity of this process: {error.message}",
                hint="List the identity in the trust file, or run with a service account that the file lists.",
            ) from None
    return SigstoreSigner(identity, text)


def _read_token() -> IdentityToken:
    from sigstore.errors import Error
    from sigstore.oidc import IdentityToken

    source, text = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE, "")
    if name := os.environ.get(TOKEN_FILE_VARIABLE):
        source = f"{TOKEN_FILE_VARIABLE}: {name}"
        try:
            text = Path(name).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            raise ConfigurationError(f"{source}: the file cannot be read", hint=TOKEN_HINT) from None
    if not text.strip():
        raise ConfigurationError(
            f"{SIGSTORE_VARIABLE} is set, but neither {TOKEN_FILE_VARIABLE} nor {TOKEN_VARIABLE} has a token",
            hint=TOKEN_HINT,
        )
    try:
        return IdentityToken(text.strip())
    except Error as error:
        cause = error.__cause__ or error
        raise ConfigurationError(
            f"{source}: the token cannot be used: {cause}; expected a valid OpenID Connect token for the audience sigstore",
            hint=TOKEN_HINT,
        ) from None


@contextmanager
def _open_signer(trust_config: str) -> Iterator[Signer]:
    """Yield a signer of sigstore-python with a new certificate; errors of the services are translated."""
    import requests
    from sigstore import errors, oidc
    from sigstore._internal.fulcio.client import ExpiredCertificate, FulcioClientError
    from sigstore._internal.rekor import RekorClientError
    from sigstore.sign import SigningContext

    token = _read_token()
    try:
        config = sigstore_identities.parse_trust_config(trust_config)
        context = SigningContext.from_trust_config(config)
        # The clients of the services set no timeout.
        for session in (context._fulcio.session, context._rekor._session):  # type: ignore[attr-defined]
            session.request = partial(session.request, timeout=SERVICE_TIMEOUT_SECONDS)
        with context.signer(token) as signer:
            yield signer
    except (requests.RequestException, FulcioClientError, RekorClientError) as error:
        raise _service_error(_describe(error)) from None
    except (errors.Error, ExpiredCertificate, oidc.ExpiredIdentity, ValueError, KeyError, TypeError) as error:
        raise _service_error(f"{type(error).__name__} {error}".strip()) from None


def _describe(error: Exception) -> str:
    """Return the answer of a service: sigstore-python leaves it in the cause of its error."""
    cause = error.__cause__ or error.__context__
    response = getattr(cause, "response", None)
    if response is None:
        return str(error)
    return f"status {response.status_code} from {response.url}: {response.text[:MAX_REASON_CHARACTERS]}"


def _service_error(problem: str) -> EngineMissingError:
    return EngineMissingError(
        f"the Sigstore in {os.environ.get(SIGSTORE_VARIABLE)} cannot sign: {problem}",
        hint="Check the services and the token, and run the same command again.",
    )
