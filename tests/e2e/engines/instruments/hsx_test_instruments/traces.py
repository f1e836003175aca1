"""Instruments that record an engine's actions as JSON lines."""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

from hsx_test_instruments.hooks import after_import


class Trace:
    """Appends one JSON line per event to a file of the writing process, forked or not."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._process = 0

    def write(self, **event: Any) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._file = (self._directory / f"trace-{self._process}.jsonl").open("a", buffering=1)
        self._file.write(json.dumps(event) + "\n")


def trace_collectives(directory: str) -> None:
    """Record every all_reduce in a DP group, and the batch.

    Events: {"batch": "busy" | "idle", "dp_rank", "tp_rank"} when a step begins, {"collective",
    "shape", "dtype"} before a collective is issued, {"completed": true} when all ranks have issued
    it.
    """
    trace = Trace(directory)

    def trace_reductions(_: Any) -> None:
        import torch.distributed as dist
        from vllm.distributed import parallel_state

        original_reduce = dist.all_reduce

        @functools.wraps(original_reduce)
        def all_reduce(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            # Groups are created, and tested with a collective, before the DP group.
            dp = parallel_state._DP
            traced = (
                group is not None and dp is not None and group in (dp.cpu_group, dp.device_group)
            )
            if traced:
                trace.write(
                    collective="all_reduce", shape=list(tensor.shape), dtype=str(tensor.dtype)
                )
            work = original_reduce(tensor, *args, group=group, **kwargs)
            if traced:
                trace.write(completed=True)
            return work

        dist.all_reduce = all_reduce

    def mark_batches(runner_module: Any) -> None:
        from vllm.distributed import get_dp_group, get_tensor_model_parallel_rank

        def marked(method: Any, kind: str) -> Any:
            @functools.wraps(method)
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                # An idle batch of model runner V2 runs through execute_model, too.
                if kind == "idle" or (
                    args[0].total_num_scheduled_tokens and not kwargs.get("dummy_run")
                ):
                    trace.write(
                        batch=kind,
                        dp_rank=get_dp_group().rank_in_group,
                        tp_rank=get_tensor_model_parallel_rank(),
                    )
                return method(self, *args, **kwargs)

            return call

        runner = runner_module.NPUModelRunner
        runner.execute_model = marked(runner.execute_model, "busy")
        runner._dummy_run = marked(runner._dummy_run, "idle")

    after_import("vllm_ascend.worker.worker", trace_reductions)
    for runner_module in (
        "vllm_ascend.worker.model_runner_v1",
        "vllm_ascend.worker.v2.model_runner",
    ):
        after_import(runner_module, mark_batches)


def trace_experts(directory: str) -> None:
    """Record the method that moves tokens to their experts in each forward pass.

    Events: {"selected": method, "tokens": of each DP rank, padded, "time": of time.monotonic} for a
    forward context, {"batch", "scheduled": tokens, "dp_rank", "tp_rank"} for a step of the runner,
    {"dispatched": method, "received": rows} and {"combined": method} for a layer.
    """
    trace = Trace(directory)

    def trace_selection(methods: Any) -> None:
        from vllm.forward_context import get_forward_context

        original = methods.get_moe_comm_method

        def get_moe_comm_method(selected: Any) -> Any:
            across_dp = get_forward_context().dp_metadata.num_tokens_across_dp_cpu
            trace.write(selected=selected.name, tokens=across_dp.tolist(), time=time.monotonic())
            return original(selected)

        methods.get_moe_comm_method = get_moe_comm_method
        trace_fused(methods.FusedMC2CommImpl)

    def trace_fused(fused: Any) -> None:
        compute = fused.fused_experts

        def fused_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = compute(self, *args, **kwargs)
            trace.write(dispatched="FUSED_MC2", received=int(result.expert_tokens.sum()))
            trace.write(combined="FUSED_MC2")
            return result

        fused.fused_experts = fused_experts

    def trace_layers(dispatchers: Any) -> None:
        for name in ("AllGather", "All2AllV", "MC2"):
            trace_layer(getattr(dispatchers, f"TokenDispatcherWith{name}"), name)

    def trace_layer(dispatcher: Any, name: str) -> None:
        dispatch, combine = dispatcher.token_dispatch, dispatcher.token_combine

        def token_dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = dispatch(self, *args, **kwargs)
            counts = output.group_list_type == 1  # otherwise running totals
            trace.write(
                dispatched=name,
                received=int(output.group_list.sum() if counts else output.group_list[-1]),
            )
            return output

        def token_combine(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = combine(self, *args, **kwargs)
            trace.write(combined=name)
            return result

        dispatcher.token_dispatch, dispatcher.token_combine = token_dispatch, token_combine

    def trace_steps(runner_module: Any) -> None:
        from vllm.distributed import get_dp_group, get_tensor_model_parallel_rank

        runner = runner_module.NPUModelRunner
        execute, dummy = runner.execute_model, runner._dummy_run

        @functools.wraps(execute)
        def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduled := scheduler_output.total_num_scheduled_tokens:
                write("busy", scheduled)
            return execute(self, scheduler_output, *args, **kwargs)

        @functools.wraps(dummy)
        def dummy_run(self: Any, *args: Any, **kwargs: Any) -> Any:
            write("idle", 0)
            return dummy(self, *args, **kwargs)

        def write(kind: str, scheduled: int) -> None:
            trace.write(
                batch=kind,
                scheduled=scheduled,
                dp_rank=get_dp_group().rank_in_group,
                tp_rank=get_tensor_model_parallel_rank(),
            )

        runner.execute_model, runner._dummy_run = execute_model, dummy_run

    after_import("vllm_ascend.ops.fused_moe.moe_comm_method", trace_selection)
    after_import("vllm_ascend.ops.fused_moe.token_dispatcher", trace_layers)
    after_import("vllm_ascend.worker.model_runner_v1", trace_steps)


def trace_files(directory: str) -> None:
    """Record the process that opens a file for each request, with our connector or vLLM's."""
    trace = Trace(directory)

    def ours(sink_module: Any) -> None:
        original = sink_module.FileSink.open

        def open_file(self: Any, request_id: str, path: Any, *args: Any, **options: Any) -> Any:
            trace.write(written=str(path), process=os.getpid())
            return original(self, request_id, path, *args, **options)

        sink_module.FileSink.open = open_file

    def upstreams(connector_module: Any) -> None:
        original = connector_module.save_file

        def save_file(tensors: Any, path: str) -> None:
            trace.write(written=str(path), process=os.getpid())
            original(tensors, path)

        connector_module.save_file = save_file

    after_import("vllm_ascend_hsx.sinks.file", ours)
    after_import(
        "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector", upstreams
    )


