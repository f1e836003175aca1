"""An engine that executes actions step by step, in a process forked by fork_server.py."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import weights


class Driver:
    """The engine, with one method per action. Arguments and results are JSON."""

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
        """Build an engine from EngineArgs, and return facts about it."""
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm_ascend.ascend_config import get_ascend_config

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
            "ascend_config": {
                name: value
                for name, value in vars(get_ascend_config()).items()
                if isinstance(value, bool | int)
            },
        }

    def runner(self) -> str:
        """Return the module of the model runner. The worker is in this process."""
        return type(self.core.model_executor.driver_worker.worker.model_runner).__module__

    def shutdown(self) -> None:
        if self.engine is not None:
            self.engine.engine_core.shutdown()
            self.engine = None
            gc.collect()

    def _record_preemptions(self) -> None:
        scheduler = self.core.scheduler
        preempt = scheduler._preempt_request

        def record(request: Any, timestamp: float, **options: Any) -> None:
            computed, prompt = request.num_computed_tokens, request.num_prompt_tokens
            self.preemptions.append(
                {
                    "internal_id": request.request_id,
                    "computed": computed,
                    "phase": "prefill" if computed < prompt else "decode",
                }
            )
            preempt(request, timestamp, **options)

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
        pictures: list[list[int]] | None = None,
        clip: list[int] | None = None,
    ) -> str:
        """Add a request and return vLLM's internal id. It names the file (see Request).

        Args:
            request_id: the client's id.
            token_ids: the prompt.
            sampling: SamplingParams; output_kind by name, structured_outputs by arguments. Default:
                greedy, without an end of text.
            priority: with scheduling_policy="priority", lower is earlier.
            as_embeds: send the embeddings of the tokens instead of the tokens.
            lora: arguments of LoRARequest.
            pictures: arguments of tiny_vision.picture for each image of the prompt, in order.
            clip: arguments of tiny_vision.embedded_clip, for a video of the prompt.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        options = {"temperature": 0.0, "ignore_eos": True, **sampling}
        if "output_kind" in options:
            options["output_kind"] = RequestOutputKind[options["output_kind"]]
        if "logit_bias" in options:  # JSON keys are strings
            options["logit_bias"] = {
                int(token): bias for token, bias in options["logit_bias"].items()
            }
        if "structured_outputs" in options:
            options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
        prompt: Any = (
            {"prompt_embeds": self._embeddings(token_ids)}
            if as_embeds
            else {"prompt_token_ids": token_ids}
        )
        if pictures or clip:
            from tiny_vision import embedded_clip, picture

            data = {
                "image": [picture(*each) for each in pictures or ()],
                "video": embedded_clip(*clip) if clip else None,
            }
            prompt["multi_modal_data"] = {
                modality: items for modality, items in data.items() if items
            }
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
                            {
                                "index": each.index,
                                "tokens": list(each.token_ids),
                                "text": each.text,
                                "stop_reason": each.stop_reason,
                            }
                            for each in output.outputs
                        ],
                    }
                )

    def drain(self) -> None:
        """Step until every request has been answered."""
        while self.engine.has_unfinished_requests():
            self.step()

    def settle(self) -> None:
        """After drain: finish_writes, and notify the scheduler."""
        self.finish_writes()
        # An engine's step without tokens after the last request has ended.
        empty = self.core.scheduler.schedule()
        assert empty.total_num_scheduled_tokens == 0
        self.core.scheduler.update_from_output(empty, self.core.model_executor.execute_model(empty))

    def finish_writes(self) -> None:
        """After drain: step until workers know that requests have ended; wait for the files.

        Needs our connector, with the worker in this process.
        """
        while self.core.scheduler.has_requests() or self.core.batch_queue:
            self.step()
        self.catch_up()

    def catch_up(self) -> None:
        """Wait until all rows so far are written, or their files have failed."""
        worker = self._halves()["worker"]
        copied = threading.Event()
        worker._lander.then(worker._batches.flush_all)
        worker._lander.then(copied.set)
        copied.wait()
        worker._writers.wait()

    def hold_writes(self) -> None:
        """Block the writer threads until `release_writes`."""
        self._released = threading.Event()
        writers = self._halves()["worker"]._writers
        for _ in range(writers.num_threads):
            writers.submit(self._wait_for_release)

    def _wait_for_release(self) -> tuple[()]:
        self._released.wait()
        return ()

    def release_writes(self) -> None:
        self._released.set()

    def opens(self, action: str, **arguments: Any) -> Any:
        """Call a function of instruments/held_opens.py, and return the result."""
        import held_opens

        return getattr(held_opens, action)(self._halves()["worker"], **arguments)

    def release_writes_when_a_step_waits(self) -> None:
        """Release the writers when the main thread waits for a staging slot."""
        watch, released = self._halves()["worker"]._watch, self._released
        wait = watch.wait

        def release_and_wait(*args: Any) -> bool:
            released.set()
            return bool(wait(*args))

        watch.wait = release_and_wait

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        return bool(self.engine.reset_prefix_cache(reset_running_requests=reset_running_requests))

    def load_adapter(self, **lora: Any) -> None:
        """Load an adapter, as the API server does on request; `lora`: arguments of LoRARequest."""
        from vllm.lora.request import LoRARequest

        assert self.engine.add_lora(LoRARequest(**lora))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.engine.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.engine.wake_up(tags)

    def load_weights(self, path: str) -> None:
        """Load weights of another checkpoint in place, as RL frameworks do between rollouts."""
        self.engine.collective_rpc(weights.load_again, args=(path,))

    def reload_weights(self, path: str) -> None:
        """Do the same with vLLM's own call. vllm-ascend's worker has it since 0.30."""
        self.engine.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def name_weights(self, name: str, *, in_engine: bool = False) -> None:
        """Name the weights through a call of the workers, or since 0.30 through vLLM's method."""
        if in_engine:
            self.engine.set_weight_version(name)
        else:
            self.engine.collective_rpc("set_weight_version", args=(name,))

    def keep_weights(self) -> None:
        """Copy the weights to the host, in the layout of the kernels."""
        self.engine.collective_rpc(weights.keep)

    def put_weights_back(self) -> None:
        """Restore the weights copied by keep_weights."""
        self.engine.collective_rpc(weights.put_back)

    def inject(self, rules: list[dict[str, str]]) -> list[str]:
        """Make only these system calls of the sink fail; return the failures so far."""
        import faulty_storage

        faulty_storage.install()
        faulty_storage.rules[:] = rules
        hits, faulty_storage.hits[:] = list(faulty_storage.hits), []
        return hits

    def log_stats(self) -> None:
        self.engine.do_log_stats()

    # Internal state

    def record_all_stats(self) -> None:
        """Record stats of steps without outputs, too, as the API server does (async_llm.py:697).

        LLMEngine drops them before 0.30 (v1/engine/llm_engine.py:316 in 0.23.0).
        """
        client, loggers = self.engine.engine_core, self.engine.logger_manager
        get_output = client.get_output

        def get_and_record() -> Any:
            outputs = get_output()
            if outputs.scheduler_stats is not None and not outputs.outputs:
                loggers.record(scheduler_stats=outputs.scheduler_stats, iteration_stats=None)
            return outputs

        client.get_output = get_and_record

    def metrics(self) -> str:
        """Return the text of GET /metrics."""
        from prometheus_client import REGISTRY, generate_latest

        return generate_latest(REGISTRY).decode()

    def progress(self) -> dict[str, dict[str, Any]]:
        """Return the state of each request of the scheduler, by internal id."""
        return {
            request_id: {
                "status": request.status.name,
                "computed": request.num_computed_tokens,
                "prompt": request.num_prompt_tokens,
                "outputs": request.num_output_tokens,
            }
            for request_id, request in self.core.scheduler.requests.items()
        }

    def device_use(self) -> dict[str, Any]:
        """Return the free bytes of the NPU, and the operators launched there so far."""
        import torch

        from ascend_npu_emulator.native import core

        return {"free": torch.npu.mem_get_info()[0], "launched": core.first_launches()}

    def stats(self) -> dict[str, Any]:
        """Return the resources of the process; they are the same whenever the engine is idle.

        Returns:
            fds, threads: kinds of open descriptors, without files that are kept for their rows;
            names; sorted. device_bytes: allocated on the NPU. scheduler, worker: size of each
            container in that half of the connector. busy: pinned rows, staging slots without an
            issued copy, open sink files, files that only one half keeps, prefixes in computation.
        """
        import torch

        halves = {} if self.engine is None else self._halves()
        if halves:
            assert halves["worker"]._background.wait(30), "it closes released files"
        kept = halves["worker"]._open_sources._sources if halves else {}
        fds = set(os.listdir("/proc/self/fd")) - {str(source._fd) for source in kept.values()}
        found: dict[str, Any] = {
            "fds": sorted(filter(None, map(_descriptor, fds))),
            # vLLM starts a pool when it first compiles a grammar, and keeps it.
            "threads": sorted(
                thread.name
                for thread in threading.enumerate()
                if not thread.name.startswith("ThreadPoolExecutor")
            ),
            "device_bytes": torch.npu.memory_allocated(),
        }
        if self.engine is None:
            return found
        worker = halves["worker"]
        ring = worker._lander._ring
        found["busy"] = {
            "pinned_rows": ring.num_rows - ring.free_rows,
            "staging_slots": sum(not slot.issued.is_set() for slot in worker._staging.slots),
            "sink_files": len(worker._sink._files),
            "rows": worker._progress.backlog,
        }
        if (reuse := halves["scheduler"]._reuse) is not None:
            index = reuse._index
            found["busy"]["open_sources"] = len(kept.keys() ^ {*index._kept, *index._released})
            found["busy"]["computing"] = len(index._computing)
        for name, half in halves.items():
            held = vars(half) | vars(worker._progress if half is worker else half._admission)
            found[name] = {
                key: len(value) for key, value in held.items() if isinstance(value, dict | set)
            }
            found[name] |= {
                key: sum(value)
                for key, value in held.items()
                if isinstance(value, list) and _numbers(value)
            }
        found["wanted"] = len(worker._staging.wanted)
        return found

    def footprint(self) -> dict[str, int]:
        """Return quantities that a leak increases: bytes, objects of our classes, file locks."""
        gc.collect()
        ours = sum(
            type(each).__module__.startswith("vllm_ascend_hsx.") for each in gc.get_objects()
        )
        locks = sum(
            f" {os.getpid()} " in line for line in Path("/proc/locks").read_text().splitlines()
        )
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"bytes": pages * os.sysconf("SC_PAGE_SIZE"), "objects": ours, "locks": locks}

    def _halves(self) -> dict[str, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        scheduler, worker = self.core.scheduler.connector, get_kv_transfer_group()
        ours = [
            next(each for each in getattr(side, "_connectors", [side]) if hasattr(each, "_worker"))
            for side in (scheduler, worker)
        ]
        return {"scheduler": ours[0]._scheduler, "worker": ours[1]._worker}

    def real_events(self) -> None:
        """Replace the placeholder for torch.cuda.Event of vllm-ascend (model_runner_v1.py:5210)."""
        import torch

        torch.cuda.Event = torch.npu.Event


def _descriptor(number: str) -> str | None:
    """Return the target of a descriptor without numbers; None for a descriptor already closed."""
    try:
        target = os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:
        return None
    return target.partition(":[")[0]


def _numbers(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, int) for value in values)
