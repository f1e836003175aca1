"""An engine or worker is killed at a random time: visible files are right, the next engine works.

`--engine-kills N` kills N of them in each directory instead of the number in KILLS.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import is_long
from harness import names_in, tokens
from oracle import Oracle, Reference, Served
from session import EngineError, EngineSession, Request

from vllm_ascend_hsx.protocol.names import (
    DATA_SUFFIX,
    ERROR_SUFFIX,
    LOCK_SUFFIX,
    MANIFEST,
    SHARDS_MARK,
    TAR,
    parse_shard_name,
    token_of_workspace,
)
from vllm_ascend_hsx.reader.load import HiddenStatesError, load
from vllm_ascend_hsx.reader.members import shards_of
from vllm_ascend_hsx.sinks.workspace import LOCK

KILLS = {"file": 4 if is_long() else 2, "shard": 2}
SHARD_BYTES = 1 << 26  # all requests of an engine: no shard is sealed when it is killed
ONE_WORKER = 2  # every second kill hits one worker of two
LONGEST_LIFE = 1.5  # seconds for which requests run
LATEST_COPY = 60.0  # seconds
LAYER_IDS = (4, 1, 2)
CHUNK = 32
AT_A_TIME = 6
BEGINNING = tokens(140, seed=9)  # half of the prompts begin with it; longer than a KV block
COPY = 8  # an engine dies during this copy of rows of BEGINNING


class Reign:
    """Engines that follow each other in one directory.

    Args:
        directory: directory of the engines, with their log.
        model: directory of the target, in float32.
        options: options of the connector.
        luck: draws the requests, and the time at which an engine dies.
    """

    def __init__(
        self, directory: Path, model: Path, options: dict[str, Any], luck: random.Random
    ) -> None:
        self._directory = directory
        self._model = model
        self._options = options
        self._luck = luck
        self._reference = Reference(model, 4, torch.float32)
        self.storage = directory / "hidden_states"
        self.visible: set[str] = set()
        self.counts: Counter[str] = Counter()

    def engine(self, workers: int = 1, *, dies_in_a_copy: bool = False) -> EngineSession:
        options = {
            "dtype": "float32",
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": AT_A_TIME,
            "tensor_parallel_size": workers,
        }
        instruments = {"die_in_a_copy": COPY} if dies_in_a_copy else {}
        return EngineSession(
            self._directory,
            self._model,
            layer_ids=LAYER_IDS,
            connector_options=self._options,
            instruments=instruments,
            **options,
        )

    def add(self, session: EngineSession) -> Request:
        length = self._luck.choice([1, CHUNK, self._luck.randint(1, 300)])
        sampling = {"max_tokens": self._luck.randint(1, 12)}
        if self._luck.random() < 0.4:
            sampling["extra_args"] = {"kv_transfer_params": {"include_output_tokens": True}}
        prompt = tokens(length, seed=self._luck.randrange(3))
        return session.add([*BEGINNING, *prompt] if self._luck.random() < 0.5 else prompt, sampling)

    def serve_until_killed(
        self, session: EngineSession, *, one_worker: bool, in_a_copy: bool
    ) -> Callable[[], object]:
        """Add and abort requests until SIGKILL arrives, or the engine dies in a copy.

        Returns:
            A call that waits for the consumer of an incomplete file, and returns the result.
        """
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            if one_worker:
                os.kill(self._luck.choice(holders_of_locks(self.storage)), signal.SIGKILL)
            else:
                os.killpg(session.pid, signal.SIGKILL)

        endless = session.add(
            tokens(40),
            {
                "max_tokens": 400,
                "extra_args": {"kv_transfer_params": {"include_output_tokens": True}},
            },
        )
        (path,) = session.paths(endless)
        while not path.with_name(path.name + LOCK_SUFFIX).exists():
            session.step()
        done = session.add(BEGINNING, {"max_tokens": 1})
        while not done.finished:
            session.step()
        load(*session.paths(done), 60)  # however soon it is killed, it has published something
        assert done.reused == 0, "an earlier engine has these rows, not this one"
        pool = ThreadPoolExecutor(1)
        waiting = pool.submit(_outcome, path)
        pool.shutdown(wait=False)
        killer = threading.Timer(
            LATEST_COPY if in_a_copy else self._luck.random() * LONGEST_LIFE, kill
        )
        killer.start()
        try:
            while True:
                running = [
                    request for request in session.requests.values() if request.ended is None
                ]
                if len(running) < AT_A_TIME:
                    self.add(session)
                elif self._luck.random() < 0.05:
                    session.abort(self._luck.choice(running[1:]))
                session.step(self._luck.randint(1, 3))
        except (AssertionError, EngineError):
            assert killed.is_set() != in_a_copy, session.log[-4000:]
            assert not in_a_copy or f"killed in copy {COPY}\n" in session.log, session.log[-4000:]
        finally:
            killer.cancel()
        self.counts.update(kills=1, of_one_worker=one_worker, in_a_copy=in_a_copy)
        return waiting.result

    def check(self, session: EngineSession, *, killed: bool = True) -> None:
        """Check that every visible file is complete and right."""
        oracle = Oracle(self._reference, LAYER_IDS)
        served = [
            Served(each.id, tuple(each.sequence()), each.begun, each.ended)
            for each in session.requests.values()
        ]
        problems = []
        for request in session.requests.values():
            (path,) = session.paths(request)
            if request.finished:
                self.counts["reused"] += request.reused > 0
            outcome = _outcome(path)
            self.counts[type(outcome).__name__] += 1
            if isinstance(outcome, Exception):
                assert killed or request.aborted, outcome
                continue
            own = tuple(outcome.token_ids.tolist())
            known = tuple(request.sequence())
            assert own[: len(known)] == known[: len(own)]
            wants_output = "extra_args" in request.sampling
            if not wants_output:
                assert len(own) == len(request.prompt)
            problems.append(
                oracle.verdict(
                    path,
                    Served(request.id, (*own, 0), request.begun, None),
                    len(own),
                    len(request.prompt),
                    served,
                )
            )
        assert not any(problems), "\n".join(filter(None, problems))
        names = names_in(self.storage)
        mine = {
            path.name for request in session.requests.values() for path in session.paths(request)
        }
        self.counts["hidden"] += sum(name.startswith(".") for name in names)
        visible = self.seen()
        assert {name.removesuffix(ERROR_SUFFIX) for name in visible - self.visible} <= mine, (
            "files of no request"
        )
        assert self.visible <= visible, "files of earlier engines are gone"
        self.visible = visible

    def seen(self) -> set[str]:
        """Return the names that consumers can open, as a file or in a shard, and error files."""
        files = {
            name for name in names_in(self.storage) if name.endswith((DATA_SUFFIX, ERROR_SUFFIX))
        }
        members = set(shards_of(self.storage).members())
        assert not files & members
        return files | members

    def check_start(self, workers: int) -> None:
        """Check that a start removes leftovers of dead engines, and keeps files for consumers."""
        names = {
            name
            for name in names_in(self.storage)
            if parse_shard_name(name) is None and name != SHARDS_MARK
        }
        assert self.seen() == self.visible
        for name in names - self.visible:
            data = name.removesuffix(LOCK_SUFFIX)
            assert data != name, f"{name} is left"
            assert {data, data + ERROR_SUFFIX} & self.visible, f"{name} is left"
        assert members_of_sealed_tars(self.storage) == set(shards_of(self.storage).members())
        assert (
            len([name for name in os.listdir(self.storage) if token_of_workspace(name)]) == workers
        )


def _outcome(path: Path) -> object:
    """Return the outcome for a waiting consumer; never a TimeoutError."""
    try:
        return load(path, 60, verify=True)
    except (HiddenStatesError, FileNotFoundError) as error:
        return error


def members_of_sealed_tars(storage: Path) -> set[str]:
    """Return the names that tarfile sees; each shard must be sealed."""
    found = []
    for path in storage.glob(f"hsx-*{TAR}"):
        assert path.with_suffix(MANIFEST).exists(), f"{path.name} is not sealed"
        with tarfile.open(path) as archive:
            found += [member.name for member in archive]
    assert len(found) == len(set(found))
    return set(found)


def holders_of_locks(storage: Path) -> list[int]:
    """Return the processes that hold a workspace's lock."""
    found = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or belongs to another user
            for fd in os.listdir(f"/proc/{process}/fd"):
                with suppress(FileNotFoundError):  # it has been closed
                    target = Path(os.readlink(f"/proc/{process}/fd/{fd}"))
                    if target.name == LOCK and target.parent.parent == storage:
                        found.add(int(process))
    return sorted(found)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"sink": "file"}, marks=pytest.mark.long),
        {"sink": "shard", "shard_bytes": SHARD_BYTES},
    ],
    ids=["files", "shards"],
)
def test_files_of_a_killed_engine_are_right_and_the_next_engine_works(
    float32_qwen3: Path, tmp_path: Path, request: pytest.FixtureRequest, options: dict[str, Any]
) -> None:
    asked = request.config.getoption("engine_kills")
    kills = KILLS[options["sink"]] if asked is None else asked
    reign = Reign(tmp_path, float32_qwen3, options, random.Random(asked or 0))
    began = time.monotonic()
    for number in range(kills):
        workers = 2 if number % ONE_WORKER == ONE_WORKER - 1 else 1
        in_a_copy = options["sink"] == "file" and not number
        session = reign.engine(workers, dies_in_a_copy=in_a_copy)
        with session:
            reign.check_start(workers)
            outcome_of_waiting = reign.serve_until_killed(
                session, one_worker=workers > 1, in_a_copy=in_a_copy
            )
        assert isinstance(outcome_of_waiting(), HiddenStatesError)
        reign.check(session)
    with reign.engine() as session:
        reign.check_start(1)
        for _ in range(12):
            reign.add(session)
        session.settle()
        reign.check(session, killed=False)
    assert not [name for name in os.listdir(reign.storage) if name.startswith(".")]
    print(f"{time.monotonic() - began:.0f} s", dict(reign.counts))
    assert reign.counts["kills"] == kills
    assert reign.counts["reused"] > 0
    assert reign.counts["hidden"] > 0, "no file was under way when an engine was killed"
    assert reign.counts["HiddenStates"] > 2 * kills
    sealed_by = Counter(
        json.loads(path.read_text())["sealed_by"] for path in reign.storage.glob(f"hsx-*{MANIFEST}")
    )
    assert set(sealed_by) == (set() if options["sink"] == "file" else {"server", "recovery"})
