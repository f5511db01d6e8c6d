"""Mount options: unsuitable ones are reported with their workload, and the documented mounts pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from components.common.runtime import mounts
from pipelines.operations.storage_probe import mount_options
from tests.pipelines.command import ROOT

ROOT_LINE = "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
RECOMMENDED_OPTIONS = "rw,vers=3,rsize=1048576,wsize=1048576,namlen=255,hard,proto=tcp,nconnect=8,timeo=600,retrans=2,sec=sys,local_lock=none,addr=192.0.2.10"


def parse_mount(options: str, kind: str = "nfs") -> mounts.Mount:
    line = f"90 22 0:52 / /mnt/tuneline rw,noatime shared:7 master:2 - {kind} powerscale.example:/ifs/data/tuneline {options}\n"
    return mounts.find_mount(Path("/mnt/tuneline/work"), ROOT_LINE + line)


def failed_options(options: str) -> dict[str, bool]:
    """Return the failed checks, and whether each stops a run."""
    return {
        check["name"]: check["needed"]
        for check in mount_options.check_mount(parse_mount(options), "n1")
        if not check["ok"]
    }


def test_longest_and_last_mount_point_wins() -> None:
    lines = (
        ROOT_LINE
        + "90 22 0:52 / /mnt/a\\040b rw - nfs4 server:/one rw,vers=4.1\n91 22 0:53 / /mnt/a\\040b rw - nfs4 server:/two rw,vers=4.2\n"
    )
    mount = mounts.find_mount(Path("/mnt/a b/work"), lines)
    assert (mount.point, mount.source, mount.options["vers"]) == ("/mnt/a b", "server:/two", "4.2")
    assert mounts.find_mount(Path("/mnt/a bc"), lines).kind == "ext4"
    assert mounts.find_mount(Path("/mnt"), lines).source == "/dev/sda1"


@pytest.mark.parametrize(
    ("uri", "kind", "is_reported"),
    [
        ("sqlite:////mnt/tuneline/work/mlflow.db", "nfs", True),
        ("sqlite:////mnt/tuneline/work/mlflow.db", "fuse.s3fs", True),
        ("sqlite:////mnt/tuneline/work/mlflow.db", "ext4", False),
        ("sqlite:////home/me/mlflow.db", "nfs", False),
        ("http://mlflow:5000", "nfs", False),
    ],
)
def test_sqlite_database_on_shared_storage_is_reported(uri: str, kind: str, is_reported: bool) -> None:
    lines = f"{ROOT_LINE}90 22 0:52 / /mnt/tuneline rw - {kind} powerscale.example:/ifs/data rw\n"
    warning = mounts.format_database_warning(uri, lines)
    assert bool(warning) == is_reported
    if is_reported:
        assert warning.startswith(
            f"the MLflow database /mnt/tuneline/work/mlflow.db is an SQLite file on {kind} (powerscale."
        )


def test_documented_mount_options_pass() -> None:
    page = (ROOT / "docs" / "how-to" / "powerscale.md").read_text(encoding="utf-8")
    example = (ROOT / "deploy" / "components" / "powerscale-nfs" / "volume.yaml").read_text(encoding="utf-8")
    example_options = [
        options.replace(" ", "") for options in re.findall(r"mountOptions: \[(.*)\]", example) if " ro," not in options
    ]
    documented = re.findall(r"nfs  (\S+)  0 0", page) + example_options
    assert len(documented) == 2
    for options in documented:
        assert failed_options(f"rw,{options}") == {}
    assert failed_options(RECOMMENDED_OPTIONS) == {}
    assert failed_options(f"{RECOMMENDED_OPTIONS},acregmin=0,acregmax=0,acdirmin=0,acdirmax=0") == {}, (
        "actimeo=0 is right for checkpoints"
    )


def test_storage_page_and_example_volume_have_the_same_options() -> None:
    page = (ROOT / "docs" / "how-to" / "storage.md").read_text(encoding="utf-8")
    example = (ROOT / "deploy" / "components" / "powerscale-nfs" / "volume.yaml").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith("| new files are seen after"))
    documented, share = re.findall(r"`(actimeo=0\S*)` on the share of ([^,]+, [^;]+);", row)[0]
    options = next(
        line.replace(" ", "").split(",")
        for line in re.findall(r"mountOptions: \[(.*)\]", example)
        if " ro," not in line
    )
    assert set(documented.split(",")) == {option for option in options if option.startswith(("actimeo", "lookupcache"))}
    assert share == "checkpoints, store and workdir"


@pytest.mark.parametrize(
    ("options", "name", "needed", "expected"),
    [
        (RECOMMENDED_OPTIONS.replace("hard", "soft"), "soft", True, "writes can fail with an I/O error"),
        (RECOMMENDED_OPTIONS.replace("hard", "softerr"), "soft", True, "softerr"),
        (f"{RECOMMENDED_OPTIONS},nocto", "nocto", True, "another host changed it"),
        (RECOMMENDED_OPTIONS.replace("proto=tcp,nconnect=8", "proto=udp"), "proto", True, "proto=udp"),
        (f"{RECOMMENDED_OPTIONS},acregmin=60,acregmax=60", "acregmin", True, "considered dead"),
        (
            f"{RECOMMENDED_OPTIONS},acregmax=600,acdirmax=600",
            "acdirmin, acregmax, acdirmax",
            False,
            "acregmax=600 acdirmax=600",
        ),
        (f"{RECOMMENDED_OPTIONS},acdirmin=300", "acdirmin, acregmax, acdirmax", False, "acdirmin=300: unsuitable for"),
        (f"{RECOMMENDED_OPTIONS},noac", "noac, sync", False, "noac"),
        (f"sync,{RECOMMENDED_OPTIONS}", "noac, sync", False, "every write waits"),
        (RECOMMENDED_OPTIONS.replace("wsize=1048576", "wsize=32768"), "rsize, wsize", False, "wsize=32768"),
        (RECOMMENDED_OPTIONS.replace("nconnect=8,", ""), "nconnect", False, "one connection"),
        (f"{RECOMMENDED_OPTIONS},nolock", "locks", False, "only processes of this host"),
        (RECOMMENDED_OPTIONS.replace("local_lock=none", "local_lock=all"), "locks", False, "local_lock=all"),
        (RECOMMENDED_OPTIONS.replace("vers=3", "vers=4.0"), "vers", False, "RFC 8881"),
    ],
)
def test_unsuitable_option_is_reported_with_its_workload(options: str, name: str, needed: bool, expected: str) -> None:
    assert failed_options(options) == {f"mount option {name} on n1": needed}
    (check,) = (check for check in mount_options.check_mount(parse_mount(options), "n1") if not check["ok"])
    assert expected in check["found"]
    assert "unsafe for " in check["found"] or "unsuitable for " in check["found"]
    assert check["hint"]


def test_rdma_and_local_disks_pass() -> None:
    assert failed_options(RECOMMENDED_OPTIONS.replace("proto=tcp,nconnect=8", "proto=rdma")) == {}
    assert [check["ok"] for check in mount_options.check_mount(parse_mount("rw,sync", "ext4"), "n1")] == [True]


def test_mounted_bucket_is_refused() -> None:
    (check,) = mount_options.check_mount(parse_mount("rw", "fuse.s3fs"), "n1")
    assert (check["ok"], check["needed"]) == (False, True)
    assert "s3://" in check["hint"]
