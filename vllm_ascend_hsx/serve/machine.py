"""Check port and storage of this machine before `hsx serve` starts `vllm serve`."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from pathlib import Path

from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.sinks.directory import OPTION, check_directory

DEFAULT_PORT = "8000"  # entrypoints/openai/cli_args.py:230, vLLM 0.23.0
_FREE_ONE = "Stop the program that listens there, or give another port."
_OTHER_ENGINES = "--data-parallel-size-local"  # 0: all engines run on other machines


def check_machine(config: HsxConfig, given: Mapping[str, str]) -> None:
    """Check port and storage directory of the server.

    Args:
        config: options of the connector.
        given: options of vllm serve, with values.

    Raises:
        UserError: the port is in use, or the storage directory cannot be used.
    """
    # With --config, the file may set the port.
    if not {"--headless", "--uds", "--config"} & given.keys():
        require_free_port(given.get("--host", ""), given.get("--port", DEFAULT_PORT))
    if (
        config.shared_storage_path is not None
        and config.sink != "mooncake"
        and given.get(_OTHER_ENGINES) != "0"
    ):
        try:
            direct = config.io == "direct" and config.sink == "file"
            check_directory(
                Path(config.shared_storage_path),
                use_lock=config.use_synchronization_lock,
                direct=direct,
            )
        except UserError as error:
            option = "--out" if error.option == OPTION else f"--option {error.option}"
            raise UserError(option, error.value, error.problem, error.remedy) from None


def require_free_port(host: str, port: str) -> None:
    """Require that no program listens on a TCP port.

    vLLM does not check this. It sets SO_REUSEPORT (entrypoints/openai/api_server.py:491, 0.23.0),
    so two servers on one port would each get half of the requests.

    Args:
        host: as for vllm serve; empty for all interfaces.
        port: as for vllm serve. An invalid port is left for vLLM to refuse.

    Raises:
        UserError: a program listens there, or the address cannot be used.
    """
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        return
    address = (host, int(port))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except socket.gaierror as error:
            raise UserError(
                "--host",
                host,
                f"is not an address: {error.strerror}",
                "Give an address of this machine.",
            ) from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(
                    "--port", int(port), "is in use on this machine", _FREE_ONE
                ) from None
            if error.errno == errno.EADDRNOTAVAIL:
                raise UserError(
                    "--host",
                    host,
                    "is not an address of this machine",
                    "Give an address of this machine.",
                ) from None
            raise UserError(
                "--port", int(port), f"cannot be used: {error.strerror}", "Give another port."
            ) from None
