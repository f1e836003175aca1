"""A client of a Mooncake store on a separate machine. Imports no test modules.

As a script, with the first argument

* write: store a request, print the kv_transfer_params and the digest of the rows, and provide
  memory to the store until stdin ends.
* read: read kv_transfer_params from stdin. Print the digests of the rows that our reader and the
  reader of speculators return.
* lend: provide memory to the store until stdin ends. Print "ready" at the start.

The second argument is the address of the master.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_ascend_hsx.protocol.mooncake.manifest import handle_of, transfer_params
from vllm_ascend_hsx.protocol.mooncake.store import MooncakeClient, MooncakeOptions, own_address
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.reader.mooncake import MooncakeReader
from vllm_ascend_hsx.sinks.mooncake.sink import MooncakeSink

FORMAT = RowFormat((2, 31, 59), 64, "F32", "tiny")
TOKENS = 5000  # several chunks of the arena


def digest(found: dict[str, Any]) -> str:
    """Return the SHA-256 of rows and token ids."""
    assert found["hidden_states"].dtype == torch.float32
    return hashlib.sha256(
        found["hidden_states"].numpy().tobytes() + found["token_ids"].numpy().tobytes()
    ).hexdigest()


def write(master: str) -> None:
    rows = torch.randn(TOKENS, *FORMAT.row_shape)
    ids = torch.arange(TOKENS)
    options = MooncakeOptions(
        master_server_address=master, global_segment_size=64 << 20, local_buffer_size=8 << 20
    )
    with MooncakeSink(options, FORMAT) as sink:
        file = sink.open("cmpl-1", Path(handle_of("cmpl-1")), TOKENS)
        file.write(0, rows.numpy().view(np.uint8))
        file.commit(ids.numpy(), TOKENS)
        params = transfer_params(file.handle, FORMAT, TOKENS, False)
        print(
            json.dumps(
                {"params": params, "digest": digest({"hidden_states": rows, "token_ids": ids})}
            ),
            flush=True,
        )
        sys.stdin.read()


def lend(master: str) -> None:
    client = MooncakeClient(MooncakeOptions(master_server_address=master), segment=64 << 20)
    print("ready", flush=True)
    sys.stdin.read()
    client.close()


def read(master: str) -> None:
    from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig
    from hs_connectors.transfer import MooncakeTransfer

    params = json.load(sys.stdin)
    with MooncakeReader(master) as reader:
        ours = digest(reader.load(params, 60)._asdict())
    transfer = MooncakeTransfer(
        MooncakeHiddenStatesStore(
            MooncakeStoreConfig(own_address(master), "P2PHANDSHAKE", master, 0, 16 << 20)
        )
    )
    transfer.setup()
    theirs = transfer.get_generated(params)
    assert theirs is not None
    print(json.dumps([ours, digest(theirs)]))


if __name__ == "__main__":
    {"write": write, "lend": lend, "read": read}[sys.argv[1]](sys.argv[2])
