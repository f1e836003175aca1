"""Two machines for network tests: namespaces on this machine, connected only by a cable."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from pyroute2 import IPRoute, NetlinkError, netns

ROOT = Path(__file__).parents[1]
CABLE = "eth0"
ADDRESSES = ("10.0.0.1", "10.0.0.2")
# Shared memory, semaphores and host name are separate, too: the cable is the only connection.
_NAMESPACES = ("--net", "--ipc", "--uts", "--mount")
_BOOT = "mount -t tmpfs tmpfs /dev/shm && echo booted && exec sleep infinity"


class Machine:
    """One of the two machines.

    Args:
        pid: process on the machine.
        address: address at this end of the cable.
    """

    def __init__(self, pid: int, address: str) -> None:
        self.pid = pid
        self.address = address

    @contextmanager
    def network(self) -> Iterator[None]:
        """Create this thread's sockets on the machine."""
        with open("/proc/thread-self/ns/net") as own:
            netns.setns(f"/proc/{self.pid}/ns/net", flags=0)
            try:
                yield
            finally:
                netns.setns(own.fileno())

    def command(self, words: Sequence[str], directory: Path = ROOT) -> list[str]:
        """Return a command line that runs `words` in a directory on the machine."""
        return ["nsenter", f"--target={self.pid}", *_NAMESPACES, f"--wd={directory}", "--", *words]


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Create both machines. Skip the test if that is not possible."""
    with ExitStack() as stack:
        found = []
        for address in ADDRESSES:
            command = ["unshare", *_NAMESPACES, "sh", "-c", _BOOT]
            boot = stack.enter_context(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
            stack.callback(boot.kill)
            assert boot.stdout is not None
            said = boot.stdout.readline().strip()
            if said != "booted":
                pytest.skip(
                    f"machines are network namespaces, but this user must not create any: {said}"
                )
            found.append(Machine(boot.pid, address))
        first, second = found
        with first.network(), IPRoute() as routes:
            try:
                routes.link(
                    "add",
                    ifname=CABLE,
                    kind="veth",
                    peer={"ifname": CABLE, "net_ns_pid": second.pid},
                )
            except NetlinkError as error:
                pytest.skip(
                    "machines are joined by a veth pair, but this system cannot create "
                    f"one: {error}"
                )
        for machine in found:
            with machine.network(), IPRoute() as routes:
                for name in ("lo", CABLE):
                    (index,) = routes.link_lookup(ifname=name)
                    if name == CABLE:
                        routes.addr("add", index=index, address=machine.address, prefixlen=24)
                    routes.link("set", index=index, state="up")
        for machine, other in ((first, second), (second, first)):
            # vLLM takes the source address of the default route as the machine's address
            # (utils/network_utils.py:53).
            with machine.network(), IPRoute() as routes:
                routes.route("add", dst="default", gateway=other.address)
        yield first, second
