"""Connectors beside ours, responses of several samples, beam searches, and the prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_ascend.ops  # noqa: F401 - before spec_decode: vllm-ascend's modules import each other in circles
from patching import apply
from scheduler_harness import make_request
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest

from vllm_ascend_hsx.compat import engine, request_params
from vllm_ascend_hsx.compat.request_params import NOT_EXTRACTED
from vllm_ascend_hsx.connector.connector import AscendHiddenStatesConnector
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata


@pytest.mark.parametrize(
    ("extracted", "offered", "answer"),
    [(True, 5, 0), (False, 5, 5), (True, None, None), (True, 0, 0)],
)
def test_no_other_connector_loads_kv_for_an_extracted_request(
    extracted: bool, offered: int | None, answer: int | None
) -> None:
    class MultiConnector:
        def __init__(self) -> None:
            ours, sibling = SimpleNamespace(extracts=lambda request: extracted), SimpleNamespace()
            self._connectors, self._requests_to_connector = [sibling, ours], {}

        def get_num_new_matched_tokens(
            self, request: Any, num_computed_tokens: int
        ) -> tuple[int | None, bool]:
            if offered:
                self._requests_to_connector[request.request_id] = 0
            return offered, bool(offered)

    apply(SimpleNamespace(MultiConnector=MultiConnector), engine.compute_extracted_tokens)
    multi = MultiConnector()
    assert multi.get_num_new_matched_tokens(SimpleNamespace(request_id="r"), 0) == (
        answer,
        bool(answer),
    )
    assert multi._requests_to_connector == ({"r": 0} if answer else {})


@pytest.mark.parametrize(("siblings", "known"), [(0, []), (1, ["others"])])
def test_connector_knows_if_others_read_request_parameters(siblings: int, known: list[str]) -> None:
    found: list[str] = []

    class MultiConnector:
        def __init__(self, config: str) -> None:
            ours = SimpleNamespace(beside_others=lambda: found.append("others"))
            self._connectors = [*(SimpleNamespace() for _ in range(siblings)), ours]

    apply(SimpleNamespace(MultiConnector=MultiConnector), engine.name_other_connectors)
    MultiConnector("config")
    assert found == known


@pytest.mark.parametrize("in_multi_connector", [False, True])
def test_worker_report_of_a_step_is_taken_before_its_requests_are_answered(
    in_multi_connector: bool,
) -> None:
    known: list[str] = []
    ours, sibling = SimpleNamespace(take_report=known.append), SimpleNamespace()
    connector = SimpleNamespace(_connectors=[sibling, ours]) if in_multi_connector else ours
    report = SimpleNamespace(metadata=("theirs", "ours")) if in_multi_connector else "ours"

    class Scheduler:
        def __init__(self) -> None:
            self.connector = connector

        def update_from_output(
            self, scheduler_output: str, model_runner_output: Any
        ) -> tuple[str, list[str]]:
            return scheduler_output, list(known)

    apply(SimpleNamespace(Scheduler=Scheduler), engine.report_before_answers)
    scheduler = Scheduler()
    output = SimpleNamespace(kv_connector_output=SimpleNamespace(kv_connector_worker_meta=report))
    assert scheduler.update_from_output("scheduled", output) == ("scheduled", ["ours"])
    for nothing in (None, SimpleNamespace(kv_connector_worker_meta=None)):
        known.clear()
        assert scheduler.update_from_output(
            "scheduled", SimpleNamespace(kv_connector_output=nothing)
        ) == ("scheduled", [])


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (
            {"hidden_states_path": "/data/a"},
            {"remote": 1},
            {"hidden_states_path": "/data/a", "remote": 1},
        ),
        (
            {"metadata": "ours", "handle": "a"},
            {"metadata": "theirs"},
            {"metadata": "theirs", "handle": "a"},
        ),
        ({"hidden_states_path": "/data/a"}, None, {"hidden_states_path": "/data/a"}),
        (None, {"remote": 1}, {"remote": 1}),
        (None, None, None),
    ],
)
def test_our_answer_is_merged_with_another_connectors_answer(
    ours: Any, theirs: Any, said: Any
) -> None:
    class Ours:
        answer = ours

        def end_request(self, request: str) -> Any:
            taken, self.answer = self.answer, None
            return taken

        request_finished = end_request

    class Scheduler:
        def __init__(self) -> None:
            self.connector = SimpleNamespace(
                _connectors=[SimpleNamespace(request_finished=lambda request: theirs), Ours()]
            )

        def _connector_finished(self, request: str) -> tuple[bool, Any]:
            answers = [
                answer
                for each in self.connector._connectors
                if (answer := each.request_finished(request)) is not None
            ]
            assert len(answers) < 2, "Only one connector can produce KV transfer params"
            return True, next(iter(answers), None)

    apply(SimpleNamespace(Scheduler=Scheduler), engine.answer_beside_others)
    assert Scheduler()._connector_finished("r") == (True, said)


@pytest.mark.parametrize(
    "last",
    [{"hidden_states_path": "/data/2"}, {"hidden_states_error": "no room"}, None],
    ids=["rows", "error", "stop string"],
)
def test_response_names_the_errors_of_all_samples(last: dict[str, str] | None) -> None:
    """vLLM's own aggregation of samples has the answer of the sample that ends last."""
    module = SimpleNamespace(
        RequestState=type(
            "RequestState",
            (RequestState,),
            {"_new_completion_output": lambda self, *_: self.sample},
        )
    )
    module.RequestState._new_request_output = (
        lambda self, request_id, outputs, finished, params, *_: params
    )
    apply(module, engine.name_errors_of_samples)
    request = SimpleNamespace(
        external_req_id="r",
        request_id="r-0",
        params=SamplingParams(n=3, output_kind=RequestOutputKind.FINAL_ONLY),
    )
    parent = ParentRequest(request)
    states = []
    for index in range(3):
        state = object.__new__(module.RequestState)
        state.request_id, _ = parent.get_child_info(index)
        state.request_index, state.parent_req, state.stream_interval = index, parent, 1
        state.output_kind, state.external_req_id = RequestOutputKind.FINAL_ONLY, "r"
        state.sample = SimpleNamespace(index=index, finished=lambda: True)
        states.append(state)
    said = [{"hidden_states_error": "no room"}, {"hidden_states_error": "its name is taken"}, last]
    for state, params in zip(states, said, strict=True):
        assert state.make_request_output([7], None, None, None) is None, (
            "no token but the last is answered"
        )
        answer = state.make_request_output([7], None, FinishReason.LENGTH, None, params)
    refused = 2 if last and "hidden_states_error" in last else 1
    error = (
        f"{refused} of 3 samples (first: 0): no room; 1 of 3 samples (first: 1): its name is taken"
    )
    assert answer == {**(last or {}), "hidden_states_error": error}


