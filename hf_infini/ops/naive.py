"""Infini-attention straight from the equations: first segment by segment, without padding or documents, then token by token
with every option. Slow, obvious, and the reference of every test: of the code that it judges it uses nothing."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .checks import check_arguments, check_kinds, check_shapes
from .rules import RULES, memory_rule
from .state import InfiniState
from .window import Rotary

EPS = 1e-6
FEATURE_MAPS = {"elu": lambda x: F.elu(x) + 1, "exp": lambda x: x.clamp(max=30).exp()}


def attend_by_segments(
    segments: Iterable[tuple[Tensor, Tensor, Tensor]], gate: Tensor, update_rule: str = "linear"
) -> Tensor:
    """The paper's algorithm (arXiv 2404.07143, section 2): query, key and value of one segment after the other,
    `[batch, heads, tokens, head_dim]` each, gate `[heads]`; returns the output of all tokens."""
    share, outputs = torch.sigmoid(gate)[:, None, None], []
    memory = normaliser = None
    for query, key, value in segments:
        wide = torch.promote_types(query.dtype, torch.float32)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # equation 2
        query, key, value = F.elu(query.to(wide)) + 1, F.elu(key.to(wide)) + 1, value.to(wide)  # σ(Q), σ(K), V
        if memory is None or normaliser is None:  # the first segment finds nothing in the memory
            memory, normaliser = key.new_zeros(*key.shape[:2], key.shape[3], value.shape[3]), torch.zeros_like(key[:, :, 0])
        else:
            read = query @ memory / (query @ normaliser.unsqueeze(-1) + EPS)  # equation 3
            # Equation 5: (1 − share) · output + share · read
            output = torch.lerp(output.to(wide), read, share.to(wide)).to(output.dtype)
        outputs.append(output)
        memory, normaliser = RULES[update_rule].naive_write(memory, normaliser, key, value, None, EPS)  # equation 4
    return torch.cat(outputs, 2)


@check_kinds
def naive_infini_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    segment_length: int,
    *,
    update_rule: str = "linear",
    feature_map: str = "elu",
    denominator: str = "separate",
    local_segments: int = 0,
    sink_tokens: int = 0,
    kept_tokens: int = 0,
    keep_score: str = "attention",
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    memory_mask: Tensor | None = None,
    state: InfiniState | None = None,
    return_state: bool = False,
    feature_maps: tuple[Tensor, Tensor] | None = None,
    log_weight: Tensor | None = None,
    learned_score: Tensor | None = None,
    rotary: Rotary | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    query_weight: Tensor | None = None,
    dropout: float = 0.0,
    eps: float = EPS,
) -> Tensor | tuple[Tensor, InfiniState]:
    """[`infini_attention`] with the same arguments and results, one token after the other, all in float32 or wider."""
    window = (segment_length, local_segments, sink_tokens, kept_tokens)
    options = {"feature_map": feature_map, "denominator": denominator, "keep_score": keep_score, "eps": eps}
    rule = memory_rule(update_rule, **options)
    numbers = {"scaling": scaling, "softcap": softcap, "dropout": dropout, "eps": eps}
    given = (log_weight, learned_score, query_weight, feature_maps, rule, window, rotary)
    check_arguments(query, key, value, gate, *given, **numbers)
    check_shapes(query.shape[0], query.shape[2], attention_mask, memory_mask, position_ids)
    if state is None:
        counts = {"log_weights": 0 if log_weight is None else log_weight.shape[-1], "scores": 1 + (keep_score == "half")}
        state = InfiniState.initial(key, value, *window, normalised=rule.normalised, **counts)
    real = torch.ones(query.shape[0], query.shape[2]) if attention_mask is None else attention_mask
    of_memory = (RULES[update_rule], FEATURE_MAPS[feature_map], feature_maps or (None, None), denominator)
    of_window = (query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, rotary, query_weight)
    rows = []
    states: list[dict[str, Any]] = []
    for row in range(query.shape[0]):
        reader = _Row(state, row, query.shape[1], window, keep_score, of_memory, of_window, dropout, eps)
        outputs = []
        for token in range(query.shape[2]):
            if not real[row, token]:
                outputs.append(torch.zeros_like(reader.widen(value[row, :1, token])).expand(query.shape[1], -1))
                continue
            position = None if position_ids is None else int(position_ids[row, token])
            reader.begin_document_at(position)
            q, k, v = (reader.widen(tensor[row, :, token]) for tensor in (query, key, value))
            weight = reader.no_weight if log_weight is None else reader.widen(log_weight[row, :, token])
            skipped = memory_mask is not None and not memory_mask[row, token]
            learned = None if learned_score is None else reader.widen(learned_score[row, :, token]).detach()
            outputs.append(reader.attend(q, _Token(k, v, weight, skipped, reader.seen, learned=learned), gate.to(q.dtype)))
        rows.append(torch.stack(outputs, 1))
        states.append(reader.state(key.dtype, value.dtype))
    output = torch.stack(rows).to(query.dtype)
    if not return_state:
        return output
    names = ("memory", "normaliser", "local_key", "local_value", "local_log_weight", "local_skipped", "local_score")
    names += ("kept_position", "tokens_seen", "last_position", "memory_tokens")
    stacked: dict[str, Any] = {n: None if states[0][n] is None else torch.stack([s[n] for s in states]) for n in names}
    return output, InfiniState(**stacked, start_memory=state.start_memory, start_normaliser=state.start_normaliser)


FADE, LEAST = 4, torch.finfo(torch.float32).tiny  # see kept.py


@dataclass
class _Token:
    """A token: key, value and log weight, `[kv_heads, …]`; whether the memory skips it; its number in the document; the
    attention `[kv_heads]` that it has received in the window, and of how many queries; its learned score `[kv_heads]`."""

    key: Tensor
    value: Tensor
    log_weight: Tensor
    skipped: bool
    number: int
    received: Any = 0
    queries: int = 0
    learned: Tensor | None = None


class _Row:
    """One row of the batch: its memory, the document's first tokens, for each key/value head the kept ones, and the segments
    (lists of tokens) that are still in the local window."""

    def __init__(self, state, row, heads, window, keep_score, of_memory, of_window, dropout, eps):
        self.length, self.local_segments, self.sink_tokens, self.kept_tokens = window
        self.keep_score = keep_score
        self.rule, self.feature_map, (self.query_map, self.key_map), self.denominator = of_memory
        self.scaling, self.softcap, self.rotary, self.query_weight = of_window
        self.dropout, self.eps = dropout, eps
        self.memory, self.normaliser = state.memory[row], state.normaliser[row]
        self.start, self.heads, self.initial = (state.start_memory, state.start_normaliser), heads, state
        self.seen, self.last_position = int(state.tokens_seen[row]), int(state.last_position[row])
        self.memory_tokens = int(state.memory_tokens[row])
        self.no_weight = self.memory.new_zeros(len(self.memory), self.rule.rates)
        keys, values = self.widen(state.local_key[row]), self.widen(state.local_value[row])
        weights = None if state.local_log_weight is None else self.widen(state.local_log_weight[row])

        def token(place, number):
            skipped = state.local_skipped is not None and bool(state.local_skipped[row, place])
            weight = self.no_weight if weights is None else weights[:, place]
            found = _Token(keys[:, place], values[:, place], weight, skipped, number)
            if state.local_score is not None:
                scores = list(self.widen(state.local_score[row, :, place]).detach().unbind(-1))
                found.received, found.queries = scores.pop(0) if keep_score != "learned" else 0, self.seen - number
                found.learned = scores.pop() if scores else None
            return found

        self.sinks = [token(place, place) for place in range(min(self.seen, self.sink_tokens))]
        self.kept = [[] for _ in keys]  # of each head
        for head, kept in enumerate(self.kept if self.kept_tokens else ()):
            for place, number in enumerate(state.kept_position[row, head].tolist(), self.sink_tokens):
                if number >= 0:
                    kept.append(token(place, number))
                    kept[-1].queries = 1  # what it has received is a mean
        self.window = []  # segments, oldest first
        current = self.seen // self.length
        for earlier in range(min(current, self.local_segments), -1, -1):
            first = self.sink_tokens + self.kept_tokens + (self.local_segments - earlier) * self.length
            tokens = self.length if earlier else self.seen % self.length
            begin = (current - earlier) * self.length
            self.window.append([token(first + slot, begin + slot) for slot in range(tokens)])

    def widen(self, tensor):
        return tensor.to(self.memory.dtype)

    def begin_document_at(self, position):
        """A position that does not go on from the last one starts a new document with a fresh memory."""
        if position is not None and self.seen and position <= self.last_position:
            memory, normaliser = self.start
            self.memory = torch.zeros_like(self.memory) if memory is None else self.widen(memory)
            self.normaliser = torch.zeros_like(self.normaliser) if memory is None else self.widen(normaliser)
            self.sinks, self.window, self.seen, self.memory_tokens = [], [[]], 0, 0
            self.kept = [[] for _ in self.kept]
        self.last_position = self.last_position + 1 if position is None else position

    def attend(self, query, token, gate):
        """Equations 2, 3 and 5 for one token; `query` is `[heads, head_dim]`."""
        token.number = self.seen
        self.window[-1].append(token)
        if len(self.sinks) < self.sink_tokens:
            self.sinks.append(token)
        heads_per_key = self.heads // token.key.shape[0]
        seen = self.places()
        places = [place for place, _ in seen]  # [kv_heads, tokens, dim]
        keys, values = (torch.stack([_part(t, name) for _, t in seen], 1) for name in ("key", "value"))
        keys, compared = self.turned(keys, places), self.turned(query.unsqueeze(1), places[-1:])
        if self.query_weight is not None:
            compared = compared @ self.widen(self.query_weight)
        keys, values = (tensor.repeat_interleave(heads_per_key, 0) for tensor in (keys, values))
        scores = (keys @ compared.mT).squeeze(-1) * self.scaling
        scores = scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)
        if self.kept_tokens:
            self.receive(scores.detach().unflatten(0, (-1, heads_per_key)), [token for _, token in seen])
        weights = torch.softmax(scores, -1)
        weights = F.dropout(weights, self.dropout)
        output = (weights.unsqueeze(1) @ values).squeeze(1)
        if self.memory_tokens or self.start[0] is not None:
            features = self.features(query.unsqueeze(1), self.query_map)  # [heads, 1, head_dim]
            memory, normaliser = (part.repeat_interleave(heads_per_key, 0) for part in (self.memory, self.normaliser))
            read, denominator = self.rule.naive_read(features, memory, normaliser, self.eps)
            read, denominator = read.squeeze(1), denominator.squeeze(1) if denominator.dim() else denominator
            if self.denominator == "separate":
                share = torch.sigmoid(gate).unsqueeze(-1)
            else:
                of_memory = gate.exp().unsqueeze(-1) * denominator / query.shape[-1]
                share = of_memory / (of_memory + scores.exp().sum(-1, keepdim=True))
            output = share * read / denominator + (1 - share) * output
        self.seen += 1
        if self.seen % self.length == 0:
            if len(self.window) > self.local_segments:
                self.write(self.window.pop(0), first=self.seen == (self.local_segments + 1) * self.length)
            self.window.append([])
        return output

    def places(self):
        """What the next token sees, itself last: (place in the window, token), of a kept one a token of each head. Sinks
        come right before kept tokens, and these right before the window."""
        ahead = self.sink_tokens + self.kept_tokens
        first = ahead + (self.local_segments + 1 - len(self.window)) * self.length
        slots = [(first + number, token) for number, token in enumerate(sum(self.window, []))]
        if self.seen // self.length <= self.local_segments:
            return slots
        kept = list(zip(*self.kept, strict=True))
        first = self.kept_tokens - len(kept)
        return [*enumerate(self.sinks, first), *enumerate(kept, ahead - len(kept)), *slots]

    def receive(self, scores, seen):
        """Adds to the window's tokens the mean over a group's heads of a softmax over all that is not kept; `scores`:
        `[kv_heads, group, tokens seen]`."""
        columns = [column for column, token in enumerate(seen) if isinstance(token, _Token)]
        weights = torch.softmax(scores[..., columns], -1).mean(1)
        window = {id(token) for token in sum(self.window, [])}
        for column, token in enumerate(seen[column] for column in columns):
            if id(token) in window:
                token.received, token.queries = token.received + weights[:, column], token.queries + 1

    def turned(self, states, places):
        """Queries or keys `[heads, tokens, head_dim]` turned by their places in the window."""
        return states if self.rotary is None else self.rotary.turn(states, *(table[places] for table in self.rotary.tables))

    def features(self, states, weight, log_weights=0):
        """The memory's queries or keys, `[heads, tokens, head_dim]`."""
        states = states if weight is None else states @ self.widen(weight)
        return self.rule.naive_features(states, log_weights, self.feature_map, self.eps)

    def write(self, segment, first):
        """Equation 4, by the rule, for the segment that leaves the window; `first`: the document's first."""
        segment = [token for token in segment[self.sink_tokens if first else 0 :] if not token.skipped]
        for token in segment if self.kept_tokens and self.keep_score != "learned" else ():
            mean = torch.as_tensor(token.received / max(token.queries, 1)).clamp(min=LEAST)
            token.received, token.queries = mean.log() + token.number / (FADE * self.kept_tokens), 1  # it fades
        evicted = [self.keep(head, segment) for head in range(len(self.kept))] if self.kept_tokens else [segment]
        evicted = list(zip(*evicted, strict=True)) if self.kept_tokens else segment
        if not evicted:
            return
        names = ("key", "value", "log_weight")
        keys, values, log_weights = (torch.stack([_part(token, name) for token in evicted], 1) for name in names)
        features = self.features(keys, self.key_map, log_weights)  # [kv_heads, length, head_dim]
        self.memory_tokens += len(evicted)
        written = self.rule.naive_write(self.memory, self.normaliser, features, values, log_weights, self.eps)
        self.memory, self.normaliser = written

    def keep(self, head, segment):
        """Keeps the best of what a head has kept and of this segment, and returns the others, in order."""
        left = sorted(self.kept[head] + segment, key=lambda token: token.number)
        scores = {"attention": lambda token: -token.received[head], "learned": lambda token: -token.learned[head]}
        half = self.kept_tokens // 2
        shares = {"attention": self.kept_tokens - half, "learned": half}
        if self.keep_score != "half":
            shares = {self.keep_score: self.kept_tokens}
        stays = set()
        for name, share in shares.items():
            others = [token for token in left if token.number not in stays]
            stays |= {token.number for token in sorted(others, key=scores[name])[:share]}  # the earlier of equal ones
        self.kept[head] = [token for token in left if token.number in stays]
        return [token for token in left if token.number not in stays]

    def state(self, key_dtype, value_dtype):
        """The row's share of an [`InfiniState`]."""
        slots: list = [None] * self.initial.local_key.shape[2]
        ahead, kept = self.sink_tokens + self.kept_tokens, list(zip(*self.kept, strict=True))
        first = ahead + (self.local_segments + 1 - len(self.window)) * self.length
        for place, token in [*enumerate(self.sinks), *enumerate(sum(self.window, []), first)]:
            slots[place] = token
        slots[ahead - len(kept) : ahead] = kept
        windows = []
        names = (("key", key_dtype), ("value", value_dtype), ("log_weight", key_dtype), ("score", self.memory.dtype))
        for (name, dtype), like in zip(names, self.initial.windows(), strict=True):
            if like is None:
                windows.append(None)
                continue
            blank = torch.zeros_like(like[0, :, 0], dtype=self.memory.dtype)
            find = self.scores if name == "score" else lambda token, name=name: _part(token, name)
            found = [blank if slot is None else find(slot) for slot in slots]
            if name == "score":  # sinks need none
                found[: self.sink_tokens] = [blank] * self.sink_tokens
            windows.append(torch.stack(found, 1).to(dtype))
        skipped = [isinstance(slot, _Token) and slot.skipped for slot in slots]
        positions = [[-1] * (self.kept_tokens - len(kept)) + [token.number for token in kept] for kept in self.kept]
        counts = {"tokens_seen": self.seen, "last_position": self.last_position, "memory_tokens": self.memory_tokens}
        return {
            "memory": self.memory,
            "normaliser": self.normaliser,
            **dict(zip(("local_key", "local_value", "local_log_weight", "local_score"), windows, strict=True)),
            "kept_position": torch.tensor(positions, device=self.memory.device) if self.kept_tokens else None,
            "local_skipped": torch.tensor(skipped, device=self.memory.device),
            **{name: torch.tensor(count, device=self.memory.device) for name, count in counts.items()},
        }

    def scores(self, token):
        """`[kv_heads, scores]`, as a state has them."""
        names = {"attention": ("received",), "learned": ("learned",), "half": ("received", "learned")}[self.keep_score]
        return torch.stack([_part(token, name) for name in names], -1)


def _part(token, name):
    """What a token has for all heads, or, given a token for each head, what each has for its own."""
    if isinstance(token, _Token):
        return getattr(token, name)
    return torch.stack([getattr(of_head, name)[head] for head, of_head in enumerate(token)])
