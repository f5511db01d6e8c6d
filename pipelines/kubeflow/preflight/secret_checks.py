"""Checks that the secrets and config maps of platform.yaml exist and have the required keys. Values are never shown."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Iterator
from contextlib import suppress

from components.common.launch import JsonObject
from components.common.reporting.check_findings import CheckResult, check_result, skipped_check
from components.common.runtime.counts import format_count
from pipelines.config.platform_config import LOCATION_NAME_PATTERN
from pipelines.kubeflow.preflight.check_context import RBAC_HINT, CheckContext
from pipelines.kubeflow.preflight.cluster_api import ForbiddenError

PULL_SECRET_KEYS = {"kubernetes.io/dockerconfigjson": ".dockerconfigjson", "kubernetes.io/dockercfg": ".dockercfg"}


def check_secrets(context: CheckContext) -> Iterator[CheckResult]:
    """Check every secret that is mounted or read into a variable."""
    platform, trusted = context.platform, context.platform.network.certificates
    required: dict[str, dict[str, str]] = {}  # required keys and their variables; empty if mounted as a whole
    for variable, secret in platform.secrets.items():
        required.setdefault(secret.name, {})[secret.key] = variable
    for variable, notification in platform.notification_variables.items():
        required.setdefault(notification.url.name, {})[notification.url.key] = variable
    for files in platform.secret_files:
        required.setdefault(files.name, {})
    if trusted.secret:
        required.setdefault(trusted.secret, {})[trusted.key] = ""
    for name, keys in required.items():
        try:
            yield _check_secret(context, name, keys)
        except ForbiddenError as error:
            yield skipped_check(f"secret {name}", f"the caller may not read secrets ({error.message})", RBAC_HINT)


def _check_secret(context: CheckContext, name: str, keys: dict[str, str]) -> CheckResult:
    """Check that a secret has its keys, and that no value is empty or begins or ends with a space or a line break."""
    found, title = context.get("secrets", name), f"secret {name}"
    create = context.format_kubectl(
        f"create secret generic {name} {' '.join(f'--from-file={key}=FILE' for key in keys or ['KEY'])}"
    )
    if found is None:
        return check_result(title, False, "does not exist", f"Create the secret: {create}")
    data, delete = found.get("data") or {}, context.format_kubectl(f"delete secret {name}")
    if missing := keys.keys() - data.keys():
        problem = f"no key {', '.join(sorted(missing))}; existing keys: {', '.join(sorted(data)) or 'none'}"
        hint = f"Correct the key under `secrets` in platform.yaml, or create the secret again: {delete}; {create}"
        return check_result(title, False, problem, hint)
    for key, variable in keys.items():
        value = base64.b64decode(data[key])
        if variable and not value.strip():
            problem = f"key {key} is empty"
        elif variable and not LOCATION_NAME_PATTERN.search(variable) and value != value.strip():
            problem = (
                f"the value of {key} begins or ends with a space or a line break, which {variable} would contain too"
            )
        else:
            continue
        hint = f"Create the secret again, with `printf %s VALUE > FILE`: {delete}; {create}"
        return check_result(title, False, problem, hint)
    return check_result(title, True, f"keys: {', '.join(sorted(keys or data)) or 'none'}", "")


def check_config_maps(context: CheckContext) -> Iterator[CheckResult]:
    """Check every mounted config map, and the certificates of the CA bundle."""
    trusted = context.platform.network.certificates
    names = [*(files.name for files in context.platform.config_files), trusted.config_map]
    for name in dict.fromkeys(filter(None, names)):
        found, title = context.get("configmaps", name), f"config map {name}"
        key = trusted.key if name == trusted.config_map else ""
        if found is None:
            create = context.format_kubectl(f"create configmap {name} --from-file={key or 'KEY'}=FILE")
            yield check_result(title, False, "does not exist", f"Create the config map: {create}")
            continue
        data = found.get("data") or {}
        keys = ", ".join(sorted(data))
        if not key:
            yield check_result(title, True, f"keys: {keys or 'none'}", "")
        elif key not in data:
            problem = f"no key {key}; existing keys: {keys or 'none'}"
            yield check_result(title, False, problem, "Correct network.certificates.key in platform.yaml.")
        else:
            try:
                count = len(_build_trust_store(data[key]).get_ca_certs())
            except ssl.SSLError:
                count = 0
            authorities = format_count(count, "certificate authority", "certificate authorities")
            content = authorities if count else f"key {key} contains no certificates"
            hint = (
                f"Store PEM certificates (-----BEGIN CERTIFICATE-----) of certificate authorities under the key {key}."
            )
            yield check_result(title, count > 0, content, hint)


def _build_trust_store(text: str) -> ssl.SSLContext:
    ssl_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ssl_context.load_verify_locations(cadata=text)
    return ssl_context


def build_trust_context(context: CheckContext) -> ssl.SSLContext:
    """Return the pods' trust store: the CA bundle of platform.yaml if readable, else this machine's trust store."""
    trusted = context.platform.network.certificates
    text = ""
    try:
        if trusted.config_map:
            text = (context.get("configmaps", trusted.config_map) or {}).get("data", {}).get(trusted.key, "")
        elif trusted.secret:
            text = read_secret_value(context, trusted.secret, trusted.key)
        return _build_trust_store(text) if text else ssl.create_default_context()
    except (ForbiddenError, ssl.SSLError):
        return ssl.create_default_context()


def read_secret_value(context: CheckContext, name: str, key: str) -> str:
    """Return the value of a secret's key without surrounding whitespace, or "" if the secret or key does not exist.

    Raises:
        ForbiddenError: the secret may not be read.
    """
    data = (context.get("secrets", name) or {}).get("data") or {}
    return base64.b64decode(data.get(key, "")).decode(errors="replace").strip()


def check_pull_secrets(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the image pull secrets exist, have the right type and contain logins."""
    for name in context.platform.images.pull_secrets:
        title = f"pull secret {name}"
        try:
            found = context.get("secrets", name)
        except ForbiddenError as error:
            yield skipped_check(title, f"the caller may not read secrets ({error.message})", RBAC_HINT)
            continue
        kind, problem, registries = (found or {}).get("type", ""), "", ""
        if found is None:
            problem = "does not exist"
        elif kind not in PULL_SECRET_KEYS:
            problem = f"type is {kind}; expected {' or '.join(PULL_SECRET_KEYS)}"
        else:
            try:
                registries = ", ".join(_read_logins(found)) or "none"
            except ValueError:
                problem = f"key {PULL_SECRET_KEYS[kind]} is not in the format of Docker's config.json"
        create = context.format_kubectl(
            f"create secret docker-registry {name} --docker-server=REGISTRY "
            "--docker-username=USER --docker-password=PASSWORD"
        )
        hint = f"Create the secret (after kubectl delete secret {name} if the secret exists): {create}"
        yield check_result(title, not problem, problem or f"registries: {registries}", hint)


