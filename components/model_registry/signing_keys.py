"""Signing keys: loaded by reference to their file or to an HSM, and created.

One elliptic-curve key signs artifacts, attestations and entries of the history.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from components.common.runtime.errors import ConfigurationError, EngineMissingError, OutputOccupiedError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.x509 import Certificate
    from securesystemslib.signer import Signer

KEY_VARIABLE = "TUNELINE_SIGNING_KEY_FILE"
PASSWORD_VARIABLE = "TUNELINE_SIGNING_KEY_PASSWORD"
CERTIFICATES_VARIABLE = "TUNELINE_SIGNING_CERTIFICATES_FILE"
CURVES = ("secp256r1", "secp384r1", "secp521r1")  # that model-signing accepts
EXPECTED_KEY = "an elliptic-curve key on P-256, P-384 or P-521 in PEM format"
PRIVATE_KEY_FILENAME, PUBLIC_KEY_FILENAME = "signing.key", "signing.pub"
HARDWARE_PREFIX = "pkcs11:"
KEY_BLOCK, CERTIFICATE_BLOCK = rb"-----BEGIN [A-Z ]*KEY-----", rb"-----BEGIN CERTIFICATE-----"
KEY_HINT = "Create a key pair with `tuneline signing keygen -o DIR`."


@dataclass(frozen=True)
class SigningKey:
    """A private key, in memory or in an HSM, and its certificates.

    Attributes:
        key_id: SHA-256 of the public key (DER, SubjectPublicKeyInfo), in hexadecimal digits.
        certificates: the signing certificate and its chain in PEM format, the signing certificate first; "" without.
    """

    signer: Signer = field(repr=False)
    public_key: EllipticCurvePublicKey
    key_id: str
    certificates: str = ""


def compute_key_id(key: EllipticCurvePublicKey) -> str:
    """Return the ID of a public key."""
    import hashlib

    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def format_public_key(key: EllipticCurvePublicKey) -> str:
    """Return a public key in PEM format."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def load_signing_key() -> SigningKey | None:
    """Return the key that TUNELINE_SIGNING_KEY_FILE refers to; None if the variable is not set.

    Raises:
        ConfigurationError: the key or its certificates cannot be used.
        EngineMissingError: the packages for signatures are not installed.
    """
    if not (name := os.environ.get(KEY_VARIABLE)):
        return None
    require_packages("signing")
    if name.startswith(HARDWARE_PREFIX):
        signer, public, reference = *_load_hardware_signer(name), "the HSM"
    else:
        signer, public, reference = *_load_file_signer(Path(name)), name
    key_id, certificates = compute_key_id(public), ""
    if chain := os.environ.get(CERTIFICATES_VARIABLE):
        found = load_pem(Path(chain), CERTIFICATES_VARIABLE, load_certificates)
        certified = found[0].public_key()
        if not is_supported(certified) or compute_key_id(certified) != key_id:
            raise ConfigurationError(
                f"{CERTIFICATES_VARIABLE}: the first certificate in {chain} is not for the key in {reference}",
                hint=f"Set {CERTIFICATES_VARIABLE} to a PEM file with the signing certificate, followed by the intermediate certificates.",
            )
        certificates = Path(chain).read_text(encoding="ascii")
    return SigningKey(signer, public, key_id, certificates)


def _load_file_signer(path: Path) -> tuple[Signer, EllipticCurvePublicKey]:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner, SSlibKey

    password = os.environ.get(PASSWORD_VARIABLE) or None
    _check_permissions(path, "private key")
    key = load_pem(path, KEY_VARIABLE, partial(load_pem_private_key, password=password.encode() if password else None))
    if not is_supported(key):
        raise key_error(path, KEY_VARIABLE, "another kind of key")
    public = key.public_key()
    return CryptoSigner(key, SSlibKey.from_crypto(public, keyid=compute_key_id(public))), public


