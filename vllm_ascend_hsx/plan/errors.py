"""The way in which a plan cannot be made."""

from __future__ import annotations


class PlanError(ValueError):
    """An input that cannot be planned with; the message names the option, its value, the problem and the remedy."""

    def __init__(self, option: str, value: object, problem: str, remedy: str) -> None:
        self.option = option
        self.problem = problem
        super().__init__(f"{option} {value}: {problem}; {remedy}")
