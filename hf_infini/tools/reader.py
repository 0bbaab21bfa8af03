"""A text that is read once, and asked many times: questions after a document, the turns of a
chat."""

import contextlib
import copy
import functools
import hashlib
import os
import sys
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..cache.cache import InfiniCache
from ..cache.files import describe_model
from ..cache.joined import joined
from ..compat.cache_name import CACHE, cache_of
from ..models.loading import fingerprint, opening
from ..models.structure import decoder_of
from ..ops.checks import Model, check_types
from ..ops.recall import Terms
from ..ops.rules import RULES
from ..options import check_number
from .passages import Passage, passages_of, term_numbers
from .text_file import TextFile

COLDEST, HOTTEST = 1e-4, 1e4  # temperatures at which logits are numbers in every dtype
SAVE_SECONDS = 60  # between two files of what has been read so far
# The chat of a model that has no template; one that was not trained for chats goes on with the next
# question after a line
PLAIN_TEMPLATE = (
    "{% for turn in messages %}{% if turn.role == 'user' %}{{ turn.content }}\nAnswer:"
    "{% elif turn.role == 'system' %}{{ turn.content }}\n\n{% else %} "
    "{{ turn.content }}\n\nQuestion: {% endif %}{% endfor %}"
)
# Around what is plain text although it spells special tokens; half of a character, which no text
# with tokens has
MARK = "\ud800"


def plain_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """[`PLAIN_TEMPLATE`], after what a `tokenizer` puts in front of every text."""
    return ("{{ bos_token }}" if opening(tokenizer) else "") + PLAIN_TEMPLATE