def _load_hardware_signer(name: str) -> tuple[Signer, EllipticCurvePublicKey]:
    from securesystemslib.signer import SSlibKey

    from components.model_registry import hardware_keys

    uri = hardware_keys.parse_uri(name, KEY_VARIABLE)
    pin = os.environ.get(PASSWORD_VARIABLE) or None
    if uri.pin_source:
        _check_permissions(uri.pin_source, "PIN")
        try:
            pin = uri.pin_source.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            raise ConfigurationError(
                f"{KEY_VARIABLE}: the PIN file {uri.pin_source} (pin-source) cannot be read",
                hint="Mount the PIN file, or set pin-source to its path.",
            ) from None
    private, found = hardware_keys.load_hardware_key(uri, KEY_VARIABLE, pin)
    if not is_supported(found):
        raise ConfigurationError(
            f"{KEY_VARIABLE}: the key in the HSM is not on a supported curve; expected P-256, P-384 or P-521",
            hint="Create an elliptic-curve key on P-256, P-384 or P-521 in the HSM.",
        )
    public = cast("EllipticCurvePublicKey", found)
    key = SSlibKey.from_crypto(public, keyid=compute_key_id(public))
    return hardware_keys.HardwareSigner(private, key), public


def require_packages(extra: Literal["verification", "signing"]) -> None:
    """Raise EngineMissingError if the packages of the extra are not installed.

    Only signing, and hashing the files of an artifact, needs model-signing.
    """
    try:
        import OpenSSL  # noqa: F401
        import securesystemslib  # noqa: F401
        import sigstore  # noqa: F401

        if extra == "signing":
            import model_signing  # noqa: F401
            import pkcs11  # noqa: F401
    except ImportError as error:
        raise EngineMissingError(
            f"signatures require the packages of the extra {extra}: {error}",
            hint=f"Run: pip install 'tuneline[{extra}]'",
        ) from None


def _check_permissions(path: Path, secret: str) -> None:
    """Refuse a file with a secret of this user that others can read, as ssh does.

    The files of a Kubernetes secret belong to root, who decides on their mode.
    """
    try:
        status = path.stat()
    except OSError:  # reported when the file is read
        return
    if status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigurationError(
            f"{KEY_VARIABLE}: {path} has mode {stat.S_IMODE(status.st_mode):04o}, so other users can read or change the "
            f"{secret}; expected 0600 or 0400",
            hint=f"Run chmod 600 {path}, or mount the Kubernetes secret with defaultMode: 0400. If others had access, replace the "
            f"{secret}, and revoke the key.",
        )


def is_supported(key: object) -> bool:
    from cryptography.hazmat.primitives.asymmetric import ec

    return isinstance(key, (ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey)) and key.curve.name in CURVES


def load_certificates(content: bytes) -> list[Certificate]:
    from cryptography import x509

    return x509.load_pem_x509_certificates(content)


def load_pem(path: Path, source: str, load: Callable[[bytes], Any]) -> Any:
    """Return the content of a PEM file; the error does not repeat the content."""
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        content = path.read_bytes()
        keys, certificates = (len(re.findall(block, content)) for block in (KEY_BLOCK, CERTIFICATE_BLOCK))
        if keys > 1 or (keys and certificates):  # the first would be loaded, and the others would not count
            found = f"{keys} keys" if keys > 1 else f"a key and certificates ({certificates})"
            raise key_error(path, source, f"{found} in one file")
        return load(content)
    except OSError as error:
        raise key_error(path, source, f"no readable file ({error.strerror or error})") from None
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        problem = "a key with another password" if "assword" in str(error) else "no valid PEM file"
        raise key_error(path, source, problem) from None


def key_error(path: Path, source: str, found: str) -> ConfigurationError:
    return ConfigurationError(f"{source}: {path}: found {found}; expected {EXPECTED_KEY}", hint=KEY_HINT)


def generate_key_pair(folder: Path) -> tuple[Path, Path, str]:
    """Write a new key pair on the curve P-256, the private key readable by this user only.

    Returns:
        The files of the private and the public key, and the key's ID.

    Raises:
        OutputOccupiedError: the folder already has a key.
        EngineMissingError: the packages for signatures are not installed.
    """
    require_packages("verification")
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    private, public = folder / PRIVATE_KEY_FILENAME, folder / PUBLIC_KEY_FILENAME
    if existing := next((path for path in (private, public) if path.exists()), None):
        raise OutputOccupiedError(f"{existing} already exists", hint="Choose another folder with -o.")
    key, password = ec.generate_private_key(ec.SECP256R1()), os.environ.get(PASSWORD_VARIABLE)
    encryption = BestAvailableEncryption(password.encode()) if password else NoEncryption()
    folder.mkdir(parents=True, exist_ok=True)
    content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    with os.fdopen(os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    public.write_text(format_public_key(key.public_key()), encoding="ascii")
    return private, public, compute_key_id(key.public_key())
