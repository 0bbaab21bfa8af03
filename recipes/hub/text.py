"""What must not be in a published text: secrets, paths of this machine, the names of its user and of itself."""

import getpass
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SECRETS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{20,}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "an AWS secret key": r"(?i:aws_?secret_?(?:access_?)?key)\W{1,5}[A-Za-z0-9/+]{40}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{22,})",
    "a Google API key": r"\bAIza[\w-]{35}",
    "a Slack token": r"\bxox[abprs]-[\w-]{10,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{32,}",
    "a password in a URL": r"\b[a-z][a-z0-9+.-]*://[^\s/:@'\"<>]+:[^\s/@'\"<>]+@",
    "a password": r"(?i:password|passwd|api_?key|secret_?key|access_?token)['\"]?\s*[=:]\s*['\"][^'\"\s]{8,}['\"]",
}
# Folders that begin with these belong to somebody; /usr, /etc and the like are the same everywhere
ROOTS = "home|Users|root|tmp|var|mnt|media|opt|srv|private|data|scratch|work|workspace|Volumes|gpfs|lustre|nfs|content"
PATH = re.compile(rf"(?:file://|(?<![\w./:~<>-]))/(?:{ROOTS})/[\w.@~+-][^\s'\"`)\]}}>,;]*")
WINDOWS_PATH = re.compile(r"(?<!\w)[A-Za-z]:[\\/]{1,2}(?:Users|Documents and Settings|home|data|temp|tmp|work)\b[^\s'\"`]*")
EVERYBODY = {"root", "user", "users", "admin", "ubuntu", "debian", "runner", "docker", "jovyan", "localhost", "data"}
SHORTEST_NAME = 4  # letters; shorter ones are too often words
SHOWN = 8  # characters of a secret in a message


def scan(text: str, allowed: Iterable[str], names: Iterable[str]) -> Iterator[tuple[int, str, str]]:
    """The line (from 1), what is there and how to mend it, of everything that must not go up.

    Args:
        allowed: texts that may go up although they are found.
        names: of the user and the machine, see [`local_names`].
    """
    for what, pattern in SECRETS.items():
        for found in _found(re.compile(pattern), text, allowed):
            fix = "take it out, and revoke it where it was issued: it has stood on a disk in plain text"
            yield _line(text, found), f"{what} ({found[0][:SHOWN]}…)", fix
    fix = "take it out, or give what it names by a relative path"
    for pattern in (PATH, WINDOWS_PATH, *_own_folders()):
        for found in _found(pattern, text, allowed):
            yield _line(text, found), f"a path of this machine ({found[0]})", fix
    for name in names:
        for found in _found(re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])"), text, allowed):
            yield _line(text, found), f"the name of this machine or its user ({name})", f"take it out, or --allow {name}"


def local_names(public: str) -> set[str]:
    """The names of the user and the machine, without those that everybody has or that `public` holds anyway."""
    names = {socket.gethostname(), socket.gethostname().split(".")[0]}
    try:
        names.add(getpass.getuser())
    except (OSError, KeyError):  # a user without a name, as in some containers
        pass
    return {name for name in names if len(name) >= SHORTEST_NAME and name not in EVERYBODY and name not in public}


def _own_folders() -> list[re.Pattern]:
    """This machine's own folders, whatever their roots are called."""
    folders = {str(path) for path in (Path.home(), Path.cwd(), Path(sys.prefix)) if len(path.parts) > 1}
    known = [folder for folder in folders if not PATH.match(f"{folder}/x")]
    return [re.compile(rf"(?<![\w.]){re.escape(folder)}(?![\w-])[^\s'\"`]*") for folder in known]


def _found(pattern: re.Pattern, text: str, allowed: Iterable[str]) -> Iterator[re.Match]:
    return (found for found in pattern.finditer(text) if found[0] not in allowed)


def _line(text: str, found: re.Match) -> int:
    return text.count("\n", 0, found.start()) + 1
