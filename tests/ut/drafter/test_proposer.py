"""The proposer with a mocked runner: collectives, their order, and refused runners."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm_ascend.ops  # noqa: F401 - before spec_decode: vllm-ascend's modules import each other in circles
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import CUDAGraphMode

from vllm_ascend_hsx.compat.versions import IncompatibleVersionError
from vllm_ascend_hsx.drafter.attention import AscendCacheOnlyLayer, CacheOnlyMetadata
from vllm_ascend_hsx.drafter.proposer import HsxProposer
from vllm_ascend_hsx.drafter.spans import Span

LAYER = "cache_only_layers.4"


class Runner:
    """The part of NPUModelRunner that the proposer calls.

    Records calls, and answers as for DP=2.
    """

    def __init__(self, tp_size: int = 4, other_rank_tokens: int = 0) -> None:
        self.calls: list[tuple[str, int]] = []
        self.sync_arguments: list[dict[str, Any]] = []
        self.tp_size = tp_size
        self.other_rank_tokens = other_rank_tokens
        self.input_batch = SimpleNamespace(
            req_ids=[], num_computed_tokens_cpu=np.zeros(4, np.int32)
        )

    def _pad_for_sequence_parallelism(self, num_tokens: int) -> int:
        self.calls.append(("pad", num_tokens))
        return -(-num_tokens // self.tp_size) * self.tp_size

    def _sync_metadata_across_dp(
        self, num_tokens: int, **arguments: Any
    ) -> tuple[int, torch.Tensor, CUDAGraphMode]:
        self.calls.append(("sync", num_tokens))
        self.sync_arguments.append(arguments)
        most = max(num_tokens, self.other_rank_tokens)
        return most, torch.tensor([most, most], dtype=torch.int32), arguments["cudagraph_mode"]


class Model:
    """Replaces the model of the drafter. Records the arguments."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def __call__(self, target_rows: list[torch.Tensor], metadata: Any) -> None:
        self.given.append(metadata.spans)


def make_proposer(runner: Any, dp_size: int = 2) -> HsxProposer:
    """Return a proposer as after load_model, without an engine."""
    proposer = HsxProposer.__new__(HsxProposer)
    proposer.runner = runner
    proposer.dp_rank = 0
    proposer.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=dp_size)
    )
    proposer.staging = SimpleNamespace(wanted={})
    proposer.model = Model()
    return proposer


def propose(
    proposer: HsxProposer, num_tokens: int, starts: list[int], *counts: int
) -> torch.Tensor:
    return proposer.propose(
        *counts,
        sampled_token_ids=torch.tensor([[7]] * (len(starts) - 1)),
        target_hidden_states=[torch.zeros(num_tokens, 2)],
        common_attn_metadata=SimpleNamespace(
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32)
        ),
    )


def test_tokens_are_padded_for_sequence_parallelism_before_the_ranks_agree() -> None:
    runner = Runner(tp_size=4)
    mode, num_tokens, across_dp = make_proposer(runner)._determine_batch_execution_and_padding(6)
    assert runner.calls == [("pad", 6), ("sync", 8)]
    assert (mode, num_tokens, across_dp.tolist()) == (CUDAGraphMode.NONE, 8, [8, 8])


def test_only_the_runners_own_collective_is_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(
            "posted a [4, dp] collective into the group of the runner's [2, dp] one"
        )

    monkeypatch.setattr(
        "vllm.v1.spec_decode.extract_hidden_states.coordinate_batch_across_dp", forbidden
    )
    monkeypatch.setattr("vllm.forward_context.coordinate_batch_across_dp", forbidden)
    runner = Runner()
    propose(make_proposer(runner), 6, [0, 6])
    assert [name for name, _ in runner.calls] == ["pad", "sync"]
    assert runner.sync_arguments == [{"is_draft_model": True, "cudagraph_mode": CUDAGraphMode.NONE}]


@given(busy=st.integers(1, 300), idle=st.integers(1, 300), tp_size=st.sampled_from([1, 2, 4, 8]))
def test_idle_dp_rank_issues_the_same_collectives(busy: int, idle: int, tp_size: int) -> None:
    busy_runner, idle_runner = Runner(tp_size), Runner(tp_size)
    propose(make_proposer(busy_runner), busy, [0, busy])
    make_proposer(idle_runner).dummy_run(
        idle, with_prefill=True, num_reqs=1, in_graph_capturing=False, is_profile=False
    )
    assert (
        [name for name, _ in busy_runner.calls]
        == [name for name, _ in idle_runner.calls]
        == ["pad", "sync"]
    )
    assert busy_runner.sync_arguments == idle_runner.sync_arguments
    assert all(
        tokens % tp_size == 0
        for runner in (busy_runner, idle_runner)
        for name, tokens in runner.calls
        if name == "sync"
    )


def test_agreed_number_of_tokens_is_used_if_another_rank_has_more() -> None:
    _, num_tokens, across_dp = make_proposer(
        Runner(other_rank_tokens=40)
    )._determine_batch_execution_and_padding(6)
    assert (num_tokens, across_dp.tolist()) == (40, [40, 40])


