"""A stand-in for a site's Sigstore: a certificate authority (Fulcio), a CT log and a transparency log (Rekor).

It issues real certificates with signed certificate timestamps, and real log entries with Merkle proofs, checkpoints and
signed entry timestamps, so that the unmodified client and verifier of sigstore-python run against it. It implements the
version 1 interfaces, keeps no state on disk, and has no timestamp authority.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import rfc8785
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

Json = dict[str, Any]
ISSUER = "https://kubernetes.default.svc"
START = "2026-01-01T00:00:00Z"
SCT_LIST = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
ISSUER_OID = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
ISSUER_V2_OID = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.8")


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def sign(key: ec.EllipticCurvePrivateKey, content: bytes) -> bytes:
    return key.sign(content, ec.ECDSA(SHA256()))


def encode_public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


def get_identity(namespace: str, account: str) -> str:
    """Return the subject alternative name that Fulcio gives a service account of Kubernetes."""
    return f"https://kubernetes.io/namespaces/{namespace}/serviceaccounts/{account}"


@dataclass
class SigstoreSite:
    """The keys, the log and the behaviour of the services.

    Attributes:
        certificate_age: age of a certificate when it is issued; certificates are valid for ten minutes.
        has_inclusion_promise: whether the log dates its entries with a signed entry timestamp.
        failing: path of a request that is answered with status 503, or "".
        requests: paths of the requests.
    """

    authority_key: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    ct_key: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    log_key: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    token_key: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    certificate_age: timedelta = timedelta()
    has_inclusion_promise: bool = True
    failing: str = ""
    leaves: list[bytes] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "site sigstore")])
        begin, public = datetime(2026, 1, 1, tzinfo=UTC), self.authority_key.public_key()
        builder = x509.CertificateBuilder(name, name, public, x509.random_serial_number())
        builder = builder.not_valid_before(begin).not_valid_after(begin + timedelta(days=3650))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = builder.add_extension(usage, critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        self.authority = builder.sign(self.authority_key, SHA256())

    def build_token(self, account: str = "release", namespace: str = "team-a", **claims: object) -> str:
        """Return a token as the kubelet projects it for a service account."""
        now = int(datetime.now(UTC).timestamp())
        kubernetes = {"namespace": namespace, "serviceaccount": {"name": account}}
        subject = f"system:serviceaccount:{namespace}:{account}"
        own = {"iss": ISSUER, "sub": subject, "aud": ["sigstore"], "iat": now, "nbf": now, "exp": now + 600}
        return jwt.encode({**own, "kubernetes.io": kubernetes, **claims}, self.token_key, "ES256")

    def build_trust_config(self) -> Json:
        """Return the client trust configuration of the site."""
        valid = {"start": START}
        service = {"url": self.url, "majorApiVersion": 1, "validFor": valid, "operator": "site"}
        chain = {"certificates": [{"rawBytes": encode(self.authority.public_bytes(Encoding.DER))}]}
        logs = [
            {
                "baseUrl": self.url,
                "hashAlgorithm": "SHA2_256",
                "publicKey": {
                    "rawBytes": encode(encode_public(key)),
                    "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                    "validFor": valid,
                },
                "logId": {"keyId": encode(hashlib.sha256(encode_public(key)).digest())},
            }
            for key in (self.log_key, self.ct_key)
        ]
        return {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": {
                "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
                "tlogs": logs[:1],
                "certificateAuthorities": [
                    {
                        "subject": {"organization": "site", "commonName": "sigstore"},
                        "certChain": chain,
                        "validFor": valid,
                    }
                ],
                "ctlogs": logs[1:],
            },
            "signingConfig": {
                "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
                "caUrls": [service],
                "rekorTlogUrls": [service],
                "rekorTlogConfig": {"selector": "ANY"},
            },
        }

    def write(self, folder: Path, account: str = "release") -> None:
        """Write the trust configuration, a token, and a trust file that pins the identity of its account."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sigstore.json").write_text(json.dumps(self.build_trust_config()))
        (folder / "token").write_text(self.build_token(account) + "\n")
        pinned = {"identity": get_identity("team-a", account), "issuer": ISSUER, "trust_config": "sigstore.json"}
        (folder / "trust.yaml").write_text(json.dumps({"identities": [pinned]}))

    def issue_certificate(self, token: str, request: Json) -> Json:
        """Return the certificate for a token and a certificate signing request, as Fulcio does."""
        claims = jwt.decode(token, self.token_key.public_key(), ["ES256"], audience="sigstore")
        account = claims["kubernetes.io"]
        identity = get_identity(account["namespace"], account["serviceaccount"]["name"])
        csr = x509.load_pem_x509_csr(base64.b64decode(request["certificateSigningRequest"]))
        assert csr.is_signature_valid
        begin = datetime.now(UTC).replace(microsecond=0) - self.certificate_age
        subject, serial = x509.Name([]), x509.random_serial_number()
        builder = x509.CertificateBuilder(self.authority.subject, subject, csr.public_key(), serial)
        builder = builder.not_valid_before(begin).not_valid_after(begin + timedelta(minutes=10))
        issuer = claims["iss"].encode()
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        public = self.authority_key.public_key()
        for value, critical in (
            (usage, True),
            (x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.CODE_SIGNING]), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(public), False),
            (x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)]), True),
            (x509.UnrecognizedExtension(ISSUER_OID, issuer), False),
            (x509.UnrecognizedExtension(ISSUER_V2_OID, bytes([12, len(issuer)]) + issuer), False),  # a DER UTF8String
        ):
            builder = builder.add_extension(value, critical=critical)
        unlogged = builder.sign(self.authority_key, SHA256()).tbs_certificate_bytes
        timestamps = self._sign_certificate_timestamp(unlogged, begin)
        certificate = builder.add_extension(x509.UnrecognizedExtension(SCT_LIST, timestamps), critical=False)
        chain = [certificate.sign(self.authority_key, SHA256()), self.authority]
        pems = [one.public_bytes(Encoding.PEM).decode() for one in chain]
        return {"signedCertificateEmbeddedSct": {"chain": {"certificates": pems}}}

    def _sign_certificate_timestamp(self, certificate: bytes, time: datetime) -> bytes:
        """Return the list of one signed certificate timestamp (RFC 6962, section 3.3) as a DER octet string."""
        milliseconds = int(time.timestamp() * 1000)
        issuer = hashlib.sha256(encode_public(self.authority_key)).digest()
        entry = struct.pack("!H32s", 1, issuer) + len(certificate).to_bytes(3, "big") + certificate
        signature = sign(self.ct_key, struct.pack("!BBQ", 0, 0, milliseconds) + entry + struct.pack("!H", 0))
        log = hashlib.sha256(encode_public(self.ct_key)).digest()
        timestamp = struct.pack("!B32sQHBBH", 0, log, milliseconds, 0, 4, 3, len(signature)) + signature
        content = struct.pack("!HH", len(timestamp) + 2, len(timestamp)) + timestamp
        length = bytes([len(content)]) if len(content) < 128 else bytes([0x81, len(content)])
        return b"\x04" + length + content

    def add_entry(self, proposed: Json) -> Json:
        """Append a proposed DSSE entry to the log, and return the entry with its proofs, as Rekor does."""
        content = proposed["spec"]["proposedContent"]
        envelope = json.loads(content["envelope"])
        [signature], [verifier] = envelope["signatures"], content["verifiers"]
        body = {
            "apiVersion": "0.0.1",
            "kind": "dsse",
            "spec": {
                "envelopeHash": _describe_hash(content["envelope"].encode()),
                "payloadHash": _describe_hash(base64.b64decode(envelope["payload"])),
                "signatures": [{"signature": signature["sig"], "verifier": verifier}],
            },
        }
        leaf = rfc8785.dumps(body)
        self.leaves.append(leaf)
        index, size = len(self.leaves) - 1, len(self.leaves)
        log_id = hashlib.sha256(encode_public(self.log_key)).digest()
        entry: Json = {
            "body": encode(leaf),
            "integratedTime": int(datetime.now(UTC).timestamp()),
            "logID": log_id.hex(),
            "logIndex": index,
        }
        root = _hash_tree(self.leaves)
        note = f"site sigstore - 1\n{size}\n{encode(root)}\n"
        signed_note = f"{note}\n\u2014 site {encode(log_id[:4] + sign(self.log_key, note.encode()))}\n"
        promise = encode(sign(self.log_key, rfc8785.dumps(entry)))
        entry["verification"] = {
            "inclusionProof": {
                "logIndex": index,
                "rootHash": root.hex(),
                "treeSize": size,
                "hashes": [one.hex() for one in _prove_inclusion(index, self.leaves)],
                "checkpoint": signed_note,
            },
            "signedEntryTimestamp": promise,
        }
        return {"0" * 64: entry}


