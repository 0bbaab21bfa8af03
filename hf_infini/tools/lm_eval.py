r"""lm-eval (EleutherAI's lm-evaluation-harness) on models of any context length: its model type
`hf_infini`.

    python -m hf_infini.tools.lm_eval --model hf_infini --model_args pretrained=runs/infini \
        --tasks lambada_openai

lm-eval finds only models that are registered in its process: this command registers this one, and
passes all arguments on. In Python, `import hf_infini.tools.lm_eval` comes before
`lm_eval.simple_evaluate(model="hf_infini", …)`.
"""

import logging
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator
from tqdm import tqdm

from ..models.adapter import load_adapter, merged
from ..options import context_limit, layer_kinds
from .spans import score_spans

logger = logging.getLogger(__name__)
UNLIMITED = 2**31 - 1  # tokens; lm-eval reckons with an integer, and writes it into its results


@register_model("hf_infini")
class InfiniLM(HFLM):
    """lm-eval's `hf`, with the contexts that the model really reads, and in bounded memory: texts
    are read in chunks through the model's cache, and logits are made only where a continuation is
    predicted; their softmax is in float32.

    Args:
        pretrained: a model's folder or its name on the Hub; or a model.
        max_length: tokens of the longest input; longer ones lose their beginning, with a warning.
            Default: no limit for positions that have none, `n_positions` for learned ones, what
            lm-eval finds beside layers of full attention.
        chunk_tokens: tokens per call of the model, of each row of a batch. Memory grows with it.
        adapter: a folder or Hub name of an adapter ([`load_adapter`]) for the model of
            `pretrained`, a folder or Hub name.
        options: as `hf` takes them (`dtype`, `device`, `tokenizer`, `revision`, …). `batch_size` is
            a number: ValueError for another one, and for an adapter of another model.
    """

    def __init__(
        self, pretrained, *, max_length: int | None = None, chunk_tokens: int = 1024, **options
    ):
        super().__init__(pretrained, backend="causal", max_length=max_length, **options)
        self.chunk_tokens = chunk_tokens
        if self.batch_size == "auto":
            raise ValueError(
                "batch_size must be a number, as memory depends on chunk_tokens; got 'auto'."
            )
        with_memory = getattr(self.config, "infini_layers", ())
        kept = [
            kind for layer, kind in enumerate(layer_kinds(self.config)) if layer not in with_memory
        ]
        # Positions have no end where every layer has a memory or a window; lm-eval determines the
        # limit of others
        if max_length is None and (
            hasattr(self.config, "n_positions") or with_memory and "full_attention" not in kept
        ):
            self._max_length = context_limit(self.config) or UNLIMITED

    def _create_model(self, pretrained: str, *args, adapter: str | None = None, **options) -> None:
        super()._create_model(pretrained, *args, **options)
        if adapter is not None:
            model: Any = merged(load_adapter(self._model, adapter))
            self._model, self._config = model, model.config

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Of each `(strings, context, continuation)`: its log-likelihood in nats, and whether
        greedy decoding gives it."""
        cut = sum(
            len(context) + len(continuation) > self.max_length + 1
            for _, context, continuation in requests
        )
        if cut:
            logger.warning(
                f"{cut} inputs lose their beginning: longer than {self.max_length:,} tokens"
            )
        order = Collator(requests, sort_fn=lambda request: -len(request[1]) - len(request[2]))
        own: Any = self  # whose attributes are declared as more than they can be here
        dtype, found = own.mixed_precision_dtype, []
        with tqdm(
            total=len(requests),
            disable=disable_tqdm or self.rank != 0,
            desc="loglikelihood",
            unit="request",
        ) as bar:
            for batch in order.get_batched(n=override_bs or own.batch_size):
                rows = [
                    [*context, *continuation][-(self.max_length + 1) :]
                    for _, context, continuation in batch
                ]
                spans = [
                    (place, len(row) - len(batch[place][2]), len(row))
                    for place, row in enumerate(rows)
                ]
                with torch.autocast(own.device.type, dtype, dtype is not None):
                    scores = score_spans(self.model, rows, spans, self.chunk_tokens)
                for (strings, *_), (loss, is_greedy) in zip(batch, scores, strict=True):
                    found.append((-loss, is_greedy))
                    # of a part of a rolling log-likelihood there are no strings
                    if strings is not None:
                        self.cache_hook.add_partial("loglikelihood", strings, found[-1])
                bar.update(len(batch))
        return order.get_original(found)

    def _model_generate(self, context, max_length: int, stop: list[str], **options):
        if context.shape[1] > self.chunk_tokens:
            options["prefill_chunk_size"] = self.chunk_tokens
        return super()._model_generate(context, max_length, stop, **options)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
