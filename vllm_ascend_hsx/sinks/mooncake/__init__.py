"""The sink for a Mooncake store.

Decisions

* Rows gather in chunks of memory that is registered once (`buffer_pool`). No request waits for
  memory of another, and nothing is moved when a request grows.
* Object and manifest are pinned, so Mooncake does not evict them.
* Objects go to the segment of the server first. A server loses rows only with the process.
* The master is not asked while Mooncake knows that it is away, so its death costs a step some
  seconds once.
* A put that fails for the place is repeated, because the master learns after ten seconds that a
  process has ended. All puts share one limit, from the first failure to the next success. A put
  without an answer of the master is not repeated: Mooncake would report success for an object
  that was only begun.
* The store class of hs-connectors 0.9.0 is not used. It pins nothing, holds the GIL for 90
  seconds while it tries a dead master, bounds no memory, and knows no checksum. The layout is
  compatible.
"""
