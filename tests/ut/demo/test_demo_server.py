"""The demo's server process: waiting, error reports, and clean-up."""

import socket
import sys
from pathlib import Path

import pytest

from vllm_ascend_hsx.demo import server as server_module
from vllm_ascend_hsx.demo.server import Server, ServerError, free_port, group_members

READY_WITH_A_STUBBORN_CHILD = """
import http.server, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"], stdout=subprocess.PIPE)
child.stdout.readline()
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""
SILENT = "import signal; print('measuring memory', flush=True); signal.pause()"
FAILS = """
import sys
print("WARNING: OSError: a limit")
print("(Worker_TP1) ERROR ValueError: no such model")
print("\\n".join(["RuntimeError: the worker died"] * 50), flush=True)
sys.exit(7)
"""


def make(code: str, tmp_path: Path) -> Server:
    port = free_port()
    script = tmp_path / "server.py"  # not -c, because the log begins with the command line
    script.write_text(code)
    return Server(
        [sys.executable, str(script), str(port)], port=port, log=tmp_path / "log", environment={}
    )


def test_stop_ends_even_a_child_that_ignores_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STOP_SECONDS", 1.0)
    with make(READY_WITH_A_STUBBORN_CHILD, tmp_path) as server:
        server.wait_ready(30)
        assert server.process is not None
        group = server.process.pid
        assert len(group_members(group)) == 2
    assert group_members(group) == []
    server.stop()


def test_all_processes_are_stopped_when_the_caller_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STOP_SECONDS", 1.0)
    server = make(READY_WITH_A_STUBBORN_CHILD, tmp_path)
    with pytest.raises(KeyboardInterrupt), server:
        server.wait_ready(30)
        raise KeyboardInterrupt
    assert server.process is not None
    assert group_members(server.process.pid) == []


def test_ended_server_is_reported_with_exit_code_and_first_error(
    tmp_path: Path,
) -> None:
    with (
        make(FAILS, tmp_path) as server,
        pytest.raises(ServerError, match="exit code 7") as failure,
    ):
        server.wait_ready(30)
    assert "first error in the log: (Worker_TP1) ERROR ValueError: no such model" in str(
        failure.value
    )
    assert str(server.log) in str(failure.value)


def test_server_without_answer_is_abandoned_after_the_timeout(tmp_path: Path) -> None:
    elapsed: list[float] = []
    with (
        make(SILENT, tmp_path) as server,
        pytest.raises(ServerError, match="did not answer within 1 s") as failure,
    ):
        server.wait_ready(1, elapsed.append)
    assert "measuring memory" in str(failure.value)
    assert elapsed


def test_free_ports_differ_and_are_below_the_ephemeral_range() -> None:
    ports = {free_port() for _ in range(5)}
    assert len(ports) > 1
    assert max(ports) < 32768


def test_used_ports_are_skipped_and_no_free_port_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as other:
        used = free_port()
        other.bind(("127.0.0.1", used))
        monkeypatch.setattr(server_module, "PORTS", range(used, used + 1))
        with pytest.raises(
            ServerError,
            match=f"no free TCP port .* {used} to {used}: stop the programs that listen there",
        ):
            free_port()
    assert free_port() == used
