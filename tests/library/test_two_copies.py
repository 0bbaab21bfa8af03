"""Two copies of the code in one process: a model loaded by the code beside its weights, and the package imported later."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_infini
from decoders import decoder
from hf_infini import patch_model
from models import causal_mha, infini_gpt2

SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM

folders = sys.argv[1:]
loaded = [AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True) for folder in folders]
assert all(type(model).__module__.startswith("transformers_modules.") for model in loaded)
import hf_infini
from hf_infini.compat.cache_name import CACHE


def check(folder, model):
    own = AutoModelForCausalLM.from_pretrained(folder)
    assert type(own).__module__.startswith("hf_infini.")
    ids = torch.arange(1, 31)[None]
    with torch.no_grad():
        caches = [each(ids, use_cache=True).past_key_values for each in (model, own)]
    module = {each: type(cache).__module__ for each, cache in zip((model, own), caches)}
    assert module[own] == "hf_infini.cache.cache" != module[model]
    for given, cache in ((model, caches[1]), (own, caches[0]), (model, type("Mine", (type(caches[1]),), {})(own.config))):
        calls = {"forward": lambda: given(ids[:, :3], past_key_values=cache)}
        calls |= {f"generate from {n}": lambda n=n: given.generate(ids[:, :n], past_key_values=cache) for n in (3, 30, 31)}
        for name, call in calls.items():
            try:
                call()
            except ValueError as error:
                message = str(error)
                assert message.startswith(f"{CACHE} is an InfiniCache of another copy of the code"), (name, message)
                assert f"go on with the output's {CACHE};" in message, message
                other = module[own if given is model else model]
                assert f"the cache's class is of {other}, this model's of {module[given]}." in message, message
                assert f"by the model's class, sys.modules['{module[given]}'].InfiniCache" in message, message
            else:
                raise AssertionError(name)

    # What the message says how to get: by the model's class, out of a file that the other copy wrote
    caches[1].save_pretrained(folder + "_memory", own)
    right = sys.modules[module[model]].InfiniCache.from_pretrained(folder + "_memory", model)
    with torch.no_grad():
        logits = [each(ids[:, :7], past_key_values=cache).logits for each, cache in ((model, right), (own, caches[1]))]
    assert torch.equal(*logits)
    again = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)  # the package is imported
    assert type(again) is type(own)


for folder, model in zip(folders, loaded):
    check(folder, model)
"""


@pytest.mark.slow
def test_a_cache_of_the_other_copy_is_refused_with_where_each_is_from(tmp_path):
    models = infini_gpt2(), causal_mha(attention="infini", segment_length=8), patch_model(decoder("llama"), segment_length=8)
    folders = [str(tmp_path / model.config.model_type) for model in models]
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder, save_code=True)
    settings = {"PYTHONPATH": str(Path(hf_infini.__file__).parent.parent), "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *folders], env=os.environ | settings, cwd=tmp_path, stdin=subprocess.DEVNULL,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


TRUST = """
import os, sys
from transformers import AutoModelForCausalLM

for folder in sys.argv[1:]:
    trusted, other = folder + "/trusted", folder + "/other"
    model = AutoModelForCausalLM.from_pretrained(trusted, trust_remote_code=True)
    for again in (trusted, other):
        for trust in ({}, {"trust_remote_code": False}):
            try:
                AutoModelForCausalLM.from_pretrained(again, **trust)
            except ValueError as error:
                assert "contains custom code which must be executed" in str(error), error
            else:
                raise AssertionError((again, trust))
    assert not os.path.exists(other + "/ran")
    second = AutoModelForCausalLM.from_pretrained(other, trust_remote_code=True)
    assert os.path.exists(other + "/ran") and "hf_infini_0badc0de" in type(second).__module__
    assert type(model) is not type(second) and type(model).__name__ == type(second).__name__
"""


@pytest.mark.slow
def test_code_that_was_trusted_once_stands_for_no_other_load(tmp_path):
    """Each folder is asked for again, and runs its own code."""
    models = infini_gpt2(), causal_mha(attention="infini", segment_length=8), patch_model(decoder("llama"), segment_length=8)
    for model in models:
        folder = tmp_path / model.config.model_type
        model.save_pretrained(folder / "trusted", save_code=True)
        model.save_pretrained(folder / "other", save_code=True)
        config, (code,) = folder / "other" / "config.json", (folder / "other").glob("hf_infini_*")  # as another version's
        config.write_text(config.read_text().replace(code.name, "hf_infini_0badc0de"))
        for file in code.glob("*.py"):
            file.write_text(file.read_text() + f"\nopen({str(folder / 'other' / 'ran')!r}, 'w').close()\n")
        code.rename(code.with_name("hf_infini_0badc0de"))
    done = subprocess.run(
        [sys.executable, "-I", "-c", TRUST, *(tmp_path / model.config.model_type for model in models)],
        env=os.environ | {"HF_HOME": str(tmp_path / "home")}, cwd=tmp_path, stdin=subprocess.DEVNULL,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
