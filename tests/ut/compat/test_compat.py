"""Patches affect only our method or connector, and refuse a version without the patch point."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_ascend.ops  # noqa: F401 - before spec_decode: vllm-ascend's modules import each other in circles
from patching import apply

from vllm_ascend_hsx import plugin
from vllm_ascend_hsx.compat import drafts, engine, weights
from vllm_ascend_hsx.compat.patch_points import POINTS, PatchPoint
from vllm_ascend_hsx.compat.versions import IncompatibleVersionError
from vllm_ascend_hsx.config import CONNECTOR_NAME
from vllm_ascend_hsx.protocol.errors import UserError


def test_wheel_with_another_proposer_base_class_is_refused() -> None:
    module = SimpleNamespace(AscendExtractHiddenStatesProposer=dict)
    apply(module, plugin.make_proposer)
    with pytest.raises(
        IncompatibleVersionError, match="is not the base class.*\nChecked versions: vllm"
    ):
        module.AscendExtractHiddenStatesProposer()


@pytest.mark.parametrize(
    "point", [each for each in POINTS if each.replacement], ids=lambda point: point.name
)
def test_module_without_the_patch_point_is_left_unchanged_with_a_warning(
    point: PatchPoint, caplog: pytest.LogCaptureFixture
) -> None:
    module = SimpleNamespace()
    point.apply(module)
    assert vars(module) == {}
    assert f"{point.name} is missing; extraction needs it so that: {point.why}" in caplog.text


@pytest.mark.parametrize(
    ("connector", "disabled"),
    [
        ("AscendHiddenStatesConnector", False),
        ("MultiConnector", True),
        ("MooncakeConnector", True),
        (None, False),
    ],
)
def test_preemption_stays_enabled_only_for_our_connector(
    connector: str | None, disabled: bool
) -> None:
    def upstream(vllm_config: Any) -> bool:
        return vllm_config.kv_transfer_config is not None

    module = SimpleNamespace(_disable_preemption_on_prefill_node=upstream)
    apply(module, engine.keep_preemption)
    transfer = None if connector is None else SimpleNamespace(kv_connector=connector)
    assert (
        module._disable_preemption_on_prefill_node(SimpleNamespace(kv_transfer_config=transfer))
        is disabled
    )


@pytest.mark.parametrize(
    ("connector", "quantised"),
    [
        ("AscendHiddenStatesConnector", True),
        ("MultiConnector", False),
        ("MooncakeConnector", False),
        (None, True),
    ],
)
def test_int8_cache_is_kept_only_with_our_connector(connector: str | None, quantised: bool) -> None:
    """Upstream decides on both: the dtype of the cache, and a layer's computation."""

    class Method:
        def __init__(self) -> None:
            self.is_kv_producer = connector is not None

        def create_weights(self, layer: Any) -> None:
            layer.is_int8 = not self.is_kv_producer

    module = SimpleNamespace(AscendC8KVCacheAttentionMethod=Method)
    apply(module, engine.keep_int8_cache)
    transfer = None if connector is None else SimpleNamespace(kv_connector=connector)
    config = SimpleNamespace(kv_transfer_config=transfer, cache_config=object())
    layer = SimpleNamespace(impl=SimpleNamespace(vllm_config=config))
    module.AscendC8KVCacheAttentionMethod().create_weights(layer)
    assert layer.is_int8 is quantised
    assert (layer.impl.vllm_config.kv_transfer_config is None) is quantised
    assert layer.impl.vllm_config.cache_config is config.cache_config
    assert config.kv_transfer_config is transfer  # unchanged


def speculative(method: str = "extract_hidden_states", number: int = 1) -> Any:
    draft = SimpleNamespace(hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=[1, 2]))
    return SimpleNamespace(method=method, num_speculative_tokens=number, draft_model_config=draft)


def config_module() -> Any:
    """Return a VllmConfig that checks the parts and derives a size from them, like vLLM's."""

    class VllmConfig:
        def __init__(
            self,
            speculative_config: Any = None,
            connector: str | None = CONNECTOR_NAME,
            offload: bool = False,
        ) -> None:
            extra = {"shared_storage_path": "/data"}
            self.kv_transfer_config = SimpleNamespace(
                kv_connector=connector, kv_role="kv_producer", kv_connector_extra_config=extra
            )
            self.offload, self.model_config = (
                offload,
                SimpleNamespace(architecture="Qwen3ForCausalLM", hf_config=SimpleNamespace()),
            )
            self.additional_config, self.parallel_config = {}, SimpleNamespace(data_parallel_size=1)
            if speculative_config is not None and speculative_config.num_speculative_tokens <= 0:
                raise ValueError("greater than zero")
            self.speculative_config = speculative_config
            self.__post_init__()

        def __post_init__(self) -> None:
            if self.offload:
                self.kv_transfer_config.kv_connector = "OffloadingConnector"
            self.decode_query_len = 1 + (
                self.speculative_config.num_speculative_tokens if self.speculative_config else 0
            )

    module = SimpleNamespace(VllmConfig=VllmConfig)
    apply(module, drafts.check_config_with_one_draft, drafts.schedule_no_drafts)
    return module


