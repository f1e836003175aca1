"""The words of docs/performance.md: what each figure includes."""

from __future__ import annotations

from benchmarks.host_path import COPIED, DURABLY, PINNED
from benchmarks.peers import BLOCK_TOKENS, PIECE, VLLM_THREADS
from benchmarks.rows import MINIMAX_M2, STEP_TOKENS
from benchmarks.slow_storage import RING_BYTES

HEAD = """# Performance

Made by `make benchmark` (`python -m benchmarks`); do not edit. Others may use the machine at the same time, so only ratios
within a run say something: between contestants that took turns within seconds.

{machine}"""

METHOD = f"""Rows of MiniMax-M2 with four layers, {MINIMAX_M2.row_bytes:,} bytes per token. The contestants of a view run in one process,
one after the other in each repetition, in an order drawn anew; a ratio is taken within a repetition, and the median of the
ratios is shown. Before the first repetition each file is compared bit by bit with what it must hold.

* Requests in flight are given at once, and come in steps of {STEP_TOKENS:,} tokens as vLLM schedules them: whole prompts while
  there is room, then a part of one. «Evenly»: they share each step, so that with 256 of them ours writes 8 rows at a time; no
  goal is judged by that. Raw writes and vLLM's path always write whole files.
* Raw writes are of {PIECE >> 20} MiB at a time, with as many threads as ours has writers, or one for each request in flight
  if these are fewer. «One thread» is what is left where the rows of a prompt fill the ring before those of the next one come: Linux
  lets one thread at a time write to a file.
* CPU time is that of all threads of the process, user and system.
* Memory is the peak of resident memory above what was held when the run began; ours holds its ring by then.
* **vLLM 0.33's path** is written from its description: rows stay in paged memory (blocks of {BLOCK_TOKENS} tokens) until the
  request ends; then they are gathered by block ids, pinned memory is obtained and they are copied into it, the file's lock is
  taken, and one of {VLLM_THREADS} threads calls safetensors' save_file with rows and token ids, and lets the lock go."""

VIEWS = {
    PINNED: """Work of the host alone. Rows are in pinned memory when a step ends, where a device's DMA engine has put them; for vLLM 0.33's
path that is behind its gather and its copy. Ours: opening the file and its lock, hand-overs between main, opener, copier and
writer threads, writing, checksum, header, rename, letting the lock go. Raw write: open, pwrite, close; no lock, no rename, no
token ids, no checksum.""",
    COPIED: """As before, and a memcpy by a thread of this process stands in for DMA: ours copies slots into the ring in the copier thread;
vLLM 0.33's path gathers by block ids (into memory that is there), obtains pinned memory for each request and copies. On
hardware the device gathers and copies, and only obtaining the memory is left to the host. «Reused»: with pinned memory of an
earlier request, as torch's caching allocator would have it at best. The raw write is the one above, without any copy.""",
    DURABLY: """Rows in pinned memory as in the first view. Ours with `"io": "direct", "durability": "fdatasync"`: also reserves
space, syncs the file before the rename and the directory behind it. Raw O_DIRECT: open, fallocate, pwrite, fdatasync, close;
«with checksum»: each piece's CRC-32C is made before it is written; «published»: and a rename and an fsync of the directory.""",
}

LATENCY = """One prompt at a time, in steps of {step_tokens:,} tokens but for the last. «Last row»: the last piece of the last chunk is in
pinned memory. «End of step»: the main thread hands the last chunk's slot over. A file cannot be complete before its last
chunk is written: the raw write of that chunk, measured in the same turn, is the limit. «Published»: visible under its name.
«Told»: a reader in another process, who sleeps in `vllm_ascend_hsx.load`, is woken; {told} ms after publishing over all
prompts (p50 / p99). A bare flock that is let go needs {bare} ms to wake a process here. A reader who polls every 0.1 s hears
of the file {polled} ms after it was published. «Mapped»: `load(path, mmap=True)` has returned.

vLLM 0.33's path begins when the request ends, and takes {vllm} (median)."""

ENGINE = """Three engines take turns with the same requests: extraction {off}, ours, and vLLM 0.23.0's ExampleHiddenStatesConnector. They
differ in nothing else, so chunked prefill is off for all, because vLLM refuses its connector with it. The time is that from
the first request to the last complete file, CPU time that of all threads of the engine's process. On an emulated NPU the
forward pass is CPU time, too."""

STEP = """CPU time of the thread that runs the model: worker and proposer with vLLM's forward context, layer and staging, on rows so
narrow that moving them costs nothing (it is the device's work, and an emulated NPU does it in this thread). Launching copies
and recording events is in it. A line through the cells: **{step:.0f} µs per step, {request:.1f} µs for each request in it,
{begins:.1f} µs for each that begins**. A prompt that is 1,000 tokens longer adds {slope:+.1f} µs to a step."""

SLOW_STORAGE = f"""One request that is not extracted streams its tokens, and beside it there are always {{in_flight}} extracted prompts of
{{tokens}} tokens, on the emulated NPU, for {{seconds:g}} seconds each; {RING_BYTES >> 20} MiB of pinned memory hold about ten of them.
Storage takes a share of what prompts make when it is fast ({{needed}}); os.pwrite waits in its turn. «No extraction»: the same prompts,
each of which opts out. Prompts that are held back are answered later, so that the stream has the engine for itself: its
gaps are then shorter than without extraction. Machine: {{machine}}."""

CAPACITY = """What is left of the KV cache of a server with {memory} GiB per NPU for it, TP={tensor_parallel}, requests of
{length:,} tokens and steps of {step:,}, with four layers extracted: counted by vLLM's own planner with vllm-ascend's patches, of the
KVCacheSpecs that the layers of a model make; nothing is timed. «hsx»: staging is taken from the memory. «Upstream»: vLLM's
ExampleHiddenStatesConnector, whose rows are in the KV cache. «Tokens» is what a server logs as the size of its KV cache.{refusals}"""
