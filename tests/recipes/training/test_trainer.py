"""The Trainer of train.py: a loss of few logits is that of all, and an evaluation weights by
tokens, as the model plainly does row by row."""

import math
import os

import pytest
import torch
from datasets import Dataset
from torch import distributed
from torch.nn import functional as F
from transformers import TrainingArguments

from decoders import decoder
from models import causal_mha, gpt2, infini_gpt2, token_ids
from ranks import on_ranks
from support.rows import RowReader
from training.trainer import COLUMNS_OF_THE_HEAD, PerplexityTrainer

FLOAT32 = 1e-4  # of logits of size 1 to 10, added up in another order
END = 0
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def packed_ids(rows: int = 2):
    """Rows of 50 tokens; documents end with END, at different places, one of them has END alone,
    one row none."""
    ids = token_ids(rows, 50).clamp(min=1)
    ids[0, [10, 11, 30]] = END
    ids[1, [0, 24, 49]] = END
    return ids


def trainer_of(model, folder, report_to=(), **options) -> PerplexityTrainer:
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        disable_tqdm=True,
        report_to=[*report_to],
        per_device_eval_batch_size=2,
        remove_unused_columns=False,
    )
    return PerplexityTrainer(
        model, arguments, optimizer_of=lambda model: torch.optim.SGD(model.parameters()), **options
    )


def gemma2(**options):
    """With a soft cap of its logits."""
    return decoder("gemma2")


@pytest.mark.parametrize("make", [gpt2, infini_gpt2, causal_mha, gemma2])
@pytest.mark.parametrize("items", [None, 57], ids=["mean", "share of a step"])
def test_logits_of_the_learned_places_give_the_same_loss_and_gradients(make, items, tmp_path):
    model = make() if make is causal_mha else make(**NO_DROPOUT)
    model.loss_type = "ForCausalLM"
    trainer = trainer_of(model.train(), tmp_path)
    ids = packed_ids()
    labels = ids.masked_fill(
        torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.8, -100
    )
    batch = RowReader([END], END)({"input_ids": ids, "labels": labels})
    items = None if items is None else torch.tensor(items)
    calls = []
    model.get_output_embeddings().register_forward_hook(
        lambda module, given, output: calls.append(output.shape[:2])
    )
    plain = super(PerplexityTrainer, trainer).compute_loss
    losses = [
        function(model, batch, num_items_in_batch=items)
        for function in (trainer.compute_loss, plain)
    ]
    assert calls == [(2, COLUMNS_OF_THE_HEAD), (2, 50)]  # and not another number in every batch
    torch.testing.assert_close(*losses, rtol=FLOAT32, atol=0)
    for few, all_places in zip(
        *(torch.autograd.grad(loss, list(model.parameters())) for loss in losses), strict=True
    ):
        torch.testing.assert_close(
            few, all_places, rtol=FLOAT32, atol=1e-6 * max(1.0, float(all_places.abs().max()))
        )


# --- evaluation -----------------------------------------------------------------------------------


def evaluated(make, folder, **options) -> dict:
    """What an evaluation finds as train.py makes it, where END is trained and not judged, on 5 rows
    in batches of 2."""
    rows = Dataset.from_dict({"input_ids": packed_ids(5).tolist()}).with_transform(
        RowReader([END], END)
    )
    return trainer_of(
        make(), folder, eval_dataset=rows, data_collator=RowReader([], END).collate, **options
    ).evaluate()


def read_by_row(make) -> tuple[float, int]:
    """Mean loss of the tokens but END, and their number, each row read alone."""
    model, losses = make(), []
    for row in packed_ids(5):
        batch = RowReader([END], END)({"input_ids": row[None]})
        with torch.no_grad():
            logits = (
                model(row[None], position_ids=batch["position_ids"], use_cache=False)
                .logits[0, :-1]
                .double()
            )
        losses.append(
            F.cross_entropy(logits, batch["labels"][0, 1:], reduction="none")[row[1:] != END]
        )
    assert len({len(each) for each in losses}) > 2  # a mean of means would be another number
    return torch.cat(losses).mean().item(), sum(map(len, losses))


@pytest.mark.parametrize("make", [gpt2, infini_gpt2])
def test_an_evaluation_weights_by_tokens(make, tmp_path):
    (cross_entropy, tokens), found = read_by_row(make), evaluated(make, tmp_path)
    assert found["eval_tokens"] == tokens == 5 * 49 - 5
    assert (
        found["eval_loss"] == found["eval_cross_entropy"] == pytest.approx(cross_entropy, rel=1e-5)
    )
    assert found["eval_perplexity"] == pytest.approx(math.exp(cross_entropy), rel=1e-4)
    assert not any("gates" in name for name in found)


def test_trackers_receive_the_gates(tmp_path):
    found = evaluated(infini_gpt2, tmp_path, report_to=["tensorboard"])
    gates = [
        found[f"eval_gates/layer_{layer}_head_{head}"] for layer in range(3) for head in range(4)
    ]
    assert gates == pytest.approx([*torch.linspace(-1, 1, 4).sigmoid().tolist()] * 3, abs=1e-5)


def test_rows_without_a_token_that_counts(tmp_path):
    rows = [{"input_ids": torch.tensor([5, END])}]
    with pytest.raises(ValueError, match="no token was predicted"):
        trainer_of(
            infini_gpt2(), tmp_path, eval_dataset=rows, data_collator=RowReader([END]).collate
        ).evaluate()


def evaluate_on_rank(folder) -> dict:
    rank, size = str(distributed.get_rank()), str(distributed.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ["MASTER_ADDR"] = "localhost"  # only looked at
    return evaluated(infini_gpt2, folder)


@pytest.mark.slow
def test_two_processes_count_every_row_once(tmp_path):
    cross_entropy, tokens = read_by_row(infini_gpt2)
    for found in on_ranks(evaluate_on_rank, 2, tmp_path):
        assert isinstance(found, dict), found
        assert found["eval_tokens"] == tokens and found["eval_loss"] == pytest.approx(
            cross_entropy, rel=1e-5
        )
