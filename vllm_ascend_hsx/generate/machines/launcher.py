"""Rank and world size of a run, from options or from the variables of a launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_ascend_hsx.generate.options import BOUNDS
from vllm_ascend_hsx.protocol.errors import UserError

_REMEDY = "Give --world-size and --rank, or unset the wrong variable."


class Launcher(NamedTuple):
    """Environment variables that a launcher sets for each process.

    Attributes:
        rank: variable with the rank of the process. If it is not set, the launcher is ignored.
        world_size: variables with the number of processes. The first that is set is used.
        marker: if this variable is not set, the launcher is ignored.
    """

    rank: str
    world_size: tuple[str, ...]
    marker: str | None = None


LAUNCHERS = (
    # sbatch and salloc set the other variables, too, for a script that runs once. A step may have
    # fewer tasks than the job, for example salloc's shell.
    Launcher("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), marker="SLURM_STEP_ID"),
    Launcher("JOB_COMPLETION_INDEX", ("WORLD_SIZE",)),  # Kubernetes does not set a size
    Launcher("RANK", ("WORLD_SIZE",)),
)


class Place(NamedTuple):
    """Rank and world size of a run.

    Attributes:
        world_size, rank: values of the options.
        source: variables that have set them; "" if none.
    """

    world_size: int = 1
    rank: int = 0
    source: str = ""


def place_of(world_size: int | None, rank: int | None, environment: Mapping[str, str]) -> Place:
    """Return rank and world size of a run.

    Args:
        world_size, rank: values of the options; None to use the environment.
        environment: environment of the process.

    Raises:
        UserError: the variables are incomplete, invalid or contradictory.
    """
    ours = [
        each
        for each in LAUNCHERS
        if environment.get(each.rank) and (each.marker is None or environment.get(each.marker))
    ]
    sources = []
    if rank is None and ours:
        rank = _agreed("rank", [each.rank for each in ours], environment)
        sources.append(ours[0].rank)
    if world_size is None and ours:
        names = [
            name
            for each in ours
            if (name := next(filter(environment.get, each.world_size), None)) is not None
        ]
        if not names:
            raise UserError(
                ours[0].rank,
                environment[ours[0].rank],
                f"is the rank of this process, but {ours[0].world_size[-1]} is not set",
                "Give the number of processes with --world-size.",
            )
        world_size = _agreed("world_size", names, environment)
        sources.append(names[0])
    place = Place(world_size or 1, rank or 0, ", ".join(sources))
    if sources and place.rank >= place.world_size:
        raise UserError(
            sources[0] if sources[0] == ours[0].rank else "--rank",
            place.rank,
            f"is not below the world size, {place.world_size}",
            "Start --world-size processes, or give --rank, too.",
        )
    return place


def _agreed(option: str, names: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return the common value of some variables.

    Raises:
        UserError: a value is outside of the option's bounds, or two values differ.
    """
    least, most = BOUNDS[option]
    for name in names:
        text = environment[name]
        if not (
            text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most
        ):
            raise UserError(name, text, f"is not a whole number from {least} to {most}", _REMEDY)
        if int(text) != (first := int(environment[names[0]])):
            raise UserError(
                names[0],
                first,
                f"contradicts {name}={int(text)}: two launchers started this process",
                _REMEDY,
            )
    return first