def test_response_names_the_errors_of_all_prompts() -> None:
    """vLLM's own response has the answer of the first prompt."""

    class OpenAIServingCompletion:
        def request_output_to_completion_response(
            self, final_res_batch: list[Any], *others: Any
        ) -> tuple[Any, ...]:
            return final_res_batch[0].kv_transfer_params, others

    apply(
        SimpleNamespace(OpenAIServingCompletion=OpenAIServingCompletion),
        engine.name_errors_of_prompts,
    )

    def answer(*params: Any) -> Any:
        batch = [SimpleNamespace(kv_transfer_params=each) for each in params]
        said, others = OpenAIServingCompletion().request_output_to_completion_response(
            batch, "request", "id"
        )
        assert others == ("request", "id")
        return said

    rows, full, taken = (
        {"hidden_states_path": "/data/0"},
        {"hidden_states_error": "no room"},
        {"hidden_states_error": "taken"},
    )
    assert answer(rows, full, taken, full) == {
        "hidden_states_path": "/data/0", "hidden_states_error": "2 of 4 prompts (first: 1): no room; 1 of 4 prompts (first: 2): taken"
    }  # fmt: skip
    assert answer(None, full) == {"hidden_states_error": "1 of 2 prompts (first: 1): no room"}
    for alone in ([rows], [full], [None], [rows, None, rows]):
        assert answer(*alone) == alone[0]


BEAMS_OPT_OUT = {"kv_transfer_params": {"hidden_states": False}}


def transfer(connector: str | None, **options: Any) -> Any:
    extra = {"shared_storage_path": "/data", **options}
    return (
        None
        if connector is None
        else SimpleNamespace(
            kv_connector=connector, kv_role="kv_producer", kv_connector_extra_config=extra
        )
    )


@pytest.mark.parametrize(
    ("connector", "mark"),
    [("AscendHiddenStatesConnector", BEAMS_OPT_OUT), ("MooncakeConnector", None), (None, None)],
)
def test_beam_search_requests_opt_out_with_our_connector(connector: str | None, mark: Any) -> None:
    config = SimpleNamespace(kv_transfer_config=transfer(connector))
    offline = SimpleNamespace(SamplingParams=SimpleNamespace)
    online = SimpleNamespace(SamplingParams=SimpleNamespace)

    class BeamSearchOfflineMixin:
        llm_engine = SimpleNamespace(vllm_config=config)

        def beam_search(self, prompts: list[str], params: Any) -> list[Any]:
            return [offline.SamplingParams(max_tokens=1, prompt=each) for each in prompts]

    class BeamSearchOnlineMixin:
        engine_client = SimpleNamespace(vllm_config=config)

        async def beam_search(
            self, prompt: str, request_id: str, params: Any, lora_request: Any = None
        ) -> AsyncIterator[Any]:
            yield SimpleNamespace(
                sampling=online.SamplingParams(max_tokens=1), kv_transfer_params=None
            )

    offline.BeamSearchOfflineMixin, online.BeamSearchOnlineMixin = (
        BeamSearchOfflineMixin,
        BeamSearchOnlineMixin,
    )
    apply(offline, request_params.add_extra_args, request_params.search_offline)
    apply(online, request_params.add_extra_args, request_params.search_online)

    async def search() -> list[Any]:
        return [
            each
            async for each in BeamSearchOnlineMixin().beam_search(
                "prompt", "id", SimpleNamespace(), lora_request=None
            )
        ]

    (beam,) = BeamSearchOfflineMixin().beam_search(["prompt"], params=None)
    assert getattr(beam, "extra_args", None) == mark
    assert (
        getattr(offline.SamplingParams(max_tokens=1), "extra_args", None) is None
    )  # created by another party
    (output,) = asyncio.run(search())
    assert getattr(output.sampling, "extra_args", None) == mark
    assert (output.kv_transfer_params is not None) is (mark is not None)


