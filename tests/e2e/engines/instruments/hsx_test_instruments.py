"""What tests change inside the engine's processes: a vLLM plugin, found on PYTHONPATH.

HSX_TEST_INSTRUMENTS is a JSON object: names of functions of this module, and their arguments.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "HSX_TEST_INSTRUMENTS"
_applied: set[str] = set()


def register() -> None:
    """Apply every instrument named in the environment, once per process."""
    for name, argument in json.loads(os.environ.get(VARIABLE, "{}")).items():
        if name not in _applied:
            _applied.add(name)
            INSTRUMENTS[name](argument)


def _after_import(module: str, action: Any) -> None:
    from wrapt import register_post_import_hook

    register_post_import_hook(action, module)


class _Trace:
    """Appends one JSON line per event to a file of the process that writes it, forked or not."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._process = 0

    def write(self, **event: Any) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._file = (self._directory / f"trace-{self._process}.jsonl").open("a", buffering=1)
        self._file.write(json.dumps(event) + "\n")


def trace_collectives(directory: str) -> None:
    """Record every all_reduce in a DP group, and which batch it belongs to.

    Events: {"batch": "busy" | "idle", "dp_rank", "tp_rank"} when a step begins, {"collective",
    "shape", "dtype"} before one is issued, {"completed": true} when all ranks have issued it.
    """
    trace = _Trace(directory)

    def trace_reductions(_: Any) -> None:
        import torch.distributed as dist
        from vllm.distributed import parallel_state

        original_reduce = dist.all_reduce

        @functools.wraps(original_reduce)
        def all_reduce(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            # Groups are made, and tested with a collective, before the DP group is.
            dp = parallel_state._DP
            traced = group is not None and dp is not None and group in (dp.cpu_group, dp.device_group)
            if traced:
                trace.write(collective="all_reduce", shape=list(tensor.shape), dtype=str(tensor.dtype))
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
                if kind == "idle" or (args[0].total_num_scheduled_tokens and not kwargs.get("dummy_run")):
                    trace.write(batch=kind, dp_rank=get_dp_group().rank_in_group, tp_rank=get_tensor_model_parallel_rank())
                return method(self, *args, **kwargs)

            return call

        runner = runner_module.NPUModelRunner
        runner.execute_model = marked(runner.execute_model, "busy")
        runner._dummy_run = marked(runner._dummy_run, "idle")

    _after_import("vllm_ascend.worker.worker", trace_reductions)
    for runner_module in ("vllm_ascend.worker.model_runner_v1", "vllm_ascend.worker.v2.model_runner"):
        _after_import(runner_module, mark_batches)


def trace_experts(directory: str) -> None:
    """Record how each forward pass lets tokens travel to their experts.

    Events: {"selected": method, "tokens": of each DP rank, padded, "time": of time.monotonic} for a
    forward context, {"batch", "scheduled": tokens, "dp_rank", "tp_rank"} for a step of
    the runner, {"dispatched": method, "received": rows} and {"combined": method} for a layer.
    """
    trace = _Trace(directory)

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
            trace.write(dispatched=name, received=int(output.group_list.sum() if counts else output.group_list[-1]))
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
            trace.write(batch=kind, scheduled=scheduled, dp_rank=get_dp_group().rank_in_group, tp_rank=get_tensor_model_parallel_rank())

        runner.execute_model, runner._dummy_run = execute_model, dummy_run

    _after_import("vllm_ascend.ops.fused_moe.moe_comm_method", trace_selection)
    _after_import("vllm_ascend.ops.fused_moe.token_dispatcher", trace_layers)
    _after_import("vllm_ascend.worker.model_runner_v1", trace_steps)


def another_method(gate: str) -> None:
    """Let the last rank choose ALLTOALL for its experts, in steps that begin once `gate` exists."""

    def wrap(context: Any) -> None:
        from vllm.distributed import get_ep_group

        select = context.select_moe_comm_method

        @functools.wraps(select)
        def selected(*args: Any, **kwargs: Any) -> Any:
            last = get_ep_group().is_last_rank and Path(gate).exists()
            return context.MoECommType.ALLTOALL if last else select(*args, **kwargs)

        context.select_moe_comm_method = selected

    _after_import("vllm_ascend.ascend_forward_context", wrap)


def trace_files(directory: str) -> None:
    """Record which process opens a file for which request, with our connector or vLLM's."""
    trace = _Trace(directory)

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

    _after_import("vllm_ascend_hsx.sinks.file", ours)
    _after_import("vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector", upstreams)


def unfixed_proposer(how: str) -> None:
    """Restore what vllm-ascend #9689 replaced: a busy rank coordinates, an idle one does not.

    "coordinate": vLLM's own `_determine_batch_execution_and_padding`: no padding, and a [4, dp]
    collective in the group of the runner's [2, dp] ones.
    "unpadded": the runner's collective without padding for sequence parallelism.
    """

    def unpadded(self: Any, num_tokens: int, use_cudagraphs: bool = True) -> Any:
        from vllm.config import CUDAGraphMode

        _, across_dp, mode = self.runner._sync_metadata_across_dp(num_tokens=num_tokens)
        assert mode == CUDAGraphMode.NONE
        return mode, int(across_dp[self.dp_rank]), across_dp

    def swap(proposer_module: Any) -> None:
        from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer

        methods = {"coordinate": ExtractHiddenStatesProposer._determine_batch_execution_and_padding, "unpadded": unpadded}
        proposer_module.HsxProposer._determine_batch_execution_and_padding = methods[how]
        proposer_module.HsxProposer.dummy_run = lambda self, *args, **kwargs: None

    _after_import("vllm_ascend_hsx.drafter.proposer", swap)


def trace_graph_mode(directory: str) -> None:
    """Record the graph mode that the runner resolves, its captures, and how each pass is run.

    Events: {"resolved", "capture_sizes", "captures": {mode: sizes}} for the runner's decision,
    {"forward": mode, "tokens"} for a forward pass, {"captured"} and {"replayed"} for a graph.
    """
    trace = _Trace(directory)

    def wrap(runner_module: Any) -> None:
        from vllm.forward_context import get_forward_context

        runner = runner_module.NPUModelRunner
        resolve, forward = runner._check_and_update_cudagraph_mode, runner._model_forward

        @functools.wraps(resolve)
        def resolved(self: Any, *args: Any, **kwargs: Any) -> None:
            resolve(self, *args, **kwargs)
            config = self.compilation_config
            captures = {mode.name: [each.num_tokens for each in descs] for mode, descs in self.cudagraph_dispatcher.get_capture_descs()}
            trace.write(resolved=config.cudagraph_mode.name, capture_sizes=config.cudagraph_capture_sizes, captures=captures)

        @functools.wraps(forward)
        def run(self: Any, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
            trace.write(forward=get_forward_context().cudagraph_runtime_mode.name, tokens=num_tokens)
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
            captures = {mode.name: [each.num_tokens for each in descs] for mode, descs in self._capture_descs.items()}
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

    _after_import("vllm_ascend.worker.worker", wrap_graphs)
    _after_import("vllm_ascend.worker.model_runner_v1", wrap)
    _after_import("vllm_ascend.patch.worker.patch_v2.patch_model_runner", wrap_v2)  # replaces that function, too


release_writers = threading.Event()


def held_writers(_: Any) -> None:
    """Let the writer threads of vLLM's connector wait until the driver sets `release_writers`."""

    def hold(connector_module: Any) -> None:
        connector = connector_module.ExampleHiddenStatesConnector
        original = connector._write_tensors

        def write_tensors(*args: Any) -> None:
            release_writers.wait()
            original(*args)

        connector._write_tensors = staticmethod(write_tensors)

    _after_import("vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector", hold)


def gated_writes(gate: str) -> None:
    """Let our connector write rows only while nobody holds an flock on the file `gate`."""

    def wrap(module: Any) -> None:
        original = module.DataFile.write

        def write(*args: Any) -> None:
            with open(gate) as file:
                fcntl.flock(file, fcntl.LOCK_SH)
            original(*args)

        module.DataFile.write = write

    _after_import("vllm_ascend_hsx.sinks.data_file", wrap)


def die_in_a_copy(number: int) -> None:
    """Let a process end by SIGKILL when half of its `number`th copy of rows is made."""
    copies = itertools.count(1)

    def wrap(module: Any) -> None:
        original = module.RowSource.copy_to

        def copy_to(self: Any, fd: int, offset: int, num_bytes: int) -> None:
            if next(copies) != number:
                original(self, fd, offset, num_bytes)
                return
            original(self, fd, offset, num_bytes // 2)
            print(f"killed in copy {number}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        module.RowSource.copy_to = copy_to

    _after_import("vllm_ascend_hsx.sinks.data_file", wrap)


def storage_that_answers_late(how: dict[str, float]) -> None:
    """Let writes of "bytes" or more wait until a worker has been closing for "seconds".

    New requests do not wait for them.
    """
    answers = threading.Event()

    def let_through(storage_watch_module: Any) -> None:
        storage_watch_module._QUIET_S = float("inf")


    def hold(data_file_module: Any) -> None:
        write = data_file_module.DataFile.write

        @functools.wraps(write)
        def late(self: Any, first: int, data: memoryview) -> None:
            if data.nbytes >= how["bytes"]:
                answers.wait()
            write(self, first, data)

        data_file_module.DataFile.write = late

    def release(worker_module: Any) -> None:
        close = worker_module.ExtractionWorker.close

        @functools.wraps(close)
        def closing(self: Any, timeout: float | None = None) -> None:
            timer = threading.Timer(how["seconds"], answers.set)
            timer.daemon = True
            timer.start()
            close(self, timeout)

        worker_module.ExtractionWorker.close = closing

    _after_import("vllm_ascend_hsx.connector.storage_watch", let_through)
    _after_import("vllm_ascend_hsx.sinks.data_file", hold)
    _after_import("vllm_ascend_hsx.connector.worker", release)


def importable_mooncake(_: Any) -> None:
    """Let vllm-ascend's MultiConnector import mooncake's engine, which it does not use here."""

    class TransferEngine:
        def __init__(self, *args: Any) -> None:
            raise NotImplementedError("mooncake is not installed")

    for name in ("mooncake", "mooncake.engine"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["mooncake.engine"].TransferEngine = TransferEngine  # type: ignore[attr-defined]


INSTRUMENTS = {
    function.__name__: function
    for function in (
        trace_collectives,
        trace_experts,
        another_method,
        trace_files,
        trace_graph_mode,
        unfixed_proposer,
        held_writers,
        gated_writes,
        die_in_a_copy,
        storage_that_answers_late,
        importable_mooncake,
    )
}
