"""Rank and world size of a run: as given, or as the launcher of its process says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_ascend_hsx.generate.options import BOUNDS
from vllm_ascend_hsx.protocol.errors import UserError

_REMEDY = "Give --world-size and --rank, or unset what does not count."


class Launcher(NamedTuple):
    """A launcher, by the variables that it sets for each process.

    Attributes:
        rank: variable with the number of the process; without it the launcher does not count.
        world_size: variables with the number of processes. The first that is set counts.
        marker: variable without which the others do not count.
    """

    rank: str
    world_size: tuple[str, ...]
    marker: str | None = None


LAUNCHERS = (
    # sbatch and salloc set the others, too, for a script that runs once. A step may have fewer
    # tasks than its job, such as the one of salloc's shell.
    Launcher("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), marker="SLURM_STEP_ID"),
    Launcher(
        "JOB_COMPLETION_INDEX", ("WORLD_SIZE",)
    ),  # Kubernetes itself tells no process the size
    Launcher("RANK", ("WORLD_SIZE",)),
)


class Place(NamedTuple):
    """A run's place among those that share a dataset.

    Attributes:
        world_size, rank: as the options of these names.
        source: the variables that they are from; "" if there is none.
    """

    world_size: int = 1
    rank: int = 0
    source: str = ""


def place_of(world_size: int | None, rank: int | None, environment: Mapping[str, str]) -> Place:
    """Return a run's place.

    Args:
        world_size, rank: as given; None to ask the environment.
        environment: of the process.

    Raises:
        UserError: the variables make no place, or two launchers contradict each other.
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
                (
                    f"is the rank of this process, and {ours[0].world_size[-1]} does not say of "
                    "how "
                    "many"
                ),
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
            "Start as many processes as --world-size says, or give --rank, too.",
        )
    return place


def _agreed(option: str, names: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return the number that all variables of these names have.

    Raises:
        UserError: one is no number within the option's bounds, or two contradict each other.
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
