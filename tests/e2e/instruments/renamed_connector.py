"""vLLM's connector under another name. vLLM refuses chunked prefill for it by its name alone (config/vllm.py:766 in 0.23.0)."""

from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector


class RenamedHiddenStatesConnector(ExampleHiddenStatesConnector):
    pass
