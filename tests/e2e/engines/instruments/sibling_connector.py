"""Connectors beside ours in MultiConnector: they offer known prompts, and load nothing."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

BLOCK = 128


class UnawareConnector(KVConnectorBase_V1):
    """A connector without SupportsHMA: it knows only one KV cache group."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._seen: list[list[int]] = []

    # Scheduler side

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Offer the whole blocks of the longest known prefix, without the last token."""
        prompt = list(request.prompt_token_ids)
        common = max((sum(1 for _ in _while_equal(seen, prompt)) for seen in self._seen), default=0)
        return max(0, min(common, len(prompt) - 1) // BLOCK * BLOCK - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._seen.append(list(request.prompt_token_ids))
        remote = (request.kv_transfer_params or {}).get("do_remote_decode")
        return False, {"remote_engine_id": "sibling"} if remote else None

    # Worker side

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


class SiblingConnector(UnawareConnector, SupportsHMA):
    """A connector with SupportsHMA."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])


def _while_equal(a: list[int], b: list[int]) -> Any:
    for left, right in zip(a, b, strict=False):
        if left != right:
            return
        yield left
