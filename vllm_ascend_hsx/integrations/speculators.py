"""The backend `hsx` of speculators: extract with this connector, read files with this reader.

Importing this module registers the backend. It needs hs-connectors. Training also needs
speculators. Both are tested with 0.9.0.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer

from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.protocol.arguments import deadline_after
from vllm_ascend_hsx.reader.load import load, remove
from vllm_ascend_hsx.serve.options import kv_transfer_config

NAME = "hsx"
TIMEOUT_S = 60.0


class HsxTransfer(HiddenStatesTransfer):
    """Read samples like FileTransfer (hs_connectors/transfer.py:136), with a timeout.

    Waiting for a file does not poll.

    Args:
        directory: directory of samples generated in advance, `hs_<index>.safetensors`.
        timeout: most seconds to wait for a file that is being written; infinity for no limit.

    Raises:
        ValueError: if `timeout` is not a number of seconds.
    """

    def __init__(self, directory: str | os.PathLike[str], timeout: float = TIMEOUT_S) -> None:
        deadline_after(timeout)  # raises now, not at the first sample
        self.directory = Path(directory)
        self.timeout = timeout

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """Return a sample generated in advance, or None.

        Raises like `vllm_ascend_hsx.load`.
        """
        try:
            return self._load(self.directory / f"hs_{file_idx}.safetensors")
        except FileNotFoundError:
            return None

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the sample of a request with these kv_transfer_params.

        Raises like `vllm_ascend_hsx.load`.
        """
        return self._load(Path(hs_transfer_params["hidden_states_path"]))

    def delete(self, handle: str | os.PathLike[str]) -> None:
        """Remove a generated sample, and its lock and error file."""
        remove(handle)

    def _load(self, path: Path) -> dict[str, torch.Tensor]:
        states = load(path, self.timeout)
        return {"hidden_states": states.hidden_states, "token_ids": states.token_ids}


@HiddenStatesBackend.register(NAME)
class HsxBackend(HiddenStatesBackend):
    """The backend's interface to launch_vllm.py and `speculators train`."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        # Only types and defaults have an effect (train/config/resolution.py:252 in speculators).
        _add(
            parser,
            "--hidden-states-path",
            type=str,
            default=None,
            help=(
                "Directory of the hidden states generated beforehand. (Default: args.data_path / "
                "'hidden_states')"
            ),
        )
        _add(
            parser,
            "--hsx-timeout",
            type=float,
            default=TIMEOUT_S,
            help=(
                "Seconds to wait for a file that the server is still writing. Used with "
                f"backend=hsx. (Default: {TIMEOUT_S:.0f})"
            ),
        )

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        _add(
            parser,
            "--hidden-states-path",
            type=str,
            default="/tmp/hidden_states",
            help="The directory to save hidden states to. Default '/tmp/hidden_states'",
        )
        _add(
            parser,
            "--hsx-options",
            type=_options,
            default={},
            metavar="JSON",
            help=(
                'Other options of the connector, e.g. \'{"io": "direct"}\'. Used with backend=hsx.'
            ),
        )

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> HsxTransfer:
        directory = (
            Path(args.hidden_states_path)
            if args.hidden_states_path
            else Path(data_path) / "hidden_states"
        )
        return HsxTransfer(directory, args.hsx_timeout)

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Return the value of --kv-transfer-config."""
        storage = (
            None
            if args.hsx_options.get("sink") == "mooncake"
            else Path(args.hidden_states_path).absolute()
        )
        return kv_transfer_config(storage, **args.hsx_options)


def _add(parser: argparse.ArgumentParser, option: str, **kwargs: Any) -> None:
    """Add an option, unless another backend has added it. In launch_vllm.py they share a parser."""
    if option not in parser._option_string_actions:
        parser.add_argument(option, **kwargs)


def _options(text: str) -> dict[str, Any]:
    """Parse options of the connector. Check them like the server."""
    try:
        options = json.loads(text)
        if not isinstance(options, dict):
            raise ValueError(f"{text} is not an object")
        if "shared_storage_path" in options:
            raise ValueError("shared_storage_path is set by --hidden-states-path")
        HsxConfig.parse({"shared_storage_path": "/", **options})
    except ValueError as error:  # UserError is one
        raise argparse.ArgumentTypeError(str(error)) from None
    return options
