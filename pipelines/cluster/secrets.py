"""Secrets and config maps that platform.yaml names: whether they and their keys are there. No value is ever shown."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from pipelines.cluster.access import ForbiddenError, Json
from pipelines.cluster.look import RULES, Look
from pipelines.findings import Finding, finding, unchecked
from pipelines.platform import PLACE

PULLING = {"kubernetes.io/dockerconfigjson": ".dockerconfigjson", "kubernetes.io/dockercfg": ".dockercfg"}


def secrets(look: Look) -> Iterator[Finding]:
    """Every secret that is mounted or read into a variable."""
    for name, keys in _wanted_secrets(look).items():
        try:
            yield _secret(look, name, keys)
        except ForbiddenError as error:
            yield unchecked(f"secret {name}", f"secrets may not be read ({error.message})", RULES)


def _wanted_secrets(look: Look) -> dict[str, dict[str, str]]:
    """The keys that are wanted of each secret, with the variable each becomes; none are wanted of one that is mounted whole."""
    wanted: dict[str, dict[str, str]] = {}
    for variable, one in look.platform.secrets.items():
        wanted.setdefault(one.name, {})[one.key] = variable
    for files in look.platform.secret_files:
        wanted.setdefault(files.name, {})
    trusted = look.platform.network.certificates
    if trusted.secret:
        wanted.setdefault(trusted.secret, {})[trusted.key] = ""
    return wanted


def _secret(look: Look, name: str, keys: dict[str, str]) -> Finding:
    found, title = look.get("secrets", name), f"secret {name}"
    files = " ".join(f"--from-file={key}=FILE" for key in keys or ["KEY"])
    make = look.kubectl(f"create secret generic {name} {files}")
    if found is None:
        return finding(title, False, "it does not exist", f"Make it: {make}")
    data = found.get("data") or {}
    if lacking := keys.keys() - data.keys():
        there = ", ".join(sorted(data)) or "none"
        hint = f"Correct the key under `secrets` in platform.yaml, or make it anew: {look.kubectl(f'delete secret {name}')}; {make}"
        return finding(title, False, f"it has no key {', '.join(sorted(lacking))}; its keys: {there}", hint)
    return finding(
        title, *_values(data, keys), f"Make it anew, with `printf %s VALUE > FILE`: {look.kubectl(f'delete secret {name}')}; {make}"
    )


def _values(data: dict[str, str], keys: dict[str, str]) -> tuple[bool, str]:
    """A token or an address that is empty or ends with a line break is refused by whoever it is sent to."""
    for key, variable in keys.items():
        value = base64.b64decode(data[key])
        if variable and not value.strip():
            return False, f"its key {key} is empty"
        if variable and not PLACE.search(variable) and value != value.strip():
            return False, f"its key {key} begins or ends with a space or a line break, which {variable} would hold too"
    return True, f"with {', '.join(sorted(keys or data)) or 'no keys'}"


def config_maps(look: Look) -> Iterator[Finding]:
    """Every config map that is mounted; of the one that holds authorities, whether it does."""
    trusted = look.platform.network.certificates
    for name in dict.fromkeys([*(one.name for one in look.platform.config_files), *([trusted.config_map] if trusted.config_map else [])]):
        found, title = look.get("configmaps", name), f"config map {name}"
        if found is None:
            key = trusted.key if name == trusted.config_map else "KEY"
            yield finding(title, False, "it does not exist", f"Make it: {look.kubectl(f'create configmap {name} --from-file={key}=FILE')}")
        elif name == trusted.config_map:
            yield _authorities(title, found, trusted.key)
        else:
            yield finding(title, True, f"with {', '.join(sorted(found.get('data') or {})) or 'no keys'}", "")


def _authorities(title: str, found: Json, key: str) -> Finding:
    text = (found.get("data") or {}).get(key)
    if text is None:
        there = ", ".join(sorted(found.get("data") or {})) or "none"
        return finding(title, False, f"it has no key {key}; its keys: {there}", "Correct network.certificates.key in platform.yaml.")
    try:
        count = len(_trusting(text).get_ca_certs())
    except ssl.SSLError:
        count = 0
    hint = f"Put PEM certificates (-----BEGIN CERTIFICATE-----) of authorities there, under the key {key}."
    return finding(title, count > 0, f"{count} authorities" if count else f"its key {key} holds no certificates", hint)


def _trusting(text: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=text)
    return context


def trust(look: Look) -> ssl.SSLContext:
    """What the pods would trust: the bundle of platform.yaml where it may be read, else this machine's."""
    trusted = look.platform.network.certificates
    text = ""
    try:
        if trusted.config_map:
            text = (look.get("configmaps", trusted.config_map) or {}).get("data", {}).get(trusted.key, "")
        elif trusted.secret:
            text = value_of(look, trusted.secret, trusted.key)
        return _trusting(text) if text else ssl.create_default_context()
    except (ForbiddenError, ssl.SSLError):
        return ssl.create_default_context()


