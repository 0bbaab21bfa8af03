"""How models with a memory are trained: parameter groups, gates, and the Trainer. Its data collator is `rows.RowReader`."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import Cache, Trainer

from ..compat.cache_name import CACHE
from ..layers.memory_layer import gates_of, memory_layers
from ..ops.checks import check_kinds
from .metrics import stream_losses, summarize
from .parallel import check_shards, shard_rows

COLUMNS_OF_THE_HEAD = 64  # logits of few places are made of a multiple of so many


@check_kinds
def parameter_groups(
    model: torch.nn.Module, learning_rate: float, gate_learning_rate: float | None, weight_decay: float
) -> list[dict]:
    """The optimiser's parameter groups: matrices; without decay, vectors and an attention layer's parameters beside its
    projections (scores, tables of distances, learned memory starts); and gates with a separate rate, without decay.

    At a usual learning rate the gates hardly move, and weight decay pulls them back to sigmoid = 0.5. A learned memory start
    need not be small either. Gates of fewer than 32 bits become float32, in place, unless FSDP has sharded them: in bfloat16
    a step of 0.01 from −4 is rounded away.
    """
    groups: dict[str, dict[str, Any]] = {
        "matrices": {"params": [], "lr": learning_rate, "weight_decay": weight_decay},
        "vectors": {"params": [], "lr": learning_rate, "weight_decay": 0.0},
        "gates": {"params": [], "lr": gate_learning_rate, "weight_decay": 0.0},
    }
    gates = {parameter for gate in gates_of(model).values() for parameter in gate.parameters()}
    own = {parameter for layer in memory_layers(model).values() for parameter in layer.parameters(recurse=False)}
    for parameter in model.parameters():
        if parameter in gates:
            kind = "gates"
            if parameter.dtype.itemsize < 4 and not isinstance(parameter, DTensor):  # FSDP wants one dtype
                parameter.data = parameter.data.float()
        elif parameter.ndim < 2 or parameter in own:
            kind = "vectors"  # biases, layer norms, and what an attention layer owns beside its projections
        else:
            kind = "matrices"
        groups[kind]["params"].append(parameter)
    return [{"name": name, **group} for name, group in groups.items() if group["params"]]


@check_kinds
def gate_values(model: torch.nn.Module) -> dict[str, list[float]]:
    """sigmoid(gate) of each head, by layer: the share of the memory in that head's output; empty without gates."""
    found = {}
    for name, gate in gates_of(model).items():
        logits = gate().detach()
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits  # from all processes, which all come here
        layer = [part for part in name.split(".") if part.isdigit()][-1]
        found[layer] = [round(value, 5) for value in torch.sigmoid(logits.float()).tolist()]
    return found


