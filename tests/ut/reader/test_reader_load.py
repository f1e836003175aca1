"""Consumers get the rows or the reason as soon as possible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from reader_harness import SOURCE, assert_rows, committed, written
from safetensors.torch import save_file
from sink_harness import FORMAT, make_rows, open_fds, token_ids

from vllm_ascend_hsx.protocol.format import FormatError, read_header
from vllm_ascend_hsx.reader.load import HiddenStatesError, load, remove
from vllm_ascend_hsx.reader.tensors import read_tensor
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import DirectorySink, FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink

# Loading


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("tokens", [1, 700])
def test_verify_finds_a_changed_byte(
    sink: FileSink, tmp_path: Path, tokens: int, mmap: bool
) -> None:
    path = committed(sink, tmp_path, tokens=tokens)
    assert_rows(load(path, verify=True, mmap=mmap), tokens)
    data = path.read_bytes()
    for changed in (len(data) - 1, len(data) - tokens * 8 - 1):
        path.write_bytes(data[:changed] + bytes([data[changed] ^ 1]) + data[changed + 1 :])
        load(path, mmap=mmap)
        with pytest.raises(
            HiddenStatesError, match="it has changed since it was written: its checksum is"
        ):
            load(path, verify=True, mmap=mmap)


@pytest.mark.parametrize(
    "make_sink", [FileSink, partial(ShardSink, shard_bytes=1 << 20)], ids=["file", "shard"]
)
@pytest.mark.parametrize(
    ("request_id", "is_its"),
    [
        ("cmpl-1.b-0", True),
        ("cmpl-1.b-0-0123abcd", True),
        ("2_cmpl-1.b-13-0123abcd", True),
        ("cmpl-1.b-1-0-0123abcd", False),
        ("cmpl-1.b_3-0123abcd", True),  # a client's own id at /v1/responses
        ("cmpl-1.b-0-84587174-0-0123abcd", False),
        ("cmpl-1.b-84587174", False),  # of cmpl-1
        ("cmpl-1.b-0-0123abcd-0123abcd", False),
        ("cmpl-1xb-0-0123abcd", False),
        ("cmpl-1.bc-0-0123abcd", False),
        ("x_cmpl-1.b-0", False),
        ("cmpl-2-0", False),
        ("0_cmpl-1.b-1_0-0123abcd", False),  # of /v1/responses
    ],
)
def test_rows_of_another_request_of_the_same_name_are_refused(
    tmp_path: Path, request_id: str, is_its: bool, make_sink: Callable[..., DirectorySink]
) -> None:
    path = tmp_path / "chosen.safetensors"
    with make_sink(tmp_path, FORMAT) as sink:
        file = sink.open(request_id, path)
        file.write(0, make_rows(0, 3))
        file.commit(token_ids(3), 2)
    assert_rows(load(path), 3)
    if is_its:
        assert_rows(load(path, response_id="cmpl-1.b"), 3)
    else:
        with pytest.raises(
            HiddenStatesError,
            match=f"another request, {request_id}, not of response cmpl-1.b$",
        ):
            load(path, response_id="cmpl-1.b")


@pytest.mark.parametrize(
    ("response_id", "own", "others"),
    [
        (
            "chatcmpl-job",
            ["chatcmpl-job-0123abcd", "1_chatcmpl-job-0123abcd"],
            ["chatcmpl-job-1-0123abcd", "chatcmpl-job_1-0123abcd"],
        ),
        (
            "resp_x",
            ["resp_x_0-0123abcd", "resp_x_12"],
            ["0_resp_x_0-0123abcd", "resp_x_1_0-0123abcd", "resp_x-0-0123abcd"],
        ),
        (
            "cmpl-job-0",
            ["cmpl-job-0-0-84587174", "cmpl-job-0-1"],
            ["cmpl-job-0-84587174", "cmpl-job-0"],
        ),
        (
            "generative-scoring-a",
            ["generative-scoring-a-3-0123abcd"],
            ["generative-scoring-a-1-0-0123abcd"],
        ),
    ],
)
def test_ids_that_differ_by_a_number_are_distinguished(
    tmp_path: Path, response_id: str, own: list[str], others: list[str]
) -> None:
    path = tmp_path / "chosen.safetensors"
    for request_id in [*own, *others]:
        with FileSink(tmp_path, FORMAT) as sink:
            file = sink.open(request_id, path)
            file.write(0, make_rows(0, 3))
            file.commit(token_ids(3), 2)
        with (
            nullcontext()
            if request_id in own
            else pytest.raises(HiddenStatesError, match="another request")
        ):
            load(path, response_id=response_id)
        remove(path)


@pytest.mark.parametrize(
    "make_sink", [FileSink, partial(ShardSink, shard_bytes=1 << 20)], ids=["file", "shard"]
)
def test_open_file_cannot_be_removed(
    tmp_path: Path, make_sink: Callable[..., DirectorySink]
) -> None:
    path = tmp_path / "chosen.safetensors"
    with make_sink(tmp_path, FORMAT) as sink, make_sink(tmp_path, FORMAT) as another:
        file = sink.open("first", path)
        file.write(0, make_rows(0, 3))
        with pytest.raises(
            TimeoutError, match=r"chosen\.safetensors\.lock: still locked by its writer"
        ):
            remove(path)
        with pytest.raises(SinkError, match="another request or server is writing this file"):
            another.open("second", path)
        file.commit(token_ids(3), 2)
        remove(path)
        another.open("third", path).discard()
    with pytest.raises(FileNotFoundError):
        load(path)


def test_rows_without_a_request_id_belong_to_no_response(tmp_path: Path) -> None:
    save_file(
        {"hidden_states": torch.ones(3, 1, 4), "token_ids": torch.arange(3)},
        tmp_path / "a.safetensors",
    )
    with pytest.raises(HiddenStatesError, match="another request, not of response cmpl-1"):
        load(tmp_path / "a.safetensors", response_id="cmpl-1")


def test_file_without_a_checksum_cannot_be_verified(tmp_path: Path) -> None:
    with FileSink(tmp_path, FORMAT, FileOptions(checksum="none")) as sink:
        path = committed(sink, tmp_path)
    with pytest.raises(HiddenStatesError, match="has no crc32c checksum"):
        load(path, verify=True)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 700])
def test_complete_file_is_loaded_at_once(
    sink: FileSink, tmp_path: Path, tokens: int, mmap: bool
) -> None:
    file = written(sink, tmp_path, tokens=tokens)
    file.commit(token_ids(tokens), tokens)
    states = load(file.path, 0, mmap=mmap)
    assert_rows(states, tokens)
    assert states.layer_ids == [2, 0, 3]
    assert states.num_prompt_tokens == tokens
    assert states.metadata["request_id"] == "cmpl-1"
    assert_rows(load(str(file.path), 0, mmap=mmap), tokens)


@pytest.mark.parametrize("mmap", [False, True])
def test_changing_loaded_tensors_changes_no_file(
    sink: FileSink, tmp_path: Path, mmap: bool
) -> None:
    path = committed(sink, tmp_path)
    load(path, 0, mmap=mmap).hidden_states.zero_()
    assert_rows(load(path, 0), 5)


def test_mapped_file_can_be_removed_while_in_use(sink: FileSink, tmp_path: Path) -> None:
    states = load(committed(sink, tmp_path, tokens=3000), 0, mmap=True)
    remove(tmp_path / "cmpl-1.safetensors")
    assert_rows(states, 3000)


@pytest.mark.parametrize("mmap", [False, True])
def test_file_truncated_after_its_header_is_an_error_not_a_crash(
    sink: FileSink, tmp_path: Path, mmap: bool
) -> None:
    path = committed(sink, tmp_path, tokens=3000)
    with open(path, "rb") as file:
        header = read_header(file.fileno())
        os.truncate(path, 8192)
        with pytest.raises(FormatError, match="while it was being read"):
            read_tensor(file.fileno(), header.tensors["hidden_states"], mmap)


@pytest.mark.parametrize("mmap", [False, True])
def test_file_of_another_producer_loads_aligned_or_not(tmp_path: Path, mmap: bool) -> None:
    states = torch.randn(3, 1, 3).to(torch.bfloat16)
    path = tmp_path / "f.safetensors"
    save_file(
        {
            "hidden_states": states,
            "token_ids": torch.arange(3),
            "extra": torch.ones(7, dtype=torch.bool),
        },
        path,
    )
    loaded = load(path, 0, mmap=mmap)
    assert torch.equal(loaded.hidden_states, states)
    assert torch.equal(loaded.token_ids, torch.arange(3))
    assert loaded.metadata == {}
    header = json.dumps(
        {
            "hidden_states": {"dtype": "BF16", "shape": [3, 1, 3], "data_offsets": [0, 18]},
            "token_ids": {"dtype": "I64", "shape": [3], "data_offsets": [18, 42]},
        }
    ).encode()
    odd = (
        len(header).to_bytes(8, "little")
        + header
        + states.view(torch.uint8).numpy().tobytes()
        + np.arange(3).tobytes()
    )
    path.write_bytes(odd)
    loaded = load(path, 0, mmap=mmap)
    assert torch.equal(loaded.hidden_states, states)
    assert torch.equal(loaded.token_ids, torch.arange(3))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"token_ids": torch.arange(3)}, "it has no hidden_states"),
        (
            {"hidden_states": torch.ones(3, 1, 4), "token_ids": torch.arange(2)},
            r"token_ids \[2\] does not fit hidden_states \[3, 1, 4\]",
        ),
        (
            {"hidden_states": torch.ones(3, 1, 4, dtype=torch.uint8), "token_ids": torch.arange(3)},
            "hidden_states is U8, not one of",
        ),
        (None, "too few"),
    ],
)
def test_file_that_holds_no_hidden_states_is_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor] | None, words: str
) -> None:
    path = tmp_path / "f.safetensors"
    before = open_fds()
    if tensors is None:
        path.touch()
    else:
        save_file(tensors, path)
    with pytest.raises(HiddenStatesError, match=words):
        load(path, 0)
    assert not open_fds() - before


# Reasons


def test_reason_of_a_failure_is_raised(sink: FileSink, tmp_path: Path) -> None:
    file = written(sink, tmp_path)
    file.fail("rows [3, 5) could not be written: No space left on device (ENOSPC)")
    with pytest.raises(HiddenStatesError) as raised:
        load(file.path, 0)
    assert (
        raised.value.reason == "rows [3, 5) could not be written: No space left on device (ENOSPC)"
    )
    assert raised.value.path == file.path
    assert str(file.path) in str(raised.value)


KILLED_SERVER = """
import os, signal, sys
from pathlib import Path
import numpy as np
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.file import FileSink
sink = FileSink(Path(sys.argv[1]), RowFormat((1,), 8, "BF16"))
file = sink.open("cmpl-1", Path(sys.argv[1], "cmpl-1.safetensors"))
file.write(0, np.ones((2, 1, 8), np.uint16))
print("written", flush=True)
signal.pause()
"""


def test_reader_reports_a_killed_server(tmp_path: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", KILLED_SERVER, tmp_path],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    with server.stdout:
        assert server.stdout.readline() == "written\n"
    path = tmp_path / "cmpl-1.safetensors"
    with pytest.raises(TimeoutError):
        load(path, 0)
    server.kill()
    server.wait()
    with pytest.raises(HiddenStatesError, match="the server died before the file was complete"):
        load(path, 30)


def test_missing_file_raises_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no hidden states, lock or error.*cmpl-1\.safetensors"
    ):
        load(tmp_path / "cmpl-1.safetensors", 0)


@pytest.mark.parametrize("text", ["{", "[]", '{"reason":', '{"why": 1}'])
def test_unreadable_error_file_is_still_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.safetensors.error").write_text(text)
    with pytest.raises(HiddenStatesError, match="report of the failure is invalid"):
        load(tmp_path / "f.safetensors", 0)


def test_package_exports_the_reader_without_heavy_imports() -> None:
    code = (
        "import sys, vllm_ascend_hsx as hsx\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "for name in set(hsx.__all__) - {'HiddenStatesDataset', 'collate'}: getattr(hsx, name)\n"
        "assert set(hsx.__all__) <= set(dir(hsx))\n"
        "assert 'torch' not in sys.modules\n"
        "assert hsx.HiddenStatesDataset.__mro__[1] is sys.modules['torch'].utils.data.Dataset "
        "and callable(hsx.collate)\n"
        "try: hsx.no_such_name\n"
        "except AttributeError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "no_such_name" in result.stdout


def test_file_of_a_later_format_is_refused_with_its_version(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(
        {"hidden_states": torch.ones(1, 1, 4)},
        path,
        {"producer": "vllm-ascend-hsx", "format_version": "3"},
    )
    with pytest.raises(
        HiddenStatesError, match="format_version='3' is unknown to this version of vllm-ascend-hsx"
    ):
        load(path)
    save_file(
        {"hidden_states": torch.ones(1, 1, 4), "token_ids": torch.ones(1, dtype=torch.int64)},
        path,
        {"format_version": "3"},
    )
    assert load(path).metadata == {"format_version": "3"}, "another producer's"
