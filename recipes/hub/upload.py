"""Sends files to the Hub in one commit: what cannot end well is refused before, what failed is taken back.

An upload that was interrupted leaves its repository without a commit, and the next push of the same files goes on: the Hub
knows large files by their content, and asks for those alone that it does not have.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cli import UserError

from .files import Published, is_replaced

TOKENS = "https://huggingface.co/settings/tokens"
MAIN, ATTRIBUTES = "main", ".gitattributes"  # what a new repository has
TRY_AGAIN = (408, 429)  # and all from 500 on: the same request may succeed later
GOES_ON = "The same command goes on; of large files it sends what has not arrived"


@dataclass(frozen=True)
class Target:
    """Where to publish.

    Attributes:
        repo_id: user or organisation, and name.
        private: of a repository that is new.
        revision: the branch.
        tag: for the commit; None sets none.
        update: whether the repository exists already and gets a new version.
    """

    repo_id: str
    private: bool = False
    revision: str = MAIN
    tag: str | None = None
    update: bool = False


@dataclass
class State:
    """What the Hub has of the target: `branches` with their commits, and the `files` of the one that is pushed to."""

    exists: bool = False
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was published there yet: it is new, or a first push was interrupted."""
        return set(self.files) <= {ATTRIBUTES}


def check_target(target: Target) -> None:
    """UserError for names that the Hub would not take."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(target.repo_id)
    except HFValidationError as error:
        raise UserError(f"--repo_id {target.repo_id}: {str(error).splitlines()[0]}") from error
    if "/" not in target.repo_id:
        raise UserError(f"--repo_id {target.repo_id}: give user/name, or organisation/name")
    for option, name in (("--revision", target.revision), ("--tag", target.tag)):
        if name is not None and (not re.fullmatch(r"(?!refs/)[A-Za-z0-9][\w.+-]*(/[\w.+-]+)*", name) or ".." in name):
            raise UserError(f"{option} {name}: give letters, digits, and . _ + - between them, such as v1.0")
    if target.tag == target.revision:
        raise UserError(f"--tag and --revision are both {target.tag}: nobody could tell them apart")


def check_login() -> None:
    """UserError without a token, or where the libraries were told not to use the network."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so nothing can be sent: unset it, or --dry_run")
    if get_token() is None:
        raise UserError(f"no token for the Hub: `hf auth login`, or set HF_TOKEN; make one that may write at {TOKENS}")


def publish(files: list[Published], target: Target, message: str) -> str:
    """Commits the files, deletes what an older version had of their kind, sets the tag, and returns the commit's address.

    Either all files arrive in one commit or nothing changes. A repository or branch that this call made, and to which no
    commit came, is deleted again, unless the connection broke: then the files that have arrived stay for the next call.

    Raises:
        UserError: whatever the user can mend; the message says how, and what there is on the Hub now.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    with explained(api, target):
        check_account(api, target)
        state = read_state(api, target)
        check_state(target, state)
        sent = {published.path for published in files}
        operations = [CommitOperationAdd(published.path, str(published.file)) for published in files]
        operations += [CommitOperationDelete(path) for path in state.files if is_replaced(path) and path not in sent]
        with taken_back() as undo:
            prepare(api, target, state, undo)
            parent = state.branches.get(target.revision)
            commit = api.create_commit(
                target.repo_id, operations, commit_message=message, revision=target.revision, parent_commit=parent
            )
    if target.tag is not None:
        set_tag(api, target, commit.oid)
    return str(commit.commit_url)


def set_tag(api, target: Target, commit: str) -> None:
    try:
        with explained(api, target):
            api.create_tag(target.repo_id, tag=target.tag, revision=commit)
    except UserError as error:
        text = f"the files are on the Hub as {commit}, without --tag {target.tag}; the same command with --update sets it"
        raise UserError(f"{text}: {error}") from error


# --- before -----------------------------------------------------------------------------------------------------------


def check_account(api, target: Target) -> None:
    """UserError where the token cannot write for the repository's owner."""
    account, owner = api.whoami(), target.repo_id.split("/")[0]
    owners = [account["name"], *(entry["name"] for entry in account.get("orgs", []))]
    if owner.lower() not in map(str.lower, owners):
        text = f"--repo_id {target.repo_id}: the token may write for {', '.join(owners)} alone"
        raise UserError(f"{text}; give one of these, or log in as {owner}")
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"the token may only read: make one with write permission at {TOKENS}, then `hf auth login`")


