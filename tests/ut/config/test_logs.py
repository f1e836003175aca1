"""Log lines of this package in vLLM's processes: like vLLM's, or as the user has configured."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
import vllm.logger  # noqa: F401 - configures the logger that the tests change

from vllm_ascend_hsx.compat.logs import log_as_vllm_does

NAMES = ("vllm_ascend_hsx", "vllm", None)


@pytest.fixture
def loggers() -> Iterator[dict[str | None, logging.Logger]]:
    """Yield unconfigured loggers, and vLLM's logger with a level but without a handler."""
    found = {name: logging.getLogger(name) for name in NAMES}
    kept = {
        name: (logger.level, logger.handlers, logger.propagate) for name, logger in found.items()
    }
    for logger in found.values():
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
    found["vllm"].setLevel(logging.INFO)
    found["vllm"].propagate = False
    yield found
    for name, (level, handlers, propagate) in kept.items():
        found[name].handlers, found[name].propagate = handlers, propagate
        found[name].setLevel(level)


def handle(logger: logging.Logger, level: int = logging.NOTSET) -> io.StringIO:
    handler = logging.StreamHandler(printed := io.StringIO())
    handler.setLevel(level)
    logger.addHandler(handler)
    return printed


def say() -> None:
    """Log in a fork of a process with our plugin. Imports set the root logger to ERROR."""
    root = logging.getLogger()
    root.handlers = [
        each for each in root.handlers if type(each) is logging.StreamHandler
    ]  # without pytest's
    log_as_vllm_does()
    root.setLevel(logging.ERROR)
    log_as_vllm_does()
    for level in ("debug", "info", "warning"):
        getattr(logging.getLogger("vllm_ascend_hsx.connector.worker"), level)(level)


@pytest.mark.parametrize(
    ("level", "expected"),
    [(logging.DEBUG, "debug info warning"), (logging.INFO, "info warning"), (logging.ERROR, "")],
    ids=["VLLM_LOGGING_LEVEL=DEBUG", "INFO, the default", "ERROR"],
)
def test_log_lines_use_vllms_handler_and_level_whatever_the_level_of_the_root_logger(
    loggers: dict[str | None, logging.Logger], level: int, expected: str
) -> None:
    loggers["vllm"].setLevel(level)
    printed = handle(loggers["vllm"])
    say()
    assert printed.getvalue().split() == expected.split(), "once each"


def test_existing_level_and_handlers_of_our_logger_are_kept(
    loggers: dict[str | None, logging.Logger],
) -> None:
    ours, vllms = handle(loggers["vllm_ascend_hsx"]), handle(loggers["vllm"])
    loggers["vllm_ascend_hsx"].setLevel(logging.WARNING)
    say()
    assert (ours.getvalue().split(), vllms.getvalue()) == (["warning"], "")


def test_log_lines_disabled_by_the_user_stay_disabled(
    loggers: dict[str | None, logging.Logger],
) -> None:
    vllms = handle(loggers["vllm"])
    loggers["vllm_ascend_hsx"].propagate = False
    say()
    assert vllms.getvalue() == ""


def test_handlers_of_the_root_logger_print_our_lines(
    loggers: dict[str | None, logging.Logger],
) -> None:
    roots, vllms = handle(loggers[None]), handle(loggers["vllm"])
    say()
    assert (roots.getvalue().split(), vllms.getvalue()) == (["info", "warning"], "")


def test_root_handler_for_errors_does_not_hide_our_warnings(
    loggers: dict[str | None, logging.Logger],
) -> None:
    roots, vllms = handle(loggers[None], logging.ERROR), handle(loggers["vllm"])
    say()
    assert (roots.getvalue(), vllms.getvalue().split()) == ("", ["info", "warning"])


def test_loggers_are_unchanged_if_vllm_configures_no_logging(
    loggers: dict[str | None, logging.Logger],
) -> None:
    """With VLLM_CONFIGURE_LOGGING=0."""
    loggers["vllm"].setLevel(logging.NOTSET)
    loggers["vllm"].handlers = []
    say()
    ours = loggers["vllm_ascend_hsx"]
    assert (ours.level, ours.handlers, ours.propagate) == (logging.NOTSET, [], True)
