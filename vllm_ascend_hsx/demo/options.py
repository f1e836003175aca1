"""The command line of the demo's server."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm_ascend_hsx.config import CONNECTOR_NAME
from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config

# For vllm-ascend's --additional-config.
SEQUENCE_PARALLEL = {"enable_flashcomm1": True}


class ServeOptions(NamedTuple):
    """Options of the demo's server.

    A small max_num_batched_tokens makes it prefill long prompts in chunks.

    Attributes:
        whole_prompts: True to disable chunked prefill and prefix caching, as vLLM's own connector
            requires.
        connector: connector to use instead of ours; None for a server without extraction.
        connector_options: further keys of `kv_connector_extra_config`.
        additional: further keys of vllm-ascend's --additional-config.
    """

    model: str
    storage: Path
    layer_ids: tuple[int, ...]
    port: int
    data_parallel_size: int = 2
    tensor_parallel_size: int = 2
    expert_parallel: bool = True
    sequence_parallel: bool = False
    max_model_len: int = 512
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 128
    whole_prompts: bool = False
    connector: str | None = CONNECTOR_NAME
    connector_options: Mapping[str, Any] = MappingProxyType({})
    additional: Mapping[str, Any] = MappingProxyType({})
    extra: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Return `vllm serve ...` with this interpreter."""
        additional = {**(SEQUENCE_PARALLEL if self.sequence_parallel else {}), **self.additional}
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self.model),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            # One API server: a second one would only take memory and start time.
            *("--data-parallel-size", str(self.data_parallel_size), "--api-server-count", "1"),
            *("--tensor-parallel-size", str(self.tensor_parallel_size)),
            *(("--enable-expert-parallel",) if self.expert_parallel else ()),
            *(("--additional-config", json.dumps(additional)) if additional else ()),
            *("--max-model-len", str(self.max_model_len), "--max-num-seqs", str(self.max_num_seqs)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            *(
                f"--{'no-' if self.whole_prompts else ''}enable-{feature}"
                for feature in ("chunked-prefill", "prefix-caching")
            ),
            # vllm-ascend's choice with chunked prefill. Without chunked prefill 0.23.0 has no
            # default.
            *(("--block-size", "128") if self.whole_prompts else ()),
            *(() if self.connector is None else self._extraction(self.connector)),
            *self.extra,
        ]

    def _extraction(self, connector: str) -> tuple[str, ...]:
        transfer = kv_transfer_config(self.storage, **self.connector_options) | {
            "kv_connector": connector
        }
        speculative = speculative_config(self.layer_ids)
        return (
            "--speculative-config",
            json.dumps(speculative),
            "--kv-transfer-config",
            json.dumps(transfer),
        )
