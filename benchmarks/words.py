"""The words of docs/performance.md: what each figure includes."""

from __future__ import annotations

from benchmarks.pipeline.conversations import COUNTER, RELEASE, SOURCE
from benchmarks.pipeline.decoding import DEVICE_S, JOINED_BYTES
from benchmarks.pipeline.host_path import COPIED, DURABLY, PINNED
from benchmarks.pipeline.peers import BLOCK_TOKENS, PIECE, VLLM_THREADS
from benchmarks.pipeline.rows import MINIMAX_M2, STEP_TOKENS
from benchmarks.pipeline.slow_storage import RING_BYTES

HEAD = """# Performance

What does extraction cost a server? Everything beside extraction off and vLLM's own connector:"""

COST = f"""\
* **KV cache kept**: by vLLM's planner with vllm-ascend's patches, [below](#kv-cache). vLLM's connector
  keeps rows in KV blocks until a request ends, ours in a staging buffer for a step.
* **Requests per second**: engines with a tiny model on an emulated NPU, [below](#engine). A real
  model's step is longer, and extraction's share of it smaller.
* **Prompt tokens computed**: [conversations](#conversations) with a common system prompt, of what a
  server without extraction computes. vLLM's connector is that of {RELEASE}.
* **Host memory**: per rank, [below](#path-to-the-file-with-the-copy): ours is a pinned ring of fixed
  size and what the process takes beside it. vLLM's connector pins a request's rows when it ends."""

MACHINE = """\
Made by `make benchmark` (`python -m benchmarks`); do not edit. The machine may be shared, so only
ratios within a run are meaningful: contestants take turns within seconds.

{machine}"""

OTHER = """\
Measured there with `python -m benchmarks --parts host latency step --output DIR`; all figures are in
`{file}`.

{machine}"""

SLOWEST = """\
The slowest cell ({cell}) writes {gb:.1f} GB/s, which are {tokens} tokens per second. A server has
this for each rank: ranks are processes of their own, and a rank writes the requests that it owns."""

METHOD = f"""\
Rows are those of MiniMax-M2 with four layers, {MINIMAX_M2.row_bytes:,} bytes per token. The
contestants of a view run in one process, one after the other in each repetition, in random order. A
ratio is taken within a repetition, and the tables show the median of the ratios. Before the first
repetition each file is compared bit by bit with its expected content.

* Requests in flight are submitted at once, and arrive in steps of {STEP_TOKENS:,} tokens as vLLM
  schedules them: whole prompts while there is room, then a part of one. «Evenly»: the requests
  share each step, so that with 256 of them ours writes 8 rows at a time; no goal depends on this.
  Raw writes and vLLM's path always write whole files.
* Raw writes write {PIECE >> 20} MiB at a time, with as many threads as ours has writers, or with
  one for each request in flight if these are fewer. «One thread» is the limit where the rows of one
  prompt fill the ring before those of the next arrive: Linux lets one thread at a time write to a
  file.
* CPU time is that of all threads of the process, user and system.
* Memory is the peak of resident memory above its size at the start of the run, which includes our
  whole ring.
* **vLLM 0.33's path** is written from its description. Rows stay in paged memory (blocks of
  {BLOCK_TOKENS} tokens) until the request ends. Then they are gathered by block ids and copied to
  newly allocated pinned memory, the file's lock is taken, and one of {VLLM_THREADS} threads calls
  safetensors' save_file with rows and token ids and releases the lock. It is also the path of
  vLLM 0.26 and 0.30 (`example_hidden_states_connector.py:317` and `:347` in 0.30.0)."""

VIEWS = {
    PINNED: """\
Work of the host alone. When a step ends, its rows are in pinned memory, where a device's DMA engine
has put them; vLLM 0.33's path has done its gather and its copy by then. Ours: open the file and its
lock, pass rows between main, opener, lander and writer threads, write, checksum, header, rename,
release the lock. Raw write: open, pwrite, close; no lock, rename, token ids or checksum.""",
    COPIED: """\
As before, with a memcpy by a thread of this process in place of DMA. Ours copies slots into the
ring in the lander thread. vLLM 0.33's path gathers by block ids (into existing memory), allocates
pinned memory for each request and copies. On hardware the device gathers and copies, and the host
only allocates the memory. «Reused»: with the pinned memory of an earlier request, the best case of
torch's caching allocator. The raw write is the one above, without any copy.""",
    DURABLY: """\
Rows are in pinned memory as in the first view. Ours, with
`"io": "direct", "durability": "fdatasync"`, also reserves space, syncs the file before the rename,
and syncs the directory after it. Raw O_DIRECT: open, fallocate, pwrite, fdatasync, close. «With
checksum»: the CRC-32C of each piece is computed before the piece is written. «Published»: plus a
rename and an fsync of the directory.""",
}

