"""What people see on the console, and the one place where a program ends on an error.

In: log records of every rank. Out: lines on stderr that open with time, rank and role; INFO of the
first rank of each role, warnings of all.

`exit_on_error` is the outermost `with` of a program and of each thread of ours. Invariant: an error
ends the process; other places that catch all errors try again (compiling, upload), add a name and
raise (a row of text), or go on without (wandb). With `publish` set (`Control.fail`) the cause goes to
all ranks, and threads that hang cannot keep the process alive; without, the traceback is printed and
the launcher ends the other ranks.
"""

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dflash_ddp.redaction import redact

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What tells a program to end."""
USER_ERROR = 2
"""Exit code when settings cannot work."""


def tell(error: Exception | str) -> None:
    """Print each problem on a line of its own."""
    for line in redact(str(error)).splitlines():
        sys.stderr.write(f"dflash_ddp: {line}\n")
    sys.stderr.flush()


class RedactingFormatter(logging.Formatter):
    """Lines without credentials, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        """The line as others would read it."""
        return redact(super().format(record))


def setup_logging(*, rank: int, role: str, verbose: bool) -> None:
    """Send the log to stderr, rank and role in front; INFO of our own modules only if `verbose`."""
    form = f"%(asctime)s [rank {rank} {role}] %(levelname)s %(message)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter(form, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("dflash_ddp").setLevel(logging.INFO if verbose else logging.WARNING)


@dataclass(slots=True)
class ExitHandler:
    """Where an error goes: `publish` tells the peers and ends the process; None without peers."""

    publish: Callable[[BaseException], object] | None = None


@contextmanager
def exit_on_error(
    publish: Callable[[BaseException], object] | None = None,
) -> Iterator[ExitHandler]:
    """End the process on any exception in the body, Ctrl-C included; the cause is printed once.

    SystemExit with code 0 or None passes through (`--help`), and so does any SystemExit while
    nobody is there to be told. `publish` may also be set later, on the yielded handler.

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
