"""lm-eval (EleutherAI's lm-evaluation-harness) on models of any context length: its model type `hf_infini`.

    python -m hf_infini.lm_eval_model --model hf_infini --model_args pretrained=runs/infini --tasks lambada_openai

lm-eval knows the models that are registered in its process and looks for no others among the installed packages, so that
`lm_eval --model hf_infini` alone would not find this one. This command registers it and hands all arguments to lm-eval's
own. In Python, `import hf_infini.lm_eval_model` comes before `lm_eval.simple_evaluate(model="hf_infini", …)`.
"""

import sys

import torch

from hf_infini_cli import UserError, exit_on_user_error

from .configurations import context_limit
from .evaluation.inference import check_length
from .recall.examples import Example, Question
from .recall.tasks import score_answers

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lm_eval":
        raise
    message = "lm-eval is not installed: pip install 'hf-infini[lm-eval]' (or pip install lm-eval)"
    if __name__ == "__main__":
        sys.exit(f"error: {message}")
    raise ModuleNotFoundError(message, name="lm_eval") from error

UNLIMITED = 2**31 - 1  # tokens; lm-eval reckons with an integer, and writes it into its results
_WITHOUT_EFFECT = ("backend", "logits_cache", "softmax_dtype")


@register_model("hf_infini")
class InfiniLM(HFLM):
    """lm-eval's `hf`, with the contexts that the model really reads, and in bounded memory.

    Texts are read in chunks through the model's cache, and logits are made only where a continuation is predicted; their
    softmax is computed in float32.

    Args:
        pretrained: a model's folder or its name on the Hub; or a model.
        max_length: tokens of the longest input; longer ones lose their beginning, with a warning. Default: no limit for
            positions that have none, `n_positions` for absolute ones.
        chunk_tokens: tokens per call of the model, of each row of a batch. Memory grows with it.
        options: as `hf` takes them (`dtype`, `device`, `tokenizer`, `revision`, …).

    Raises UserError for a `max_length` beyond the model's positions, and for options of `hf` that mean nothing here.
    """

    def __init__(self, pretrained, *, max_length: int | None = None, chunk_tokens: int = 1024, **options):
        for name in _WITHOUT_EFFECT:
            if name in options:
                raise UserError(f"--model_args {name}: hf_infini has no such option, leave it out")
        for name, value in (("max_length", max_length), ("chunk_tokens", chunk_tokens)):
            if value is not None and value < 1:
                raise UserError(f"--model_args {name}={value}: give a positive number of tokens")
        super().__init__(pretrained, backend="causal", max_length=max_length, **options)
        self.chunk_tokens = chunk_tokens
        if max_length is not None:
            check_length(self.config, max_length)
        elif hasattr(self.config, "n_positions"):  # of other models lm-eval finds out by itself
            self._max_length = context_limit(self.config) or UNLIMITED

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Of each request `(strings, context tokens, continuation tokens)`: the continuation's log-likelihood in nats, and
        whether greedy decoding gives it."""
        import numpy as np
        from tqdm import tqdm

        rows = [np.array([*context, *continuation][-(self.max_length + 1) :]) for _, context, continuation in requests]
        cut = sum(len(context) + len(continuation) > self.max_length + 1 for _, context, continuation in requests)
        if cut:
            print(f"warning: {cut} inputs lose their beginning: longer than {self.max_length:,} tokens", file=sys.stderr)
        examples = []
        for row, (_, _, continuation) in zip(rows, requests, strict=True):
            if not 0 < len(continuation) < len(row):
                raise UserError(
                    f"a continuation of {len(continuation):,} tokens cannot be scored: it must have from 1 to max_length = "
                    f"{self.max_length:,}, and a context"
                )
            asked = (len(row) - len(continuation), len(row) - 1)
            examples.append(Example(row, (Question("continuation", "", (0, 0), asked),)))

        batch_size = override_bs or self.batch_size
        if batch_size == "auto":
            batch_size = self._detect_batch_size(requests)
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]), reverse=True)
        found: list = [None] * len(rows)
        with tqdm(total=len(rows), disable=disable_tqdm or self.rank != 0, desc="loglikelihood", unit="request") as bar:
            for start in range(0, len(rows), batch_size):
                numbers = order[start : start + batch_size]
                with torch.autocast(self.device.type, self.mixed_precision_dtype, self.mixed_precision_dtype is not None):
                    answers = score_answers(self.model, [examples[number] for number in numbers], self.chunk_tokens)
                for number, answer in zip(numbers, answers, strict=True):
                    found[number] = (-answer.loss, answer.correct)
                    strings = requests[number][0]
                    if strings is not None:  # of a part of a rolling log-likelihood there are none
                        self.cache_hook.add_partial("loglikelihood", strings, found[number])
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


@exit_on_user_error
def main() -> None:
    """lm-eval's command line, with the model type `hf_infini`."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
