"""A sink that publishes one safetensors file per request: rows go to their final offset in a hidden file, then it is renamed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vllm_ascend_hsx.protocol.names import partial_name
from vllm_ascend_hsx.sinks.data_file import DataFile
from vllm_ascend_hsx.sinks.directory_sink import DirectorySink
from vllm_ascend_hsx.sinks.request_file import RequestFile


class FileSink(DirectorySink):
    """Publishes a file per request."""

    def publish(self, file: RequestFile, data: DataFile, tokens: int) -> None:
        data.publish()

    def move(self, file: RequestFile, successor: RequestFile) -> None:
        file.storage.move(file.name, successor.storage)
        if self.options.durability == "fdatasync":
            try:
                successor.storage.sync()
            except BaseException:
                successor.storage.unlink(file.name)  # as DataFile does
                raise

    def set_aside(self, file: RequestFile) -> Callable[[], None] | None:
        return set_file_aside(file)


def set_file_aside(file: RequestFile) -> Callable[[], None] | None:
    """Take an earlier request's file of this name out of sight; see DirectorySink.set_aside."""
    if not file.storage.has_file(file.name):
        return None
    hidden = partial_name(f"{file.name}.superseded", file.home.token)
    file.storage.rename(file.name, hidden)
    return partial(file.storage.unlink, hidden)