LATENCY = """\
One prompt at a time, in steps of {step_tokens:,} tokens except for the last. «Last row»: the last
piece of the last chunk is in pinned memory. «End of step»: the main thread passes on the slot of
the last chunk. A file cannot be complete before its last chunk is written, so the raw write of that
chunk, measured in the same turn, is the limit. «Published»: visible under its name. «Notified»: a
reader in another process, which sleeps in `vllm_ascend_hsx.load`, wakes up; {told} ms after
publishing over all prompts (p50 / p99). The release of a bare flock takes {bare} ms to wake
a process here. A reader that polls every 0.1 s finds the file {polled} ms after it was
published. «Mapped»: `load(path, mmap=True)` has returned.

vLLM 0.33's path starts when the request ends, and takes
{vllm} (median)."""

ENGINE = """\
Three engines take turns with the same requests: extraction {off}, ours, and vLLM 0.23.0's
ExampleHiddenStatesConnector. They do not differ otherwise: chunked prefill is off for all, because
vLLM refuses its connector with it. All three are started {starts} times and serve {rounds} rounds each time,
because two processes of one engine differ by more than extraction costs, though each is steady in
itself. A start's figure is the median of its rounds; the table has the median of the starts, the
lowest and the highest. Prefill-bound requests generate one token, decode-bound ones 48. The time is
measured from the first request to the last complete file. CPU time is that of all threads of the
engine's process; on an emulated NPU it includes the forward pass, which is that of a tiny model:
what extraction costs is a larger share of it than of a real one."""

STEP = """\
CPU time of the thread that runs the model: worker and proposer with layer
and staging. Rows are so narrow that moving them costs nothing, because on hardware the device moves
them, while an emulated NPU does it in this thread. A linear fit of the cells: **{step:.0f} µs per
step, {request:.1f} µs for each request in it, {begins:.1f} µs for each that begins**. Of a step,
{launches:.0f} µs are calls of the device, here the emulator: its stream, events and one launch. A
prompt that is 1,000 tokens longer adds {slope:+.1f} µs to a step."""

DECODE = f"""\
Requests that each get one row of MiniMax-M2 per step. The main thread spends {{python:g}} ms of each
step in Python, as a scheduler and a runner do, and then waits {DEVICE_S * 1e3:g} ms for the device, so the
writers compete with it for the GIL. Without extraction, ours and raw writes take turns, {{rounds}}
rounds of {{steps}} steps. CPU time is that of all threads until the files are published, less that of
the steps without extraction. The limits are os.pwrite of one row, and of {JOINED_BYTES >> 10} KiB of rows."""

SLOW_STORAGE = f"""\
One request that is not extracted streams its tokens while {{in_flight}} extracted prompts of
{{tokens}} tokens are always in flight, on the emulated NPU, for {{seconds:g}} seconds each. The
{RING_BYTES >> 20} MiB of pinned memory hold about ten of them. Storage accepts a share of what prompts
produce when it is fast ({{needed}}); os.pwrite waits accordingly.
«No extraction»: the same prompts, all of which opt out. Prompts that are held back are answered
later, and the stream then has the engine to itself, so its gaps are shorter than without
extraction. Machine:
{{machine}}."""

CONVERSATIONS = f"""\
{{conversations}} conversations of {{turns}} turns. All prompts begin with the same {{system:,}} tokens, and
each turn adds {{least}} to {{most}} tokens to the one before. The {{tokens}} tokens of the prompts are
{{distinct}} different ones; a server computes more because it caches whole blocks of 128 tokens.
Every engine has its prefix cache on and gets the prompts in the order of `hsx generate`,
{{concurrency}} at a time, on the emulated NPU. They take turns, {{rounds}} rounds with a share of the
conversations each; without reuse there is the first round only, compared with the same round of
«off». «Computed» is what vLLM counts as `{COUNTER}` with
`source="{SOURCE}"`: prompt tokens less those read from the prefix cache. Seconds are those until the
last file is published, in all rounds; their ratio is the median of the rounds. «Rows copied» come
from earlier files. A file is right if it has the row of each token, equal to that of transformers in
float32. vLLM's connector is that of vllm-ascend {RELEASE}, compared with an engine of that release
without extraction. Machine: {{machine}}."""

CAPACITY = """\
The part of the KV cache that remains on a server with {memory} GiB per NPU for it, TP={tensor_parallel},
requests of {length:,} tokens and steps of {step:,}, with four layers extracted. vLLM's planner with
vllm-ascend's patches counts the KVCacheSpecs that the layers of a model make; nothing is timed.
«hsx»: staging is subtracted from the memory; each rank stages its share of a step. «Upstream»:
vLLM's ExampleHiddenStatesConnector, whose rows are in the KV cache. «Tokens» is what a server logs
as the size of its KV cache.{refusals}

To the rows of rotated weights (QuaRot), staging also adds a product with a matrix: ten passes over
a row's bytes on the device instead of two, and for MiniMax-M2 with these layers 75 MFLOP per token
and 48 MiB per NPU (`hsx plan minimax-m2 --rotated`). Other targets pay nothing for it."""
