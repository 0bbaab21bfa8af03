"""Training rows that begin with a memory of other text: what that memory is, and that training with
it resumes."""

import copy
import math
import shutil

import pytest
import torch
from torch.nn import functional as F
from transformers import TrainingArguments

from bad_input import refused
from models import RowsOf, causal_mha, infini_gpt2, token_ids
from running import infini_options, load_recipe, losses, prepared_data, run_recipe, self_options
from training.dilution import Dilution, weigh_memories
from training.trainer import PerplexityTrainer

train = load_recipe("train")

FLOAT64 = 1e-9  # logits of size 1 to 10; thousands of tokens added up in another order
EXP = dict(feature_map="exp", memory_write="learned", memory_conv=2)


@pytest.mark.parametrize(
    "model",
    [
        lambda: infini_gpt2(position_encoding="segment", n_layer=1),
        lambda: causal_mha(
            attention="infini", segment_length=8, position_encoding="none", n_layer=1
        ),
    ],
    ids=["gpt2", "causal_mha"],
)
def test_a_memory_weighs_what_the_text_read_so_often_would(model):
    """One layer, whose keys and values are those of their tokens, and no window that keeps a part
    of the text."""
    model = model().double()
    text, ids = token_ids(2, 32, seed=1), token_ids(2, 30)
    cache = weigh_memories(model(text, use_cache=True).past_key_values, torch.tensor([3.0, 5.0]))
    output = model(ids, past_key_values=cache, use_cache=True).logits
    for row, times in enumerate((3, 5)):
        long = torch.cat([text[row].repeat(times), ids[row]])[None]
        torch.testing.assert_close(
            output[row : row + 1], model(long).logits[:, -30:], rtol=FLOAT64, atol=FLOAT64
        )
    assert not torch.allclose(output, model(torch.cat([text, ids], 1)).logits[:, -30:], atol=1e-3)


def test_with_a_factor_of_one_the_past_is_the_text_and_learns_as_it():
    model, ids = (
        infini_gpt2(position_encoding="segment", local_segments=1, **EXP).double(),
        token_ids(3, 30),
    )
    rows = RowsOf(token_ids(1, 21, seed=1))
    past = Dilution(rows, most=1).past(model, 3, ids.device)
    output = model(ids, past_key_values=past, use_cache=True).logits
    whole = torch.cat([rows.rows.expand(3, -1), ids], 1)
    wanted = model(whole).logits[:, 21:]
    torch.testing.assert_close(output, wanted, rtol=FLOAT64, atol=FLOAT64)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    found, asked = (
        torch.autograd.grad((logits * weights).sum(), parameters) for logits in (output, wanted)
    )
    torch.testing.assert_close(found, asked, rtol=FLOAT64, atol=FLOAT64)


def test_factors_are_drawn_between_one_and_the_most_and_come_again_with_the_seed():
    model, rows = infini_gpt2(position_encoding="segment", n_layer=1), RowsOf(token_ids(1, 16))
    found = []
    model.requires_grad_(False)
    before = Dilution(rows, most=1).past(model, 1, torch.device("cpu")).state.normaliser
    for _ in range(2):
        torch.manual_seed(0)
        normaliser = Dilution(rows, most=100).past(model, 400, torch.device("cpu")).state.normaliser
        found.append((normaliser / before).flatten(1).mean(1))
    assert torch.equal(*found) and 1 <= found[0].min() and found[0].max() <= 100.01
    # Of 400 draws of the logarithm between 0 and log 100, the mean has a standard deviation of 0.07
    assert abs(float(found[0].log().mean()) - math.log(100) / 2) < 0.35


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bf16", "tolerance", "first_learned"), [(False, 1e-4, 35), (True, 0.05, 1)]
)
def test_a_step_with_a_past_has_its_loss_and_moves_every_parameter(
    tmp_path, bf16, tolerance, first_learned
):
    model = infini_gpt2(
        position_encoding="segment",
        local_segments=1,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        **EXP,
    )
    before, text, ids = copy.deepcopy(model), token_ids(1, 24, seed=1), token_ids(2, 40)
    row = {"input_ids": ids, "labels": ids.clone()}
    row["labels"][:, :first_learned] = -100
    rows = [{name: column[number] for name, column in row.items()} for number in range(2)]
    options = {"max_steps": 1, "per_device_train_batch_size": 2, "logging_steps": 1, "bf16": bf16}
    arguments = TrainingArguments(
        output_dir=tmp_path, use_cpu=True, report_to=[], save_strategy="no", **options
    )
    making = {"optimizer_of": lambda model: torch.optim.AdamW(model.parameters(), 1e-3)}
    making["past_of"] = Dilution(RowsOf(text), most=1).past
    trainer = PerplexityTrainer(model, arguments, train_dataset=rows, **making)
    trainer.train()
    whole = torch.cat([text.expand(2, -1), ids], 1)
    logits = before(whole).logits[:, 24:-1]
    wanted = F.cross_entropy(logits.flatten(0, 1), row["labels"][:, 1:].flatten())
    loss = trainer.state.log_history[0]["loss"]
    torch.testing.assert_close(loss, wanted.item(), rtol=tolerance, atol=0)
    old = dict(before.named_parameters())
    assert [
        name for name, parameter in model.named_parameters() if torch.equal(parameter, old[name])
    ] == []


@pytest.mark.slow
def test_a_diluted_run_resumes_as_if_it_had_never_stopped(base, tmp_path):
    data = prepared_data(base)
    options = [*infini_options(data), "--max_steps", 4, "--save_steps", 2]
    options += ["--dilute_with", data, "--dilute_up_to", 8, "--dilute_share", 0.75]
    run_recipe("train", *options, "--out", tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    (tmp_path / "resumed" / "result.json").unlink()
    shutil.rmtree(tmp_path / "resumed" / "checkpoint-4")
    assert "from step 2" in run_recipe("train", *options, "--out", tmp_path / "resumed").stderr
    assert losses(tmp_path / "resumed") == losses(tmp_path / "straight")


def test_what_dilution_cannot_do_is_refused(base, tmp_path, capsys):
    data = prepared_data(base)
    for options, message in (
        (["--dilute_up_to", 8], "--dilute_share do nothing without --dilute_with"),
        (["--dilute_with", data, "--update_rule", "delta"], "--update_rule linear"),
        (["--dilute_with", data, "--attention", "self"], "needs --attention infini"),
        (
            ["--dilute_with", data, "--position_encoding", "learned"],
            "give --position_encoding rope or segment",
        ),
        (
            ["--dilute_with", data, "--separate_documents", "true"],
            "--separate_documents do not go together",
        ),
    ):
        # which has options of a memory
        others = self_options if "self" in options else infini_options
        refused(train.main, [*others(data), *options, "--out", tmp_path / "run"], capsys, message)
