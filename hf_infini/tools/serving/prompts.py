"""What is asked, as ids: what a prompt begins with and what recalls from it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...options import context_limit
from ..reader import Reader
from .requests import Context, Prompt

# Tokens at the end of a prompt that are read with what they recall, so many or up to twice as many;
# and of these the last ones by which it is recalled
ASKED, QUESTION = 256, 64
TEXTS = 16  # latest ones whose ids are kept, for the next question about them


class Prompts:
    """Makes prompts of what a request says, in one thread.

    Args:
        reader: by whose templates and tokens; its archive says whether prompts recall.
        most: tokens of a prompt, the answer's not included; `None`: any number.

    Attributes:
        context: a document's text after the beginning of a chat, both given, as a [`Context`].
    """

    def __init__(self, reader: Reader, most: int | None = None):
        self.reader, self.most = reader, most
        self.limit = context_limit(reader.model.config)
        self.context = functools.lru_cache(TEXTS)(self._context)

    def of_text(self, text: str | Sequence[int]) -> Prompt:
        """That of a `text`, or of its ids, as it is. What spells a special token is one."""
        if isinstance(text, str):
            given: Any = self.reader.tokenizer(text, verbose=False)["input_ids"]
        else:
            given = text
        ids = torch.tensor(given, dtype=torch.long)
        known = self.reader.model.config.vocab_size
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < known:
            raise ValueError(f"prompt: ids must be from 0 to {known - 1}.")
        return self._split(ids, 0, ids)

    def of_chat(
        self,
        messages: Sequence[dict[str, str]],
        documents: Sequence[str] = (),
        context: Callable[[str, str], Context] | None = None,
    ) -> Prompt:
        """That of `messages` as [`Reader.chat`] takes them, perhaps about the texts of
        `documents`; `context(head, text)` is what was read of one after the beginning of the chat.
        ValueError where the template does not take them, TypeError where they are none."""
        reader = self.reader
        asked = next((turn for turn in reversed(messages) if turn.get("role") == "user"), None)
        head, rest = reader._rendered_parts(messages, bool(documents))
        question = reader._encode(reader._plain(asked["content"] if asked else ""))
        if not documents:
            ids = reader._encode(head)
            # up to where the last message of the user begins
            turns = [{**turn, "content": ""} if turn is asked else turn for turn in messages]
            other = reader._encode(reader._rendered_parts(turns, False)[0])
            return self._split(ids, _alike(ids, other), question)
        texts = [*documents]
        if len(texts) > 1 and not (reader.archive and reader.reads_apart(texts)):
            texts = ["\n\n".join(texts)]
        make = self.context if context is None else context
        recalls = question if reader.archive else None
        begin = len(reader._encode(head))
        contexts = tuple(make(head, text) for text in texts)
        return self._checked(Prompt(contexts, reader._encode(rest), recalls, begin))

    def _context(self, head: str, text: str) -> Context:
        """A document's `text` after the beginning of a chat, `head`."""
        reader = self.reader
        return Context(torch.cat([reader._encode(head), reader._encode(reader._plain(text))]))

    def _split(self, ids: Tensor, asked: int, question: Tensor) -> Prompt:
        """A prompt whose context ends where the user's last message begins, at `asked`, or not far
        from its end."""
        if not len(ids):
            raise ValueError("the prompt is empty: give some text.")
        asked = min(max(asked, (len(ids) // ASKED - 1) * ASKED), len(ids) - 1)
        recalls = question[-QUESTION:] if self.reader.archive else None
        return self._checked(Prompt((Context(ids[:asked]),), ids[asked:], recalls))

    def _checked(self, prompt: Prompt) -> Prompt:
        most = min(self.most or prompt.tokens, (self.limit or prompt.tokens + 1) - 1)
        if prompt.tokens > most:
            raise ValueError(
                f"the prompt has {prompt.tokens:,} tokens, and this server takes {most:,} at most: "
                "shorten it."
            )
        return prompt


def _alike(ids: Tensor, other: Tensor) -> int:
    """How many first ids are the same."""
    size = min(len(ids), len(other))
    different = (ids[:size] != other[:size]).nonzero()
    return int(different[0]) if len(different) else size