def test_sizes_derived_from_the_configuration_are_as_without_extraction() -> None:
    config = config_module().VllmConfig
    plain, extracting, other = (
        config(),
        config(speculative_config=speculative()),
        config(speculative_config=speculative("eagle3")),
    )
    assert plain.decode_query_len == extracting.decode_query_len == 1
    assert extracting.speculative_config.num_speculative_tokens == 0
    assert other.decode_query_len == 2


def test_a_copy_of_a_configuration_passes_vllms_check_again() -> None:
    config = config_module().VllmConfig
    first = config(speculative_config=speculative())
    assert config(speculative_config=first.speculative_config).decode_query_len == 1
    assert first.speculative_config.num_speculative_tokens == 0


def test_sizes_can_be_derived_again_for_data_parallel_engines() -> None:
    config = config_module().VllmConfig(speculative_config=speculative())
    config.__post_init__()
    assert config.decode_query_len == 1


def test_more_than_one_draft_token_is_refused() -> None:
    with pytest.raises(UserError, match=r"num_speculative_tokens=3 has no effect.*Set it to 1"):
        config_module().VllmConfig(speculative_config=speculative(number=3))


@pytest.mark.parametrize(
    "options",
    [{"connector": "ExampleHiddenStatesConnector"}, {"connector": None}, {"offload": True}],
)
def test_configuration_with_another_connector_is_refused_at_creation(
    options: dict[str, Any],
) -> None:
    config = config_module().VllmConfig
    assert config(**options).decode_query_len == 1
    with pytest.raises(
        UserError,
        match=r"kv_connector=.* does not take.*AscendHiddenStatesConnector.* VLLM_PLUGINS=",
    ):
        config(speculative_config=speculative(), **options)


def test_configuration_created_without_our_plugin_is_refused() -> None:
    drafts.require_no_drafts(SimpleNamespace(speculative_config=speculative(number=0)))
    with pytest.raises(
        UserError, match="num_speculative_tokens=1 would schedule draft.*VLLM_PLUGINS"
    ):
        drafts.require_no_drafts(SimpleNamespace(speculative_config=speculative()))


@pytest.mark.parametrize(
    ("method", "inside", "after"), [("extract_hidden_states", 1, 0), ("eagle3", 2, 2)]
)
def test_drafter_is_set_up_for_one_token_and_the_number_is_restored(
    method: str, inside: int, after: int
) -> None:
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
    assert (runner.decode_token_per_req, config.speculative_config.num_speculative_tokens) == (
        1 + after,
        after,
    )


@pytest.mark.parametrize(
    ("method", "counts"), [("extract_hidden_states", False), ("eagle3", True), (None, False)]
)
def test_accepted_drafts_of_a_hybrid_target_are_counted_only_with_drafts(
    method: str | None, counts: bool
) -> None:
    class GPUModelRunner:
        """Like vLLM's: buffers for accepted drafts exist if there is a speculative method."""

        def _get_mamba_bufs(self) -> bool:
            return self.speculative_config is not None

    class NPUModelRunner(GPUModelRunner):
        def __init__(self) -> None:
            self.speculative_config = None if method is None else speculative(method)

        def _update_states_after_model_execute(
            self, output_token_ids: list[int], scheduler_output: str
        ) -> list[int] | None:
            return None if self.speculative_config is None else output_token_ids

    apply(SimpleNamespace(NPUModelRunner=NPUModelRunner), drafts.without_speculative_method)
    runner = NPUModelRunner()
    assert runner._get_mamba_bufs() is counts
    assert runner._update_states_after_model_execute([7], "scheduled") == ([7] if counts else None)
    assert getattr(runner.speculative_config, "method", None) == method


@pytest.mark.parametrize(
    ("method", "left_out"), [("extract_hidden_states", False), ("eagle3", True)]
)
def test_parameters_refused_with_drafts_are_accepted_without_drafts(
    method: str, left_out: bool
) -> None:
    class SamplingParams:
        def _validate_spec_decode(self, speculative_config: Any) -> None:
            if speculative_config is not None:
                raise ValueError("min_p and logit_bias")

    def build_logitsprocs(vllm_config: Any, device: str) -> list[str]:
        return (
            ["min_tokens"]
            if vllm_config.speculative_config
            else ["min_tokens", "min_p", "logit_bias"]
        )

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
def test_memory_is_copied_before_a_sleeping_worker_unmaps_it(
    monkeypatch: pytest.MonkeyPatch, multi: bool
) -> None:
    calls: list[str] = []

    class NPUWorker:
        def sleep(self, level: int = 1) -> str:
            calls.append(f"unmap at level {level}")
            return "asleep"

    apply(SimpleNamespace(NPUWorker=NPUWorker), engine.copy_before_sleep)
    ours = SimpleNamespace(before_sleep=lambda: calls.append("copies are made"))
    group = SimpleNamespace(_connectors=[SimpleNamespace(), ours]) if multi else ours
    monkeypatch.setattr("vllm.distributed.kv_transfer.has_kv_transfer_group", lambda: True)
    monkeypatch.setattr("vllm.distributed.kv_transfer.get_kv_transfer_group", lambda: group)
    assert NPUWorker().sleep(level=2) == "asleep"
    assert calls == ["copies are made", "unmap at level 2"]


