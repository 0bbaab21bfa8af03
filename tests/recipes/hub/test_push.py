"""The push recipe against a small Hub on loopback: what arrives, what is refused, what an interruption leaves."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hub.files import plan
from hub_repository import READ, STRANGER, WRITE
from hub_server import HubServer
from running import ROOT, load_recipe, prepared_data, recipe, result, straight_run

write_card, push = load_recipe("write_card"), load_recipe("push")
NAME = "user/infini"
FIGURES = ["figures/infini_gates.png", "figures/infini_loss_curve.png"]
# Runs programs, a JSON line each, so that torch is imported once; the client's waits between its attempts are left out
WORKER = """
import contextlib, io, json, os, sys, time, traceback
import push
time.sleep = lambda seconds: None
answers = sys.stdout
for line in sys.stdin:
    program, sys.argv, os.environ["HF_TOKEN"] = json.loads(line)
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(program, {})
        except SystemExit as stopped:
            status = stopped.code
        except Exception:
            status = traceback.print_exc() or 2
    print(json.dumps([status, out.getvalue(), err.getvalue()]), file=answers, flush=True)
"""
PUSH = "import push; push.main()"
LOAD = """
import sys, torch, hf_infini
from transformers import AutoModelForCausalLM, AutoTokenizer
name, revision, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
ids = tokenizer("To be, or not to be", return_tensors="pt").input_ids
with torch.no_grad():
    torch.save((ids, AutoModelForCausalLM.from_pretrained(name, revision=revision)(ids).logits), out)
"""


@functools.cache
def run_with_card(base):
    """A run of recipes/train.py with a card, and with files that are nobody's business."""
    folder = base / "push" / "trained"
    shutil.copytree(straight_run(base), folder, ignore=shutil.ignore_patterns("checkpoint-*", "evaluation*"))
    (folder / "checkpoint-3").mkdir()
    for name in ("checkpoint-3/optimizer.pt", "training_args.bin", "train.log", ".lock", "notes.txt"):
        (folder / name).write_text("/home/maria/secret")
    options = ["--data", prepared_data(base), "--data_license", "public domain", "--prompt", "To be", "--max_new_tokens", 12]
    write_card.main(list(map(str, ["--run", folder, "--out", folder / "card.md", "--device", "cpu", *options])))
    return folder


@pytest.fixture
def folder(tmp_path_factory, tmp_path):
    return shutil.copytree(run_with_card(tmp_path_factory.getbasetemp()), tmp_path / "runs" / "trained")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    server = HubServer(tmp_path_factory.mktemp("hub"))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def clean(hub):
    """No repository, no faults."""
    hub.reset()
    yield
    for owner in ("user", "group"):
        shutil.rmtree(hub.root / owner, ignore_errors=True)


