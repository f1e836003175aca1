"""Unservable configurations are refused before weights are loaded: option, value and remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_packages import Change, copy_installed
from harness import run_engine
from launch import START_SECONDS, UPSTREAM_PLUGINS, run_module, tiny_server
from session import upstream_transfer_config
from transformers import (
    NemotronHConfig,
    NemotronHForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from vllm_ascend_hsx.demo.tiny_models import VOCAB_SIZE, build_model, common_config
from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt-option": (
        {"connector_options": {"num_writer_thread": 2}},
        (
            "kv_connector_extra_config.num_writer_thread=2 is not an option. Did you mean "
            "'num_writer_threads'?"
        ),
    ),
}


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose class does not collect hidden states, and whose decoder is not canonical."""

    def create(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
        sizes = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 64,
            "num_attention_heads": 2,
        }
        config = OPTConfig(
            num_hidden_layers=layers, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes
        )
        return OPTForCausalLM(config), {}

    return build_model(
        tmp_path_factory.mktemp("models") / "opt", "opt", create, dtype="bfloat16", layers=4, seed=0
    )


def test_target_without_collector_is_refused_before_loading(opt: Path, tmp_path: Path) -> None:
    run = run_engine(tmp_path, opt, [])
    assert run.error is not None
    found = run.error + run.log
    assert "model='OPTForCausalLM' collects no hidden states" in found
    assert "OPTModel does not create its layers with make_layers" in found
    assert "MiniMaxM2ForCausalLM" in found and "Qwen3NextForCausalLM" in found
    assert "Starting to load model" not in run.log


@pytest.mark.parametrize(("options", "reason"), REFUSED.values(), ids=REFUSED)
def test_unservable_configuration_is_refused(
    tiny_qwen3: Path, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    run = run_engine(tmp_path, tiny_qwen3, [], **options)
    assert run.error is not None
    assert reason in run.error + run.log
    assert "Starting to load model" not in run.log


@pytest.fixture(scope="module")
def nemotron_h(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose class collects hidden states, but that vllm-ascend 0.23.0 cannot serve."""

    def create(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
        mamba = {
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 64,
            "n_groups": 2,
            "chunk_size": 64,
        }
        sizes = {**common_config(layers), "head_dim": 32, "intermediate_size": 64}
        return NemotronHForCausalLM(
            NemotronHConfig(**sizes, **mamba, hybrid_override_pattern="M*M*")
        ), {}

    return build_model(
        tmp_path_factory.mktemp("models") / "nemotron_h",
        "nemotron_h",
        create,
        dtype="bfloat16",
        layers=4,
        seed=0,
    )


# The process that creates a configuration refuses it, so the log ends with the reason.

BALANCE = {"additional_config": {"enable_balance_scheduling": True}}
# Two ranks share a KV head, as vLLM requires.
SHARED_CACHE = {
    "tensor_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "hf_overrides": {"num_key_value_heads": 1},
}
BOTH_WAYS = (
    '"kv_connector": "AscendHiddenStatesConnector", "kv_role": "kv_producer"',
    "VLLM_PLUGINS=ascend,",
)


def refusals(
    model: Path, cases: dict[str, dict[str, Any]], *, ours: bool = True
) -> dict[str, str | None]:
    """Return vLLM's error, or None, for the configuration of each extracting case."""
    common = {"model": str(model), "speculative_config": speculative_config((1, 2))}
    arguments = json.dumps({name: {**common, **case} for name, case in cases.items()})
    code, printed = run_module("engine_configs", arguments, ours=ours)
    assert code == 0, printed
    (line,) = (each for each in printed.splitlines() if each.startswith("refusals:"))
    found: dict[str, str | None] = json.loads(line.removeprefix("refusals:"))
    return found


@pytest.fixture(scope="module")
def of_connectors(
    tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str | None]:
    """vLLM's error for each connector with the speculative method."""
    storage = tmp_path_factory.mktemp("storage")
    ours, vllms = kv_transfer_config(storage), upstream_transfer_config(storage)
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
    }

    def together(*children: Any) -> dict[str, Any]:
        connectors = {"connectors": list(children)}
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": connectors,
        }

    cases = {
        "ours": {"kv_transfer_config": ours},
        "ours beside another": {"kv_transfer_config": together(ours, offloading)},
        "vllms": {"kv_transfer_config": vllms, "enable_chunked_prefill": False},
        "vllms with chunked prefill": {"kv_transfer_config": vllms},
        "vllms beside ours": {"kv_transfer_config": together(ours, vllms)},
        "another": {"kv_transfer_config": offloading},
        "others": {"kv_transfer_config": together(offloading, vllms)},
        "none": {},
        "replaced by an option of vLLM": {"kv_transfer_config": ours, "kv_offloading_size": 1},
        "misspelt option": {"kv_transfer_config": kv_transfer_config(storage, num_writer_thread=2)},
        "another role": {"kv_transfer_config": {**ours, "kv_role": "kv_both"}},
        "decode context parallelism": {"kv_transfer_config": ours, **SHARED_CACHE},
        "balance scheduling": {"kv_transfer_config": ours, **BALANCE},
        "balance scheduling of both roles": {"kv_transfer_config": together(ours), **BALANCE},
    }
    return refusals(tiny_qwen3, cases)


