"""PerplexityTrainer.evaluate reads what the Trainer's does, and weights by tokens: against each text alone."""

import math
import os

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import distributed
from transformers import DataCollatorWithFlattening, TrainingArguments

from hf_infini.tools.metrics import stream_losses
from hf_infini.tools.training import PerplexityTrainer
from models import gpt2, infini_gpt2, token_ids
from ranks import on_ranks

FLOAT32 = 1e-5  # of a mean of losses of size 1 to 10, added up in another order
TEXTS = [token_ids(1, length, seed=length)[0].tolist() for length in (12, 40, 2, 27, 33)]


def pad(side: str, width: int | None = None):
    """A collator of rows of any lengths; `width`: of every batch."""

    def collate(rows):
        size = width or max(len(row["input_ids"]) for row in rows)
        batch = {"input_ids": [], "attention_mask": [], "labels": []}
        for ids in (row["input_ids"] for row in rows):
            filling = [0] * (size - len(ids))
            for name, values, fill in (
                ("input_ids", ids, 7), ("attention_mask", [1] * len(ids), 0), ("labels", ids, -100),
            ):  # fmt: skip
                filled = [fill for _ in filling]
                batch[name].append(values + filled if side == "right" else filled + values)
        return {name: torch.tensor(values) for name, values in batch.items()}

    return collate


def trainer(model, folder, collator=None, report_to=(), **options) -> PerplexityTrainer:
    given = {"report_to": [*report_to], "per_device_eval_batch_size": 2}
    arguments = TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, **given)
    return PerplexityTrainer(model, arguments, data_collator=collator, **options)


def alone(model, texts=TEXTS) -> tuple[float, int]:
    """Mean loss and number of the tokens of texts that are read one by one."""
    sums = [float(losses.double().sum()) for text in texts for *_, losses, _ in stream_losses(model, torch.tensor([text]))]
    tokens = sum(len(text) - 1 for text in texts)
    return sum(sums) / tokens, tokens


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter({"input_ids": text} for text in TEXTS)


ROWS = [{"input_ids": text} for text in TEXTS]
SOURCES = {"list": ROWS, "dataset": Dataset.from_list(ROWS), "stream": Stream()}


@pytest.mark.parametrize(("make", "source"), [(gpt2, "list"), *((infini_gpt2, source) for source in SOURCES)])
def test_ragged_rows_of_every_kind(make, source, tmp_path):
    """Padding on the right, for both models; on the left, for the model whose positions do not count it."""
    model = make()
    cross_entropy, tokens = alone(model)
    for side in ("right", "left") if make is infini_gpt2 else ("right",):
        found = trainer(model, tmp_path, pad(side), eval_dataset=SOURCES[source]).evaluate()
        assert found["eval_tokens"] == tokens == sum(map(len, TEXTS)) - len(TEXTS)
        assert found["eval_loss"] == found["eval_cross_entropy"] == pytest.approx(cross_entropy, rel=FLOAT32)
        assert found["eval_perplexity"] == pytest.approx(math.exp(cross_entropy), rel=1e-4)


def test_padding_that_has_labels_is_not_counted(tmp_path):
    """Rows as they are, without labels or with those of the padding, and a mask of Booleans."""
    model, batch = infini_gpt2(), pad("left", 40)(ROWS)
    cross_entropy, tokens = alone(model)
    for columns in ({}, {"labels": batch["input_ids"].tolist()}):
        mask = batch["attention_mask"].bool().tolist()
        rows = Dataset.from_dict({"input_ids": batch["input_ids"].tolist(), "attention_mask": mask, **columns})
        found = trainer(model, tmp_path, eval_dataset=rows).evaluate()
        assert found["eval_tokens"] == tokens and found["eval_loss"] == pytest.approx(cross_entropy, rel=FLOAT32)


def test_packed_documents_and_labels_that_do_not_count(tmp_path):
    """One row, positions that begin again, no label at a document's first token."""
    model = infini_gpt2()
    found = trainer(model, tmp_path, DataCollatorWithFlattening(), eval_dataset=ROWS).evaluate()
    cross_entropy, tokens = alone(model)
    assert found["eval_tokens"] == tokens and found["eval_loss"] == pytest.approx(cross_entropy, rel=FLOAT32)


def test_several_sets_metrics_of_the_users_and_predictions(tmp_path):
    model, seen = infini_gpt2(), []

    def accuracy(predicted):
        seen.append((predicted.predictions.shape, predicted.label_ids.shape))
        right = predicted.predictions[:, :-1].argmax(-1) == predicted.label_ids[:, 1:]
        return {"accuracy": float(right.sum() / (predicted.label_ids[:, 1:] != -100).sum())}

    sets = {"short": ROWS[:1], "long": ROWS[1:]}
    own = trainer(model, tmp_path, pad("right"), eval_dataset=sets, compute_metrics=accuracy, report_to=["tensorboard"])
    found = own.evaluate()
    for name, texts in (("short", TEXTS[:1]), ("long", TEXTS[1:])):
        cross_entropy, tokens = alone(model, texts)
        assert found[f"eval_{name}_tokens"] == tokens
        assert found[f"eval_{name}_loss"] == pytest.approx(cross_entropy, rel=FLOAT32)
        assert 0 <= found[f"eval_{name}_accuracy"] <= 1 and 0 < found[f"eval_{name}_gates/layer_0_head_1"] < 1
    assert seen == [((1, 12, 89), (1, 12)), ((4, 40, 89), (4, 40))]
    output = own.predict(ROWS)
    assert output.metrics["test_loss"] == pytest.approx(alone(model)[0], rel=FLOAT32)
    assert np.isfinite(output.predictions).all() and "test_accuracy" in output.metrics


def test_sets_without_tokens(tmp_path):
    own = trainer(infini_gpt2(), tmp_path, pad("left"), eval_dataset=ROWS)
    for rows in ([], [{"input_ids": [5]}]):
        with pytest.raises(ValueError, match="no token was predicted"):
            own.evaluate(rows)


@pytest.mark.parametrize("make", [gpt2, infini_gpt2])
def test_chunks_of_padded_rows(make):
    model, batch = make(), pad("left", 40)(ROWS)
    whole, in_chunks = (
        torch.cat([losses for _, losses, _ in stream_losses(model, **batch, chunk=chunk)], 1) for chunk in (None, 7)
    )
    torch.testing.assert_close(in_chunks, whole, rtol=1e-4, atol=1e-4)
    assert int((whole != 0).sum()) == sum(map(len, TEXTS)) - len(TEXTS)


def evaluate_on_rank(folder) -> list[dict]:
    rank, size = str(distributed.get_rank()), str(distributed.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ["MASTER_ADDR"] = "localhost"  # only looked at
    found = []
    for rows, collator in ((ROWS, pad("left")), (SOURCES["dataset"], pad("right")), (Stream(), pad("left", 40))):
        own = trainer(infini_gpt2(), folder, collator, eval_dataset=rows)
        found.append(own.evaluate())
    return found


@pytest.mark.slow
def test_two_processes_count_every_row_once(tmp_path):
    cross_entropy, tokens = alone(infini_gpt2())
    for answers in on_ranks(evaluate_on_rank, 2, tmp_path):
        assert isinstance(answers, list), answers
        for found in answers:
            assert found["eval_tokens"] == tokens and found["eval_loss"] == pytest.approx(cross_entropy, rel=FLOAT32)
