"""What was measured, as findings with a remedy each. Nothing here touches the storage."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from components.common import jobs, liveness
from pipelines.findings import Finding, finding
from pipelines.storage import mounts
from pipelines.storage.mounts import Mount
from pipelines.storage.remedies import OTHERWISE, REFUSED, REMEDIES
from pipelines.storage.side import MIB

Pair = tuple[dict[str, Any], dict[str, Any]]  # what the sides measured in a step, by rank
Names = tuple[str, str]
GIB = 1 << 30
SPACE = 5 * GIB  # what the demo needs, as `tuneline doctor` asks for
INODES = 100_000  # a data repository and its remote have two files an object
SOON, LATE = 2.0, 60.0  # seconds: until a step notices; until it would be taken for hung
SILENT = jobs.QUIET - 2 * liveness.BEAT  # seconds that a sign of life may be seen late before a living job is taken for dead
SKEW, WRONG = 1.0, 60.0  # seconds between two clocks: logs in the wrong order; certificates and signatures refused
NO_TRIP = 20e-6  # seconds: less than one answer over any network takes
CHANGES = {
    "by_name": "a new file by its name",
    "in_listing": "a new file in the listing",
    "added_bytes": "added bytes",
    "time_of_change": "a time of change",
}
FORCED = {
    "others_open": "while the other side has it open",
    "others_closed": "after the other side closed it",
    "own_reopened": "after it was opened again",
}


@dataclass(frozen=True)
class Measured:
    """One step as both sides went through it."""

    pair: Pair
    who: Names
    mounted: tuple[Mount, Mount]
    one_host: bool

    def each(self, key: str) -> list[Any]:
        """A figure of both."""
        return [side[key] for side in self.pair]

    def told(self, text: Callable[[dict[str, Any]], str]) -> str:
        """A sentence for each side, with its name."""
        return "; ".join(f"{name}: {text(side)}" for name, side in zip(self.who, self.pair, strict=True))


def judge(measured: Mapping[str, list[dict[str, Any]]], hosts: Names, mounted: tuple[Mount, Mount], *, one_host: bool) -> list[Finding]:
    """Findings of a whole probe in the order of its steps. A step that failed is told by why it failed, each cause once."""
    named = hosts if hosts[0] != hosts[1] else ("first process", "second process")
    found = [_hosts(hosts, one_host)]
    for host, mount in dict(zip(hosts, mounted, strict=True)).items():
        found += mounts.judge(mount, host)
    for step, sides in measured.items():
        if any("error" in side for side in sides):
            found += _failed(step, sides, named)
        elif all(sides):
            found += JUDGES[step](Measured((sides[0], sides[1]), named, mounted, one_host))
    return _each_once(found)


def _each_once(found: list[Finding]) -> list[Finding]:
    """Of one name the gravest, where the first stood: what a step failed by, and not the advice that told of it before. That is added."""
    kept: dict[str, Finding] = {}
    for one in found:
        before = kept.setdefault(one["name"], one)
        if _gravity(one) > _gravity(before):
            kept[one["name"]] = {**one, "found": f"{one['found']}; {before['found']}"}
    return list(kept.values())


def _gravity(one: Finding) -> int:
    return 0 if one["ok"] else 2 if one["needed"] else 1


def _hosts(hosts: Names, one_host: bool) -> Finding:
    alone = f"{' and '.join(dict.fromkeys(hosts))}, one kernel: what it keeps in memory of the storage both sides see at once"
    return finding("hosts", True, alone if one_host else " and ".join(hosts), "")


def _failed(step: str, sides: list[dict[str, Any]], who: Names) -> Iterator[Finding]:
    for name, side in zip(who, sides, strict=True):
        error = side.get("error", {"given_up": True})
        if "given_up" in error:
            continue
        cause = _cause(error, step)
        yield finding(cause, False, f"{error['text']} for {name}, in the step {step}", REMEDIES.get(cause, OTHERWISE))


def _cause(error: dict[str, Any], step: str) -> str:
    """The name of a refusal's finding. ENOSPC says the same of bytes and of inodes."""
    if error["errno"] == errno.ENOSPC and error.get("no_inodes"):
        return "inodes"
    return REFUSED.get(error["errno"], step)


def _finding(name: str, ok: bool, found: str, *, needed: bool = True) -> Finding:
    return finding(name, ok, found, REMEDIES[name], needed=needed)


# --- what is promised