def read_state(api, target: Target) -> State:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        private = bool(api.model_info(target.repo_id).private)
    except RepositoryNotFoundError:
        return State()
    refs = api.list_repo_refs(target.repo_id)
    branches = {branch.name: branch.target_commit for branch in refs.branches}
    revision = target.revision if target.revision in branches else MAIN
    files = api.list_repo_files(target.repo_id, revision=revision)
    return State(True, private, branches, [tag.name for tag in refs.tags], files)


def check_state(target: Target, state: State) -> None:
    """UserError where the push would write over something, or would not do what was asked."""
    if not state.exists and target.update:
        raise UserError(f"--update: there is no {target.repo_id} on the Hub: without --update it is made")
    if not state.is_empty and not target.update:
        raise UserError(f"{target.repo_id} is on the Hub: --update publishes a new version there, or choose another name")
    if target.tag in state.tags:
        raise UserError(f"--tag {target.tag}: {target.repo_id} has that tag; choose another, a version never changes")
    if state.exists and target.private and not state.private:
        raise UserError(f"--private: {target.repo_id} is public; make it private in its settings on the Hub first")


def prepare(api, target: Target, state: State, undo: contextlib.ExitStack) -> None:
    """Makes the repository and the branch where they are not there, and tells `undo` how to delete them again."""
    if not state.exists:
        api.create_repo(target.repo_id, private=True if target.private else None)
        undo.callback(_delete, f"the new repository {target.repo_id}", lambda: api.delete_repo(target.repo_id))
    if target.revision != MAIN and target.revision not in state.branches:
        api.create_branch(target.repo_id, branch=target.revision)
        what = f"the new branch {target.revision} of {target.repo_id}"
        undo.callback(_delete, what, lambda: api.delete_branch(target.repo_id, branch=target.revision))


# --- when something goes wrong ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def taken_back() -> Iterator[contextlib.ExitStack]:
    """Calls what was pushed on the stack when the block fails, but not when it was interrupted and can go on."""
    with contextlib.ExitStack() as undo:
        try:
            yield undo
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or _is_passing(error):
                undo.pop_all()
            raise
        undo.pop_all()


@contextlib.contextmanager
def explained(api, target: Target) -> Iterator[None]:
    """Turns what the Hub or the network answers into a UserError that names the fix."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = _cause(error)
        if cause is not None:
            raise UserError(_explanation(api, target, cause)) from error
        if not isinstance(error, RuntimeError | OSError | ValueError):
            raise
        # RuntimeError and OSError: an upload broke; ValueError: the Hub does not take some file, of a full account perhaps
        text = f"{target.repo_id}: {error}"
        raise UserError(f"{text}. {GOES_ON}" if _is_passing(error) else text) from error


def _explanation(api, target: Target, error: Exception) -> str:
    repo_id, status = target.repo_id, _status(error)
    said = (getattr(error, "server_message", None) or str(error) or type(error).__name__).strip().splitlines()[0]
    if status is None:
        text = f"no connection to {api.endpoint} ({said}): see whether the network, HF_ENDPOINT and proxies are right"
        return f"{text}. {GOES_ON}"
    if _is_passing(error):
        return f"the Hub is busy or broken ({status}: {said}): try it later. {GOES_ON}"
    owner = repo_id.split("/")[0]
    remedies = {
        401: f"the token is not valid: `hf auth login` with one from {TOKENS}, or set HF_TOKEN to it",
        403: f"the token may not do this: make one with write permission for {owner} at {TOKENS}, then `hf auth login`",
        404: "it is gone, or the token cannot see it",
        409: "it exists already: --update publishes a new version there, or choose another name",
        412: "somebody else has changed it meanwhile: look at it, then start again",
    }
    return f"{repo_id}: the Hub refused ({status}: {said}); {remedies.get(status, 'nothing was changed')}"


def _cause(error: BaseException | None) -> Exception | None:
    """The first error of the Hub or the network among an error and its causes: uploads in threads wrap theirs."""
    from huggingface_hub.errors import HTTPError  # that of the HTTP library, which is not the same in all versions

    while error is not None and not isinstance(error, HTTPError):
        error = error.__cause__ or error.__context__
    return error


def _status(error: BaseException) -> int | None:
    """None of an error without an answer: there was no connection, or it broke."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _is_passing(error: BaseException) -> bool:
    """Whether the same may succeed later: what went wrong is the connection or the Hub's health."""
    cause = _cause(error)
    if cause is None:  # what xet and the threads of an upload raise
        return isinstance(error, RuntimeError | OSError) and not isinstance(error, PermissionError)
    status = _status(cause)
    return status is None or status in TRY_AGAIN or status >= 500


def _delete(what: str, delete: Callable[[], None]) -> None:
    try:
        delete()
    except Exception as error:
        if _cause(error) is None:
            raise
        print(f"{what} is empty and could not be deleted again: delete it on the Hub", file=sys.stderr)
