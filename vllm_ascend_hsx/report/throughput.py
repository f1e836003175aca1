"""Measure three servers in turn: without extraction, with ours, and with vLLM's connector."""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from vllm_ascend_hsx.config import CONNECTOR_NAME
from vllm_ascend_hsx.demo.metrics import collect
from vllm_ascend_hsx.demo.server import Server
from vllm_ascend_hsx.plan.costs import Request, make_plan
from vllm_ascend_hsx.plan.shape import read_shape
from vllm_ascend_hsx.report import workers
from vllm_ascend_hsx.report.context import Context
from vllm_ascend_hsx.report.probe import Worker
from vllm_ascend_hsx.report.result import BROKE, HELD, MEASURED, Teller
from vllm_ascend_hsx.report.served import EMULATED as EMULATED_OPTIONS
from vllm_ascend_hsx.report.served import check_rows, serve_options, serving
from vllm_ascend_hsx.report.traffic import Round, Traffic, draw_prompts, serve_round
from vllm_ascend_hsx.transfer_config import plugins_without_ours

VLLMS = "ExampleHiddenStatesConnector"
REQUEST_S = 600.0
STAGING_SLOTS = 2  # the connector's default
# A server's measurement of free memory varies by this share between starts.
TOLERANCE = 0.005
_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_MEMORY = re.compile(r"Available KV cache memory: ([\d.]+) GiB")


@dataclass(frozen=True)
class Load:
    """Amount of traffic, and the sizes of the servers.

    Attributes:
        rounds: measured rounds, after one warm-up round.
    """

    traffics: tuple[Traffic, ...]
    rounds: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


REAL = Load(
    (
        Traffic("prefill-bound", 256, 1024, 1900, max_tokens=1),
        Traffic("decode-bound", 64, 16, 48, max_tokens=128),
    ),
    3,
    2048,
    64,
    8192,
)
EMULATED = Load(
    (
        Traffic("prefill-bound", 8, 100, 400, max_tokens=1),
        Traffic("decode-bound", 8, 16, 48, max_tokens=12),
    ),
    1,
    512,
    16,
    1024,
)


def load_of(context: Context) -> Load:
    return EMULATED if context.emulated else REAL


def off(context: Context, tell: Teller) -> None:
    _measure(context, tell, "off", None)


def hsx(context: Context, tell: Teller) -> None:
    _measure(context, tell, "hsx", CONNECTOR_NAME)


def vllm(context: Context, tell: Teller) -> None:
    _measure(context, tell, "vllm", VLLMS, VLLM_PLUGINS=plugins_without_ours())


def _measure(
    context: Context, tell: Teller, name: str, connector: str | None, **environ: str
) -> None:
    """Measure one server. All three differ only in extraction.

    vLLM refuses the connector together with chunked prefill, so no server has it.
    """
    load, sizes = load_of(context), context.sizes
    own = (EMULATED_OPTIONS if context.emulated else ()) + (
        workers.OPTIONS if name == "hsx" else ()
    )
    environ |= workers.ENVIRONMENT if name == "hsx" else {}
    most = {
        each: getattr(load, each)
        for each in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
    }
    serve = serve_options(
        context, name, sizes, own, connector=connector, whole_prompts=True, **most
    )
    with serving(context, name, serve, **environ) as server:
        _tell_memory(server, f"KV cache, {name}", tell)
        vocabulary = min(context.number("vocab_size"), 20_000) * 9 // 10
        words: list[str] = []
        data: dict[str, Any] = {}
        probe = Probe(context, server) if name == "hsx" else None
        for traffic in load.traffics:
            prompts = [draw_prompts(traffic, turn, vocabulary) for turn in range(load.rounds + 1)]
            rounds = [
                serve_round(server.url, traffic, each, REQUEST_S, extracts=connector is not None)
                for each in prompts
            ]
            data[traffic.name] = figures = _figures(traffic, rounds[1:])
            words.append(
                f"{traffic.name} {figures['requests_per_s']:,.1f} requests/s, "
                f"{figures['step_ms']:,.1f} ms a step"
            )
        if unread := int(sum(figures["unread"] for figures in data.values())):
            words.append(f"{unread} files could not be read")
        tell(name, BROKE if unread and name == "hsx" else MEASURED, "; ".join(words), **data)
        if probe:
            probe.tell(tell)
            check_rows(context, server, serve.layer_ids, "plain", tell)


