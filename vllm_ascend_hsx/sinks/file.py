"""A sink that publishes one safetensors file per request: rows go to their final offset in a hidden file, then it is renamed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vllm_ascend_hsx.sinks.data_file import DataFile
from vllm_ascend_hsx.sinks.directory_sink import DirectorySink
from vllm_ascend_hsx.sinks.request_file import RequestFile


class FileSink(DirectorySink):
    """Publishes a file per request."""

    def publish(self, file: RequestFile, data: DataFile, tokens: int) -> None:
        data.publish()

    def move(self, file: RequestFile, successor: RequestFile) -> None:
        file.storage.move(file.name, successor.storage, file.name)
        if self.options.durability == "fdatasync":
            try:
                successor.storage.sync()
            except BaseException:
                successor.storage.unlink(file.name)  # as DataFile does
                raise

    def hide_previous(self, file: RequestFile) -> Callable[[], None] | None:
        return hide_previous_file(file)


def hide_previous_file(file: RequestFile) -> Callable[[], None] | None:
    """Take an earlier request's file of this name out of sight; see DirectorySink.hide_previous."""
    if not file.storage.has_file(file.name):
        return None
    workspace, hidden = file.session.workspace, file.session.new_name(file.name)
    file.storage.move(file.name, workspace, hidden)
    return partial(workspace.unlink, hidden)
