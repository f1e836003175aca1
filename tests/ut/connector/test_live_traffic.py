"""A day of live traffic in small: a sample of the requests is extracted, within a budget of bytes.

Two data-parallel engines with real schedulers, workers and files serve 10,000 requests, of which
clients want nothing. A consumer reads the files of the sample, and acknowledges or removes them. At
night it sleeps. `hsx clean` runs now and then. At noon the server is restarted.
"""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_npu  # noqa: F401 - brings torch.npu
from scheduler_harness import make_request, make_scheduler, schedule

import vllm_ascend_hsx
from vllm_ascend_hsx.cli.main import main
from vllm_ascend_hsx.compat.engine import Share
from vllm_ascend_hsx.connector.budget import DirectoryBudget, StoredFiles
from vllm_ascend_hsx.connector.stats import HsxStats
from vllm_ascend_hsx.connector.storage_watch import StorageRules
from vllm_ascend_hsx.connector.worker import ExtractionWorker
from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.drafter.spans import Span
from vllm_ascend_hsx.drafter.staging import StagingCache
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.destination import InDirectory
from vllm_ascend_hsx.sinks.file import FileSink

REQUESTS = 10_000
RATE = 0.1
BUDGET = 64 << 20
KEPT = 24 << 20  # bytes that `hsx clean` keeps
CLEANED_EVERY = 100  # steps
ENGINES = 2
RUNNING, CHUNK = 12, 16
STEP_S = 0.05
FORMAT = RowFormat(layer_ids=(3, 1), hidden_size=1024, dtype="F32", model="tiny")
DEVICE = torch.device("npu:0")
# Parts of the day in which the consumer sleeps, by number of requests.
NIGHTS = ((0.1, 0.4), (0.6, 0.9))


@dataclass
class Chat:
    """A request of a client, and the progress of the engine."""

    request: Any
    max_tokens: int
    wants_output: bool
    done: int = 0

    @property
    def prompt(self) -> int:
        return len(self.request.prompt_token_ids)


def value(request_id: str) -> float:
    return float(sum(request_id.encode()) % 997 * 32)


class Engine:
    """A data-parallel rank: a minimal scheduler like vLLM's, and both sides of the connector."""

    def __init__(self, directory: Path, number: int, day: Day) -> None:
        self.day = day
        budget = DirectoryBudget(BUDGET, ENGINES, FORMAT, lambda: day.now)
        self.scheduler = make_scheduler(
            num_ranks=1,
            destination=InDirectory(directory),
            ring_bytes=8 << 20,
            row_bytes=FORMAT.row_bytes,
            extract_all=False,
            sample_rate=RATE,
            budget=budget,
        )
        self.staging = StagingCache(
            num_slots=2,
            slot_rows=RUNNING * CHUNK,
            num_layers=FORMAT.num_layers,
            hidden_size=FORMAT.hidden_size,
            dtype=torch.float32,
            device=DEVICE,
            layer_order=(1, 0),
        )
        self.worker = ExtractionWorker(
            rank=0,
            staging=self.staging,
            ring=PinnedRing(8 << 20, FORMAT.row_shape, torch.float32),
            sink=FileSink(directory, FORMAT),
            num_writers=lambda: 2,
            storage=StorageRules(),
            files=StoredFiles.found_in(str(directory), Share(number, ENGINES)),
        )
        self.waiting: deque[Chat] = deque()
        self.running: dict[str, Chat] = {}
        self.stats = HsxStats(data={})

    def add(self, chat: Chat) -> None:
        before = dict(vars(chat.request))
        self.scheduler.on_new_request(chat.request)
        if (
            not self.scheduler.extracts(chat.request.request_id)
            and chat.request.request_id not in self.scheduler._refused
        ):
            assert vars(chat.request) == before, "a request that is not sampled is left alone"
            self.day.ordinary.add(chat.request.request_id)
        self.waiting.append(chat)

    def step(self) -> None:
        starts = []
        for chat in list(self.waiting):
            if len(self.running) == RUNNING:
                break
            if not self.scheduler.must_wait(chat.request):
                self.waiting.remove(chat)
                self.running[chat.request.request_id] = chat
                starts.append(chat.request)
        metadata = schedule(self.scheduler, *starts)
        assert not self.day.ordinary & {start.request_id for start in metadata.started}
        self.worker.start_step(metadata)
        self.stage()
        self.worker.save()
        report = self.worker.report()
        if report is not None:
            self.scheduler.on_worker_report(report)
            assert not set(report.outcomes.values()) - {None}
        for stats in (self.worker.take_stats(), self.scheduler.take_stats()):
            if stats is not None:
                self.stats = self.stats.aggregate(stats)

    def stage(self) -> None:
        spans, rows, at = [], np.empty((RUNNING * CHUNK, FORMAT.hidden_size), np.float32), 0
        for request_id, chat in list(self.running.items()):
            count = min(CHUNK, chat.prompt - chat.done) if chat.done < chat.prompt else 1
            if (wanted := self.staging.wanted.get(request_id, 0)) > chat.done:
                rows[at : at + count] = (
                    value(request_id) + np.arange(chat.done, chat.done + count)[:, None]
                )
                spans.append(Span(request_id, chat.done, min(count, wanted - chat.done), at))
                at += count
            chat.done += count
            if chat.done >= chat.prompt + chat.max_tokens - 1:
                del self.running[request_id]
                self.end(chat)
        if spans:
            first = torch.from_numpy(rows[:at].copy()).to(DEVICE)
            self.staging.write([first, first + 0.5], spans)

    def end(self, chat: Chat) -> None:
        chat.request.output_token_ids = list(range(chat.max_tokens))
        answer = self.scheduler.on_finished(chat.request)
        self.day.answered(chat, answer)

    def close(self) -> None:
        self.worker.close()


