"""Answers like `vllm serve` with extraction on, from transformers alone; --fault makes it wrong in a chosen way."""

import argparse
import json
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from vllm_ascend_hsx.demo.reference import reference_hidden_states

parser = argparse.ArgumentParser()
parser.add_argument("model", type=Path)
parser.add_argument("storage", type=Path)
parser.add_argument("layer_ids", type=json.loads)
parser.add_argument("port", type=int)
parser.add_argument("--fault", default="none")
arguments = parser.parse_args()
tokenizer = AutoTokenizer.from_pretrained(arguments.model)
one_at_a_time = threading.Lock()
count = 0


def extract(token_ids: list[int]) -> str:
    """Writes the hidden states of one request and returns the path of their file."""
    global count
    with one_at_a_time:
        count += 1
        rows = reference_hidden_states(arguments.model, token_ids, arguments.layer_ids).to(torch.bfloat16)
        if arguments.fault == "shifted" and len(token_ids) > 250:
            rows[1:] = rows[:-1].clone()
        if arguments.fault == "foreign tokens":
            token_ids = [*token_ids[:-1], token_ids[-1] ^ 1]
        path = arguments.storage / f"request-{count}.safetensors"
        tensors = {"hidden_states": rows.contiguous(), "token_ids": torch.tensor(token_ids)}
        save_file(tensors, path, {"layer_ids": json.dumps(arguments.layer_ids)})
    return str(path)


class Handler(BaseHTTPRequestHandler):
    def reply(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply({"object": "list", "data": [{"id": "fake", "object": "model", "created": 0, "owned_by": "tests"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.path.endswith("/chat/completions")
        if chat:
            prompt = tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True)["input_ids"]
        else:
            prompt = request["prompt"]
            prompt = tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        params = None if arguments.fault == "no params" else {"hidden_states_path": extract(prompt)}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": "x"}} if chat else {"text": "x", "prompt_token_ids": prompt}
        self.reply(
            {"id": "x", "object": "x", "created": 0, "model": "fake", "choices": [choice], "kv_transfer_params": params}
            | ({"prompt_token_ids": prompt} if chat else {})
        )

    def log_message(self, *_: Any) -> None:
        """The log is for what the test looks for."""


if arguments.fault == "dies":
    print("loading weights\nRuntimeError: the weights are of another model", flush=True)
    sys.exit(3)
# A worker that has to be killed, as one that hangs in a collective.
ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('worker', flush=True); signal.pause()"
worker = subprocess.Popen([sys.executable, "-c", ignore], stdout=subprocess.PIPE)
assert worker.stdout is not None
worker.stdout.readline()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
arguments.storage.mkdir(parents=True)
ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()
