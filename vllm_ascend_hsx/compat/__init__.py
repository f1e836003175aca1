"""All replacements, calls and names of vLLM and vllm-ascend that the plugin depends on.

No module here imports either package at module level, except `qwen3_next`: a general plugin is
loaded before the platform is resolved, and an early import of vllm_ascend would run its patches
too soon. MR in these modules is vllm_ascend/worker/model_runner_v1.py.

Decisions

* `@patch(module, path, versions, why=...)` replaces a function. The function becomes the first
  argument of the replacement. `uses(...)` declares a function that is called or named.
  `plugin.register` applies patches with post-import hooks, because plugins are loaded before
  vllm-ascend's own patches.
* Names and signatures do not prove that a function still does the same. `sources.json` has
  digests of files and functions for each checked release. If a file differs, all patch points are
  examined in another process before weights are loaded (`installed`). An unknown release is
  treated as the newest checked release before it (`versions`).
* vllm-ascend refuses classes without SupportsEagle3, two thirds of the classes. The plugin
  collects them by their source (`canonical`, `collector`): a loop over layers, then a norm. The
  state after a layer is `hidden + residual` if the layer begins with a norm of vLLM that adds
  them, and `hidden` if the layer overwrites the residual or has none. Cohere shows why the last
  norm is checked: it takes a residual and does not add it. Other code is refused.
* Multimodal classes that return the language model's output unchanged are unwrapped (`wrappers`).
  `architectures.json` has the verdict for each class of each release, so `hsx doctor` needs no
  vLLM.
* `kv_role` must be kv_producer: other roles make vllm-ascend skip the DP collective for MC2.
  Balance scheduling needs kv_both. MultiConnector can have that role (`scheduling`).
* A producer with an int8 KV cache (C8) would compute nothing in decodes on vllm-ascend 0.23.0.
  `engine.keep_int8_cache` restores the computation. `engine.keep_preemption` restores preemption,
  because requests that fill the KV cache could otherwise never proceed.
* Decode context parallelism is refused. Rows of prompts were right in a trial. Nothing shows the
  rows of decodes, because the emulated NPU lacks the operator (BSND with a mask).
* The API server opts beams out and answers with `hidden_states_error` (`request_params`). A beam
  makes a request for each token, without the parameters of the client.
* Stopping (`shutdown`): each process waits for the processes below. Workers leave a signal of the
  process group to the engine core. Requests that come later fail, because the HTTP server would
  wait for them forever.
* Tokens are sent only after the device was asked for an error (`failures`).
* MC2's capacity is kept as without extraction, because ranks must choose one expert
  communication.
"""
