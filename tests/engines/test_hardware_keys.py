"""Signatures with a key in a SoftHSM token, the software PKCS#11 module of OpenDNSSEC.

Long tier: a wrong PIN needs a process of its own, because a process logs in to a token once.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pkcs11
import pytest
from pkcs11.util.ec import encode_named_curve_parameters

from components.common.runtime.errors import ConfigurationError
from components.model_registry import provenance_bundle, signature_checks, signing_keys, trust_root
from pipelines.config.customization_config import Customization
from pipelines.steps import policy_preflight
from tests.model_registry.conftest import NAME, build
from tests.model_registry.signed_registry import QUIET, build_signed_registry, copy_signed_registry
from tests.model_registry.test_signatures import write_certificates
from tests.pipelines.command import answer_in_process, refusal, tuneline

pytestmark = [pytest.mark.softhsm, pytest.mark.long, pytest.mark.mlflow]
PIN = "87654321"
CURVES = {"release": "secp256r1", "p384": "secp384r1", "p521": "secp521r1", "koblitz": "secp256k1"}


def find_module() -> Path:
    return next(path for path in Path("/usr/lib").glob("**/libsofthsm2.so"))


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a token with a key on each curve, and of its PIN."""
    folder = tmp_path_factory.mktemp("softhsm")
    (folder / "tokens").mkdir()
    (folder / "softhsm2.conf").write_text(f"directories.tokendir = {folder / 'tokens'}\nobjectstore.backend = file\n")
    (folder / "pin").write_text(PIN + "\n")
    (folder / "pin").chmod(0o600)
    os.environ["SOFTHSM2_CONF"] = str(folder / "softhsm2.conf")  # which the module reads once per process
    options = ["--free", "--label", "site", "--pin", PIN, "--so-pin", "12345678"]
    subprocess.run(["softhsm2-util", "--init-token", *options], check=True, capture_output=True)
    with pkcs11.lib(str(find_module())).get_token(token_label="site").open(user_pin=PIN, rw=True) as session:
        for number, (label, curve) in enumerate(CURVES.items(), start=1):
            values = {pkcs11.Attribute.EC_PARAMS: encode_named_curve_parameters(curve)}
            parameters = session.create_domain_parameters(pkcs11.KeyType.EC, values, local=True)
            parameters.generate_keypair(store=True, label=label, id=bytes([number]))
    return folder


def build_uri(token: Path, key: str = "object=release", pin: str = "pin", label: str = "site") -> str:
    return f"pkcs11:token={label};{key}?module-path={find_module()}&pin-source=file:{token / pin}"


def test_version_signed_in_an_hsm_verifies_with_its_public_key(
    token: Path, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Artifacts, attestations and the history; the policy requires signatures."""

    def configure(folder: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setenv("TUNELINE_WORKDIR", str(folder / "workdir"))
        patch.setenv("TUNELINE_SIGNING_KEY_FILE", build_uri(token))
        shown = answer_in_process("signing", "show", cwd=tmp_path, TUNELINE_SIGNING_KEY_FILE=build_uri(token))
        (folder / "keys" / "hsm.pub").write_text(shown["public_key"])
        patch.setenv("TUNELINE_TRUST", str(folder / "keys" / "hsm.pub"))

    kept = build_signed_registry(empty_store, tmp_path, configure)
    (tmp_path / "copy").mkdir()
    signed = copy_signed_registry(kept, tmp_path / "copy", monkeypatch)
    trust = trust_root.load_trust([signed.folder / "keys" / "hsm.pub"])
    bundle = provenance_bundle.collect(NAME, "champion")
    result = provenance_bundle.verify(bundle, trust, signature_checks.find_artifact)
    assert result.objections == []
    assert {one.key_id for one in result.artifacts} == {*trust.keys}
    assert all(one.hashed for one in result.artifacts)
    other = trust_root.load_trust([signed.public_key])
    assert any("which is not trusted" in one for one in provenance_bundle.verify(bundle, other).objections)


@pytest.mark.parametrize("key", ["object=release", "object=p384", "id=%03;type=private"])
def test_key_on_each_curve_signs(
    token: Path, key: str, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_WORKDIR", str(tmp_path / "workdir"))
    monkeypatch.setenv("TUNELINE_SIGNING_KEY_FILE", build_uri(token, key))
    model = build(tmp_path / "model", "model", "a", [], {})
    signature_checks.sign_version([model], "", QUIET)
    loaded = signing_keys.load_signing_key()
    assert loaded
    (tmp_path / "hsm.pub").write_text(signing_keys.format_public_key(loaded.public_key))
    trust = trust_root.load_trust([tmp_path / "hsm.pub"])
    signature_checks.require_signature(model, trust)
    (model.path / "report.html").write_text("edited")
    with pytest.raises(trust_root.SignatureInvalidError, match="its files do not match"):
        signature_checks.require_signature(model, trust)


def test_certificate_must_be_for_the_key(token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_certificates(tmp_path / "site", "site-ca")
    monkeypatch.setenv("TUNELINE_SIGNING_KEY_FILE", build_uri(token))
    monkeypatch.setenv("TUNELINE_SIGNING_CERTIFICATES_FILE", str(tmp_path / "site" / "chain.pem"))
    with pytest.raises(ConfigurationError, match=r"chain.pem is not for the key in the HSM"):
        signing_keys.load_signing_key()


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ({"key": "object=missing"}, "no elliptic-curve key pair with this label or ID exists, or it needs a PIN"),
        ({"label": "absent"}, "the token absent in .* cannot be used: no token with this label"),
        ({"pin": "absent"}, r"the PIN file .*/absent \(pin-source\) cannot be read"),
        ({"key": "object=koblitz"}, "the key in the HSM is not on a supported curve; expected P-256, P-384 or P-521"),
    ],
)
def test_run_reports_an_unusable_key_before_training(
    token: Path, uri: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_SIGNING_KEY_FILE", build_uri(token, **uri))
    with pytest.raises(ConfigurationError, match=f"TUNELINE_SIGNING_KEY_FILE: .*{problem}"):
        policy_preflight.list_objections(Customization(), None, [])


def test_wrong_pin_is_reported(token: Path, tmp_path: Path) -> None:
    """The PIN of the password variable is used without pin-source; no output repeats it."""
    uri = build_uri(token).partition("&pin-source")[0]
    for pin, code in (("00000000", 2), (PIN, 0)):
        secrets = {"TUNELINE_SIGNING_KEY_FILE": uri, "TUNELINE_SIGNING_KEY_PASSWORD": pin}
        process = tuneline("signing", "show", "--json", cwd=tmp_path, **secrets)
        assert process.returncode == code, process.stderr
        assert pin not in process.stdout + process.stderr
        if code:
            error = json.loads(process.stdout)["error"]
            assert error["kind"] == "configuration"
            assert error["message"].endswith("cannot be used: the PIN is wrong")


def test_pin_that_others_can_read_is_refused(token: Path, tmp_path: Path) -> None:
    (token / "open").write_text(PIN)
    (token / "open").chmod(0o644)
    error = refusal(2, "signing", "show", cwd=tmp_path, TUNELINE_SIGNING_KEY_FILE=build_uri(token, pin="open"))
    assert "has mode 0644, so other users can read or change the PIN" in error["message"]