@pytest.mark.parametrize(
    ("extract", "params", "told"),
    [
        ("all", None, True),
        ("all", {"hidden_states": False}, False),
        ("all", {"hidden_states": 5}, True),
        ("all", {"hidden_states_path": "a.safetensors"}, True),
        ("requested", None, False),
        ("requested", {"hidden_states": True}, True),
    ],
)
@pytest.mark.parametrize("name", ["ChatCompletionRequest", "CompletionRequest"])
def test_beam_search_names_the_reason_for_missing_rows_if_requested(
    name: str, extract: str, params: Any, told: bool
) -> None:
    class Request:
        kv_transfer_params = params

        def to_beam_search_params(
            self, max_tokens: int, default_sampling_params: dict[str, Any]
        ) -> Any:
            return SimpleNamespace(max_tokens=max_tokens)

    class BeamSearchOnlineMixin:
        vllm_config = SimpleNamespace(
            kv_transfer_config=transfer("AscendHiddenStatesConnector", extract=extract)
        )
        engine_client = SimpleNamespace(vllm_config=vllm_config)

        async def beam_search(
            self, prompt: str, request_id: str, params: Any
        ) -> AsyncIterator[Any]:
            assert params.max_tokens == 7
            yield SimpleNamespace(kv_transfer_params=None)

    apply(SimpleNamespace(**{name: Request}), request_params.keep_client_params)
    apply(
        SimpleNamespace(BeamSearchOnlineMixin=BeamSearchOnlineMixin), request_params.search_online
    )

    async def search() -> list[Any]:
        search_params = Request().to_beam_search_params(7, {})
        return [
            each.kv_transfer_params
            async for each in BeamSearchOnlineMixin().beam_search("prompt", "id", search_params)
        ]

    (answer,) = asyncio.run(search())
    assert answer == ({"hidden_states_error": NOT_EXTRACTED} if told else None)


# vLLM's calls of our connector


def worker_side(steps: list[Any]) -> AscendHiddenStatesConnector:
    connector = AscendHiddenStatesConnector.__new__(AscendHiddenStatesConnector)
    connector._worker = SimpleNamespace(start_step=steps.append)  # type: ignore[assignment]
    return connector


def test_step_starts_before_the_forward_pass_but_not_at_load_start() -> None:
    """Since 0.30 loading comes after it, on model runner V2 even after the drafter."""
    steps: list[Any] = []
    connector, metadata = worker_side(steps), HsxConnectorMetadata.__new__(HsxConnectorMetadata)
    connector.bind_connector_metadata(metadata)
    assert steps == [metadata]
    connector.start_load_kv(None)
    assert steps == [metadata]


def test_no_kv_is_sent_so_requests_may_be_preempted() -> None:
    assert worker_side([]).requires_kv_delivery is False


def test_prefix_cache_is_read_only_as_far_as_rows_are_reusable() -> None:
    seen: list[Any] = []
    block = 4

    def original(self: Any, request: Any) -> str:
        seen.append((request.num_tokens, request.skip_reading_prefix_cache, request.block_hashes))
        return "blocks"

    manager = SimpleNamespace(
        enable_caching=True, block_pool=SimpleNamespace(hash_block_size=block)
    )
    request = make_request("one", num_tokens=20, block_hashes="hashes")
    request.num_tokens = 20
    for at_hand in (None, 0, 8, 20):
        request.hsx_reusable_rows = (
            None
            if at_hand is None
            else lambda _, block_size, at_hand=at_hand: at_hand * block_size // block
        )
        assert engine.read_where_rows_are(original, manager, request) == "blocks"
    assert seen == [
        (20, False, "hashes"),
        (1, True, "hashes"),
        (9, False, "hashes"),
        (20, False, "hashes"),
    ]
    request.skip_reading_prefix_cache = True  # as with prompt_logprobs
    request.hsx_reusable_rows = None  # not asked
    engine.read_where_rows_are(original, manager, request)
    assert seen[-1] == (20, True, "hashes")
