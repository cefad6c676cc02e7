"""What people see on the console, and the one place where a program ends on an error.

In: log records of every rank. Out: lines on stderr that open with time, rank and role. A job of
eight processes prints the INFO lines of two (the first rank of each role) and the warnings of all.

`exit_on_error` is the outermost `with` of a program and of each thread of ours. It holds the only
broad `except` of the package. Invariant: an error leaves it in one of two ways. With `publish` set
(`Control.fail`) the cause goes to all ranks and the process ends there, so threads that hang cannot
keep it alive. Without, the traceback is printed and the exit code is 1; the launcher ends the rest.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)


def setup_logging(*, rank: int, role: str, verbose: bool, level: int = logging.INFO) -> None:
    """Send the log to stderr, rank and role in front of each line. May be called again.

    Args:
        rank: global rank of this process.
        role: "target", "drafter", or "colocated".
        verbose: True on the rank that speaks for its role; others print WARNING and worse only.
        level: lowest level of our own records on a verbose rank; WARNING for other libraries.
    """
    form = f"%(asctime)s [rank {rank} {role}] %(levelname)s %(message)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(form, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("dflash_ddp").setLevel(level if verbose else logging.WARNING)


@dataclass(slots=True)
class ExitHandler:
    """Where an error goes. `publish` ends the process; None until there are peers to tell."""

    publish: Callable[[BaseException], object] | None = None


@contextmanager
def exit_on_error(
    publish: Callable[[BaseException], object] | None = None,
) -> Iterator[ExitHandler]:
    """End the process on any exception in the body, with the cause printed once.

    SystemExit with code 0 or None passes through (`--help`), and so does any SystemExit while
    nobody is there to be told. Ctrl-C counts as an error of this rank: its peers must end too.

    Args:
        publish: tells the peers and ends this process; or set it later on the yielded handler.

    Raises:
        SystemExit: code 1 (130 after Ctrl-C), when `publish` is None.
    """
    handler = ExitHandler(publish)
    try:
        yield handler
    except BaseException as error:
        if isinstance(error, SystemExit) and (handler.publish is None or not error.code):
            raise
        if handler.publish is not None:
            handler.publish(error)
        interrupted = isinstance(error, KeyboardInterrupt)
        logger.critical("%s", "interrupted" if interrupted else error, exc_info=not interrupted)
        raise SystemExit(130 if interrupted else 1) from None