@pytest.mark.parametrize(
    "case", ["ours", "ours beside another", "balance scheduling of both roles"]
)
def test_our_connector_is_accepted(of_connectors: dict[str, str | None], case: str) -> None:
    assert of_connectors[case] is None


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("vllms", "ExampleHiddenStatesConnector"),
        ("vllms with chunked prefill", "ExampleHiddenStatesConnector"),
        ("another", "OffloadingConnector"),
        ("others", "MultiConnector"),
        ("none", None),
        ("replaced by an option of vLLM", "OffloadingConnector"),
    ],
)
def test_another_connector_with_our_method_is_refused_with_both_remedies(
    of_connectors: dict[str, str | None], case: str, named: str | None
) -> None:
    found = of_connectors[case]
    assert found is not None
    assert (
        f"kv_connector={named!r} does not take the hidden states that the speculative method "
        "extracts"
    ) in found
    assert all(each in found for each in BOTH_WAYS), found
    assert "ascend_hsx" not in found.partition("VLLM_PLUGINS=")[2].split()[0]


def test_vllms_own_connector_beside_ours_is_refused(of_connectors: dict[str, str | None]) -> None:
    found = of_connectors["vllms beside ours"]
    assert found is not None and "ExampleHiddenStatesConnector" in found and "Leave it out" in found


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("misspelt option", "num_writer_thread=2"),
        ("another role", "kv_role='kv_both'"),
        (
            "decode context parallelism",
            "decode_context_parallel_size=2 has not been shown to keep the order of the rows",
        ),
        (
            "balance scheduling",
            (
                "additional_config.enable_balance_scheduling=True needs "
                "kv_role='kv_both' in vllm-ascend"
            ),
        ),
    ],
)
def test_unusable_options_are_refused_when_the_configuration_is_created(
    of_connectors: dict[str, str | None], case: str, named: str
) -> None:
    assert named in (of_connectors[case] or "")


@pytest.mark.long
def test_vllms_own_connector_is_accepted_without_our_plugin(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    """The second remedy, with the message's value of VLLM_PLUGINS."""
    vllms = {
        "vllms": {
            "kv_transfer_config": upstream_transfer_config(tmp_path),
            "enable_chunked_prefill": False,
        }
    }
    refused = refusals(tiny_qwen3, vllms)["vllms"]
    assert refused is not None
    named = refused.partition("VLLM_PLUGINS=")[2].split()[0]
    assert set(named.split(",")) == set(UPSTREAM_PLUGINS.split(","))
    assert refusals(tiny_qwen3, vllms, ours=False) == {"vllms": None}


def test_unservable_target_is_refused_before_the_engine_starts(
    nemotron_h: Path, tmp_path: Path
) -> None:
    """Otherwise the server becomes healthy, and the first request ends the engine."""
    found = refusals(
        nemotron_h, {"nemotron_h": {"kv_transfer_config": kv_transfer_config(tmp_path)}}
    )["nemotron_h"]
    assert (
        found is not None
        and "model='NemotronHForCausalLM' cannot be served: its Mamba-2 layers" in found
    )


def test_vllm_serve_ends_with_the_reason(tiny_qwen3: Path, tmp_path: Path) -> None:
    options = {
        "--speculative-config": speculative_config((1, 2)),
        "--kv-transfer-config": upstream_transfer_config(tmp_path),
    }
    words = [word for name, value in options.items() for word in (name, json.dumps(value))]
    words += ["--no-enable-chunked-prefill"]
    code, printed = run_module("vllm.entrypoints.cli.main", "serve", str(tiny_qwen3), *words)
    assert code != 0
    last = printed[printed.rindex("Traceback") :]
    assert "does not take the hidden states" in last and all(each in last for each in BOTH_WAYS), (
        last
    )


# A renamed method, a method with other parameters, and a function with other code.
CHANGES = (
    Change(
        "vllm_ascend/worker/worker.py",
        "def sleep(self, level",
        "def slumber(self, level",
        "NPUWorker.sleep: it is missing",
    ),
    Change(
        "vllm/v1/engine/utils.py",
        "def shutdown(self, timeout: float | None = None)",
        "def shutdown(self)",
        "parameters are (self)",
    ),
    Change(
        "vllm/distributed/kv_transfer/kv_transfer_state.py",
        "    return _KV_CONNECTOR_AGENT is not None\n",
        "    return bool(_KV_CONNECTOR_AGENT)\n",
        "has_kv_transfer_group: its code has changed",
    ),
)
LOST = ("NPUWorker.sleep", "CoreEngineProcManager.shutdown", "has_kv_transfer_group")


@pytest.mark.long
def test_changed_packages_are_refused_before_weights_are_loaded(
    tiny_minimax_m2: Path, tmp_path: Path
) -> None:
    copied = copy_installed(tmp_path, CHANGES)
    server = tiny_server(tmp_path, tiny_minimax_m2, (1, 2), data_parallel=2, tensor_parallel=2)
    environ = {**copied, **server.environment}
    environ["PYTHONPATH"] = os.pathsep.join(
        (copied["PYTHONPATH"], server.environment["PYTHONPATH"])
    )
    done = subprocess.run(
        server.command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    listed = done.stdout.rpartition("differs from the checked releases:\n")[2].splitlines()[
        : len(CHANGES)
    ]
    assert all(any(change.report in line for line in listed) for change in CHANGES), done.stdout
    assert all(line.partition(" so that: ")[2] for line in listed), listed
    assert "Starting to load model" not in done.stdout

    doctor = [str(Path(sys.executable).with_name("hsx")), "doctor", "--json"]
    done = subprocess.run(doctor, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    problems = [
        each for each in json.loads(done.stdout)["findings"] if each["verdict"] == "problem"
    ]
    assert sorted(each["name"].rpartition(".")[2] for each in problems) == sorted(
        name.rpartition(".")[2] for name in LOST
    )
    assert {each["topic"] for each in problems} == {"patch points"}
