"""The training of a memory beside a frozen model: it learns what window and kept tokens leave out.

Only positions that no longer see everything count: before them the model is the plain one, and a loss over all tokens would
mostly ask for nothing (arXiv 2510.07318 trains so, too). And a memory beside a window that finds nearly everything is not
learned to be used (arXiv 2510.05901), so the length of a segment is drawn for each step.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer

from hf_infini import save_adapter
from hf_infini.models.adapter import restore_adapter
from hf_infini.models.structure import decoder_of
from recall.rows import NOT_COUNTED

from .teacher import full_attention

# Adam moves each number of a parameter by about the learning rate in a step, and what comes out by as much for each of its
# inputs: one for a gate, the width of a head for a feature map, that of the model for the write weight
RATES = {"gate": 10.0, "memory_write": 0.1}


class MemoryTrainer(Trainer):
    """Trains the adapter of a patched model, by [`divergence_beyond`]; checkpoints have the adapter only.

    Args:
        *args, **kwargs: the Trainer's own; some parameters have its learning rate times their [`RATES`].
        lengths: tokens of a segment, one of them drawn for each step.
    """

    def __init__(self, *args, lengths: Sequence[int], **kwargs):
        super().__init__(*args, **kwargs)
        self.lengths = lengths
        self.model_accepts_loss_kwargs = False  # every row counts the same, however many labels it has

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args)
            groups: dict[float, list] = {}
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    rate = next((rate for part, rate in RATES.items() if part in name.split(".")), 1.0)
                    groups.setdefault(rate, []).append(parameter)
            rate = options.pop("lr")
            self.optimizer = kind([{"params": group, "lr": rate * factor} for factor, group in groups.items()], **options)
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        draw = random.Random(f"{self.args.seed} {self.state.global_step}")  # alike in all processes and after a restart
        model.eval()  # what is frozen drops nothing out
        with segments_of(decoder_of(self.model).config, draw.choice(self.lengths)):
            loss = divergence_beyond(model, decoder_of(self.model), inputs["input_ids"], inputs["labels"])
        return (loss, {"loss": loss}) if return_outputs else loss

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        if self.args.should_save:  # some versions of the Trainer leave it to this
            save_adapter(self.model, output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        restore_adapter(self.model, resume_from_checkpoint)


def divergence_beyond(model, decoder, ids: Tensor, labels: Tensor) -> Tensor:
    """The KL divergence of a model's predictions from the plain model's, in nats: of each row the mean over the labels whose
    query no longer sees everything, and the mean over the rows.

    Args:
        model: with Infini-attention, perhaps in a distributed wrapper; decoder: inside it.
        ids, labels: `[batch, tokens]` without padding; a label is a token, or −100 where it does not count.
    """
    first = first_beyond(decoder.config)
    counted = labels[:, first + 1 :] != NOT_COUNTED
    places = counted.any(0).nonzero().squeeze(1)  # of the logits that any row needs
    options = {"input_ids": ids, "use_cache": False, "logits_to_keep": places + first}
    with torch.no_grad(), full_attention(model, ids.shape[1]):
        wanted = model(**options).logits.float().log_softmax(-1)
    found = model(**options).logits.float().log_softmax(-1)
    divergences = F.kl_div(found, wanted, log_target=True, reduction="none").sum(-1)
    counted = counted[:, places]
    return ((divergences * counted).sum(1) / counted.sum(1).clamp(min=1)).mean()


def first_beyond(config) -> int:
    """The first position of a text that does not see all tokens before it, by window, sinks and kept tokens."""
    length, local, sinks, kept = config.window
    return (local + 1 + (sinks + kept) // length) * length


@contextlib.contextmanager
def segments_of(config, length: int) -> Iterator[None]:
    """Within it, a model's segments have so many tokens."""
    before, config.segment_length = config.segment_length, length
    try:
        yield
    finally:
        config.segment_length = before