def test_each_rank_uses_its_own_agreed_number(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = make_proposer(Runner())
    proposer.dp_rank = 1
    monkeypatch.setattr(
        proposer.runner,
        "_sync_metadata_across_dp",
        lambda **_: (12, torch.tensor([8, 12]), CUDAGraphMode.NONE),
    )
    assert proposer._determine_batch_execution_and_padding(9)[1] == 12


def test_single_dp_rank_issues_no_collective() -> None:
    runner = Runner(tp_size=4)
    assert make_proposer(runner, dp_size=1)._determine_batch_execution_and_padding(6) == (
        CUDAGraphMode.NONE,
        8,
        None,
    )
    assert runner.calls == [("pad", 6)]


def test_collectives_do_not_depend_on_whether_a_rank_extracts() -> None:
    calls = []
    for wanted in ({}, {"b": 9}):
        runner = Runner(tp_size=2)
        runner.input_batch = SimpleNamespace(
            req_ids=["a", "b"], num_computed_tokens_cpu=np.array([12, 0, 9], np.int32)
        )
        proposer = make_proposer(runner)
        proposer.staging.wanted = wanted
        propose(proposer, 7, [0, 2, 7])
        calls.append(runner.calls)
    assert calls[0] == calls[1] == [("pad", 7), ("sync", 8)]
    assert proposer.model.given == [[("b", 0, 5, 2)]]


class Connector:
    """The part of a connector that the layer calls. Records the arguments."""

    def __init__(self, in_step: bool) -> None:
        self._in_step = in_step
        self.handed: list[Any] = []

    def has_connector_metadata(self) -> bool:
        return self._in_step

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any) -> None:
        self.handed.append((layer_name, kv_layer, attn_metadata))


@pytest.mark.parametrize("in_step", [True, False], ids=["in a step", "outside of a step"])
def test_layer_passes_rows_to_the_connector_without_a_forward_context(
    in_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector, written = Connector(in_step), []
    monkeypatch.setattr(
        "vllm.distributed.kv_transfer.kv_transfer_state._KV_CONNECTOR_AGENT", connector
    )
    staging: Any = SimpleNamespace(
        rows=torch.zeros(2, 4, 1, 3), write=lambda *arguments: written.append(arguments)
    )
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    layer, metadata, rows = (
        AscendCacheOnlyLayer(staging, LAYER, config),
        CacheOnlyMetadata([Span("b", 0, 5, 2)]),
        [torch.zeros(7, 3)],
    )
    layer(rows, metadata)
    assert written == [(rows, metadata.spans)]
    assert connector.handed == ([(LAYER, staging.rows, metadata)] if in_step else [])


def test_the_layer_needs_no_connector() -> None:
    staging: Any = SimpleNamespace(rows=torch.zeros(2, 4, 1, 3), write=lambda *_: None)
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    AscendCacheOnlyLayer(staging, LAYER, config)([torch.zeros(7, 3)], CacheOnlyMetadata([]))


def test_step_without_wanted_rows_does_not_read_the_batch() -> None:
    runner = Runner()
    del runner.input_batch
    propose(make_proposer(runner), 7, [0, 2, 7])


@pytest.mark.parametrize("counts", [(), (0,)], ids=["0.23", "0.26"])
def test_runner_may_pass_the_number_of_draft_tokens(counts: tuple[int, ...]) -> None:
    runner = Runner()
    assert propose(make_proposer(runner), 4, [0, 3, 4], *counts).shape == (2, 0)
    assert runner.calls == [("pad", 4), ("sync", 4)]


def test_drafter_gets_the_batch_of_an_existing_kv_cache_group() -> None:
    """Otherwise 0.30 does not call the drafter, and rows are missing without an error."""
    proposer = make_proposer(Runner())
    proposer.validate_same_kv_cache_group(
        SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["model.layers.0"])])
    )
    assert proposer.kv_cache_gid == 0


def test_no_token_is_proposed() -> None:
    assert propose(make_proposer(Runner()), 4, [0, 3, 4]).shape == (2, 0)
    sampled = torch.tensor([[5], [6]])
    next_ids, _ = make_proposer(Runner()).prepare_next_token_ids_padded(
        sampled, {}, None, torch.zeros(2), 0
    )
    assert next_ids.tolist() == [5, 6]


class RunnerWithoutHooks:
    """Like the v2 runner of vllm-ascend 0.23.0, it lacks these methods."""


@pytest.mark.parametrize(
    ("runner", "missing"),
    [
        (None, "without a model runner"),
        (RunnerWithoutHooks(), "no _pad_for_sequence_parallelism and no _sync_metadata_across_dp"),
    ],
)
def test_a_runner_that_cannot_keep_ranks_in_step_is_refused_at_start(
    runner: Any, missing: str
) -> None:
    with pytest.raises(IncompatibleVersionError, match=missing):
        HsxProposer(vllm_config=None, device=torch.device("cpu"), runner=runner)
