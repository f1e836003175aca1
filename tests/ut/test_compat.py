"""The patches of vLLM and vllm-ascend: each concerns our method or connector alone, and refuses a version without its place."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_ascend.ops  # noqa: F401 - before spec_decode: vllm-ascend's modules import each other in circles
from patching import apply

from vllm_ascend_hsx import plugin
from vllm_ascend_hsx.compat import beam_search, drafts, engine, request_params
from vllm_ascend_hsx.compat.beam_search import NOT_EXTRACTED
from vllm_ascend_hsx.compat.patch_points import POINTS, PatchPoint
from vllm_ascend_hsx.compat.versions import IncompatibleVersionError
from vllm_ascend_hsx.config import CONNECTOR_NAME
from vllm_ascend_hsx.protocol.errors import UserError


def test_a_wheel_whose_proposer_is_not_the_base_of_ours_is_refused() -> None:
    module = SimpleNamespace(AscendExtractHiddenStatesProposer=dict)
    apply(module, plugin.make_proposer)
    with pytest.raises(IncompatibleVersionError, match="as the base class.*checked against vllm"):
        module.AscendExtractHiddenStatesProposer()


@pytest.mark.parametrize("point", [each for each in POINTS if each.replacement], ids=lambda point: point.name)
def test_a_version_without_a_place_to_patch_is_refused(point: PatchPoint) -> None:
    with pytest.raises(IncompatibleVersionError, match=rf"needs {re.escape(point.name)}\. It was checked against vllm"):
        point.apply(SimpleNamespace())


@pytest.mark.parametrize(
    ("connector", "disabled"),
    [("AscendHiddenStatesConnector", False), ("MultiConnector", True), ("MooncakeConnector", True), (None, False)],
)
def test_preemption_stays_on_for_our_connector_alone(connector: str | None, disabled: bool) -> None:
    def upstream(vllm_config: Any) -> bool:
        return vllm_config.kv_transfer_config is not None

    module = SimpleNamespace(_disable_preemption_on_prefill_node=upstream)
    apply(module, engine.keep_preemption)
    transfer = None if connector is None else SimpleNamespace(kv_connector=connector)
    assert module._disable_preemption_on_prefill_node(SimpleNamespace(kv_transfer_config=transfer)) is disabled


def speculative(method: str = "extract_hidden_states", number: int = 1) -> Any:
    return SimpleNamespace(method=method, num_speculative_tokens=number)


def config_module() -> Any:
    """A VllmConfig that checks its parts and then derives a size from them, in that order, as vLLM's does."""

    class VllmConfig:
        def __init__(self, speculative_config: Any = None, connector: str | None = CONNECTOR_NAME, offload: bool = False) -> None:
            extra = {"shared_storage_path": "/data"}
            self.kv_transfer_config = SimpleNamespace(kv_connector=connector, kv_role="kv_producer", kv_connector_extra_config=extra)
            self.offload, self.model_config = offload, SimpleNamespace(architecture="Qwen3ForCausalLM")
            if speculative_config is not None and speculative_config.num_speculative_tokens <= 0:
                raise ValueError("greater than zero")
            self.speculative_config = speculative_config
            self.__post_init__()

        def __post_init__(self) -> None:
            if self.offload:
                self.kv_transfer_config.kv_connector = "OffloadingConnector"
            self.decode_query_len = 1 + (self.speculative_config.num_speculative_tokens if self.speculative_config else 0)

    module = SimpleNamespace(VllmConfig=VllmConfig)
    apply(module, drafts.check_config_with_one_draft, drafts.schedule_no_drafts)
    return module


def test_what_an_engine_derives_from_its_configuration_is_as_without_extraction() -> None:
    config = config_module().VllmConfig
    plain, extracting, other = config(), config(speculative_config=speculative()), config(speculative_config=speculative("eagle3"))
    assert plain.decode_query_len == extracting.decode_query_len == 1
    assert extracting.speculative_config.num_speculative_tokens == 0
    assert other.decode_query_len == 2


def test_a_copy_of_a_configuration_passes_vllms_check_again() -> None:
    config = config_module().VllmConfig
    first = config(speculative_config=speculative())
    assert config(speculative_config=first.speculative_config).decode_query_len == 1
    assert first.speculative_config.num_speculative_tokens == 0


def test_sizes_can_be_derived_again_as_each_engine_does_with_data_parallelism() -> None:
    config = config_module().VllmConfig(speculative_config=speculative())
    config.__post_init__()
    assert config.decode_query_len == 1


