"""The error for unusable input, and the content of error files."""

from __future__ import annotations


class UserError(ValueError):
    """An option that cannot be used; the message is `option=value problem. remedy`.

    Attributes:
        option: its name, as the user writes it.
        value: its value.
        problem: what is wrong, as a predicate ("is not a directory").
        remedy: what to do, in whole sentences.
    """

    def __init__(self, option: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{option}={_shown(value)} {problem}. {remedy}")
        self.option, self.value, self.problem, self.remedy = option, value, problem, remedy


def _shown(value: object) -> str:
    try:
        return repr(value) if isinstance(value, str) else str(value)
    except ValueError:  # Python does not print a number of more than 4,300 digits
        return "<a number of thousands of digits>"
