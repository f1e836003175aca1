"""Input of every step: the model, the sizes of servers, and findings of earlier steps."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ascend_hsx.plan.shape import read_config, text_config, whole_number

# Share of an NPU's free memory for weights; the rest is for activations and KV cache.
WEIGHTS_SHARE = 0.7
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")


class Sizes(NamedTuple):
    """Division of the model among NPUs."""

    tensor_parallel: int
    data_parallel: int
    expert_parallel: bool

    @property
    def npus(self) -> int:
        return self.tensor_parallel * self.data_parallel

    def __str__(self) -> str:
        experts = " with expert parallelism" if self.expert_parallel else ""
        return f"DP={self.data_parallel} x TP={self.tensor_parallel}{experts}"


ONE = Sizes(1, 1, False)


@dataclass(frozen=True)
class Context:
    """Input of a step.

    Attributes:
        model: directory of the target.
        output: directory of the report; logs and files of hidden states go below it.
        emulated: True if the NPUs are emulated. Less is then measured, and speed means nothing.
        tensor_parallel, data_parallel: sizes to use; None to choose them.
        serve_options: additional words for each `vllm serve`.
        found: data of the lines so far.
    """

    model: Path
    output: Path
    emulated: bool
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    serve_options: tuple[str, ...] = ()
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=str))

    @classmethod
    def read(cls, path: Path) -> Context:
        content = json.loads(path.read_text())
        content["model"], content["output"] = Path(content["model"]), Path(content["output"])
        content["serve_options"] = tuple(content["serve_options"])
        return cls(**content)

    @property
    def files(self) -> Path:
        """Return the directory for the steps' files of hidden states."""
        return self.output / "files"

    @property
    def sizes(self) -> Sizes:
        """Return the sizes chosen by the step `npus`, or the sizes of one NPU."""
        return Sizes(**self.found["sizes"]) if "sizes" in self.found else ONE

    def require_one(self) -> None:
        """Raise DoesNotFitError if the model does not fit on one NPU."""
        free = min(each["free"] for each in self.found["npus"]["npus"])
        choose_sizes(self.config, weight_bytes(self.model), 1, free, 1, 1)

    @property
    def least_sizes(self) -> Sizes:
        """Return the sizes of the smallest server that holds the model, as far as known."""
        try:
            self.require_one()
        except DoesNotFitError:
            return self.sizes
        return ONE

    @property
    def has_experts(self) -> bool:
        return any(self.config.get(name) for name in _EXPERTS)

    @property
    def config(self) -> dict[str, Any]:
        return text_config(read_config(str(self.model))[1])

    def number(self, field: str) -> int:
        """Return a field of the model's config.json. Raises UserError."""
        return whole_number(str(self.model), self.config, field)


class DoesNotFitError(ValueError):
    """No division of the model fits on the NPUs. The message lists the attempts."""


def weight_bytes(model: Path) -> int:
    """Return the size of a model's weights on disk."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def choose_sizes(
    config: dict[str, Any],
    weights: int,
    npus: int,
    free: int,
    tensor_parallel: int | None = None,
    data_parallel: int | None = None,
) -> Sizes:
    """Choose DP x TP: the smallest TP that fits, but at least two ranks of each kind if possible.

    Two DP ranks suffice for one to be idle while the other is busy; more would take longer to
    start.

    Args:
        config: config of the model.
        weights: size of the weights in bytes.
        npus: number of NPUs. free: bytes on the NPU with the least free memory.
        tensor_parallel, data_parallel: sizes chosen by the user.

    Raises:
        DoesNotFitError: with the reason.
    """
    experts = any(config.get(name) for name in _EXPERTS)
    heads = config.get("num_attention_heads") or 1
    powers = [1 << power for power in range(npus.bit_length())]
    fitting = [size for size in powers if size <= npus and heads % size == 0]
    several = [size for size in fitting if size > 1] or fitting
    choices = (
        [tensor_parallel] if tensor_parallel else several,
        [data_parallel] if data_parallel else [2, 1],
    )
    tried = list(itertools.product(*choices))
    enough = [Sizes(tp, dp, experts and tp * dp > 1) for tp, dp in tried if tp * dp <= npus]
    if not enough:
        least = Sizes(*tried[0], False)
        raise DoesNotFitError(f"{least} needs {least.npus} NPUs, but there are {npus}")
    for sizes in enough:
        # Experts are divided among all ranks and are nearly all of a MoE's weights.
        if weights / (sizes.npus if experts else sizes.tensor_parallel) <= WEIGHTS_SHARE * free:
            return sizes
    raise DoesNotFitError(
        f"weights of {weights / 2**30:,.1f} GiB do not fit on {npus} NPUs with "
        f"{free / 2**30:,.1f} GiB free each: tried up to {enough[-1]}, with "
        f"{WEIGHTS_SHARE:.0%} of it for weights"
    )
