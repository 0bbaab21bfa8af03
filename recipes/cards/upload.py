"""A folder's way to the Hub, in one commit."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError

from cli import UserError

from .folder import ALLOWED, pushed_files


def check_target(api: HfApi, repo_id: str, private: bool, update: bool) -> bool:
    """Whether a repository is there.

    Raises UserError where there is no connection or no valid token, or the repository is not as the options say.
    """
    with explained(repo_id):
        if "/" not in repo_id:
            raise UserError("give user/name, or organisation/name")
        api.whoami()
        if not api.repo_exists(repo_id):
            if update:
                raise UserError("there is no such repository; without --update it is made")
            return False
        if private and not api.model_info(repo_id).private:
            raise UserError("it is public: make it private in its settings on the Hub first, or leave --private out")
        if not update and api.list_repo_files(repo_id) != [".gitattributes"]:  # which is all that an interrupted push leaves
            raise UserError("it exists: --update publishes a new version there")
        return True


def publish(api: HfApi, folder: Path, repo_id: str, private: bool, update: bool, message: str) -> str:
    """Commits the files of a folder that may be pushed, deletes such files of an older version, and returns the commit's
    address.

    A push that is refused or interrupted publishes nothing: a repository that it made stays without a commit, and the next
    call goes on with the files that have arrived.
    """
    there = check_target(api, repo_id, private, update)
    files = {"allow_patterns": pushed_files(folder), "delete_patterns": [*ALLOWED]}
    with explained(repo_id, "nothing was published, and the same command goes on"):
        if not there:
            api.create_repo(repo_id, private=private or None)
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message, **files).commit_url)


@contextlib.contextmanager
def explained(repo_id: str, remedy: str = "") -> Iterator[None]:
    """Turns what huggingface_hub raises into a UserError of one line, with the remedy after it."""
    try:
        yield
    except (UserError, HTTPError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: an upload in threads broke
        message = f"--repo_id {repo_id}: {' '.join(str(error).split())}"
        raise UserError(f"{message}; {remedy}" if remedy else message) from error
