"""How a recipe ends that cannot go on: one line on standard error, an exit status, and a traceback only on request."""

import contextlib
import functools
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

# A program that starts recipes names in this environment variable the file that takes why one failed, as JSON
# (`{"status", "reason"}`). An exit status would not do: launchers of distributed runs have their own.
FAILURE_FILE = "HF_INFINI_FAILURE_FILE"
TRACEBACK = "--traceback"
# A full disk in the words of the system, and of torch and safetensors, which raise errors of their own
DISK_FULL = re.compile(r"No space left|File too large|Disk quota|os error (27|28|122)\b|PytorchStreamWriter|unexpected pos")
NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory|Unable to allocate", re.IGNORECASE)


class UserError(Exception):
    """Something that the user can mend (a wrong path, a damaged file, options that clash): shown without a traceback."""

    status, prefix = "failed", ""

    def __str__(self) -> str:
        return self.prefix + super().__str__()


class NotPossible(UserError):
    """Options that no model can have together: a grid of runs lists them and is no failure for it."""

    status, prefix = "not possible", "these model options do not go together: "


class _Terminated(KeyboardInterrupt):
    """SIGTERM, where Python's default would end the process without a word."""


def exit_on_error(when_stopped: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a recipe's `main`: whatever ends it early becomes one line on standard error and an exit status.

    1 is the status of an error, 130 that of Ctrl-C and 143 that of SIGTERM, as shells have them. `--traceback` among the
    arguments shows where an error comes from.

    Args:
        when_stopped: what Ctrl-C and SIGTERM leave, and how to go on: "the same command goes on from here".
    """

    def decorate(main: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(main)
        def wrapper(argv: list[str] | None = None) -> None:
            try:
                with _sigterm_raises():
                    main(argv)
                    sys.stdout.flush()
            except BrokenPipeError:
                _end(141, f"stopped, as nobody reads the output any more: {when_stopped}")
            except KeyboardInterrupt as stop:
                name, code = ("SIGTERM", 143) if isinstance(stop, _Terminated) else ("Ctrl-C", 130)
                _end(code, f"stopped by {name}: {when_stopped}")
            except Exception as error:
                if TRACEBACK in (sys.argv[1:] if argv is None else argv):
                    traceback.print_exc()
                reason = describe(error)
                if _disk_is_full(error):
                    has_place = isinstance(error, UserError) or getattr(error, "filename", None)
                    reason = f"{reason if has_place else 'no space left on the disk'}; make room: {when_stopped}"
                prefix = error.prefix if isinstance(error, UserError) else ""
                _end(1, reason, getattr(error, "status", UserError.status), f"error: {prefix}")

        return wrapper

    return decorate


def describe(error: Exception) -> str:
    """What happened, in one line without the kind of error where that says nothing to a user."""
    if isinstance(error, UserError):
        return error.args[0]
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        return f"{error.name} is not installed: pip install 'hf-infini[recipes]'"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or NO_MEMORY.search(str(error)):
        return "there is not enough memory for this: smaller batches, rows or models need less"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {' -> '.join(str(name) for name in (error.filename, error.filename2) if name)}"
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'without a message'} ({TRACEBACK} shows where)"


def _disk_is_full(error: BaseException | None) -> bool:
    while error is not None and not DISK_FULL.search(str(error)):
        error = error.__cause__ or error.__context__
    return error is not None


def report_failure(status: str, reason: str) -> None:
    """Tells the program that started this one why it fails, see [`FAILURE_FILE`]; without one, does nothing."""
    if file := os.environ.get(FAILURE_FILE):
        part = Path(f"{file}.{os.getpid()}")  # of several processes the last one's is kept, whole
        part.write_text(json.dumps({"status": status, "reason": reason}), encoding="utf-8")
        os.replace(part, file)


def _end(code: int, reason: str, status: str = UserError.status, prefix: str = "") -> None:
    with contextlib.suppress(OSError):  # a full disk must not hide what happened
        report_failure(status, reason)
    try:
        sys.stdout.flush()
    except OSError:  # the interpreter would fail at this again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if "tqdm" in sys.modules:
        for bar in list(sys.modules["tqdm"].tqdm._instances):  # the message begins on a line of its own
            bar.close()
    print(f"{prefix}{reason}", file=sys.stderr)
    raise SystemExit(code) from None


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Within it, SIGTERM is an exception, so that files are closed and locks released; other handlers stay."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(*_):
    raise _Terminated
