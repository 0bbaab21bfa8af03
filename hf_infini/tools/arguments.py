"""Arguments and options that several commands have, and what they come to."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .reader import COLDEST, HOTTEST
from .ready import KEPT_TOKENS


def _possible(given: float | None) -> float | None:
    if given and not COLDEST <= given <= HOTTEST:
        raise typer.BadParameter(f"{given} is neither 0 nor from {COLDEST} to {HOTTEST:g}.")
    return given


Model = Annotated[
    str,
    typer.Argument(help="A causal language model: folder, GGUF file or name on the Hub."),
]
Documents = Annotated[
    list[Path],
    typer.Argument(
        help="Text, Markdown, code, HTML or PDF, or folders of them; several are read as one.",
        exists=True,
    ),
]
Adapter = Annotated[
    str | None, typer.Option(help="Fitted memory of the model: folder or name on the Hub.")
]
KeptTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Tokens that a head keeps on average. [default: {KEPT_TOKENS}, or the adapter's]",
    ),
]
Archived = Annotated[
    bool | None,
    typer.Option(
        "--archive/--no-archive",
        help="Keep all that is read on the disk, from where each question recalls what it asks "
        "for. Without: what the cache did not keep is gone. [default: archive]",
    ),
]
ArchivedInt8 = Annotated[
    bool,
    typer.Option(
        "--archive-int8",
        help="An archive in 8 bits: about half the bytes of a 16-bit model's; what is recalled is "
        "rounded.",
    ),
]
_HOW_WARM = f"From {COLDEST} to {HOTTEST:g} tokens are drawn; 0: the likeliest."
Temperature = Annotated[
    float,
    typer.Option(
        help=_HOW_WARM,
        callback=_possible,
    ),
]
OwnTemperature = Annotated[
    float | None,
    typer.Option(
        help=f"{_HOW_WARM} [default: as the model's own settings say]", callback=_possible
    ),
]
Penalty = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        max=10,
        help="Above 1: tokens that were there become less likely. [default: the model's own]",
    ),
]
NewTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto: a GPU where there is one.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Type of the weights; auto: as they are saved."),
]
FourBits = Annotated[
    bool,
    typer.Option(
        "--load-in-4bit",
        help="Bring the weights into 4 bits (bitsandbytes): a quarter of the memory of 16, and "
        "answers change a little.",
    ),
]
EightBits = Annotated[
    bool, typer.Option("--load-in-8bit", help="Bring the weights into 8 bits (bitsandbytes).")
]


def archive_of(archive: bool | None, archive_int8: bool) -> bool | str | None:
    """How a command was asked to archive what is read, by its options `archive` and `archive_int8`;
    ValueError for two ways."""
    if archive_int8 and archive is False:
        raise ValueError("give one of --no-archive and --archive-int8, not both.")
    return "int8" if archive_int8 else archive


def bits_of(load_in_4bit: bool, load_in_8bit: bool) -> int | None:
    """The bits of a weight that a command was asked for, by its options `load_in_4bit` and
    `load_in_8bit`; ValueError for both."""
    if load_in_4bit and load_in_8bit:
        raise ValueError("give one of --load-in-4bit and --load-in-8bit, not both.")
    return 4 if load_in_4bit else 8 if load_in_8bit else None
