"""Assessment of a probe's measurements: check results with remedies. This module does not access the storage."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from components.common.reporting.check_findings import CheckResult, check_result
from components.common.runtime import mounts
from components.common.runtime.counts import format_count
from components.common.runtime.mounts import Mount
from pipelines.operations.storage_probe import mount_options
from pipelines.operations.storage_probe.mount_options import MAX_HEARTBEAT_DELAY_SECONDS
from pipelines.operations.storage_probe.participant import MIB_BYTES, Figures
from pipelines.operations.storage_probe.remedies import DEFAULT_REMEDY, ERRNO_CHECKS, REMEDIES

HostNames = tuple[str, str]
GIB_BYTES = 1 << 30
MIN_FREE_BYTES = 5 * GIB_BYTES  # the demo's requirement, as in `tuneline doctor`
MIN_FREE_INODES = 100_000  # a data repository and its remote have two files per object
PROMPT_SECONDS, MAX_VISIBILITY_SECONDS = 2.0, 60.0  # a delay is noticeable; a step appears to hang
# A skew above the first limit disorders log entries; above the second, servers reject certificates and signatures.
CLOCK_SKEW_WARNING_SECONDS, CLOCK_SKEW_ERROR_SECONDS = 1.0, 60.0
MIN_ROUND_TRIP_SECONDS = 20e-6  # no network is faster
CHANGE_LABELS = {
    "by_name": "a new file by its name",
    "in_listing": "a new file in the listing",
    "added_bytes": "added bytes",
    "time_of_change": "a modification time",
}
FSYNC_LABELS = {
    "others_open": "by the partner while the file is open",
    "others_closed": "by the partner after the file is closed",
    "own_reopened": "by its writer after reopening",
}


@dataclass(frozen=True)
class StepMeasurement:
    """The measurements of both participants in one step, by rank."""

    pair: tuple[Figures, Figures]
    host_names: HostNames
    mounts: tuple[Mount, Mount]
    one_host: bool

    def get_values(self, key: str) -> list[Any]:
        """Return both participants' values of this figure, by rank."""
        return [figures[key] for figures in self.pair]

    @property
    def sides(self) -> list[tuple[str, Figures]]:
        """The measurements of both participants with their hosts' names."""
        return list(zip(self.host_names, self.pair, strict=True))

    def describe(self, template: str) -> str:
        """Return the template formatted with the figures of each participant, prefixed with the host's name."""
        return "; ".join(f"{name}: {template.format_map(figures)}" for name, figures in self.sides)


def assess(
    measured: Mapping[str, list[Figures]], hosts: HostNames, mounts: tuple[Mount, Mount], *, one_host: bool
) -> list[CheckResult]:
    """Return the check results of a probe in the order of its steps. Each cause of failure is reported once.

    Args:
        measured: the measurements of both participants by step; an empty dict if a participant has no measurements.
        hosts: the names of the hosts, by rank.
        mounts: the mounts of the probed path, by rank.
        one_host: whether both participants run on one kernel.
    """
    names = hosts if hosts[0] != hosts[1] else ("first process", "second process")
    joined = " and ".join(dict.fromkeys(hosts))
    note = f"{joined}, one kernel: both processes share its cache of the storage" if one_host else joined
    results = [check_result("hosts", True, note, "")]
    for host, mount in dict(zip(hosts, mounts, strict=True)).items():
        results += mount_options.check_mount(mount, host)
    for step, sides in measured.items():
        if any("error" in side for side in sides):
            for name, side in zip(names, sides, strict=True):
                error = side.get("error", {"given_up": True})
                if "given_up" in error:
                    continue
                cause = ERRNO_CHECKS.get(error["errno"], step)
                if error["errno"] == errno.ENOSPC and error.get("no_inodes"):  # ENOSPC covers bytes and inodes
                    cause = "inodes"
                found = f"{name}: {error['text']} in the step {step}"
                results.append(check_result(cause, False, found, REMEDIES.get(cause, DEFAULT_REMEDY)))
        elif all(sides):
            results += ASSESSMENTS[step](step, StepMeasurement((sides[0], sides[1]), names, mounts, one_host))
    # Keep the most severe result of each name at the position of the first, and append the text of a replaced result.
    kept: dict[str, CheckResult] = {}
    for result in results:
        previous = kept.setdefault(result["name"], result)
        if _severity(result) > _severity(previous):
            kept[result["name"]] = {**result, "found": f"{result['found']}; {previous['found']}"}
    return list(kept.values())


def _severity(result: CheckResult) -> int:
    return 0 if result["ok"] else 2 if result["needed"] else 1


def _build_result(name: str, ok: bool, found: str, *, needed: bool = True) -> CheckResult:
    return check_result(name, ok, found, REMEDIES[name], needed=needed)


