"""Rows of tokens as a model's inputs: what is to be predicted, and where a new document begins."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor


class RowReader:
    """Makes the inputs of a model from rows of one length; training and evaluations read theirs
    through one of these.

    Args:
        ignored: ids of the tokens that are not to be predicted.
        end_of_text: id of the token that ends a document, where a row's documents are kept apart
            (positions begin again behind it); `None`: a row is read as one text."""

    def __init__(self, ignored: Collection[int], end_of_text: int | None = None):
        self.ignored = torch.tensor(sorted(ignored), dtype=torch.long)
        self.end_of_text = end_of_text

    def __call__(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`input_ids`, `labels` (−100: not predicted; the model shifts them itself) and, where
        documents are kept apart, `position_ids`, `[batch, tokens]` each, of the columns
        `input_ids` and, where not every token is to be predicted, `labels`."""
        ids = torch.as_tensor(columns["input_ids"]).long()
        labels = torch.as_tensor(columns.get("labels", ids)).long()
        labels = labels.masked_fill(torch.isin(ids, self.ignored), -100)
        batch = {"input_ids": ids, "labels": labels}
        if self.end_of_text is not None:
            batch["position_ids"] = document_positions(ids, self.end_of_text)
        return batch

    def collate(self, rows: list[dict]) -> dict[str, Tensor]:
        """A batch from a list of rows of tensors: a Trainer's data collator."""
        return self({name: torch.stack([row[name] for row in rows]) for name in rows[0]})


def document_positions(input_ids: Tensor, end_of_text: int) -> Tensor:
    """`[batch, tokens]`: the number of each token within its document, which ends with its
    end-of-text token. A row's first token counts as the first of its document."""
    columns = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    begins = torch.zeros_like(input_ids)
    begins[:, 1:] = torch.where(input_ids[:, :-1] == end_of_text, columns[:, 1:], 0)
    return columns - begins.cummax(1).values
