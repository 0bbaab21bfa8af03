"""The copies of the code that a model is saved with: whose names they have, and what happens to
other files."""

import importlib
import json
import os
import subprocess
import sys

import pytest
from transformers import AutoConfig

from hub_files import code_of, config_of, modules_of
from hub_repository import WRITE
from hub_server import HubServer
from models import infini_gpt2


def test_a_registered_subclass_is_saved_with_its_own_file(tmp_path, monkeypatch):
    (tmp_path / "their_model.py").write_text(
        "from hf_infini import InfiniGPT2LMHeadModel\n\n\nclass Their(InfiniGPT2LMHeadModel):\n   "
        " pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    their = importlib.import_module("their_model").Their
    their.register_for_auto_class("AutoModelForCausalLM")
    model = infini_gpt2()
    model.__class__ = their
    model.save_pretrained(tmp_path / "saved", save_code=True)
    assert config_of(tmp_path / "saved")["auto_map"]["AutoModelForCausalLM"] == "their_model.Their"
    assert "their_model.py" in code_of(tmp_path / "saved")


@pytest.mark.parametrize("save_code", [False, True])
def test_no_file_of_the_user_is_overwritten_and_older_code_goes(save_code, tmp_path):
    infini_gpt2().save_pretrained(tmp_path, save_code=save_code)
    code = code_of(tmp_path)
    theirs = {
        name: b"# mine"
        for name in ("cache.py", "hf_infini_notes.py", "hub_code.py", "hf_infini_notes/x.py")
    }
    older = {
        name: b"# older" for name in ("hf_infini_00000000_cache.py", "hf_infini_00000000_gone.py")
    }
    older |= {
        f"hf_infini_00000000/{name}": b"# older"
        for name in ("cache_cache.py", "gone.py")
        if save_code
    }
    damaged = dict.fromkeys(list(code)[:2], b"# not finished")
    for name, text in (theirs | older | damaged).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    infini_gpt2().save_pretrained(tmp_path)  # a folder that has code keeps having it
    assert code_of(tmp_path) == code | theirs


def test_a_configuration_names_no_code_that_is_not_saved_with_it(tmp_path):
    """Nor what older versions saved under other names."""
    old = {
        "AutoModel": "modeling_infini_gpt2.InfiniGPT2Model",
        "AutoTokenizer": ["mine.Tokenizer", None],
    }
    old["AutoModelForMultipleChoice"] = "a/b--hf_infini_00000000_families.X"
    infini_gpt2().save_pretrained(tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    wanted = config_of(tmp_path / "model")["auto_map"]
    config.auto_map |= {"AutoModelForCausalLM": "a/b--hf_infini_00000000/models_families.X"} | old
    config.save_pretrained(tmp_path)
    assert config_of(tmp_path)["auto_map"] == wanted | {"AutoTokenizer": ["mine.Tokenizer", None]}


@pytest.mark.slow
def test_pushed_while_saving_the_code_goes_along(tmp_path):
    hub = HubServer(tmp_path / "hub")
    try:
        change = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": WRITE,
        }
        change |= {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}
        push = (
            "import models; model = models.infini_gpt2()\n"
            "model.save_pretrained('model')\n"
            "model.save_pretrained('model', push_to_hub=True, repo_id='user/model')\n"
            "model.save_pretrained('model', push_to_hub=True, repo_id='user/again')\n"
            "model.config.save_pretrained('config', push_to_hub=True, repo_id='user/config')\n"
            "model.push_to_hub('user/pushed')"
        )
        done = subprocess.run(
            [sys.executable, "-c", push],
            env=os.environ | change,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        for name, folder in (
            ("model", "model"),
            ("again", "model"),
            ("config", "config"),
            ("pushed", "model"),
        ):
            repository = hub.repository(f"user/{name}")
            assert modules_of(tmp_path / folder) and "needs_hf_infini.py" not in repository.files()
            assert code_of(tmp_path / folder).keys() <= repository.files().keys()
            assert (
                json.loads(repository.read("config.json"))["auto_map"]
                == config_of(tmp_path / folder)["auto_map"]
            )
    finally:
        hub.stop()