def _assess_storage(step: str, measured: StepMeasurement) -> Iterator[CheckResult]:
    """Assess the steps without a partner: space, owner and mode of new files, the server's clock, and file names."""
    match step:
        case "place":
            free, size = min(measured.get_values("free")), min(measured.get_values("size"))
            found = f"{free / GIB_BYTES:,.1f} GiB of {size / GIB_BYTES:,.1f} GiB free"
            yield _build_result("space", free > MIN_FREE_BYTES, found, needed=False)
            if min(measured.get_values("inodes")):  # 0 if the storage does not count inodes
                inodes = min(measured.get_values("free_inodes"))
                yield _build_result("inodes", inodes > MIN_FREE_INODES, f"{inodes:,} free", needed=False)
            for name, side in measured.sides:
                if side["owner"] != side["user"]:
                    reason = "the server squashes root" if side["user"] == 0 else "the server maps users"
                    found = f"a new file of user {side['user']} ({name}) belongs to {side['owner']}: {reason}"
                    yield _build_result("owner", False, found, needed=False)
                    break
            else:
                yield check_result("owner", True, measured.describe("user {user}"), "")
            if wrong := set(measured.get_values("mode")) - {0o600}:
                yield _build_result(
                    "mode", False, f"a file created with mode 600 has mode {min(wrong):o}", needed=False
                )
        case "clock":
            first, second = measured.get_values("offset")
            worst = max(abs(first - second), abs(first), abs(second))
            found = measured.describe(
                "the server's clock differs by {offset:+.3f} s (±{within:.3f} s) from the host's clock"
            )
            yield _build_result(
                "clock", worst < CLOCK_SKEW_WARNING_SECONDS, found, needed=worst > CLOCK_SKEW_ERROR_SECONDS
            )
        case "names":
            is_sensitive = all(measured.get_values("case_sensitive"))
            found = f"names that differ only in case are {'two files' if is_sensitive else 'one file'}"
            yield _build_result("case", is_sensitive, found)
            longest, changed = min(measured.get_values("longest")), sorted(set().union(*measured.get_values("changed")))
            kept = f"changed: {', '.join(map(repr, changed))}" if changed else "Unicode and punctuation unchanged"
            is_complete = longest >= 255 and not changed
            yield _build_result("names", is_complete, f"names of up to {longest} bytes; {kept}", needed=longest < 100)


def _assess_visibility(_: str, measured: StepMeasurement) -> Iterator[CheckResult]:
    """Assess the delay until the partner's changes are visible."""
    timeout = max(measured.get_values("patience"))
    for name, kinds, limit in (
        ("new files", ("by_name", "in_listing", "added_bytes"), MAX_VISIBILITY_SECONDS),
        ("heartbeats", ("time_of_change",), MAX_HEARTBEAT_DELAY_SECONDS),
    ):
        # The delay of a change that was never visible is infinite.
        delays = {
            kind: max(math.inf if delay is None else delay for delay in measured.get_values(kind)) for kind in kinds
        }
        found = ", ".join(
            f"{CHANGE_LABELS[kind]} "
            + (f"not visible within {timeout:.0f} s" if math.isinf(delay) else f"visible after {delay:.2f} s")
            for kind, delay in delays.items()
        )
        worst = max(delays.values())
        ok = worst < PROMPT_SECONDS
        needed = (timeout if math.isinf(worst) else worst) >= limit
        if not ok and any(mount.is_nfs for mount in measured.mounts):  # the mount options that explain a delay
            options = {
                f"{option}={value}"
                for mount in measured.mounts
                for option, value in mount.options.items()
                if option.startswith(("acreg", "acdir", "lookupcache"))
            }
            defaults = "the defaults, which cache names and attributes for 3 to 60 s"
            found += f"; mounted with {', '.join(sorted(options)) or defaults}"
        yield _build_result(name, ok, found, needed=needed)


def _assess_writes(step: str, measured: StepMeasurement) -> Iterator[CheckResult]:
    """Assess the reads of files that the partner renames or flushes."""
    match step:
        case "rename":
            total = {key: sum(measured.get_values(key)) for key in measured.pair[0]}
            found = (
                f"{total['reads']:,} reads of {total['versions']:,} versions: {total['missing']:,} found no file,"
                f" {total['torn']:,} found a torn file"
            )
            yield _build_result("rename", not total["missing"] and not total["torn"], found)
            for name, key, consequence in (
                ("stale handles", "stale", "of a replaced file failed with ESTALE"),
                ("order", "older", "returned an older version than the previous read"),
            ):
                if total[key]:
                    yield _build_result(name, False, f"{format_count(total[key], 'read')} {consequence}", needed=False)
        case "fsync":
            lost = [label for key, label in FSYNC_LABELS.items() if not all(measured.get_values(key))]
            found = (
                f"flushed data cannot be read {', nor '.join(lost)}"
                if lost
                else "both participants read the flushed data"
            )
            yield _build_result("fsync", not lost, found)
            too_fast = any(
                mount.kind in mounts.NETWORK_FILESYSTEMS and seconds < MIN_ROUND_TRIP_SECONDS
                for mount, seconds in zip(measured.mounts, measured.get_values("fsync_seconds"), strict=True)
            )
            times = [
                f"{name}: {side['fsync_seconds'] * 1e3:.3f} ms for 4 KiB, after a write of"
                f" {side['write_seconds'] * 1e3:.3f} ms"
                for name, side in measured.sides
            ]
            yield _build_result("fsync time", not too_fast, "; ".join(times), needed=False)