@dataclass
class Day:
    """The clients, the server, a consumer and a cleaner."""

    directory: Path
    luck: random.Random = field(default_factory=lambda: random.Random(7))
    now: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    ordinary: set[str] = field(default_factory=set)
    answers: list[tuple[Path, Chat]] = field(default_factory=list)
    most: int = 0

    def __post_init__(self) -> None:
        self.engines: list[Engine] = []
        self.sent = 0
        self.keys: dict[str, set[bool]] = {}
        self.stats = HsxStats(data={})

    def run(self, requests: int) -> None:
        self.start()
        steps, noon = 0, requests // 2
        while self.sent < requests or any(
            engine.waiting or engine.running for engine in self.engines
        ):
            if noon and self.sent >= noon:
                self.restart()
                noon = 0
            for _ in range(min(self.luck.randint(0, 12), requests - self.sent)):
                self.send()
            for engine in self.engines:
                engine.step()
                self.look()
            steps, self.now = steps + 1, self.now + STEP_S
            awake = not any(first <= self.sent / requests < last for first, last in NIGHTS)
            while awake and len(self.answers) > 20:
                self.consume()
            if steps % CLEANED_EVERY == 0:
                assert main(["clean", str(self.directory), "--keep-bytes", str(KEPT)]) == 0
        self.stop()
        while self.answers:
            self.consume()

    def start(self) -> None:
        self.engines = [Engine(self.directory, number, self) for number in range(ENGINES)]

    def stop(self) -> None:
        for engine in self.engines:
            engine.step()  # the ends of the last requests
            engine.close()
            for stats in (engine.stats, engine.worker.take_stats()):
                self.stats = self.stats if stats is None else self.stats.aggregate(stats)

    def restart(self) -> None:
        while any(engine.waiting or engine.running for engine in self.engines):
            for engine in self.engines:
                engine.step()
            self.now += STEP_S
        self.stop()
        self.start()

    def send(self) -> None:
        self.sent += 1
        wants_output = self.luck.random() < 0.02
        max_tokens = self.luck.randint(1, 6)
        params: Any = (
            {"include_output_tokens": True, "hidden_states": True} if wants_output else None
        )
        if self.luck.random() < 0.3:
            params = {**(params or {}), "sample_key": f"user {self.luck.randint(0, 400)}"}
        request_id = f"cmpl-{self.sent:x}-0-{self.luck.getrandbits(32):08x}"
        request = make_request(
            request_id, self.luck.randint(2, 60), kv_transfer_params=params, max_tokens=max_tokens
        )
        self.luck.choice(self.engines).add(Chat(request, max_tokens, wants_output))

    def answered(self, chat: Chat, answer: dict[str, Any] | None) -> None:
        request_id = chat.request.request_id
        if request_id in self.ordinary:
            assert answer is None
            assert chat.request.skip_reading_prefix_cache is False
            outcome = "ordinary"
        elif "hidden_states_error" in answer:
            assert answer.keys() == {"hidden_states_error"}
            assert answer["hidden_states_error"].startswith(
                "the storage directory has no room for a file of up to "
            )
            assert chat.request.skip_reading_prefix_cache is False
            outcome = "skipped"
        else:
            self.answers.append((Path(answer["hidden_states_path"]), chat))
            outcome = "extracted"
        self.counts[outcome] += 1
        key = (chat.request.kv_transfer_params or {}).get("sample_key")
        if key is not None and not chat.wants_output:
            self.keys.setdefault(key, set()).add(outcome == "ordinary")

    def consume(self) -> None:
        """Compare a file with the expected rows, then acknowledge or remove it."""
        path, chat = self.answers.pop(0)
        states = vllm_ascend_hsx.load(path, verify=True)
        tokens = chat.prompt + (chat.max_tokens - 1 if chat.wants_output else 0)
        expected = (value(chat.request.request_id) + torch.arange(tokens))[:, None].expand(
            -1, FORMAT.hidden_size
        )
        # Layer ids (3, 1): the first layer of a row is the second that the target collects.
        assert torch.equal(states.hidden_states[:, 1], expected)
        assert torch.equal(states.hidden_states[:, 0], expected + 0.5)
        assert len(states.token_ids) == tokens
        if self.luck.random() < 0.9:
            vllm_ascend_hsx.acknowledge(path)
        else:
            vllm_ascend_hsx.remove(path)
        self.counts["right"] += 1

    def look(self) -> None:
        """Compare the bytes of all files, including hidden files, with the budget."""
        used = sum(size for size in dict(_files(self.directory)).values())
        self.most = max(self.most, used)
        assert used <= BUDGET


