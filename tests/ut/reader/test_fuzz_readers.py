"""Readers of mutated files, shards, ledgers and manifests raise documented errors, and soon.

`--fuzz-inputs N` tries N inputs. The findings are in the tables of test_hostile_files.py and
test_hostile_shards.py. Their values are used here.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from depth import is_long
from hostile import ANY_TEXT, DEEP, JSON, promptly
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from sink_harness import FORMAT, as_version_1, make_rows, open_fds, publish, token_ids
from test_hostile_files import ODD_HEADERS
from test_hostile_ledgers import ODD_LINES
from test_hostile_shards import BAD_LINES

from vllm_ascend_hsx import HiddenStatesDataset, find, load, open_dir, remove
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.ledger import open_ledger
from vllm_ascend_hsx.protocol.checksum import stated_checksum
from vllm_ascend_hsx.protocol.format import FormatError, metadata_of
from vllm_ascend_hsx.protocol.mooncake.manifest import manifest, packed_layout, read_manifest
from vllm_ascend_hsx.reader.check import Expected, check, examine
from vllm_ascend_hsx.reader.find import files_in
from vllm_ascend_hsx.reader.load import HiddenStatesError
from vllm_ascend_hsx.reader.members import _known as known
from vllm_ascend_hsx.reader.shard_check import shard_problems
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.reader.tensors import check_tensors
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink

INPUTS = 500
SHARES = {"file": 0.5, "shard": 0.1, "ledger": 0.1, "manifest": 0.25, "error": 0.05}
pytestmark = pytest.mark.timeout(0)  # each input has a separate limit

# JSON as text: json.dumps writes neither great depth nor a key twice.
RAW = [
    "1e400", "-1e400", "Infinity", "NaN", "-0", "1.5", "true", "null", "9" * 5000, str(2**62), str(2**63), str(2**64), "-1", "0",
    DEEP, "[" * 5000, "[]", "{}", '{"a":1,"a":2}', "[0,0]", "[2,1,3]", '""', '"\\ud800"', '"\\u0000"', "\ud800",
    '"../outside/a.safetensors"', '"/etc/passwd.safetensors"', '"."', '"F64"', '"I64"', '"U8"', '"2"', '"[1,2]"', '"[1e400]"',
    json.dumps(DEEP), '"crc32c"', '"00000000"', '"fp8_e4m3_per_token"',
]  # fmt: skip
RAW_VALUES = st.sampled_from(RAW) | JSON.map(json.dumps)
HERE = "\u2603here\u2603"  # the place of a raw value until the rest is written
BYTES = st.binary(max_size=12) | st.sampled_from(
    [b'"', b"\\", b"{", b"]", b"\0" * 9, b"\xff" * 8, b"\n", b"\r\n", b",", b" " * 40]
)


def run(
    inputs: str,
    target: Callable[[Any], None],
    request: pytest.FixtureRequest,
    strategy: st.SearchStrategy[Any],
) -> None:
    """Call `target` with a share of the inputs (SHARES)."""
    asked = request.config.getoption("fuzz_inputs")
    number = max(20, int((asked or INPUTS) * SHARES[inputs]))
    tried = 0

    @settings(
        max_examples=number,
        derandomize=not (asked or is_long()),
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def each(value: Any) -> None:
        nonlocal tried
        tried += 1
        promptly(lambda: target(value))

    before = open_fds()
    each()
    assert not open_fds() - before
    print(f"{tried} inputs of kind {inputs}")


def positions(value: Any) -> list[tuple[Any, Any]]:
    """Return container and key of every value inside a JSON value."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [found for key in keys for found in ((value, key), *positions(value[key]))]


@st.composite
def json_mutations(draw: st.DrawFn, document: Any) -> bytes:
    """Replace, add, rename or remove one or two values of a document."""
    document = copy.deepcopy(document)
    raw = []
    for _ in range(draw(st.integers(1, 2))):
        places = positions(document)
        if not places:
            break
        container, key = places[draw(st.integers(0, len(places) - 1))]
        kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "add"]))
        if kind == "replace":
            container[key] = HERE
            raw.append(draw(RAW_VALUES))
        elif kind == "remove":
            del container[key]
        elif isinstance(container, dict):
            value = container.pop(key) if kind == "rename" else container[key]
            container[draw(ANY_TEXT | st.sampled_from(list(container) or ["a"]))] = value
    text = json.dumps(document, separators=(",", ":"))
    for each in raw:
        text = text.replace(json.dumps(HERE), each, 1)
    return text.encode("utf-8", "surrogatepass")


