"""Balance scheduling of vllm-ascend, inside MultiConnector: rows are right."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import compare_file, tokens
from launch import FLASHCOMM, START_SECONDS, ForkedServer, tiny_server
from test_data_parallel import complete

LAYER_IDS = (4, 1, 3)
# More than the servers accept at once: a full rank accepts no more.
PROMPTS = [tokens(5 + 7 * seed, seed=seed) for seed in range(24)]


def balanced(directory: Path, model: Path, soc: str) -> ForkedServer:
    """Return a server of DP=2 x TP=2 that balances, with our connector in MultiConnector."""
    extra: tuple[str, ...] = ("--additional-config", '{"enable_balance_scheduling": true}')
    options: dict[str, Any] = {
        "data_parallel": 2,
        "tensor_parallel": 2,
        "environ": FLASHCOMM,
        "max_num_seqs": 4,
    }
    server = tiny_server(directory, model, LAYER_IDS, extra=extra, soc=soc, **options)
    at = server.command.index("--kv-transfer-config") + 1
    connectors = {"connectors": [json.loads(server.command[at])]}
    server.command[at] = json.dumps(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": connectors,
        }
    )
    return server


@pytest.mark.long
@pytest.mark.parametrize("soc", ["a2", "a3"])
def test_rows_are_right_with_balance_scheduling_in_a_kv_both_multi_connector(
    tiny_minimax_m2: Path, tmp_path: Path, soc: str
) -> None:
    with balanced(tmp_path, tiny_minimax_m2, soc) as server:
        server.wait_ready(START_SECONDS)
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(
                pool.map(
                    lambda prompt: complete(
                        server, tiny_minimax_m2, prompt, max_tokens=6, ignore_eos=True
                    ),
                    PROMPTS,
                )
            )
        server.stop()
    assert (
        "enable_balance_scheduling" in server.log.read_text()
    )  # vllm-ascend logs that it accepted the option
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        comparison = compare_file(
            Path(answer["kv_transfer_params"]["hidden_states_path"]),
            tiny_minimax_m2,
            prompt,
            LAYER_IDS,
        )
        assert comparison.matches, comparison
