"""Models saved with their code load, in real processes, where nothing but torch, transformers and
what these need is installed, and compute the same bit for bit; those saved without it say what to
install. Where hf_infini is installed, its own classes are used."""

import ast
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import warnings
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)
from transformers.dynamic_module_utils import get_imports

import hf_infini
from decoders import decoder
from hf_infini import (
    CausalMHAForCausalLM,
    InfiniGPT2LMHeadModel,
    patch_model,
    unpatch_model,
)
from hf_infini.models.families import infini_class
from hub_files import code_of, config_of, modules_of
from load_with_code import numbers
from models import causal_mha, gpt2, infini_gpt2, token_ids

PACKAGE = Path(hf_infini.__file__).parent
MEMORY = {
    "memory_conv": 3,
    "memory_write": "learned",
    "update_rule": "delta",
    "feature_map": "exp",
    "local_segments": 1,
}
REPOSITORY = "somebody/infini-gpt2.small"  # neither - nor . may stand in the name of a module
# with sliding layers, with experts, one that drops keywords
FAMILIES = ("gemma2", "qwen3_moe", "stablelm")
SOURCES = (
    "infini_gpt2",
    "inner",
    "trained",
    "causal_mha_infini",
    "repository",
    "published",
    *FAMILIES,
)
PUBLISHED = Path(__file__).parents[2] / "model_cards" / "recall"


def requirements(*names: str) -> dict[str, Distribution]:
    """The installed distributions of these names and, recursively, of what they require, by
    canonical name."""
    found, waiting, asked = {}, [Requirement(name) for name in names], set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if (name, *sorted(wanted.extras)) in asked:
            continue
        asked.add((name, *sorted(wanted.extras)))
        try:
            found[name] = distribution(wanted.name)
        except PackageNotFoundError:
            continue  # this environment does without it, and so can the other
        for requirement in map(Requirement, found[name].requires or []):
            marker = requirement.marker
            if marker is None or any(
                marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)
            ):
                waiting.append(requirement)
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a fresh virtual environment with torch, transformers and what they
    require: links to the same distributions here, so that neither network nor another build of
    torch comes in."""
    root = tmp_path_factory.mktemp("environment")
    venv.EnvBuilder(symlinks=True).create(root)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(root)}))
    for name, installed in requirements("torch", "transformers").items():
        assert installed.files, f"{name} was installed without a list of its files"
        for entry in {file.parts[0] for file in installed.files} - {"..", "__pycache__"}:
            if not (site / entry).exists():  # several distributions share folders such as nvidia
                (site / entry).symlink_to(installed.locate_file(entry))
    return root / "bin" / "python"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The models, by source: where each is saved, and what it computes here."""
    root, ids = tmp_path_factory.mktemp("models"), token_ids(2, 40)
    infini = infini_gpt2(**MEMORY)
    models = {
        "infini_gpt2": infini,
        "inner": infini,
        "trained": patch_model(gpt2(), segment_length=8, layers=[0, 2]),
        "causal_mha_infini": causal_mha(
            **{"attention": "infini", "update_rule": "gated_delta", "segment_length": 8}
        ),
        "repository": infini,
        "published": AutoModelForCausalLM.from_pretrained(PUBLISHED),
    }
    window = {
        "segment_length": 8,
        "local_segments": 1,
        "sink_tokens": 2,
        "kept_tokens": 6,
        "keep_score": "half",
    }
    models |= {name: patch_model(decoder(name), **window) for name in FAMILIES}
    for name, parameter in (
        entry for family in FAMILIES for entry in models[family].named_parameters()
    ):
        if name.endswith("keep_weight"):
            parameter.data.normal_()
    for name in ("infini_gpt2", "causal_mha_infini", *FAMILIES):
        models[name].save_pretrained(root / name, save_code=True)
    # its embedding is the output head, too
    infini.transformer.save_pretrained(root / "inner", save_code=True)
    train(models["trained"], root / "runs")
    shutil.move(root / "runs" / "checkpoint-1", root / "trained")
    shutil.copytree(PUBLISHED, root / "published")
    for name in ("trained", "published"):  # saved without the code, which can be added
        AutoConfig.from_pretrained(root / name).save_pretrained(root / name, save_code=True)
    commit = root / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    shutil.copytree(root / "infini_gpt2", commit / "snapshots" / ("c" * 40))
    (commit / "refs").mkdir()
    (commit / "refs" / "main").write_text("c" * 40)
    places = {name: root / name for name in models} | {"repository": REPOSITORY}
    return {
        name: (places[name], numbers(model.eval(), model.base_model, ids))
        for name, model in models.items()
    }


