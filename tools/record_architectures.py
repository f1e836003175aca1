"""Record the collector of the hidden states of each architecture in the installed release.

Run `hsx emulate -- python tools/record_architectures.py` in the environment of the release. The
output is vllm_ascend_hsx/compat/architectures.json.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.compat.canonical import NotCanonicalError
from vllm_ascend_hsx.compat.collector import collection_of
from vllm_ascend_hsx.compat.targets import shown_inside
from vllm_ascend_hsx.compat.versions import CHECKED_PAIRS, release_to_patch

TARGET = Path(__file__).parents[1] / "vllm_ascend_hsx" / "compat" / "architectures.json"
# Tables of vLLM's registry that list targets; other tables have drafts and models without text.
TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")


def served_classes() -> dict[str, Any]:
    """Return the class of each target that vLLM and vllm-ascend register, by architecture.

    A class is left out if the module needs a missing package.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    found = {}
    for name in sorted(
        {name for table in TABLES for name in getattr(registry, table)}
        & ModelRegistry.models.keys()
    ):
        try:
            found[name] = ModelRegistry.models[name].load_model_cls()
        except ImportError:
            continue
    return found


def registered(architectures: Sequence[str]) -> Any:
    """Return the class of the first registered architecture, or None without architectures."""
    from vllm import ModelRegistry

    known = [name for name in shown_inside(architectures) if name in ModelRegistry.models]
    return ModelRegistry.models[known[0]].load_model_cls() if known else None


def recorded() -> dict[str, dict[str, Any]]:
    """Return the entry of architectures.json of the installed release."""
    collected: dict[str, list[str]] = defaultdict(list)
    refused: dict[str, str] = {}
    for name, served in served_classes().items():
        try:
            collected[collection_of(served, registered).name].append(name)
        except NotCanonicalError as error:
            refused[name] = str(error)
    return {"collected": dict(sorted(collected.items())), "refused": refused}


def main() -> None:
    known = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    known[str(release_to_patch("vllm"))] = recorded()
    checked = {pair.vllm for pair in CHECKED_PAIRS}
    TARGET.write_text(
        json.dumps({name: known[name] for name in sorted(checked & known.keys())}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
