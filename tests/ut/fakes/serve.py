"""A fake `vllm serve` with extraction that runs transformers. --fault selects a mistake.

Results of transformers are kept in --known, because importing transformers takes most of the time.
"""

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

if "dies" in sys.argv:  # before the imports that take seconds
    print("loading weights\nRuntimeError: the weights are of another model", flush=True)
    sys.exit(3)

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from safetensors.torch import save_file

from vllm_ascend_hsx.connector.histogram import BUCKETS
from vllm_ascend_hsx.demo.reference import reference_hidden_states

parser = argparse.ArgumentParser()
parser.add_argument("model", type=Path)
parser.add_argument("storage", type=Path)
parser.add_argument("layer_ids", type=json.loads)
parser.add_argument("port", type=int)
parser.add_argument("--fault", default="none")
parser.add_argument("--known", type=Path, required=True)
arguments = parser.parse_args()
one_at_a_time = threading.Lock()
count = 0
stepped: set[str] = set()


def known(key: object, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the result for `key`, this model and these layers. Compute it only if not stored."""
    path = (
        arguments.known
        / hashlib.sha256(repr((arguments.model, arguments.layer_ids, key)).encode()).hexdigest()
    )
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        torch.save(compute(), path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
    return torch.load(path)


def token_ids_of(request: dict[str, Any]) -> list[int]:
    """Return the token ids of the prompt from the model's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if "messages" in request:
        return list(
            tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True)[
                "input_ids"
            ]
        )
    return list(tokenizer(request["prompt"]).input_ids)


def extract(prompt: list[int], generated: list[int]) -> str:
    """Write the hidden states of one request and return the path of their file."""
    global count
    token_ids = prompt + generated
    with one_at_a_time:
        count += 1
        rows = rows_of(token_ids).to(torch.bfloat16)
        if arguments.fault == "shifted" and len(token_ids) > 250:
            rows[1:] = rows[:-1].clone()
        wrong = arguments.fault == "graphs differ" and "/graphs/" in str(arguments.storage)
        if wrong or arguments.fault == "shifted decodes":
            rows[len(prompt) :] = rows[len(prompt) - 1 : -1].clone()
        if arguments.fault == "foreign tokens":
            token_ids = [*token_ids[:-1], token_ids[-1] ^ 1]
        path = arguments.storage / f"request-{count}.safetensors"
        tensors = {"hidden_states": rows.contiguous(), "token_ids": torch.tensor(token_ids)}
        metadata = {
            "layer_ids": json.dumps(arguments.layer_ids),
            "num_prompt_tokens": str(len(prompt)),
        }
        save_file(tensors, path, metadata)
    return str(path)


def rows_of(token_ids: list[int]) -> torch.Tensor:
    """Return rows in the basis of the model."""
    inputs = (arguments.model, token_ids, arguments.layer_ids)
    return known(token_ids, lambda: reference_hidden_states(*inputs))


def metrics() -> str:
    """Return metrics of two engines. The second did all the work and reports it a step later."""
    registry = CollectorRegistry()
    files = Counter("vllm:hsx_files", "", ["model_name", "engine", "outcome"], registry=registry)
    latency = Histogram(
        "vllm:hsx_publish_seconds", "", ["model_name", "engine"], buckets=BUCKETS, registry=registry
    )
    Counter("vllm:prompt_tokens", "", ["model_name", "engine"], registry=registry).labels(
        "tiny", "0"
    ).inc(7)
    for engine in ("0", "1"):
        files.labels("tiny", engine, "published")
        latency.labels("tiny", engine)
    if "1" in stepped:
        files.labels("tiny", "1", "published").inc(count - (arguments.fault == "miscounts"))
        for _ in range(count):
            latency.labels("tiny", "1").observe(0.0004)
    return generate_latest(registry).decode()


class Handler(BaseHTTPRequestHandler):
    def reply(self, body: dict[str, Any]) -> None:
        self.send("application/json", json.dumps(body).encode())

    def send(self, kind: str, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            return self.send("text/plain; version=0.0.4", metrics().encode())
        self.reply(
            {
                "object": "list",
                "data": [{"id": "fake", "object": "model", "created": 0, "owned_by": "tests"}],
            }
        )

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.path.endswith("/chat/completions")
        prompt = request.get("prompt")
        if not isinstance(prompt, list):
            with one_at_a_time:
                prompt = known(
                    [request.get("messages"), prompt], lambda: torch.tensor(token_ids_of(request))
                ).tolist()
        options = request.get("kv_transfer_params", {})
        wanted = options.get("hidden_states", True)
        generated = [8 + 7 * (index + len(prompt)) % 500 for index in range(request["max_tokens"])]
        with_rows = generated[:-1] if options.get("include_output_tokens") else []
        if not wanted:
            stepped.add(self.headers["X-data-parallel-rank"])
        params = (
            {"hidden_states_path": extract(prompt, with_rows)}
            if wanted and arguments.fault != "no params"
            else None
        )
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": generated}
        choice |= (
            {"message": {"role": "assistant", "content": "x"}}
            if chat
            else {"text": "x", "prompt_token_ids": prompt}
        )
        self.reply(
            {
                "id": "x",
                "object": "x",
                "created": 0,
                "model": "fake",
                "choices": [choice],
                "kv_transfer_params": params,
            }
            | ({"prompt_token_ids": prompt} if chat else {})
        )

    def log_message(self, *_: Any) -> None:
        """Log no requests: tests search the log for other lines."""


# A worker that ignores SIGTERM, as if it hung in a collective.
ignore = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('worker', flush=True); "
    "signal.pause()"
)
worker = subprocess.Popen([sys.executable, "-c", ignore], stdout=subprocess.PIPE)
assert worker.stdout is not None
worker.stdout.readline()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
arguments.storage.mkdir(parents=True)
# All requests come at once. With the default of 5, some systems would refuse some of them.
ThreadingHTTPServer.request_queue_size = 64
ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()
