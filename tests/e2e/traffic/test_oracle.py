"""The oracle accepts the model's rows, and names every mistake of extraction."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from harness import tokens
from oracle import EXACT, Oracle, Reference, Served

from vllm_ascend_hsx.demo.compare import ELEMENT_TOLERANCE, ROW_TOLERANCE, layer_eps
from vllm_ascend_hsx.demo.reference import reference_hidden_states
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.file import FileSink

LAYER_IDS = (4, 1, 2)
NUM_LAYERS = 4
OWN = Served("own", tuple(tokens(40)), begun=5, ended=9)
BESIDE = Served("beside", tuple(tokens(50)), begun=3, ended=7)
EARLIER = Served(
    "earlier", (*OWN.token_ids[:10], *tokens(30, seed=1)), begun=1, ended=4
)  # shares a prefix with `own`
SERVED = (EARLIER, BESIDE, OWN)


@dataclass
class Bench:
    """An oracle of a model, and files made from the reference."""

    directory: Path
    reference: Reference

    @property
    def dtype(self) -> torch.dtype:
        return self.reference.dtype

    def rows(self, request: Served) -> torch.Tensor:
        return self.reference.rows(request.token_ids, LAYER_IDS).to(self.dtype)

    def verdict(
        self, rows: torch.Tensor, token_ids: tuple[int, ...] = OWN.token_ids, own: Served = OWN
    ) -> str:
        """Return the oracle's verdict on a file with these rows."""
        names = {torch.float32: "F32", torch.bfloat16: "BF16"}
        with FileSink(
            self.directory, RowFormat(LAYER_IDS, rows.shape[-1], names[self.dtype])
        ) as sink:
            file = sink.open("request", self.directory / "request.safetensors")
            file.write(0, rows.contiguous().view(torch.uint8).numpy())
            file.commit(torch.tensor(token_ids).numpy(), len(token_ids))
        oracle = Oracle(self.reference, LAYER_IDS)
        return oracle.verdict(
            self.directory / "request.safetensors",
            own,
            len(own.token_ids),
            len(own.token_ids),
            SERVED,
        )


@pytest.fixture(scope="module")
def references(float32_qwen3: Path, tiny_minimax_m2: Path) -> dict[torch.dtype, Reference]:
    models = {torch.float32: float32_qwen3, torch.bfloat16: tiny_minimax_m2}
    return {dtype: Reference(model, NUM_LAYERS, dtype) for dtype, model in models.items()}


@pytest.fixture(
    params=[torch.float32, torch.bfloat16], ids=["qwen3-float32", "minimax-m2-bfloat16"]
)
def bench(
    request: pytest.FixtureRequest, references: dict[torch.dtype, Reference], tmp_path: Path
) -> Bench:
    return Bench(tmp_path, references[request.param])


def test_the_rows_of_the_request_are_right(bench: Bench) -> None:
    assert bench.verdict(bench.rows(OWN)) == ""


def foreign(bench: Bench, rows: torch.Tensor) -> None:
    rows[20:25] = bench.rows(BESIDE)[7:12]


def stale(bench: Bench, rows: torch.Tensor) -> None:
    rows[12] = bench.rows(EARLIER)[12]


def shifted(bench: Bench, rows: torch.Tensor) -> None:
    rows[8:-1] = rows[9:].clone()


def shifted_by_a_chunk(bench: Bench, rows: torch.Tensor) -> None:
    rows[16:32] = rows[:16].clone()


def zero(bench: Bench, rows: torch.Tensor) -> None:
    rows[5] = 0


def zero_layer(bench: Bench, rows: torch.Tensor) -> None:
    rows[5:7, 1] = 0


def not_finite(bench: Bench, rows: torch.Tensor) -> None:
    rows[9, 2, 3] = torch.nan
    rows[10] = torch.inf


def swapped_layers(bench: Bench, rows: torch.Tensor) -> None:
    rows[:] = rows[:, [0, 2, 1]].clone()


def one_layer_foreign(bench: Bench, rows: torch.Tensor) -> None:
    rows[3, 0] = bench.rows(BESIDE)[3, 0]


def garbage(bench: Bench, rows: torch.Tensor) -> None:
    rows[30:33] = torch.randn(rows[30:33].shape, generator=torch.Generator().manual_seed(0))


