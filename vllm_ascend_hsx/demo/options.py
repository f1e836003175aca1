"""The command line of `vllm serve` with extraction on: one place for the two JSON options that a user has to give."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


def speculative_config(layer_ids: Sequence[int]) -> dict[str, Any]:
    """The value of --speculative-config; layer_ids are residual-stream ids in the order wanted in the file."""
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
    }


def kv_transfer_config(storage: str | Path) -> dict[str, Any]:
    """The value of --kv-transfer-config; storage is the absolute path of the directory that receives the files."""
    return {
        "kv_connector": "AscendHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }


class ServeOptions(NamedTuple):
    """What the demo's server is started with. max_num_batched_tokens is small so that long prompts are prefilled in chunks."""

    model: str
    storage: Path
    layer_ids: tuple[int, ...]
    port: int
    data_parallel_size: int = 2
    tensor_parallel_size: int = 2
    expert_parallel: bool = True
    max_model_len: int = 512
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 128
    extra: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """`vllm serve ...` with this interpreter, chunked prefill and prefix caching on."""
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self.model),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            # One API server: a second would only cost memory and time to start.
            *("--data-parallel-size", str(self.data_parallel_size), "--api-server-count", "1"),
            *("--tensor-parallel-size", str(self.tensor_parallel_size)),
            *(("--enable-expert-parallel",) if self.expert_parallel else ()),
            *("--max-model-len", str(self.max_model_len), "--max-num-seqs", str(self.max_num_seqs)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            *("--enable-chunked-prefill", "--enable-prefix-caching"),
            *("--speculative-config", json.dumps(speculative_config(self.layer_ids))),
            *("--kv-transfer-config", json.dumps(kv_transfer_config(self.storage))),
            *self.extra,
        ]
