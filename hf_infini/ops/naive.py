"""Infini-attention straight from the equations, token by token, with every option. Slow, obvious,
and the reference of every test: of the code that it judges it uses nothing."""

import bisect
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..options import Window
from .checks import check_arguments, check_types
from .keeping import token_score
from .keeping.score import TokenScore
from .positions import rotate
from .recall import BLOCK_TOKENS, K1, LEAST, LETTERS, PAIRS, REACH, WORDS, C
from .rules import memory_rule
from .state import InfiniState, Tokens, check_shapes

EPS = 1e-6
FEATURE_MAPS = {"elu": lambda x: F.elu(x) + 1, "exp": lambda x: x.clamp(max=30).exp()}


@check_types
def naive_infini_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    segment_length: int,
    *,
    update_rule: str = "linear",
    feature_map: str = "elu",
    local_segments: int = 0,
    sink_tokens: int = 0,
    kept_tokens: int = 0,
    keep_score: str = "attention",
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    memory_mask: Tensor | None = None,
    state: InfiniState | None = None,
    return_state: bool = False,
    log_weight: Tensor | None = None,
    learned_score: Tensor | None = None,
    rotary: tuple[Tensor, ...] | None = None,
    turn: Callable = rotate,
    far_rotary: tuple[tuple[Tensor, ...], int] | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    eps: float = EPS,
) -> Tensor | tuple[Tensor, InfiniState]:
    """[`infini_attention`] one token after the other, all in float32 or wider: the reference.

    Args:
        query, key, value, gate, segment_length: as of [`infini_attention`], with the same shapes.
        update_rule, feature_map, local_segments, sink_tokens, kept_tokens, keep_score: likewise.
        attention_mask, position_ids, memory_mask, state, return_state: likewise.
        log_weight, learned_score, rotary, turn, far_rotary: likewise.
        scaling, softcap, dropout, eps: likewise.

    Returns:
        as [`infini_attention`]: `[batch, heads, tokens, value_dim]`, and the state if asked for.

    Raises:
        ValueError: as [`infini_attention`].
    """
    window = Window(segment_length, local_segments, sink_tokens, kept_tokens)
    rule = memory_rule(update_rule, feature_map=feature_map, eps=eps)
    score = token_score(keep_score)
    numbers = {"scaling": scaling, "softcap": softcap, "dropout": dropout, "eps": eps}
    if learned_score is not None and learned_score.dim() == 3:
        learned_score = learned_score.unsqueeze(-1)
    tokens = Tokens(key, value, log_weight, learned_score)
    check_arguments(query, tokens, gate, rule, score, window, rotary, far_rotary, **numbers)
    check_shapes(query.shape[0], query.shape[2], attention_mask, memory_mask, position_ids)
    if state is None:
        made: Any = {"rule": rule, "weighted": log_weight is not None, "scores": score.count}
        state = InfiniState.initial(key, value, *window, **made)
    (batch, kv_heads, *_), group, dtype = key.shape, query.shape[1] // key.shape[1], query.dtype
    query, key, value, gate, log_weight = (
        _widen(part, state) for part in (query, key, value, gate, log_weight)
    )
    options = SimpleNamespace(rule=rule, feature_map=FEATURE_MAPS[feature_map])
    options.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options.score = score
    options.far_rotary, far_from = (rotary, 0) if far_rotary is None else far_rotary
    options.far_from = far_from
    vars(options).update(rotary=rotary, turn=turn, softcap=softcap, dropout=dropout, eps=eps)
    learned = _widen(
        key.new_zeros(*key.shape[:3], 0) if learned_score is None else learned_score, state
    )
    scores = _first_scores(score, key, value, learned) if kept_tokens else None
    masks = attention_mask, position_ids, memory_mask
    outputs, states = [], []
    for row, head in itertools.product(range(batch), range(kv_heads)):
        # the query heads that share this key/value head
        own = slice(head * group, (head + 1) * group)
        reader = _Head(state, row, head, window, options)
        held = [
            None if part is None else part[row, head] for part in (key, value, log_weight, scores)
        ]
        of_row = [None if mask is None else mask[row].tolist() for mask in masks]
        outputs += reader.read(query[row, own], held, None if gate is None else gate[own], *of_row)
        states.append(reader.state())
    output = (
        torch.stack(outputs)
        .view(batch, kv_heads, query.shape[2], group, -1)
        .transpose(2, 3)
        .flatten(1, 2)
        .to(dtype)
    )
    if not return_state:
        return output
    fields: dict[str, Any] = {}
    for name, part in states[0].items():
        heads = (
            None
            if part is None
            else torch.stack([each[name] for each in states]).unflatten(0, (batch, kv_heads))
        )
        fields[name] = heads if name in OF_HEADS or heads is None else heads[:, 0]
    return output, replace(state, **fields)


