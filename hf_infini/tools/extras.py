"""Packages that only a part of the library needs: each comes with an extra, and its absence says with which."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs(extra: str, *packages: str) -> Iterator[None]:
    """Around imports that an extra brings.

    Args:
        extra: its name, as in `pip install 'hf-infini[EXTRA]'`.
        packages: what it brings, by the names under which they are imported.

    Raises:
        ModuleNotFoundError: one of them is not installed; says how to install it. Other errors pass unchanged.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in packages:
            raise
        message = f"{package.replace('_', '-')} is not installed: pip install 'hf-infini[{extra}]'"
        raise ModuleNotFoundError(message, name=package) from error
