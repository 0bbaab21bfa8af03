"""A new update rule is one file and one name: that of CONTRIBUTING.md is added to a copy of the
library. Backends."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Barrier, Thread, current_thread

import pytest
import torch

import hf_infini
from cases import random_case
from hf_infini import backend_of, infini_attention, patch_model
from hf_infini.ops.backends import BACKENDS, forced_backend
from hf_infini.ops.backends.grid import attend_grid
from models import gpt2

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM
from cases import assert_equals_reference, random_case, random_cuts
from benchmarks.contestants import CONTESTANTS
from hf_infini import infini_attention, patch_model
from models import gpt2, token_ids
import mqar

torch.manual_seed(0)
for seed in range(30):
    case = random_case(seed, torch.float64, update_rule="squashed")
    cuts = random_cuts(seed, case.query.shape[2])
    assert_equals_reference(case, infini_attention, 1e-9, cuts)  # float64
model = patch_model(gpt2(), segment_length=8, update_rule="squashed", gate_init=1.0)
ids = token_ids(2, 40)
model(ids, labels=ids).loss.backward()
model.save_pretrained(sys.argv[1], save_code=True)
again = AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    linear = patch_model(gpt2(), segment_length=8, gate_init=1.0).eval()
    linear.load_state_dict(model.state_dict())
    assert not torch.allclose(linear(ids).logits, model(ids).logits, atol=1e-3)
assert "squashed+conv" in mqar.MIXERS and "infini-squashed" in CONTESTANTS
"""


def with_a_choice(options: Path, kind: str, name: str) -> None:
    """Adds a name to one of the choices of options.py, in place."""
    text, count = re.subn(
        rf"^({kind} = Literal\[.*?)(?=,?\s*\]$)",
        rf'\1, "{name}"',
        options.read_text("utf-8"),
        count=1,
        flags=re.MULTILINE | re.DOTALL,
    )
    assert count, f"{options} has no choices {kind}"
    options.write_text(text, "utf-8")


@pytest.mark.slow
def test_the_rule_of_contributing_is_one_file_and_a_name(tmp_path):
    package = shutil.copytree(Path(hf_infini.__file__).parent, tmp_path / "hf_infini")
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = page.partition("## Add an update rule")[2]
    code = re.search("```python\n(.*?)```", section, re.DOTALL)
    (package / "ops" / "rules" / "squashed.py").write_text(code[1])
    with_a_choice(package / "options.py", "UpdateRule", "squashed")
    path = [str(tmp_path), str(ROOT / "tests" / "helpers"), str(ROOT / "recipes")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "saved"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_backend_of_a_call_can_be_seen_and_forced():
    reason = (
        "triton: not on a CUDA device; step: not one token for every row; grid: plain torch, "
        "in a grid of segments"
    )
    found = backend_of(patch_model(gpt2(n_layer=2), segment_length=8))
    assert found == {f"transformer.h.{number}.attn": reason for number in (0, 1)}
    with pytest.raises(ValueError, match="a GPT2LMHeadModel has no layer with a memory"):
        backend_of(gpt2())
    with forced_backend("triton"), pytest.raises(ValueError, match="triton: not on a CUDA device"):
        patch_model(gpt2(n_layer=2), segment_length=8)(torch.arange(9)[None])
    case = random_case(0, segment_length=4)
    given = (case.query, case.key, case.value, case.gate, case.segment_length)
    with forced_backend("grid"):
        torch.testing.assert_close(
            infini_attention(*given), infini_attention(*given), rtol=0, atol=0
        )
    for name in ("step", "none"):
        with (
            forced_backend(name),
            pytest.raises(ValueError, match=f"no backend of {', '.join(BACKENDS)}"),
        ):
            infini_attention(*given)


def test_a_backend_is_forced_in_one_thread_and_not_in_another():
    case = random_case(0, segment_length=4)
    given = (case.query, case.key, case.value, case.gate, case.segment_length)
    wanted, seen, opened, done = infini_attention(*given), [], Barrier(2), Barrier(2)

    def tool(call):
        seen.append(current_thread())
        return attend_grid(call)

    def observe():
        with forced_backend(tool):
            opened.wait(30)
            infini_attention(*given)
            done.wait(30)

    thread = Thread(target=observe)
    thread.start()
    opened.wait(30)
    assert torch.equal(infini_attention(*given), wanted)
    with forced_backend("step"), pytest.raises(ValueError, match="step: not one token"):
        infini_attention(*given)
    done.wait(30)
    thread.join()
    assert seen == [thread]


def test_a_backend_is_forced_in_a_compiled_function():
    case, seen = random_case(0, segment_length=4), []
    given = (case.query, case.key, case.value, case.gate, case.segment_length)

    def tool(call):
        seen.append(call)
        return attend_grid(call)

    compiled = torch.compile(lambda: infini_attention(*given), backend="eager")
    wanted = compiled()
    with forced_backend(tool):
        assert torch.equal(compiled(), wanted)
    assert torch.equal(compiled(), wanted) and len(seen) == 1