def _first_scores(score: TokenScore, key: Tensor, value: Tensor, learned: Tensor) -> Tensor:
    """`[batch, kv_heads, tokens, scores]`: those of tokens that no query has seen."""
    tokens = (part.detach().flatten(0, 2) for part in (key, value, learned))
    found = [torch.stack(score.naive_first(*token)) for token in zip(*tokens, strict=True)]
    return torch.stack(found).to(key).view(*key.shape[:3], -1)


# The fields of a state that differ from head to head
OF_HEADS = (
    "memory",
    "normaliser",
    "local_key",
    "local_value",
    "local_log_weight",
    "local_score",
    "kept_position",
)


def _widen(tensor: Any, state: InfiniState) -> Any:
    return None if tensor is None else tensor.to(state.memory.dtype)


@dataclass
class _Token:
    """A token, for one key/value head; of a `score` by attention the sum over the queries;
    `number`: in the document."""

    key: Tensor
    value: Tensor
    log_weight: Tensor | None = None
    score: Any = None
    number: int = 0
    skipped: bool = False


class _Head:
    """A key/value head of a row, with the query heads that share it (`group`): its memory, and the
    places of its window, each with a token or `None`: the document's first tokens, the kept ones,
    right-aligned, and the segments. `state`: before the call, of which this is head `head` of the
    row `row`; `window`: its sizes; `options`: what all heads share, by name: rule, score, numbers
    and tables."""

    def __init__(self, state, row, head, window, options):
        self.length, self.local_segments, self.sink_tokens, self.kept_tokens = window
        self.ahead = self.sink_tokens + self.kept_tokens  # places before those of the segments
        self.of = options
        self.memory, self.normaliser = state.memory[row, head], state.normaliser[row, head]
        counts = (state.tokens_seen, state.last_position, state.memory_tokens)
        self.seen, self.last_position, self.memory_tokens = (int(count[row]) for count in counts)
        # [places, …] each
        self.windows = [None if held is None else held[row, head] for held in state.windows()[:4]]
        kept = state.kept_position[row, head].tolist() if self.kept_tokens else []
        first = (self.seen // self.length - self.local_segments) * self.length
        numbers = [
            *range(self.sink_tokens),
            *kept,
            *range(first, first + (self.local_segments + 1) * self.length),
        ]
        self.places: list[Any] = [None] * len(numbers)
        for place, number in enumerate(numbers):
            if 0 <= number < self.seen:
                held: Any = (
                    None if window is None else _widen(window[place], state)
                    for window in self.windows
                )
                skipped = state.local_skipped is not None and bool(state.local_skipped[row, place])
                self.places[place] = _Token(*held, number=number, skipped=skipped)

    def read(self, queries, held, gate, attention_mask, position_ids, memory_mask):
        """The outputs, `[group, value_dim]`, of tokens of which these are `held`: a [`_Token`]'s
        fields, `[tokens, …]`; `queries`: `[group, tokens, head_dim]`; `gate`: `[group]`, or `None`
        without a memory; `attention_mask`, `position_ids`, `memory_mask`: lists of a number for
        each token, `None` as of [`infini_attention`]."""
        for number in range(queries.shape[1]):
            if attention_mask is not None and not attention_mask[number]:
                yield queries.new_zeros(len(queries), held[1].shape[-1])
                continue
            self.begin_document_at(None if position_ids is None else position_ids[number])
            skipped = memory_mask is not None and not memory_mask[number]
            parts: Any = (None if part is None else part[number] for part in held)
            token = _Token(*parts, number=self.seen, skipped=skipped)
            yield self.attend(queries[:, number : number + 1], token, gate)

    def begin_document_at(self, position):
        """A position that does not go on from the last one starts a new document with a fresh
        memory."""
        if position is not None and self.seen and position <= self.last_position:
            self.memory, self.normaliser = (
                torch.zeros_like(self.memory),
                torch.zeros_like(self.normaliser),
            )
            self.places, self.seen, self.memory_tokens = [None] * len(self.places), 0, 0
        self.last_position = self.last_position + 1 if position is None else position

    def attend(self, query, token, gate):
        """Equations 2, 3 and 5 for one token; `query` is `[group, 1, head_dim]`, `gate`
        `[group]`."""
        self.places[self.ahead + self.local_segments * self.length + self.seen % self.length] = (
            token
        )
        if self.seen < self.sink_tokens:  # whose score nobody needs
            self.places[self.seen] = replace(
                token, score=None if token.score is None else torch.zeros_like(token.score)
            )
        # Sinks and kept tokens are seen when the document's first segment has left the window
        first = 0 if self.seen // self.length > self.local_segments else self.ahead
        seen = [
            place for place, held in enumerate(self.places) if held is not None and place >= first
        ]
        keys, values = (
            torch.stack([getattr(self.places[place], name) for place in seen])
            for name in ("key", "value")
        )
        keys, compared = self.turned(keys, seen), self.turned(query, seen[-1:])
        scores = (compared @ keys.mT).squeeze(1) * self.of.scaling  # [group, tokens]
        scores = (
            scores
            if self.of.softcap is None
            else self.of.softcap * torch.tanh(scores / self.of.softcap)
        )
        if self.kept_tokens and self.of.score.receiving is not None:
            self.receive(scores.detach(), seen)
        # [group, value_dim]
        output = F.dropout(torch.softmax(scores, -1), self.of.dropout) @ values
        if self.memory_tokens and self.of.rule is not None:
            features = self.features(query)
            read, denominator = self.of.rule.naive_read(
                features, self.memory[None], self.normaliser[None], self.of.eps
            )
            read, denominator = (
                read.squeeze(1),
                denominator.squeeze(1) if denominator.dim() else denominator,
            )
            share = torch.sigmoid(gate).unsqueeze(-1)
            output = share * read / denominator + (1 - share) * output
        self.seen += 1
        if self.seen % self.length == 0:
            oldest, later = (
                self.places[self.ahead : self.ahead + self.length],
                self.places[self.ahead + self.length :],
            )
            self.places[self.ahead :] = later + [None] * self.length
            there = (
                held for held in oldest if held is not None and held.number >= self.sink_tokens
            )
            self.write([held for held in there if not held.skipped])
        return output

    def receive(self, scores, seen):
        """Adds the mean over the group of a softmax over all that is not kept; `scores`: `[group,
        places seen]`."""
        columns = [
            column
            for column, place in enumerate(seen)
            if not self.sink_tokens <= place < self.ahead
        ]
        weights = torch.softmax(scores[:, columns], -1).mean(0)
        for weight, column in zip(weights, columns, strict=True):
            if seen[column] >= self.ahead:
                token = self.places[seen[column]]
                received = torch.zeros_like(token.score)
                received[self.of.score.receiving] = weight
                token.score = token.score + received

    def turned(self, states, seen):
        """Queries or keys, `states` `[…, tokens, head_dim]`, turned by their places in the window,
        `seen`; sinks come right before what is kept."""
        if self.of.rotary is None:
            return states
        empty = self.places[self.sink_tokens : self.ahead].count(None)
        at = [place + empty if place < self.sink_tokens else place for place in seen]
        far = self.seen // self.length * self.length >= self.of.far_from
        tables = self.of.far_rotary if far else self.of.rotary
        return self.of.turn(states, *(table[at] for table in tables))

    def features(self, states, log_weights=0):
        """The features of `states`, queries or keys, `[heads, tokens, head_dim]`; `log_weights`:
        of keys, `[heads, tokens, rates]`, or 0."""
        return self.of.rule.naive_features(states, log_weights, self.of.feature_map, self.of.eps)

    def write(self, segment):
        """Equation 4, by the rule, for the tokens of a segment that leaves the window."""
        segment = self.keep(segment) if self.kept_tokens else segment
        self.memory_tokens += len(segment)
        if not segment or self.of.rule is None:
            return
        keys, values = (
            torch.stack([getattr(token, name) for token in segment])[None]
            for name in ("key", "value")
        )
        none = self.memory.new_zeros(self.of.rule.rates)
        weights = torch.stack(
            [none if token.log_weight is None else token.log_weight for token in segment]
        )[None]
        features = self.features(keys, weights)
        written = self.of.rule.naive_write(
            self.memory[None], self.normaliser[None], features, values, weights, self.of.eps
        )
        self.memory, self.normaliser = (part.squeeze(0) for part in written)

    def keep(self, segment):
        """Keeps the best of what has been kept and of this segment, and returns the others, in
        order."""
        for token in segment:
            # that have seen it
            queries = (self.local_segments + 1) * self.length - token.number % self.length
            known = token.score.detach(), token.number, queries, self.kept_tokens
            token.score = torch.stack([*self.of.score.naive_final(*known)])
        left = [
            held for held in self.places[self.sink_tokens : self.ahead] if held is not None
        ] + segment
        chosen, portions = set(), self.of.score.portions
        later = [int(self.kept_tokens * own / sum(portions)) for own in portions[1:]]
        # the first gets what does not divide
        for place, share in enumerate([self.kept_tokens - sum(later), *later]):
            others = [token for token in left if token.number not in chosen]
            # the earlier of equal ones
            best = sorted(others, key=lambda token, place=place: -token.score[place])[:share]
            chosen |= {token.number for token in best}
        kept = [token for token in left if token.number in chosen]
        self.places[self.sink_tokens : self.ahead] = [None] * (self.kept_tokens - len(kept)) + kept
        return [token for token in left if token.number not in chosen]

    def state(self):
        """This head's share of an [`InfiniState`]."""
        found: dict[str, Any] = {
            "memory": self.memory,
            "normaliser": self.normaliser,
            "kept_position": None,
        }
        for name, window in zip(("key", "value", "log_weight", "score"), self.windows, strict=True):
            if window is not None:
                nothing = self.memory.new_zeros(window.shape[-1])
                held = [nothing if token is None else getattr(token, name) for token in self.places]
                window = torch.stack(held).to(window.dtype)
            found[f"local_{name}"] = window
        counts: dict[str, Any] = {"tokens_seen": self.seen, "last_position": self.last_position}
        counts["memory_tokens"] = self.memory_tokens
        counts["local_skipped"] = [token is not None and token.skipped for token in self.places]
        if self.kept_tokens:
            kept = self.places[self.sink_tokens : self.ahead]
            counts["kept_position"] = [-1 if token is None else token.number for token in kept]
        return found | {
            name: torch.tensor(count, device=self.memory.device) for name, count in counts.items()
        }


def naive_words(texts: list[str | None]) -> list[str | None]:
    """The words of [`Terms.of`]: of each token, whose `texts` these are, the first letters of the
    last word that begins in it. `None`: no text, and no word."""
    text = "".join("\0" if each is None else each for each in texts)
    begins = [0, *itertools.accumulate(1 if each is None else len(each) for each in texts)]
    found: list[str | None] = [None] * len(texts)
    for word in re.finditer(r"[^\W_]+", text):
        token = bisect.bisect_right(begins, word.start()) - 1
        found[token] = word.group()[:LETTERS]
    return found


def naive_relevance(
    terms: list,
    question: list,
    words: list | None = None,
    asked_words: Sequence = (),
) -> list[float]:
    """[`block_relevance`] of lists, term by term. `terms`, `question`: as there; `words`,
    `asked_words`: of both the words, −1 for none; without, there are none."""
    several = bool(terms) and isinstance(terms[0], list)
    documents = terms if several else [terms]
    of_words = [[]] * len(documents) if words is None else words if several else [words]
    places = [(n, at) for n, own in enumerate(documents) for at in range(0, len(own), BLOCK_TOKENS)]

    def paired(of_tokens: list) -> list:
        """Of each term with the next one; −1: none."""
        after = [
            next((each for each in of_tokens[n + 1 :] if each >= 0), -1)
            for n in range(len(of_tokens))
        ]
        pairs = zip(of_tokens, after, strict=True)
        return [pair if min(pair) >= 0 else -1 for pair in pairs]

    def bm25(documents: list, question: Sequence) -> list[float]:
        blocks = [documents[number][at : at + BLOCK_TOKENS] for number, at in places]
        blocks = [[term for term in block if term != -1] for block in blocks]
        mean = max(sum(map(len, blocks)) / max(len(blocks), 1), 1)
        found = [0.0] * len(blocks)
        for term in (each for each in question if each != -1):
            having = sum(term in block for block in blocks)
            rarity = math.log(1 + (len(blocks) - having + 0.5) / (having + 0.5))
            for number, block in enumerate(blocks):
                often, length = block.count(term), 1 - C + C * len(block) / mean
                found[number] += rarity * often * (K1 + 1) / (often + K1 * length)
        return found

    kinds = bm25(documents, question), bm25(of_words, asked_words)
    of_pairs = bm25([*map(paired, documents)], paired(question))
    both = zip(places, *kinds, of_pairs, strict=True)
    own = {place: (one + WORDS * word + PAIRS * pair) ** 2 for place, one, word, pair in both}
    near = [(BLOCK_TOKENS * d, 1 - abs(d) / (REACH + 1)) for d in range(-REACH, REACH + 1)]
    return [sum(share * own.get((n, at + far), 0) for far, share in near) for n, at in own]


def naive_recalled(
    relevance: list[float],
    eligible: list[bool],
    seen: int,
    window: Window,
    least: float = LEAST,
) -> tuple[list[int], list[int]]:
    """[`recalled_numbers`], token by token, of a document of which so many were `seen`; all that
    have left the `window` where it keeps them anyway. `relevance`, `eligible`, `least`: as
    there."""
    ranked = sorted(range(len(relevance)), key=lambda b: (-relevance[b], b if relevance[b] else -b))
    rank = [ranked.index(number // BLOCK_TOKENS) for number in range(seen)]
    begun = seen // window.segment_length - window.local_segments
    left = range(window.sink_tokens, max(begun * window.segment_length, 0))
    left = [number for number in left if eligible[number]]
    if len(left) > window.kept_tokens:
        most = max(relevance[number // BLOCK_TOKENS] for number in left)
        left = [n for n in left if relevance[n // BLOCK_TOKENS] >= least * most]
    best = sorted((rank[number], number) for number in left)
    numbers = sorted(number for _, number in best[: window.kept_tokens])
    return numbers, [rank[number] for number in numbers]


def naive_int8(vector: Tensor) -> Tensor:
    """[`from_int8`] of [`to_int8`], number by number. `vector`: `[width]`."""
    numbers = [number.float() for number in vector]
    if not all(math.isfinite(number) for number in numbers):
        return torch.full_like(vector, math.nan)
    step = max(abs(number) for number in numbers) / 127
    step = max(step, torch.tensor(2.0**-126))  # the smallest number with all of its digits
    most = torch.finfo(vector.dtype).max if vector.dtype.itemsize < 4 else 2.0**128 - 2.0**104
    rounded = [(torch.round(number / step) * step).clamp(-most, most) for number in numbers]
    return torch.stack(rounded).to(vector.dtype)
