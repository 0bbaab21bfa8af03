"""A folder's way to the Hub, in one commit."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError

from cli import UserError, one_line

from .folder import ALLOWED, pushed_files


def check_target(api: HfApi, repo_id: str, private: bool, update: bool) -> None:
    """UserError where there is no connection or no valid token, or the repository is not as the options say."""
    with explained(repo_id):
        api.whoami()
        if api.repo_exists(repo_id) != update:
            raise UserError("there is no such repository: leave --update out" if update else "it exists: give --update")
        if private and update and not api.model_info(repo_id).private:
            raise UserError("it is public: make it private in its settings on the Hub first, or leave --private out")


def publish(api: HfApi, folder: Path, repo_id: str, private: bool, update: bool, message: str) -> str:
    """Commits the files of a folder that may be pushed, deletes such files of an older version, and returns the commit's
    address. A push that is refused or interrupted publishes nothing, but may leave a new repository without a commit."""
    check_target(api, repo_id, private, update)
    files = {"allow_patterns": pushed_files(folder), "delete_patterns": [*ALLOWED]}
    with explained(repo_id, "nothing was published; the same command goes on, with --update if the repository is there now"):
        api.create_repo(repo_id, private=private or None, exist_ok=update)
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message, **files).commit_url)


@contextlib.contextmanager
def explained(repo_id: str, remedy: str = "") -> Iterator[None]:
    """Turns what huggingface_hub raises into a UserError of one line, with the remedy after it."""
    try:
        yield
    except (UserError, HTTPError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: an upload in threads broke
        message = f"--repo_id {repo_id}: {one_line(error)}"
        raise UserError(f"{message}; {remedy}" if remedy else message) from error
