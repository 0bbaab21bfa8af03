"""The rows of a conversion: prepared folders, as tensors of ids and labels."""

import torch
from torch import Tensor

from support.prepared import open_folders, open_rows


def with_labels(batch: dict) -> dict[str, Tensor]:
    """Rows of `datasets` as tensors, `input_ids` and `labels`: those that were prepared, or every token."""
    ids = torch.tensor(batch["input_ids"])
    return {"input_ids": ids, "labels": torch.tensor(batch["labels"]).long() if "labels" in batch else ids}


class ConversionRows:
    """What a conversion reads: "train" and "validation" of the folders of --data, and "evaluation", the validation rows of
    those of --evaluation_data, or else of --data.

    Args:
        options: of recipes/convert.py.

    Attributes:
        context: tokens of a row of --data.

    Raises UserError where a folder has none of these rows, or those of --data are of several lengths.
    """

    def __init__(self, options):
        evaluated = options.evaluation_data or options.data
        parts = {part: open_folders("--data", options.data, part) for part in ("train", "validation")}
        parts["evaluation"] = {folder: open_rows(folder, "validation") for folder in evaluated}
        self.context = len(next(iter(parts["train"].values()))[0]["input_ids"])
        self.parts = {
            part: {folder: rows.with_transform(with_labels) for folder, rows in folders.items()}
            for part, folders in parts.items()
        }

    def of(self, part: str, count: int, device: torch.device) -> dict[str, Tensor]:
        """The first `count` rows of each folder, `[rows, 2, tokens]`, ids and labels."""
        return {folder: torch.stack([*rows[:count].values()], 1).to(device) for folder, rows in self.parts[part].items()}
