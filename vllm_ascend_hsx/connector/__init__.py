"""The KV connector: scheduler side, worker side, and the messages between them.

Decisions

* `extraction` alone decides whether a request is complete, failed or aborted. All work on a file
  passes through a `lane`. The lander appends the end behind the last row, so nobody counts
  writes.
* A step waits for the files of its new requests, because locks must be held before a response can
  leave. If that takes longer than 50 ms, no request begins for three times as long.
* The lander polls an event twice per millisecond: `Event.synchronize` of torch_npu spins. A
  thread without a device that drops an event opens a context of 107 MiB on NPU 0, so only the
  main thread and the lander use the device.
* vllm-ascend binds workers to the CPUs of the NPU at the end of the warm-up. The first step
  chooses the number of writers again.
* A device error arrives once, in any thread, and later work is dropped silently (`NPUQueue.cpp`).
  So the first error ends the worker: incomplete files get the text, the next call raises it, and
  the process ends after five seconds. The lander writes eight random bytes to each run of the
  ring before the copy. If they survive, the device has dropped the copy. An idle lander enters
  the task queue once per second.
* A cached prefix makes no rows. A request reads the cache only as far as an earlier file of this
  engine has the rows (`prefixes`, keyed by block hashes). Adapters are excluded, because a hash
  has the name of an adapter but not the weights. The owner rank keeps such files open
  (`open_sources`), copies the rows and compares them with the checksums. A request waits for
  another's prefix only while that is faster than computing the rows.
* New weights start a new version (`weights`): kept files are released, and all rows are computed
  until the prefix cache has been reset. The number counts calls, so all data-parallel engines
  agree. Not detected: weights that change without a call of the workers, and another rotation.
* Rows of generated tokens are collected in the ring (`batches`). One write per row would take 51
  to 55 µs, six times a raw write. Batches are written at 256 KiB, at the end of a request, when
  all batches hold a quarter of the ring, or when the ring stays full.
* An abort discards the file, except after a stop string or with `keep_aborted`.
* Back-pressure (`admission`): a rank holds new requests while the debt would exceed the ring. The
  debt is the unwritten rows plus 1 - W/P of the prompt rows to come, for a write rate W and a
  compute rate P. Unknown rates count as slow. Running requests never stop. A prompt larger than
  the ring begins when half of the ring is free. A generating request begins only if all rows of
  all requests fit, or if storage keeps up with a row per step of each request.
* Storage that makes no progress for a second admits no request on any rank, because ranks share
  the storage. After `storage_timeout_s` the waiting requests fail. The first written rows end
  this.
* `directory_budget_bytes` is divided among ranks (`budget`). Nobody announces a removal, so ranks
  look for removed files when the share is used up.
* Stats are nanoseconds and fixed buckets, so ranks and steps add up in any order. Prometheus gets
  the mean of each bucket, and counts and sums stay exact.
* A sample is chosen by a hash, so all engines agree without state.
* Beside another connector, extracted requests load no cached tokens, because such tokens have no
  rows.
* Beam search is not extracted. It makes a request for each beam and token, and most of the files
  would hold no returned text.
"""
