"""Rank and world size of a run: as given, or as the launcher of its process says."""

from __future__ import annotations

from collections.abc import Mapping
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
    Launcher("JOB_COMPLETION_INDEX", ("WORLD_SIZE",)),  # Kubernetes itself tells no process the size
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


class _Variable(NamedTuple):
    name: str
    value: int

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


def place_of(world_size: int | None, rank: int | None, environment: Mapping[str, str]) -> Place:
    """Return a run's place.

    Args:
        world_size, rank: as given; None to ask the environment.
        environment: of the process.

    Raises:
        UserError: the variables make no place, or two launchers contradict each other.
    """
    ours = [each for each in LAUNCHERS if environment.get(each.rank) and (each.marker is None or environment.get(each.marker))]
    sources = []
    if rank is None and ours:
        found = _agreed([_number(each.rank, environment, "rank") for each in ours])
        rank = found.value
        sources.append(found.name)
    if world_size is None and ours:
        names = [next((name for name in each.world_size if environment.get(name)), None) for each in ours]
        sizes = [_number(name, environment, "world_size") for name in names if name is not None]
        if not sizes:
            first = ours[0]
            problem = f"is the rank of this process, and {first.world_size[-1]} does not say of how many"
            raise UserError(first.rank, environment[first.rank], problem, "Give the number of processes with --world-size.")
        found = _agreed(sizes)
        world_size = found.value
        sources.append(found.name)
    place = Place(1 if world_size is None else world_size, rank or 0, ", ".join(sources))
    if sources and place.rank >= place.world_size:
        name = sources[0] if sources[0] in {each.rank for each in ours} else "--rank"
        problem = f"is not below the world size, {place.world_size}"
        raise UserError(name, place.rank, problem, "Start as many processes as --world-size says, or give --rank, too.")
    return place


def _agreed(said: list[_Variable]) -> _Variable:
    """Return what all launchers say. Raises UserError if they contradict each other."""
    for other in said[1:]:
        if other.value != said[0].value:
            raise UserError(said[0].name, said[0].value, f"contradicts {other}: two launchers started this process", _REMEDY)
    return said[0]


def _number(name: str, environment: Mapping[str, str], option: str) -> _Variable:
    text, (least, most) = environment[name], BOUNDS[option]
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise UserError(name, text, f"is not a whole number from {least} to {most}", _REMEDY)
    return _Variable(name, int(text))
