"""Names of models: a folder here, or a name on the Hub."""

import os
from pathlib import Path

from .errors import UserError


def check_name(option: str, name: str) -> None:
    """UserError where a name is a path and nothing is there: the Hub, which would be asked, takes
    minutes without a network.

    A name on the Hub has at most one slash. What begins with `.`, `/`, `~`, `runs/` or a folder
    that is here is a path.
    """
    first, *rest = name.rstrip("/").split("/")
    is_path = name.startswith((".", "~")) or "\\" in name or len(rest) > 1
    is_path = is_path or (bool(rest) and (first in ("", "runs") or os.path.isdir(first)))
    if is_path and not os.path.exists(name):
        raise UserError(
            f"{option}: there is no folder {name}; give the folder of a saved model, or a name on "
            "the Hub, NAME or USER/NAME (USER/… is a path where USER is runs or a folder here)"
        )


def home_of(options) -> Path:
    """The folder that results of a model are written into where no other is given: its adapter's,
    or its own.

    Args:
        options: with `model`, `adapter` and `out`.

    Raises UserError when it is no folder here and `out` is not given.
    """
    option = "adapter" if options.adapter else "model"
    home = Path(getattr(options, option))
    if options.out is None and not home.is_dir():
        raise UserError(f"--out is needed, as --{option} {home} is no folder here")
    return home