def _assess_exclusion(step: str, measured: StepMeasurement) -> Iterator[CheckResult]:
    """Assess whether only one participant gets a name or lock, and whether deleted files remain readable."""
    match step:
        case "exclusive":
            rounds, wrong, shares = measured.pair[0]["rounds"], [], []
            first, second = measured.get_values("won")
            for kind in first:
                twice, won = set(first[kind]) & set(second[kind]), set(first[kind]) | set(second[kind])
                lost = rounds - len(won)
                if twice or lost > 0:
                    wrong.append(
                        f"{kind}: of {rounds} names, {len(twice)} went to both participants and {lost} to neither"
                    )
                shares.append(f"{kind} {len(first[kind])}:{len(second[kind])}")
            found = "; ".join(wrong) or f"exactly one participant got each of {rounds} names ({', '.join(shares)})"
            yield _build_result("exclusive names", not wrong, found)
        case "locks":
            wrong = []
            for kind in ("fcntl", "flock"):
                for outcome in measured.get_values(kind):
                    if outcome is None:
                        wrong.append(f"{kind} is not supported")
                    elif not outcome["excluded"]:
                        wrong.append(f"{kind} is granted to both participants at the same time")
                    elif not outcome["freed"]:
                        wrong.append(f"{kind} remains locked after its release")
            found = "; ".join(dict.fromkeys(wrong)) or "fcntl and flock locks exclude the partner until their release"
            yield _build_result("locks", not wrong, found, needed=False)
        case "deleted":
            ok = all(measured.get_values("readable"))
            found = (
                "the deleted file remains readable" if ok else "a reader gets ESTALE after the partner deletes the file"
            )
            yield _build_result("deleted while read", ok, found, needed=False)


def _assess_rate(step: str, measured: StepMeasurement) -> Iterator[CheckResult]:
    """Report a rate without a verdict. For ways to improve low rates, see docs/how-to/storage.md."""
    name, rates = step, []
    for host_name, side in measured.sides:
        block = f"{side['block'] // 1024} KiB"
        match step:
            case "checkpoints":
                size = f"{side['bytes'] / MIB_BYTES:,.0f} MiB in writes of {side['block'] // MIB_BYTES} MiB"
                rate = f"{_format_rate(side['bytes'], side['seconds'])}, {size}, flushed"
            case "training":
                size = f"{side['bytes'] / MIB_BYTES:,.0f} MiB in {side['streams']} streams"
                rate = f"{_format_rate(side['bytes'], side['seconds'])}, {size}"
            case "preparation":
                reads, writes = side["reads"] / side["read_seconds"], side["writes"] / side["write_seconds"]
                rate = f"{reads:,.0f} random reads and {writes:,.0f} random writes of {block} per second"
            case _:
                name = "many small files"
                created, removed = side["files"] / side["make_seconds"], side["files"] / side["remove_seconds"]
                rate = f"{created:,.0f} files of {block} created and {removed:,.0f} removed per second"
        rates.append(f"{host_name}: {rate}")
    is_cached = measured.one_host and step in ("training", "preparation")
    note = " (one host: the data may have come from its cache)" if is_cached else ""
    yield check_result(name, True, "; ".join(rates) + note, "")


def _assess_fio(_: str, measured: StepMeasurement) -> Iterator[CheckResult]:
    for name, side in measured.sides:
        for shape, outcome in side["shapes"].items():
            rates = [
                f"{kind} {_format_rate(rate['bytes_per_second'], 1)}, {rate['per_second']:,.0f} operations per second"
                for kind, rate in outcome.get("ways", {}).items()
            ]
            found = f"{outcome['version']}: {'; '.join(rates)}" if rates else f"fio failed: {outcome['failed']}"
            yield check_result(f"fio {shape}, {name}", bool(rates), found, REMEDIES["fio"], needed=False)


def _format_rate(amount: float, seconds: float) -> str:
    return f"{amount / MIB_BYTES / max(seconds, 1e-9):,.0f} MiB/s"


ASSESSMENTS: dict[str, Callable[[str, StepMeasurement], Iterator[CheckResult]]] = {
    **dict.fromkeys(("place", "clock", "names"), _assess_storage),
    "visibility": _assess_visibility,
    **dict.fromkeys(("rename", "fsync"), _assess_writes),
    **dict.fromkeys(("exclusive", "locks", "deleted"), _assess_exclusion),
    **dict.fromkeys(("checkpoints", "training", "preparation", "files"), _assess_rate),
    "fio": _assess_fio,
}
