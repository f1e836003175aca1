"""The error of an invalid plan."""

from __future__ import annotations


class PlanError(ValueError):
    """An input is invalid. The message names option, value, problem and remedy."""

    def __init__(self, option: str, value: object, problem: str, remedy: str) -> None:
        self.option = option
        self.problem = problem
        super().__init__(f"{option} {value}: {problem}; {remedy}")
