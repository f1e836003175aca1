"""Check whether hidden states of a model can be extracted, from the model's config.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_ascend_hsx.caveats import caveats_of
from vllm_ascend_hsx.compat.collector import Collection
from vllm_ascend_hsx.compat.targets import (
    is_registered,
    named_language_model,
    recorded_architectures,
    refuse_architecture,
    returns_embedding,
    shown,
)
from vllm_ascend_hsx.doctor.findings import Finding
from vllm_ascend_hsx.plan.shape import read_config, read_shape, text_config
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.rows import RowFormat

TOPIC = "target"
_DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_TYPICAL = 4096  # hidden size of an unknown model


def check_target(model: str) -> Iterator[Finding]:
    """Check whether a model's class collects hidden states, and whether `hsx plan` can be used.

    Args:
        model: a preset of `hsx plan`, the directory of a model, or a config.json.

    Raises:
        UserError: the model is none of these.
    """
    name, config = read_config(model)
    named = config.get("architectures")
    architectures = (
        [each for each in named if isinstance(each, str)] if isinstance(named, list) else []
    )
    # vLLM takes the first registered class. All architectures of a config are the same model.
    known = next((each for each in architectures if is_registered(each)), None)
    remedy = (
        f"Choose a target of another class, such as {', '.join(shown())}; docs/compatibility.md "
        "lists all classes."
    )
    if not architectures:
        yield Finding(
            TOPIC,
            "model",
            "problem",
            f"{name}: config.json has no architecture",
            remedy,
        )
        return
    try:
        yield _class(
            name, model, architectures[0] if known is None else known, named_language_model(config)
        )
    except UserError as error:
        yield Finding(TOPIC, "model", "problem", f"{name}: {known} {error.problem}", remedy)
        return
    for caveat in caveats_of(config, text_config(config)):
        yield Finding(TOPIC, "rows", "note", f"{name}: {caveat.problem}", caveat.remedy)
    try:
        shape = read_shape(model)
    except UserError as error:
        remedy = "Extraction works without it. Start a server; the log has the KV cache's size."
        yield Finding(
            TOPIC, "plan", "note", f"`hsx plan` cannot be used: the model {error.problem}", remedy
        )
        return
    found = (
        f"{shape.num_layers} layers x {shape.hidden_size}, {shape.dtype}: {shape.layer_bytes:,} "
        "bytes per token and layer"
    )
    yield Finding(TOPIC, "plan", "ok", found, f"`hsx plan {model}` shows what extraction costs.")


def _class(name: str, model: str, architecture: str, language_model: Sequence[str]) -> Finding:
    """Return the finding about a class that servers accept.

    Raises:
        UserError: servers refuse the class.
    """
    refuse_architecture(architecture, (), language_model)
    remedy = (
        f"First compare the rows with transformers: hsx demo --device npu --model {model} "
        "--no-expert-parallel"
    )
    collection = recorded_architectures().collected.get(architecture)
    if collection is None:
        found = (
            f"{name}: {architecture} is not a class of vLLM; another plugin or vLLM's "
            "Transformers backend may serve it"
        )
        return Finding(
            TOPIC,
            "model",
            "note",
            f"{found}, and the server checks it before it loads weights",
            remedy,
        )
    found = f"{name}: {architecture}: hidden states are collected by {collection.value}"
    if collection is Collection.LANGUAGE_MODEL and not any(map(is_registered, language_model)):
        return Finding(
            TOPIC,
            "model",
            "note",
            f"{found}; the server checks the language model's class before it loads weights",
            remedy,
        )
    if architecture in shown():
        return Finding(TOPIC, "model", "ok", found)
    without = (
        "" if returns_embedding(architecture, collection) else "; it does not return layer id 0"
    )
    return Finding(
        TOPIC,
        "model",
        "note",
        f"{found}{without}; no test has served this class on vllm-ascend",
        remedy,
    )


def stored_format(model: str | None) -> RowFormat:
    """Return a row format of four layers, which most drafters need, for a model.

    Args:
        model: as for `check_target`; None and missing fields mean typical values.

    Raises:
        UserError: the model is neither a preset, nor a directory with a config.json, nor a
            config.json.
    """
    hidden_size, dtype = _TYPICAL, "bfloat16"
    if model is not None:
        _, config = read_config(model)
        try:
            shape = read_shape(model)
            hidden_size, dtype = shape.hidden_size, shape.dtype
        except UserError:  # the hidden size may be valid even if other fields are missing
            named = text_config(config).get("hidden_size")
            hidden_size = named if isinstance(named, int) and named > 0 else _TYPICAL
    return RowFormat((0, 1, 2, 3), hidden_size, _DTYPE_NAMES[dtype], model or "hsx doctor")