@pytest.mark.parametrize("multi", [False, True], ids=["alone", "in MultiConnector"])
@pytest.mark.parametrize(
    ("method", "forgets"),
    [
        ("reload_weights", True),
        ("update_weights", True),
        (len, True),
        ("get_model_inspection", False),
        ("update_max_model_len", False),
    ],
    ids=str,
)
def test_rows_are_dropped_before_workers_are_called(
    method: Any, forgets: bool, multi: bool
) -> None:
    calls: list[str] = []
    ours = SimpleNamespace(weights_may_change=lambda: calls.append("forgotten"))

    class EngineCore:
        scheduler = SimpleNamespace(
            connector=SimpleNamespace(_connectors=[SimpleNamespace(), ours]) if multi else ours
        )

        def collective_rpc(
            self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append("called")
            return [method, args]

    apply(SimpleNamespace(EngineCore=EngineCore), weights.follow_weights)
    assert EngineCore().collective_rpc(method, None, (1,)) == [method, (1,)]
    assert calls == ["forgotten"] * forgets + ["called"]


@pytest.mark.parametrize("multi", [False, True], ids=["alone", "in MultiConnector"])
@pytest.mark.parametrize(
    ("args", "kwargs", "known"),
    [
        ((), {"weights_path": "here"}, True),
        ((None, "here"), None, True),
        ((), {"weights_path": "elsewhere"}, False),
        ((), {}, False),
        (("tensors", "here"), {}, False),
    ],
    ids=["by name", "by position", "not here", "nowhere", "tensors"],
)
def test_connector_learns_the_loaded_checkpoint_if_known(
    args: tuple[Any, ...],
    kwargs: Any,
    known: bool,
    multi: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    calls: list[str] = []
    ours = SimpleNamespace(
        weights_may_change=lambda: calls.append("changed"), weights_are_of=calls.append
    )

    class EngineCore:
        scheduler = SimpleNamespace(
            connector=SimpleNamespace(_connectors=[SimpleNamespace(), ours]) if multi else ours
        )

        def collective_rpc(
            self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
        ) -> None:
            calls.append("loaded")

    apply(SimpleNamespace(EngineCore=EngineCore), weights.follow_weights)
    EngineCore().collective_rpc("reload_weights", None, args, kwargs)
    assert calls == ["changed", "loaded"] + ["here"] * known


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "another connector"])
@pytest.mark.parametrize("in_engine", [False, True], ids=["call of the workers", "vLLM's own"])
def test_both_calls_that_name_weights_leave_them_unchanged(in_engine: bool, ours: bool) -> None:
    names: list[str] = []
    passed_on: list[Any] = []

    class EngineCore:
        scheduler = SimpleNamespace(
            connector=SimpleNamespace(name_weights=names.append) if ours else SimpleNamespace()
        )

        def collective_rpc(
            self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
        ) -> Any:
            passed_on.append((method, *args))
            return passed_on

        def set_weight_version(self, weight_version: str) -> None:
            passed_on.append(weight_version)

    apply(
        SimpleNamespace(EngineCore=EngineCore),
        weights.name_weights if in_engine else weights.follow_weights,
    )
    if in_engine:
        EngineCore().set_weight_version("step 1")
        assert passed_on == ["step 1"]
    else:
        assert EngineCore().collective_rpc("set_weight_version", args=("step 1",)) == (
            [] if ours else passed_on
        )
        assert passed_on == ([] if ours else [("set_weight_version", "step 1")])
    assert names == ["step 1"] * ours


@pytest.mark.parametrize("is_empty", [True, False])
def test_connector_learns_of_a_reset_and_its_success(is_empty: bool) -> None:
    calls: list[str] = []
    ours = SimpleNamespace(
        reset_prefixes=lambda: calls.append("reset"),
        prefix_cache_is_empty=lambda: calls.append("it is empty"),
    )

    class Scheduler:
        connector = ours

        def reset_prefix_cache(self) -> bool:
            return is_empty

    apply(SimpleNamespace(Scheduler=Scheduler), engine.reset_rows_with_cache)
    assert Scheduler().reset_prefix_cache() == is_empty
    assert calls == ["reset"] + ["it is empty"] * is_empty


@pytest.mark.parametrize(
    ("method", "drafts_taken"), [("extract_hidden_states", ([], [])), ("ngram", None)]
)
def test_extracting_runner_returns_no_drafts(method: str, drafts_taken: Any) -> None:
    """Otherwise a request with structured outputs stops the engine (vllm/v1/engine/core.py:583)."""

    class NPUModelRunner:
        speculative_config = SimpleNamespace(method=method)

        def take_draft_token_ids(self) -> Any:
            return None

    apply(SimpleNamespace(NPUModelRunner=NPUModelRunner), drafts.take_no_drafts)
    taken = NPUModelRunner().take_draft_token_ids()
    assert (taken and (taken.req_ids, taken.draft_token_ids)) == drafts_taken
