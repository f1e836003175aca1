"""Quantised rows: bit for bit those of hs_connectors, in files that every reader understands, of half the bytes."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from depth import depth
from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8
from hs_connectors.transfer import FP8Transfer
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file, save_file
from sink_harness import token_ids

from vllm_ascend_hsx.cli import inspect, verify
from vllm_ascend_hsx.protocol.format import read_header
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.reader.check import examine
from vllm_ascend_hsx.reader.dataset import HiddenStatesDataset
from vllm_ascend_hsx.reader.load import HiddenStates, HiddenStatesError, load, open_dir
from vllm_ascend_hsx.reader.quantized import dequantized
from vllm_ascend_hsx.sinks import directory, encoder
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.encoder import Fp8PerToken, encoder_for
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
LAYER_IDS, HIDDEN = (2, 0, 3), 8
ROW_SHAPE = (len(LAYER_IDS), HIDDEN)
# The 127 magnitudes of float8_e4m3fn by definition: 4 bits of exponent (bias 7, no infinity), 3 of mantissa, all ones is NaN.
MAGNITUDES = np.array([m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1])


def row_format(dtype: str = "BF16", hidden: int = HIDDEN) -> RowFormat:
    return RowFormat(LAYER_IDS, hidden, dtype, "tiny", "fp8")


def as_rows(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def rows_of(count: int, dtype: str = "BF16", version: int = 0, shape: tuple[int, int] = ROW_SHAPE) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(count * 100 + version)
    sizes = torch.logspace(-3, 3, max(count, 1))[:count].view(-1, 1, 1)
    return (torch.randn(count, *shape, generator=generator) * sizes).to(DTYPES[dtype])


def quantised(rows: torch.Tensor, dtype: str, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """What our encoder makes of rows: float8 [tokens, layers, hidden] and float32 [tokens]."""
    made = Fp8PerToken(RowFormat(tuple(range(rows.shape[1])), rows.shape[2], dtype, quantization="fp8"))
    stored = made.encode(first, as_rows(rows).reshape(-1).data)
    scales = made.scales(first + len(rows))[first:]
    values = torch.from_numpy(np.frombuffer(stored, np.uint8).copy()).view(torch.float8_e4m3fn)
    return values.reshape(rows.shape), torch.from_numpy(scales)


def open_file(sink: FileSink, where: Path, name: str = "a", expected: int = 0) -> RequestFile:
    return sink.open(name, where / f"{name}.safetensors", expected)


def publish(where: Path, rows: torch.Tensor, dtype: str = "BF16", name: str = "a", options: FileOptions | None = None) -> Path:
    with FileSink(where, row_format(dtype, rows.shape[2]), options or FileOptions()) as sink:
        file = open_file(sink, where, name, len(rows))
        if len(rows):
            file.write(0, as_rows(rows))
        file.commit(token_ids(len(rows)), len(rows))
    return file.path


# Values and scales


@st.composite
def any_rows(draw: st.DrawFn) -> tuple[str, torch.Tensor]:
    """Rows of any bits at all, or of one size with zeros and subnormal numbers among them."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = (draw(st.integers(1, 5)), 2, 4 * draw(st.integers(1, 4)))
    bits = hnp.arrays(BITS[dtype], shape)
    small = hnp.arrays(BITS[dtype], shape, elements=st.integers(0, 300))
    rows = torch.from_numpy(draw(st.one_of(bits, small))).view(DTYPES[dtype])
    return dtype, torch.where(rows.isfinite(), rows, torch.zeros_like(rows)) if draw(st.booleans()) else rows


