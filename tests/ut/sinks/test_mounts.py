"""Mount options that keep locks on one machine: detection, and who reports them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ascend_hsx.doctor.storage import check_storage
from vllm_ascend_hsx.sinks import directory as directory_module
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.directory import check_directory
from vllm_ascend_hsx.sinks.mounts import LocalLocks, local_locks, mount_of, mounted_locks

NFS = "vers=3,rsize=1048576,hard,proto=tcp,sec=sys,mountproto=udp"
LOCAL = "locks do not reach other machines"
TABLE = {
    "lustre flock": ("lustre 10.0.0.1@tcp:/fs rw,flock,lazystatfs", None),
    "lustre localflock": (
        "lustre 10.0.0.1@tcp:/fs rw,localflock,lazystatfs",
        f"lustre is mounted with localflock: {LOCAL}",
    ),
    "lustre, neither": (
        "lustre 10.0.0.1@tcp:/fs rw,lazystatfs",
        f"lustre is mounted without flock: {LOCAL}",
    ),
    "nfs": (f"nfs host:/export rw,{NFS},local_lock=none,addr=10.0.0.1", None),
    "nfs local flock": (
        f"nfs host:/export rw,{NFS},local_lock=flock",
        f"nfs is mounted with local_lock=flock: {LOCAL}",
    ),
    "nfs local posix": (f"nfs host:/export rw,{NFS},local_lock=posix", None),
    "nfs nolock": (
        f"nfs host:/export rw,{NFS},nolock,local_lock=all",
        f"nfs is mounted with local_lock=all and nolock: {LOCAL}",
    ),
    "nfs4": ("nfs4 host:/ rw,vers=4.2,local_lock=none", None),
    "gpfs": ("gpfs /dev/gpfs0 rw,relatime", "gpfs may not pass locks on to other machines"),
    "fuse": ("fuse /dev/fuse rw,user_id=0", "fuse may not pass locks on to other machines"),
    "fuse.sshfs": (
        "fuse.sshfs host:/ rw,user_id=0",
        "fuse.sshfs may not pass locks on to other machines",
    ),
    "a disk by FUSE": ("fuseblk /dev/sdb1 rw,user_id=0", None),
    "ext4": ("ext4 /dev/sda rw,errors=remount-ro", None),
}


def line_of(mount: str, point: str = "/data") -> str:
    return f"36 35 0:98 / {point} rw,noatime master:1 - {mount}"


def mountinfo(root: Path, *lines: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text("\n".join(lines))
    return root


@pytest.mark.parametrize("case", TABLE)
def test_mount_with_local_locks_is_reported_with_option_and_remedy(
    case: str,
) -> None:
    mount, problem = TABLE[case]
    found = local_locks(line_of(mount))
    assert (found and found.problem) == problem
    if found is not None:
        remedy = {
            "lustre": "with flock and without localflock",
            "nfs": "local_lock=none and without nolock",
        }.get(mount.split()[0])
        assert (remedy or "`flock -n FILE true; echo $?`") in found.remedy


def test_options_of_mount_point_and_filesystem_both_count() -> None:
    assert local_locks("36 35 0:98 / /data rw,flock - lustre mgs:/fs rw") is None


def test_innermost_mount_is_found_and_missing_mountinfo_is_tolerated(
    tmp_path: Path,
) -> None:
    inner = line_of(TABLE["lustre localflock"][0], "/data/rows")
    root = mountinfo(tmp_path, line_of("ext4 /dev/sda rw", "/"), line_of("ext4 /dev/sdb rw"), inner)
    assert mount_of(Path("/data/rows/today"), root) == inner
    assert mounted_locks(Path("/data/rows"), root) is not None
    assert mounted_locks(Path("/data"), root) is None
    assert mounted_locks(Path("/data"), tmp_path / "missing") is None
    (tmp_path / "proc/self/mountinfo").write_text("36 35 0:98 / / rw - lustre\nodd")
    assert mounted_locks(Path("/data"), root) is None


def test_server_logs_the_mount_option_once_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        directory_module,
        "mounted_locks",
        lambda path: LocalLocks("nfs is mounted with nolock", "Mount it without."),
    )
    check_directory(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: nfs is mounted with nolock. Mount it without."
    ]
    check_directory(tmp_path, use_lock=False)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("use_lock", [True, False])
def test_doctor_names_the_mount_option(tmp_path: Path, use_lock: bool) -> None:
    root = mountinfo(tmp_path / "root", line_of(TABLE["lustre localflock"][0], "/"))
    found = check_storage(
        tmp_path / "rows", FileOptions(use_lock=use_lock), num_bytes=1 << 20, root=root
    )
    locks = [each for each in found if each.name == "locks"]
    assert [(each.verdict, each.found) for each in locks] == (
        [("note", TABLE["lustre localflock"][1])] if use_lock else []
    )
