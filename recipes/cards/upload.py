"""A folder's way to the Hub, in one commit."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from cli import UserError

from .folder import allowed, pushed_files

GOES_ON = "the same command goes on, and sends of large files what has not arrived"
PASSING = (408, 429)  # and all from 500 on: the same request may succeed later


def check_target(api: HfApi, repo_id: str, private: bool = False, update: bool = False) -> list[str] | None:
    """The files that a repository has; None where it is not there.

    Raises:
        UserError: there is no connection or no valid token, or the repository is not as the options say.
    """
    with explained(repo_id):
        if "/" not in repo_id:
            raise UserError("give user/name, or organisation/name")
        api.whoami()
        if not api.repo_exists(repo_id):
            if update:
                raise UserError("there is no such repository; without --update it is made")
            return None
        if private and not api.model_info(repo_id).private:
            raise UserError("it is public: make it private in its settings on the Hub first, or leave --private out")
        files = api.list_repo_files(repo_id)
        if not update and set(files) - {".gitattributes"}:  # which an interrupted push leaves, too
            raise UserError("it exists: --update publishes a new version there")
        return files


def publish(api: HfApi, folder: Path, repo_id: str, private: bool, update: bool, message: str) -> str:
    """Commits the files of a folder that may be pushed, deletes such files of an older version, and returns the commit's
    address.

    A repository that this call made is deleted again when the Hub refuses the commit. When the connection breaks it stays,
    without a commit, and the next call goes on with the files that have arrived.
    """
    there = check_target(api, repo_id, private, update)
    files = pushed_files(folder)
    operations = [CommitOperationAdd(file.name, str(file)) for file in files]
    old = {path for path in there or () if allowed(path)} - {file.name for file in files}
    operations += [CommitOperationDelete(path) for path in sorted(old)]
    with explained(repo_id):
        if there is None:
            api.create_repo(repo_id, private=private or None)
        try:
            return str(api.create_commit(repo_id, operations, commit_message=message).commit_url)
        except Exception as error:
            if is_passing(error):
                raise UserError(f"{' '.join(str(error).split())}; {GOES_ON}") from error
            if there is None:
                with contextlib.suppress(HTTPError):  # an empty repository is no harm, and the next push fills it
                    api.delete_repo(repo_id)
            raise


@contextlib.contextmanager
def explained(repo_id: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into a UserError of one line."""
    try:
        yield
    except (UserError, HTTPError, OSError, ValueError) as error:
        raise UserError(f"--repo_id {repo_id}: {' '.join(str(error).split())}") from error


def is_passing(error: Exception) -> bool:
    """Whether the same may succeed later: what went wrong is the connection or the Hub's health."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in PASSING or error.response.status_code >= 500
    return isinstance(error, HTTPError | OSError | RuntimeError)  # RuntimeError: an upload in threads broke
