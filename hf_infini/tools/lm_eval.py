"""lm-eval (EleutherAI's lm-evaluation-harness) on models of any context length: its model type `hf_infini`.

    python -m hf_infini.tools.lm_eval --model hf_infini --model_args pretrained=runs/infini --tasks lambada_openai

lm-eval finds only models that are registered in its process, not those of other installed packages, so
`lm_eval --model hf_infini` would not find this one. This command registers it and passes all arguments to lm-eval's
command. In Python, `import hf_infini.tools.lm_eval` comes before `lm_eval.simple_evaluate(model="hf_infini", …)`.
"""

import logging
from typing import Any

import torch

from ..models.adapter import load_adapter, merged
from ..options import check_number, context_limit, layer_kinds
from .extras import needs
from .metrics import score_spans

with needs("lm-eval", "lm_eval"):
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

logger = logging.getLogger(__name__)
UNLIMITED = 2**31 - 1  # tokens; lm-eval reckons with an integer, and writes it into its results
WITHOUT_EFFECT = ("backend", "logits_cache", "softmax_dtype")


@register_model("hf_infini")
class InfiniLM(HFLM):
    """lm-eval's `hf`, with the contexts that the model really reads, and in bounded memory.

    Texts are read in chunks through the model's cache, and logits are made only where a continuation is predicted; their
    softmax is computed in float32.

    Args:
        pretrained: a model's folder or its name on the Hub; or a model.
        max_length: tokens of the longest input; longer ones lose their beginning, with a warning. Default: no limit for
            positions that have none, `n_positions` for learned ones, what lm-eval finds where layers of full attention have
            no memory.
        chunk_tokens: tokens per call of the model, of each row of a batch. Memory grows with it.
        adapter: a folder or Hub name of an adapter ([`load_adapter`]) for the model of `pretrained`, a folder or Hub name.
        options: as `hf` takes them (`dtype`, `device`, `tokenizer`, `revision`, …).

    Raises:
        ValueError: a `max_length` beyond the model's positions, an option of `hf` that means nothing here, or an adapter of
            another model.
    """

    def __init__(self, pretrained, *, max_length: int | None = None, chunk_tokens: int = 1024, **options):
        for name in WITHOUT_EFFECT:
            if name in options:
                raise ValueError(f"{name}: hf_infini has no such option, leave it out.")
        for name, value in (("max_length", max_length), ("chunk_tokens", chunk_tokens)):
            check_number(name, value, {"at_least": 1})
        super().__init__(pretrained, backend="causal", max_length=max_length, **options)
        self.chunk_tokens = chunk_tokens
        limit = context_limit(self.config)
        if max_length is not None:
            if limit is not None and max_length > limit:
                raise ValueError(f"max_length={max_length}: the model has {limit} learned positions, give no more.")
        elif hasattr(self.config, "n_positions") or _is_bounded(self.config):  # lm-eval determines it for others
            self._max_length = limit or UNLIMITED

    def _create_model(self, pretrained: str, *args, adapter: str | None = None, **options) -> None:
        super()._create_model(pretrained, *args, **options)
        if adapter is not None:
            model: Any = merged(load_adapter(self._model, adapter))
            self._model, self._config = model, model.config

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Of each request `(strings, context tokens, continuation tokens)`: the continuation's log-likelihood in nats, and
        whether greedy decoding gives it."""
        from tqdm import tqdm

        rows = [[*context, *continuation][-(self.max_length + 1) :] for _, context, continuation in requests]
        cut = sum(len(context) + len(continuation) > self.max_length + 1 for _, context, continuation in requests)
        if cut:
            logger.warning(f"{cut} inputs lose their beginning: longer than {self.max_length:,} tokens")
        batch_size: Any = override_bs or self.batch_size  # these are declared as more than they can be here
        device: Any = self.device
        dtype: Any = self.mixed_precision_dtype
        if batch_size == "auto":
            batch_size = self._detect_batch_size(requests)
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]), reverse=True)
        found: list = [None] * len(rows)
        with tqdm(total=len(rows), disable=disable_tqdm or self.rank != 0, desc="loglikelihood", unit="request") as bar:
            for start in range(0, len(rows), batch_size):
                numbers = order[start : start + batch_size]
                batch = [rows[number] for number in numbers]
                begins = [len(rows[number]) - len(requests[number][2]) for number in numbers]
                spans = [(place, begin, len(batch[place])) for place, begin in enumerate(begins)]
                with torch.autocast(device.type, dtype, dtype is not None):
                    scores = score_spans(self.model, batch, spans, self.chunk_tokens)
                for number, (loss, is_greedy) in zip(numbers, scores, strict=True):
                    found[number] = (-loss, is_greedy)
                    if requests[number][0] is not None:  # of a part of a rolling log-likelihood there are no strings
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], found[number])
                bar.update(len(numbers))
        return found

    def _model_generate(self, context, max_length: int, stop: list[str], **options):
        if context.shape[1] > self.chunk_tokens:
            options["prefill_chunk_size"] = self.chunk_tokens
        return super()._model_generate(context, max_length, stop, **options)

    def _detect_batch_size(self, requests=None, pos: int = 0) -> int:
        """For `batch_size=auto`: the rows of which one chunk fits, as nothing longer is ever read at once."""
        longest = max((len(context) + len(continuation) - 1 for _, context, continuation in requests or ()), default=None)
        tokens = min(self.chunk_tokens, self.max_length, longest or self.chunk_tokens)
        return super()._detect_batch_size([(None, [0], [0] * tokens)])


def _is_bounded(config) -> bool:
    """Whether every layer has a memory, or sees a window of its own: then positions have no end."""
    with_memory = getattr(config, "infini_layers", ())
    kept = (kind for layer, kind in enumerate(layer_kinds(config)) if layer not in with_memory)
    return bool(with_memory) and "full_attention" not in kept


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
