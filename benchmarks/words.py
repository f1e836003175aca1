"""The words of docs/performance.md, with the conditions of each figure."""

from __future__ import annotations

from benchmarks.pipeline.conversations import RELEASE
from benchmarks.pipeline.decoding import DEVICE_S
from benchmarks.pipeline.peers import PIECE
from benchmarks.pipeline.rows import MINIMAX_M2
from benchmarks.pipeline.slow_storage import RING_BYTES

HEAD = """# Performance

The cost of extraction, compared with a server without it and with vLLM's own connector:"""

COST = f"""\
* **KV cache kept**: by vLLM's [planner](#kv-cache). vLLM's connector keeps rows in KV blocks
  until a request ends. This plugin keeps them in a staging buffer for one step.
* **Requests per second**: a [tiny model](#engine) on an emulated NPU. A real model has longer
  steps, and the share of extraction is smaller.
* **Prompt tokens computed**: [conversations](#conversations). vLLM's connector is that of
  {RELEASE}.
* **Host memory**: for each rank. The plugin pins a ring of fixed size. vLLM's connector pins the
  rows of a request when the request ends.

Nothing was measured on an NPU: see the [hardware
checklist](operations.md#hardware-checklist)."""

MACHINE = """\
`make benchmark` measures and writes this page; do not edit it. `python -m benchmarks --page`
writes it again from the recorded figures. Compare figures of one run only, because the machines
may be shared."""

RECORD = "* `{file}`: {machine}"

FILES = f"""\
Rows of MiniMax-M2 with four layers, {MINIMAX_M2.row_bytes:,} bytes per token, from pinned memory.
A raw write is open, pwrite of {PIECE >> 20} MiB pieces and close. Figures are medians over 1 to
256 requests in flight. With the copy, a memcpy stands for DMA. vLLM 0.33's path is written from a
description, and equals that of vLLM 0.26 and 0.30. Durable files have `io=direct` and
`durability=fdatasync`.{{missing}}

The slowest cell ({{cell}}) writes {{gb:.1f}} GB/s, {{tokens}} tokens per second for each rank."""

LATENCY = """\
A prompt of {tokens:,} tokens in steps of {step_tokens:,}. A file is published after the last row
has arrived in pinned memory. The raw write of the last chunk is the limit. After publication,
`load` in another process is notified. A reader that polls every 0.1 s is {polled} ms late. vLLM
0.33's path publishes {vllm} ms after the request ends."""

ENGINE = """\
{model}. Three engines take turns with the same requests. Each is started {starts} times and
serves {rounds} rounds. Chunked prefill is off, because vLLM's connector does not allow it. In %
of extraction off, requests per second of the starts (CPU time per step) are: {figures}."""

STEP = """\
CPU time of the thread that runs the model: {step:.0f} µs per step, {request:.1f} µs for each
request in it, {begins:.1f} µs for each request that begins. Of a step, {launches:.0f} µs are
calls of the emulator. A prompt that is 1,000 tokens longer adds {slope:+.1f} µs."""

DECODE = f"""\
Each request makes one row of MiniMax-M2 per step. The main thread spends {{python:g}} ms of each
step in Python and waits {DEVICE_S * 1e3:g} ms for the device. A row takes {{figures}}."""

SLOW_STORAGE = f"""\
One request without extraction streams tokens beside {{in_flight}} extracted prompts of {{tokens}}
tokens, with {RING_BYTES >> 20} MiB of pinned memory. Storage takes a share of the rows that
prompts make ({{needed}}). Gaps between two tokens of the stream are in ms, p99 and longest."""

CONVERSATIONS = """\
{conversations} conversations of {turns} turns with the same first {system:,} tokens. Each turn
adds {least} to {most} tokens. {concurrency} prompts are in flight. The prompts have {tokens}
tokens, {distinct} of them different. Extraction off computes {off}. Multiples of these tokens,
and of the time: {figures}. The case without reuse is the first of {rounds} rounds. A file is
right if every row equals that of transformers in float32."""

CAPACITY = """\
{memory} GiB per NPU for the KV cache, TP={tensor_parallel}, requests of {length:,} tokens, steps
of {step:,}, four layers. vLLM's planner with vllm-ascend's patches counts tokens; nothing is
timed. [Operations](operations.md) has the shares on other releases.{refusals}

Rows of rotated weights (QuaRot) also need a product with a matrix. For MiniMax-M2 that is 75
MFLOP per token and 48 MiB per NPU (`hsx plan minimax-m2 --rotated`)."""