def _files(directory: Path) -> Iterator[tuple[int, int]]:
    """Yield inode and bytes of each file with rows. A file may appear twice while it is renamed."""
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.is_dir():
                    yield from _files(Path(entry.path))
                elif ".safetensors" in entry.name and not entry.name.endswith(
                    (".lock", ".acknowledged", ".new")
                ):
                    status = entry.stat()
                    yield status.st_ino, status.st_size


@pytest.mark.timeout(300)
def test_day_of_live_traffic_stays_within_the_budget_and_sampled_files_are_right(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "storage"
    day = Day(directory)
    day.run(REQUESTS)
    counts = day.counts
    print(f"{dict(counts)}, at most {day.most} bytes of {BUDGET}")
    assert sum(counts[outcome] for outcome in ("ordinary", "skipped", "extracted")) == REQUESTS
    assert abs(counts["ordinary"] / REQUESTS - 0.98 * (1 - RATE)) < 0.02
    assert counts["right"] == counts["extracted"] > REQUESTS // 20
    assert counts["skipped"] > REQUESTS // 100, "the budget was never reached"
    assert day.most > 0.9 * BUDGET
    assert all(len(outcomes) == 1 for outcomes in day.keys.values())
    # Metrics have nothing of ordinary requests.
    assert day.stats.counter("published") == counts["extracted"]
    assert day.stats.failures == {"directory_full": counts["skipped"]}
    names = {name.partition(".")[0] for name in os.listdir(directory)}
    assert not names & day.ordinary
