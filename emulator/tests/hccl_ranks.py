"""A few processes, each a rank of an hccl group, that run functions sent to them."""

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
    import torch_npu  # noqa: F401 - brings torch.npu

    from ascend_npu_emulator.native import core

    torch.set_num_threads(1)
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", store=dist.FileStore(store, size), rank=rank, world_size=size)
    while (task := pipe.recv()) is not None:
        scenario, late = task
        torch.npu.synchronize()  # a scenario that failed may have left work behind
        core.set_late(late)
        core.set_queue(False)  # an error of queued work is raised where a rank waits for it
        try:
            answer = ("ok", scenario(rank, size))
            torch.npu.synchronize()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            answer = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        pipe.send(answer)
    dist.destroy_process_group()


class Ranks:
    """`size` processes with one hccl group over all of them; rank r uses NPU r."""

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
        """Return each rank's result. Raises AssertionError with the traceback of a failure."""
        answers = self.outcomes(scenario, late)
        failures = [
            f"rank {rank}: {text}" for rank, (state, text) in enumerate(answers) if state == "error"
        ]
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]

    def outcomes(
        self, scenario: Scenario, late: bool = False, leaver: int | None = None
    ) -> list[tuple[str, Any]]:
        """Return ("ok", result) or ("error", text) of each rank, but for one that ends itself."""
        for pipe in self._pipes:
            pipe.send((scenario, late))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if rank == leaver:
                continue
            # However long it takes: its first scenario includes the import of torch.
            assert pipe in connection.wait([pipe, self._processes[rank].sentinel]), (
                f"rank {rank} has ended: {scenario}"
            )
            answers.append(pipe.recv())
        return answers

    def kill(self) -> None:
        """End processes whose groups can no longer be left."""
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
