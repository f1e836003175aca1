"""The contract of writers and readers: bytes, names, locks and checksums; request keys.

Decisions

* A lock is created under a hidden name, locked, and then linked to the public name (`lock`). A
  reader that finds a free lock may conclude that the server died.
* Readers remove the lock. Removing it with the commit would break the waiting reader of
  speculators, and vLLM's `load_hidden_states`: it opens the lock unconditionally.
* Files are opened in one way (`files`: regular files only, without waiting). One parser reads
  JSON (`strict_json`: at worst a ValueError), and one function reads headers (`format`).
* An acknowledgement is a file beside the data: readers would see a lock or a rename.
"""
