"""Files for readers: written, committed, and compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sink_harness import FORMAT, make_rows, token_ids

import vllm_ascend_hsx
from vllm_ascend_hsx.reader.load import HiddenStates
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile

SOURCE = str(Path(vllm_ascend_hsx.__file__).parents[1])


def written(
    sink: FileSink, directory: Path, request_id: str = "cmpl-1", tokens: int = 5
) -> RequestFile:
    """Return a file with all rows, not committed yet."""
    file = sink.open(request_id, directory / f"{request_id}.safetensors")
    file.write(0, make_rows(0, tokens))
    return file


def committed(sink: FileSink, directory: Path, request_id: str = "cmpl-1", tokens: int = 5) -> Path:
    file = written(sink, directory, request_id, tokens)
    file.commit(token_ids(tokens), tokens - 1)
    return file.path


def assert_rows(states: HiddenStates, tokens: int) -> None:
    assert states.hidden_states.dtype == torch.bfloat16
    assert states.hidden_states.shape == (tokens, *FORMAT.row_shape)
    assert np.array_equal(states.hidden_states.view(torch.uint16).numpy(), make_rows(0, tokens))
    assert np.array_equal(states.token_ids.numpy(), token_ids(tokens))
