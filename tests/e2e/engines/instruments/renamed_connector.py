"""vLLM's connector under a name for which vLLM allows chunked prefill (config/vllm.py:766)."""

from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)


class RenamedHiddenStatesConnector(ExampleHiddenStatesConnector):
    pass
