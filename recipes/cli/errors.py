"""How a recipe ends that cannot go on: one line on standard error, an exit status, and a traceback only for who asks."""

import contextlib
import errno
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
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REMEDIES = {  # by the kind of error that the system reports
    errno.EACCES: "give it the rights, or choose another place",
    errno.EPERM: "give it the rights, or choose another place",
    errno.EROFS: "choose a place that can be written",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a file is where a folder should be: choose another place",
    errno.EEXIST: "a file is where a folder should be: choose another place",
    errno.EISDIR: "a folder is where a file should be: choose another place",
    errno.ELOOP: "its links lead in a circle: choose another place",
    errno.ENODEV: "choose another place",
    errno.EINVAL: "choose another place",
    errno.EIO: "the disk cannot be read or written there: look after it",
    **dict.fromkeys(FULL, "make room, or choose another place"),
    errno.EMFILE: "raise the limit of open files: ulimit -n",
}
# What torch and safetensors, which raise errors of their own, say of a full disk
FULL_TEXT = re.compile(r"No space left|os error (27|28|122)\b|File too large|PytorchStreamWriter failed|unexpected pos")
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
    arguments lets errors through as they are.

    Args:
        when_stopped: what Ctrl-C and SIGTERM leave, and how to go on: "the same command goes on from here".
    """

    def decorate(main: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(main)
        def wrapper(argv: list[str] | None = None) -> None:
            shows_all = TRACEBACK in (sys.argv[1:] if argv is None else argv)
            try:
                with _sigterm_raises():
                    main(argv)
                    sys.stdout.flush()
            except BrokenPipeError:
                reason = f"stopped, as nobody reads the output any more: {when_stopped}"
                _end(141, UserError.status, reason, reason)
            except KeyboardInterrupt as stop:
                name, code = ("SIGTERM", 143) if isinstance(stop, _Terminated) else ("Ctrl-C", 130)
                _end(code, UserError.status, f"stopped by {name}: {when_stopped}", f"\nstopped by {name}: {when_stopped}")
            except Exception as error:
                if shows_all:
                    traceback.print_exc()
                status, reason = getattr(error, "status", UserError.status), describe(error)
                if full := full_place(error, sys.argv[1:] if argv is None else argv):
                    if not isinstance(error, UserError):  # which names the place itself
                        reason = f"no space left for {full}: {REMEDIES[errno.ENOSPC]}"
                    reason += f"; {when_stopped}"
                prefix = error.prefix if isinstance(error, UserError) else ""
                _end(1, status, reason, f"error: {prefix}{reason}")

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
    text = " ".join(str(error).split())
    if text.startswith("Symlink loop"):  # a RuntimeError of pathlib
        return f"{text}: {REMEDIES[errno.ELOOP]}"
    if isinstance(error, OSError) and error.errno is not None:
        places = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        remedy = REMEDIES.get(error.errno, f"{TRACEBACK} shows where")
        return f"{error.strerror}: {places[:500]}; {remedy}" if places else f"{error.strerror}: no file is named; {remedy}"
    return f"{type(error).__name__}: {text or 'without a message'} ({TRACEBACK} shows where)"


def full_place(error: BaseException | None, argv: list[str]) -> str | None:
    """What could not be written where a full disk (or a limit of a file's size) is behind an error; None where it is not."""
    while error is not None:
        if getattr(error, "errno", None) in FULL or (not isinstance(error, UserError) and FULL_TEXT.search(str(error))):
            named = getattr(error, "filename2", None) or getattr(error, "filename", None)  # of a copy, the new file
            out = next((after for word, after in zip(argv, argv[1:], strict=False) if word == "--out"), None)
            return str(named or out or "the output") if _stdout_works() else "standard output"
        error = error.__cause__ or error.__context__
    return None


def _stdout_works() -> bool:
    """Whether what was printed could be written; where not, nothing more is, not even by the interpreter when it ends."""
    try:
        sys.stdout.flush()
        return True
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False


def report_failure(status: str, reason: str) -> None:
    """Tells the program that started this one why it fails, see [`FAILURE_FILE`]; without one, does nothing."""
    if file := os.environ.get(FAILURE_FILE):
        part = Path(f"{file}.{os.getpid()}")  # of several processes the last one's is kept, whole
        part.write_text(json.dumps({"status": status, "reason": reason}), encoding="utf-8")
        os.replace(part, file)


def _end(code: int, status: str, reason: str, shown: str) -> None:
    _stdout_works()
    with contextlib.suppress(OSError):  # a full disk must not hide what happened
        report_failure(status, reason)
    if "tqdm" in sys.modules:
        for bar in list(sys.modules["tqdm"].tqdm._instances):  # the message begins on a line of its own
            bar.close()
    print(shown, file=sys.stderr)
    raise SystemExit(code) from None


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Within it, SIGTERM is an exception, so that files are closed and locks given back; other handlers stay."""
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
