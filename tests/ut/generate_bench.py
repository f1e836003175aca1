"""A dataset, a fake server and an output directory, for tests of the command `hsx generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from generate_files import contents, ledger_lines, right, token_rows, write_jsonl
from generate_harness import FakeServer

from vllm_ascend_hsx.cli import generate
from vllm_ascend_hsx.generate.ledger import row_of_file


class Bench:
    """A dataset, a server, and an output directory equal to the server's storage directory."""

    def __init__(self, root: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.server = server
        self.output = server.storage
        self._capsys = capsys

    def run(
        self,
        *arguments: object,
        records: list[dict[str, Any]] | int = 6,
        endpoint: str | None = None,
    ) -> tuple[int, str]:
        """Run the command, and return exit code and output.

        A server gets one request at a time until the first success. Rows in flight together may
        arrive in any order: with two at a time, the first row is 0 or 1.
        """
        data = write_jsonl(
            self.root / "data.jsonl", token_rows(records) if isinstance(records, int) else records
        )
        command = [
            "--data",
            data,
            "--output",
            self.output,
            "--endpoint",
            endpoint or self.server.url,
            "--retry-delay",
            0.001,
        ]
        command += ["--concurrency", 2, *arguments]
        self._capsys.readouterr()
        code = generate.main([str(each) for each in command])
        self.server.wait_idle()
        printed = self._capsys.readouterr()
        return code, " ".join((printed.out + printed.err).split())

    @property
    def rows(self) -> list[int]:
        """Return the rows with a file."""
        return sorted(row for row in map(row_of_file, contents(self.output)) if row is not None)

    def check(self, rows: list[int], records: int = 6) -> None:
        """Check that the directory has the right files of these rows and the ledger only."""
        wanted = {
            f"hs_{row}.safetensors": right(token_rows(records)[row]["token_ids"]) for row in rows
        }
        assert contents(self.output) == {**wanted, "ledger.jsonl": {}}

    def lines(self) -> dict[int, dict[str, Any]]:
        """Return the last line of each row."""
        return {line["row"]: line for line in ledger_lines(self.output / "ledger.jsonl")}