class Reader:
    """Reads texts with a model that has a memory, and each beginning of them once: a text goes on
    from the longest beginning that was read, so a question after a document, or the next turn of a
    chat, costs what is new. Where a chat's template renders an earlier turn otherwise, the reader
    goes on from the turn before.

    Args:
        model, tokenizer: a causal language model with a memory, in evaluation mode, and its
            tokenizer.
        chunk: tokens per call of the model, at least 1; working memory grows with it.
        cache: what was read before every text, such as [`InfiniCache.from_pretrained`] gives;
            `None`: nothing.
        archive: whether keys and values of all that is read are archived, beside a memory file or
            in host memory, and each question recalls what it asks for
            ([`InfiniCache.recall`]); "int8": in 8 bits, as of [`InfiniCache`]. A given cache
            decides by its own archive.
        turns: so many latest answers' ends, at least 1, are kept, and so many readings of the
            document after other beginnings of a chat; each takes [`hf_infini.cache_bytes`] bytes.

    Raises:
        ValueError: the model has no memory, or the cache was read by another tokenizer.
    """

    @check_types
    def __init__(
        self,
        model: Model,
        tokenizer: PreTrainedTokenizerBase,
        *,
        cache: InfiniCache | None = None,
        archive: bool | str = False,
        chunk: int = 2048,
        turns: int = 4,
    ):
        check_number("chunk", chunk, {"at_least": 1})
        check_number("turns", turns, {"at_least": 1})
        net: Any = model
        cache = InfiniCache(net.config, archive=archive) if cache is None else cache
        self.model, self.archive = net, cache.archived
        self.tokenizer, self.chunk, self.document = tokenizer, chunk, ""
        self._documents: list[str] = []  # with marks
        self.document_tokens: list[int] = []  # of each document of an archive
        self._begins: dict[str, int] = {}  # tokens before the documents, by what they are after
        # what the last answers recalled: of each the passages, the most relevant first
        self.passages: list[list[Passage]] = []
        # Texts that were read; in these, [`MARK`] is around plain text that spells special tokens
        self.texts: dict[str, InfiniCache] = {"": cache}
        # texts up to the end of an answer; and the document after other beginnings
        self.turns: deque[tuple[str, InfiniCache]] = deque(maxlen=turns)
        self.documents: deque[tuple[str, InfiniCache]] = deque(maxlen=turns)
        if "tokenizer" in cache.text and not torch.equal(
            cache.text["tokenizer"][:1].cpu(), self._tokenizer_sha256()
        ):
            raise ValueError(
                "the cache was read by another tokenizer, whose tokens have other ids: give the "
                "reader that one, or have it read the text."
            )

    @check_types
    def read(
        self,
        text: str,
        *,
        file: str | os.PathLike | None = None,
        split_special_tokens: bool = False,
        progress: bool = True,
    ) -> InfiniCache:
        """Reads a text, from the longest beginning of it that was read before, and keeps what it
        has read.

        Args:
            file: a memory file of the text, which is read if it is there, and written if not. While
                the model reads, `NAME.partial` has what it has read so far: after a kill the same
                call goes on there. Where another process reads the same text into the same file,
                this one waits for it.
            split_special_tokens: whether words of the text that spell special tokens are plain
                text, as others' may.
            progress: whether a bar shows how far it is, and the time left.

        Returns:
            The reader's own cache after the text, and before it what the tokenizer puts in front
            of every text, where nothing was read before. Copy it (`copy.copy`) before a model is
            called with it. MemoryFileError where the file is damaged, or the memory of another
            text, beginning, tokenizer or model; what is such a `NAME.partial` is passed over, with
            a warning.
        """
        key = self._plain(text) if split_special_tokens else _checked(text)
        if key not in self.texts:
            begun = self._begun(text, len(text) - 1)
            rest = text[len(_bare(begun)) :]
            key = begun + (self._plain(rest) if split_special_tokens else rest)
        return self._read(key, file, progress, opened=True)

    def _read(
        self,
        text: str,
        file: str | os.PathLike | None,
        progress: bool,
        described: dict[str, Any] | None = None,
        *,
        opened: bool = False,
    ) -> InfiniCache:
        """[`Reader.read`] of a text with marks; `described`: what [`describe_model`] says of the
        model, if it is known; `opened`: whether it begins as of [`opening`], and not as a template
        has it."""
        if file is not None and not Path(file).name:
            raise ValueError(
                f"file must name a memory file, such as text.safetensors; got {file!r}."
            )
        if text in self.texts and (file is None or Path(file).exists()):
            return self.texts[text]
        begun, before = self._longest([text])[0]
        ids = self._encode(text[len(begun) :], opened and before.state is None)
        if file is None:
            cache = self._read_on(copy.copy(before), ids, progress=progress)
        else:
            of_text = TextFile(
                file=Path(file),
                model=self.model,
                described=described or describe_model(self.model),
                before=before,
                ids=ids,
                sha256=hashlib.sha256(_bare(text).encode()).hexdigest(),
                tokenizer=self._tokenizer_sha256(),
            )
            cache = of_text.cache(functools.partial(self._read_on, progress=progress))
        self.texts[text] = cache
        return cache

    @check_types
    def read_document(
        self,
        text: str,
        *,
        file: str | os.PathLike | None = None,
        progress: bool = True,
        before: Sequence[dict[str, str]] = (),
    ) -> InfiniCache:
        """Reads the document that all following chats are about: their first message of the user
        begins with it. What in it spells a special token is plain text; arguments and errors as of
        `read`, and ValueError where the template drops what is said.

        Args:
            text, file, progress: as of `read`.
            before: the messages that the chats begin with, such as a system message. Where others
                come first in a chat, the document is read once more for them.
        """
        return self.read_documents([text], files=[file], progress=progress, before=before)

    @check_types
    def read_documents(
        self,
        texts: Sequence[str],
        *,
        files: Sequence[str | os.PathLike | None] | None = None,
        progress: bool = True,
        before: Sequence[dict[str, str]] = (),
    ) -> InfiniCache:
        """Reads documents, each by itself, that all following chats are about: each question
        recalls from all of them. The model sees the end of the last one, too. One document is read
        as by `read_document`.

        Args:
            texts: of the documents.
            files: of each its memory file, or `None`; a document whose file is there is not read
                again, whatever the others are.
            progress, before: as of `read_document`.

        Returns:
            The reader's own cache, [`joined`]. Errors as of `read_document`; ValueError where there
            are several texts, but no archive, or not [`reads_apart`].
        """
        files = [None] * len(texts) if files is None else list(files)
        if isinstance(texts, str) or not texts or len(files) != len(texts):
            raise ValueError(
                "give the texts of one or more documents, and a file for each or none; got "
                f"{len(texts)} texts and {len(files)} files."
            )
        head, _ = self._rendered_parts([*before, {"role": "user", "content": ""}], True)
        marked = [self._plain(text) for text in texts]
        self._read(head, None, progress=False)
        cache = self._read_after(head, marked, files, progress)
        if cache.archive is not None:
            [row] = cache.archive.rows()
            rows = sorted(row.documents, key=lambda each: each.number)
            self.document_tokens = [len(each.ids) - self._begins[head] for each in rows]
        self.document, self._documents = "\n\n".join(texts), marked
        self.texts[head + self._document] = cache
        return cache

    def reads_apart(self, texts: Iterable[str]) -> bool:
        """Whether documents of these `texts` can be read apart: they are archived, the model has no
        memory of what leaves its window, and one text at least fills that."""
        config = self.model.config
        span = max(window.span for window in config.windows.values())
        return (
            bool(self.archive)
            and config.update_rule not in RULES
            and any(len(self._encode(f"{MARK}{_checked(text)}{MARK}")) >= span for text in texts)
        )

    @property
    def _document(self) -> str:
        """The documents as a chat has them, with marks."""
        return "\n\n".join(self._documents)

    def _read_after(
        self,
        head: str,
        documents: list[str],
        files: Sequence[str | os.PathLike | None],
        progress: bool,
    ) -> InfiniCache:
        """The cache of documents with marks, each of which was read after a chat's `head`."""
        if len(documents) > 1 and not self.archive:
            raise ValueError(
                "documents that are read apart are recalled from an archive: give the reader "
                'archive=True, or have it read them as one text, "\\n\\n".join(texts).'
            )

        new = head not in self.texts
        state: Any = self._read(head, None, progress=False).state
        self._begins[head] = 0 if state is None else int(state.tokens_seen[0])
        several = sum(file is not None for file in files) > 1
        described = describe_model(self.model) if several else None

        def each() -> Iterator[InfiniCache]:
            for document, file in zip(documents, files, strict=True):
                known = head + document in self.texts
                cache = self._read(head + document, file, progress, described)
                if not known:  # as many states as documents would not be of constant size
                    del self.texts[head + document]
                yield cache

        cache = joined(each()) if len(documents) > 1 else next(each())
        if new:
            del self.texts[head]
        return cache

    @check_types
    def generate(self, texts: str | Sequence[str], **options) -> list[str]:
        """What the model goes on with after each of the texts, which may begin alike; ValueError
        where one was read to its end. What in them spells a special token is one, but for what was
        read as plain text. A text begins as the tokenizer has texts begin, as of `read`.

        Args:
            texts: one, whose continuation is kept for the next; or several, which are read in one
                batch.
            options: of the model's `generate`, such as `max_new_tokens=200` or `streamer`. Steps
                are compiled only with `disable_compile=False`: the first answer then takes a minute
                longer. With `num_return_sequences` each text has as many answers, one after the
                other.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        begun = [self._begun(text, len(text)) for text in texts]
        pairs = zip(begun, texts, strict=True)
        rows = [key + text[len(_bare(key)) :] for key, text in pairs]
        return self._answers(rows, options, opened=True)

    def _answers(
        self,
        texts: list[str],
        options: dict[str, Any],
        question: str | None = None,
        begin: int | None = None,
        *,
        opened: bool = False,
    ) -> list[str]:
        """[`Reader.generate`] of texts with marks; `question`: what in the one text is asked, or
        all that is new; `begin`: of the documents, in tokens; `None`: there are none; `opened`: as
        of [`Reader._read`]."""
        before, ids = self._going_on(texts, opened)
        cache = copy.copy(before)
        if len(texts) == 1 and len(ids[0]) > self.chunk:
            cache = self._read_on(cache, ids[0][: -self.chunk], progress=True)
            ids = [ids[0][-self.chunk :]]
        pad: Any = next(
            i
            for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
            if i is not None
        )
        cache.batch_repeat_interleave(len(texts))
        self.passages = [[] for _ in texts]
        if cache.archive is not None and cache.state is not None:
            asked = ids if question is None else [self._encode(self._plain(question))]
            cache = cache.recall(asked, terms=self.terms)
            documents = None if begin is None else (begin, self.document_tokens)
            self.passages = [
                [*passages_of(self.tokenizer, cache, row, documents)] for row in range(len(texts))
            ]
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
        mask = cache.attention_mask(real)
        cache.batch_repeat_interleave(self._rows_of_each(options))
        output = self.model.generate(inputs, attention_mask=mask, **options | own)
        new = output.sequences[:, inputs.shape[1] :]
        # After a beam search the cache is that of the beams, and not of the text
        if len(texts) == len(output.sequences) == cache_of(output).batch_size == 1:
            # the last was not read
            said: Any = self.tokenizer.decode(new[0, :-1], clean_up_tokenization_spaces=False)
            text = texts[0] + said
            if known := [turn for turn in self.turns if turn[0] == text]:
                self.turns.remove(known[0])
            self.turns.append((text, cache_of(output)))
        return self.tokenizer.batch_decode(new, skip_special_tokens=True)

    def _rows_of_each(self, options: dict[str, Any]) -> int:
        """In how many rows `generate` with these options goes on with a text."""
        configs = options.get("generation_config"), self.model.generation_config
        given: Any = [options, *(config.to_dict() for config in configs if config is not None)]
        return max(
            next((each[name] for each in given if each.get(name) is not None), 1)
            for name in ("num_beams", "num_return_sequences")
        )

    @property
    def terms(self) -> Terms:
        """[`term_numbers`] of the tokenizer."""
        return term_numbers(self.tokenizer)

    @property
    def sources(self) -> list[list[str]]:
        """The texts of the `passages`."""
        return [[passage.text for passage in each] for each in self.passages]

    def _going_on(self, texts: list[str], opened: bool) -> tuple[InfiniCache, list[torch.Tensor]]:
        """The cache from which these texts with marks go on, and the ids of each behind it;
        `opened`: as of [`Reader._read`]."""
        for begun, before in self._longest(texts):
            first = opened and before.state is None
            ids = [self._encode(text[len(begun) :], first) for text in texts]
            if ids and all(len(row) for row in ids):
                return before, ids
            if begun in self.texts:  # an answer of one token ends where its question does
                break
        raise ValueError(
            "give texts that go on, by one token at least, beyond what has been read of them."
        )

    @check_types
    def chat(self, messages: Sequence[dict[str, str]], **options) -> str:
        """The answer to the last of the messages, `role` and `content` each, which are the user's
        and, in turn, the model's answers, perhaps after a system message; by the tokenizer's chat
        template. What in them spells a special token is plain text, but for a system message's.
        ValueError where the template does not take them, or none is the user's. Options as of
        [`Reader.generate`]."""
        head, rest = self._rendered_parts(messages, bool(self.document))
        begun = head + self._document if self.document else head
        # a template that begins otherwise, such as with a system message
        if self.document and len(self._longest([begun + rest])[0][0]) < len(begun):
            none = [None] * len(self._documents)
            cache = self._read_after(head, self._documents, none, True)
            self.documents.append((begun, cache))
        if not self.tokenizer.chat_template:  # a model of plain text would go on with questions
            options = {"stop_strings": ["\n"], "tokenizer": self.tokenizer} | options
        asked = next(turn["content"] for turn in reversed(messages) if turn["role"] == "user")
        begin = self._begins[head] if self.document else None
        return self._answers([begun + rest], options, asked, begin)[0].strip()

    def rendered(self, messages: Sequence[dict[str, str]]) -> str:
        """The messages as a text, up to where the answer begins; ValueError where the template
        does not take them."""
        how: dict[str, Any] = {"tokenize": False}
        if not self.tokenizer.chat_template:  # which may be several, by their names
            how["chat_template"] = plain_template(self.tokenizer)
        try:
            text: Any = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, **how
            )
        except Exception as error:  # whatever a template and its filters may raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"the chat template does not take these messages ({reason}): give it others, or "
                "go without it, by tokenizer.chat_template = None (--no-chat-template)."
            ) from error
        return text

    def _rendered_parts(
        self, messages: Sequence[dict[str, str]], document: bool
    ) -> tuple[str, str]:
        """The messages as a text with marks: what is before the document, and what is behind it;
        without one, all and nothing. The template sees names in the place of the document, and of
        what is said that spells special tokens."""
        own, shown = uuid.uuid4().hex, []
        names = {own: self._document} if document else {}
        for turn in messages:
            of_turn = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else ()
            silent = of_turn == ("assistant", None)  # such as one that calls a tool
            if not silent and [*map(type, of_turn)] != [str, str]:
                raise TypeError(
                    "messages must have a role and a content, which are texts, such as "
                    f"{{'role': 'user', 'content': 'Who?'}}; got {turn!r:.200}."
                )
        place = next((n for n, turn in enumerate(messages) if turn["role"] == "user"), None)
        if place is None:
            raise ValueError("messages: give at least one message whose role is user.")
        for number, turn in enumerate(messages):
            said = turn.get("content")
            if turn["role"] != "system" and said and (plain := self._plain(said)) != said:
                said = uuid.uuid4().hex
                names[said] = plain
            if number == place and document:
                said = f"{own}\n\nQuestion: {said}"
            shown.append({**turn, "content": said})
        head, found, rest = self.rendered(shown).partition(own)
        if document and not found:
            raise ValueError(
                "the chat template changes what is said: go without it, by "
                "tokenizer.chat_template = None (--no-chat-template)."
            )
        for name, plain in names.items():
            head, rest = (part.replace(name, plain) for part in (head, rest))
        return head, rest

    def _known(self) -> list[tuple[str, InfiniCache]]:
        """All that was read."""
        return [*self.texts.items(), *self.documents, *self.turns]

    def _longest(self, texts: Sequence[str]) -> list[tuple[str, InfiniCache]]:
        """The beginnings of all these texts, with marks, that were read, and their caches, from the
        longest on."""
        known = [one for one in self._known() if all(text.startswith(one[0]) for text in texts)]
        return sorted(known, key=lambda one: -len(one[0]))

    def _begun(self, text: str, most: int) -> str:
        """The longest beginning of a text without marks, of so many characters at most, that was
        read, with marks."""
        text = _checked(text)
        known = ((_bare(key), key) for key, _ in reversed(self._known()))
        found = [one for one in known if len(one[0]) <= most and text.startswith(one[0])]
        return max(found, key=lambda one: len(one[0]), default=("", ""))[1]

    def _plain(self, text: str) -> str:
        """A text in which nothing is a special token, with marks if it spells one."""
        how: dict[str, Any] = {"add_special_tokens": False, "verbose": False}
        usual, plain = (
            self.tokenizer(_checked(text), split_special_tokens=split, **how)["input_ids"]
            for split in (False, True)
        )
        return text if usual == plain else f"{MARK}{text}{MARK}"

    def _encode(self, text: str, opened: bool = False) -> torch.Tensor:
        """The ids of a text with marks, `[tokens]`, behind those of [`opening`] where it is
        `opened` and does not begin with them."""
        ids, how = [], {"add_special_tokens": False, "verbose": False}
        for number, piece in enumerate(text.split(MARK)):
            if piece:
                how["split_special_tokens"] = number % 2 == 1
                ids += self.tokenizer(piece, **how)["input_ids"]
        if opened and ids[:1] != (first := opening(self.tokenizer)):
            ids = first + ids
        return torch.tensor(ids, dtype=torch.long)

    def _tokenizer_sha256(self) -> torch.Tensor:
        """The bytes of the tokenizer's [`fingerprint`], `[1, 32]`."""
        return torch.tensor([[*bytes.fromhex(fingerprint(self.tokenizer))]], dtype=torch.uint8)

    @torch.no_grad()
    def _read_on(
        self,
        cache: InfiniCache,
        ids: torch.Tensor,
        done: int = 0,
        save: Callable[[], None] | None = None,
        *,
        progress: bool,
    ) -> InfiniCache:
        """The cache, which reads these ids from number `done` on; `save` is called from time to
        time, and when it is interrupted."""
        saved = time.monotonic()
        with tqdm(
            total=len(ids),
            initial=done,
            desc="reading",
            unit="token",
            unit_scale=True,
            disable=not progress,
        ) as bar:
            try:
                for place in range(done, len(ids), self.chunk):
                    piece = ids[place : place + self.chunk].to(self.model.device)
                    self._read_piece(cache, piece)
                    bar.update(len(piece))
                    if save is not None and time.monotonic() > saved + SAVE_SECONDS:
                        try:
                            save()
                        except OSError as error:  # perhaps there is room for the whole later
                            warnings.warn(
                                f"what was read so far is not kept: {error}", stacklevel=2
                            )
                        saved = time.monotonic()
            except BaseException:
                # not where the call has changed a part of the cache
                with contextlib.suppress(ValueError, OSError):
                    if save is not None:
                        save()
                        if progress:
                            bar.write(f"kept: {bar.n:,} tokens; the same call goes on", sys.stderr)
                raise
        return cache

    def _read_piece(self, cache: InfiniCache, ids: torch.Tensor) -> None:
        """One call of the model, in which the cache reads these ids, `[tokens]`."""
        decoder_of(self.model)(input_ids=ids[None], use_cache=True, **{CACHE: cache})


def _checked(text: str) -> str:
    """The text; ValueError where it has halves of characters, for which there are no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has half of a character at place {error.start}: decode it with "
            "errors='replace'."
        ) from error
    return text


def _bare(text: str) -> str:
    """A text without marks."""
    return text.replace(MARK, "")