def _place(step: Measured) -> Iterator[Finding]:
    free, size = min(step.each("free")), min(step.each("size"))
    yield _finding("space", free > SPACE, f"{free / GIB:,.1f} GiB of {size / GIB:,.1f} GiB free", needed=False)
    if min(step.each("inodes")):  # 0 where there is no such number
        inodes = min(step.each("free_inodes"))
        yield _finding("inodes", inodes > INODES, f"{inodes:,} free", needed=False)
    other = [(name, side) for name, side in zip(step.who, step.pair, strict=True) if side["owner"] != side["user"]]
    yield _owner(*other[0]) if other else finding("owner", True, step.told(lambda side: f"user {side['user']}"), "")
    if wrong := next((mode for mode in step.each("mode") if mode != 0o600), None):
        yield _finding("mode", False, f"a file that was given mode 600 has mode {wrong:o}", needed=False)


def _owner(name: str, side: dict[str, Any]) -> Finding:
    why = "the server squashes root" if side["user"] == 0 else "the server maps users"
    return _finding("owner", False, f"what user {side['user']} makes ({name}) belongs to {side['owner']}: {why}", needed=False)


def _clock(step: Measured) -> Iterator[Finding]:
    offsets = step.each("offset")
    worst = max(abs(offsets[0] - offsets[1]), *map(abs, offsets))
    told = step.told(lambda side: f"the server's clock shows {side['offset']:+.3f} s (±{side['within']:.3f}) against its own")
    yield _finding("clock", worst < SKEW, told, needed=worst > WRONG)


def _names(step: Measured) -> Iterator[Finding]:
    apart = all(step.each("case_sensitive"))
    yield _finding("case", apart, f"names that differ only in case are {'two files' if apart else 'one file'}")
    longest, changed = min(step.each("longest")), sorted({name for names in step.each("changed") for name in names})
    told = f"up to {longest} bytes, {'not as given: ' + ', '.join(map(repr, changed)) if changed else 'Unicode and signs as given'}"
    yield _finding("names", longest >= 255 and not changed, told, needed=longest < 100)


def _visibility(step: Measured) -> Iterator[Finding]:
    patience = max(step.each("patience"))
    worst = {kind: _latest(step.each(kind)) for kind in CHANGES}
    for name, kinds, late in (
        ("new files", ("by_name", "in_listing", "added_bytes"), LATE),
        ("signs of life", ("time_of_change",), SILENT),
    ):
        seconds = [worst[kind] for kind in kinds]
        told = ", ".join(f"{CHANGES[kind]} {_seen_after(worst[kind], patience)}" for kind in kinds)
        latest = max(patience if one is None else one for one in seconds)
        ok = None not in seconds and latest < SOON
        yield _finding(name, ok, told + ("" if ok else _cached(step.mounted)), needed=latest >= late)


def _latest(values: Iterable[float | None]) -> float | None:
    """The longest; None, not seen at all, is longer than any."""
    found = list(values)
    return None if None in found else max(value for value in found if value is not None)


def _seen_after(seconds: float | None, patience: float) -> str:
    return f"not seen within {patience:.0f} s" if seconds is None else f"seen after {seconds:.2f} s"


def _cached(mounted: tuple[Mount, Mount]) -> str:
    """The options of an NFS mount that it comes from."""
    if not any(mount.is_nfs for mount in mounted):
        return ""
    given = {
        f"{name}={value}"
        for mount in mounted
        for name, value in mount.options.items()
        if name.startswith(("acreg", "acdir", "lookupcache"))
    }
    return f"; mounted with {', '.join(sorted(given)) or 'the defaults, which keep for 3 to 60 s what was seen'}"


def _rename(step: Measured) -> Iterator[Finding]:
    total = {key: sum(step.each(key)) for key in step.pair[0]}
    told = f"{total['reads']:,} reads of {total['versions']:,} versions: {total['missing']:,} found no file, {total['torn']:,} a torn one"
    yield _finding("rename", not total["missing"] and not total["torn"], told)
    if total["stale"]:
        yield _finding("stale handles", False, f"{total['stale']:,} reads of a replaced file ended with ESTALE", needed=False)
    if total["older"]:
        yield _finding("order", False, f"{total['older']:,} reads gave an older version than one before", needed=False)


def _fsync(step: Measured) -> Iterator[Finding]:
    lost = [text for key, text in FORCED.items() if not all(step.each(key))]
    told = f"what was forced out is not what is read {', nor '.join(lost)}" if lost else "what was forced out is what both sides read"
    yield _finding("fsync", not lost, told)
    quick = any(m.kind in mounts.NETWORK and took < NO_TRIP for m, took in zip(step.mounted, step.each("fsync_seconds"), strict=True))
    told = step.told(
        lambda side: f"{side['fsync_seconds'] * 1e3:.3f} ms for 4 KiB, after {side['write_seconds'] * 1e3:.3f} ms to write them"
    )
    yield _finding("fsync time", not quick, told, needed=False)


