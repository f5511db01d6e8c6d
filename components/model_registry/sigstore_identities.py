"""Identities that sign without a key of their own: a site's Sigstore certifies them for minutes.

The site states its Sigstore in a client trust configuration. tuneline has no default for it, so it never contacts an
instance that the site does not name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.common.artifacts import hashing
from components.common.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate
    from sigstore.models import ClientTrustConfig

FULCIO_ARC = "1.3.6.1.4.1.57264.1."  # https://github.com/sigstore/fulcio/blob/main/docs/oid-info.md
ISSUER_OID = f"{FULCIO_ARC}1"


@dataclass(frozen=True)
class Identity:
    """Whom a certificate of Sigstore names.

    Attributes:
        identity: subject alternative name, such as the URI of a service account or an e-mail address.
        issuer: URL of the OpenID Connect issuer that authenticated the identity.
    """

    identity: str
    issuer: str

    def __str__(self) -> str:
        return f"{self.identity} of {self.issuer}"

    @property
    def id(self) -> str:
        """SHA-256 of identity and issuer, which takes the place of a key ID in file names, policies and revocations."""
        return hashing.digest({"identity": self.identity, "issuer": self.issuer})


@dataclass(frozen=True)
class TrustedIdentity:
    """An identity that a verifier pins.

    Attributes:
        trust_config: client trust configuration of the Sigstore that certifies the identity, in JSON.
    """

    identity: Identity
    trust_config: str


def read_certificate(certificate: Certificate) -> Identity:
    """Return the identity that a certificate states, without verifying the certificate.

    Raises:
        ValueError: the certificate does not have one subject alternative name and an issuer.
    """
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        issuer = certificate.extensions.get_extension_for_oid(x509.ObjectIdentifier(ISSUER_OID)).value
    except x509.ExtensionNotFound as error:
        raise ValueError(f"its certificate lacks an extension: {error}") from None
    except (x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise ValueError(f"its certificate is malformed: {error}") from None
    [name] = names
    if not isinstance(name, x509.UniformResourceIdentifier | x509.RFC822Name):
        raise ValueError("its certificate names neither a URI nor an e-mail address")
    if not isinstance(issuer, x509.UnrecognizedExtension):
        raise ValueError("its certificate has no issuer")
    return Identity(name.value, issuer.value.decode())


def read_trust_config(path: Path, source: str) -> str:
    """Return the content of a client trust configuration after checking it.

    Args:
        source: where the file is named, for errors.

    Raises:
        ConfigurationError: the file cannot be used.
    """
    try:
        text = path.read_text(encoding="utf-8")
        parse_trust_config(text)
        return text
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    except ValueError:
        problem = (
            "is not a Sigstore client trust configuration (application/vnd.dev.sigstore.clienttrustconfig.v0.1+json) "
            "with an authority and a transparency log"
        )
    raise ConfigurationError(
        f"{source}: {path} {problem}",
        hint="Ask the operator of the site's Sigstore for the file; docs/how-to/signing.md describes its content.",
    )


def parse_trust_config(text: str) -> ClientTrustConfig:
    """Return a client trust configuration, and check that it has what a verification needs.

    Raises:
        ValueError: the text is not a configuration.
    """
    from sigstore.errors import Error
    from sigstore.models import ClientTrustConfig
    from sigstore.verify import Verifier

    try:
        config = ClientTrustConfig.from_json(text)
        Verifier(trusted_root=config.trusted_root)
    except Error as error:
        raise ValueError(str(error)) from None
    return config
