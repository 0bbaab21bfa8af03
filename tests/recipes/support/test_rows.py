"""Rows as inputs: what is predicted, and documents kept apart."""

import torch

from support.rows import RowReader, document_positions


def test_positions_by_hand():
    ids = torch.tensor([[5, 6, 0, 7, 0, 0, 8], [0, 5, 5, 5, 5, 5, 0]])
    assert document_positions(ids, 0).tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5]]


def test_reader_masks_labels_and_keeps_those_of_the_rows():
    ids = torch.tensor([[5, 0, 6, 2, 7]])
    for given in (ids, ids.tolist()):  # tensors, and what a data set gives its transform
        batch = RowReader([2, 0])({"input_ids": given})
        assert batch["labels"].tolist() == [[5, -100, 6, -100, 7]] and torch.equal(
            batch["input_ids"], ids
        )
        assert "position_ids" not in batch
    labels = torch.tensor([-100, 0, 6, 2, -100])
    batch = RowReader([2], end_of_text=0).collate(
        [
            {"input_ids": ids[0].int(), "labels": labels},
            {"input_ids": ids[0].int(), "labels": ids[0]},
        ]
    )
    assert torch.equal(batch["input_ids"], ids.expand(2, -1))  # of 64 bits
    assert batch["labels"].tolist() == [[-100, 0, 6, -100, -100], [5, 0, 6, -100, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]] * 2
