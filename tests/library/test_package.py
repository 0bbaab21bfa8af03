"""What is installed: the library without the recipes, which works with its requirements only and
says what else it needs."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_wheel_holds_the_library_only(tmp_path):
    """All of the library's files, modules and what they read, and nothing else."""
    shutil.copytree(
        ROOT / "hf_infini", tmp_path / "hf_infini", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for name in (
        "pyproject.toml",
        PROJECT["project"]["readme"],
        *PROJECT["project"]["license-files"],
    ):
        shutil.copy(ROOT / name, tmp_path)
    build = [
        sys.executable,
        "-c",
        "from setuptools.build_meta import build_wheel; build_wheel('.')",
    ]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    [wheel] = tmp_path.glob("*.whl")
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [
        path.relative_to(tmp_path) for path in (tmp_path / "hf_infini").rglob("*") if path.is_file()
    ]
    assert found == {path.as_posix() for path in files}
    assert {path.suffix for path in files} == {".py", ".html", ".css", ".js", ".yaml", ".txt"}
    rooms = {"cache", "compat", "layers", "models", "ops", "tools"}
    assert {path.parts[1] for path in files if len(path.parts) > 2} == rooms


def test_security_lists_every_dependency_with_its_extra():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8").partition("## Dependencies")[2]
    # behind the heading
    rows = re.findall(r"^\| ([^|]+) \| ([^|]*)\| [^|]+ \|$", text, re.MULTILINE)[1:]
    listed = {
        (name, extra)
        for names, extras in rows
        for name in names.split(", ")
        for extra in extras.strip().split(", ")
    }
    declared = PROJECT["project"]["optional-dependencies"] | {
        "": PROJECT["project"]["dependencies"]
    }
    declared["build"] = PROJECT["build-system"]["requires"]
    wanted = {
        (Requirement(entry).name, extra) for extra, entries in declared.items() for entry in entries
    }
    assert listed - {("---", "---")} == {
        (name, extra) for name, extra in wanted if name != PROJECT["project"]["name"]
    }


def required(names: list[str]) -> set[str]:
    """The distributions that pip installs for these requirements, by their normalised names."""
    found, left = set(), list(map(Requirement, names))
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name not in found and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            found.add(name)
            left += map(Requirement, importlib.metadata.requires(name) or [])
    return found


ALONE = """
import importlib, sys
sys.path.append(sys.argv[1])
import torch, hf_infini
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

for name in ("options", "ops.naive", "tools.inspection.page", "tools.spans", "tools.training"):
    importlib.import_module(f"hf_infini.{name}")
for missing in ("accelerate", "datasets", "evaluate", "pandas"):
    assert importlib.util.find_spec(missing) is None, missing
sizes = dict(vocab_size=9, n_positions=16, n_embd=8, n_layer=1, n_head=2)
plain = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
model = hf_infini.patch_model(plain, segment_length=4, position_encoding="segment")
ids = torch.arange(1, 9)[None]
hf_infini.inspect_attention(model, ids)
assert len(hf_infini.tools.training.parameter_groups(model, 1e-3, 1e-2, 0.1)) == 3
model(ids, labels=ids).loss.backward()
model.save_pretrained(sys.argv[2])
again = AutoModelForCausalLM.from_pretrained(sys.argv[2]).eval()
assert again.generate(ids, max_new_tokens=20, do_sample=False).shape[1] > 8
"""


@pytest.mark.slow
def test_a_model_works_with_the_requirements_only(tmp_path):
    """In a process that has links to what `pip install hf-infini` brings, and to the library."""
    core = tmp_path / "core"
    core.mkdir()
    for name in required(PROJECT["project"]["dependencies"]):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (core / top).exists():
                (core / top).symlink_to(distribution.locate_file(top))
    (core / "hf_infini").symlink_to(ROOT / "hf_infini")
    command = [sys.executable, "-I", "-S", "-c", ALONE, core, tmp_path / "model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
