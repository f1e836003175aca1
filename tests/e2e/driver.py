"""Engines in processes of their own that do what they are told, step by step. Started by harness.EngineSession; not a test.

Usage: driver.py SOCKET_FD

Imports vLLM once and forks a process for each engine that is asked for on the socket: a message is the JSON of its environment, with three
descriptors (actions, answers, log), and is answered with the process id. No device is touched before the fork.

A forked process reads one JSON action per line, {"action": name, "args": [...], "kwargs": {...}}, the name being that of a public method
of Driver. It answers each with one line, {"result": ..., "error": traceback or null, "events": [...], "preemptions": [...]}, the last two
being what happened since the last answer. The pipes are its own, for vLLM prints to stdout.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in this process, so that a step is a call
    "VLLM_NO_USAGE_STATS": "1",  # a thread less, and nothing is sent anywhere
}


class Driver:
    """The engine, and one method per action. Everything that comes and goes is JSON."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.preemptions: list[dict[str, Any]] = []
        self.engine: Any = None
        self.arguments: dict[str, Any] = {}

    @property
    def core(self) -> Any:
        return self.engine.engine_core.engine_core

    # The engine

    def start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Build an engine from EngineArgs; returns what its KV cache is."""
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.arguments = arguments
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._record_preemptions()
        cache = self.core.scheduler.kv_cache_config
        return {
            "num_gpu_blocks": cache.num_blocks,
            "kv_groups": [sorted(group.layer_names) for group in cache.kv_cache_groups],
            "kv_bytes": sum(tensor.size for tensor in cache.kv_cache_tensors),
            "async_scheduling": self.core.async_scheduling,
            "hybrid_kv_cache_manager": not self.core.vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
            "mamba_cache_mode": self.core.vllm_config.cache_config.mamba_cache_mode,
        }

    def shutdown(self) -> None:
        if self.engine is not None:
            self.engine.engine_core.shutdown()
            self.engine = None
            gc.collect()

    def _record_preemptions(self) -> None:
        scheduler = self.core.scheduler
        preempt = scheduler._preempt_request

        def record(request: Any, timestamp: float) -> None:
            computed, prompt = request.num_computed_tokens, request.num_prompt_tokens
            self.preemptions.append(
                {"internal_id": request.request_id, "computed": computed, "phase": "prefill" if computed < prompt else "decode"}
            )
            preempt(request, timestamp)

        scheduler._preempt_request = record

    # Requests

    def add(
        self,
        request_id: str,
        token_ids: list[int],
        sampling: dict[str, Any],
        *,
        priority: int = 0,
        as_embeds: bool = False,
        lora: dict[str, Any] | None = None,
    ) -> str:
        """Add a request; returns vLLM's internal id, from which the file has its name. With n>1 the children's are `<index>_<that>`.

        Args:
            request_id: the client's id.
            token_ids: the prompt.
            sampling: SamplingParams; output_kind by its name, structured_outputs by its arguments. Greedy, and the end of text is ignored,
                unless it says otherwise.
            priority: with scheduling_policy="priority", lower is earlier.
            as_embeds: send the embeddings of the tokens instead of the tokens.
            lora: arguments of LoRARequest.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        options = {"temperature": 0.0, "ignore_eos": True, **sampling}
        if "output_kind" in options:
            options["output_kind"] = RequestOutputKind[options["output_kind"]]
        if "logit_bias" in options:  # JSON has no keys but strings
            options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
        if "structured_outputs" in options:
            options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
        prompt: Any = {"prompt_embeds": self._embeddings(token_ids)} if as_embeds else {"prompt_token_ids": token_ids}
        internal_id: str = self.engine.add_request(
            request_id,
            prompt,
            SamplingParams(**options),
            priority=priority,
            lora_request=LoRARequest(**lora) if lora else None,
        )
        return internal_id

    def _embeddings(self, token_ids: list[int]) -> Any:
        from safetensors import safe_open

        (weights,) = Path(self.arguments["model"]).glob("*.safetensors")
        with safe_open(weights, "pt") as tensors:
            return tensors.get_tensor("model.embed_tokens.weight")[token_ids]

    def abort(self, request_id: str) -> None:
        self.engine.abort_request([request_id])

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.step():
                self.events.append(
                    {
                        "id": output.request_id,
                        "finished": output.finished,
                        "num_cached_tokens": output.num_cached_tokens,
                        "kv_transfer_params": output.kv_transfer_params,
                        "outputs": [
                            {"index": each.index, "tokens": list(each.token_ids), "text": each.text, "stop_reason": each.stop_reason}
                            for each in output.outputs
                        ],
                    }
                )

    def drain(self) -> None:
        """Step until every request has been answered."""
        while self.engine.has_unfinished_requests():
            self.step()

    def settle(self) -> None:
        """After drain: finish_writes, and let the scheduler hear of it."""
        self.finish_writes()
        # What the engine does when a request has ended and nothing else is to be done: a step without tokens.
        empty = self.core.scheduler.schedule()
        assert empty.total_num_scheduled_tokens == 0
        self.core.scheduler.update_from_output(empty, self.core.model_executor.execute_model(empty))

    def finish_writes(self) -> None:
        """After drain: step until the workers know that the requests have ended, and wait until every file is decided. Needs our connector,
        and its worker in this process."""
        while self.core.scheduler.has_requests() or self.core.batch_queue:
            self.step()
        self.catch_up()

    def catch_up(self) -> None:
        """Wait until all rows that were computed so far are written, or their files have failed. Needs what finish_writes needs."""
        worker = self._halves()["worker"]
        copied = threading.Event()
        worker._copier.then(copied.set)
        copied.wait()
        worker._writers.drain()

    def hold_writes(self) -> None:
        """Have storage stand still until `release_writes`."""
        self._released = threading.Event()
        writers = self._halves()["worker"]._writers
        for _ in range(writers.num_threads):
            writers.submit(self._wait_for_release)

    def _wait_for_release(self) -> tuple[()]:
        self._released.wait()
        return ()

    def release_writes(self) -> None:
        self._released.set()

    def release_writes_when_a_step_waits(self) -> None:
        """Do so as soon as the main thread waits for a staging slot."""
        watch, released = self._halves()["worker"]._watch, self._released
        wait = watch.wait

        def release_and_wait(*args: Any) -> bool:
            released.set()
            return bool(wait(*args))

        watch.wait = release_and_wait

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        return bool(self.engine.reset_prefix_cache(reset_running_requests=reset_running_requests))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.engine.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.engine.wake_up(tags)

    def inject(self, rules: list[dict[str, str]]) -> list[str]:
        """Have these system calls of the sink fail from now on, and no others; returns those that have since the last call."""
        import faulty_storage

        faulty_storage.install()
        faulty_storage.rules[:] = rules
        hits, faulty_storage.hits[:] = list(faulty_storage.hits), []
        return hits

    def log_stats(self) -> None:
        self.engine.do_log_stats()

    # What is going on inside

    def record_all_stats(self) -> None:
        """Record stats of steps without outputs too, as the API server does (v1/engine/async_llm.py:697 in 0.23.0); LLMEngine loses them
        (v1/engine/llm_engine.py:316)."""
        client, loggers = self.engine.engine_core, self.engine.logger_manager
        get_output = client.get_output

        def get_and_record() -> Any:
            outputs = get_output()
            if outputs.scheduler_stats is not None and not outputs.outputs:
                loggers.record(scheduler_stats=outputs.scheduler_stats, iteration_stats=None)
            return outputs

        client.get_output = get_and_record

    def metrics(self) -> str:
        """What GET /metrics would answer."""
        from prometheus_client import REGISTRY, generate_latest

        return generate_latest(REGISTRY).decode()

    def progress(self) -> dict[str, dict[str, Any]]:
        """Every request that the scheduler knows, by internal id."""
        return {
            request_id: {
                "status": request.status.name,
                "computed": request.num_computed_tokens,
                "prompt": request.num_prompt_tokens,
                "outputs": request.num_output_tokens,
            }
            for request_id, request in self.core.scheduler.requests.items()
        }

    def stats(self) -> dict[str, Any]:
        """What the process holds: to be the same whenever nothing is under way.

        Returns:
            fds: what the open descriptors are, sorted. threads: names, sorted. device_bytes: allocated on the NPU. scheduler, worker: how
            much each container of the connector's halves holds. busy: pinned rows that are not free, staging slots whose copy is
            not issued, sink files that are open.
        """
        import torch

        found: dict[str, Any] = {
            "fds": sorted(filter(None, map(_descriptor, os.listdir("/proc/self/fd")))),
            # vLLM starts a pool when it first compiles a grammar, and keeps it.
            "threads": sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith("ThreadPoolExecutor")),
            "device_bytes": torch.npu.memory_allocated(),
        }
        if self.engine is None:
            return found
        halves = self._halves()
        worker = halves["worker"]
        ring = worker._copier._ring
        found["busy"] = {
            "pinned_rows": ring.num_rows - ring.free_rows,
            "staging_slots": sum(not slot.issued.is_set() for slot in worker._staging.slots),
            "sink_files": len(worker._sink._files),
        }
        for name, half in halves.items():
            found[name] = {key: len(value) for key, value in vars(half).items() if isinstance(value, dict | set)}
            found[name] |= {key: sum(value) for key, value in vars(half).items() if isinstance(value, list) and _numbers(value)}
        found["wanted"] = len(worker._staging.wanted)
        return found

    def footprint(self) -> dict[str, int]:
        """What grows if something is kept: bytes of the process, objects of our classes, and locks of files that are held."""
        gc.collect()
        ours = sum(type(each).__module__.startswith("vllm_ascend_hsx.") for each in gc.get_objects())
        locks = sum(f" {os.getpid()} " in line for line in Path("/proc/locks").read_text().splitlines())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"bytes": pages * os.sysconf("SC_PAGE_SIZE"), "objects": ours, "locks": locks}

    def _halves(self) -> dict[str, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        scheduler, worker = self.core.scheduler.connector, get_kv_transfer_group()
        ours = [next(each for each in getattr(side, "_connectors", [side]) if hasattr(each, "_worker")) for side in (scheduler, worker)]
        return {"scheduler": ours[0]._scheduler, "worker": ours[1]._worker}

    def real_events(self) -> None:
        """Undo what vllm-ascend does when its runner is built: torch.cuda.Event is a placeholder then (model_runner_v1.py:5210)."""
        import torch

        torch.cuda.Event = torch.npu.Event


def _descriptor(number: str) -> str | None:
    """What a descriptor is, without numbers that differ from one to the next; None for the one that lists them."""
    try:
        target = os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:
        return None
    return target.partition(":[")[0]


def _numbers(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, int) for value in values)


