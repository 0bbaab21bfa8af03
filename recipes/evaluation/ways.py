"""Ways to read a document once and to answer many questions about it: what the contestants of
recipes/evaluate_documents.py do.

A way is a class derived from [`Way`] and a row of [`WAYS`]. Of a document it makes a reading
(`read`), of a reading and a question a cache that the question goes on from (`asked`), which
nothing else uses. Where a way needs no more than its cache, `fork` is all that `asked` does.
"""

import contextlib
import copy
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from cli import UserError, one_line
from hf_infini import InfiniCache
from hf_infini.compat.cache_name import CACHE
from hf_infini.models.adapter import read_record
from hf_infini.ops.recall import have_left
from hf_infini.options import key_heads
from support.measurement import cache_bytes

from .caches import LEARNED, bounded
from .inference import read_in_chunks, with_lora
from .presses import press_of
from .prompts import Document, Question


class Way:
    """All tokens in a cache that grows with the document: "plain", and what the others are derived
    from.

    Args:
        name: of the row.
        model: a plain causal language model, in evaluation mode.
        options: of the recipe: `chunk`, `adapter`, `keep_score`, `window`, `segments`, `passage`,
            `embedder`, `bits`, `lora`.
        tokens: places of each key/value head, on average; `None` for a way that is not `bounded`.
    """

    #: whether `tokens` bound its cache
    bounded = False

    #: whether each token has the position that it has in the text, so that a model has a limit
    own_positions = True

    def __init__(self, name: str, model, options, tokens: int | None):
        self.name, self.model, self.options, self.tokens = name, model, options, tokens

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Within it, the model is as the way needs it."""
        yield

    def limit(self) -> int | None:
        """The longest document with its question and answer, in tokens; `None`: any."""
        config = self.model.config.get_text_config(decoder=True)
        return getattr(config, "max_position_embeddings", None) if self.own_positions else None

    def read(self, document: Document) -> Any:
        """What is known of a document after it was read, for [`Way.asked`]."""
        return self.read_on(document.ids)

    def asked(self, reading: Any, question: Question) -> Any:
        """A cache that the question's ids go on from, which may change."""
        return self.fork(reading)

    def call(self, cache: Any, ids: Tensor) -> Tensor:
        """The model's logits `[tokens, vocabulary]` for ids `[tokens]` behind a cache, which then
        holds them too."""
        ids = ids[None].to(self.model.device)
        return self.model(
            input_ids=ids, use_cache=True, **{CACHE: cache}, **self.where(cache, ids)
        ).logits[0]

    def where(self, cache: Any, ids: Tensor) -> dict[str, Tensor]:
        """Positions of ids `[1, tokens]` behind a cache, where the model cannot count them."""
        return {}

    def held(self, cache: Any, document: Document) -> Tensor | None:
        """Which share of the layers and key/value heads has each of the document's tokens,
        `[tokens]`, 0 to 1, in a cache of [`Way.asked`]; `None` where that is not known."""
        return torch.ones(len(document.ids))

    def bytes(self, cache: Any) -> int:
        """Bytes of a cache of [`Way.asked`]."""
        return cache_bytes(cache)

    def read_on(self, ids: Tensor) -> Any:
        """The cache of the model as it is after ids `[tokens]`."""
        return read_in_chunks(self.model, ids[None].to(self.model.device), self.options.chunk)

    def fork(self, cache: Any) -> Any:
        """A second cache that goes on from the same place."""
        if isinstance(cache, InfiniCache):
            return copy.copy(cache)
        other = copy.copy(cache)  # its layers put new tensors in the place of theirs
        other.layers = [copy.copy(layer) for layer in cache.layers]
        return other


class Bounded(Way):
    """A window with sinks, and what its `score` keeps beside it: caches of constant size."""

    bounded, own_positions = True, False

    def score(self) -> str:
        """The way of recipes/evaluation/caches.py."""
        return "window"

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        own, way = self.options, self.score()
        adapter = own.adapter if way in LEARNED else None
        with bounded(self.model, adapter, way, self.tokens, own.window, own.segments):
            yield

    def held(self, cache: InfiniCache, document: Document) -> Tensor:
        found = torch.zeros(len(document.ids))
        for number, window in cache.windows.items():
            state = cache.layers[number].state
            sinks, first = have_left(int(state.tokens_seen[0]), window)
            kept = state.kept_position
            heads = state.local_key.shape[1]
            here = torch.zeros(heads, len(found))
            here[:, :sinks], here[:, first:] = 1, 1
            for head in range(heads if kept is not None else 0):
                here[head, kept[0, head][kept[0, head] >= 0].cpu()] = 1
            found += here.mean(0)
        return found / len(cache.windows)  # sliding layers, which stay as they are, do not count