@pytest.fixture(scope="module")
def environment(hub, tmp_path_factory):
    """Of a process that reaches the server and nothing else of the user's."""
    change = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": WRITE}
    change |= {"HF_HOME": str(tmp_path_factory.mktemp("home")), "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    paths = [str(ROOT / "recipes"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **change, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="module")
def execute(environment):
    """Runs a program in another process: `execute(program, *arguments, token=…)` returns status, output and errors."""
    worker = subprocess.Popen([sys.executable, "-c", WORKER], env=environment, cwd=ROOT, text=True, stdin=-1, stdout=-1)

    def call(program, *arguments, token=WRITE):
        worker.stdin.write(json.dumps([program, ["program", *map(str, arguments)], token]) + "\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())

    yield call
    worker.kill()
    worker.communicate()


@pytest.fixture(scope="module")
def publish(execute):
    """Pushes in another process: `publish(folder, *options, repo_id=…, token=…)`."""

    def call(folder, *options, repo_id=NAME, **token):
        return execute(PUSH, "--run", folder, "--repo_id", repo_id, "--device", "cpu", *options, **token)

    return call


def table(text: str) -> list[list[str]]:
    """The cells of all Markdown tables."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


# --- what arrives -----------------------------------------------------------------------------------------------------


def test_a_model_that_was_pushed_loads_by_its_name(folder, hub, environment, execute, tmp_path):
    command = [*recipe("push"), "--run", folder, "--repo_id", NAME, "--private", "--tag", "v1.0", "--device", "cpu"]
    done = subprocess.run([*map(str, command)], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    repository = hub.repository(NAME)
    assert f"{hub.url}/{NAME}/commit/{repository.state['heads']['main']}, tag v1.0" in done.stdout
    assert repository.state["private"] and repository.state["tags"] == {"v1.0": repository.state["heads"]["main"]}
    assert len(repository.state["commits"]) == 2  # that of the Hub, and one
    assert execute(LOAD, NAME, "v1.0", tmp_path / "out.pt")[0] == 0
    ids, logits = torch.load(tmp_path / "out.pt")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(ids, tokenizer("To be, or not to be", return_tensors="pt").input_ids)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(ids).logits)
    assert any(re.match(f"GET /{NAME}/resolve/.*/model.safetensors", request) for request in hub.requests)

    text = repository.read("README.md").decode()
    assert text == (folder / "README.md").read_text() and f"AutoModelForCausalLM.from_pretrained('{NAME}')" in text
    named = json.loads(repository.read("config.json")).get("auto_map", {})
    modules = {f"{entry.split('.')[0]}.py" for entry in named.values()}
    assert modules <= repository.files().keys() and bool(modules) == ("trust_remote_code=True" in text)
    card, numbers = ModelCard(text), result(folder)
    measured = {entry.metric_type: entry.metric_value for entry in card.data.eval_results}
    assert measured == {name: numbers[name] for name in ("perplexity", "cross_entropy")}
    assert card.data.model_name == "infini" and "public domain" in text
    assert [path for path in repository.files() if path.startswith("figures/")] == FIGURES
    assert all(f"]({path})" in text for path in FIGURES)


def test_a_dry_run_lists_what_a_push_commits(folder, hub, publish):
    status, listed, _ = publish(folder, "--dry_run")
    assert status == 0 and hub.requests == [] and "nothing was sent" in listed
    cells = table(listed)
    stays = next(number for number, row in enumerate(cells) if row[0] == "stays here")
    rows, reasons = cells[2:stays], {row[0]: row[1] for row in cells[stays + 2 :]}
    assert publish(folder)[0] == 0
    repository = hub.repository(NAME)
    committed = {path: entry for path, entry in repository.files().items() if path != ".gitattributes"}
    assert [row[0] for row in rows] == sorted(committed)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", *FIGURES} <= committed.keys()
    for path, stored, digest, size in rows:
        published = next(file for file in plan(folder)[0] if file.path == path)
        assert (stored == "LFS") == committed[path]["lfs"] and size == f"{committed[path]['size']:,}"
        assert published.sha256.startswith(digest) and repository.read(path) == (folder / path).read_bytes()
    left = {*os.listdir(folder)} - {path.split("/")[0] for path in committed}
    assert {name.rstrip("/") for name in reasons} == left and all(reasons.values())
    assert reasons["checkpoint-3/"].startswith("checkpoint") and reasons["train.log"] == "log" and reasons[".lock"] == "lock"
    assert "paths of this machine" in reasons["training_args.bin"] and "paths" in reasons["result.json"]


def test_an_interrupted_push_goes_on(folder, hub, publish):
    hub.drop_from = 2  # of three large files
    status, _, errors = publish(folder, "--tag", "v1")
    assert status == 1 and f"no connection to {hub.url}" in errors and "The same command goes on" in errors
    assert "Traceback" not in errors
    repository = hub.repository(NAME)
    assert len(repository.state["commits"]) == 1 and len(hub.uploads) == 1  # nothing is to be seen there
    hub.drop_from = None
    assert publish(folder, "--tag", "v1")[0] == 0
    large = [entry["oid"] for entry in hub.repository(NAME).files().values() if entry["lfs"]]
    assert len(large) == 3 and sorted(hub.uploads) == sorted(large)  # each of them once
    assert len(hub.repository(NAME).state["commits"]) == 2 and "v1" in hub.repository(NAME).state["tags"]


def test_a_new_version(folder, hub, publish):
    assert publish(folder, "--tag", "v1")[0] == 0
    repository, first = hub.repository(NAME), hub.repository(NAME).files()
    old = ("model-00002-of-00002.safetensors", "figures/old.png", "hf_infini_0123abcd_cache.py")
    extra = {name: repository.keep(b"x") for name in ("LICENSE", "cache.py", *old)}
    repository.commit("main", "by hand", first | extra)
    hub.reset()
    assert publish(folder, "--tag", "v2", "--update")[0] == 0
    repository = hub.repository(NAME)
    assert repository.files() == first | {name: extra[name] for name in ("LICENSE", "cache.py")}  # no part of a model
    assert repository.files("v1") == first and hub.uploads == []
    assert publish(folder, "--tag", "v3", "--update")[0] == 0  # nothing new, but for the tag
    assert hub.repository(NAME).state["tags"]["v3"] == hub.repository(NAME).find("v2")
    assert publish(folder, "--update", "--revision", "next", "--tag", "v4")[0] == 0
    assert sorted(hub.repository(NAME).state["heads"]) == ["main", "next"]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_refusals_leave_nothing(folder, hub, publish, capsys, monkeypatch):
    def refused(*options, **changes) -> str:
        status, _, errors = publish(folder, *options, **changes)
        assert status == 1 and "Traceback" not in errors and not hub.has(changes.get("repo_id", NAME))
        assert hub.uploads == [] and not any("/commit/" in request for request in hub.requests if not hub.refuse)
        return errors

    assert "there is no user/infini on the Hub" in refused("--update")
    assert "the token may only read: make one with write permission" in refused(token=READ)
    assert "the token may write for stranger alone" in refused(token=STRANGER)
    assert "(401: Invalid" in refused(token="hf_nobody") and "hf auth login" in refused(token="hf_nobody")
    assert "no token for the Hub: `hf auth login`" in refused(token="")
    assert "give user/name" in refused(repo_id="infini") and "--repo_id a b/c" in refused(repo_id="a b/c")
    assert "--tag -v: give letters" in refused("--tag=-v") and "are both x" in refused("--tag", "x", "--revision", "x")
    with hub.unreachable():
        assert f"no connection to {hub.url}" in refused()
    # As offline as all tests are
    monkeypatch.setenv("HF_TOKEN", WRITE)
    with pytest.raises(SystemExit):
        push.main(["--run", str(folder), "--repo_id", NAME])
    assert "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set" in capsys.readouterr().err


@pytest.mark.parametrize("request_refused", ["/repos/create", "/preupload/", "/commit/", "/branch/", "/validate-yaml"])
def test_a_repository_that_the_push_made_is_deleted_when_it_fails(folder, hub, publish, request_refused):
    hub.refuse = [(request_refused, 403)]
    status, _, errors = publish(folder, "--revision", "next")
    assert status == 1 and "write permission for user" in errors and not hub.has(NAME)
    assert ("DELETE /api/repos/delete" in hub.requests) == (request_refused != "/repos/create")


def test_a_repository_that_cannot_be_deleted_is_named(folder, hub, publish):
    hub.refuse = [("/commit/", 403), ("DELETE", 403)]
    assert f"the new repository {NAME} is empty and could not be deleted" in publish(folder)[2]


def test_a_repository_that_is_there_is_left_alone(folder, hub, publish):
    assert publish(folder, "--tag", "v1")[0] == 0
    state = hub.repository(NAME).state

    def refused(*options, fault=None) -> str:
        hub.refuse = [fault] if fault else []
        status, _, errors = publish(folder, *options)
        assert status == 1 and hub.repository(NAME).state == state
        return errors

    assert f"{NAME} is on the Hub: --update publishes a new version there" in refused()
    assert f"--tag v1: {NAME} has that tag" in refused("--update", "--tag", "v1")
    assert f"--private: {NAME} is public" in refused("--update", "--private")
    hub.refuse = []
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    assert "(403: refused by order)" in refused("--update", fault=("/commit/", 403))
    assert "the new branch" not in refused("--update", "--revision", "next", fault=("/commit/", 403))
    assert "somebody else has changed it" in refused("--update", fault=("/commit/", 412))
    hub.refuse = [("/tag/", 403)]
    errors = publish(folder, "--update", "--tag", "v2")[2]
    assert "without --tag v2; the same command with --update sets it" in errors
    hub.refuse = []
    assert publish(folder, "--update", "--tag", "v2")[0] == 0 and "v2" in hub.repository(NAME).state["tags"]


# --- what is found before ---------------------------------------------------------------------------------------------


def test_everything_is_found_at_once_and_nothing_sent(folder, hub, publish, monkeypatch):
    config = json.loads((folder / "config.json").read_text())
    config |= {"_name": "/home/maria/runs/x", "auto_map": {"AutoConfig": "configuration_gone.Config"}}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    lines = (folder / "config.json").read_text().splitlines()
    (folder / "generation_config.json").write_text('{\n"a": "hf_' + "x" * 34 + '",\n"b": "https://me:word@host/"\n}')
    (folder / "vocab.txt").symlink_to(folder / "notes.txt")
    weights = load_file(folder / "model.safetensors")
    name, tensor = max(weights.items(), key=lambda item: item[1].numel())
    tensor.view(-1)[3] = float("nan")
    save_file(weights | {"left.over": torch.ones(2)}, folder / "model.safetensors", {"format": "pt", "from": "/mnt/disk/x"})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["new"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    status, _, errors = publish(folder)
    assert status == 1 and hub.requests == []
    number = next(number for number, line in enumerate(lines, start=1) if "maria" in line)
    for message in (
        f"model.safetensors: {name} has 1 of {tensor.numel():,} not finite. Training diverged",
        "model.safetensors: unexpected keys: left.over",
        "tokenizer.json: its ids reach 5,000",
        "config.json: auto_map needs configuration_gone.py, which is not in the folder. Save the model again",
        f"config.json:{number}: a path of this machine (/home/maria/runs/x). Take it out",
        "generation_config.json:2: a Hugging Face token (hf_xxxxx…). Take it out, and revoke it",
        "generation_config.json:3: a password in a URL (https://…)",
        "model.safetensors:1: a path of this machine (/mnt/disk/x)",
        "vocab.txt: it is a symbolic link. Put the file itself there",
    ):
        assert message in errors, errors
    assert "x" * 6 not in errors.replace("hf_xxxxx", "")  # a secret is not spelled out


# --- the Trainer --------------------------------------------------------------------------------------------------


TRAIN = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
import hf_infini
from hf_infini.training import PerplexityTrainer
out = Path(sys.argv[1])
model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
arguments = TrainingArguments(output_dir=str(out), push_to_hub=True, hub_model_id="user/trainer", hub_strategy="end",
                              use_cpu=True, max_steps=1, save_strategy="no", report_to="none", disable_tqdm=True)
trainer = PerplexityTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)
trainer.train()
trainer.push_to_hub()
(out / "README.md").unlink()
trainer.push_to_hub(commit_message="without a card")
trainer.push_to_hub(commit_message="again", license="mit")
"""


def test_the_trainer_keeps_a_card(folder, hub, execute):
    (folder / "card.md").rename(folder / "README.md")
    text = (folder / "README.md").read_bytes()
    status, _, errors = execute(TRAIN, folder)
    assert status == 0, errors
    repository = hub.repository("user/trainer")
    commits = {commit["title"]: oid for oid, commit in repository.state["commits"].items()}
    assert repository.read("README.md", commits["End of training"]) == text
    drafts = [repository.read("README.md", commits[title]).decode() for title in ("without a card", "again")]
    assert all("generated_from_trainer" in draft for draft in drafts)
    assert "license: mit" in drafts[1] and "license: mit" not in drafts[0]  # a draft is no card that is kept
    assert "model.safetensors" in repository.files()
