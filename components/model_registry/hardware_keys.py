"""Signing keys in a hardware security module (HSM), named by a PKCS#11 URI (RFC 7512).

The private key stays in the module, which signs digests. python-pkcs11 is the client because PyKCS11, which model-signing
uses, has the licence GPL-2.0-or-later.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import unquote, unquote_to_bytes

import pkcs11
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512, Hash
from cryptography.hazmat.primitives.serialization import load_der_public_key
from pkcs11.util.ec import encode_ec_public_key, encode_ecdsa_signature
from securesystemslib.signer import Signature, Signer, SSlibKey

from components.common.runtime.errors import ConfigurationError, EngineMissingError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
    from securesystemslib.signer import Key, SecretsHandler

PREFIX = "pkcs11:"
PATH_ATTRIBUTES = ("token", "serial", "object", "id", "type")
QUERY_ATTRIBUTES = ("module-path", "pin-source")
EXAMPLE = "pkcs11:token=TOKEN;object=KEY?module-path=/usr/lib/MODULE.so&pin-source=file:/run/secrets/pin"
HASHES = {"ecdsa-sha2-nistp256": SHA256(), "ecdsa-sha2-nistp384": SHA384(), "ecdsa-sha2-nistp521": SHA512()}


class HardwareSigner(Signer):  # type: ignore[misc]
    """A signer for securesystemslib whose private key is in a module."""

    def __init__(self, key: pkcs11.PrivateKey, public_key: SSlibKey) -> None:
        self._key, self._public_key, self._hash = key, public_key, HASHES[public_key.scheme]

    @property
    def public_key(self) -> SSlibKey:
        """Return the public key."""
        return self._public_key

    @classmethod
    def from_priv_key_uri(
        cls, priv_key_uri: str, public_key: Key, secrets_handler: SecretsHandler | None = None
    ) -> NoReturn:
        """Refuse: `load_hardware_key` creates the signer."""
        raise NotImplementedError

    def sign(self, payload: bytes) -> Signature:
        """Sign a payload in the module, and return the signature in DER format.

        Raises:
            EngineMissingError: the module cannot sign with the key.
        """
        hashing = Hash(self._hash)
        hashing.update(payload)
        try:
            raw = self._key.sign(hashing.finalize(), mechanism=pkcs11.Mechanism.ECDSA)
        except pkcs11.PKCS11Error as error:
            raise EngineMissingError(
                f"the HSM cannot sign: {_describe(error)}", hint="Check the token, and the attributes of its key."
            ) from None
        return Signature(self._public_key.keyid, encode_ecdsa_signature(raw).hex())


@dataclass(frozen=True)
class KeyUri:
    """The attributes of a PKCS#11 URI that tuneline uses; None for those that it lacks.

    Attributes:
        token, serial: label and serial number of the token.
        object, id: label and ID of the key.
        module_path: shared library of the module.
        pin_source: file of the PIN.
    """

    token: str | None
    serial: bytes | None
    object: str | None
    id: bytes | None
    module_path: Path
    pin_source: Path | None


def parse_uri(text: str, source: str) -> KeyUri:
    """Return the attributes of a PKCS#11 URI.

    Args:
        source: where the URI is set, for errors, which do not repeat its values.

    Raises:
        ConfigurationError: an attribute is malformed, missing or not supported.
    """
    path, _, query = text.removeprefix(PREFIX).partition("?")
    values: dict[str, str] = {}
    for part, allowed in [
        *((part, PATH_ATTRIBUTES) for part in path.split(";") if part),
        *((part, QUERY_ATTRIBUTES) for part in query.split("&") if part),
    ]:
        name, _, value = part.partition("=")
        if name == "pin-value":  # RFC 7512, section 7: a PIN in a URI is easily disclosed
            raise _uri_error(source, "the attribute pin-value", "the PIN in the file that pin-source names")
        if name not in allowed or name in values or not value:
            raise _uri_error(
                source, f"the attribute {name!r}", f"each of {', '.join(allowed)} at most once, with a value"
            )
        values[name] = value
    if values.get("type", "private") != "private":
        raise _uri_error(source, f"type={values['type']}", "type=private, or no type")
    if "object" not in values and "id" not in values:
        raise _uri_error(source, "no object and no id", "the label (object) or the ID (id) of a key")
    module = Path(unquote(values.get("module-path", "")))
    if not module.is_absolute():
        raise _uri_error(source, f"module-path={module}", "the absolute path of the module's shared library")
    pin: Path | None = None
    if "pin-source" in values:
        pin = Path(unquote(unquote(values["pin-source"]).removeprefix("file:")))
        if not pin.is_absolute() or pin.root != "/" or "\0" in str(pin):
            raise _uri_error(source, "an unsupported pin-source", "the absolute path of a file, or file:/PATH")
    return KeyUri(
        token=unquote(values["token"]) if "token" in values else None,
        serial=unquote_to_bytes(values["serial"]) if "serial" in values else None,
        object=unquote(values["object"]) if "object" in values else None,
        id=unquote_to_bytes(values["id"]) if "id" in values else None,
        module_path=module,
        pin_source=pin,
    )


def _uri_error(source: str, found: str, expected: str) -> ConfigurationError:
    return ConfigurationError(f"{source}: the pkcs11: URI has {found}; expected {expected}", hint=f"Example: {EXAMPLE}")


@cache  # modules limit the sessions of a process, and python-pkcs11 does not close them
def load_hardware_key(uri: KeyUri, source: str, pin: str | None) -> tuple[pkcs11.PrivateKey, PublicKeyTypes]:
    """Open a session on the token, and return its private key by reference and the public key.

    Args:
        source: where the URI is set, for errors.
        pin: PIN of the token; None for a token without a login.

    Raises:
        ConfigurationError: the module, token, PIN or key cannot be used.
    """
    if not uri.module_path.is_file():
        raise ConfigurationError(
            f"{source}: the PKCS#11 module {uri.module_path} does not exist",
            hint="Set module-path to the shared library of the HSM's vendor, and mount it into the image.",
        )
    name = f"token {uri.token}" if uri.token else "token"
    try:
        token = pkcs11.lib(os.fspath(uri.module_path)).get_token(
            token_label=uri.token, token_serial=uri.serial, token_flags=pkcs11.TokenFlag.TOKEN_INITIALIZED
        )
        try:
            session = token.open(user_pin=pin)
        except pkcs11.UserAlreadyLoggedIn:  # by a session for another key: a process logs in once
            session = token.open()
        label = {"label": uri.object, "id": uri.id}
        private = session.get_key(pkcs11.ObjectClass.PRIVATE_KEY, pkcs11.KeyType.EC, **label)
        public = session.get_key(pkcs11.ObjectClass.PUBLIC_KEY, pkcs11.KeyType.EC, **label)
        return private, load_der_public_key(encode_ec_public_key(public))
    except pkcs11.PKCS11Error as error:
        raise ConfigurationError(
            f"{source}: the {name} in {uri.module_path} cannot be used: {_describe(error)}",
            hint="Check module-path, token, object, id and PIN in the URI.",
        ) from None


def _describe(error: pkcs11.PKCS11Error) -> str:
    """Return the problem as a clause: most errors of python-pkcs11 have a name and no text."""
    problems = {
        "NoSuchToken": "no token with this label or serial number is present",
        "TokenNotPresent": "the token is not present",
        "MultipleTokensReturned": "several tokens match",
        "PinIncorrect": "the PIN is wrong",
        "PinLenRange": "the PIN is wrong",
        "PinLocked": "the PIN is locked after wrong attempts",
        "UserNotLoggedIn": "it needs a PIN",
        "NoSuchKey": "no elliptic-curve key pair with this label or ID exists, or it needs a PIN",
        "MultipleObjectsReturned": "several keys match",
    }
    name = type(error).__name__
    return problems.get(name, f"{name}: {error}" if str(error) else name)
