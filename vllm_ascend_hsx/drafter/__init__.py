"""Device side: batch layout, the cache-only layer, and staging of rows for the host.

Decisions

* No draft tokens. vLLM requires `num_speculative_tokens` >= 1 and would then compute two tokens
  per decode, with the rejection sampler and graphs for two tokens.
  `compat.drafts.schedule_no_drafts` sets it to 0. Text, steps, graphs and KV cache are the same
  as without extraction.
* The drafter computes nothing, but issues the same collectives on every rank. The cache-only
  layer is in no KV cache group and in no graph. It calls the connector directly
  (`compat.runner.connector_hand_over`), because vLLM's decorator took 40 of 117 µs per step.
* Positions are read on the host, and only while a request lacks rows.
* Device memory sees three passes: staging reads and writes a row, and the copy reads it. Upstream
  makes nine. One kernel stacks up to 32 layers. CANN would stack more layers through a temporary
  of the same size as the rows, so more layers are copied one by one.
* A slot has ceil(max_num_batched_tokens / TP) rows, the share of one rank. A longer step takes
  several slots in turn. When it takes a slot again, the compute stream waits for the copy of that
  slot, so at most all rows but `staging_slots` / TP of a step reach the host before the device
  continues. No step waits for copies of the same step if `staging_slots` >= TP. To spread one
  prompt over ranks, two ranks would have to write one file. The ring holds the rows that the
  slots lack (`shapes.ring_bytes`).
* Slots are allocated with the drafter, so vLLM's profile run counts them.
* The self-test copies known rows through staging, stream and pinned memory at load. In a request
  the same failure would be asynchronous. It also loads every kernel that a later step launches.
  No operator may need more memory than the operators of the target, because the profile run does
  not see it.
* Rotated targets (QuaRot) compute X Q with an orthogonal Q. Staging multiplies rows by the
  transpose of Q in float32 and rounds once, so rows have the basis that drafts are trained on. A
  rotated target without the matrix is refused.
* Sleep unmaps vllm-ascend's pool: slots, the matrix and buffers. Before a worker sleeps, copies
  are finished and the matrix moves to the host. It returns with the first rows (`rotation`).
  vllm-ascend's tag `sleep_persistent` does not help, because a tag belongs to a segment that
  tensors share.
* The ring is 256 MiB per worker. vLLM computes long prompts one after the other, and Linux lets
  one thread write to a file. Two prompts of 8,192 tokens keep two writers busy for 51 % of the
  time with 32 MiB, 69 % with 128 MiB and 94 % with 256 MiB (storage of 200 MB/s per file).
* Sizes are powers of two, because torch pins powers of two. Runs begin at pages, for O_DIRECT.
  Before driver 25.5 torch_npu may return a null pointer, and the ring refuses it.
"""
