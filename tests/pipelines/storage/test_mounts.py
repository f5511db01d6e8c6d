"""How a folder is mounted: what is wrong for which work is told by its option, and a mount as docs/powerscale.md asks for it is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipelines.storage import mounts
from tests.pipelines.command import ROOT

ROOT_LINE = "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
RIGHT = (
    "rw,vers=3,rsize=1048576,wsize=1048576,namlen=255,hard,proto=tcp,nconnect=8,timeo=600,retrans=2,sec=sys,local_lock=none,addr=192.0.2.10"
)


def mounted(options: str, kind: str = "nfs") -> mounts.Mount:
    line = f"90 22 0:52 / /mnt/tuneline rw,noatime shared:7 master:2 - {kind} powerscale.example:/ifs/data/tuneline {options}\n"
    return mounts.of(Path("/mnt/tuneline/work"), ROOT_LINE + line)


def wrong(options: str) -> dict[str, bool]:
    """The options that are told, and whether a run would fail."""
    return {one["name"]: one["needed"] for one in mounts.judge(mounted(options), "n1") if not one["ok"]}


def test_the_mount_is_that_of_the_longest_path_and_of_several_at_one_place_the_last() -> None:
    lines = (
        ROOT_LINE
        + "90 22 0:52 / /mnt/a\\040b rw - nfs4 server:/one rw,vers=4.1\n91 22 0:53 / /mnt/a\\040b rw - nfs4 server:/two rw,vers=4.2\n"
    )
    found = mounts.of(Path("/mnt/a b/work"), lines)
    assert (found.point, found.source, found.options["vers"]) == ("/mnt/a b", "server:/two", "4.2")
    assert mounts.of(Path("/mnt/a bc"), lines).kind == "ext4"
    assert mounts.of(Path("/mnt"), lines).source == "/dev/sda1"


def test_the_options_of_the_page_on_powerscale_and_of_the_example_volume_are_right() -> None:
    page = (ROOT / "docs" / "powerscale.md").read_text(encoding="utf-8")
    example = (ROOT / "deploy" / "components" / "powerscale-nfs" / "volume.yaml").read_text(encoding="utf-8")
    written = [found.replace(" ", "") for found in re.findall(r"mountOptions: \[(.*)\]", example) if " ro," not in found]
    asked = re.findall(r"nfs  (\S+)  0 0", page) + written
    assert len(asked) == 2
    for options in asked:
        assert wrong(f"rw,{options}") == {}
    assert wrong(RIGHT) == {}
    assert wrong(f"{RIGHT},acregmin=0,acregmax=0,acdirmin=0,acdirmax=0") == {}, "actimeo=0 is right for checkpoints"


def test_the_page_on_storage_asks_of_checkpoints_and_store_what_the_example_volume_has() -> None:
    page = (ROOT / "docs" / "storage.md").read_text(encoding="utf-8")
    example = (ROOT / "deploy" / "components" / "powerscale-nfs" / "volume.yaml").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith("| new files are seen after"))
    asked, share = re.findall(r"`(actimeo=0\S*)` on the share of ([^,]+, [^,]+),", row)[0]
    options = next(found.replace(" ", "").split(",") for found in re.findall(r"mountOptions: \[(.*)\]", example) if " ro," not in found)
    assert set(asked.split(",")) == {one for one in options if one.startswith(("actimeo", "lookupcache"))}
    assert share == "checkpoints, store and workdir"


@pytest.mark.parametrize(
    ("options", "name", "needed", "told"),
    [
        (RIGHT.replace("hard", "soft"), "soft", True, "I/O error in the middle of a write"),
        (RIGHT.replace("hard", "softerr"), "soft", True, "softerr"),
        (f"{RIGHT},nocto", "nocto", True, "another host changed it"),
        (RIGHT.replace("proto=tcp,nconnect=8", "proto=udp"), "proto", True, "proto=udp"),
        (f"{RIGHT},acregmin=60,acregmax=60", "acregmin", True, "taken for dead"),
        (f"{RIGHT},acregmax=600,acdirmax=600", "acdirmin, acregmax, acdirmax", False, "acregmax=600 acdirmax=600"),
        (f"{RIGHT},acdirmin=300", "acdirmin, acregmax, acdirmax", False, "acdirmin=300: wrong for"),
        (f"{RIGHT},noac", "noac, sync", False, "noac"),
        (f"sync,{RIGHT}", "noac, sync", False, "every write waits"),
        (RIGHT.replace("wsize=1048576", "wsize=32768"), "rsize, wsize", False, "wsize=32768"),
        (RIGHT.replace("nconnect=8,", ""), "nconnect", False, "one connection"),
        (f"{RIGHT},nolock", "locks", False, "this host only"),
        (RIGHT.replace("local_lock=none", "local_lock=all"), "locks", False, "local_lock=all"),
        (RIGHT.replace("vers=3", "vers=4.0"), "vers", False, "RFC 8881"),
    ],
)
def test_an_option_that_is_wrong_is_told_with_the_work_it_is_wrong_for(options: str, name: str, needed: bool, told: str) -> None:
    assert wrong(options) == {f"mount option {name} on n1": needed}
    (one,) = (one for one in mounts.judge(mounted(options), "n1") if not one["ok"])
    assert told in one["found"]
    assert "wrong for " in one["found"]
    assert one["hint"]


def test_rdma_needs_no_several_connections_and_a_disk_has_no_such_options() -> None:
    assert wrong(RIGHT.replace("proto=tcp,nconnect=8", "proto=rdma")) == {}
    assert [one["ok"] for one in mounts.judge(mounted("rw,sync", "ext4"), "n1")] == [True]


def test_a_bucket_that_is_mounted_as_a_folder_is_told() -> None:
    (one,) = mounts.judge(mounted("rw", "fuse.s3fs"), "n1")
    assert (one["ok"], one["needed"]) == (False, True)
    assert "s3://" in one["hint"]