@st.composite
def byte_mutations(draw: st.DrawFn, content: bytes) -> bytes:
    """Change, add, remove or repeat some bytes of a content."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        end = min(len(content), at + draw(st.integers(0, 64)))
        kind = draw(
            st.sampled_from(["flip", "overwrite", "insert", "remove", "cut", "repeat", "append"])
        )
        if kind == "flip" and at < len(content):
            content = (
                content[:at]
                + bytes([content[at] ^ 1 << draw(st.integers(0, 7))])
                + content[at + 1 :]
            )
        elif kind == "overwrite":
            new = draw(BYTES)
            content = content[:at] + new + content[at + len(new) :]
        elif kind == "insert":
            content = content[:at] + draw(BYTES) + content[at:]
        elif kind == "remove":
            content = content[:at] + content[end:]
        elif kind == "cut":
            content = content[:at]
        elif kind == "repeat":
            content = content[:end] + content[at:end] + content[end:]
        elif kind == "append":
            content += draw(BYTES)
    return content


@st.composite
def file_mutations(draw: st.DrawFn, content: bytes) -> bytes:
    """A safetensors file with another header, or other bytes."""
    if draw(st.booleans()):
        return draw(byte_mutations(content))
    end = 8 + int.from_bytes(content[:8], "little")
    odd = [text if isinstance(text, str) else json.dumps(text) for text in ODD_HEADERS.values()]
    text = draw(
        json_mutations(json.loads(content[8:end]))
        | st.sampled_from(odd).map(lambda each: each.encode("utf-8", "surrogateescape"))
    )
    length = draw(st.just(len(text)) | st.integers(0, 2**64 - 1))
    return length.to_bytes(8, "little") + text + content[end:]


def line_mutations(content: bytes, bad: list[bytes]) -> st.SearchStrategy[bytes]:
    """Lines of JSON with a changed line, a bad line, or changed bytes."""
    lines = content.split(b"\n")[:-1]
    some = st.sampled_from(lines)

    @st.composite
    def changed(draw: st.DrawFn) -> bytes:
        new = list(lines)
        at = draw(st.integers(0, len(lines) - 1))
        line = draw(
            st.sampled_from(bad)
            | some
            | some.flatmap(lambda each: json_mutations(json.loads(each)))
            | BYTES
        )
        new[at : at + draw(st.integers(0, 1))] = [line]
        return b"\n".join(new) + draw(st.sampled_from([b"\n", b"\n", b"", b'\n{"name":']))

    return changed() | byte_mutations(content)


def look_at_file(path: Path) -> None:
    """Call all readers of a file. Only documented exceptions are allowed."""
    for options in (
        {},
        {"mmap": True},
        {"verify": True},
        {"verify": True, "mmap": True, "dequantize": False},
    ):
        with suppress(HiddenStatesError):
            states = load(path, 0, **options)
            with suppress(KeyError):
                assert all(type(each) is int for each in states.layer_ids)
            with suppress(KeyError):
                assert states.num_prompt_tokens >= 0
            assert states.dtype.is_floating_point
            assert states.token_ids.shape == states.hidden_states.shape[:1]
    found = examine(path, norms=True)
    assert found.verdict in ("bad", "verified", "plausible")
    with suppress(HiddenStatesError):
        HiddenStatesDataset([path], max_tokens=3)[0]
    with suppress(HiddenStatesError):
        check(path, Expected([1], [2]))


def test_mutated_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "x.safetensors"
    contents = []
    for row_format in (FORMAT, replace(FORMAT, quantization="fp8")):
        with FileSink(tmp_path, row_format) as sink:
            file = sink.open("x", path)
            file.write(0, make_rows(0, 3) & 0xBFFF)
            file.commit(token_ids(3), 2)
        contents.append(path.read_bytes())
        path.unlink()
    contents.append(as_version_1(contents[0]))
    contents.append(
        save(
            {
                "hidden_states": np.ones((3, 2, 4), np.float32),
                "token_ids": np.arange(3),
                "more": np.ones(5, np.int8),
            }
        )
    )

    def target(content: bytes) -> None:
        path.write_bytes(content)
        look_at_file(path)

    run("file", target, request, st.one_of(*map(file_mutations, contents)))


def test_mutated_shards(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    where, outside = tmp_path / "storage", tmp_path / "outside"
    with ShardSink(where, FORMAT, shard_bytes=1 << 20) as sink:
        for letter in "abc":
            publish(sink, where, letter)
        sink.open("chosen", where / "in" / "d.safetensors").discard()
    with FileSink(outside, FORMAT) as files:
        shutil.copy(publish(files, outside, "a"), outside / "a.safetensors")
    remove(where / "c-0123abcd.safetensors")
    shutil.rmtree(where / "in", ignore_errors=True)
    (where / "link").symlink_to(outside)
    whole = {
        name: (where / name).read_bytes() for name in os.listdir(where) if (where / name).is_file()
    }
    precious = {name: (outside / name).read_bytes() for name in os.listdir(outside)}
    bad = [
        *BAD_LINES.values(),
        b'{"name":"../outside/a.safetensors","offset":4096,"size":4096,"tokens":3,"time_ns":4}',
    ]
    bad.append(bad[-1].replace(b"../outside", b"link"))

    def mutated(name: str) -> st.SearchStrategy[tuple[str, bytes]]:
        content = whole[name]
        if name.endswith(".jsonl"):
            strategy = line_mutations(content, bad)
        elif name.endswith(".json"):
            strategy = byte_mutations(content) | json_mutations(json.loads(content))
        else:
            strategy = byte_mutations(content)
        return st.tuples(st.just(name), strategy)

    def target(changed: tuple[str, bytes]) -> None:
        for name, content in {**whole, changed[0]: changed[1]}.items():
            (where / name).write_bytes(content)
        known.clear()  # indexes only grow, and lines are read once
        shards = Shards(where)
        found = shards.members()
        assert shards.members() == found == Shards(where).members()
        assert not [
            name for name in found if name.startswith(("/", ".", "link")) or ".." in name.split("/")
        ]
        seen = [path for path, _ in open_dir(where, mmap=True, on_bad=lambda error: None)]
        assert len(files_in(where)) == len(found)
        list(shard_problems(where))
        with suppress(FileNotFoundError, LookupError):
            find(where, "a")
        for path in seen:
            with suppress(HiddenStatesError):
                load(path, 0, verify=True)
        for path in seen:
            remove(path)
        assert [path for path, _ in open_dir(where, on_bad=lambda error: None)] == []
        assert {name: (outside / name).read_bytes() for name in os.listdir(outside)} == precious

    run(
        "shard",
        target,
        request,
        st.sampled_from(sorted(set(whole) - {"hsx-shards"})).flatmap(mutated),
    )


def test_mutated_ledgers(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    asked = {"a": 1}
    ledger = open_ledger(tmp_path, asked)
    ledger.note_server(
        {"model": "m", "layer_ids": [1], "layers": 1, "hidden_size": 8, "dtype": "bfloat16"}
    )
    ledger.close()
    path = tmp_path / "ledger.jsonl"
    with open(path, "ab") as file:
        for row in range(4):
            file.write(
                b'{"row":%d,"status":"%s","identity":"%032x"}\n'
                % (row, (b"done", b"failed")[row % 2], row + 1)
            )

    def target(content: bytes) -> None:
        for name, world_size in (("ledger.jsonl", 1), ("ledger-1-of-2.jsonl", 2)):
            (tmp_path / name).write_bytes(content)
            with suppress(InputError):
                ledger = open_ledger(tmp_path, asked, world_size)
                ledger.close()
                assert isinstance(ledger.server, dict | None)
                assert len(ledger.finished.marks) <= 1 << 28
            for each in tmp_path.iterdir():
                each.unlink()

    run(
        "ledger",
        target,
        request,
        line_mutations(path.read_bytes(), [line.encode() for line in ODD_LINES]),
    )


def test_mutated_manifests_of_mooncake(request: pytest.FixtureRequest) -> None:
    texts = []
    for row_format in (FORMAT, replace(FORMAT, quantization="fp8")):
        texts.append(
            manifest(packed_layout(row_format, 5), metadata_of(row_format, "x", 5, 4, True))
        )

    def target(text: bytes) -> None:
        with suppress(FormatError):
            header = read_manifest(text)
            check_tensors(header)
            stated_checksum(text, header.metadata)
            assert all(0 <= tensor.begin <= tensor.end for tensor in header.tensors.values())

    run(
        "manifest",
        target,
        request,
        st.one_of(*(byte_mutations(text) | json_mutations(json.loads(text)) for text in texts)),
    )


def test_mutated_error_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "x.safetensors"
    with FileSink(tmp_path, FORMAT) as sink:
        sink.open("x", path).fail("no luck")
    error = path.with_name("x.safetensors.error")
    content = error.read_bytes()

    def target(changed: bytes) -> None:
        error.write_bytes(changed)
        with pytest.raises(HiddenStatesError) as raised:
            load(path, 0)
        assert isinstance(raised.value.reason, str)

    run("error", target, request, byte_mutations(content) | json_mutations(json.loads(content)))
