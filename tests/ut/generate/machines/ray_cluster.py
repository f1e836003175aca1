"""A Ray cluster of emulated machines: network namespaces connected by a switch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyroute2 import IPRoute, NetlinkError, netns

ROOT = Path(__file__).parents[4]
NETWORK = "10.79.0"
PORT = 6379
SERVER = "http://127.0.0.1:8000"  # of each machine
_NAMESPACES = ("--net", "--ipc", "--uts", "--mount", "--pid")
# A node that is switched off sends nothing. Ray declares it dead after some missed checks.
_HEALTH = {
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}
# Independent of the user's home directory.
_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}


@dataclass
class Node:
    """One machine.

    Attributes:
        name: host name.
        address: address in the cluster's network.
        init: process of the machine; if it ends, all others end.
    """

    name: str
    address: str
    init: int

    def start(self, words: Sequence[str | Path], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on the machine, with output to `log`."""
        command = [
            "nsenter",
            f"--target={self.init}",
            *_NAMESPACES,
            f"--wd={ROOT}",
            "--",
            *map(str, words),
        ]
        path = os.pathsep.join(str(ROOT / each) for each in ("", "tests", "tests/ut"))
        variables = {**os.environ, "PYTHONPATH": path, **_HEALTH, **_TOKEN}
        with open(log, "w") as output:
            return subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT)

    def switch_off(self) -> None:
        """Kill all processes of the machine. The network disappears with them."""
        os.kill(self.init, 9)


class Cluster:
    """The machines of a cluster. The first is the head.

    Args:
        stack: stops everything at the end.
        storage: directory that all machines see.
        work: directory for logs.
        temporary: directory that is private to each machine.
    """

    def __init__(self, stack: ExitStack, storage: Path, work: Path, temporary: Path) -> None:
        self._stack = stack
        self._storage = storage
        self._work = work
        self._temporary = temporary
        self._switch = ""
        self.nodes: list[Node] = []

    @property
    def head(self) -> Node:
        return self.nodes[0]

    @property
    def address(self) -> str:
        return f"{self.head.address}:{PORT}"

    def add(self, *ray_options: str) -> Node:
        """Add a machine with a server, and let it join the cluster."""
        number = len(self.nodes) + 1
        node = self._boot(f"node{number}", f"{NETWORK}.{number}")
        self.nodes.append(node)
        said = self._work / f"{node.name}.server"
        server = node.start(
            [
                sys.executable,
                ROOT / "tests/ut/fakes/generate_server.py",
                self._storage,
                "8000",
                self.log(node),
            ],
            said,
        )
        self._stack.callback(server.wait)
        self._stack.callback(server.kill)
        while "serving" not in said.read_text():
            assert server.poll() is None, said.read_text()
            time.sleep(0.05)
        ray = [
            Path(sys.executable).with_name("ray"),
            "start",
            "--node-ip-address",
            node.address,
            "--disable-usage-stats",
        ]
        ray += ["--num-cpus", "2", "--object-store-memory", str(80 << 20), *ray_options]
        first = [
            "--head",
            "--port",
            str(PORT),
            "--include-dashboard",
            "false",
            "--temp-dir",
            str(self._temporary),
        ]
        said = self._work / f"{node.name}.ray"  # not a pipe: child processes would keep it open
        assert (
            node.start([*ray, *(first if number == 1 else ["--address", self.address])], said).wait(
                timeout=120
            )
            == 0
        ), said.read_text()
        return node

    def log(self, node: Node) -> Path:
        """Return the rows requested from a machine's server."""
        return self._work / f"{node.name}.asked"

    def asked(self, node: Node) -> list[int]:
        text = self.log(node).read_text() if self.log(node).exists() else ""
        return [int(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _boot(self, name: str, address: str) -> Node:
        """Start a machine and connect it to the switch in the first machine."""
        mounts = " && ".join(
            f"mount -t tmpfs tmpfs {each}" for each in ("/dev/shm", self._temporary)
        )
        boot = f"{mounts} && hostname {name} && echo booted && exec sleep infinity"
        command = [
            "unshare",
            *_NAMESPACES,
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            boot,
        ]
        process = self._stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        self._stack.callback(process.kill)
        assert process.stdout is not None
        if (said := process.stdout.readline().strip()) != "booted":
            pytest.skip(f"machines are namespaces, which this user must not make: {said}")
        init = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        try:
            if not self.nodes:
                with _network(init), IPRoute() as routes:
                    routes.link("add", ifname="switch", kind="bridge")
                    _up(routes, "lo")
                    _up(routes, "switch", address)
                self._first = init
            else:
                port = f"port{len(self.nodes)}"
                with _network(self._first), IPRoute() as routes:
                    routes.link(
                        "add", ifname=port, kind="veth", peer={"ifname": "eth0", "net_ns_pid": init}
                    )
                    routes.link(
                        "set",
                        index=routes.link_lookup(ifname=port)[0],
                        master=routes.link_lookup(ifname="switch")[0],
                    )
                    _up(routes, port)
                with _network(init), IPRoute() as routes:
                    _up(routes, "lo")
                    _up(routes, "eth0", address)
        except NetlinkError as error:
            pytest.skip(
                "machines are joined by veth pairs and a bridge, which this system does not "
                f"make: {error}"
            )
        return Node(name, address, init)


@contextmanager
def ray_cluster(storage: Path, work: Path) -> Iterator[Cluster]:
    """Return a cluster without nodes. Skip the test where namespaces are not allowed."""
    pytest.importorskip(
        "ray", reason="needs Ray, which `make test-all` installs (requirements/test-all.txt)"
    )
    if os.geteuid() != 0:
        pytest.skip("machines are network namespaces, which root alone makes")
    # Short, because names of sockets have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="hsx-ray-") as temporary, ExitStack() as stack:
        yield Cluster(stack, storage, work, Path(temporary))


@contextmanager
def _network(pid: int) -> Iterator[None]:
    """Use the machine's network namespace for new sockets of this thread."""
    with open("/proc/thread-self/ns/net") as own:
        netns.setns(f"/proc/{pid}/ns/net", flags=0)
        try:
            yield
        finally:
            netns.setns(own.fileno())


def _up(routes: IPRoute, name: str, address: str | None = None) -> None:
    (index,) = routes.link_lookup(ifname=name)
    if address is not None:
        routes.addr("add", index=index, address=address, prefixlen=24)
    routes.link("set", index=index, state="up")