def test_a_number_of_draft_tokens_that_means_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"num_speculative_tokens=3 has no meaning.*Set it to 1"):
        config_module().VllmConfig(speculative_config=speculative(number=3))


@pytest.mark.parametrize("options", [{"connector": "ExampleHiddenStatesConnector"}, {"connector": None}, {"offload": True}])
def test_a_configuration_whose_connector_is_another_is_refused_while_it_is_made(options: dict[str, Any]) -> None:
    config = config_module().VllmConfig
    assert config(**options).decode_query_len == 1
    with pytest.raises(UserError, match=r"kv_connector=.* does not take.*AscendHiddenStatesConnector.* VLLM_PLUGINS="):
        config(speculative_config=speculative(), **options)


def test_a_configuration_made_without_our_plugin_is_refused() -> None:
    drafts.require_no_drafts(SimpleNamespace(speculative_config=speculative(number=0)))
    with pytest.raises(UserError, match="num_speculative_tokens=1 would be scheduled.*VLLM_PLUGINS"):
        drafts.require_no_drafts(SimpleNamespace(speculative_config=speculative()))


@pytest.mark.parametrize(("method", "inside", "after"), [("extract_hidden_states", 1, 0), ("eagle3", 2, 2)])
def test_the_drafter_is_set_up_as_if_for_one_token_and_the_number_is_restored(method: str, inside: int, after: int) -> None:
    class Proposer:
        def __init__(self, vllm_config: Any, device: str) -> None:
            assert vllm_config.speculative_config.num_speculative_tokens == 1

    class NPUModelRunner:
        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config, self.speculative_config = vllm_config, vllm_config.speculative_config

        def _set_up_drafter(self) -> None:
            assert self.speculative_config.num_speculative_tokens == inside
            self.decode_token_per_req = 1 + inside
            if method == "extract_hidden_states":
                Proposer(self.vllm_config, device="npu")

    apply(SimpleNamespace(ExtractHiddenStatesProposer=Proposer), drafts.set_up_proposer)
    apply(SimpleNamespace(NPUModelRunner=NPUModelRunner), drafts.set_up_drafter)
    config = SimpleNamespace(speculative_config=speculative(method, after))
    runner = NPUModelRunner(config)
    runner._set_up_drafter()
    assert (runner.decode_token_per_req, config.speculative_config.num_speculative_tokens) == (1 + after, after)


@pytest.mark.parametrize(("method", "counts"), [("extract_hidden_states", False), ("eagle3", True), (None, False)])
def test_accepted_drafts_of_a_hybrid_target_are_counted_where_there_are_drafts(method: str | None, counts: bool) -> None:
    class GPUModelRunner:
        """Of vLLM: buffers for accepted drafts are made when there is a speculative method."""

        def _get_mamba_bufs(self) -> bool:
            return self.speculative_config is not None

    class NPUModelRunner(GPUModelRunner):
        def __init__(self) -> None:
            self.speculative_config = None if method is None else speculative(method)

        def _update_states_after_model_execute(self, output_token_ids: list[int], scheduler_output: str) -> list[int] | None:
            return None if self.speculative_config is None else output_token_ids

    apply(SimpleNamespace(NPUModelRunner=NPUModelRunner), drafts.without_speculative_method)
    runner = NPUModelRunner()
    assert runner._get_mamba_bufs() is counts
    assert runner._update_states_after_model_execute([7], "scheduled") == ([7] if counts else None)
    assert getattr(runner.speculative_config, "method", None) == method


@pytest.mark.parametrize(("method", "left_out"), [("extract_hidden_states", False), ("eagle3", True)])
def test_what_vllm_refuses_because_of_drafts_is_refused_with_drafts_alone(method: str, left_out: bool) -> None:
    class SamplingParams:
        def _validate_spec_decode(self, speculative_config: Any) -> None:
            if speculative_config is not None:
                raise ValueError("min_p and logit_bias")

    def build_logitsprocs(vllm_config: Any, device: str) -> list[str]:
        return ["min_tokens"] if vllm_config.speculative_config else ["min_tokens", "min_p", "logit_bias"]

    runner_module = SimpleNamespace(build_logitsprocs=build_logitsprocs)
    apply(runner_module, drafts.apply_logits_processors)
    apply(SimpleNamespace(SamplingParams=SamplingParams), drafts.accept_logits_parameters)
    config = SimpleNamespace(speculative_config=speculative(method))
    assert ("min_p" in runner_module.build_logitsprocs(config, device="npu")) is not left_out
    assert config.speculative_config is not None
    try:
        SamplingParams()._validate_spec_decode(config.speculative_config)
    except ValueError:
        assert left_out
    else:
        assert not left_out


