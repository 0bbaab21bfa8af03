"""How the command ends early: one line on standard error, and an exit status.

Whatever is raised, by this package, transformers, torch or the system, is told by where it
happened: [`while_`] is put around each step and adds what the step does and with what, what helps,
and what an interruption leaves. [`one_line`] makes the line; nothing else does.
"""

import contextlib
import io
import logging as python_logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from transformers.utils import logging

TRACEBACK = "--traceback"
LONGEST = 400  # characters of another library's message
EXTRAS = {"gradio": "demo", "pypdf": "documents", "bs4": "documents", "gguf": "gguf"}
EXTRAS |= {"bitsandbytes": "bitsandbytes", "accelerate": "bitsandbytes"}
SERVING = ("fastapi", "starlette", "uvicorn", "prometheus_client", "multipart")
EXTRAS |= dict.fromkeys(SERVING, "serve")


class Ended(Exception):
    """What ended a step; its cause is what was raised there.

    Args:
        doing: the step, such as "loading the model".
        subject: the file, folder or option that it is about, as the user gave it.
        remedy: what helps where the message of the cause does not say it.
        kept: what an interruption leaves, and how to go on.
    """

    def __init__(self, doing: str, subject: str, remedy: str, kept: str):
        super().__init__(f"while {doing} {subject}".rstrip())
        self.doing, self.subject, self.remedy, self.kept = doing, subject, remedy, kept


@contextlib.contextmanager
def while_(
    doing: str,
    subject: object = "",
    remedy: str | Callable[[], str] = "",
    kept: str | Callable[[], str] = "nothing was kept",
) -> Iterator[None]:
    """Makes what ends the block an [`Ended`], of the innermost step; `doing`, `subject`, `remedy`,
    `kept`: as there, and the last two may be functions, called when they are needed."""
    try:
        yield
    except (Ended, SystemExit, GeneratorExit, BrokenPipeError):
        raise
    # also Ctrl-C, and the panics of libraries in Rust
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)  # then one is shown, and else the other
        needed = kept if stopped else remedy
        shown = needed if isinstance(needed, str) else needed()
        raise Ended(doing, str(subject), *(("", shown) if stopped else (shown, ""))) from error


def say(message: str) -> None:
    """Writes the `message` as a line on standard error, if there is one."""
    if sys.stderr is not None:
        print(message, file=sys.stderr, flush=True)


def run(app: Callable[..., object]) -> None:
    """Runs a Typer application, `app`, with the words of the command line, and ends the process:
    with status 0; 1 after an error, without a word where nobody reads the output any more; 2 where
    the words are wrong; 130 after Ctrl-C. `--traceback` among the words shows where an error comes
    from."""
    words = sys.argv[1:]
    texts = words[words.index("--") :] if "--" in words else []  # what follows is no option
    options = words[: len(words) - len(texts)]
    show = TRACEBACK in options
    words = [word for word in options if word != TRACEBACK] + texts
    # letters that a terminal does not have, and bytes that are none
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stdin, "surrogateescape")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        with _plain_messages():
            given = app(args=words or ["--help"], prog_name="hf-infini", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        status, message = given if isinstance(given, int) else 0, ""
        if not words:  # its help, as for words that are missing
            status = 2
        if status == 130:  # Ctrl-C outside of all steps
            message = "stopped"
    except BaseException as error:
        if show:
            traceback.print_exc()
        status, message = one_line(error)
    _end(status, message)


def one_line(error: BaseException) -> tuple[int, str]:
    """The exit status, and the line that tells an error."""
    if isinstance(error, SystemExit):
        return (error.code if isinstance(error.code, int) else 1), ""
    cause: Any = error.__cause__ if isinstance(error, Ended) else error
    if isinstance(cause, BrokenPipeError):
        return 1, ""
    if isinstance(cause, KeyboardInterrupt):
        return 130, f"stopped {error}: {error.kept}" if isinstance(error, Ended) else "stopped"
    if hasattr(cause, "format_message"):  # of the parser, which has classes by its version
        path = getattr(getattr(cause, "ctx", None), "command_path", "hf-infini")
        message = " ".join(cause.format_message().split()).rstrip(".")
        return cause.exit_code, f"error: {message}. See: {path} --help"
    message, for_users = _described(cause)
    if isinstance(error, Ended):
        if for_users:
            known = error.subject and error.subject in message
            return 1, f"error: {message}" if known else f"error: {error}: {message}"
        remedy = f" {error.remedy}".rstrip()
        return 1, f"error: {error}: {message.rstrip('.')}.{remedy} ({TRACEBACK} shows more)"
    if for_users or isinstance(error, OSError):
        return 1, f"error: {message}"
    return 1, f"error: a bug of hf-infini: {message} ({TRACEBACK} shows where; please report it)"


def _described(error: BaseException) -> tuple[str, bool]:
    """What an error says, in one line; and whether it was written for users of this package."""
    message, kind = " ".join(str(error).split()), type(error)
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        extra = EXTRAS.get(error.name)
        wanted = f"'hf-infini[{extra}]'" if extra else error.name
        return f"{error.name} is not installed: pip install {wanted}", True
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name]
        return ": ".join([error.strerror, *([" -> ".join(names)] if names else [])]), False
    package = __name__.partition(".")[0]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames and frames[-1].f_globals.get("__name__", "").startswith(f"{package}."):
        # not those that Python raises in our code, such as a JSONDecodeError or a TypeError
        own = kind.__module__.startswith(package) or isinstance(error, OSError)
        if own or kind is ValueError:
            return message, True
    if len(message) > LONGEST:
        message = f"{message[:LONGEST]} …"
    if isinstance(error, (ValueError, OSError)) and message:  # sentences, mostly
        return message, False
    return f"{kind.__name__}: {message}".rstrip(": "), False


@contextlib.contextmanager
def _plain_messages() -> Iterator[None]:
    """Within it, warnings are lines as the command's own, and transformers says what ends it
    only, as does bitsandbytes, which says of each product in which dtype it computes."""
    bits = python_logging.getLogger("bitsandbytes")
    verbosity, level = logging.get_verbosity(), bits.level
    bits.setLevel(python_logging.ERROR)
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            for of_developers in (DeprecationWarning, FutureWarning, PendingDeprecationWarning):
                warnings.simplefilter("ignore", of_developers)
            warnings.showwarning = lambda message, *_, **__: say(
                f"warning: {' '.join(str(message).split())}"
            )
            yield
    finally:
        logging.set_verbosity(verbosity)
        bits.setLevel(level)


def _end(status: int, message: str) -> None:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # the interpreter would fail at this again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if "tqdm" in sys.modules:  # the message begins on a line below them
        for bar in list(sys.modules["tqdm"].tqdm._instances):
            bar.close()
    if message:
        with contextlib.suppress(OSError):
            say(message)
    raise SystemExit(status) from None
