"""Record calls of references and launches of Triton kernels on a capturing stream.

A recorded reference does not run. A replay (csrc/graphs/) runs it on CPU tensors over the same
bytes, as one operator of the stream. Reads on the host during a replay do not synchronize. After
the task queue of an NPU has ended, calls for this NPU do nothing (csrc/streams/tasks.h).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ascend_npu_emulator.native import core

Reference = Callable[..., Any]


def _is_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def _device_of(arguments: object) -> int:
    return next(
        (leaf.device.index for leaf in tree_leaves(arguments) if _is_device(leaf)),
        core.current_device(),
    )


def _recording_device(arguments: object) -> int | None:
    """Return the device on which the current stream records the call; None if the call runs."""
    if not core.recordings():
        return None
    device = _device_of(arguments)
    return device if core.recording(device) else None


def _dropping_device(arguments: object) -> int | None:
    """Return the device that drops the call; None if the call runs."""
    if not core.queues_ended():
        return None
    device = _device_of(arguments)
    return device if core.queue_status(device) == "exit" else None


class _Arguments:
    """The arguments of one call: as given, on the CPU over the same bytes, and as meta tensors."""

    def __init__(self, arguments: Any) -> None:
        leaves = [leaf for leaf in tree_leaves(arguments) if _is_device(leaf)]
        self.tensors: list[torch.Tensor] = list({id(leaf): leaf for leaf in leaves}.values())
        self._host = {id(tensor): core.host_alias(tensor) for tensor in self.tensors}
        # Host tensors are read at the launch, like the arguments of a kernel.
        self.on_host = tree_map(
            lambda value: self._host[id(value)] if _is_device(value) else _copied(value), arguments
        )
        self._arguments = arguments

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        return [self._host[id(tensor)] for tensor in self.tensors]

    def try_shapes(self, shape: Reference) -> tuple[Any, list[bool]]:
        """Return the results of ``shape`` for meta tensors, and whether each tensor is written.

        Arguments among the results are returned as given.
        """
        with torch.inference_mode(False), torch.no_grad():  # tensor versions then count the writes
            metas = [
                torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")
                for t in self.tensors
            ]
            before = [meta._version for meta in metas]
            twins = {id(tensor): meta for tensor, meta in zip(self.tensors, metas, strict=True)}
            args, kwargs = tree_map(
                lambda value: twins[id(value)] if _is_device(value) else value, self._arguments
            )
            results = shape(*args, **kwargs)
            written = [meta._version != count for meta, count in zip(metas, before, strict=True)]
        given = {id(meta): tensor for tensor, meta in zip(self.tensors, metas, strict=True)}
        return tree_map(lambda value: given.get(id(value), value), results), written


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def recordable(
    qualified: str, schema: str, reference: Reference, shape: Reference, composite: bool = False
) -> Reference:
    """Return the kernel of an operator.

    The kernel is recorded if the current stream records. Otherwise it runs the reference.

    Args:
        qualified: namespace::name.overload.
        schema: the operator's schema, which marks the written arguments.
        reference: the reference in plain torch.
        shape: function that returns the results for meta tensors (shapes.py).
        composite: whether the reference launches operators of the device, such as a collective.
            These are then recorded instead.

    Raises:
        NotImplementedError: at a recorded call, if the shapes of the results are unknown.
    """
    declared = torch._C.parse_schema(f"{qualified.partition('::')[0]}::{schema}")
    marks = [
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in declared.arguments
    ]
    names = [argument.name for argument in declared.arguments]

    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        dropping = _dropping_device((args, kwargs))
        if dropping is not None and not composite:
            shapes, _ = _Arguments((args, kwargs)).try_shapes(shape)
            return tree_map(lambda value: _on_device(value, dropping), shapes)
        device = _recording_device((args, kwargs))
        if device is None or composite:
            return reference(*args, **kwargs)
        arguments = _Arguments((args, kwargs))
        passed = dict(zip(names, args, strict=False)) | kwargs
        declared_writes = {
            id(leaf)
            for name, mark in zip(names, marks, strict=True)
            if mark
            for leaf in tree_leaves(passed.get(name))
            if _is_device(leaf)
        }
        try:
            results, found = arguments.try_shapes(shape)
        except RuntimeError as error:
            raise NotImplementedError(
                f"{qualified} cannot be captured in a graph of the emulated NPU: the shapes of the "
                f"results are unknown before it runs ({error})"
            ) from error
        written = [
            id(tensor) in declared_writes or wrote
            for tensor, wrote in zip(arguments.tensors, found, strict=True)
        ]
        outputs = tree_map(lambda value: _on_device(value, device), results)
        fresh = [
            leaf
            for leaf in tree_leaves(outputs)
            if _is_device(leaf) and not any(leaf is tensor for tensor in arguments.tensors)
        ]
        where = [
            index
            for index, leaf in enumerate(tree_leaves(outputs))
            if any(leaf is tensor for tensor in fresh)
        ]
        targets = [core.host_alias(tensor) for tensor in fresh]
        host_args, host_kwargs = arguments.on_host

        def replay() -> None:
            with torch.inference_mode():
                made = tree_leaves(reference(*host_args, **host_kwargs))
                for index, target in zip(where, targets, strict=True):
                    if made[index].shape != target.shape or made[index].dtype != target.dtype:
                        raise RuntimeError(
                            f"{qualified}: result {index} of the replay is {made[index].dtype} "
                            f"{tuple(made[index].shape)}, "
                            f"but {target.dtype} {tuple(target.shape)} in the capture"
                        )
                    target.copy_(made[index])

        core.record_python(
            qualified,
            device,
            [*arguments.tensors, *fresh],
            [*written, *[True] * len(fresh)],
            replay,
        )
        return outputs

    return call


def _on_device(value: Any, device: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != "meta":
        return value
    return torch.empty_strided(
        value.size(), value.stride(), dtype=value.dtype, device=f"npu:{device}"
    )


def record_launch(
    name: str,
    grid: tuple[int, ...],
    arguments: Mapping[str, Any],
    run: Callable[[tuple[int, ...], dict[str, Any]], None],
) -> bool:
    """Record the launch of Triton kernel ``name`` if the current stream records.

    The first run determines the tensors that the kernel writes, by their versions.

    Returns:
        True if the launch must not run, because it was recorded or the device drops it.
    """
    if _dropping_device(dict(arguments)) is not None:
        return True
    device = _recording_device(dict(arguments))
    if device is None:
        return False
    held = _Arguments(dict(arguments))

    def replay() -> list[bool]:
        tensors = held.host_tensors
        before = [tensor._version for tensor in tensors]
        with torch.inference_mode():
            run(grid, dict(held.on_host))
        return [tensor._version != count for tensor, count in zip(tensors, before, strict=True)]

    core.record_python(name, device, held.tensors, None, replay)
    return True
