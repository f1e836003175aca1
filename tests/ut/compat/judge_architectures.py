"""Print, as JSON, the record of the installed release, and a server's verdict on each target.

It runs in a separate process, because a server changes the class that it serves.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from record_architectures import recorded, registered, served_classes

from vllm_ascend_hsx.compat.targets import (
    language_architectures,
    refuse_architecture,
    require_collecting_target,
)
from vllm_ascend_hsx.protocol.errors import UserError

# Classes that the text config may name: refused, unservable, collected by us, and collected by
# vLLM's own code.
NAMED = ("BloomForCausalLM", "NemotronHForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM")


def refusal(architecture: str, served: Any, layer_ids: tuple[int, ...], named: list[str]) -> str:
    """Return a server's reason to refuse before loading weights; empty if it would load them."""

    def resolve(names: list[str], model_config: Any) -> tuple[Any, str]:
        return (served if names == [architecture] else registered(names)), names[0]

    hf_config = SimpleNamespace(text_config=SimpleNamespace(architectures=named))
    config = SimpleNamespace(
        architectures=[architecture],
        registry=SimpleNamespace(resolve_model_cls=resolve),
        hf_config=hf_config,
    )
    try:
        refuse_architecture(architecture, layer_ids, language_architectures(hf_config))
        require_collecting_target(config, layer_ids)
    except UserError as error:
        return error.problem
    return ""


found = recorded()
wrappers = found["collected"]["LANGUAGE_MODEL"]
verdicts = {
    f"{name} {language_model}".strip(): [
        refusal(name, served, ids, [language_model]) for ids in ((1,), (0,))
    ]
    for name, served in served_classes().items()
    for language_model in (NAMED if name in wrappers else [""])
}
print(f"\njudged: {json.dumps([found, verdicts])}")
