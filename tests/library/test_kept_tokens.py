"""Kept tokens in the attention function: of what has left the window, the best stay visible, and
the memory has the rest."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_update_rules import with_a_choice

import hf_infini
from cases import assert_equals_reference, keeping_case, plain_case, random_cuts, state_before
from hf_infini import infini_attention
from hf_infini.ops.keeping import SCORES
from hf_infini.ops.keeping.choose import shares_of
from hf_infini.ops.recall import recall_score
from hf_infini.ops.state import Tokens
from hf_infini.options import KEEP_SCORES

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM
from cases import assert_equals_reference, keeping_case, random_cuts
from evaluation.caches import BOUNDED, LEARNED
from hf_infini import infini_attention, patch_model
from models import gpt2, token_ids
import compare_caches

for seed in range(30):
    case = keeping_case(seed, keep_score="small_keys")
    cuts = random_cuts(seed, case.query.shape[2])
    assert_equals_reference(case, infini_attention, 1e-9, cuts)  # float64
model, alike = (
    patch_model(gpt2(), segment_length=4, kept_tokens=5, keep_score=score).eval()
    for score in ("small_keys", "key_norm")
)
ids = token_ids(2, 40)
model.save_pretrained(sys.argv[1], save_code=True)
again = AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert torch.equal(alike(ids).logits, model(ids).logits)
    model.config.keep_score = "attention"
    assert not torch.allclose(alike(ids).logits, model(ids).logits, atol=1e-3)
assert "small_keys" in BOUNDED and "small_keys" in compare_caches.OWN
assert "small_keys" not in LEARNED
"""


@pytest.mark.parametrize("seed", range(100))
def test_equals_the_reference_however_the_call_is_cut(seed):
    """Outputs, states and gradients: one call, chunks, single steps; after other tokens, or from
    the start."""
    case = keeping_case(seed)
    cuts = random_cuts(seed, case.query.shape[2])
    assert_equals_reference(
        case, infini_attention, 1e-9, cuts, None if seed % 3 else state_before(case)
    )


@pytest.mark.parametrize("displaced", [False, True])
@pytest.mark.parametrize("update_rule", ["linear", "none"])
@pytest.mark.parametrize("score", KEEP_SCORES)
def test_tokens_from_elsewhere_take_the_kept_places(score, update_rule, displaced):
    """For good, or until others leave the window, as the reference says; another number of them,
    too."""

    def drawn(tokens, seed):
        count = len(SCORES[score].learns)
        learned = {"learned_score": torch.randn(2, 2, tokens, count)} if count else {}
        sizes = dict(local_segments=1, sink_tokens=2, kept_tokens=sum(SCORES[score].portions) + 3)
        options = dict(update_rule=update_rule, keep_score=score)
        return plain_case(tokens=tokens, seed=seed, **sizes, **options, **learned)

    first, rest = drawn(31, 0), drawn(29, 1)
    _, state = first.call(infini_attention)
    state, window = state.detach(), first.window()
    number = torch.tensor([-1, *range(3, window.kept_tokens + 2)])  # one place stays empty
    given = Tokens.kept_in(state, window)._replace(
        key=first.key[:, :, number.clamp(min=0)],
        value=first.value[:, :, number.clamp(min=0)],
        position=number.expand(2, 2, -1).unsqueeze(-1),
        score=recall_score(torch.arange(len(number)), displaced)
        .double()
        .view(1, 1, -1, 1)
        .repeat(2, 2, 1, SCORES[score].count),
    )
    left, state = state.tokens_left(), given.instead(state, window)
    assert torch.equal(state.tokens_left(), left)
    assert_equals_reference(rest, infini_attention, 1e-9, [4, 5], state)  # float64
    _, after = rest.call(infini_attention, cuts=[4, 5], state=state)
    kept = after.kept_position[0, 0].tolist()
    if not displaced:
        assert kept[:-1] == number[1:].tolist()
    else:
        assert min(kept) > 31 - 2 * window.segment_length  # only what has left since


@pytest.mark.slow
def test_the_score_of_contributing_is_one_file_and_a_name(tmp_path):
    """The file that it shows is that of the library; under another name it is found everywhere."""
    package = shutil.copytree(Path(hf_infini.__file__).parent, tmp_path / "hf_infini")
    section = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## Add a keep score")[2]
    code = re.search("```python\n(.*?)```", section, re.DOTALL)[1]
    assert code == (package / "ops" / "keeping" / "key_norm.py").read_text("utf-8")
    name = "small_keys"
    (package / "ops" / "keeping" / f"{name}.py").write_text(code.replace("key_norm", name))
    with_a_choice(package / "options.py", "KeepScore", name)
    path = [str(tmp_path), str(ROOT / "tests" / "helpers"), str(ROOT / "recipes")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "saved"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_scores_share_all_places():
    half, two = (SCORES[name] for name in ("half", "two_learned"))
    assert (shares_of(half, 5), shares_of(half, 1)) == ([3, 2], [1, 0])
    assert (shares_of(two, 252), shares_of(two, 7), shares_of(two, 3)) == (
        [189, 63],
        [6, 1],
        [3, 0],
    )
    for score in SCORES.values():
        assert all(sum(shares_of(score, places)) == places for places in range(40))
        assert len(shares_of(score, 9)) == score.count
