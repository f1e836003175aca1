"""The operator schemas of torch_npu and of vllm-ascend's own library, as they stand in those libraries.

They are kept as text, one schema a line, in schemas/<namespace>.txt. Declaring the real schema makes a wrong argument in
vllm-ascend's call an error here that reads as it reads on hardware, before any reference runs.
"""

import re
from functools import cache
from importlib.resources import files

NAMESPACES = ("npu", "atb", "_C_ascend")
_QUALIFIED_NAME = re.compile(r"(\w+(?:\.\w+)?)\(")


@cache
def schemas(namespace: str) -> dict[str, str]:
    """Operator name, with its overload as in "npu_grouped_matmul.List", to schema text, for one of NAMESPACES."""
    found: dict[str, str] = {}
    for line in (files(__package__) / "schemas" / f"{namespace}.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            match = _QUALIFIED_NAME.match(line)
            assert match is not None, f"not a schema: {line!r}"
            found[match.group(1)] = line
    return found
