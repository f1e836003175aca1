"""A request that fails because the process has no descriptors left leaves its reason."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from sink_harness import FORMAT, finite_rows, put, reason_of

from vllm_ascend_hsx.reader.load import load
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink


def exhaust() -> list[int]:
    """Open descriptors up to the limit of the process."""
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, used + 8))
    fds = []
    while True:
        try:
            fds.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return fds


def in_child(run: object) -> None:
    """Call a function in a forked process, and fail if it raises."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run()  # type: ignore[operator]
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("name", ["r-0123abcd", "chosen", "folder/inner/chosen"])
@pytest.mark.parametrize("when", ["open", "write"])
@pytest.mark.parametrize("kind", ["files", "shards"])
def test_request_without_a_descriptor_leaves_its_reason(
    tmp_path: Path, kind: str, when: str, name: str
) -> None:
    path = tmp_path / f"{name}.safetensors"
    if "/" in name:
        path.parent.mkdir(parents=True)

    def serve() -> None:
        sink = (
            FileSink(tmp_path, FORMAT)
            if kind == "files"
            else ShardSink(tmp_path, FORMAT, shard_bytes=1 << 20)
        )
        put(sink.open("before", tmp_path / "before.safetensors"), 2)
        if kind == "shards":  # their hidden file would be reused by the next request
            spare = sink.open("spare", tmp_path / "spare.safetensors")
            spare.write(0, finite_rows(0, 1))
        file = sink.open("r-0123abcd", path) if when == "write" else None
        fds = exhaust()
        for _ in range(2):  # the spare descriptors are open again
            with pytest.raises(SinkError, match="EMFILE") as failed:
                if file is None:
                    sink.open("r-0123abcd", path)
                else:
                    file.write(0, finite_rows(0, 2))
            if file is not None:
                file.fail(failed.value.reason)
            assert reason_of_without_descriptors(path, fds) == failed.value.reason
            if file is not None:
                break
        for fd in fds:
            os.close(fd)
        put(sink.open("r-0123abcd", path), 3)
        assert len(load(path, 0).token_ids) == 3

    def reason_of_without_descriptors(path: Path, fds: list[int]) -> str:
        os.close(fds.pop())
        reason = reason_of(path)
        Path(f"{path}.error").unlink()
        fds.append(os.open("/dev/null", os.O_RDONLY))
        return reason

    in_child(serve)
