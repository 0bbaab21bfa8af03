"""The verdict on bad input: a recipe ends with one line that says what is wrong, and leaves what
was there as it was."""

import hashlib
from pathlib import Path

import pytest


def contents(folder: Path) -> dict[str, str]:
    """The hash of every file under a folder by its relative name; locks and links' targets do not
    count."""
    files = [
        file
        for file in sorted(Path(folder).rglob("*"))
        if file.is_file() and ".stages" not in file.parts
    ]
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


def refused(
    main,
    argv,
    capsys,
    *mentions: str,
    keeps: Path | None = None,
    code: int = 1,
    prints: bool = False,
) -> str:
    """Runs a recipe's `main` in this process and checks that it refuses its input; returns the line
    it prints at the end.

    Args:
        main: the function, decorated with `cli.exit_on_error`.
        argv: its arguments.
        capsys: pytest's fixture.
        mentions: what the line must contain: the file or option, what is wrong, the remedy.
        keeps: a folder whose files must be the same afterwards.
        code: the exit status; 2 is that of a malformed command line.
        prints: return all that was printed on standard error.
    """
    before = contents(keeps) if keeps else None
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in argv])
    errors = capsys.readouterr().err
    line = errors.rstrip("\n").rsplit("\n", 1)[-1]
    assert end.value.code == code, errors
    assert "Traceback" not in errors and "--traceback shows where" not in errors, errors
    assert line.startswith("error: ") or ": error: " in line, errors
    for text in mentions:
        assert text in line, f"{text!r} is not in: {line}"
    if keeps:
        after = contents(keeps)
        assert after == before, {
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        }
    return errors if prints else line


def handled(main, argv, capsys, *mentions: str) -> str:
    """Runs a recipe's `main` in this process, which must take its input as it is; returns what it
    prints.

    Args:
        main, argv, capsys: as for [`refused`].
        mentions: what it must print.
    """
    capsys.readouterr()
    try:
        main([str(argument) for argument in argv])
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    shown = "".join(capsys.readouterr())
    for text in mentions:
        assert text in shown, f"{text!r} is not in: {shown}"
    return shown
