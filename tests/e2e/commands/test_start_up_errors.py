"""A configuration error ends `vllm serve` and `hsx serve` within seconds, with one line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch import process_environment, run_module

from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config

READ_ONLY = Path("/sys")
NOWHERE = Path("/proc/hidden_states")
SPECULATIVE, TRANSFER = "--speculative-config", "--kv-transfer-config"


@dataclass(frozen=True)
class Case:
    """A mistake, as arguments of both commands, and the reason that each must print.

    Attributes:
        vllm: arguments of vllm serve, in place of the right ones. `MODEL` and `--port` are among
            them.
        hsx: the same for hsx serve; None if the mistake is impossible there.
        reasons: a text that both print, or one text for each.
    """

    vllm: Mapping[str, str]
    hsx: Mapping[str, str] | None
    reasons: tuple[str, ...]


def transfer(**options: object) -> Mapping[str, str]:
    return {TRANSFER: json.dumps(kv_transfer_config(options.pop("storage", "/tmp"), **options))}  # type: ignore[arg-type]


def layers(*ids: int) -> Mapping[str, str]:
    return {SPECULATIVE: json.dumps(speculative_config(ids))}


WRONG_ROLE = {TRANSFER: json.dumps({**kv_transfer_config("/tmp"), "kv_role": "kv_consumer"})}
CASES = {
    "a layer that the target lacks": Case(
        layers(2, 99), {"--layers": "2,99"}, ("has id 99, which the target does not have",)
    ),
    "a duplicate layer": Case(layers(2, 2), {"--layers": "2,2"}, ("has id 2 twice",)),
    "a directory that cannot be made": Case(
        transfer(storage=NOWHERE), {"--out": str(NOWHERE)}, (f"{str(NOWHERE)!r} cannot be created",)
    ),
    "a read-only directory": Case(
        transfer(storage=READ_ONLY), {"--out": str(READ_ONLY)}, (f"{str(READ_ONLY)!r} ",)
    ),
    "no JSON": Case(
        {TRANSFER: "{kv"},
        {"--hf-overrides": "{kv"},
        (f"argument {TRANSFER}", "--hf-overrides='{kv' is not JSON"),
    ),
    "an unknown key": Case(
        transfer(io_mode=1),
        {"--option": "io_mode=1"},
        ("kv_connector_extra_config.io_mode=1 is not an option",),
    ),
    "another role": Case(WRONG_ROLE, None, ('Set "kv_role": "kv_producer"',)),
    "no model": Case({"MODEL": "/nowhere"}, {"MODEL": "/nowhere"}, ("/nowhere",)),
    "a port in use": Case(
        {"--port": "USED"},
        {"--port": "USED"},
        ("Address already in use", "is in use on this machine"),
    ),
}


@pytest.fixture(scope="module")
def used_port() -> Iterator[str]:
    with socket.create_server(("", 0)) as listening:
        yield str(listening.getsockname()[1])


def words(arguments: Mapping[str, str], used_port: str) -> list[str]:
    model, *rest = (
        [arguments["MODEL"]],
        *((option, value) for option, value in arguments.items() if option != "MODEL"),
    )
    return [used_port if word == "USED" else word for pair in (model, *rest) for word in pair]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_vllm_serve_ends_with_the_reason(
    case: Case, tiny_qwen3: Path, tmp_path: Path, used_port: str
) -> None:
    right = {"MODEL": str(tiny_qwen3), **layers(1, 2), **transfer(storage=tmp_path), "--port": "0"}
    code, printed = run_module(
        "vllm.entrypoints.cli.main", "serve", *words({**right, **case.vllm}, used_port)
    )
    assert code != 0
    assert case.reasons[0] in "\n".join(printed.splitlines()[-3:]), printed
    assert "Starting to load model" not in printed and "See root cause above" not in printed


@pytest.mark.parametrize(
    ("case"),
    [case for case in CASES.values() if case.hsx is not None],
    ids=[n for n, c in CASES.items() if c.hsx],
)
def test_hsx_serve_says_the_reason_without_a_traceback(
    case: Case, tiny_qwen3: Path, tmp_path: Path, used_port: str
) -> None:
    assert case.hsx is not None
    right = {"MODEL": str(tiny_qwen3), "--layers": "1,2", "--out": str(tmp_path), "--port": "0"}
    command = [
        str(Path(sys.executable).with_name("hsx")),
        "serve",
        *words({**right, **case.hsx}, used_port),
    ]
    environ = {**os.environ, **process_environment(npus=1)}
    done = subprocess.run(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 2, done.stdout
    assert case.reasons[-1] in "\n".join(done.stdout.splitlines()[-3:]), done.stdout
    assert "Traceback" not in done.stdout