@pytest.mark.parametrize("multi", [False, True], ids=["alone", "in MultiConnector"])
def test_copies_are_made_before_a_worker_that_goes_to_sleep_unmaps_its_memory(monkeypatch: pytest.MonkeyPatch, multi: bool) -> None:
    calls: list[str] = []

    class NPUWorker:
        def sleep(self, level: int = 1) -> str:
            calls.append(f"unmap at level {level}")
            return "asleep"

    apply(SimpleNamespace(NPUWorker=NPUWorker), engine.copy_before_sleep)
    ours = SimpleNamespace(drain_copies=lambda: calls.append("copies are made"))
    group = SimpleNamespace(_connectors=[SimpleNamespace(), ours]) if multi else ours
    monkeypatch.setattr("vllm.distributed.kv_transfer.has_kv_transfer_group", lambda: True)
    monkeypatch.setattr("vllm.distributed.kv_transfer.get_kv_transfer_group", lambda: group)
    assert NPUWorker().sleep(level=2) == "asleep"
    assert calls == ["copies are made", "unmap at level 2"]


@pytest.mark.parametrize(("extracted", "offered", "answer"), [(True, 5, 0), (False, 5, 5), (True, None, None), (True, 0, 0)])
def test_no_connector_beside_ours_loads_for_a_request_that_is_extracted(extracted: bool, offered: int | None, answer: int | None) -> None:
    class MultiConnector:
        def __init__(self) -> None:
            ours, sibling = SimpleNamespace(extracts=lambda request: extracted), SimpleNamespace()
            self._connectors, self._requests_to_connector = [sibling, ours], {}

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            if offered:
                self._requests_to_connector[request.request_id] = 0
            return offered, bool(offered)

    apply(SimpleNamespace(MultiConnector=MultiConnector), engine.compute_extracted_tokens)
    multi = MultiConnector()
    assert multi.get_num_new_matched_tokens(SimpleNamespace(request_id="r"), 0) == (answer, bool(answer))
    assert multi._requests_to_connector == ({"r": 0} if answer else {})


@pytest.mark.parametrize("in_multi_connector", [False, True])
def test_what_the_workers_report_of_a_step_is_known_before_its_requests_are_answered(in_multi_connector: bool) -> None:
    known: list[str] = []
    ours, sibling = SimpleNamespace(take_report=known.append), SimpleNamespace()
    connector = SimpleNamespace(_connectors=[sibling, ours]) if in_multi_connector else ours
    report = SimpleNamespace(metadata=("theirs", "ours")) if in_multi_connector else "ours"

    class Scheduler:
        def __init__(self) -> None:
            self.connector = connector

        def update_from_output(self, scheduler_output: str, model_runner_output: Any) -> tuple[str, list[str]]:
            return scheduler_output, list(known)

    apply(SimpleNamespace(Scheduler=Scheduler), engine.report_before_answers)
    scheduler = Scheduler()
    output = SimpleNamespace(kv_connector_output=SimpleNamespace(kv_connector_worker_meta=report))
    assert scheduler.update_from_output("scheduled", output) == ("scheduled", ["ours"])
    for nothing in (None, SimpleNamespace(kv_connector_worker_meta=None)):
        known.clear()
        assert scheduler.update_from_output("scheduled", SimpleNamespace(kv_connector_output=nothing)) == ("scheduled", [])


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"hidden_states_path": "/data/a"}, {"remote": 1}, {"hidden_states_path": "/data/a", "remote": 1}),
        ({"metadata": "ours", "handle": "a"}, {"metadata": "theirs"}, {"metadata": "theirs", "handle": "a"}),
        ({"hidden_states_path": "/data/a"}, None, {"hidden_states_path": "/data/a"}),
        (None, {"remote": 1}, {"remote": 1}),
        (None, None, None),
    ],
)
def test_our_answer_is_added_to_that_of_a_connector_beside_ours(ours: Any, theirs: Any, said: Any) -> None:
    class Ours:
        answer = ours

        def end_request(self, request: str) -> Any:
            taken, self.answer = self.answer, None
            return taken

        request_finished = end_request

    class Scheduler:
        def __init__(self) -> None:
            self.connector = SimpleNamespace(_connectors=[SimpleNamespace(request_finished=lambda request: theirs), Ours()])

        def _connector_finished(self, request: str) -> tuple[bool, Any]:
            answers = [answer for each in self.connector._connectors if (answer := each.request_finished(request)) is not None]
            assert len(answers) < 2, "Only one connector can produce KV transfer params"
            return True, next(iter(answers), None)

    apply(SimpleNamespace(Scheduler=Scheduler), engine.answer_beside_others)
    assert Scheduler()._connector_finished("r") == (True, said)


