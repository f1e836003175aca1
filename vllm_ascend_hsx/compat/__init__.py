"""The touches on vLLM and vllm-ascend internals, each with its reason and the version it was checked against.

Nothing here is imported at module level from either: a general plugin is loaded before the platform is resolved, and an early import of
vllm_ascend would run its patches too soon. MR in these modules is vllm_ascend/worker/model_runner_v1.py.
"""