def serve(driver: Driver, actions: Any, answers: Any) -> None:
    """Answer every action until there are no more."""
    for line in actions:
        action = json.loads(line)
        answer: dict[str, Any] = {"result": None, "error": None}
        try:
            answer["result"] = getattr(driver, action["action"])(*action.get("args", ()), **action.get("kwargs", {}))
        except BaseException:  # noqa: BLE001 - the test decides what the failure means
            answer["error"] = traceback.format_exc()
        answer["events"], driver.events = driver.events, []
        answer["preemptions"], driver.preemptions = driver.preemptions, []
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def run_engine(environ: dict[str, str], read_fd: int, write_fd: int, log_fd: int) -> None:
    """Be the process of one engine, in a session and process group of its own."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in (1, 2):
        os.dup2(log_fd, descriptor)
    os.close(log_fd)
    os.environ.clear()
    os.environ.update(environ, **ENVIRON)
    with os.fdopen(read_fd) as actions, os.fdopen(write_fd, "w") as answers:
        for pipe in (actions, answers):
            # Else the end of this process would not be seen while one of its workers lives.
            os.set_inheritable(pipe.fileno(), False)
            os.register_at_fork(after_in_child=pipe.close)
        serve(Driver(), actions, answers)
    # Threads that an instrument holds back would keep this process from ending.
    if instruments := sys.modules.get("hsx_test_instruments"):
        instruments.release_writers.set()


def main() -> None:
    os.environ.update(ENVIRON)
    # The modules that `vllm serve` has imported when it forks; what a worker imports, it imports itself.
    import vllm.v1.engine.llm_engine  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked processes here
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 3)
            if not message:
                return
            pid = os.fork()
            if not pid:
                requests.close()
                run_engine(json.loads(message), *descriptors)
                return
            for descriptor in descriptors:
                os.close(descriptor)
            requests.send(str(pid).encode())


if __name__ == "__main__":
    main()
