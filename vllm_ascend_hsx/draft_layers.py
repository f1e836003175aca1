"""The layers that a published draft model reads, from the config.json of the draft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.protocol.errors import UserError

OPTION = "--layers"
_LARGEST = 16 << 20  # bytes of a config.json

# Where drafts keep the ids, in the order in which vLLM looks
# (v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:98, 0.30), and what they count. An id of DFlash
# and DSpark is a layer, and the draft reads the output of the layer. Ours is the number of layers
# before. An id of speculators is as ours (transformers_utils/configs/speculators/algos.py:118).
_PLACES: tuple[tuple[tuple[str, ...], int], ...] = (
    (("eagle_aux_hidden_state_layer_ids",), 0),
    (("aux_hidden_state_layer_ids",), 0),
    (("dflash_config", "target_layer_ids"), 1),
    (("dspark_target_layer_ids",), 1),
    (("target_layer_ids",), 1),
    (("eagle_config", "eagle_aux_hidden_state_layer_ids"), 0),
)
# Its drafts read the inputs of layers (eagle3_utils.py:116).
_AS_OURS = {("deepseek_v41", ("dspark_target_layer_ids",))}


def layers_of_draft(path: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers to extract for a draft: those that it reads, and the last one.

    Training computes the logits of the target from the last one.

    Args:
        path: directory of the draft, or the config.json in it.
        num_layers: layers of the target.

    Raises:
        UserError: there is no config.json that names layers.
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
            f"has no layer ids (it has none of {keys})",
            "Give ids, or eagle3 for the default layers.",
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
        raise UserError(OPTION, path, f"has no list of integers as {'.'.join(keys)}", "Give ids.")
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
            OPTION, path, f"has no config.json that can be read: {error.strerror}", remedy
        ) from None
    except ValueError as error:
        raise UserError(OPTION, path, f"is not JSON: {error}", remedy) from None
    if not isinstance(config, dict):
        raise UserError(OPTION, path, "is not an object", remedy)
    return config
