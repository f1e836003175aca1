"""Wrong arguments of the public Python API: one error with argument, value and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from written_files import rows_of, write

import vllm_ascend_hsx
from vllm_ascend_hsx import (
    HiddenStates,
    HiddenStatesDataset,
    acknowledge,
    collate,
    find,
    load,
    open_dir,
    remove,
)

PATH = "give the path from the response, kv_transfer_params['hidden_states_path'], or from `find`"
DIRECTORY = "give the directory to which the server writes"
LAYERS = "give a list of at least one layer, such as [2, 31], or None for all layers"
FILE = "a.safetensors"
# The call, and the error: the argument with the value, and the remedy.
WRONG: dict[str, tuple[Callable[[], Any], str, str]] = {
    "load nothing": (lambda: load(None), "path=None", PATH),  # type: ignore[arg-type]
    "load empty": (lambda: load(""), "path=''", PATH),
    "load a dot": (lambda: load("."), "path='.'", PATH),
    "load the root": (lambda: load("/"), "path='/'", PATH),
    "load bytes": (lambda: load(b"a.safetensors"), "path=b'a.safetensors'", PATH),  # type: ignore[arg-type]
    "load a null": (lambda: load("a\0.safetensors"), r"path='a\x00.safetensors'", PATH),
    "load params": (
        lambda: load({"hidden_states_path": FILE}),
        "path={'hidden_states_path': 'a.safetensors'}",
        PATH,
    ),  # type: ignore[arg-type]
    "timeout text": (
        lambda: load(FILE, "5"),
        "timeout='5'",
        "give seconds, 0 or more; None or math.inf waits forever",
    ),  # type: ignore[arg-type]
    "timeout below 0": (
        lambda: load(FILE, -1),
        "timeout=-1",
        "give seconds, 0 or more; None or math.inf waits forever",
    ),
    "timeout no number": (
        lambda: load(FILE, float("nan")),
        "timeout=nan",
        "give seconds, 0 or more; None or math.inf waits forever",
    ),
    "response empty": (
        lambda: load(FILE, response_id=""),
        "response_id=''",
        "give the `id` of the response; or None",
    ),
    "response number": (
        lambda: load(FILE, response_id=3),
        "response_id=3",
        "give the `id` of the response; or None",
    ),  # type: ignore[arg-type]
    "remove nothing": (lambda: remove(None), "path=None", PATH),  # type: ignore[arg-type]
    "remove empty": (lambda: remove(""), "path=''", PATH),
    "remove a list": (lambda: remove([FILE]), "path=['a.safetensors']", PATH),  # type: ignore[arg-type]
    "acknowledge nothing": (lambda: acknowledge(None), "path=None", PATH),  # type: ignore[arg-type]
    "acknowledge empty": (lambda: acknowledge(""), "path=''", PATH),
    "find no response": (
        lambda: find(".", None),
        "response_id=None",
        "give the `id` of the response",
    ),  # type: ignore[arg-type]
    "find empty": (lambda: find(".", ""), "response_id=''", "give the `id` of the response"),
    "find nowhere": (lambda: find(None, "cmpl-1"), "directory=None", DIRECTORY),  # type: ignore[arg-type]
    "find in empty": (lambda: find("", "cmpl-1"), "directory=''", DIRECTORY),
    "find in a number": (lambda: find(3, "cmpl-1"), "directory=3", DIRECTORY),  # type: ignore[arg-type]
    "find no prompt": (
        lambda: find(".", "cmpl-1", prompt=None),
        "prompt=None",
        "give a whole number, counted from 0",
    ),  # type: ignore[arg-type]
    "find no sample": (
        lambda: find(".", "cmpl-1", sample=True),
        "sample=True",
        "give a whole number, counted from 0",
    ),
    "open_dir nothing": (lambda: next(open_dir(None)), "directory=None", DIRECTORY),  # type: ignore[arg-type]
    "open_dir empty": (lambda: next(open_dir("")), "directory=''", DIRECTORY),
    "open_dir number": (lambda: next(open_dir(3)), "directory=3", DIRECTORY),  # type: ignore[arg-type]
    "open_dir bytes": (lambda: next(open_dir(b".")), "directory=b'.'", DIRECTORY),  # type: ignore[arg-type]
    "dataset nothing": (
        lambda: HiddenStatesDataset(None),
        "source=None",
        f"{DIRECTORY}, or a list of files",
    ),  # type: ignore[arg-type]
    "dataset empty": (
        lambda: HiddenStatesDataset(""),
        "source=''",
        f"{DIRECTORY}, or a list of files",
    ),
    "dataset bytes": (
        lambda: HiddenStatesDataset(b"."),
        "source=b'.'",
        f"{DIRECTORY}, or a list of files",
    ),  # type: ignore[arg-type]
    "dataset file": (
        lambda: HiddenStatesDataset(FILE),
        f"{FILE} is a file",
        "give a list of files",
    ),
    "dataset of nothing": (
        lambda: HiddenStatesDataset([FILE, None]),
        "source[1]=None",
        "give the path of a file",
    ),  # type: ignore[list-item]
    "dataset of empty": (
        lambda: HiddenStatesDataset([""]),
        "source[0]=''",
        "give the path of a file",
    ),
    "layer number": (lambda: HiddenStatesDataset([FILE], layer_ids=3), "layer_ids=3", LAYERS),  # type: ignore[arg-type]
    "layer text": (lambda: HiddenStatesDataset([FILE], layer_ids="31"), "layer_ids='31'", LAYERS),  # type: ignore[arg-type]
    "layers text": (
        lambda: HiddenStatesDataset([FILE], layer_ids=["a"]),
        "layer_ids[0]='a'",
        LAYERS,
    ),  # type: ignore[list-item]
    "layer below 0": (
        lambda: HiddenStatesDataset([FILE], layer_ids=[2, -1]),
        "layer_ids[1]=-1",
        LAYERS,
    ),
    "no layer": (lambda: HiddenStatesDataset([FILE], layer_ids=[]), "layer_ids=[]", LAYERS),
    "dtype text": (
        lambda: HiddenStatesDataset([FILE], dtype="float32"),
        "dtype='float32'",
        "such as torch.float32, or None",
    ),  # type: ignore[arg-type]
    "dtype whole": (
        lambda: HiddenStatesDataset([FILE], dtype=torch.int8),
        "dtype=torch.int8",
        "floating-point numbers",
    ),
    "max_tokens text": (
        lambda: HiddenStatesDataset([FILE], max_tokens="5"),
        "max_tokens='5'",
        "a whole number of at least 1, or None",
    ),  # type: ignore[arg-type]
    "collate nothing": (
        lambda: collate([]),
        "items=[]",
        "give a list of at least one item of a HiddenStatesDataset",
    ),
    "collate an item": (
        lambda: collate({"path": FILE}),
        "items={'path': 'a.saf",
        "give a list of at least one item",
    ),  # type: ignore[arg-type]
    "collate states": (
        lambda: collate([load(FILE)]),
        "items=[HiddenStates(path='a.saf",
        "give a list of at least one item",
    ),  # type: ignore[list-item]
    "numpy whole": (
        lambda: load(FILE).numpy("int8"),
        "dtype='int8'",
        "give float16, float32, float64 or bfloat16, or None",
    ),
    "numpy of Python": (
        lambda: load(FILE).numpy(float),
        "dtype=<class 'float'>",
        "give float16, float32, float64 or bfloat16, or None",
    ),
}


@pytest.fixture
def _a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has one file. No wrong argument may reach it."""
    write(tmp_path, "a", rows_of(3))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_a_file")