def train(model, folder) -> None:
    """One step of the Trainer, which leaves checkpoint-1 in the folder."""
    options = TrainingArguments(
        folder, max_steps=1, save_steps=1, use_cpu=True, disable_tqdm=True, report_to="none"
    )
    rows = [{"input_ids": row, "labels": row} for row in token_ids(8, 40)]
    Trainer(model=model, args=options, train_dataset=rows).train()


@pytest.fixture(scope="module")
def load(python, saved, tmp_path_factory):
    """Runs load_with_code.py in the environment; the folder it wrote for each source."""
    home = tmp_path_factory.mktemp("home")
    hub = saved["infini_gpt2"][0].parent / "hub"
    save_file({"ids": token_ids(2, 40)}, home / "ids.safetensors")
    settings = {
        "HF_HOME": str(home),
        "HF_MODULES_CACHE": str(home / "modules"),
        "HF_HUB_CACHE": str(hub),
    }

    def run(sources) -> list[Path]:
        out = tmp_path_factory.mktemp("loaded")
        script = Path(__file__).parents[1] / "helpers" / "load_with_code.py"
        # -I: no folder of this repository is on the path
        command = [python, "-I", script, home / "ids.safetensors", out, *sources]
        done = subprocess.run(
            command,
            env=os.environ | settings,
            cwd=out,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr.decode()
        return [out / str(number) for number in range(len(sources))]

    return run


@pytest.fixture(scope="module")
def loaded(load, saved):
    """By source, the folder with what the environment computed with it and saved again."""
    return dict(zip(saved, load([source for source, _ in saved.values()]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_without_the_package_it_computes_the_same_and_is_saved_the_same(name, saved, loaded):
    wanted, found = saved[name][1], load_file(loaded[name] / "numbers.safetensors")
    assert found.keys() == wanted.keys()
    assert [part for part in wanted if not torch.equal(found[part], wanted[part])] == []
    again = loaded[name] / "again"
    family = "infini_gpt2" if name in ("inner", "trained", "repository", "published") else name
    assert code_of(again) == code_of(saved[family][0])
    assert config_of(again)["auto_map"] == config_of(saved[family][0])["auto_map"]
    if name not in ("repository", "inner"):  # the base model is saved again with a head
        weights = [load_file(folder / "model.safetensors") for folder in (saved[name][0], again)]
        assert weights[0].keys() == weights[1].keys() and all(
            torch.equal(weights[1][n], t) for n, t in weights[0].items()
        )


def test_the_published_model_is_as_this_version_saves_it(tmp_path):
    AutoModelForCausalLM.from_pretrained(PUBLISHED).save_pretrained(tmp_path)
    assert config_of(tmp_path) == config_of(PUBLISHED) and code_of(tmp_path) == code_of(PUBLISHED)
    assert (tmp_path / "model.safetensors").read_bytes() == (
        PUBLISHED / "model.safetensors"
    ).read_bytes()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Folders of models that were saved without their code."""
    models = infini_gpt2(), causal_mha(), patch_model(decoder("llama"), segment_length=8)
    folders = [tmp_path_factory.mktemp(model.config.model_type) for model in models]
    for folder, model in zip(folders, models, strict=True):
        model.save_pretrained(folder)
    return folders


LOAD = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
for folder in sys.argv[1:]:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(config) is type(model.config)
    assert type(model).__module__.startswith("hf_infini."), type(model)
    model.save_pretrained("again")
    print(type(model).__name__)
"""


def run_script(python, script, *folders, home, **settings) -> subprocess.CompletedProcess:
    settings |= {"HF_HOME": str(home), "PYTHONSAFEPATH": "1"}
    command, run = (
        [python, "-c", script, *folders],
        dict(stdin=subprocess.DEVNULL, capture_output=True, text=True),
    )
    return subprocess.run(command, env=os.environ | settings, cwd=home, **run)


def test_a_plain_save_holds_no_code_and_says_what_to_install(plain, python, tmp_path):
    for folder in plain:
        assert code_of(folder).keys() == {"needs_hf_infini.py"} and not modules_of(folder)
        assert {entry.split(".")[0] for entry in config_of(folder)["auto_map"].values()} == {
            "needs_hf_infini"
        }
    done = run_script(python, LOAD, plain[0], home=tmp_path, PYTHONPATH="")
    assert (
        done.returncode
        and "ImportError" in done.stderr
        and "`pip install hf_infini`" in done.stderr
    )


@pytest.mark.slow
def test_a_plain_save_loads_where_the_package_is_installed(plain, tmp_path):
    """By the stub, where nobody has imported it."""
    done = run_script(sys.executable, LOAD, *plain, home=tmp_path, PYTHONPATH=str(PACKAGE.parent))
    assert done.stdout.split() == [
        "InfiniGPT2LMHeadModel",
        "CausalMHAForCausalLM",
        "InfiniLlamaForCausalLM",
    ], done.stderr
    assert code_of(tmp_path / "again") == code_of(plain[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "trust"), [("infini_gpt2", None), ("causal_mha_infini", True), ("qwen3_moe", True)]
)
def test_the_installed_classes_come_first(name, trust, saved, loaded):
    language_model = CausalMHAForCausalLM if name.startswith("causal") else InfiniGPT2LMHeadModel
    if name in FAMILIES:
        language_model = infini_class(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]])
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        for folder in (saved[name][0], loaded[name] / "again"):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                # stdin is closed to a prompt
                model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
                config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
            assert (
                type(model) is language_model
                and type(model.config) is type(config) is language_model.config_class
            )
            assert (
                type(AutoModelForCausalLM.from_config(config, trust_remote_code=trust))
                is language_model
            )
            with torch.no_grad():
                assert torch.equal(model(token_ids(2, 40)).logits, saved[name][1]["logits"])
    finally:
        logger.removeHandler(handler)
    assert records == []
    assert type(AutoModel.from_pretrained(folder, trust_remote_code=trust)) is type(
        model.base_model
    )
    assert not any(module.startswith("transformers_modules") for module in sys.modules)


@pytest.mark.parametrize("name, other", [("infini_gpt2", "scratch"), ("causal_mha_infini", "gpt2")])
def test_only_what_the_model_needs_is_copied(name, other, saved):
    folder = saved[name][0]
    assert set(folder.glob("*.safetensors")) == {folder / "model.safetensors"} and not list(
        folder.glob("*.bin")
    )
    code, modules = code_of(folder), modules_of(folder)
    assert "cache_cache.py" in modules and len(code) == len(modules)
    others = (
        "tools",
        "ops_backends_triton",
        "ops_naive",
        "models_patching",
        "models_adapter.py",
        "models_loading",
    )
    others += (f"models_{other}",)
    assert [module for module in modules if module.startswith(others)] == []
    for file, text in code.items():
        for node in ast.walk(ast.parse(text)):  # only what transformers fetches
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and f"{node.module}.py" in modules, file
    imports = {module for file in code for module in get_imports(folder / file)}
    assert imports - sys.stdlib_module_names <= {
        "torch",
        "transformers",
        "huggingface_hub",
        "safetensors",
    }


@pytest.mark.parametrize(
    ("older", "save_code"), [("nothing", True), ("files", False), ("a folder", False)]
)
def test_a_folder_of_an_older_version_loads_and_is_saved_as_of_this_one(
    older, save_code, saved, tmp_path
):
    """Older versions named no code, or had it beside the weights."""
    source, wanted = saved["causal_mha_infini"]
    old = shutil.copytree(source, tmp_path / "old", ignore=shutil.ignore_patterns("hf_infini_*"))
    config = config_of(source)
    names = {
        auto_class: entry.split(".")[1] for auto_class, entry in config.pop("auto_map").items()
    }
    if older != "nothing":
        module = f"hf_infini_45452fd6{'_' if older == 'files' else '/'}modeling_causal_mha"
        config["auto_map"] = {auto_class: f"{module}.{name}" for auto_class, name in names.items()}
        (old / module).parent.mkdir(exist_ok=True)
        (old / f"{module}.py").write_text("raise RuntimeError")
    (old / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(old)
    assert type(model) is CausalMHAForCausalLM
    with torch.no_grad():
        assert torch.equal(model(token_ids(2, 40)).logits, wanted["logits"])
    for folder in (tmp_path / "new", old):
        model.save_pretrained(folder, save_code=save_code)
        if save_code or older == "a folder" and folder is old:  # which goes on having code
            assert config_of(folder) == config_of(source) and code_of(folder) == code_of(source)
        else:
            assert config_of(folder)["auto_map"] == {
                key: f"needs_hf_infini.{name}" for key, name in names.items()
            }
            assert code_of(folder).keys() == {"needs_hf_infini.py"}


def test_an_unpatched_model_names_no_code(tmp_path):
    model = patch_model(gpt2(), segment_length=8)
    model.save_pretrained(tmp_path / "patched")
    assert code_of(tmp_path / "patched")
    unpatch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "patched")).save_pretrained(
        tmp_path / "loaded"
    )
    unpatch_model(model).save_pretrained(tmp_path / "plain")
    for folder in (tmp_path / "loaded", tmp_path / "plain"):
        assert code_of(folder) == {} and "auto_map" not in config_of(folder)
        assert type(AutoModelForCausalLM.from_pretrained(folder)) is GPT2LMHeadModel
