"""`hsx serve` checks port and directory before it starts the server."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_hsx.cli import serve
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.serve.command import build
from vllm_ascend_hsx.serve.machine import check_machine

NO_DIRECTORY = "/proc/hidden_states"


@pytest.fixture(params=[False, True], ids=["another program", "another vLLM"])
def used_port(request: pytest.FixtureRequest) -> Iterator[str]:
    """Listen on a port. vLLM's sockets would share it with each other."""
    with socket.socket() as listening:
        if request.param:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield str(listening.getsockname()[1])


def config(directory: Path | str, **options: Any) -> HsxConfig:
    return HsxConfig.parse({"shared_storage_path": str(directory), **options})


@pytest.mark.parametrize("host", ["", "127.0.0.1", "localhost"])
def test_a_port_in_use_is_refused_by_number(tmp_path: Path, used_port: str, host: str) -> None:
    with pytest.raises(
        UserError, match=f"--port={used_port} is in use on this machine. Stop the program"
    ):
        check_machine(config(tmp_path), {"--host": host, "--port": used_port})


@pytest.mark.parametrize("instead", ["--headless", "--uds", "--config"])
def test_port_in_use_at_another_address_is_allowed(
    tmp_path: Path, used_port: str, instead: str
) -> None:
    check_machine(config(tmp_path), {"--port": used_port, instead: "x"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"--host": "no-such-host.invalid"}, "--host='no-such-host.invalid' is not an address"),
        ({"--host": "192.0.2.1"}, "--host='192.0.2.1' is not an address of this machine"),
    ],
)
def test_an_address_of_another_machine_is_refused(
    tmp_path: Path, given: dict[str, str], words: str
) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        check_machine(config(tmp_path), {**given, "--port": "65000"})


@pytest.mark.parametrize("port", ["0", "x", "99999", ""])
def test_invalid_port_is_left_to_vllm(tmp_path: Path, port: str) -> None:
    check_machine(config(tmp_path), {"--port": port})


@pytest.mark.parametrize(
    ("given", "options", "refused"),
    [
        ({}, {}, True),
        ({}, {"sink": "shard", "io": "direct"}, True),
        ({"--data-parallel-size-local": "0"}, {}, False),
        ({}, {"sink": "mooncake", "mooncake": {"master_server_address": "host:1"}}, False),
    ],
)
def test_directory_is_checked_only_where_an_engine_writes_files(
    given: dict[str, str], options: dict[str, Any], refused: bool
) -> None:
    words = f"--out='{NO_DIRECTORY}' cannot be created or opened"
    with pytest.raises(UserError, match=words) if refused else nullcontext():
        check_machine(config(NO_DIRECTORY, **options), {"--headless": "", **given})


def test_unsupported_filesystem_is_refused_with_the_option_of_hsx_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        assert kwargs == {"use_lock": True, "direct": True}
        raise UserError("io", "direct", "does not work", "Leave it out.")

    monkeypatch.setattr("vllm_ascend_hsx.serve.machine.check_directory", refuse)
    with pytest.raises(UserError, match="--option io='direct' does not work"):
        check_machine(config(tmp_path, io="direct"), {"--headless": ""})


@pytest.mark.parametrize(
    "option", ["--data-parallel-size-local=0", "--data_parallel_size_local=0", "-dpl=0"]
)
def test_each_spelling_of_no_local_engine_is_recognised(tmp_path: Path, option: str) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 62})
    )
    built = build(str(tmp_path), "eagle3", NO_DIRECTORY, {}, [option, "--headless"], {})
    check_machine(built.config, built.given)


@pytest.mark.parametrize("dry_run", [False, True])
def test_dry_run_checks_neither_port_nor_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], used_port: str, dry_run: bool
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 62})
    )
    words = [
        str(tmp_path),
        "--out",
        NO_DIRECTORY,
        *(("--dry-run",) if dry_run else ()),
        "--port",
        used_port,
    ]
    assert serve.main(words) == (0 if dry_run else 2)
    refused = (
        f"hsx serve: --port={used_port} is in use on this machine. Stop the program that listens "
        "there, or give another port.\n"
    )
    assert capsys.readouterr().err == ("" if dry_run else refused)