def trace_contexts(directory: str) -> None:
    """Record the contexts of each worker's process after steps, when they have changed.

    Events: {"device": of the worker, "contexts": [{"device", "thread", "call", "python"}, ...] of
    the process, "processes": with a context on each NPU}.
    """
    trace = Trace(directory)

    def wrap(worker_module: Any) -> None:
        import torch

        from ascend_npu_emulator.native import core

        worker = worker_module.NPUWorker
        execute = worker.execute_model
        seen: list[Any] = []

        @functools.wraps(execute)
        def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = execute(self, *args, **kwargs)
            names = ("device", "thread", "call", "python")
            event = {
                "device": self.device.index,
                "contexts": [dict(zip(names, each, strict=True)) for each in core.contexts()],
                "processes": [
                    core.processes_on(index) for index in range(torch.npu.device_count())
                ],
            }
            if event not in seen:
                seen.append(event)
                trace.write(**event)
            return result

        worker.execute_model = execute_model

    after_import("vllm_ascend.worker.worker", wrap)


def trace_graph_mode(directory: str) -> None:
    """Record the graph mode that the runner resolves, captures, and the mode of each pass.

    Events: {"resolved", "capture_sizes", "captures": {mode: sizes}} for the runner's decision,
    {"forward": mode, "tokens"} for a forward pass, {"captured"} and {"replayed"} for a graph.
    """
    trace = Trace(directory)

    def wrap(runner_module: Any) -> None:
        from vllm.forward_context import get_forward_context

        runner = runner_module.NPUModelRunner
        resolve, forward = runner._check_and_update_cudagraph_mode, runner._model_forward

        @functools.wraps(resolve)
        def resolved(self: Any, *args: Any, **kwargs: Any) -> None:
            resolve(self, *args, **kwargs)
            config = self.compilation_config
            captures = {
                mode.name: [each.num_tokens for each in descs]
                for mode, descs in self.cudagraph_dispatcher.get_capture_descs()
            }
            trace.write(
                resolved=config.cudagraph_mode.name,
                capture_sizes=config.cudagraph_capture_sizes,
                captures=captures,
            )

        @functools.wraps(forward)
        def run(self: Any, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
            trace.write(
                forward=get_forward_context().cudagraph_runtime_mode.name, tokens=num_tokens
            )
            return forward(self, num_tokens, *args, **kwargs)

        runner._check_and_update_cudagraph_mode, runner._model_forward = resolved, run

    def wrap_v2(_: Any) -> None:
        from vllm.v1.worker.gpu import cudagraph_utils
        from vllm.v1.worker.gpu import model_runner as runner_module

        manager, dispatch = cudagraph_utils.CudaGraphManager, runner_module.dispatch_cg_and_sync_dp
        choose = manager._init_candidates

        @functools.wraps(choose)
        def chosen(self: Any) -> None:
            choose(self)
            captures = {
                mode.name: [each.num_tokens for each in descs]
                for mode, descs in self._capture_descs.items()
            }
            sizes = self.compilation_config.cudagraph_capture_sizes
            trace.write(resolved=self.cudagraph_mode.name, capture_sizes=sizes, captures=captures)

        @functools.wraps(dispatch)
        def dispatched(*args: Any, **kwargs: Any) -> Any:
            found = dispatch(*args, **kwargs)
            trace.write(forward=found[0].cg_mode.name, tokens=found[0].num_tokens)
            return found

        manager._init_candidates, runner_module.dispatch_cg_and_sync_dp = chosen, dispatched

    def wrap_graphs(_: Any) -> None:
        import torch

        end, replay = torch.npu.NPUGraph.capture_end, torch.npu.NPUGraph.replay

        def captured(self: Any) -> None:
            end(self)
            trace.write(captured=True)

        def replayed(self: Any) -> None:
            trace.write(replayed=True)
            replay(self)

        torch.npu.NPUGraph.capture_end, torch.npu.NPUGraph.replay = captured, replayed

    after_import("vllm_ascend.worker.worker", wrap_graphs)
    after_import("vllm_ascend.worker.model_runner_v1", wrap)
    after_import(
        "vllm_ascend.patch.worker.patch_v2.patch_model_runner", wrap_v2
    )  # replaces this function, too