@settings(max_examples=depth(400), deadline=None)
@given(case=any_rows(), step=st.sampled_from([1, 8, 40, 1 << 18]))
def test_values_and_scales_are_bit_for_bit_those_of_hs_connectors(case: tuple[str, torch.Tensor], step: int) -> None:
    dtype, rows = case
    theirs, their_scales = quantize_tensor_to_fp8(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "_AT_A_TIME", step)
        ours, scales = quantised(rows, dtype, first=3)
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(scales.view(torch.int32)[scales.isfinite()], their_scales.view(-1).view(torch.int32)[scales.isfinite()])
    assert torch.equal(scales, their_scales.view(-1)) or scales.isnan().equal(their_scales.view(-1).isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-10, 1e-3, 1.0, 3e4])
def test_a_value_is_the_nearest_that_float8_has_and_ties_go_to_even(dtype: str, size: float) -> None:
    rows = (torch.linspace(-1, 1, 4 * 2 * 512, dtype=torch.float64).view(4, 2, 512) * size).to(DTYPES[dtype])
    ours, scales = quantised(rows, dtype)
    largest = rows.double().abs().amax((1, 2))
    # hs_connectors divides in float32, and so do we: the quotient may be off by half a unit of float32.
    assert torch.allclose(scales.double(), (largest / 448).clamp(min=1e-12), rtol=2**-23, atol=0)
    wanted = (rows.float() / scales.view(-1, 1, 1)).double().numpy()
    distance = np.abs(np.abs(wanted)[..., None] - MAGNITUDES)
    nearest = np.where(distance == distance.min(-1, keepdims=True), np.arange(127), -1)
    even = np.where((nearest >= 0) & (nearest % 2 == 0), nearest, -1).max(-1)
    tied = (nearest >= 0).sum(-1) > 1
    codes = np.where(tied, even, nearest.max(-1))
    assert np.array_equal(ours.view(torch.uint8).numpy() & 0x7F, codes)
    assert np.array_equal((ours.view(torch.uint8).numpy() >> 7).astype(bool), np.signbit(rows.float().numpy()))


