"""Write docs/options.md from HsxConfig: `python tools/options_reference.py`. A test compares it."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.protocol.mooncake.store import MooncakeOptions

TARGET = Path(__file__).parents[1] / "docs" / "options.md"

HEAD = """# Options

The keys of `kv_connector_extra_config`. A key that is not here, or a value of the wrong type, stops the server at its start with an error
that names the key, the value and what to do. This page is written from the code (`tools/options_reference.py`).

| key | type | default | |
|---|---|---|---|
"""

MOONCAKE = """
## mooncake

The keys of `mooncake`, the same as those of hs_connectors' Mooncake store.

| key | type | default | |
|---|---|---|---|
"""


def reference() -> str:
    """The page, in Markdown."""
    return HEAD + _table(HsxConfig) + MOONCAKE + _table(MooncakeOptions)


def _table(model: type[BaseModel]) -> str:
    properties = model.model_json_schema()["properties"]
    rows = []
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
        rows.append(f"| `{name}` | {_type(properties[name])} | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def _type(schema: dict[str, object]) -> str:
    """What JSON a value is, with its limits."""
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])  # type: ignore[attr-defined]
    choices = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]  # type: ignore[attr-defined]
    (schema,) = choices
    limits = {"minimum": "≥ ", "exclusiveMinimum": "> ", "maximum": "≤ "}
    said = [f"{sign}{schema[key]}" for key, sign in limits.items() if key in schema]
    return " ".join([str(schema.get("type", "object")), ", ".join(said)]).strip()


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
