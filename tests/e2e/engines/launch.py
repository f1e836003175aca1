"""Start engines and servers on emulated NPUs, in processes that need not import vLLM again."""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from documents import Command

from ascend_npu_emulator.launch import environment
from vllm_ascend_hsx.demo.options import ServeOptions
from vllm_ascend_hsx.demo.server import Server, free_port
from vllm_ascend_hsx.serve.options import speculative_config

HERE = Path(__file__).parent
# vLLM's own way of starting processes; the others fork.
SPAWN = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
HBM_BYTES = 2 << 30
# For a busy machine. The end of a server is noticed at once.
START_SECONDS = 600.0
# All plugins except ours: the status quo of vllm-ascend.
UPSTREAM_PLUGINS = (
    "ascend,ascend_kv_connector,ascend_model,ascend_model_loader,ascend_service_profiling,"
    "lora_filesystem_resolver,lora_hf_hub_resolver,hsx_test_instruments"
)
# Forked processes share modules imported under these variables. Everything else is read later,
# except the number of NPUs: all have as many as the largest needs.
IMPORT_TIME = ("PYTHONPATH", "VLLM_PLUGINS", "NPU_EMULATOR_HBM", "NPU_EMULATOR_SOC")
MOST_NPUS = 4
# Sequence parallelism.
FLASHCOMM = {"VLLM_ASCEND_ENABLE_FLASHCOMM1": "1"}
# Fits a command of the documentation to emulated NPUs.
SMALL = {
    "--gpu-memory-utilization": "0.4",
    "--max-model-len": "512",
    "--max-num-seqs": "8",
    "--max-num-batched-tokens": "64",
}


def process_environment(
    *,
    npus: int,
    ours: bool = True,
    late: bool = True,
    soc: str = "a2",
    instruments: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Return the additional environment of a process on emulated NPUs."""
    added = environment(npus=npus, hbm_bytes=HBM_BYTES, late=late, soc=soc, queue=late)
    folders = [
        str(HERE / "instruments"),
        str(HERE.parent / "models"),
        added["PYTHONPATH"],
        os.environ.get("PYTHONPATH", ""),
    ]
    unique = dict.fromkeys(filter(None, os.pathsep.join(folders).split(os.pathsep)))
    added["PYTHONPATH"] = os.pathsep.join(unique)
    added["HSX_TEST_INSTRUMENTS"] = json.dumps(instruments or {})
    if not ours:
        added["VLLM_PLUGINS"] = UPSTREAM_PLUGINS
    return added


class Process:
    """A forked process, with the part of subprocess.Popen that the tests use."""

    def __init__(self, pid: int, status_fd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status_fd

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.returncode = int(os.read(self._status, 64))
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """A process that has imported vLLM and forks others (fork_server.py).

    Args:
        environ: environment of that process.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._log = os.memfd_create("fork_server.log")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "fork_server.py"), str(theirs.fileno())],
                env={**environ, "NPU_EMULATOR_NPUS": str(MOST_NPUS), "HSX_TEST_INSTRUMENTS": "{}"},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        atexit.register(self.close)

    def fork(
        self, environ: Mapping[str, str], command: Sequence[str], log_fd: int, *descriptors: int
    ) -> Process:
        """Fork a process; see fork_server.py."""
        message = json.dumps({"environ": dict(environ), "command": list(command)}).encode()
        status, theirs = os.pipe()
        try:
            socket.send_fds(self._socket, [message], [log_fd, theirs, *descriptors])
        except ConnectionError:
            pass  # also if it ends before it answers
        finally:
            os.close(theirs)
        pid = b""
        while not pid.endswith(b"\n"):
            if not (found := os.read(status, 1)):
                text = os.pread(self._log, 1 << 20, 0).decode(errors="replace")
                raise AssertionError(f"the process that forks engines has ended:\n{text[-4000:]}")
            pid += found
        return Process(int(pid), status)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_fork_servers: dict[tuple[str | None, ...], ForkServer] = {}


