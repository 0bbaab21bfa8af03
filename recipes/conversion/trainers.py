"""What both trainings of a conversion share, and the second: all layers together, on the plain model's predictions.

They train and save only an adapter ([`hf_infini.save_adapter`]): checkpoints have a few megabytes.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer

from hf_infini import InfiniCache, save_adapter
from hf_infini.compat.cache_name import CACHE
from hf_infini.models.adapter import restore_adapter
from hf_infini.models.structure import decoder_of
from recall.rows import NOT_COUNTED

from .teacher import full_attention

# Adam moves each number of a parameter by about the learning rate in a step, and what comes out by as much for each of its
# inputs: one for a gate, the width of a head for a feature map, that of the model for the write weight
RATES = {"gate": 10.0, "memory_write": 0.1}


class ConversionTrainer(Trainer):
    """Trains the adapter of a patched model, with the window narrowed in a share of the steps.

    A memory that is trained beside a window that finds nearly everything is not learned to be used (arXiv 2510.05901). So in
    some steps segments are shorter, and more of a row is only in the memory.

    Args:
        *args, **kwargs: the Trainer's own. The learning rate is a LoRA's; feature maps have it times `memory_rate`, and
            others of the memory's parameters times their [`RATES`] as well.
        narrow: share of the steps with a narrower window, at the first and at the last step; in between it falls linearly.
        lengths: tokens of a segment then, one of them drawn for each step.
    """

    memory_rate = 1.0  # the learning rate of the memory's parameters, in those of a LoRA

    def __init__(self, *args, narrow: tuple[float, float] = (0.0, 0.0), lengths: Sequence[int] = (), **kwargs):
        super().__init__(*args, **kwargs)
        self.narrow, self.lengths = narrow, lengths
        self.model_accepts_loss_kwargs = False  # every row counts the same, however many labels it has

    @property
    def patched(self) -> torch.nn.Module:
        """The model with Infini-attention, perhaps in PEFT's wrapper."""
        return self.model

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args)
            groups: dict[float, list] = {}
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    rate = next((rate for part, rate in RATES.items() if part in name.split(".")), 1.0)
                    groups.setdefault(1.0 if "lora_" in name else rate * self.memory_rate, []).append(parameter)
            rate = options.pop("lr")
            self.optimizer = kind([{"params": group, "lr": rate * factor} for factor, group in groups.items()], **options)
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = torch.stack([inputs["input_ids"], inputs["labels"]], 1)
        if not model.training:
            loss = self.loss_of(model, rows)
        else:
            with segments_of(decoder_of(self.patched).config, self.segment_length()):
                loss = self.loss_of(model, rows)
        return (loss, {"loss": loss}) if return_outputs else loss

    def loss_of(self, model, rows: Tensor) -> Tensor:
        """The loss of rows `[batch, 2, tokens]`, ids and labels, without padding."""
        raise NotImplementedError

    def segment_length(self) -> int | None:
        """Tokens of a segment in this step; `None`: the model's own."""
        step, last = self.state.global_step, max(1, self.state.max_steps - 1)
        draw = random.Random(f"{self.args.seed} {self.state.global_step}")  # alike in all processes and after a restart
        first, end = self.narrow
        if not self.lengths or draw.random() >= first + (end - first) * step / last:
            return None
        return draw.choice(self.lengths)

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        if self.args.should_save:  # some versions of the Trainer leave it to this
            save_adapter(self.patched, output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        restore_adapter(self.patched, resume_from_checkpoint)


class Together(ConversionTrainer):
    """The whole model learns what the plain one predicts, and what rows ask of it.

    Rows of text, all of whose tokens are labels, are learned by cross-entropy and by the KL divergence from the teacher's
    distribution. Rows that ask are learned by the cross-entropy of their answers only: what the teacher says of the other
    tokens would outweigh them. It is not computed there, nor are the logits between the answers.

    Args:
        text: the weight of the cross-entropy in rows of text; the divergence has the rest.
        past_of: makes the cache that rows begin with, or `None`, of a model, the number of rows and a device
            ([`Dilution.past`]); the teacher has none. `None`: they begin with nothing.
    """

    memory_rate = 10.0

    def __init__(
        self,
        *args,
        text: float = 0.5,
        past_of: Callable[..., InfiniCache | None] | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.text, self.past_of = text, past_of

    def loss_of(self, model, rows: Tensor) -> Tensor:
        ids, labels = rows.unbind(1)
        counted = labels[:, 1:] != NOT_COUNTED
        places = counted.any(0).nonzero().squeeze(1)  # of the logits that any row needs
        taught = counted.all(1) if self.text < 1 else counted.new_zeros(len(ids))
        wanted = self._taught(model, ids[taught]) if taught.any() else None
        past = self.past_of(model, len(ids), ids.device) if self.past_of is not None and model.training else None
        cache = {"use_cache": False} if past is None else {"use_cache": True, CACHE: past}
        found = model(input_ids=ids, logits_to_keep=places, **cache).logits.float().log_softmax(-1)
        losses = _of_labels(found, labels[:, 1 + places])
        if wanted is None:
            return losses.mean()
        divergences = F.kl_div(found[taught], wanted, log_target=True, reduction="none").sum(-1).mean(-1)
        return torch.cat([losses[~taught], torch.lerp(divergences, losses[taught], self.text)]).mean()

    @torch.no_grad()
    def _taught(self, model, ids: Tensor) -> Tensor:
        """The plain model's log-probabilities of each token but the first, `[rows, tokens − 1, vocabulary]`."""
        training = model.training
        with full_attention(self.model, ids.shape[1]), without_lora(self.model):
            found = model.eval()(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        model.train(training)
        return found


def _of_labels(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each row, the mean over its labels; 0 of a row without any."""
    losses = F.nll_loss(log_probabilities.transpose(1, 2), labels, reduction="none", ignore_index=NOT_COUNTED)
    return losses.sum(1) / (labels != NOT_COUNTED).sum(1).clamp(min=1)


@contextlib.contextmanager
def segments_of(config, length: int | None) -> Iterator[None]:
    """Within it, a model's segments have so many tokens; `None`: as many as before."""
    before = config.segment_length
    config.segment_length = before if length is None else length
    try:
        yield
    finally:
        config.segment_length = before


@contextlib.contextmanager
def without_lora(model) -> Iterator[None]:
    """Within it, PEFT's adapter of a model does nothing, if it has one."""
    with model.disable_adapter() if hasattr(model, "disable_adapter") else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def window_untrained(model) -> Iterator[None]:
    """Within it, what a model has learned changes nothing of what its layers see in their windows: PEFT's adapter and the
    short convolutions do nothing."""
    convolutions = [parameter for name, parameter in model.named_parameters() if name.endswith(".memory_conv")]
    with without_lora(model), _filled(convolutions, 0.0):
        yield


@contextlib.contextmanager
def gates_closed(model) -> Iterator[None]:
    """Within it, a model has its window only: no head takes anything from its memory."""
    from hf_infini.layers.memory_layer import gates_of

    with _filled([parameter for gate in gates_of(model).values() for parameter in gate.parameters()], -torch.inf):
        yield


@contextlib.contextmanager
def _filled(parameters: list[Tensor], value: float) -> Iterator[None]:
    """Within it, every number of the parameters is this one."""
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)