def _exclusive(step: Measured) -> Iterator[Finding]:
    rounds = step.pair[0]["rounds"]
    first, second = step.each("won")
    wrong = []
    for kind in first:
        both, any_ = set(first[kind]) & set(second[kind]), set(first[kind]) | set(second[kind])
        if both or len(any_) < rounds:
            wrong.append(f"{kind}: of {rounds} names {len(both)} were given to both sides, {rounds - len(any_)} to nobody")
    shares = ", ".join(f"{kind} {len(first[kind])}:{len(second[kind])}" for kind in first)
    yield _finding("exclusive names", not wrong, "; ".join(wrong) or f"each of {rounds} went to one side ({shares})")


def _locks(step: Measured) -> Iterator[Finding]:
    wrong: dict[str, None] = {}
    for kind in ("fcntl", "flock"):
        for said in step.each(kind):
            if said is None:
                wrong[f"{kind} is not to be had"] = None
            elif not said["excluded"]:
                wrong[f"{kind} is given to both sides at once"] = None
            elif not said["freed"]:
                wrong[f"{kind} is not free again when its holder let go"] = None
    yield _finding("locks", not wrong, "; ".join(wrong) or "fcntl and flock keep the other side out, and are free again", needed=False)


def _deleted(step: Measured) -> Iterator[Finding]:
    ok = all(step.each("readable"))
    yield _finding(
        "deleted while read", ok, "read to its end" if ok else "its reader gets ESTALE when the other side deletes it", needed=False
    )


# --- rates: told, not judged. docs/storage.md says what to do where they are low


def _rate(amount: float, seconds: float) -> str:
    return f"{amount / MIB / max(seconds, 1e-9):,.0f} MiB/s"


def _memory(step: Measured) -> str:
    return " (one host: what is read may have come from its memory)" if step.one_host else ""


def _checkpoints(step: Measured) -> Iterator[Finding]:
    def text(side: dict[str, Any]) -> str:
        size = f"{side['bytes'] / MIB:,.0f} MiB in writes of {side['block'] // MIB} MiB"
        return f"{_rate(side['bytes'], side['seconds'])}, {size}, forced out"

    yield finding("checkpoints", True, step.told(text), "")


def _training(step: Measured) -> Iterator[Finding]:
    def text(side: dict[str, Any]) -> str:
        return f"{_rate(side['bytes'], side['seconds'])}, {side['bytes'] / MIB:,.0f} MiB in {side['streams']} streams"

    yield finding("training", True, step.told(text) + _memory(step), "")


def _preparation(step: Measured) -> Iterator[Finding]:
    def text(side: dict[str, Any]) -> str:
        reads, writes = side["reads"] / side["read_seconds"], side["writes"] / side["write_seconds"]
        return f"{reads:,.0f} random reads and {writes:,.0f} random writes of {side['block'] // 1024} KiB a second"

    yield finding("preparation", True, step.told(text) + _memory(step), "")


def _files(step: Measured) -> Iterator[Finding]:
    def text(side: dict[str, Any]) -> str:
        made, removed = side["files"] / side["make_seconds"], side["files"] / side["remove_seconds"]
        return f"{made:,.0f} files of {side['block'] // 1024} KiB made and {removed:,.0f} removed a second"

    yield finding("many small files", True, step.told(text), "")


def _fio(step: Measured) -> Iterator[Finding]:
    for name, side in zip(step.who, step.pair, strict=True):
        for shape, said in side["shapes"].items():
            ways = [f"{way} {_rate(r['bytes_per_second'], 1)}, {r['per_second']:,.0f} a second" for way, r in said.get("ways", {}).items()]
            told = f"{said['version']}: {'; '.join(ways)}" if ways else f"it failed: {said['failed']}"
            yield finding(f"fio {shape}, {name}", bool(ways), told, REMEDIES["fio"], needed=False)


JUDGES: dict[str, Callable[[Measured], Iterator[Finding]]] = {
    "place": _place,
    "clock": _clock,
    "names": _names,
    "visibility": _visibility,
    "rename": _rename,
    "fsync": _fsync,
    "exclusive": _exclusive,
    "locks": _locks,
    "deleted": _deleted,
    "checkpoints": _checkpoints,
    "training": _training,
    "preparation": _preparation,
    "files": _files,
    "fio": _fio,
}
