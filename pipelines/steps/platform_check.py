"""Platform check, the first step of a run: compares the environment of a pod with platform.yaml.

The behaviour of the volume, writes to MLflow and the values of secrets can be checked only inside a pod.
"""

from __future__ import annotations

import errno
import os
import shutil
import ssl
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from components.common.reporting import mlflow_tracking
from components.common.reporting.check_findings import CheckResult, check_result
from components.common.runtime import url_credentials
from components.common.runtime.errors import TunelineError, translate_system_error
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store, job_folders
from components.common.workspace.artifact_store import Workdir
from pipelines.config.platform_config import LOCATION_NAME_PATTERN, Platform, list_mounts
from pipelines.steps import notifications

STEP_NAME = "check_the_platform"
GIB = 2**30
MIN_FREE_BYTES = 5 * GIB  # enough for the demo
TRIAL_FOLDER = "trial"  # a job folder on the volume is trial.<host>.<process>.<digits>
NOTE_KEY = f"keys/{STEP_NAME}/{TRIAL_FOLDER}"  # key of the trial note in an object store
VOLUME_HINT = "Use a POSIX file system: NFS, PowerScale, CephFS or a disk, not a bucket that is mounted as a folder."


class PlatformError(TunelineError):
    """The environment does not match platform.yaml."""

    kind = "platform"


def describe_expected(platform: Platform) -> dict[str, Any]:
    """Return the expected mounts, variables and CA bundle of a pod: names and paths without values.

    Returns:
        {"mounts": mount paths, "variables": names of variables from secrets, "authorities": path of the CA bundle or "",
        "notifications": the name of each service by the variable of its URL}.
    """
    shared = [mount for key, _, mount in list_mounts(platform) if key not in ("scratch", "shared_memory")]
    trusted = platform.network.certificates
    return {
        "mounts": shared,
        "variables": sorted(platform.secrets),
        "authorities": trusted.path if trusted.name else "",
        "notifications": {variable: each.name for variable, each in platform.notification_variables.items()},
    }


def check_platform(expected: Mapping[str, Any], workdir: Workdir, reporter: Reporter, page: Path) -> None:
    """Run every check and report all results.

    Args:
        expected: The result of `describe_expected` when the pipeline was compiled.
        workdir: The workdir in the pod.
        reporter: Receives a note per check.
        page: Markdown file for the Kubeflow UI.

    Raises:
        PlatformError: a required check failed.
    """
    results = _check_pod(expected, workdir, reporter)
    _write_page(page, results)
    reporter.step("writing to MLflow")
    hint = (
        "Check mlflow.tracking_uri, the MLflow secrets in platform.yaml, and this account's permissions on the server."
    )
    with _check(results, "MLflow", hint) as result:
        os.environ["MLFLOW_TRACKING_URI"] = workdir.tracking_uri
        try:
            with mlflow_tracking.stage_run(STEP_NAME) as run:
                mlflow_tracking.log_files(run, page)
        except (OSError, TunelineError, ValueError):
            raise
        except Exception as error:  # each kind of artifact store raises its own errors
            message = url_credentials.mask_credentials(" ".join(str(error).split()))[:300]
            raise ValueError(f"a file could not be written: {type(error).__name__}: {message}") from None
        uri = url_credentials.remove_credentials(workdir.tracking_uri)
        result["found"] = f"a run and a file were written to {uri}"
    _write_page(page, results)
    for result in results:
        mark = "ok" if result["ok"] else "MISSING" if result["needed"] else "warning"
        reporter.note(f"{mark}: {result['name']}: {result['found']} {result['hint']}".strip())
    if failed := [result for result in results if result["needed"] and not result["ok"]]:
        findings = "; ".join(f"{result['name']}: {result['found']}" for result in failed)
        raise PlatformError(
            f"the environment does not match platform.yaml: {findings}",
            hint=" ".join(result["hint"] for result in failed),
        )


@contextmanager
def _check(results: list[CheckResult], name: str, hint: str) -> Iterator[CheckResult]:
    """Append a check's result: the finding set in the context, or the raised error with the hint."""
    result = check_result(name, True, "", "")
    results.append(result)
    try:
        yield result
    except (OSError, TunelineError, ValueError) as error:
        known = error if isinstance(error, TunelineError) else translate_system_error(error)
        found = url_credentials.mask_credentials(known.message if known else str(error))
        result.update({"ok": False, "found": found, "hint": f"{known.hint if known else ''} {hint}".strip()})


