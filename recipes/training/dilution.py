"""Training on short rows for long texts: a row begins with the memory of another text, as heavy as
much more of it would be.

What a linear memory gives back is an average over all that was written. A model that finds a token
in rows of 2,048 has no reason to let it outweigh more than those; in a text sixteen times as long
it is lost. A memory that already holds other text, many times over, makes the loss ask for that
margin. Gradients reach that text as well: were it a constant, a row would gain by making all that
it writes heavier, and with it the next row's past, without an end.
"""

from dataclasses import replace
from pathlib import Path

import torch

from cli import UserError
from cli.model_options import attention_of
from hf_infini.cache.cache import InfiniCache, InfiniLayer
from hf_infini.compat.cache_name import cache_of
from hf_infini.options import context_limit
from support.prepared import open_folders, read_tokenizer


class Dilution:
    """Makes the past of training rows: a cache that has read other text.

    Args:
        rows: a dataset in torch's format whose `input_ids` are rows of plain text, one of which is
            drawn for each training row (by torch's own generator, whose state a checkpoint keeps).
        most: the largest factor of a memory; factors are drawn log-uniformly from 1 on.
        share: of the calls of [`past`] that give one.
    """

    def __init__(self, rows, most: float, share: float = 1.0):
        self.rows, self.most, self.share = rows, most, share

    @classmethod
    def from_options(cls, run, folders: list[str], tokenizer, of: str) -> "Dilution":
        """With the training rows of folders made by recipes/prepare.py, of one length; a UserError
        where their tokens are not those of `tokenizer`, that of `of`. `run` has the options
        `dilute_up_to` and `dilute_share`."""
        from datasets import concatenate_datasets

        parts = open_folders("--dilute_with", folders, "train")
        for folder in folders:
            if read_tokenizer(Path(folder)).get_vocab() != tokenizer.get_vocab():
                raise UserError(
                    f"--dilute_with {folder} and {of} have different tokenizers: prepare one of "
                    "them with the other's (--tokenizer FOLDER/tokenizer)"
                )
        rows = concatenate_datasets([part.select_columns("input_ids") for part in parts.values()])
        return cls(rows.with_format("torch"), run.dilute_up_to, run.dilute_share)

    def past(self, model, batch: int, device: torch.device) -> InfiniCache | None:
        """The cache of `model` after one row of text for each of `batch` rows, M and z multiplied
        by the row's factor; for the rest of the `share`, `None`: these rows begin a text.

        The window keeps the end of the text as it is. Gradients go through all of it.
        """
        if self.share < 1 and torch.rand(()) >= self.share:
            return None
        numbers = torch.randint(len(self.rows), (batch,)).tolist()
        ids = torch.as_tensor(self.rows[numbers]["input_ids"]).long().to(device)
        factors = self.most ** torch.rand(batch).to(device)
        cache = cache_of(model(ids, use_cache=True, logits_to_keep=1))
        return weigh_memories(cache, factors)


def weigh_memories(cache: InfiniCache, factors: torch.Tensor) -> InfiniCache:
    """The cache itself, each row's memories and normalisers `factors` `[batch]` times as large: by
    the linear rule, what they would be had all that is in them been written that often."""
    for layer in cache.layers:
        if isinstance(layer, InfiniLayer):
            memory, normaliser = layer.state.memory, layer.state.normaliser
            times = factors[:, None, None].to(memory.dtype)
            memory, normaliser = memory * times[..., None], normaliser * times.to(normaliser.dtype)
            layer.state = replace(layer.state, memory=memory, normaliser=normaliser)
    return cache


def check_options(run, optimizer, config) -> None:
    """UserError when `--dilute_with` cannot do what it is for.

    Args:
        run, optimizer: the options of recipes/train.py; config: the model's.
    """
    if run.dilute_with is None:
        if (run.dilute_up_to, run.dilute_share) != (32, 1):
            raise UserError(
                "--dilute_up_to and --dilute_share do nothing without --dilute_with FOLDER: leave "
                "them out"
            )
        return
    if attention_of(config) != "infini" or config.update_rule != "linear":
        raise UserError(
            "--dilute_with multiplies what the linear rule has written: it needs --attention "
            "infini and --update_rule linear"
        )
    if context_limit(config) is not None:
        raise UserError(
            "--dilute_with puts text in front of rows that take all positions: give "
            "--position_encoding rope or segment, or for causal_mha another --position_encoding "
            "than learned"
        )
    for name in ("separate_documents", "gradient_checkpointing", "torch_compile"):
        if (vars(run) | vars(optimizer))[name]:
            raise UserError(f"--dilute_with and --{name} do not go together: leave one of them out")
