"""A text that is read once, and asked many times: questions after a document, the turns of a
chat."""

import copy
import glob
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..cache.cache import InfiniCache
from ..cache.files import describe_model
from ..compat.cache_name import CACHE, cache_of
from ..models.structure import decoder_of
from ..options import check_number

SAVE_SECONDS = 60  # between two files of what has been read so far
# The chat of a model that has no template; one that was not trained for chats goes on with the next
# question after a line
PLAIN_TEMPLATE = (
    "{% for turn in messages %}{% if turn.role == 'user' %}{{ turn.content }}\nAnswer:{% else %} "
    "{{ turn.content }}\n\nQuestion: {% endif %}{% endfor %}"
)


class Reader:
    """Reads texts with a model that has a memory, and each beginning of them once: a text goes on
    from the longest beginning that was read, so a question after a document, or the next turn of a
    chat, costs what is new. Where a chat's template renders an earlier turn otherwise, the reader
    goes on from the turn before. ValueError where the model has no memory.

    Args:
        model, tokenizer: a causal language model with a memory, in evaluation mode, and its
            tokenizer.
        chunk: tokens per call of the model, at least 1; working memory grows with it.
        cache: what was read before every text, such as [`InfiniCache.from_pretrained`] gives;
            `None`: nothing.
        turns: so many latest answers' ends, at least 1, are kept; each takes
            [`hf_infini.cache_bytes`] bytes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        cache: InfiniCache | None = None,
        chunk: int = 2048,
        turns: int = 4,
    ):
        check_number("chunk", chunk, {"at_least": 1})
        check_number("turns", turns, {"at_least": 1})
        net: Any = model
        self.model, cache = net, InfiniCache(net.config) if cache is None else cache
        self.tokenizer, self.chunk, self.document = tokenizer, chunk, ""
        self.texts: dict[str, InfiniCache] = {"": cache}  # that were read
        # texts up to the end of an answer
        self.turns: deque[tuple[str, InfiniCache]] = deque(maxlen=turns)

    def read(
        self,
        text: str,
        *,
        file: str | Path | None = None,
        split_special_tokens: bool = False,
        progress: bool = True,
    ) -> InfiniCache:
        """Reads a text, from the longest beginning of it that was read before, and keeps what it
        has read.

        Args:
            file: a memory file of the text, which is read if it is there, and written if not. While
                the model reads, `NAME.partial` has what it has read so far: after a kill the same
                call goes on there.
            split_special_tokens: whether words of the text that spell special tokens are plain
                text, as others' may.
            progress: whether a bar shows how far it is, and the time left.

        Returns:
            The reader's own cache after the text. Copy it (`copy.copy`) before a model is called
            with it. MemoryFileError where the file is damaged, or the memory of another text or
            model.
        """
        if text in self.texts:
            return self.texts[text]
        begun, before = self._longest([text])
        sha256, file = (
            [hashlib.sha256(text.encode()).hexdigest()],
            None if file is None else Path(file),
        )
        if file is not None and file.exists():
            cache = InfiniCache.from_pretrained(file, self.model, text_sha256=sha256)
        elif file is None:
            cache = self._read_on(
                copy.copy(before), self._encode(text[len(begun) :], split_special_tokens), progress
            )
        else:
            # now, if it cannot be made, and not after hours
            file.parent.mkdir(parents=True, exist_ok=True)
            partial, description = (
                file.with_name(f"{file.name}.partial"),
                describe_model(self.model),
            )
            cache, done = copy.copy(before), 0
            if partial.exists():
                cache = InfiniCache.from_pretrained(partial, self.model, text_sha256=sha256)
                done = cache.get_seq_length() - before.get_seq_length()

            def save(path: Path) -> None:
                cache.save_pretrained(path, description, text_sha256=sha256)

            ids = self._encode(text[len(begun) :], split_special_tokens)
            self._read_on(cache, ids, progress, done, lambda: save(partial))
            save(file)
            # of starts that were killed
            for left in (partial, *file.parent.glob(f"{glob.escape(partial.name)}.*.part")):
                left.unlink(missing_ok=True)
        self.texts[text] = cache
        return cache

    def read_document(
        self, text: str, *, file: str | Path | None = None, progress: bool = True
    ) -> InfiniCache:
        """Reads the document that all following chats are about: their first message begins with
        it. What in it spells a special token is plain text; arguments and errors as of `read`, and
        ValueError where the template changes it."""
        head, found, _ = self.rendered([{"role": "user", "content": text}]).partition(text)
        if not found:
            raise ValueError(
                "the chat template changes what is said: set the tokenizer's chat_template to None."
            )
        self.read(head, progress=False)
        cache = self.read(head + text, file=file, split_special_tokens=True, progress=progress)
        self.document = text
        return cache

    def generate(self, texts: str | Sequence[str], **options) -> list[str]:
        """What the model goes on with after each of the texts, which may begin alike; ValueError
        where one has nothing new.

        Args:
            texts: one, whose continuation is kept for the next; or several, which are read in one
                batch.
            options: of the model's `generate`, such as `max_new_tokens=200` or `streamer`. Steps
                are compiled only with `disable_compile=False`: the first answer then takes a minute
                longer.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        begun, before = self._longest(texts)
        ids = [self._encode(text[len(begun) :], False) for text in texts]
        if not ids or not all(len(row) for row in ids):
            raise ValueError(
                "give texts that go on, by one token at least, beyond what has been read of them."
            )
        cache = copy.copy(before)
        if len(texts) == 1 and len(ids[0]) > self.chunk:
            cache = self._read_on(cache, ids[0][: -self.chunk], True)
            ids = [ids[0][-self.chunk :]]
        pad: Any = next(
            i
            for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
            if i is not None
        )
        cache.batch_repeat_interleave(len(texts))
        inputs = pad_sequence(ids, True, pad, "left").to(self.model.device)
        real = pad_sequence([torch.ones_like(row) for row in ids], True, 0, "left").to(
            self.model.device
        )
        own = {
            "return_dict_in_generate": True,
            "use_cache": True,
            "pad_token_id": pad,
            CACHE: cache,
        }
        options = {"disable_compile": True} | options
        output = self.model.generate(
            inputs, attention_mask=cache.attention_mask(real), **options | own
        )
        new = output.sequences[:, inputs.shape[1] :]
        # After a beam search the cache is that of the beams, and not of the text
        if len(texts) == len(output.sequences) == 1 and (options.get("num_beams") or 1) == 1:
            # the last was not read
            said: Any = self.tokenizer.decode(new[0, :-1], clean_up_tokenization_spaces=False)
            self.turns.append((texts[0] + said, cache_of(output)))
        return self.tokenizer.batch_decode(new, skip_special_tokens=True)

    def chat(self, messages: Sequence[dict[str, str]], **options) -> str:
        """The answer to the last of the messages, which are the user's and, in turn, the model's
        answers, `role` and `content` each; by the tokenizer's chat template. Options as of
        [`Reader.generate`]."""
        if self.document:
            first, *rest = messages
            messages = [
                {**first, "content": f"{self.document}\n\nQuestion: {first['content']}"},
                *rest,
            ]
        if self.tokenizer.chat_template is None:  # a model of plain text would go on with questions
            options = {"stop_strings": ["\n"], "tokenizer": self.tokenizer} | options
        return self.generate(self.rendered(messages), **options)[0].strip()

    def rendered(self, messages: Sequence[dict[str, str]]) -> str:
        """The messages as a text, up to where the answer begins."""
        how: dict[str, Any] = {
            "chat_template": self.tokenizer.chat_template or PLAIN_TEMPLATE,
            "tokenize": False,
        }
        text: Any = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, **how
        )
        return text

    def _longest(self, texts: Sequence[str]) -> tuple[str, InfiniCache]:
        """The longest beginning of all these texts that was read, and its cache."""
        known = [*self.texts.items(), *self.turns]
        return max(
            (one for one in known if all(text.startswith(one[0]) for text in texts)),
            key=lambda one: len(one[0]),
        )

    def _encode(self, text: str, split_special_tokens: bool) -> torch.Tensor:
        how: dict[str, Any] = {
            "add_special_tokens": False,
            "split_special_tokens": split_special_tokens,
            "verbose": False,
        }
        return torch.tensor(self.tokenizer(text, **how)["input_ids"], dtype=torch.long)

    @torch.no_grad()
    def _read_on(
        self,
        cache: InfiniCache,
        ids: torch.Tensor,
        progress: bool,
        done: int = 0,
        save: Callable[[], None] = lambda: None,
    ) -> InfiniCache:
        """The cache, which reads these ids from number `done` on; `save` is called from time to
        time."""
        saved = time.monotonic()
        with tqdm(
            total=len(ids),
            initial=done,
            desc="reading",
            unit="token",
            unit_scale=True,
            disable=not progress,
        ) as bar:
            for place in range(done, len(ids), self.chunk):
                piece = ids[place : place + self.chunk].to(self.model.device)
                decoder_of(self.model)(input_ids=piece[None], use_cache=True, **{CACHE: cache})
                bar.update(len(piece))
                if time.monotonic() > saved + SAVE_SECONDS:
                    save()
                    saved = time.monotonic()
        return cache
