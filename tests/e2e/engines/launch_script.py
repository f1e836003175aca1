"""Replaces scripts/launch_vllm.py. It is in speculators' repository, but in no package.

As there, all registered backends add options to one parser, and the layers are 2, L/2, L-3 and the
last.
"""

import argparse
import json
import os
import sys

from hs_connectors import HiddenStatesBackend
from transformers import AutoConfig

BACKENDS = dict(HiddenStatesBackend.registry)


def main() -> None:
    end = sys.argv.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--hidden-states-backend", choices=list(BACKENDS), default="file")
    for backend in BACKENDS.values():
        backend.add_launch_args(parser)
    args = parser.parse_args(sys.argv[1:end])
    layers = AutoConfig.from_pretrained(args.model).num_hidden_layers
    ids = [2, layers // 2, layers - 3, layers]
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    transfer = BACKENDS[args.hidden_states_backend].build_kv_transfer_config(args)
    json_options = [
        "--speculative_config",
        json.dumps(speculative),
        "--kv_transfer_config",
        json.dumps(transfer),
    ]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        args.model,
        *json_options,
        *sys.argv[end + 1 :],
    ]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
