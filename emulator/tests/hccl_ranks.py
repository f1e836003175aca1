"""Processes that form an hccl group and run the functions that a test sends to each rank."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Scenario = Callable[[int, int], Any]


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401 - registers torch.npu

    from ascend_npu_emulator.native import core

    torch.set_num_threads(1)
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", store=dist.FileStore(store, size), rank=rank, world_size=size)
    while (task := pipe.recv()) is not None:
        scenario, late = task
        torch.npu.synchronize()  # a failed scenario may leave queued work
        core.set_late(late)
        core.set_queue(False)  # a rank that waits for queued work raises the error
        try:
            answer = ("ok", scenario(rank, size))
            torch.npu.synchronize()
        except Exception as error:  # noqa: BLE001 - the test checks the error
            answer = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        pipe.send(answer)
    dist.destroy_process_group()


class Ranks:
    """`size` processes that form one hccl group. Rank r uses NPU r."""

    def __init__(self, size: int, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.size = size
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, size, str(directory / f"store{size}"), theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, scenario: Scenario, late: bool = False) -> list[Any]:
        """Return the result of each rank. Raise AssertionError with the traceback if one fails."""
        answers = self.outcomes(scenario, late)
        failures = [
            f"rank {rank}: {text}" for rank, (state, text) in enumerate(answers) if state == "error"
        ]
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]

    def outcomes(
        self, scenario: Scenario, late: bool = False, leaver: int | None = None
    ) -> list[tuple[str, Any]]:
        """Return ("ok", result) or ("error", text) per rank. Skip rank `leaver`, which exits."""
        for pipe in self._pipes:
            pipe.send((scenario, late))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if rank == leaver:
                continue
            # No timeout: the first scenario of a rank includes the import of torch.
            assert pipe in connection.wait([pipe, self._processes[rank].sentinel]), (
                f"rank {rank} has ended: {scenario}"
            )
            answers.append(pipe.recv())
        return answers

    def kill(self) -> None:
        """Kill processes that can no longer leave the group."""
        for process in self._processes:
            process.kill()
            process.join()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.terminate()
                process.join()