def fork(
    environ: Mapping[str, str], command: Sequence[str], log_fd: int, *descriptors: int
) -> Process:
    """Fork a process from a server with these plugins. Start the server if there is none."""
    key = tuple(map(environ.get, IMPORT_TIME))
    if key not in _fork_servers:
        _fork_servers[key] = ForkServer(environ)
    return _fork_servers[key].fork(environ, command, log_fd, *descriptors)


def run_module(name: str, *arguments: str, npus: int = 1, ours: bool = True) -> tuple[int, str]:
    """Return exit code and output of `python -m NAME ARGUMENTS` in a forked process."""
    environ = {**os.environ, **process_environment(npus=npus, ours=ours)}
    with tempfile.TemporaryFile() as log:
        code = fork(environ, ["module", name, *arguments], log.fileno()).wait(START_SECONDS)
        log.seek(0)
        return code, log.read().decode(errors="replace")


class ForkedServer(Server):
    """A server with the command `python -m MODULE ...`, in a process that has imported vLLM."""

    def __enter__(self) -> ForkedServer:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        python, dash_m, *command = self.command
        assert (python, dash_m) == (sys.executable, "-m")
        with self.log.open("wb") as log:
            environ = {**os.environ, **self.environment}
            self.process = fork(environ, ["module", *command], log.fileno())
        return self


def tiny_server(
    directory: Path,
    model: Path,
    layer_ids: tuple[int, ...],
    *,
    data_parallel: int = 1,
    tensor_parallel: int = 1,
    connector: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    extra: Sequence[str] = (),
    late: bool = True,
    soc: str = "a2",
    extract: bool = True,
    instruments: Mapping[str, Any] | None = None,
    **options: Any,
) -> ForkedServer:
    """Return a server of a tiny model, not started; files go to `directory`/hidden_states.

    Args:
        connector: added to kv_connector_extra_config.
        environ: added to the environment.
        extra: more words of the command line.
        options: options of ServeOptions.
    """
    serve = ServeOptions(
        model=str(model),
        storage=directory / "hidden_states",
        layer_ids=layer_ids,
        port=free_port(),
        data_parallel_size=data_parallel,
        tensor_parallel_size=tensor_parallel,
        extra=("--enforce-eager", "--gpu-memory-utilization", "0.4", *extra),
        **{"max_num_batched_tokens": 64, **options},
    )
    command = serve.command()
    at = command.index("--kv-transfer-config") + 1
    transfer = json.loads(command[at])
    transfer["kv_connector_extra_config"] |= connector or {}
    command[at] = json.dumps(transfer)
    if not extract:
        for option in ("--speculative-config", "--kv-transfer-config"):
            at = command.index(option)
            del command[at : at + 2]
    npus = data_parallel * tensor_parallel
    environment = process_environment(npus=npus, late=late, soc=soc, instruments=instruments)
    log = directory / "server.log"
    return ForkedServer(
        command, port=serve.port, log=log, environment=environment | (environ or {})
    )


def smaller(
    shown: Command, model: Path, storage: Path, layer_ids: Sequence[int], **sizes: str
) -> list[str]:
    """Return a command of the documentation for a tiny model on few NPUs.

    Args:
        sizes: values instead of some of the command's.
    """
    transfer = json.loads(shown.options["--kv-transfer-config"])
    transfer["kv_connector_extra_config"]["shared_storage_path"] = str(storage)
    own = {
        **sizes,
        "--speculative-config": json.dumps(speculative_config(layer_ids)),
        "--kv-transfer-config": json.dumps(transfer),
    }
    assert own.keys() <= shown.options.keys()
    words = [word for option in {**shown.options, **own, **SMALL}.items() for word in option]
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model),
        *words,
        *sorted(shown.switches),
        "--enforce-eager",
    ]