BEAMS_OPT_OUT = {"kv_transfer_params": {"hidden_states": False}}


def transfer(connector: str | None, **options: Any) -> Any:
    extra = {"shared_storage_path": "/data", **options}
    return None if connector is None else SimpleNamespace(kv_connector=connector, kv_role="kv_producer", kv_connector_extra_config=extra)


@pytest.mark.parametrize(("connector", "mark"), [("AscendHiddenStatesConnector", BEAMS_OPT_OUT), ("MooncakeConnector", None), (None, None)])
def test_requests_that_a_beam_search_makes_opt_out_where_our_connector_is(connector: str | None, mark: Any) -> None:
    config = SimpleNamespace(kv_transfer_config=transfer(connector))
    offline = SimpleNamespace(SamplingParams=SimpleNamespace)
    online = SimpleNamespace(SamplingParams=SimpleNamespace)

    class BeamSearchOfflineMixin:
        llm_engine = SimpleNamespace(vllm_config=config)

        def beam_search(self, prompts: list[str], params: Any) -> list[Any]:
            return [offline.SamplingParams(max_tokens=1, prompt=each) for each in prompts]

    class BeamSearchOnlineMixin:
        engine_client = SimpleNamespace(vllm_config=config)

        async def beam_search(self, prompt: str, request_id: str, params: Any, lora_request: Any = None) -> AsyncIterator[Any]:
            yield SimpleNamespace(sampling=online.SamplingParams(max_tokens=1), kv_transfer_params=None)

    offline.BeamSearchOfflineMixin, online.BeamSearchOnlineMixin = BeamSearchOfflineMixin, BeamSearchOnlineMixin
    apply(offline, request_params.add_extra_args, beam_search.search_offline)
    apply(online, request_params.add_extra_args, beam_search.search_online)

    async def search() -> list[Any]:
        return [each async for each in BeamSearchOnlineMixin().beam_search("prompt", "id", SimpleNamespace(), lora_request=None)]

    (beam,) = BeamSearchOfflineMixin().beam_search(["prompt"], params=None)
    assert getattr(beam, "extra_args", None) == mark
    assert getattr(offline.SamplingParams(max_tokens=1), "extra_args", None) is None  # of another's making
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
def test_a_beam_search_says_that_it_has_no_rows_if_some_were_wanted(name: str, extract: str, params: Any, told: bool) -> None:
    class Request:
        kv_transfer_params = params

        def to_beam_search_params(self, max_tokens: int, default_sampling_params: dict[str, Any]) -> Any:
            return SimpleNamespace(max_tokens=max_tokens)

    class BeamSearchOnlineMixin:
        vllm_config = SimpleNamespace(kv_transfer_config=transfer("AscendHiddenStatesConnector", extract=extract))
        engine_client = SimpleNamespace(vllm_config=vllm_config)

        async def beam_search(self, prompt: str, request_id: str, params: Any) -> AsyncIterator[Any]:
            assert params.max_tokens == 7
            yield SimpleNamespace(kv_transfer_params=None)

    apply(SimpleNamespace(**{name: Request}), beam_search.keep_client_params)
    apply(SimpleNamespace(BeamSearchOnlineMixin=BeamSearchOnlineMixin), beam_search.search_online)

    async def search() -> list[Any]:
        search_params = Request().to_beam_search_params(7, {})
        return [each.kv_transfer_params async for each in BeamSearchOnlineMixin().beam_search("prompt", "id", search_params)]

    (answer,) = asyncio.run(search())
    assert answer == ({"hidden_states_error": NOT_EXTRACTED} if told else None)


@pytest.mark.parametrize(("method", "drafts_taken"), [("extract_hidden_states", ([], [])), ("ngram", None)])
def test_a_runner_that_extracts_answers_that_there_are_no_drafts(method: str, drafts_taken: Any) -> None:
    """vllm/v1/engine/core.py:583 stops the engine otherwise, when a request with structured outputs comes."""

    class NPUModelRunner:
        speculative_config = SimpleNamespace(method=method)

        def take_draft_token_ids(self) -> Any:
            return None

    apply(SimpleNamespace(NPUModelRunner=NPUModelRunner), drafts.take_no_drafts)
    taken = NPUModelRunner().take_draft_token_ids()
    assert (taken and (taken.req_ids, taken.draft_token_ids)) == drafts_taken
