"""Kill sinks and check the directory afterwards: `crash_harness.py run|sweep DIRECTORY JSON`.

test_crash.py starts this program, because forks of it are cheap. JSON has the arguments of Arena
and of the method.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from crash_mutations import MUTATIONS, OF_SHARDS
from crash_requests import SMALL, Request, has_direct, request_of
from crash_server import SHARD, Phases, Reader, Server, forked, log_in_memory
from crash_states import EMPTY, WAITING, State, replay
from sink_harness import dead_workspace, is_free, lines_of, walked

from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX, LOCK_SUFFIX, token_of_workspace
from vllm_ascend_hsx.protocol.shard_index import Member
from vllm_ascend_hsx.reader.shard_check import shard_problems
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink

NAMES = 6  # of files that a server writes repeatedly
CONTESTED = ("both-0.safetensors", "both-1.safetensors")
PATIENCE = 30.0
LONGEST_LIFE = 600  # system calls


@dataclass
class Life:
    """A forked server, and the number of system calls after which it dies."""

    number: int
    slot: int
    pid: int
    log_fd: int
    phases: Phases
    kills_itself: bool
    dies_after: int
    events: list[list[str]] = field(default_factory=list)


class Arena:
    """Servers that run and are killed in one directory.

    Args:
        directory: directory of the servers.
        seed: seed of all random choices.
        together: number of servers at a time. Checks are strictest for a single server.
        mutation: a mistake of crash_mutations, made in each server.
        shards: whether servers write shards instead of files.
    """

    def __init__(
        self,
        directory: Path,
        *,
        seed: int = 0,
        together: int = 1,
        mutation: str = "",
        shards: bool = False,
    ) -> None:
        self._shards = shards
        self._directory = directory
        self._together = together
        self._mutation = mutation
        self._luck = random.Random(seed)
        self._number = seed * 1_000_000
        self._direct = has_direct(directory)
        self._names = [
            [f"s{slot}-{index}.safetensors" for index in range(NAMES)] for slot in range(together)
        ]
        self._states = {name: EMPTY for names in self._names for name in names}
        self._looked_at: set[str] = set()
        self.problems: list[str] = []
        self._counts: Counter[str] = Counter()
        self._phases: Counter[str] = Counter()
        self._shared = mmap.mmap(-1, Reader.SIZE)

    def run(
        self, kills: int, wanted: Mapping[str, int] = MappingProxyType({})
    ) -> dict[str, object]:
        """Kill servers; return counts of events, "phases" (of killed threads) and "problems".

        The progress of a server before a random kill depends on the load of the machine. The run
        therefore continues until each event has happened as often as `wanted`, with at most three
        times `kills` kills.
        """

        def goes_on() -> bool:
            done = self._counts["kills"]
            missing = any(self._counts[event] < number for event, number in wanted.items())
            return done < kills or (done < 3 * kills and missing)

        reader, reader_log = self._fork_reader()
        try:
            lives = [self._fork_next(slot) for slot in range(self._together)]
            while goes_on() and not self.problems:
                life = self._next(lives)
                self._end(life)
                if not self.problems:
                    self._clean(life)
                self._consume(life.slot)
                lives[life.slot] = self._fork_next(life.slot)
            for life in lives:
                self._end(life)
        finally:  # a running reader would keep the pipes of a failed harness open
            self._shared[Reader.STOP] = 1
        self._wait_for_child(reader, "the reader")
        self.problems += os.pread(reader_log, 1 << 20, 0).decode().splitlines()
        self._start_and_stop()
        self._check_shards(dead=True)
        self.problems += [
            f"{path.name}: {problem}" for path, problem in shard_problems(self._directory)
        ]
        if left := [name for name in os.listdir(self._directory) if name.startswith(".")]:
            self.problems.append(f"hidden files are left when all servers are dead: {left}")
        look = Reader(self._directory, [], self._direct, self._shared)
        self._counts.update(waits=look.count(Reader.WAITS), seen_meanwhile=look.count(Reader.SEEN))
        return self._result()

    def sweep(
        self, number: int, ends: Sequence[tuple[int, str]], step: int = 1
    ) -> dict[str, object]:
        """Kill a server at its first system call, then `step` later, until one has stopped.

        Each server starts among orphans and serves requests one by one. `ends` has the number of
        the name and the end of each request. Returns the same as `run`.
        """
        names = self._names[0]
        request_ids = [self._find(number, names[index], end) for index, end in ends]
        kill_at = itertools.count(1, step)
        while not self._counts["stopped"] and not self.problems:
            for name in os.listdir(self._directory):
                (self._directory / name).unlink()
            self._states = dict.fromkeys(self._states, EMPTY)
            dead_workspace(self._directory)
            (self._directory / f"{names[0]}{LOCK_SUFFIX}").touch()
            self._states[names[0]] = WAITING
            life = self._fork(number, 0, next(kill_at), True, request_ids)
            self._end(life)
            if not self.problems:
                self._clean(life)
        return self._result()

    def _find(self, number: int, name: str, end: str) -> str:
        """Return the id of a request with some tokens and this end."""
        ids = (f"{number}.{serial}.{name}" for serial in itertools.count())
        return next(
            each
            for each in ids
            if (request := Request.of(each, self._direct)).end == end and request.tokens > 3
        )

    def _result(self) -> dict[str, object]:
        return {**self._counts, "phases": self._phases, "problems": self.problems[:20]}

    # Processes

    def _fork_next(self, slot: int) -> Life:
        """A server with a unique number."""
        self._number += 1
        return self._fork(
            self._number,
            slot,
            self._luck.randint(1, self._luck.choice([60, LONGEST_LIFE])),
            self._luck.random() < 0.5,
        )

    def _fork(
        self,
        number: int,
        slot: int,
        dies_after: int,
        kills_itself: bool,
        request_ids: Sequence[str] = (),
    ) -> Life:
        log_fd = log_in_memory()
        phases = Phases()

        def live() -> None:
            if self._mutation:
                (MUTATIONS | OF_SHARDS)[self._mutation]()
            contested = CONTESTED if self._together > 1 else ()
            kill_at = dies_after if kills_itself else 0
            server = Server(
                self._directory,
                number,
                self._names[slot],
                contested,
                self._direct,
                log_fd,
                phases,
                kill_at,
                self._shards,
            )
            try:
                if request_ids:
                    server.live_in_order(request_ids)
                else:
                    server.live()
            except BaseException as error:  # noqa: BLE001 - the parent must report it
                os.write(log_fd, f"error\t{error!r}\n".encode())

        return Life(number, slot, forked(live), log_fd, phases, kills_itself, dies_after)

    def _fork_reader(self) -> tuple[int, int]:
        log_fd = log_in_memory()
        names = [*(name for names in self._names for name in names), *CONTESTED]
        return forked(
            lambda: Reader(self._directory, names, self._direct, self._shared).run(log_fd)
        ), log_fd

    def _next(self, lives: list[Life]) -> Life:
        """Return the first server that is due; the other servers continue."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for life in lives:
                if not life.kills_itself and life.phases.calls >= life.dies_after:
                    return life
                if os.waitid(os.P_PID, life.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    return life
            time.sleep(self._luck.random() * 0.0003)  # at any instant
        self.problems.append("no server gets on")
        return lives[0]

    def _end(self, life: Life) -> None:
        """Kill the server, unless it kills itself, and check the directory."""
        if not life.kills_itself:
            os.kill(life.pid, signal.SIGKILL)
        waited = bool(self._shared[Reader.WAITING])
        status = self._wait_for_child(life.pid, f"server {life.number}")
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        self._counts.update(
            kills=killed, by_itself=killed and life.kills_itself, stopped=not killed
        )
        if killed:
            self._phases.update(life.phases.now())
        if self._together == 1 and waited:
            self._counts["let_go"] += self._until(
                lambda: not self._shared[Reader.WAITING],
                "a reader sleeps on a lock of a dead server",
            )
        log = os.pread(life.log_fd, os.fstat(life.log_fd).st_size, 0).decode()
        os.close(life.log_fd)
        life.events = [line.split("\t") for line in log.splitlines()]
        self._counts.update(event for event, _ in life.events)
        self._check(life)

    def _wait_for_child(self, pid: int, who: str) -> int:
        end = os.pidfd_open(pid)
        try:
            if not select.select([end], [], [], PATIENCE)[0]:
                os.kill(pid, signal.SIGKILL)
                self.problems.append(f"{who} hangs")
        finally:
            os.close(end)
        return os.waitpid(pid, 0)[1]

    def _until(self, reached: Callable[[], bool], problem: str) -> bool:
        """Return whether the goal was reached without problems."""
        deadline = time.monotonic() + PATIENCE
        before = len(self.problems)
        while not reached() and len(self.problems) == before:
            if time.monotonic() > deadline:
                self.problems.append(problem)
            time.sleep(0.0005)
        return len(self.problems) == before

    # Invariants

    def _check(self, life: Life) -> None:
        """Check the names of a dead server, and all contested names."""
        names = self._names[life.slot]
        allowed = {name: {self._states[name]} for name in names}
        for states in allowed.values():
            if WAITING in states:
                states.add(EMPTY)  # it may have cleaned up itself
        replay(life.events, allowed, self.problems, keeps_locks=not self._shards)
        for name in names:
            state = self._look(name)
            self._states[name] = state
            if self._together > 1 and WAITING in allowed[name]:
                allowed[name].add(EMPTY)  # another server has cleaned up
            if state not in allowed[name]:
                self.problems.append(
                    f"{name}: {state}, expected {allowed[name]} after {life.events[-20:]}"
                )
            lock = self._directory / f"{name}{LOCK_SUFFIX}"
            self._until(lambda: is_free(lock), f"{lock.name} is held after the death of its server")  # noqa: B023
        for name in CONTESTED if self._together > 1 else ():
            self._read(name)

    def _look(self, name: str) -> State:
        data = self._read(name)
        error = self._read_error(name)
        lock = (self._directory / f"{name}{LOCK_SUFFIX}").exists()
        if data and error:
            self.problems.append(f"{name}: data and error are there")
        return State("data" if data else "error" if error else "nothing", data or error, lock)

    def _read(self, name: str) -> str:
        """Return the id of the request whose rows are stored."""
        try:
            request_id = request_of(self._directory / name, self._direct).id
        except FileNotFoundError:
            return ""
        except Exception as error:  # noqa: BLE001 - any is a finding
            self.problems.append(f"{name}: {error!r}")
            return ""
        self._counts["files_checked"] += 1
        return request_id

    def _read_error(self, name: str) -> str:
        path = self._directory / f"{name}{ERROR_SUFFIX}"
        try:
            content = json.loads(path.read_bytes())
            assert content["reason"]
            request_id = str(content["request_id"])
        except FileNotFoundError:
            return ""
        except Exception as error:  # noqa: BLE001 - any is a finding
            self.problems.append(
                f"{path.name} cannot be understood: {type(error).__name__}: {error}"
            )
            return ""
        self._counts["errors_checked"] += 1
        return request_id

    def _clean(self, life: Life) -> None:
        """Start the next server, and check the leftovers."""
        token = next((what for event, what in life.events if event == "started"), None)
        expected = {name: self._states[name] for name in self._names[life.slot]}
        expected = {name: EMPTY if state == WAITING else state for name, state in expected.items()}
        if self._shards:  # a free lock beside rows is also left over
            expected = {
                name: state._replace(lock=state.kind == "error") for name, state in expected.items()
            }

        def is_clean() -> bool:
            self._start_and_stop()
            self._check_shards(dead=self._together == 1)
            names = os.listdir(self._directory)
            hidden = [name for name in names if name.startswith(".")]
            if self._together > 1:
                hidden = [name for name in hidden if token and token == token_of_workspace(name)]
            elif hidden:
                self.problems.append(f"hidden files are left: {hidden}")
            locks = [
                name
                for name, state in expected.items()
                if (f"{name}{LOCK_SUFFIX}" in names) != state.lock
            ]
            return not hidden and not locks

        # Repeated: a reader, or another server that cleans up, may hold a lock for a moment.
        if self._until(is_clean, f"after a start there is not {expected}"):
            self._states.update(expected)

    def _start_and_stop(self) -> None:
        (
            ShardSink(self._directory, SMALL, shard_bytes=SHARD)
            if self._shards
            else FileSink(self._directory, SMALL)
        ).close()

    def _check_shards(self, dead: bool) -> None:
        """Check that members are complete, shards are readable, and shards of the dead are sealed.

        Args:
            dead: whether all servers are dead.
        """
        if self._luck.random() < 0.1:  # reads all of them again
            self.problems += [
                f"{path.name}: {problem}" for path, problem in shard_problems(self._directory)
            ]
        unsealed = [
            path.name
            for path in self._directory.glob("hsx-*.tar")
            if not path.with_suffix(".json").exists()
        ]
        if dead and unsealed:
            self.problems.append(f"not sealed: {unsealed}")
        if not dead:
            return
        stems = {path.stem for path in self._directory.glob("hsx-*.tar")} - self._looked_at
        self._looked_at |= stems
        for stem in sorted(stems):
            try:
                walked(self._directory, [stem])  # by tarfile, too
            except Exception as error:  # noqa: BLE001 - any is a finding
                self.problems.append(f"{stem} cannot be walked: {error}")
                continue
            self._counts["shards_checked"] += 1
            fd = os.open(self._directory / f"{stem}.tar", os.O_RDONLY)
            for line in lines_of(self._directory, stem):
                if isinstance(line, Member):
                    try:
                        Request.of(line.request_id, self._direct).check(fd, line.offset, line.size)
                    except Exception as error:  # noqa: BLE001 - any is a finding
                        self.problems.append(f"{stem}: {line}: {error!r}")
                    self._counts["members_checked"] += 1
            os.close(fd)

    def _consume(self, slot: int) -> None:
        """Remove some files, as consumers do."""
        for name in self._names[slot]:
            if self._luck.random() < 0.3 and not (
                self._shards and self._states[name].kind == "data"
            ):
                for suffix in (LOCK_SUFFIX, ERROR_SUFFIX, ""):
                    (self._directory / f"{name}{suffix}").unlink(missing_ok=True)
                self._states[name] = EMPTY


if __name__ == "__main__":
    method, directory, arguments = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    own = {
        key: arguments.pop(key)
        for key in ("seed", "together", "mutation", "shards")
        if key in arguments
    }
    print(json.dumps(getattr(Arena(directory, **own), method)(**arguments)))
