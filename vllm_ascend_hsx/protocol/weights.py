"""The version of the target's weights that computed rows: in files, responses and messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_ascend_hsx.protocol.strict_json import is_count, parse

WEIGHTS = "weights"
WEIGHT_VERSIONS = "weight_versions"
_NAME = re.compile(r"[ !#-\[\]-~]{1,128}")  # no character is longer in JSON
_FINGERPRINT_DIGITS = 32


class WeightVersion(NamedTuple):
    """The weights that an engine computes with, from one load to the next.

    Attributes:
        number: number of calls since the start that may have changed the weights; 0 for the
            checkpoint with which the engine was started.
        name: name that a user has given these weights; empty without a name.
        fingerprint: fingerprint of the checkpoint; empty if unknown.
    """

    number: int = 0
    name: str = ""
    fingerprint: str = ""


class Origin(NamedTuple):
    """Facts about a request's rows that are known when the request ends, for the metadata.

    Attributes:
        weights: the version that computed all rows; or, of several, the oldest and the newest.
            Empty if unknown.
        is_aborted: whether the request was aborted and the rows computed before are kept.
    """

    weights: Sequence[WeightVersion] = ()
    is_aborted: bool = False


UNKNOWN = Origin()


def checked_name(name: object) -> str:
    """Return the name that a user gives a version. Raises ValueError if it cannot be used."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = repr(name)[:60]
        raise ValueError(
            f"a weight version cannot be named {shown}: use 1 to 128 printable ASCII characters "
            'other than " and \\'
        )
    return name


def numbers_and_names(versions: Sequence[WeightVersion]) -> list[list[Any]]:
    """Return the versions as files and responses state them: each as [number, name]."""
    return [[each.number, each.name] for each in versions]


def encode_origin(origin: Origin) -> dict[str, str]:
    """Return the metadata of rows. A fingerprint is included only if all rows have the same."""
    versions, fingerprints = origin.weights, {each.fingerprint for each in origin.weights}
    return {
        **(
            {WEIGHTS: versions[0].fingerprint}
            if len(fingerprints) == 1 and versions[0].fingerprint
            else {}
        ),
        **(
            {WEIGHT_VERSIONS: json.dumps(numbers_and_names(versions), separators=(",", ":"))}
            if versions
            else {}
        ),
        **({"aborted": "true"} if origin.is_aborted else {}),
    }


# The longest possible metadata.
LONGEST = Origin([WeightVersion(2**63, "x" * 128, "0" * _FINGERPRINT_DIGITS)] * 2, is_aborted=True)


def weight_versions_of(metadata: Mapping[str, str]) -> list[WeightVersion]:
    """Return the versions of the weights that computed rows; empty if the metadata have none.

    Raises ValueError if they are invalid.
    """
    text = metadata.get(WEIGHT_VERSIONS)
    if text is None:
        return []
    try:
        found = parse(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not 1 <= len(found) <= 2 or not all(map(_is_version, found)):
        raise ValueError(f"{WEIGHT_VERSIONS}={text[:100]!a} are not versions of weights")
    fingerprint = metadata.get(WEIGHTS, "")
    return [WeightVersion(number, name, fingerprint) for number, name in found]


def _is_version(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and is_count(value[0])
        and isinstance(value[1], str)
    )