class Kept(Bounded):
    """Tokens kept by the scores of the adapter, or by a keep score that needs none."""

    def score(self) -> str:
        known = read_record(self.options.adapter)["options"] if self.options.adapter else {}
        return self.options.keep_score or known.get("keep_score") or "attention"


class Recalled(Bounded):
    """A window and the latest tokens, in whose places each question puts what it recalls from an
    archive of all tokens."""

    #: as of [`InfiniCache`]
    archive: bool | str = True

    def score(self) -> str:
        return "recent"

    def read(self, document: Document) -> InfiniCache:
        ids, cache = document.ids[None], InfiniCache(self.model.config, archive=self.archive)
        return read_in_chunks(self.model, ids.to(self.model.device), self.options.chunk, cache)

    def asked(self, reading: InfiniCache, question: Question) -> InfiniCache:
        return reading.recall(question.words, terms=question.terms)


class RecalledInt8(Recalled):
    """The same from an archive in 8 bits."""

    archive = "int8"


class Retrieved(Way):
    """The passages that BM25 finds for a question, read again by the plain model, in the order of
    the document and as many as make a cache of `tokens` with the question."""

    bounded, own_positions = True, False

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        _bm25s()
        yield

    def read(self, document: Document) -> tuple[Document, list[range], Any]:
        size, end = self._size(), len(document.ids)
        passages = [range(at, min(at + size, end)) for at in range(document.first, end, size)]
        texts = [self._text(document, part) for part in passages]
        return document, passages, self.index(texts, document.language)

    def asked(self, reading: Any, question: Question) -> Any:
        document, passages, index = reading
        room = self.tokens - document.first - len(question.ids)
        count = min(len(passages), max(1, room // self._size()))
        found = list(range(len(passages)))[-count:]  # where there is nothing to look for
        if index is not None:
            found = self.search(index, question.text, document.language, count)
        chosen = [place for part in sorted(found) for place in passages[part]]
        self.chosen = torch.tensor(chosen)
        return self.read_on(torch.cat([document.ids[: document.first], document.ids[self.chosen]]))

    def index(self, texts: list[str], language: str) -> Any:
        """What [`Retrieved.search`] looks into; `None` where it would find nothing."""
        words, index = self._words(texts, language), _bm25s().BM25()
        if words.vocab:
            index.index(words, show_progress=False)
        return index if words.vocab else None

    def search(self, index: Any, asked: str, language: str, count: int) -> list[int]:
        """The numbers of the `count` texts that a question is nearest to."""
        words = self._words([asked], language)
        return index.retrieve(words, k=count, show_progress=False)[0][0].tolist()

    def _size(self) -> int:
        return self.options.passage or self.tokens // 8

    def held(self, cache: Any, document: Document) -> Tensor:
        """Of the question that was asked last."""
        found = torch.zeros(len(document.ids))
        found[: document.first], found[self.chosen] = 1, 1
        return found

    @staticmethod
    def _text(document: Document, part: range) -> str:
        spans = document.spans[part.start - document.first : part.stop - document.first]
        return document.text[spans[0][0] : spans[-1][1]]

    @staticmethod
    def _words(texts: list[str], language: str) -> Any:
        return _bm25s().tokenize(texts, stopwords=language, show_progress=False)


class Embedded(Retrieved):
    """The passages whose embeddings are nearest to that of the question, by the model of
    sentence-transformers that is the option `embedder`; read as those of BM25 are."""

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        self.embedder, self.said = _embedder(self.options.embedder, str(self.model.device)), False
        yield

    def index(self, texts: list[str], language: str) -> Tensor:
        limit, tokenizer = self.embedder.max_seq_length, self.embedder.tokenizer
        if not self.said and limit and callable(tokenizer):
            ids = tokenizer(texts, truncation=False, verbose=False)["input_ids"]
            if (longest := max(map(len, ids))) > limit:
                self.said = True
                tqdm.write(
                    f"--embedder reads the first {limit:,} of its tokens of a passage, and some "
                    f"have {longest:,}: --passage makes shorter ones",
                    sys.stderr,
                )
        how = {"convert_to_tensor": True, "show_progress_bar": False}
        return self.embedder.encode_document(texts, **how)

    def search(self, index: Tensor, asked: str, language: str, count: int) -> list[int]:
        how = {"convert_to_tensor": True, "show_progress_bar": False}
        query = self.embedder.encode_query(asked, **how)
        return self.embedder.similarity(query, index)[0].topk(count).indices.tolist()


class Quantized(Way):
    """All tokens, their keys and values in few bits (transformers' QuantizedCache by quanto)."""

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        self._cache()
        yield

    def _cache(self) -> Any:
        from transformers import QuantizedCache

        # numbers of one group have one scale; groups must fill a head
        own = self.model.config.get_text_config(decoder=True)
        group = math.gcd(64, *key_heads(own)[1:])
        given = {"nbits": int(self.options.bits), "q_group_size": group}
        try:
            return QuantizedCache("quanto", own, **given)
        except ImportError as error:
            raise UserError(f"{self.name}: pip install optimum-quanto ({error})") from error

    def read_on(self, ids: Tensor) -> Any:
        cache = self._cache()
        # in one call: each later one would round all that is there again
        ids = ids[None].to(self.model.device)
        self.model(input_ids=ids, logits_to_keep=1, use_cache=True, **{CACHE: cache})
        return cache

    def bytes(self, cache: Any) -> int:
        return sum(_bytes(part) for layer in cache.layers for part in vars(layer).values())


class Pressed(Way):
    """A press of kvpress: it reads the whole document with a growing cache, before it has seen a
    question, and leaves `tokens` less the question's room."""

    bounded = True

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        press_of(self.name)
        yield

    def read(self, document: Document) -> Any:
        tokens, kept = len(document.ids), self.tokens - self.options.window
        # a press keeps int(tokens * (1 - ratio))
        ratio = max(0.0, 1 - (kept + 0.5) / tokens)
        cache, ids = DynamicCache(), document.ids[None].to(self.model.device)
        with press_of(self.name)(compression_ratio=ratio)(self.model):
            places = torch.arange(tokens, device=ids.device)
            self.model.model(input_ids=ids, past_key_values=cache, cache_position=places)
        self.gone = tokens - cache.get_seq_length()
        return cache

    def where(self, cache: Any, ids: Tensor) -> dict[str, Tensor]:
        first = cache.get_seq_length() + self.gone
        places = torch.arange(first, first + ids.shape[1], device=ids.device)
        return {"position_ids": places[None], "cache_position": places}

    def held(self, cache: Any, document: Document) -> None:
        return None  # presses do not say


class Tuned:
    """Mixin: a way whose model has the LoRA of the option `lora`, or of the adapter, added to its
    weights."""

    @contextlib.contextmanager
    def ready(self: Any) -> Iterator[None]:
        plain, own = self.model, self.options
        # not taken off again, which would round 16-bit weights
        self.model = with_lora(copy.deepcopy(plain), own.lora or own.adapter)
        try:
            with super().ready():
                yield
        finally:
            self.model = plain


def _bytes(part: Any) -> int:
    """Of a tensor, or of the tensors that a quantised one consists of."""
    if not isinstance(part, Tensor):
        return 0
    names = getattr(part, "__tensor_flatten__", lambda: ([], None))()[0]
    return sum(_bytes(getattr(part, name)) for name in names) if names else part.nbytes


def _bm25s():
    try:
        import bm25s
    except ImportError as error:
        raise UserError(f"bm25: pip install bm25s ({error})") from error
    return bm25s


def _embedder(name: str, device: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise UserError(f"embedding: pip install sentence-transformers ({error})") from error
    try:
        return SentenceTransformer(name, device=device)
    except Exception as error:  # whatever its parts may raise
        raise UserError(f"--embedder {name}: cannot load it ({one_line(error)})") from error


WAYS: dict[str, type[Way]] = {
    "plain": Way,
    "window": Bounded,
    "kept": Kept,
    "recall": Recalled,
    "recall-int8": RecalledInt8,
    "bm25": Retrieved,
    "embedding": Embedded,
    "quantized": Quantized,
    **dict.fromkeys(("StreamingLLM", "SnapKV", "KeyDiff", "ExpectedAttention"), Pressed),
}
WAYS |= {
    f"{name}+lora": type(f"Tuned{way.__name__}", (Tuned, way), {}) for name, way in WAYS.items()
}
