"""How a recipe ends that cannot go on: one line on standard error, an exit status, and a traceback
only on request."""

import functools
import os
import sys
import traceback
from collections.abc import Callable

TRACEBACK = "--traceback"


class UserError(Exception):
    """Something that the user can mend (a wrong path, a damaged file, options that clash): shown
    without a traceback."""


class NotPossible(UserError):
    """Options that no model can have together: a study lists them and is no failure for it."""

    prefix = "these model options do not go together: "

    def __str__(self) -> str:
        return self.prefix + super().__str__()


def exit_on_error(when_stopped: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a recipe's `main`: whatever ends it early becomes one line on standard error and
    an exit status, 1 after an error, 130 after Ctrl-C. `--traceback` among the arguments shows
    where an error comes from.

    Args:
        when_stopped: what Ctrl-C leaves, and how to go on: "the same command goes on from here"."""

    def decorate(main: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(main)
        def wrapper(argv: list[str] | None = None) -> None:
            try:
                main(argv)
                sys.stdout.flush()
            except BrokenPipeError:
                _end(141, f"stopped, as nobody reads the output any more: {when_stopped}")
            except KeyboardInterrupt:
                _end(130, f"stopped by Ctrl-C: {when_stopped}")
            except Exception as error:
                if TRACEBACK in (sys.argv[1:] if argv is None else argv):
                    traceback.print_exc()
                _end(1, f"error: {describe(error)}")

        return wrapper

    return decorate


def describe(error: Exception) -> str:
    """What happened, in one line without the kind of error where that says nothing to a user."""
    if isinstance(error, UserError):
        return str(error)
    # as hf_infini raises them: a sentence that says what is allowed
    if isinstance(error, ValueError):
        return one_line(error)
    if type(error).__name__ == "Ended":  # a step of the command that a recipe takes, too
        from hf_infini.tools import one_line as ending

        return ending.one_line(error)[1].removeprefix("error: ")
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        return f"{error.name} is not installed: pip install 'hf-infini[recipes]'"
    if isinstance(error, OSError) and error.strerror:
        # none of an open file, as when a disk is full
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return f"{error.strerror}: {' -> '.join(names)}" if names else error.strerror
    return f"{type(error).__name__}: {one_line(error)} ({TRACEBACK} shows where)"


def one_line(error: Exception) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def _end(code: int, reason: str) -> None:
    try:
        sys.stdout.flush()
    except OSError:  # the interpreter would fail at this again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if "tqdm" in sys.modules:
        # the message begins on a line of its own
        for bar in list(sys.modules["tqdm"].tqdm._instances):
            bar.close()
    print(reason, file=sys.stderr)
    raise SystemExit(code) from None
