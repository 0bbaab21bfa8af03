"""The way of a folder to a small Hub on loopback: what arrives, what is refused, what an interruption leaves."""

import shutil

import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants

from cards import upload
from cli import UserError
from hub_repository import READ, WRITE
from hub_server import HubServer

NAME, CODE = "user/infini", "hf_infini_89abcdef"
CARD = "---\nlicense: mit\n---\n\n# infini\n"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    server = HubServer(tmp_path_factory.mktemp("hub"))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def fresh(hub, monkeypatch):
    """An empty Hub within reach of this process, and no waits between the client's attempts."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda seconds: None)
    hub.reset()
    yield
    shutil.rmtree(hub.root / "user", ignore_errors=True)


@pytest.fixture
def folder(tmp_path):
    """Files that may be pushed, and such as may not."""
    (tmp_path / "README.md").write_text(CARD)
    (tmp_path / "config.json").write_text("{}")
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00002.safetensors").write_bytes(bytes([number]) * 1000)
    for name in ("training_args.bin", "result.json", "notes.md", "secret.py"):
        (tmp_path / name).write_text("/home/maria/secret")
    for name in ("checkpoint-3/config.json", "checkpoint-3/code.py", f"{CODE}/cache_cache.py", f"{CODE}/notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    return tmp_path


def push(hub, folder, repo_id=NAME, token=WRITE, private=False, update=False) -> str:
    return upload.publish(HfApi(hub.url, token), folder, repo_id, private, update, "a model")


def refused(hub, folder, **options) -> str:
    with pytest.raises(UserError) as error:
        push(hub, folder, **options)
    return str(error.value)


def test_one_commit_of_what_may_be_pushed(hub, folder):
    address = push(hub, folder, private=True)
    repository = hub.repository(NAME)
    assert address == f"{hub.url}/{NAME}/commit/{repository.state['heads']['main']}" and repository.state["private"]
    assert len(repository.state["commits"]) == 2  # that of the Hub, and one
    weights = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(repository.files()) == [".gitattributes", "README.md", "config.json", f"{CODE}/cache_cache.py", *weights]
    assert all(repository.read(name) == (folder / name).read_bytes() for name in ("README.md", *weights))


def test_a_new_version_takes_the_place_of_the_old_one(hub, folder):
    push(hub, folder)
    repository, first = hub.repository(NAME), hub.repository(NAME).files()
    older = ("hf_infini_0123abcd_cache.py", "hf_infini_0123abcd/cache_cache.py", "needs_hf_infini.py")
    extra = {name: repository.keep(b"x") for name in ("LICENSE", "cache.py", *older)}
    repository.commit("main", "by hand", first | extra)
    assert "it exists: give --update" in refused(hub, folder)
    assert "it is public" in refused(hub, folder, update=True, private=True)
    (folder / "model-00002-of-00002.safetensors").unlink()
    push(hub, folder, update=True)
    left = {name: entry for name, entry in first.items() if "00002-of" not in name}
    assert hub.repository(NAME).files() == left | {name: extra[name] for name in ("LICENSE", "cache.py")}


def test_refusals_leave_nothing(hub, folder, monkeypatch):
    assert "there is no such repository" in refused(hub, folder, update=True)
    assert "rights to write for user" in refused(hub, folder, token=READ)
    assert "Invalid" in refused(hub, folder, token="hf_nobody")
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
    assert "hf auth login" in refused(hub, folder, token=None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "offline mode is enabled" in refused(hub, folder)
    assert not hub.has(NAME)


@pytest.mark.parametrize("request_refused", ["/repos/create", "/commit/"])
def test_a_refused_push_publishes_nothing_and_goes_on(hub, folder, request_refused):
    hub.refuse = [(request_refused, 403)]
    message = refused(hub, folder)
    assert "refused by order" in message and "nothing was published; the same command goes on" in message
    assert not hub.has(NAME) or len(hub.repository(NAME).state["commits"]) == 1  # that of the Hub
    hub.refuse = []
    push(hub, folder, update=hub.has(NAME))
    assert "README.md" in hub.repository(NAME).files()


def test_a_repository_that_was_there_is_left_alone(hub, folder):
    push(hub, folder)
    state = hub.repository(NAME).state
    (folder / "config.json").write_text('{"a": 1}')
    hub.refuse = [("/commit/", 412)]
    assert "the same command goes on" in refused(hub, folder, update=True)
    assert hub.repository(NAME).state == state
