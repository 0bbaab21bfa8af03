"""The training of a LoRA by which a model makes up for what it no longer sees: it learns the plain model's predictions.

Only positions that no longer see everything count: before them the model is the plain one, and a loss over all tokens would
mostly ask for nothing (arXiv 2510.07318 trains so, too).
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer

from hf_infini import save_adapter
from hf_infini.models.adapter import restore_adapter
from hf_infini.models.structure import decoder_of
from recall.rows import NOT_COUNTED

from .teacher import full_attention


class DistillationTrainer(Trainer):
    """Trains PEFT's wrapper around a patched model, by [`divergence_beyond`]; checkpoints have the adapters only."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False  # every row counts the same, however many labels it has

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        model.eval()  # what is frozen drops nothing out
        loss = divergence_beyond(model, self.model, inputs["input_ids"], inputs["labels"])
        return (loss, {"loss": loss}) if return_outputs else loss

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        if self.args.should_save:  # some versions of the Trainer leave it to this
            save_adapter(self.model, output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        restore_adapter(self.model, resume_from_checkpoint)


def divergence_beyond(model, adapted, ids: Tensor, labels: Tensor) -> Tensor:
    """The KL divergence of a model's predictions from the plain model's, in nats: of each row the mean over the labels whose
    query no longer sees everything, and the mean over the rows.

    Args:
        model: `adapted`, PEFT's wrapper around a model with Infini-attention, perhaps in a distributed wrapper.
        ids, labels: `[batch, tokens]` without padding; a label is a token, or −100 where it does not count.
    """
    first = first_beyond(decoder_of(adapted).config)
    counted = labels[:, first + 1 :] != NOT_COUNTED
    places = counted.any(0).nonzero().squeeze(1)  # of the logits that any row needs
    options = {"input_ids": ids, "use_cache": False, "logits_to_keep": places + first}
    with torch.no_grad(), adapted.disable_adapter(), full_attention(adapted, ids.shape[1]):
        wanted = model(**options).logits.float().log_softmax(-1)
    found = model(**options).logits.float().log_softmax(-1)
    divergences = F.kl_div(found, wanted, log_target=True, reduction="none").sum(-1)
    counted = counted[:, places]
    return ((divergences * counted).sum(1) / counted.sum(1).clamp(min=1)).mean()


def first_beyond(config) -> int:
    """The first position of a text that does not see all tokens before it, by window, sinks and kept tokens."""
    length, local, sinks, kept = config.window
    return (local + 1 + (sinks + kept) // length) * length
