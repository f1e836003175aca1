"""Writes docs/options.md from HsxConfig: `python tools/options_reference.py`. A test holds the file against what this would write."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_ascend_hsx.config import HsxConfig

TARGET = Path(__file__).parents[1] / "docs" / "options.md"

HEAD = """# Options

The keys of `kv_connector_extra_config`. A key that is not here, or a value of the wrong type, stops the server at its start with an error
that names the key, the value and what to do. This page is written from the code (`tools/options_reference.py`).

| key | type | default | |
|---|---|---|---|
"""


def reference() -> str:
    """The page, in Markdown."""
    properties = HsxConfig.model_json_schema()["properties"]
    rows = []
    for name, field in HsxConfig.model_fields.items():
        default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
        rows.append(f"| `{name}` | {_type(properties[name])} | {default} | {field.description} |")
    return HEAD + "\n".join(rows) + "\n"


def _type(schema: dict[str, object]) -> str:
    """What JSON a value is, with its limits."""
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])  # type: ignore[attr-defined]
    choices = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]  # type: ignore[attr-defined]
    (schema,) = choices
    limits = {"minimum": "≥ ", "maximum": "≤ ", "exclusiveMinimum": "> "}
    said = [f"{sign}{schema[key]:g}" for key, sign in limits.items() if key in schema]  # type: ignore[str-bytes-safe]
    return " ".join([str(schema["type"]), ", ".join(said)]).strip()


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
