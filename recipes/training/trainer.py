"""The Trainer of `recipes/train.py`."""

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from transformers import Cache, Trainer

from evaluation.losses import stream_losses, summarize
from hf_infini.compat.cache_name import CACHE
from hf_infini.tools.parallel import shard_rows
from hf_infini.tools.training import gate_values

COLUMNS_OF_THE_HEAD = 64  # logits of few places are made of a multiple of so many


class PerplexityTrainer(Trainer):
    """A Trainer of rows that a [`support.rows.RowReader`] made, whose evaluation is token-weighted
    and keeps one batch of logits at a time.

    `evaluate()` gives the cross-entropy (nats per token, also as `eval_loss`), perplexity and
    number of the tokens whose label is not −100. Trackers (`report_to`) also get each head's
    sigmoid(gate).

    Args:
        optimizer_of: makes the optimiser of a model, which is sharded by then where it is to be.
        past_of: makes the cache that training rows begin with, of a model, the number of rows and a
            device; None, or where it makes None: they begin with nothing.
        context_parallel_size: how many processes share each row
            ([`hf_infini.tools.parallel.shard_rows`]); neighbours by rank do. The rest is data
            parallelism: `per_device_train_batch_size` rows for each such group."""

    def __init__(
        self,
        *args,
        optimizer_of: Callable[[torch.nn.Module], torch.optim.Optimizer],
        past_of: Callable[[torch.nn.Module, int, torch.device], Cache | None] | None = None,
        context_parallel_size: int = 1,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.optimizer_of, self.past_of = optimizer_of, past_of
        self.context_parallel_size = context_parallel_size
        self.rows_mesh = None
        if context_parallel_size > 1:
            # The names are accelerate's: its data loaders give all processes along "cp" the same
            # rows
            sizes = (self.args.world_size // context_parallel_size, context_parallel_size)
            self.rows_mesh = init_device_mesh(
                self.args.device.type, sizes, mesh_dim_names=("dp_replicate", "cp")
            )

    def get_total_train_batch_size(self, args) -> int:
        return super().get_total_train_batch_size(args) // self.context_parallel_size

    def get_train_dataloader(self):
        state = self.accelerator.state
        before, state.device_mesh = state.device_mesh, self.rows_mesh or state.device_mesh
        try:
            return super().get_train_dataloader()
        finally:
            state.device_mesh = before

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = self.optimizer_of(self.model if model is None else model)
        return self.optimizer

    def compute_loss(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """As the Trainer's. Where most labels are −100, logits are computed only of columns that
        have others: the head over a whole vocabulary is much of a small model's work."""
        if self.rows_mesh is not None:
            inputs = shard_rows(inputs, self.model.config, self.rows_mesh.get_group("cp"))
            # The Trainer has counted the labels of a row on every process that shares it
            items = num_items_in_batch / self.context_parallel_size
            return super().compute_loss(model, inputs, num_items_in_batch=items)
        labels = inputs["labels"][:, 1:]
        past = None if self.past_of is None else self.past_of(model, len(labels), labels.device)
        inputs = inputs | {"use_cache": past is not None} | ({} if past is None else {CACHE: past})
        learned = (labels != -100).any(0)
        if not self.args.torch_compile and bool(learned.float().mean() <= 0.5):
            # In half precision torch keeps what it has prepared for every number of rows that a
            # product ever had on a CPU: gigabytes after some hundred steps, unless there are few
            # such numbers
            spare = -int(learned.sum()) % COLUMNS_OF_THE_HEAD
            targets = F.pad(labels[:, learned], (0, spare), value=-100)
            kept = F.pad(learned.nonzero().squeeze(1), (0, spare))
            inputs |= {"logits_to_keep": kept, "shift_labels": targets}  # in the place of `labels`
        return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None) -> tuple:
        """Adds up losses and tokens, in the precision of training; there are no predictions."""
        inputs = self._prepare_inputs(inputs)
        ids = inputs["input_ids"]
        chunk = None if self.rows_mesh is None else -(-ids.shape[1] // self.context_parallel_size)
        sums = ids.new_zeros(len(ids), 2, dtype=torch.float64)  # of each row's losses and tokens
        with self.accelerator.autocast():
            for _, losses, targets in stream_losses(model, **inputs, chunk=chunk):
                sums[:, 0] += losses.sum(1, dtype=torch.float64)
                sums[:, 1] += (targets != -100).sum(1)
        # without the rows that fill up the last batch
        self.evaluated += self.gather_function(sums).sum(0).cpu()
        return None, None, None

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        self.evaluated = torch.zeros(2, dtype=torch.float64)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        found = summarize(*self.evaluated.tolist())
        found["loss"] = found["cross_entropy"]
        if self.args.report_to:  # otherwise they are only in metrics.jsonl and not printed
            found |= gates_by_head(self)
        found = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        return output._replace(metrics={**output.metrics, **found})


def gates_by_head(trainer: Trainer) -> dict[str, float]:
    """sigmoid(gate) of each head, by names for trackers."""
    gates = gate_values(trainer.model).items()
    return {
        f"gates/layer_{layer}_head_{head}": value
        for layer, heads in gates
        for head, value in enumerate(heads)
    }