def _describe_hash(content: bytes) -> Json:
    return {"algorithm": "sha256", "value": hashlib.sha256(content).hexdigest()}


def _split(leaves: list[bytes]) -> int:
    """Return the largest power of two below the number of leaves (RFC 6962, section 2.1)."""
    return 1 << (len(leaves) - 1).bit_length() - 1


def _hash_tree(leaves: list[bytes]) -> bytes:
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    at = _split(leaves)
    return hashlib.sha256(b"\x01" + _hash_tree(leaves[:at]) + _hash_tree(leaves[at:])).digest()


def _prove_inclusion(index: int, leaves: list[bytes]) -> list[bytes]:
    """Return the audit path of a leaf (RFC 6962, section 2.1.1)."""
    if len(leaves) == 1:
        return []
    at = _split(leaves)
    if index < at:
        return [*_prove_inclusion(index, leaves[:at]), _hash_tree(leaves[at:])]
    return [*_prove_inclusion(index - at, leaves[at:]), _hash_tree(leaves[:at])]


class _Handler(BaseHTTPRequestHandler):
    site: SigstoreSite

    def do_POST(self) -> None:
        site = self.site
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        site.requests.append(self.path)
        status, answer = 404, {"code": 404, "message": "unknown path"}
        if self.path == site.failing:
            status, answer = 500, {"code": 500, "message": "out of order"}
        elif self.path == "/api/v2/signingCert":
            try:
                token = self.headers["Authorization"].removeprefix("Bearer ")
                status, answer = 200, site.issue_certificate(token, content)
            except jwt.InvalidTokenError as error:
                status, answer = 401, {"code": 16, "message": f"the token is not valid: {error}"}
        elif self.path == "/api/v1/log/entries":
            status, answer = 201, site.add_entry(content)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def running_site() -> Iterator[SigstoreSite]:
    """Serve a site's Sigstore on a free local port."""
    site = SigstoreSite()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"site": site}))
    site.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