@pytest.mark.parametrize("label", WRONG)
def test_wrong_argument_is_one_error_with_value_and_remedy(label: str) -> None:
    call, argument, remedy = WRONG[label]
    with pytest.raises(ValueError, match=f"^{re.escape(argument)}.*{re.escape(remedy)}") as raised:
        call()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 250
    assert Path(FILE).exists()


def test_table_has_every_function_and_class_of_the_package() -> None:
    words = " ".join(name for call, *_ in WRONG.values() for name in call.__code__.co_names)
    callable_names = {
        name for name in vllm_ascend_hsx.__all__ if callable(getattr(vllm_ascend_hsx, name))
    }
    assert callable_names - {"HiddenStates", "HiddenStatesError"} <= set(words.split())


@pytest.mark.usefixtures("_a_file")
@pytest.mark.parametrize("key", ["layer_ids", "num_prompt_tokens"])
def test_missing_metadata_key_is_named_with_file_and_present_keys(key: str) -> None:
    for metadata, there in (({}, "none"), ({"model": "m"}, "model")):
        save_file(
            {"hidden_states": torch.ones(3, 1, 4), "token_ids": torch.arange(3)},
            "other.safetensors",
            metadata or None,
        )
        remedy = re.escape(f"another producer wrote them. Test `'{key}' in states.metadata` first.")
        with pytest.raises(
            KeyError,
            match=rf"{key} is not among the metadata of other.safetensors \({there}\): {remedy}",
        ):
            getattr(load("other.safetensors"), key)
        with pytest.raises(KeyError, match=f"{key} is not among the metadata of these rows"):
            getattr(HiddenStates(torch.ones(3, 1, 4), torch.arange(3), metadata), key)


@pytest.mark.usefixtures("_a_file")
def test_items_of_different_layers_or_dtypes_are_not_batched() -> None:
    """torch would convert all rows to the dtype of the first."""
    one = HiddenStatesDataset([FILE])[0]
    for options, other in (
        (dict(layer_ids=[2]), r"\[1, 8\] torch.bfloat16"),
        (dict(dtype=torch.float32), r"\[2, 8\] torch.float32"),
    ):
        with pytest.raises(
            ValueError,
            match=rf"\[2, 8\] torch.bfloat16 \({FILE}\) and {other} .*Select them with layer_ids and dtype",
        ):
            collate([one, HiddenStatesDataset([FILE], **options)[0]])  # type: ignore[arg-type]


@pytest.mark.usefixtures("_a_file")
def test_item_is_not_a_slice() -> None:
    with pytest.raises(TypeError, match="slice"):
        HiddenStatesDataset([FILE])[:1]  # type: ignore[index]
