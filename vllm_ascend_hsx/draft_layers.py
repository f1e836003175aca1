"""The layers that a published draft model reads, from the config.json of the draft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.protocol.errors import UserError

OPTION = "--layers"
_LARGEST = 16 << 20  # bytes of a config.json

# Keys of the ids in the config of a draft, in vLLM's order of precedence
# (v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:98, 0.30), and the number to add to an id. An id
# of DFlash or DSpark is the index of a layer whose output the draft reads. Our id is the number of
# layers before the state, like an id of speculators
# (transformers_utils/configs/speculators/algos.py:118).
_PLACES: tuple[tuple[tuple[str, ...], int], ...] = (
    (("eagle_aux_hidden_state_layer_ids",), 0),
    (("aux_hidden_state_layer_ids",), 0),
    (("dflash_config", "target_layer_ids"), 1),
    (("dspark_target_layer_ids",), 1),
    (("target_layer_ids",), 1),
    (("eagle_config", "eagle_aux_hidden_state_layer_ids"), 0),
)
# Drafts of these models read the inputs of layers (eagle3_utils.py:116).
_AS_OURS = {("deepseek_v41", ("dspark_target_layer_ids",))}


def layers_of_draft(path: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers to extract for a draft: the layers that the draft reads, and the last.

    Training computes the logits of the target from the last layer.

    Args:
        path: directory of the draft, or path of the config.json.
        num_layers: layers of the target.

    Raises:
        UserError: if there is no config.json with layer ids.
    """
    config = _read(path)
    ids = next(
        filter(None, (_ids_at(config, keys, offset, path) for keys, offset in _PLACES)), None
    )
    if ids is None:
        keys = ", ".join(".".join(place) for place, _ in _PLACES)
        raise UserError(
            OPTION,
            path,
            f"has no layer ids (none of the keys {keys})",
            "Give layer ids, or eagle3 for the default layers.",
        )
    return ids if num_layers in ids else (*ids, num_layers)


def _ids_at(
    config: Mapping[str, Any], keys: tuple[str, ...], offset: int, path: str
) -> tuple[int, ...] | None:
    found: Any = config
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    if not found:
        return None
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        problem = f"has no list of integers under {'.'.join(keys)}"
        raise UserError(OPTION, path, problem, "Give layer ids.")
    if (config.get("model_type"), keys) in _AS_OURS:
        offset = 0
    return tuple(each + offset for each in found)


def _read(path: str) -> Mapping[str, Any]:
    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    remedy = "Give the directory of a draft, or its config.json."
    try:
        if file.stat().st_size > _LARGEST:
            raise UserError(OPTION, path, "is too large for a config.json", remedy)
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(
            OPTION, path, f"has no readable config.json: {error.strerror}", remedy
        ) from None
    except ValueError as error:
        raise UserError(OPTION, path, f"is not JSON: {error}", remedy) from None
    if not isinstance(config, dict):
        raise UserError(OPTION, path, "is not a JSON object", remedy)
    return config
