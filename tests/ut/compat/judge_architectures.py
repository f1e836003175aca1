"""Print, as JSON, what is recorded of the installed release, and a server's verdict on each target.

A process of its own: a server changes the class that it serves.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from record_architectures import recorded, served_classes

from vllm_ascend_hsx.compat.targets import refuse_architecture, require_collecting_target
from vllm_ascend_hsx.protocol.errors import UserError


def refusal(architecture: str, served: Any, layer_ids: tuple[int, ...]) -> str:
    """Return a server's reason not to load the weights; empty if it would."""
    registry = SimpleNamespace(resolve_model_cls=lambda names, model_config: (served, names[0]))
    try:
        refuse_architecture(architecture, layer_ids)
        require_collecting_target(SimpleNamespace(architectures=[architecture], registry=registry), layer_ids)
    except UserError as error:
        return error.problem
    return ""


found = recorded()
verdicts = {name: [refusal(name, served, ids) for ids in ((1,), (0,))] for name, served in served_classes().items()}
print(f"\njudged: {json.dumps([found, verdicts])}")
