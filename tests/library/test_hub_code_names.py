"""The copies of the code that a model is saved with: whose names they have, and what happens to other files."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, dynamic_module_utils

import hf_infini
from hf_infini import InfiniGPT2LMHeadModel
from hf_infini.compat import hub_code
from hub_files import code_of, config_of, modules_of
from hub_repository import WRITE
from hub_server import HubServer
from models import infini_gpt2

PACKAGE = Path(hf_infini.__file__).parent


def test_a_subclass_is_not_taken_for_the_class(tmp_path):
    """Its code is in another file, which need not be fit to be copied."""

    class Other(InfiniGPT2LMHeadModel):
        pass

    model = infini_gpt2()
    model.__class__ = Other
    model.save_pretrained(tmp_path)
    assert config_of(tmp_path)["auto_map"].keys() == {"AutoConfig"}


@pytest.mark.parametrize("save_code", [False, True])
def test_a_registered_subclass_is_saved_with_its_own_file(save_code, tmp_path, monkeypatch):
    (tmp_path / "their_model.py").write_text(
        "from hf_infini import InfiniGPT2LMHeadModel\n\n\nclass Their(InfiniGPT2LMHeadModel):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    their = importlib.import_module("their_model").Their
    their.register_for_auto_class("AutoModelForCausalLM")
    model = infini_gpt2()
    model.__class__ = their
    model.save_pretrained(tmp_path / "saved", save_code=save_code)
    assert config_of(tmp_path / "saved")["auto_map"].keys() == {"AutoConfig", "AutoModelForCausalLM"}
    assert config_of(tmp_path / "saved")["auto_map"]["AutoModelForCausalLM"] == "their_model.Their"
    assert "their_model.py" in code_of(tmp_path / "saved")


@pytest.mark.parametrize("save_code", [False, True])
def test_no_file_of_the_user_is_overwritten_and_older_code_goes(save_code, tmp_path):
    infini_gpt2().save_pretrained(tmp_path, save_code=save_code)
    code = code_of(tmp_path)
    theirs = {name: b"# mine" for name in ("cache.py", "hf_infini_notes.py", "hub_code.py", "hf_infini_notes/x.py")}
    older = {name: b"# older" for name in ("hf_infini_00000000_cache.py", "hf_infini_00000000_gone.py")}
    older |= {f"hf_infini_00000000/{name}": b"# older" for name in ("cache_cache.py", "gone.py") if save_code}
    damaged = dict.fromkeys(list(code)[:2], b"# not finished")
    for name, text in (theirs | older | damaged).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    infini_gpt2().save_pretrained(tmp_path)  # a folder that has code keeps having it
    assert code_of(tmp_path) == code | theirs


def test_a_configuration_names_no_code_that_is_not_saved_with_it(tmp_path):
    """Nor what older versions saved under other names."""
    old = {"AutoModel": "modeling_infini_gpt2.InfiniGPT2Model", "AutoTokenizer": ["mine.Tokenizer", None]}
    old["AutoModelForMultipleChoice"] = "a/b--hf_infini_00000000_families.X"
    infini_gpt2().save_pretrained(tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    wanted = config_of(tmp_path / "model")["auto_map"]
    config.auto_map |= {"AutoModelForCausalLM": "a/b--hf_infini_00000000/models_families.X"} | old
    config.save_pretrained(tmp_path)
    assert config_of(tmp_path)["auto_map"] == wanted | {"AutoTokenizer": ["mine.Tokenizer", None]}


@pytest.mark.slow
def test_two_versions_of_the_code_in_one_process(tmp_path):
    """In folders of the same name, with the same configuration module: each model has its own version's classes."""
    folders = [tmp_path / version / "model" for version in ("one", "two")]
    infini_gpt2().save_pretrained(folders[0], save_code=True)
    package = shutil.copytree(PACKAGE, tmp_path / "changed" / "hf_infini")
    with (package / "layers" / "memory_layer.py").open("a") as file:
        file.write("\n\nGate.version = 2\n")
    save = "import sys, hf_infini, models; models.infini_gpt2().save_pretrained(sys.argv[1], save_code=True)"
    path = os.pathsep.join([str(package.parent), str(Path(__file__).parents[1] / "helpers")])
    run = dict(cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    done = subprocess.run([sys.executable, "-c", save, folders[1]], env=os.environ | {"PYTHONPATH": path}, **run)
    assert done.returncode == 0, done.stderr
    load = (
        "import sys, transformers\n"
        "for folder in sys.argv[1:]:\n"
        "    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)\n"
        "    print(getattr(model.transformer.h[0].attn.gate, 'version', 1))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", load, *folders], env=os.environ | {"HF_HOME": str(tmp_path)}, **run)
    assert done.stdout == "1\n2\n", done.stderr


@pytest.mark.slow
def test_pushed_while_saving_the_code_goes_along(tmp_path):
    hub = HubServer(tmp_path / "hub")
    try:
        change = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": WRITE}
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
            [sys.executable, "-c", push], env=os.environ | change, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        for name, folder in (("model", "model"), ("again", "model"), ("config", "config"), ("pushed", "model")):
            repository = hub.repository(f"user/{name}")
            assert modules_of(tmp_path / folder) and "needs_hf_infini.py" not in repository.files()
            assert code_of(tmp_path / folder).keys() <= repository.files().keys()
            assert json.loads(repository.read("config.json"))["auto_map"] == config_of(tmp_path / folder)["auto_map"]
    finally:
        hub.stop()


TREE = {
    "models/toy.py": """from ..ops.rules import value_of


class Toy:
    found = [value_of(name) for name in ("one", "two")]
""",
    "ops/rules/__init__.py": """from importlib import import_module


def value_of(name):
    return import_module(f"{__name__}.{name}").VALUE
""",
    "ops/rules/one.py": "from ..units import TEN\n\nVALUE = TEN + 1\n",
    "ops/rules/two.py": "def two():\n    from ...options import UNIT\n\n    return 2 * UNIT\n\n\nVALUE = two()\n",
    "ops/units.py": "TEN = 10\n",
    "options.py": "UNIT = 1\n",
    "tools/other.py": "from ..models.toy import Toy\n",
}


def test_modules_that_a_package_imports_by_name_travel(tmp_path, monkeypatch):
    """And are found there: the copies have no packages."""
    for name, text in TREE.items():
        file = tmp_path / "tree" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(hub_code, "ROOT", tmp_path / "tree")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder, files = hub_code.code_of("models.toy")
    modules = ("models_toy", "ops_rules", "ops_rules_one", "ops_rules_two", "ops_units", "options")
    assert sorted(files) == [f"{name}.py" for name in modules]
    (tmp_path / folder).mkdir()
    for name, text in files.items():
        (tmp_path / folder / name).write_text(text)
    toy = dynamic_module_utils.get_class_from_dynamic_module(f"{folder}/models_toy.Toy", tmp_path)
    assert toy.found == [11, 2]