class Probe:
    """Measures the CPU time of the threads of a server's workers from now on."""

    def __init__(self, context: Context, server: Server) -> None:
        self._server, self._npus = server, context.sizes.npus
        self._workers, self._copied, self._begun = self._now()

    def tell(self, tell: Teller) -> None:
        described, copied, now = self._now()
        judgement, per_gib = workers.threads(
            self._workers, described, copied - self._copied, now - self._begun
        )
        tell("threads", *judgement, cpu_seconds_per_gib=per_gib, copied=copied - self._copied)

    def _now(self) -> tuple[list[Worker], float, float]:
        copied = collect(self._server.url, REQUEST_S).total("vllm:hsx_copied_bytes_total")
        return workers.ask(self._server.url, self._npus), copied, time.perf_counter()


def _figures(traffic: Traffic, rounds: list[Round]) -> dict[str, float]:
    """Return medians over the rounds."""
    return {
        "requests_per_s": statistics.median(traffic.requests / each.seconds for each in rounds),
        "prompt_tokens_per_s": statistics.median(
            each.prompt_tokens / each.seconds for each in rounds
        ),
        "step_ms": statistics.median(1e3 * each.seconds / each.steps for each in rounds),
        "steps": statistics.median(each.steps for each in rounds),
        "unread": sum(each.unread for each in rounds),
    }


def _tell_memory(server: Server, line: str, tell: Teller) -> None:
    """Report the KV cache's size from the server's log: the minimum over the engines."""
    text = server.log.read_text(errors="replace")
    tokens = [int(found.replace(",", "")) for found in _TOKENS.findall(text)]
    memory = [float(found) for found in _MEMORY.findall(text)]
    if not tokens or not memory:
        tell(
            line,
            BROKE,
            "the server's log has no line about the size of its KV cache",
            log=server.log_tail(),
        )
        return
    words = f"{min(tokens):,} tokens in {min(memory):.2f} GiB per NPU"
    tell(line, MEASURED, words, tokens=min(tokens), bytes=int(min(memory) * 2**30))


def plan(context: Context, tell: Teller) -> None:
    """Compare the remaining KV cache with the prediction of `hsx plan`."""
    sizes, before, after = (
        context.sizes,
        context.found["KV cache, off"],
        context.found["KV cache, hsx"],
    )
    load = load_of(context)
    planned = make_plan(
        Request(
            shape=read_shape(str(context.model)),
            layer_ids=serve_options(context, "plan", sizes).layer_ids,
            tensor_parallel=sizes.tensor_parallel,
            data_parallel=sizes.data_parallel,
            max_num_batched_tokens=load.max_num_batched_tokens,
            kv_bytes=before["bytes"],
            staging_slots=STAGING_SLOTS,
            ring_bytes=None,
            prompt_tokens=load.max_model_len,
            prompts=1000,
            prefill_speed=1000.0,
        )
    )
    kept = after["tokens"] / before["tokens"]
    theirs = context.found.get("KV cache, vllm")
    beside = (
        ""
        if theirs is None
        else f"; with vLLM's connector {theirs['tokens'] / before['tokens']:.2%}"
    )
    words = (
        f"{kept:.2%} remain, planned are {planned.kept_at_least:.2%} to {planned.kept:.2%}{beside}"
    )
    held = kept >= planned.kept_at_least - TOLERANCE
    data = {key: value for key, value in asdict(planned).items() if key != "request"}
    tell("plan", HELD if held else BROKE, words, measured=kept, **data)
