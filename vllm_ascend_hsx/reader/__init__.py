"""The consumers' side: wait for, load, find and check files. Imports only `protocol`.

Decisions

* `find` takes the id of a response, because vLLM returns `kv_transfer_params` for one prompt and
  one sample only, and neither in streams nor with stop strings.
* `load` needs no write permission: on other machines it waits for the heartbeat to change
  (`other_machines`).
* `test_fuzz_readers.py` mutates files, shards, ledgers, manifests and error files. Readers raise
  errors and never crash.
"""
