"""The way in which `hsx serve` refuses."""

from __future__ import annotations


class ServeError(ValueError):
    """What is asked for cannot be served; the message names the option, its value, the problem and the remedy."""

    def __init__(self, option: str, value: object, problem: str, remedy: str) -> None:
        self.option = option
        super().__init__(f"{option} {value}: {problem}; {remedy}")
