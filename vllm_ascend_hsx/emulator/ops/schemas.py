"""The operator schemas of torch_npu and of vllm-ascend's own library, copied from these libraries.

They are text files, one schema per line, in schemas/<namespace>.txt. With the real schema declared,
a wrong argument in vllm-ascend's call fails here with the same error as on hardware, before any
reference runs.
"""

import re
from functools import cache
from importlib.resources import files

NAMESPACES = ("npu", "atb", "_C_ascend")
_QUALIFIED_NAME = re.compile(r"(\w+(?:\.\w+)?)\(")


@cache
def schemas(namespace: str) -> dict[str, str]:
    """Return the schemas of a namespace by operator name, such as "npu_grouped_matmul.List"."""
    found: dict[str, str] = {}
    for line in (files(__package__) / "schemas" / f"{namespace}.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            match = _QUALIFIED_NAME.match(line)
            assert match is not None, f"not a schema: {line!r}"
            found[match.group(1)] = line
    return found