class PerplexityTrainer(Trainer):
    """A Trainer whose evaluation is token-weighted and keeps one batch of logits at a time.

    `evaluate()` and `predict()` read what the Trainer's do, and add the cross-entropy (nats per token, also as `eval_loss`),
    perplexity and number of the tokens whose label is not −100. What an attention mask masks predicts nothing and is not
    counted. Trackers (`report_to`) also get each head's sigmoid(gate).

    Args:
        *args, **kwargs: the Trainer's own.
        optimizer_of: makes the optimiser of a model; None leaves it to the Trainer. Where a model is to be sharded, none can
            be given ready-made (`optimizers`).
        past_of: makes the cache that training rows begin with, of a model, the number of rows and a device; None, or where
            it makes None: they begin with nothing.
        context_parallel_size: how many processes share each row ([`shard_rows`]); neighbours by rank do. The rest is data
            parallelism: `per_device_train_batch_size` rows for each such group.

    Raises:
        ValueError: the processes cannot share rows so, or a layer of the model has no memory.
    """

    model: Any

    def __init__(
        self,
        *args,
        optimizer_of: Callable[[torch.nn.Module], torch.optim.Optimizer] | None = None,
        past_of: Callable[[torch.nn.Module, int, torch.device], Cache | None] | None = None,
        context_parallel_size: int = 1,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.past_of = past_of
        self.context_parallel_size = context_parallel_size
        self.rows_mesh = None if context_parallel_size == 1 else self._mesh_of_rows(context_parallel_size)
        self.optimizer_of = optimizer_of

    def _mesh_of_rows(self, size: int) -> DeviceMesh:
        check_shards(self.model.config)
        processes = self.args.world_size
        if size < 1 or processes % size:
            raise ValueError(f"context_parallel_size must divide the {processes} processes that were started; got {size}.")
        refused = {"past_of": self.past_of is not None, "torch_compile": self.args.torch_compile}
        refused |= {"DeepSpeed": self.is_deepspeed_enabled, "label_smoothing_factor": self.label_smoother is not None}
        refused |= {"average_tokens_across_devices=False": not self.args.average_tokens_across_devices}
        if names := [name for name, given in refused.items() if given]:
            raise ValueError(f"context_parallel_size={size} does not go with {', '.join(names)}: leave that out, or this.")
        # The names are accelerate's: its data loaders give all processes along "cp" the same rows
        return init_device_mesh(self.args.device.type, (processes // size, size), mesh_dim_names=("dp_replicate", "cp"))

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
        if self.optimizer is None and self.optimizer_of is not None:
            self.optimizer = self.optimizer_of(self.model if model is None else model)
        return super().create_optimizer(model)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch: Any = None):
        """As the Trainer's. Where most labels are −100, logits are computed only of columns that have others: the head over
        a whole vocabulary is much of a small model's work."""
        if not model.training:  # for `compute_metrics`: whole rows, which begin with nothing
            return super().compute_loss(model, inputs | {"use_cache": False}, return_outputs, num_items_in_batch)
        if self.rows_mesh is not None:
            inputs = shard_rows(inputs, self.model.config, self.rows_mesh.get_group("cp"))
            # The Trainer has counted the labels of a row on every process that shares it
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch / self.context_parallel_size)
        labels = inputs["labels"][:, 1:]
        past = None if self.past_of is None else self.past_of(model, len(labels), labels.device)
        inputs = inputs | ({"use_cache": False} if past is None else {"use_cache": True, CACHE: past})
        learned = (labels != -100).any(0)
        want_all = self.label_smoother is not None or self.compute_loss_func is not None or self.args.torch_compile
        if return_outputs or want_all or bool(learned.float().mean() > 0.5):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # In half precision torch keeps what it has prepared for every number of rows that a product ever had on a CPU:
        # gigabytes after some hundred steps, unless there are few such numbers
        spare = -int(learned.sum()) % COLUMNS_OF_THE_HEAD
        targets = F.pad(labels[:, learned], (0, spare), value=-100)
        inputs |= {"logits_to_keep": F.pad(learned.nonzero().squeeze(1), (0, spare)), "shift_labels": targets}
        return super().compute_loss(model, inputs | {"labels": targets}, False, num_items_in_batch)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Adds up losses and tokens, in the precision of training; what `compute_metrics` wants of a batch, the Trainer then
        computes."""
        inputs = self._prepare_inputs(inputs)
        text = inputs.get("input_ids", inputs.get("inputs_embeds"))
        chunk = None if self.rows_mesh is None else -(-text.shape[1] // self.context_parallel_size)
        sums = text.new_zeros(len(text), 2, dtype=torch.float64)  # of each row's losses and tokens
        with self.accelerator.autocast():
            for _, losses, targets in stream_losses(model, chunk=chunk, **inputs):
                sums += torch.stack([losses.sum(1, dtype=torch.float64), (targets != -100).sum(1)], 1)
        self.evaluated += self.gather_function(sums).sum(0).cpu()  # without the rows that fill up the last batch
        return (None,) * 3 if prediction_loss_only else super().prediction_step(model, inputs, False, ignore_keys)

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        self.evaluated = torch.zeros(2, dtype=torch.float64)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        found: dict[str, float] = summarize(*self.evaluated.unsqueeze(1).tolist())
        found["loss"] = found["cross_entropy"]
        if self.args.report_to:  # otherwise they are only in metrics.jsonl and not printed
            for layer, heads in gate_values(self.model).items():
                found |= {f"gates/layer_{layer}_head_{head}": value for head, value in enumerate(heads)}
        found = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        return output._replace(metrics={**(output.metrics or {}), **found})