def collect_logins(context: CheckContext, account: JsonObject | None) -> dict[str, tuple[str, str]]:
    """Return user and password by registry, from the pull secrets of platform.yaml and of the service account.

    Args:
        context: the cluster and the platform.
        account: the ServiceAccount object of the pods; None if it does not exist.

    Raises:
        ForbiddenError: the secrets may not be read.
    """
    names = [
        *context.platform.images.pull_secrets,
        *(reference["name"] for reference in (account or {}).get("imagePullSecrets") or []),
    ]
    logins: dict[str, tuple[str, str]] = {}
    for name in names:
        with suppress(ValueError):  # reported by check_pull_secrets
            logins |= _read_logins(context.get("secrets", name) or {})
    return logins


def _read_logins(secret: JsonObject) -> dict[str, tuple[str, str]]:
    """Return user and password by registry. Raises ValueError if the secret is not in docker's format."""
    key = PULL_SECRET_KEYS.get(secret.get("type", ""), "")
    read = json.loads(base64.b64decode((secret.get("data") or {}).get(key, "")) or b"{}")
    registries = read.get("auths", {}) if key == ".dockerconfigjson" and isinstance(read, dict) else read
    if not isinstance(registries, dict) or not all(isinstance(login, dict) for login in registries.values()):
        raise ValueError("no registries with logins")
    logins: dict[str, tuple[str, str]] = {}
    for name, login in registries.items():
        host = name.removeprefix("https://").removeprefix("http://").partition("/")[0]
        if host in ("index.docker.io", "registry-1.docker.io"):  # docker writes https://index.docker.io/v1/
            host = "docker.io"
        user, password = login.get("username", ""), login.get("password", "")
        if login.get("auth"):
            user, _, password = base64.b64decode(login["auth"]).decode(errors="replace").partition(":")
        logins[host] = (str(user), str(password))
    return logins
