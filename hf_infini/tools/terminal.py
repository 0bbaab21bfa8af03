"""What the command says in a terminal while it reads, and what is typed there."""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from ..cache.cache import InfiniCache
from ..cache.files import MemoryFileError
from ..cache.joined import tokens_read
from .estimate import estimate as estimate_cache
from .one_line import say, while_
from .reader import Reader
from .text_file import remove_files


def words_of(given):
    """The `given` words of the command line, as they were meant: bytes that are no UTF-8 are
    refused."""
    for text in [given] if isinstance(given, str) else given or ():
        if (words := text.encode("utf-8", "replace").decode()) != text:
            raise typer.BadParameter(f"{words!r} has bytes that are no text in UTF-8.")
    return given


def read_through(read, *files: Path, mend: bool = False) -> InfiniCache:
    """What `read` gives, of a [`Reader`], from memory `files` or into them; `mend`: whether those
    that do not fit are replaced."""
    partials = [file.with_name(f"{file.name}.partial") for file in files]

    def left() -> str:
        done, begun = ([str(file) for file in part if file.exists()] for part in (files, partials))
        if begun:
            what = f"{begun[0]} has what was read, or all but the last minute; run the same again"
            return (
                f"of {len(files)} memory files {len(done)} are kept, and {what}" if done else what
            )
        if len(done) == 1 == len(files):
            return f"{done[0]} is kept"
        if done:
            return f"of {len(files)} memory files {len(done)} are kept; run the same again"
        return "nothing was kept yet; the same command begins again"

    remedy = "Is there room, and may it be written? --memory, --out or HF_HOME name another place."
    name = files[0] if len(files) == 1 else files[0].parent
    with while_("reading the text into", name, remedy, left):
        for _ in files:  # each may be damaged
            try:
                return read()
            except MemoryFileError as error:
                if not mend:
                    raise
                _make_room(error, files)
        return read()


def _make_room(error: MemoryFileError, files: Sequence[Path]) -> None:
    """Removes those of the command's own memory `files` that an `error` names, or else all."""
    say(f"reading again, for {error}")
    for file in [file for file in files if file.name in str(error)] or files:
        remove_files(file)


class Asked:
    """Documents that are read into memory files, and asked.

    Args:
        make: makes a [`Reader`].
        texts: of the documents.
        files: of each its memory file.
        mend: whether files that do not fit are replaced, also where a question finds that out.
    """

    def __init__(
        self, make: Callable[[], Reader], texts: Sequence[str], files: Sequence[Path], mend: bool
    ):
        self.make, self.texts, self.files, self.mend = make, texts, files, mend

    def read(self) -> InfiniCache:
        """What the documents give, in a new `reader`."""
        self.reader = self.make()
        reading = functools.partial(self.reader.read_documents, self.texts, files=self.files)
        return read_through(reading, *self.files, mend=self.mend)

    def chat(self, messages: list[dict[str, str]], **options) -> str:
        """[`Reader.chat`] of these `messages`, with these `options`; MemoryFileError where a file
        is damaged and nothing is mended."""
        for _ in self.files:  # each may be damaged
            try:
                return self.reader.chat(messages, **options)
            except MemoryFileError as error:
                if not self.mend:
                    raise
                _make_room(error, self.files)
                self.read()
        return self.reader.chat(messages, **options)


def say_what_was_read(config, cache: InfiniCache) -> None:
    """The tokens that a model of this `config` has read into a `cache`, and their bytes."""
    tokens = tokens_read(cache)
    estimate = estimate_cache(config, tokens, archive=cache.archived)
    say(
        f"{tokens:,} tokens in a cache of {cache.nbytes() / 1e6:,.1f} MB, all keys and values: "
        f"{estimate.plain / 1e6:,.1f} MB"
    )
    if cache.archive is not None:
        say(
            f"beside it, {estimate.archive / 1e6:,.1f} MB of archive, from which questions recall "
            f"passages ({'' if cache.archived == 'int8' else '--archive-int8: fewer MB; '}"
            "--no-archive: none, and what the cache did not keep is gone)"
        )


def chat(answer, file: Path) -> None:
    """Questions from standard input, until an empty line or its end, each to `answer`, after those
    before it. Ctrl-C stops an answer, and at the prompt the chat. `file`: what is kept then."""
    messages: list[dict[str, str]] = []
    while asked := typed("> ", file):
        question = {"role": "user", "content": asked}
        with while_("answering", repr(asked), kept=f"{file} is kept: nothing is read again"):
            try:
                said = answer([*messages, question])
            except KeyboardInterrupt:
                say("\nstopped: the chat goes on without this question; an empty line ends it")
                continue
        messages += [question, {"role": "assistant", "content": said}]


def typed(prompt: str, file: Path | None = None) -> str:
    """A line from standard input, after a `prompt`; empty at its end, or where it is closed.
    `file`: what is kept when Ctrl-C comes."""
    with while_("waiting for a line", kept=f"{file} is kept" if file else "nothing was changed"):
        if sys.stdin is None:
            return ""
        if sys.stderr is not None:
            print(prompt, end="", file=sys.stderr, flush=True)
        try:
            return words_of(input())
        except EOFError:
            say("")
            return ""
