"""What is asked of the loop, and what it tells of it."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ...cache.cache import InfiniCache
from ..passages import Passage
from .text import AnswerText

ENDS = Literal["stop", "length"]


class Context(NamedTuple):
    """What a prompt begins with."""

    ids: Tensor  # `[tokens]`, int64
    cache: InfiniCache | None = None  # after them, where they were read; it is not changed


class Prompt(NamedTuple):
    """A prompt as the loop reads it. What a request sees depends on this, and on nothing that was
    read for others."""

    # One; or several documents, which are read apart and asked together
    contexts: tuple[Context, ...]
    rest: Tensor  # `[tokens]`, 1 or more, behind the context
    # `[tokens]`, by which the rest recalls from the context; `None`: nothing is recalled
    question: Tensor | None = None
    # Where documents begin in each context, in tokens, of which the recalled passages are told;
    # `None`: there are none
    begin: int | None = None

    @property
    def tokens(self) -> int:
        return sum(len(context.ids) for context in self.contexts) + len(self.rest)


class Usage(NamedTuple):
    """Tokens of a request."""

    prompt: int
    cached: int  # of these, were read before
    new: int  # of the answer, with the one that ended it


class Ended(NamedTuple):
    """What a request is told last: how its answer has ended, or by which error."""

    reason: ENDS | None
    error: BaseException | None
    usage: Usage
    passages: tuple[Passage, ...] = ()  # of documents, at which the answer has looked


class Request:
    """A prompt, and how it is answered. The loop calls `tell` in its thread with pieces of text,
    which are never empty, and at last with an [`Ended`], once, unless the request was cancelled.

    Args:
        model, tokenizer: by which it is answered.
        prompt: what is read.
        tell: takes what there is to tell. Where it raises, the request has ended.
        config: how tokens are chosen, as `generate` takes it, with all processors that it asks
            for; a copy for this request, which is changed.
        seed: of the random numbers of this request; `None`: any.
        max_new_tokens: of an answer, 1 or more.
        stops: strings at which it ends.
        seconds: after which it ends with a TimeoutError.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Prompt,
        tell: Callable[[str | Ended], None],
        *,
        config: GenerationConfig,
        seed: int | None = None,
        max_new_tokens: int,
        stops: Sequence[str] = (),
        seconds: float = float("inf"),
    ):
        self.prompt, self.tell, self.max_new_tokens = prompt, tell, max_new_tokens
        self.cancelled, self.deadline = False, time.monotonic() + seconds
        self.text, self.cached = AnswerText(tokenizer, stops), 0
        self.passages: tuple[Passage, ...] = ()
        self.new = 0  # tokens of the answer
        device, config.max_length = model.device, prompt.tokens + max_new_tokens
        model._prepare_special_tokens(config, True, device)
        self._processors = model._get_logits_processor(config, prompt.tokens, device=device)
        self._generator = None
        if config.do_sample:
            self._generator = torch.Generator(device)
            self._generator.seed() if seed is None else self._generator.manual_seed(seed)
        ends = config.eos_token_id
        self._ends = {*ends} if isinstance(ends, list) else {ends} - {None}
        parts = [context.ids for context in prompt.contexts]
        room = torch.zeros(max_new_tokens, dtype=torch.long)
        self._ids = torch.cat([*parts, prompt.rest, room]).to(device)

    @property
    def last(self) -> Tensor:
        """`[1]`, the token that is read next."""
        number = self.prompt.tokens + self.new
        return self._ids[number - 1 : number]

    def go_on(self, logits: Tensor) -> ENDS | None:
        """Chooses the next token by the model's `logits`, `[vocabulary]`, and tells its text; how
        the answer has ended, or `None`."""
        number = self.prompt.tokens + self.new
        logits = logits[None].to(device=self._ids.device, dtype=torch.float32, copy=True)
        scores = self._processors(self._ids[None, :number], logits)[0]
        if self._generator is None:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        self._ids[number] = token
        self.new += 1
        ended: ENDS | None = "stop" if token in self._ends else None
        if ended is None:
            self._tell(self.text.add(token))
            ended = "stop" if self.text.stopped else ended
        if ended is None and self.new == self.max_new_tokens:
            ended = "length"
        return ended

    def end(self, reason: ENDS | None, error: BaseException | None = None) -> None:
        """Tells what is left, and how it has ended: its `reason`, or the `error`."""
        if reason is not None:
            self._tell(self.text.end())
        usage = Usage(self.prompt.tokens, self.cached, self.new)
        self.tell(Ended(reason, error, usage, self.passages))

    def _tell(self, text: str) -> None:
        if text:
            self.tell(text)