def one_element(bench: Bench, rows: torch.Tensor) -> None:
    tolerances = {
        torch.float32: EXACT,
        torch.bfloat16: ELEMENT_TOLERANCE * 2**-7 * rows[11, 0].float().square().mean().sqrt(),
    }
    rows[11, 0, 40] += 1.5 * tolerances[bench.dtype]


def several(bench: Bench, rows: torch.Tensor) -> None:
    foreign(bench, rows)
    zero(bench, rows)
    garbage(bench, rows)


FAULTS = {
    foreign: "own: rows 20-24 are from beside, position 7 to 11$",
    stale: r"own: row 12 is from earlier, which had ended before \(stale\), position 12$",
    shifted: r"own: rows 8-38 are shifted by \+1$",
    shifted_by_a_chunk: "own: rows 16-31 are shifted by -16$",
    zero: "own: row 5 is zero$",
    zero_layer: r"own: rows 5-6 are zero in layer slots \[1\]$",
    not_finite: r"own: row 9 is not finite in layer slots \[2\]; row 10 is not finite$",
    swapped_layers: r"own: layers in the wrong order: the slots hold what belongs in slots \[0, 2, 1\]$",
    one_layer_foreign: r"own: row 3 is from beside, position 3 in layer slots \[0\]$",
    garbage: r"own: rows 30-32 are garbage: in no request's rows \(off by at most [0-9.]+\)$",
    one_element: r"own: row 11 is garbage in layer slots \[0\]: in no request's rows \(off by at most [0-9.e-]+\)$",
    several: (
        "own: row 5 is zero; rows 20-24 are from beside, position 7 to 11; rows 30-32 are "
        "garbage: in no request's rows \\(off"
    ),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_oracle_names_each_mistake(
    bench: Bench, fault: Callable[[Bench, torch.Tensor], None]
) -> None:
    rows = bench.rows(OWN).clone()
    fault(bench, rows)
    verdict = bench.verdict(rows)
    assert re.match(FAULTS[fault], verdict), verdict


def test_a_file_of_another_request_is_named(bench: Bench) -> None:
    assert (
        bench.verdict(bench.rows(BESIDE), BESIDE.token_ids) == "own: token_ids are those of beside"
    )


def test_a_file_with_too_few_tokens_is_named(bench: Bench) -> None:
    assert (
        bench.verdict(bench.rows(OWN)[:-2], OWN.token_ids[:-2])
        == "own: it has 38 tokens, expected 40"
    )


def test_a_wrong_token_is_named(bench: Bench) -> None:
    wrong = (*OWN.token_ids[:3], 1, *OWN.token_ids[4:])
    assert (
        bench.verdict(bench.rows(OWN), wrong)
        == f"own: token_ids differ from position 3 on: 1, expected {OWN.token_ids[3]}"
    )


def test_a_missing_file_is_named(bench: Bench) -> None:
    oracle = Oracle(bench.reference, LAYER_IDS)
    assert oracle.verdict(bench.directory / "none.safetensors", OWN, 40, 40).startswith(
        "own: there is no file: "
    )


def test_prefix_of_a_longer_reference_equals_the_shorter_reference(
    references: dict[torch.dtype, Reference], float32_qwen3: Path
) -> None:
    longer = tuple(tokens(200))
    references[torch.float32].rows(longer, LAYER_IDS)
    for length in (1, 7, 64, 199):
        cut = references[torch.float32].rows(longer[:length], LAYER_IDS)
        computed = reference_hidden_states(float32_qwen3, longer[:length], LAYER_IDS, torch.float64)
        assert (cut - computed).abs().max() <= 1e-12


def test_all_rows_differ_by_more_than_the_tolerance(bench: Bench) -> None:
    """The closest rows have the same token after different tokens, or at other positions."""
    same_token = tuple(
        Served(f"same-{seed}", (*tokens(20, seed), 77, 77, 77), 0, None) for seed in range(6)
    )
    rows = torch.cat(
        [bench.reference.rows(each.token_ids, LAYER_IDS)[-3:, 0] for each in same_token]
    )  # of the deepest layer
    distances = torch.cdist(rows, rows).fill_diagonal_(torch.inf) / rows.norm(dim=-1)
    tolerance = (
        1e-4
        if bench.dtype is torch.float32
        else ROW_TOLERANCE * float(layer_eps(bench.dtype, [4])[0])
    )
    assert distances.min() > 2 * tolerance