def value_of(look: Look, name: str, key: str) -> str:
    """A secret's value, to be sent where the pods would send it; empty where it is not there. Raises ForbiddenError."""
    data = (look.get("secrets", name) or {}).get("data") or {}
    return base64.b64decode(data.get(key, "")).decode(errors="replace").strip()


def pull_secrets(look: Look) -> Iterator[Finding]:
    """The secrets that the registry asks for, which have a type of their own."""
    for name in look.platform.images.pull_secrets:
        title = f"pull secret {name}"
        make = look.kubectl(
            f"create secret docker-registry {name} --docker-server=REGISTRY --docker-username=USER --docker-password=PASSWORD"
        )
        try:
            found = look.get("secrets", name)
        except ForbiddenError as error:
            yield unchecked(title, f"secrets may not be read ({error.message})", RULES)
            continue
        yield finding(title, *_pulling(found), f"Make it (kubectl delete secret {name} first where it is there): {make}")


def _pulling(found: Json | None) -> tuple[bool, str]:
    if found is None:
        return False, "it does not exist"
    kind = found.get("type", "")
    if kind not in PULLING:
        return False, f"it is of type {kind}"
    try:
        return True, f"for {', '.join(_logins(found)) or 'no registry'}"
    except ValueError:
        return False, f"its key {PULLING[kind]} cannot be read: it is not what docker writes"


def logins(look: Look, account: Json | None) -> dict[str, tuple[str, str]]:
    """User and password by registry, of the pull secrets and of those of the pods' service account. Raises ForbiddenError."""
    named = [*look.platform.images.pull_secrets, *(one["name"] for one in (account or {}).get("imagePullSecrets") or [])]
    found: dict[str, tuple[str, str]] = {}
    for name in named:
        with suppress(ValueError):  # it has a finding of its own
            found |= _logins(look.get("secrets", name) or {})
    return found


def _logins(secret: Json) -> dict[str, tuple[str, str]]:
    """User and password by registry. Raises ValueError for a secret that holds them in another form than docker writes."""
    key = PULLING.get(secret.get("type", ""), "")
    read = json.loads(base64.b64decode((secret.get("data") or {}).get(key, "")) or b"{}")
    registries = read.get("auths", {}) if key == ".dockerconfigjson" and isinstance(read, dict) else read
    if not isinstance(registries, dict) or not all(isinstance(one, dict) for one in registries.values()):
        raise ValueError("no registries with a login each")
    return {_host(name): _login(one) for name, one in registries.items()}


def _host(name: str) -> str:
    """docker writes https://index.docker.io/v1/ for its own registry."""
    host = name.removeprefix("https://").removeprefix("http://").partition("/")[0]
    return "docker.io" if host in ("index.docker.io", "registry-1.docker.io") else host


def _login(one: dict[str, Any]) -> tuple[str, str]:
    if one.get("auth"):
        user, _, password = base64.b64decode(one["auth"]).decode(errors="replace").partition(":")
        return user, password
    return str(one.get("username", "")), str(one.get("password", ""))


def masked(text: str, values: Iterable[str]) -> str:
    """A text without these values."""
    for value in sorted(filter(None, values), key=len, reverse=True):
        text = text.replace(value, "***")
    return text