def bound(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The most that an element may lose: half a unit of 3 bits of mantissa, or half of the smallest step."""
    return torch.maximum(rows.double().abs() * 2**-4, scales.double().view(-1, 1, 1) * 2**-10)


@settings(max_examples=depth(100), deadline=None)
@given(
    rows=hnp.arrays(np.float32, (3, 2, 16), elements=st.floats(-3e4, 3e4, width=32)),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_no_element_loses_more_than_the_page_says(rows: np.ndarray, dtype: str) -> None:
    given = torch.from_numpy(rows).to(DTYPES[dtype])
    stored, scales = quantised(given, dtype)
    exact = stored.double() * scales.double().view(-1, 1, 1)
    lost = (exact - given.double()).abs()
    assert bool((lost <= bound(given, scales) * (1 + 2**-20)).all())  # the quotient is rounded to float32 first
    # What the reader makes of it: both factors and the product are rounded to the model's dtype.
    unit = torch.finfo(DTYPES[dtype]).eps / 2
    read = dequantized(stored, scales.view(-1, 1, 1), DTYPES[dtype])
    assert bool(((read.double() - exact).abs() <= exact.abs() * 2.02 * unit + torch.finfo(DTYPES[dtype]).tiny).all())


def test_rows_of_float16_that_are_small_or_large_come_back(tmp_path: Path) -> None:
    """Their scales have no float16, or their products none: a product in float16 would lose them."""
    rows = torch.stack([torch.full(ROW_SHAPE, 65504.0), torch.full(ROW_SHAPE, 6e-8), torch.full(ROW_SHAPE, 2e-6)]).half()
    back = load(publish(tmp_path, rows, "F16")).hidden_states
    assert torch.equal(back[0], rows[0])
    assert torch.allclose(back[1:], rows[1:], rtol=2**-4)


# Memory and threads


def test_rows_that_are_not_quantised_are_not_copied_and_have_no_scales() -> None:
    data = memoryview(bytearray(48))
    plain = encoder_for(RowFormat(LAYER_IDS, HIDDEN, "BF16"))
    assert plain.encode(0, data) is data
    assert plain.scales(1) is None


def test_sinks_need_no_torch_when_nothing_is_quantised(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from vllm_ascend_hsx.protocol.rows import RowFormat\n"
        "from vllm_ascend_hsx.sinks.file import FileSink\n"
        "with FileSink(Path(sys.argv[1]), RowFormat((1,), 4, 'BF16')) as sink:\n"
        "    file = sink.open('a', Path(sys.argv[1], 'a.safetensors'))\n"
        "    file.write(0, np.zeros((2, 4), np.uint16))\n"
        "    file.commit(np.zeros(2, np.int64), 2)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)


def test_a_thread_quantises_into_the_same_pages_again_and_again() -> None:
    made = Fp8PerToken(row_format(hidden=1024))
    rows = rows_of(8, shape=(3, 1024))
    addresses = set()
    for count in (8, 1, 3):
        stored = made.encode(0, as_rows(rows[:count]).reshape(-1).data)
        addresses.add(np.frombuffer(stored, np.uint8).ctypes.data)
        assert stored.nbytes == count * 3 * 1024
    (address,) = addresses
    assert address % 4096 == 0


def test_a_writer_does_not_ask_for_more_cores_than_its_own() -> None:
    """The threads of others keep theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    seen: dict[str, int] = {}

    def write() -> None:
        Fp8PerToken(row_format()).encode(0, as_rows(rows_of(2)).reshape(-1).data)
        seen["writer"] = torch.get_num_threads()

    def other() -> None:
        seen["other"] = torch.get_num_threads()

    try:
        for target in (write, other):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        assert seen == {"writer": 1, "other": 4}
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_rows_that_cannot_be_written_to_are_quantised_too() -> None:
    rows = rows_of(4)
    made = Fp8PerToken(row_format())
    assert bytes(made.encode(0, memoryview(as_rows(rows).tobytes()))) == as_rows(quantised(rows, "BF16")[0]).tobytes()


# The contract of a sink


@settings(max_examples=depth(100), deadline=None)
@given(st.data())
def test_any_order_of_spans_with_repeats_and_recomputation_equals_the_expected_rows(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(0, 24), "tokens")
    span = st.tuples(st.integers(0, 28), st.integers(0, 9), st.integers(0, 3))
    writes = [(a, a + n, version) for a, n, version in data.draw(st.lists(span, max_size=12), "spans")]
    cuts = sorted({0, tokens, *data.draw(st.lists(st.integers(0, tokens), max_size=4), "cuts")})
    writes += [(a, b, data.draw(st.integers(0, 3))) for a, b in itertools.pairwise(cuts)]
    writes = data.draw(st.permutations(writes), "order")
    expected = torch.zeros(40, *ROW_SHAPE, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as name, FileSink(Path(name), row_format()) as sink:
        file = open_file(sink, Path(name))
        for first, last, version in writes:
            expected[first:last] = rows_of(40, version=version)[first:last]
            file.write(first, as_rows(expected[first:last]))
        file.commit(token_ids(tokens), tokens)
        loaded = load(file.path, 0, verify=True, dequantize=False)
        assert os.stat(file.path).st_size == 4096 + tokens * (len(LAYER_IDS) * HIDDEN + 8 + 4)
    values, scales = quantised(expected[:tokens], "BF16")
    assert loaded.scales is not None and loaded.scales.shape == (tokens, 1, 1)
    assert torch.equal(loaded.hidden_states.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(loaded.scales.view(-1), scales)
    assert np.array_equal(loaded.token_ids.numpy(), token_ids(tokens))


def test_many_threads_write_one_file(tmp_path: Path) -> None:
    rows, threads = rows_of(2000), 6
    start = threading.Barrier(threads)
    with FileSink(tmp_path, row_format()) as sink:
        assert sink.writes_side_by_side
        file = open_file(sink, tmp_path)

        def write(rank: int) -> None:
            start.wait()
            for first in range(rank * 5, len(rows), threads * 5):
                file.write(first, as_rows(rows[first : first + 5]))

        workers = [threading.Thread(target=write, args=(rank,)) for rank in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        file.commit(token_ids(len(rows)), len(rows))
    values, scales = quantised(rows, "BF16")
    loaded = load(file.path, 0, verify=True, dequantize=False)
    assert torch.equal(loaded.hidden_states.view(torch.uint8), values.view(torch.uint8))
    assert loaded.scales is not None and torch.equal(loaded.scales.view(-1), scales)


@pytest.mark.parametrize("bytes_of_half_a_row", [len(LAYER_IDS) * HIDDEN])
def test_rows_come_in_the_models_dtype(tmp_path: Path, bytes_of_half_a_row: int) -> None:
    with FileSink(tmp_path, row_format()) as sink, pytest.raises(ValueError, match="are not rows of 48 bytes"):
        open_file(sink, tmp_path).write(0, np.zeros(bytes_of_half_a_row, np.uint8))


def test_quantised_rows_go_past_the_page_cache_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    bypassed: list[bool] = []
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        bypassed.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return real(fd, data, offset)

    monkeypatch.setattr(directory, "is_in_memory", lambda fd: False)
    rows = rows_of(9, shape=(3, 4096))
    with FileSink(tmp_path, row_format(hidden=4096), FileOptions(io="direct")) as sink:
        file = open_file(sink, tmp_path, expected=9)
        monkeypatch.setattr(os, "pwrite", pwrite)
        file.write(0, as_rows(rows[:4]))
        file.write(4, as_rows(rows[4:]))
        file.commit(token_ids(9), 9)
    # The header's page, two spans; token ids with scales, the header.
    assert bypassed == [True, True, True, False, False]
    values, _ = quantised(rows, "BF16")
    loaded = load(file.path, 0, verify=True, dequantize=False)
    assert torch.equal(loaded.hidden_states.view(torch.uint8), values.view(torch.uint8))


# Readers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_our_reader_and_hs_connectors_give_the_same_bits(tmp_path: Path, dtype: str, tokens: int) -> None:
    path = publish(tmp_path, rows_of(tokens, dtype), dtype, "hs_7")
    ours = load(path, 0, verify=True)
    assert ours.hidden_states.dtype == DTYPES[dtype]
    if dtype != "F16":  # whose scales may have no float16
        theirs = FP8Transfer(tmp_path, dequantize_dtype=DTYPES[dtype]).get_cached(7)
        assert theirs is not None and set(theirs) == {"hidden_states", "token_ids"}
        assert torch.equal(ours.hidden_states, theirs["hidden_states"])
        assert torch.equal(ours.token_ids, theirs["token_ids"])
    stored = load_file(path)
    assert set(stored) == {"hidden_states", "token_ids", "hidden_states_scales"}
    in_float32 = dequantize_fp8_tensor(stored["hidden_states"], stored["hidden_states_scales"], torch.float32)
    assert torch.allclose(ours.hidden_states.float(), in_float32, rtol=2**-7, atol=2**-24)


def test_files_of_hs_connectors_own_connector_are_read_too(tmp_path: Path) -> None:
    values, scales = quantize_tensor_to_fp8(rows_of(6))
    tensors = {"hidden_states": values, "hidden_states_scales": scales, "token_ids": torch.arange(6)}
    save_file(tensors, tmp_path / "hs_0.safetensors")
    theirs = FP8Transfer(tmp_path).get_cached(0)
    assert theirs is not None
    assert torch.equal(load(tmp_path / "hs_0.safetensors").hidden_states, theirs["hidden_states"])


@pytest.mark.parametrize("mmap", [True, False])
def test_a_reader_can_have_the_rows_as_they_are_stored(tmp_path: Path, mmap: bool) -> None:
    rows = rows_of(5)
    path = publish(tmp_path, rows)
    states = load(path, mmap=mmap, dequantize=False)
    assert (states.hidden_states.dtype, states.dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert states.scales is not None and states.scales.shape == (5, 1, 1)
    whole = load(path, mmap=mmap)
    assert torch.equal(dequantized(states.hidden_states, states.scales, states.dtype), whole.hidden_states)
    assert whole.scales is not None and torch.equal(whole.scales, states.scales)
    ((found, each),) = open_dir(tmp_path, mmap=mmap)
    assert found == path and torch.equal(each.hidden_states, whole.hidden_states)


def test_rows_that_are_not_quantised_have_no_scales(tmp_path: Path) -> None:
    with FileSink(tmp_path, RowFormat(LAYER_IDS, HIDDEN, "F16")) as sink:
        file = open_file(sink, tmp_path)
        file.write(0, as_rows(rows_of(3, "F16")))
        file.commit(token_ids(3), 3)
    states = load(file.path, dequantize=False)
    assert (states.scales, states.dtype) == (None, torch.float16)
    with open(file.path, "rb") as opened:
        assert "quantization" not in read_header(opened.fileno()).metadata


def test_a_dataset_dequantises_what_it_returns(tmp_path: Path) -> None:
    path = publish(tmp_path, rows_of(9))
    whole = load(path).hidden_states
    (item,) = HiddenStatesDataset(tmp_path, layer_ids=[3, 2], max_tokens=4)
    assert torch.equal(item["hidden_states"], whole[:4, [2, 0]])
    (item,) = HiddenStatesDataset(tmp_path, dtype=torch.float32)
    assert torch.equal(item["hidden_states"], whole.float())


def test_the_backend_for_speculators_gives_rows_in_the_models_dtype(tmp_path: Path) -> None:
    from vllm_ascend_hsx.integrations.speculators import HsxTransfer

    path = publish(tmp_path, rows_of(4), name="hs_0")
    for sample in (HsxTransfer(tmp_path).get_cached(0), HsxTransfer(tmp_path).get_generated({"hidden_states_path": str(path)})):
        assert sample is not None and set(sample) == {"hidden_states", "token_ids"}
        assert torch.equal(sample["hidden_states"], load(path).hidden_states)


# What is wrong with a file is found


def spoil_a_scale(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10  # of the last token's
    path.write_bytes(data)


def test_a_changed_scale_is_found_by_the_checksum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = publish(tmp_path, rows_of(20))
    assert examine(path).verdict == "verified"
    assert verify.main([str(tmp_path)]) == 0
    spoil_a_scale(path)
    load(path)
    with pytest.raises(HiddenStatesError, match="is not as it was written"):
        load(path, verify=True)
    problem = examine(path).problem
    assert problem is not None and "is not as it was written" in problem
    assert verify.main([str(tmp_path), "--jobs", "1"]) == 1
    assert "is not as it was written" in capsys.readouterr().out


def test_hsx_inspect_shows_the_dequantised_rows_and_that_they_are_quantised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = publish(tmp_path, rows_of(20))
    found = examine(path, norms=True)
    states = load(path)
    assert (found.kind.dtype, found.num_bytes) == ("bfloat16 in float8_e4m3fn", 20 * (len(LAYER_IDS) * HIDDEN + 4))
    assert np.allclose(found.token_norms, states.hidden_states.float().norm(dim=-1))
    assert inspect.main([str(path)]) == 0
    shown = capsys.readouterr().out
    assert "bfloat16 in float8_e4m3fn" in shown and "fp8_e4m3_per_token" in shown


def test_a_scale_that_is_not_finite_is_found(tmp_path: Path) -> None:
    rows = rows_of(4)
    rows[2, 1, 3] = torch.inf
    path = publish(tmp_path, rows)
    problem = examine(path).problem
    assert problem is not None and problem.startswith("the row of token 2 in layer")


def test_quantised_rows_of_different_models_are_of_different_kinds(tmp_path: Path) -> None:
    kinds = [examine(publish(tmp_path, rows_of(4, dtype), dtype, name)).kind for name, dtype in (("a", "BF16"), ("b", "F16"))]
    assert kinds[0] == ((2, 0, 3), *ROW_SHAPE, "bfloat16 in float8_e4m3fn")
    assert kinds[1].dtype == "float16 in float8_e4m3fn"


VALUES = torch.zeros(4, *ROW_SHAPE).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        ({"hidden_states_scales": torch.ones(3, 1, 1)}, {}, r"hidden_states_scales F32 \[3, 1, 1\] does not fit"),
        ({"hidden_states_scales": torch.ones(4)}, {}, r"hidden_states_scales F32 \[4\] does not fit"),
        ({"hidden_states_scales": torch.ones(4, 1, 1).half()}, {}, r"hidden_states_scales F16 \[4, 1, 1\] does not fit"),
        ({"hidden_states_scales": torch.ones(4, 1, 1), "hidden_states": VALUES.float()}, {}, r"does not fit hidden_states F32"),
        ({}, {"quantization": "fp8_e4m3_per_token"}, "but it has no hidden_states_scales"),
        ({"hidden_states_scales": torch.ones(4, 1, 1)}, {"quantization": "int4"}, "quantised as 'int4', which is unknown"),
        ({"hidden_states_scales": torch.ones(4, 1, 1)}, {"dtype": "I64"}, "its rows were quantised from I64"),
    ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict[str, Any], metadata: dict[str, str], words: str) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"hidden_states": VALUES, "token_ids": torch.arange(4), **tensors}, path, metadata)
    with pytest.raises(HiddenStatesError, match=words):
        load(path)
    assert re.search(words, str(examine(path).problem))


# Size


@pytest.fixture
def sizes(tmp_path: Path) -> dict[str, int]:
    """Bytes of a file of 512 tokens of MiniMax-M2's four layers, by quantization."""
    found = {}
    for quantization in ("none", "fp8"):
        where = tmp_path / quantization
        with FileSink(where, RowFormat((2, 31, 59, 62), 3072, "BF16", "m", quantization)) as sink:  # type: ignore[arg-type]
            file = open_file(sink, where)
            file.write(0, as_rows(rows_of(512, shape=(4, 3072))))
            file.commit(token_ids(512), 512)
        found[quantization] = os.stat(file.path).st_size
    return found


def test_a_file_has_half_the_bytes(sizes: dict[str, int]) -> None:
    assert sizes["none"] == 4096 + 512 * (4 * 3072 * 2 + 8)
    assert sizes["fp8"] == 4096 + 512 * (4 * 3072 + 8 + 4)
    assert sizes["fp8"] / sizes["none"] == pytest.approx(0.5, abs=0.001)


def test_the_reader_s_named_tuple_has_its_scales_last() -> None:
    assert HiddenStates._fields == ("hidden_states", "token_ids", "metadata", "scales")
    assert HiddenStates._field_defaults == {"scales": None}


def test_verify_counts_tokens_too_small_for_fp8_and_takes_them_for_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row_format = RowFormat((1, 2), 8, "F32", quantization="fp8")
    sizes = [1.0, 4.4e-10, 9.7e-16, 4.6e-10, 0.0]
    with FileSink(tmp_path, row_format) as sink:
        for name in ("a", "b"):
            file = sink.open(name, tmp_path / f"{name}.safetensors")
            rows = np.stack([np.full((2, 8), size if name == "a" else 1.0, np.float32) for size in sizes])
            file.write(0, rows)
            file.commit(np.arange(len(sizes)), len(sizes))
    stored = load(tmp_path / "a.safetensors").hidden_states
    assert [bool(row.any()) for row in stored] == [True, True, False, True, False]
    assert verify.main([str(tmp_path), "--jobs", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tiny_tokens"] == 3
    assert verify.main([str(tmp_path), "--jobs", "1"]) == 0
    assert "warning: 3 tokens in 1 files have rows below 4.5e-10" in capsys.readouterr().out.replace("\n", " ")
