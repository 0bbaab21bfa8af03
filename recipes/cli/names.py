"""Names of models: a folder here, or a name on the Hub."""

import os

from .errors import UserError


def check_name(option: str, name: str) -> None:
    """UserError where a name is a path and nothing is there: the Hub, which would be asked, takes minutes without a network.

    A name on the Hub has at most one slash. What begins with `.`, `/`, `~`, `runs/` or a folder that is here is a path.
    """
    first, *rest = name.rstrip("/").split("/")
    is_path = name.startswith((".", "~")) or "\\" in name or len(rest) > 1
    is_path = is_path or (bool(rest) and (first in ("", "runs") or os.path.isdir(first)))
    if is_path and not os.path.exists(name):
        raise UserError(
            f"{option}: there is no folder {name}; give the folder of a saved model, or a name on the Hub, NAME or "
            "USER/NAME (USER/… is taken for a path where USER is runs or a folder here)"
        )
