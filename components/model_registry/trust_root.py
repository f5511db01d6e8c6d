"""Trust roots: the public keys, authorities, identities and revoked keys that a verifier pins."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.common.runtime.errors import ConfigurationError, TunelineError
from components.common.runtime.validation_errors import describe_validation_error
from components.common.runtime.yaml_loading import StrictLoader, describe_yaml_error, load_yaml
from components.model_registry import signing_keys, sigstore_identities
from components.model_registry.sigstore_identities import Identity, TrustedIdentity

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.x509 import Certificate

TRUST_VARIABLE = "TUNELINE_TRUST"
KeyId = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SignatureInvalidError(TunelineError):
    """A signature that does not verify; the message is a clause that gives the reason."""

    kind = "signature"


class IdentityEntry(BaseModel):
    """An identity in a trust file; both of its parts are compared exactly."""

    model_config = ConfigDict(extra="forbid")

    identity: str = Field(min_length=1, description="Subject alternative name of the certificates.")
    issuer: str = Field(min_length=1, description="URL of the OpenID Connect issuer.")
    trust_config: str = Field(description="File of Sigstore's client trust configuration, relative to this file.")


class TrustFile(BaseModel):
    """A trust root in a YAML file: pinned keys, authorities and identities, and the IDs of revoked ones."""

    model_config = ConfigDict(extra="forbid")

    public_keys: list[str] = Field([], description="Files of public keys in PEM format, relative to this file.")
    certificate_authorities: list[str] = Field(
        [], description="Files of authorities' certificates in PEM format, relative to this file."
    )
    identities: list[IdentityEntry] = Field([], description="Identities that the site's Sigstore certifies.")
    revoked: list[KeyId] = Field([], description="IDs of keys and identities whose signatures are refused.")


@dataclass(frozen=True)
class Trust:
    """What a verifier trusts.

    Attributes:
        keys: public keys by ID.
        authorities: certificates of authorities, which vouch for further keys.
        identities: identities that sign without a key of their own, by ID.
        revoked: IDs of keys and identities whose signatures are refused.
        allowed: IDs of the only keys and identities that count; None for all.
    """

    keys: Mapping[str, EllipticCurvePublicKey] = field(default_factory=dict)
    authorities: tuple[Certificate, ...] = ()
    identities: Mapping[str, TrustedIdentity] = field(default_factory=dict)
    revoked: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None

    def __bool__(self) -> bool:
        return bool(self.keys or self.authorities or self.identities)

    def add_certificates(self, chains: Iterable[str]) -> Trust:
        """Return a trust that also has the keys of the certificates that an authority vouches for.

        Args:
            chains: certificates in PEM format, each signing certificate first.
        """
        listed = self._list_certificates(chains)
        found = {key_id: cast("EllipticCurvePublicKey", certificate.public_key()) for key_id, certificate in listed}
        return replace(self, keys={**found, **self.keys})

    def find_certificate(self, key_id: str, chains: Iterable[str]) -> Certificate | None:
        """Return the first signing certificate of a key that an authority vouches for; None without one."""
        return next((found for certified, found in self._list_certificates(chains) if certified == key_id), None)

    def _list_certificates(self, chains: Iterable[str]) -> Iterator[tuple[str, Certificate]]:
        for chain in chains:
            if self.authorities and (leaf := _verify_chain(chain, self)):
                yield signing_keys.compute_key_id(leaf.public_key()), leaf  # type: ignore[arg-type]

    def get_key(self, key_id: str) -> EllipticCurvePublicKey:
        """Return the public key with this ID.

        Raises:
            SignatureInvalidError: the key is revoked or not trusted.
        """
        self._check(key_id, f"key {key_id[:12] or 'unknown'}", is_pinned=key_id in self.keys)
        return self.keys[key_id]

    def get_identity(self, identity: Identity) -> TrustedIdentity:
        """Return the pinned identity with this name and issuer.

        Raises:
            SignatureInvalidError: the identity is revoked or not trusted.
        """
        self._check(identity.id, f"identity {identity}", is_pinned=identity.id in self.identities)
        return self.identities[identity.id]

    def _check(self, signer_id: str, name: str, *, is_pinned: bool) -> None:
        if signer_id in self.revoked:
            raise SignatureInvalidError(f"signed with the revoked {name}")
        if not is_pinned:
            raise SignatureInvalidError(f"signed with {name}, which is not trusted")
        if self.allowed is not None and signer_id not in self.allowed:
            raise SignatureInvalidError(f"signed with {name}, which the policy does not list")


def format_authorities(trust: Trust) -> str:
    """Return the certificates of the trusted authorities in PEM format."""
    from cryptography.hazmat.primitives.serialization import Encoding

    return "".join(authority.public_bytes(Encoding.PEM).decode() for authority in trust.authorities)


def load_trust(paths: Sequence[Path]) -> Trust:
    """Return the trust in files: public keys and certificates in PEM format, and YAML files as `TrustFile`.

    Raises:
        ConfigurationError: a file cannot be used.
        EngineMissingError: the packages for signatures are not installed.
    """
    signing_keys.require_packages("verification")
    keys: dict[str, EllipticCurvePublicKey] = {}
    authorities: list[Certificate] = []
    identities: dict[str, TrustedIdentity] = {}
    revoked: set[str] = set()
    for path in paths:
        content = signing_keys.load_pem(path, "trust", bytes)
        files = _read_trust_file(path, content) if b"-----BEGIN" not in content else TrustFile(public_keys=[path.name])
        revoked |= {*files.revoked}
        for name in (*files.public_keys, *files.certificate_authorities):
            _add_trusted(path.parent / name, keys, authorities)
        for entry in files.identities:
            identity = Identity(entry.identity, entry.issuer)
            if identity.id in identities:
                raise ConfigurationError(
                    f"{path}: the identity {identity} is listed twice",
                    hint="Put all authorities and logs of an instance into one trust configuration.",
                )
            config = sigstore_identities.read_trust_config(path.parent / entry.trust_config, f"{path}: trust_config")
            identities[identity.id] = TrustedIdentity(identity, config)
    if not keys and not authorities and not identities:  # a trust that pins nothing would switch off the checks
        raise ConfigurationError(
            f"the trust files {', '.join(map(str, paths))} list no public key, certificate authority or identity",
            hint="List a public key under public_keys.",
        )
    return Trust(keys, tuple(authorities), identities, frozenset(revoked))


def _add_trusted(path: Path, keys: dict[str, EllipticCurvePublicKey], authorities: list[Certificate]) -> None:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    content = signing_keys.load_pem(path, "trust", bytes)
    if b"-----BEGIN CERTIFICATE" in content:
        authorities += signing_keys.load_pem(path, "trust", signing_keys.load_certificates)
        return
    key = signing_keys.load_pem(path, "trust", load_pem_public_key)
    if not signing_keys.is_supported(key):
        raise signing_keys.key_error(path, "trust", "another kind of key")
    keys[signing_keys.compute_key_id(key)] = key


def _read_trust_file(path: Path, content: bytes) -> TrustFile:
    import yaml

    try:
        return TrustFile.model_validate(load_yaml(content.decode(), StrictLoader) or {})
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {describe_yaml_error(error)}",
            hint="Pass a public key in PEM format, or a YAML file of public_keys.",
        ) from None
    except ValidationError as error:
        raise ConfigurationError(
            describe_validation_error(error, str(path), TrustFile),
            hint="Pass a public key in PEM format, or a YAML file of public_keys.",
        ) from None


def load_configured_trust() -> Trust:
    """Return the trust in the files that TUNELINE_TRUST lists, separated by colons; no trust if it is not set.

    Raises:
        ConfigurationError, EngineMissingError: as `load_trust`.
    """
    configured = os.environ.get(TRUST_VARIABLE)
    return load_trust([Path(name) for name in configured.split(os.pathsep)]) if configured else Trust()


def _verify_chain(chain: str, trust: Trust) -> Certificate | None:
    """Return the signing certificate of a chain that the authorities vouch for, or None.

    A certificate for other purposes, such as one of a web server, and a chain with a revoked key are refused. So is the
    certificate of an identity, if the site's Sigstore is below the authority: it counts with its log entry only.

    As in model-signing, the time of the check is the start of the certificate's validity: no trusted clock dates a
    signature, so an expired certificate stays valid for old signatures until its key is revoked.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID
    from OpenSSL import crypto

    malformed = (x509.DuplicateExtension, x509.InvalidVersion, x509.UnsupportedGeneralNameType)
    try:
        leaf, *others = signing_keys.load_certificates(chain.encode())
        usage = leaf.extensions.get_extension_for_class(x509.KeyUsage).value
        store = crypto.X509Store()
        for authority in trust.authorities:
            store.add_cert(crypto.X509.from_cryptography(authority))
        store.set_time(leaf.not_valid_before_utc)
        untrusted = [crypto.X509.from_cryptography(one) for one in others]
        context = crypto.X509StoreContext(store, crypto.X509.from_cryptography(leaf), untrusted)
        verified = [one.to_cryptography().public_key() for one in context.get_verified_chain()]
    except (ValueError, crypto.X509StoreContextError, x509.ExtensionNotFound, *malformed):
        return None
    if any(one.oid.dotted_string.startswith(sigstore_identities.FULCIO_ARC) for one in leaf.extensions):
        return None
    purposes = [one.value for one in leaf.extensions if isinstance(one.value, x509.ExtendedKeyUsage)]
    if any(ExtendedKeyUsageOID.CODE_SIGNING not in one for one in purposes):
        return None
    if any(signing_keys.compute_key_id(key) in trust.revoked for key in verified):
        return None
    return leaf if usage.digital_signature and signing_keys.is_supported(leaf.public_key()) else None
