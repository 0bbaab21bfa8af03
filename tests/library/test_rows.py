"""Rows as inputs: what is predicted, documents kept apart, and what a model trained on them makes of it."""


import pytest
import torch
from transformers import TrainingArguments

from decoders import decoder
from hf_infini.tools.metrics import stream_losses
from hf_infini.tools.rows import RowReader, document_positions
from hf_infini.tools.training import COLUMNS_OF_THE_HEAD, PerplexityTrainer
from models import causal_mha, gpt2, infini_gpt2, token_ids

FLOAT32 = 1e-4  # of logits of size 1 to 10, added up in another order
END = 0
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def packed_ids(seed=0):
    """Two rows of 50 tokens; documents end with END, at different places, one of them has END alone."""
    ids = token_ids(2, 50, seed)
    ids[0, [10, 11, 30]] = END
    ids[1, [0, 24, 49]] = END
    return ids


def test_positions_by_hand():
    ids = torch.tensor([[5, 6, 0, 7, 0, 0, 8], [0, 5, 5, 5, 5, 5, 0]])
    assert document_positions(ids, 0).tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5]]


def test_reader_masks_labels_and_keeps_those_of_the_rows():
    ids = torch.tensor([[5, 0, 6, 2, 7]])
    batch = RowReader([2, 0])({"input_ids": ids})
    assert batch["labels"].tolist() == [[5, -100, 6, -100, 7]] and torch.equal(batch["input_ids"], ids)
    assert "position_ids" not in batch
    batch = RowReader([2], end_of_text=0).collate(
        [{"input_ids": ids[0].tolist(), "labels": [-100, 0, 6, 2, -100]}, {"input_ids": ids[0], "labels": ids[0]}]
    )
    assert batch["labels"].tolist() == [[-100, 0, 6, -100, -100], [5, 0, 6, -100, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]] * 2


def test_evaluation_counts_what_the_reader_leaves_and_streams_alike():
    model, ids = infini_gpt2(), packed_ids()
    reader = RowReader([END], end_of_text=END)
    batch = reader({"input_ids": ids})
    logits = model(ids, position_ids=batch["position_ids"]).logits[:, :-1].detach()
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    assert int((batch["labels"][:, 1:] != -100).sum()) == int((ids[:, 1:] != END).sum()) == 98 - 5
    pieces = [losses for _, losses, _ in stream_losses(model, **batch, chunk=7)]
    torch.testing.assert_close(torch.cat(pieces, 1), losses, rtol=FLOAT32, atol=FLOAT32)


def gemma2(**options):
    """With a soft cap of its logits."""
    return decoder("gemma2")


@pytest.mark.parametrize("make", [gpt2, infini_gpt2, causal_mha, gemma2])
@pytest.mark.parametrize("items", [None, 57], ids=["mean", "share of a step"])
def test_logits_of_the_learned_places_give_the_same_loss_and_gradients(make, items, tmp_path):
    model = make() if make is causal_mha else make(**NO_DROPOUT)
    model.loss_type = "ForCausalLM"
    trainer = PerplexityTrainer(model=model.train(), args=TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    ids = packed_ids()
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.8, -100)
    batch = RowReader([END], END)({"input_ids": ids, "labels": labels})
    items = None if items is None else torch.tensor(items)
    calls = []
    model.get_output_embeddings().register_forward_hook(lambda module, given, output: calls.append(output.shape[:2]))
    losses = [function(model, batch, num_items_in_batch=items) for function in (trainer.compute_loss, super_loss(trainer))]
    assert calls == [(2, COLUMNS_OF_THE_HEAD), (2, 50)]  # and not another number in every batch
    torch.testing.assert_close(*losses, rtol=FLOAT32, atol=0)
    for few, all_places in zip(*(torch.autograd.grad(loss, list(model.parameters())) for loss in losses), strict=True):
        torch.testing.assert_close(few, all_places, rtol=FLOAT32, atol=1e-6 * max(1.0, float(all_places.abs().max())))


def super_loss(trainer):
    return super(PerplexityTrainer, trainer).compute_loss


def test_the_loss_of_learned_places_uses_every_input_and_the_smoothing(tmp_path):
    """A mask among the inputs, and label smoothing, change the loss as they do in the Trainer."""
    ids = token_ids(2, 24)
    labels = ids.clone()
    labels[:, :18] = -100
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    for smoothing, inputs in ((0.0, {"attention_mask": mask}), (0.1, {})):
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", label_smoothing_factor=smoothing)
        trainer = PerplexityTrainer(model=infini_gpt2(**NO_DROPOUT).train(), args=args)
        found = []
        for compute in (trainer.compute_loss, super_loss(trainer)):
            batch = {"input_ids": ids, "labels": labels.clone(), "use_cache": False} | inputs
            found.append(compute(trainer.model, batch))
        torch.testing.assert_close(*found, rtol=FLOAT32, atol=FLOAT32)
