"""Extract the rows of a target with our connector and with vLLM's own connector."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import OpenAI

from benchmarks.loop.rows import write_rows
from benchmarks.loop.target import LAYER_IDS, Target
from vllm_ascend_hsx.demo import DemoError
from vllm_ascend_hsx.protocol.api import PATH_KEY
from vllm_ascend_hsx.reader.load import load
from vllm_ascend_hsx.serve.options import speculative_config
from vllm_ascend_hsx.transfer_config import UPSTREAM_CONNECTOR, plugins_without_ours

CLIENTS = 32
SERVE_OPTIONS = (
    *("--host", "127.0.0.1", "--enforce-eager", "--gpu-memory-utilization", "0.3"),
    *("--max-model-len", "256", "--max-num-seqs", "16", "--max-num-batched-tokens", "512"),
)


def extraction_command(
    target: Target, storage: Path, port: int, options: Mapping[str, str]
) -> list[str]:
    """Return the `hsx serve` command for the target with DP=2 x TP=2 and connector options."""
    return [
        *(sys.executable, "-m", "vllm_ascend_hsx.cli.main", "serve", str(target.directory)),
        *("--layers", ",".join(map(str, LAYER_IDS)), "--out", str(storage)),
        *(word for key, value in options.items() for word in ("--option", f"{key}={value}")),
        *("--", *SERVE_OPTIONS, "--port", str(port), *target.options),
        *("--data-parallel-size", "2", "--tensor-parallel-size", "2", "--api-server-count", "1"),
    ]


def vllms_command(target: Target, storage: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the `vllm serve` command with vLLM's own connector on one NPU, and the environment.

    Chunked prefill is off, because vLLM refuses it with this connector.
    """
    options = {"shared_storage_path": str(storage)}
    transfer = {
        "kv_connector": UPSTREAM_CONNECTOR,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": options,
    }
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(target.directory)),
        *(*SERVE_OPTIONS, "--port", str(port), *target.options, "--no-enable-chunked-prefill"),
        *(
            "--speculative-config",
            json.dumps(speculative_config(LAYER_IDS)),
            "--kv-transfer-config",
            json.dumps(transfer),
        ),
    ]
    return command, {"VLLM_PLUGINS": plugins_without_ours()}


def rows_of_vllms_connector(
    url: str,
    directory: Path,
    dataset: Sequence[Sequence[int]],
    timeout: float,
    on_row: Callable[[int], None],
) -> None:
    """Write the rows that the server extracts from each prompt.

    Raises:
        OpenAIError: if a request failed or took longer than timeout seconds.
        DemoError: if a file does not have the tokens of the prompt.
    """
    directory.mkdir(parents=True)
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=timeout, max_retries=0)
    model = client.models.list().data[0].id

    def extract(prompt: Sequence[int]) -> Path:
        answer = client.completions.create(model=model, prompt=list(prompt), max_tokens=1)
        return Path(getattr(answer, "kv_transfer_params")[PATH_KEY])  # noqa: B009 - vLLM adds it to openai's types

    with ThreadPoolExecutor(CLIENTS) as pool:
        for index, path in enumerate(pool.map(extract, dataset)):
            states = load(path, timeout=timeout)
            if states.token_ids.tolist() != list(dataset[index]):
                raise DemoError(f"{path} does not have the tokens of prompt {index}")
            write_rows(directory, index, states.hidden_states, states.token_ids)
            on_row(index + 1)
