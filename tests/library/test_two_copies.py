"""Two copies of the code in one process: a model loaded by the code beside its weights, and another
version's."""

import os
import subprocess
import sys

import pytest

from decoders import decoder
from hf_infini import patch_model
from models import infini_gpt2

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
    models = infini_gpt2(), patch_model(decoder("llama"), segment_length=8)
    for model in models:
        folder = tmp_path / model.config.model_type
        model.save_pretrained(folder / "trusted", save_code=True)
        model.save_pretrained(folder / "other", save_code=True)
        # as another version's
        config, (code,) = folder / "other" / "config.json", (folder / "other").glob("hf_infini_*")
        config.write_text(config.read_text().replace(code.name, "hf_infini_0badc0de"))
        for file in code.glob("*.py"):
            file.write_text(
                file.read_text() + f"\nopen({str(folder / 'other' / 'ran')!r}, 'w').close()\n"
            )
        code.rename(code.with_name("hf_infini_0badc0de"))
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-c",
            TRUST,
            *(tmp_path / model.config.model_type for model in models),
        ],
        env=os.environ | {"HF_HOME": str(tmp_path / "home")},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