def _check_pod(expected: Mapping[str, Any], workdir: Workdir, reporter: Reporter) -> list[CheckResult]:
    """Check volumes, the store, free space, secrets, CA certificates and the service account."""
    results: list[CheckResult] = []
    reporter.step("checking the volumes")
    hint = "Compile the pipeline with this cluster's platform.yaml, or inspect the pod: kubectl describe pod"
    for mount in map(Path, expected["mounts"]):
        with _check(results, f"volume at {mount}", hint) as result:
            if not mount.is_dir():
                raise ValueError("not an existing folder")
            result["found"] = "mounted"
            if not os.path.ismount(mount) and mount.stat().st_dev == Path("/").stat().st_dev:
                found = "not a mount; its files are deleted with the pod"
                result.update({"ok": False, "needed": False, "found": found, "hint": hint})
    for folder in dict.fromkeys((workdir.root, workdir.store, workdir.state, artifact_store.get_cache_folder())):
        with _check(results, f"folder {folder}", VOLUME_HINT) as result:
            folder.mkdir(parents=True, exist_ok=True)
            with job_folders.private_folder(folder, TRIAL_FOLDER) as own:
                _exercise_folder(own)
            result["found"] = "supports the writes, links and renames of the artifact store"
    if (store := artifact_store.describe_store(workdir.store)) != str(workdir.store):
        with _check(
            results,
            f"store {store}",
            "Correct `store` in platform.yaml, or the secrets with its credentials.",
        ) as result:
            # The content is constant, because two runs may write the note at the same time.
            artifact_store.write_note(workdir.store, NOTE_KEY, STEP_NAME)
            if artifact_store.read_note(workdir.store, NOTE_KEY) != STEP_NAME:
                raise ValueError("the test object that was read back differs from the one written")
            result["found"] = "a test object was written and read back"
    with _check(
        results, "space on the volume", "Free some space on the volume, or enlarge the claim or its quota."
    ) as result:
        free = shutil.disk_usage(workdir.root).free
        result["found"] = f"{free / GIB:,.0f} GiB free"
        if free <= MIN_FREE_BYTES:
            raise ValueError(f"{result['found']}; expected more than {MIN_FREE_BYTES // GIB} GiB")
    hint = "Request scratch space for the stages with resources.others.scratch in platform.yaml."
    with _check(results, "temporary files", hint) as result, tempfile.TemporaryFile() as file:
        file.write(b"0")
        result["found"] = tempfile.gettempdir()
    reporter.step("checking secrets and CA certificates")
    for name in expected["variables"]:
        hint = f"Recreate the secret of secrets.{name} in platform.yaml with --from-file=KEY=FILE, where FILE "
        hint += "contains the output of `printf %s VALUE`."
        with _check(results, f"variable {name}", hint) as result:
            value = os.environ.get(name)
            if value is None:
                raise ValueError("is not set")
            if not value.strip():
                raise ValueError("is empty")
            # A secret that is created from a text file includes the line break at its end.
            if value != value.strip() and not LOCATION_NAME_PATTERN.search(name):
                raise ValueError("begins or ends with a space or a line break")
            result["found"] = "is set"
    for variable, name in expected["notifications"].items():
        hint = "Recreate the secret of notifications in platform.yaml with the Apprise URL of the service."
        with _check(results, f"notification {name}", hint) as result:
            notifications.open_service(variable)
            result["found"] = "the URL is valid; no message was sent"
    if path := expected["authorities"]:
        with _check(results, "authorities", "Correct network.certificates in platform.yaml.") as result:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(path)
            result["found"] = f"{len(context.get_ca_certs())} in {path}"
    results.append(_check_service_account())
    return results


def _exercise_folder(folder: Path) -> None:
    """Write, link and rename in a folder as the artifact store does; raise OSError or ValueError on a failure."""
    file, link, content = folder / "file", folder / "link", os.urandom(1 << 16)
    with file.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if file.read_bytes() != content or file not in list(folder.iterdir()):
        raise ValueError("the test file that was read back differs from the one written")
    try:
        os.link(file, link)
    except OSError as error:
        raise ValueError(f"no hard link can be created: {error.strerror}") from None
    with suppress(FileExistsError):
        os.link(file, link)
        raise ValueError("a hard link replaced an existing file")
    source, target = folder / "source", folder / "target"
    for path in (source, target):
        path.mkdir()
        (path / "manifest.json").write_text(path.name, encoding="utf-8")
    try:
        source.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise ValueError(f"a folder cannot be renamed: {error.strerror}") from None
    else:
        raise ValueError("a rename replaced a folder that is not empty")
    source.rename(folder / "free")
    (folder / "free" / "manifest.json").replace(target / "manifest.json")
    if (target / "manifest.json").read_text(encoding="utf-8") != source.name:
        raise ValueError("a renamed file did not replace an existing file")


def _check_service_account() -> CheckResult:
    """Check the permissions that Kubeflow's containers in the pod need; tuneline's own steps need no permissions."""
    from pipelines.kubeflow.preflight import cluster_api, permission_checks
    from pipelines.kubeflow.preflight.check_context import CheckContext

    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return check_result("service account", True, "not set; tuneline does not require a service account", "")
    try:
        api = cluster_api.run_with_timeout(
            cluster_api.FIRST_CALL_TIMEOUT_SECONDS, "the cluster", cluster_api.connect_in_cluster
        )
        context = CheckContext(api, Platform(), api.own_namespace)
        name, missing = permission_checks.get_user_name(context), permission_checks.list_missing_rights(context)
    except TunelineError as error:
        return check_result(
            "service account", True, f"unknown ({error.message}); tuneline does not require a service account", ""
        )
    hint = "Bind the role of Kubeflow's own account; see docs/how-to/platforms.md."
    found = f"{name} may not {', '.join(missing)}" if missing else name
    return check_result("service account", not missing, found, hint, needed=False)


def _write_page(page: Path, results: Sequence[CheckResult]) -> None:
    """Write the results as a table for the Kubeflow UI."""
    lines = ["| | check | found | action |", "|---|---|---|---|"]
    for result in results:
        mark = "ok" if result["ok"] else "**missing**" if result["needed"] else "warning"
        lines.append(f"| {mark} | {result['name']} | {result['found']} | {result['hint']} |")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join([*lines, ""]), encoding="utf-8")
