"""The error for unusable options."""

from __future__ import annotations


class UserError(ValueError):
    """An option that cannot be used; the message is `option=value problem. remedy`.

    Attributes:
        option: name of the option, as the user writes it.
        value: value of the option.
        problem: the problem, as a predicate ("is not a directory").
        remedy: the remedy, in whole sentences.
    """

    def __init__(self, option: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{option}={_shown(value)} {problem}. {remedy}")
        self.option, self.value, self.problem, self.remedy = option, value, problem, remedy


def _shown(value: object) -> str:
    try:
        return repr(value) if isinstance(value, str) else str(value)
    except ValueError:  # Python does not print a number of more than 4,300 digits
        return "<a number of thousands of digits>"
