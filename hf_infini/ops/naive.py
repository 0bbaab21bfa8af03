"""Infini-attention straight from the equations: first segment by segment, without padding or documents, then token by token
with every option. Slow, obvious, and the reference of every test: of the code that it judges it uses nothing."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .checks import check_arguments, check_kinds, check_shapes
from .memory import KEEP_SCORES
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
    rule = memory_rule(update_rule, feature_map=feature_map, denominator=denominator, keep_score=keep_score, eps=eps)
    numbers = {"scaling": scaling, "softcap": softcap, "dropout": dropout, "eps": eps}
    given = (log_weight, learned_score, query_weight, feature_maps, rule, window, rotary)
    check_arguments(query, key, value, gate, *given, **numbers)
    check_shapes(query.shape[0], query.shape[2], attention_mask, memory_mask, position_ids)
    if state is None:
        counts = {"log_weights": 0 if log_weight is None else log_weight.shape[-1], "scores": 1 + (keep_score == "half")}
        state = InfiniState.initial(key, value, *window, normalised=rule.normalised, **counts)
    (batch, kv_heads, tokens, _), group = key.shape, query.shape[1] // key.shape[1]
    queries, gates = query.unflatten(1, (kv_heads, group)), gate.view(kv_heads, group)
    query_map, key_map = feature_maps or (None, None)
    options = SimpleNamespace(rule=RULES[update_rule], feature_map=FEATURE_MAPS[feature_map], denominator=denominator)
    vars(options).update(rotary=rotary, softcap=softcap, dropout=dropout, eps=eps)
    options.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options.scores = KEEP_SCORES[keep_score] if kept_tokens else ()  # the names of a token's scores
    outputs, states = [], []
    for row, head in itertools.product(range(batch), range(kv_heads)):
        own = slice(head * group, (head + 1) * group)  # the query heads that share this key/value head
        reader = _Head(state, row, head, window, options)
        reader.query_map = None if query_map is None else reader.widen(query_map[own])
        reader.key_map = None if key_map is None else reader.widen(key_map[head : head + 1])
        reader.query_weight = None if query_weight is None else reader.widen(query_weight[own])
        for number in range(tokens):
            if attention_mask is not None and not attention_mask[row, number]:
                outputs.append(reader.widen(value.new_zeros(group, value.shape[-1])))
                continue
            reader.begin_document_at(None if position_ids is None else int(position_ids[row, number]))
            weight = None if log_weight is None else reader.widen(log_weight[row, head, number])
            token = _Token(reader.widen(key[row, head, number]), reader.widen(value[row, head, number]), weight, reader.seen)
            token.skipped = memory_mask is not None and not memory_mask[row, number]
            token.scores = dict.fromkeys(options.scores, reader.memory.new_zeros(()))
            if learned_score is not None:
                token.scores["learned"] = reader.widen(learned_score[row, head, number]).detach()
            asked = reader.widen(queries[row, head, :, number : number + 1])
            outputs.append(reader.attend(asked, token, reader.widen(gates[head])))
        states.append(reader.state())
    output = torch.stack(outputs).view(batch, kv_heads, tokens, group, -1).transpose(2, 3).flatten(1, 2).to(query.dtype)
    if not return_state:
        return output
    fields: dict[str, Any] = {}
    for name, part in states[0].items():
        heads = None if part is None else torch.stack([each[name] for each in states]).unflatten(0, (batch, kv_heads))
        fields[name] = heads if name in OF_HEADS or heads is None else heads[:, 0]
    return output, replace(state, **fields)


FADE, LEAST = 4, torch.finfo(torch.float32).tiny  # see kept.py
# The fields of a state that differ from head to head
OF_HEADS = ("memory", "normaliser", "local_key", "local_value", "local_log_weight", "local_score", "kept_position")


@dataclass
class _Token:
    """A token, for one key/value head: key, value, and log weight (`None`: 0); its number in the document; whether the
    memory skips it; its scores by name, of attention a sum over the queries, and of how many."""

    key: Tensor
    value: Tensor
    log_weight: Tensor | None
    number: int
    skipped: bool = False
    scores: dict[str, Tensor] = field(default_factory=dict)
    queries: int = 0


class _Head:
    """A key/value head of a row, with the query heads that share it (`group`): its memory, and the places of its window,
    each with a token or `None`: the document's first tokens, the kept ones, right-aligned, and the segments."""

    query_map: Any = None
    key_map: Any = None
    query_weight: Any = None

    def __init__(self, state, row, head, window, options):
        self.length, self.local_segments, self.sink_tokens, self.kept_tokens = window
        self.ahead = self.sink_tokens + self.kept_tokens  # places before those of the segments
        self.of = options
        self.memory, self.normaliser, self.start = state.memory[row, head], state.normaliser[row, head], None
        if state.start_memory is not None:
            self.start = self.widen(state.start_memory[head]), self.widen(state.start_normaliser[head])
        self.seen, self.last_position = int(state.tokens_seen[row]), int(state.last_position[row])
        self.memory_tokens = int(state.memory_tokens[row])
        self.windows = [None if held is None else held[row, head] for held in state.windows()]  # [places, …] each

        def token(place, number):
            if not 0 <= number < self.seen:
                return None
            held: Any = [None if held is None else self.widen(held[place]) for held in self.windows]
            key, value, log_weight, scores = held
            skipped = state.local_skipped is not None and bool(state.local_skipped[row, place])
            scores = dict(zip(self.of.scores, () if scores is None else scores.detach(), strict=True))
            queries = 1 if place < self.ahead else self.seen - number
            return _Token(key, value, log_weight, number, skipped, scores, queries)

        kept = state.kept_position[row, head].tolist() if self.kept_tokens else []
        first = (self.seen // self.length - self.local_segments) * self.length
        numbers = [*range(self.sink_tokens), *kept, *range(first, first + (self.local_segments + 1) * self.length)]
        self.places: list[Any] = [token(place, number) for place, number in enumerate(numbers)]

    def widen(self, tensor):
        return tensor.to(self.memory.dtype)

    def begin_document_at(self, position):
        """A position that does not go on from the last one starts a new document with a fresh memory."""
        if position is not None and self.seen and position <= self.last_position:
            empty = torch.zeros_like(self.memory), torch.zeros_like(self.normaliser)
            self.memory, self.normaliser = empty if self.start is None else self.start
            self.places, self.seen, self.memory_tokens = [None] * len(self.places), 0, 0
        self.last_position = self.last_position + 1 if position is None else position

    def attend(self, query, token, gate):
        """Equations 2, 3 and 5 for one token; `query` is `[group, 1, head_dim]`, `gate` `[group]`."""
        self.places[self.ahead + self.local_segments * self.length + self.seen % self.length] = token
        if self.seen < self.sink_tokens:
            self.places[self.seen] = token
        # Sinks and kept tokens are seen when the document's first segment has left the window
        first = 0 if self.seen // self.length > self.local_segments else self.ahead
        seen = [place for place, held in enumerate(self.places) if held is not None and place >= first]
        keys, values = (torch.stack([getattr(self.places[place], name) for place in seen]) for name in ("key", "value"))
        keys, compared = self.turned(keys, seen), self.turned(query, seen[-1:])
        if self.query_weight is not None:
            compared = compared @ self.query_weight
        scores = (compared @ keys.mT).squeeze(1) * self.of.scaling  # [group, tokens]
        scores = scores if self.of.softcap is None else self.of.softcap * torch.tanh(scores / self.of.softcap)
        if "attention" in self.of.scores:
            self.receive(scores.detach(), seen)
        output = F.dropout(torch.softmax(scores, -1), self.of.dropout) @ values  # [group, value_dim]
        if self.memory_tokens or self.start is not None:
            features = self.features(query, self.query_map)
            read, denominator = self.of.rule.naive_read(features, self.memory[None], self.normaliser[None], self.of.eps)
            read, denominator = read.squeeze(1), denominator.squeeze(1) if denominator.dim() else denominator
            share = torch.sigmoid(gate).unsqueeze(-1)
            if self.of.denominator == "shared":
                of_memory = gate.exp().unsqueeze(-1) * denominator / query.shape[-1]
                share = of_memory / (of_memory + scores.exp().sum(-1, keepdim=True))
            output = share * read / denominator + (1 - share) * output
        self.seen += 1
        if self.seen % self.length == 0:
            oldest, later = self.places[self.ahead : self.ahead + self.length], self.places[self.ahead + self.length :]
            self.places[self.ahead :] = later + [None] * self.length
            there = (held for held in oldest if held is not None and held.number >= self.sink_tokens)
            self.write([held for held in there if not held.skipped])
        return output

    def receive(self, scores, seen):
        """Adds to the window's tokens the mean over the group of a softmax over all that is not kept; `scores`: `[group,
        places seen]`."""
        columns = [column for column, place in enumerate(seen) if not self.sink_tokens <= place < self.ahead]
        weights = torch.softmax(scores[:, columns], -1).mean(0)
        for weight, place in zip(weights, (seen[column] for column in columns), strict=True):
            if place >= self.ahead:
                token = self.places[place]
                token.scores["attention"], token.queries = token.scores["attention"] + weight, token.queries + 1

    def turned(self, states, seen):
        """Queries or keys `[…, tokens, head_dim]` turned by their places in the window; sinks come right before what is
        kept."""
        if self.of.rotary is None:
            return states
        empty = self.places[self.sink_tokens : self.ahead].count(None)
        at = [place + empty if place < self.sink_tokens else place for place in seen]
        return self.of.rotary.turn(states, *(table[at] for table in self.of.rotary.tables))

    def features(self, states, weight, log_weights=0):
        """The memory's queries or keys, `[heads, tokens, head_dim]`."""
        states = states if weight is None else states @ weight
        return self.of.rule.naive_features(states, log_weights, self.of.feature_map, self.of.eps)

    def write(self, segment):
        """Equation 4, by the rule, for the tokens of a segment that leaves the window."""
        segment = self.keep(segment) if self.kept_tokens else segment
        if not segment:
            return
        keys, values = (torch.stack([getattr(token, name) for token in segment])[None] for name in ("key", "value"))
        none = self.memory.new_zeros(self.of.rule.rates)
        weights = torch.stack([none if token.log_weight is None else token.log_weight for token in segment])[None]
        features = self.features(keys, self.key_map, weights)
        written = self.of.rule.naive_write(self.memory[None], self.normaliser[None], features, values, weights, self.of.eps)
        self.memory, self.normaliser = (part.squeeze(0) for part in written)
        self.memory_tokens += len(segment)

    def keep(self, segment):
        """Keeps the best of what has been kept and of this segment, and returns the others, in order."""
        for token in segment if "attention" in self.of.scores else ():
            mean = (token.scores["attention"] / max(token.queries, 1)).clamp(min=LEAST)
            token.scores["attention"], token.queries = mean.log() + token.number / (FADE * self.kept_tokens), 1  # it fades
        left = [held for held in self.places[self.sink_tokens : self.ahead] if held is not None] + segment
        stays, names = set(), self.of.scores
        for place, name in enumerate(names):
            share = (self.kept_tokens + len(names) - 1 - place) // len(names)  # the first gets the odd place
            others = [token for token in left if token.number not in stays]
            best = sorted(others, key=lambda token, name=name: -token.scores[name])[:share]  # the earlier of equal ones
            stays |= {token.number for token in best}
        kept = [token for token in left if token.number in stays]
        self.places[self.sink_tokens : self.ahead] = [None] * (self.kept_tokens - len(kept)) + kept
        return [token for token in left if token.number not in stays]

    def state(self):
        """This head's share of an [`InfiniState`]."""
        found: dict[str, Any] = {"memory": self.memory, "normaliser": self.normaliser, "kept_position": None}
        for name, held in zip(("key", "value", "log_weight", "score"), self.windows, strict=True):
            if held is not None:
                parts = [self.memory.new_zeros(held.shape[-1])] * len(self.places)
                for place, token in enumerate(self.places):
                    if token is not None and name != "score":
                        parts[place] = getattr(token, name)
                    elif token is not None and place >= self.sink_tokens:  # sinks need none
                        parts[place] = torch.stack([*token.scores.values()])
                held = torch.stack(parts).to(held.dtype)
            found[f"local_{name}"] = held
        counts: dict[str, Any] = {"tokens_seen": self.seen, "last_position": self.last_position}
        counts["memory_tokens"] = self.memory_tokens
        counts["local_skipped"] = [token is not None and token.skipped for token in self.places]
        if self.kept_tokens:
            kept = self.places[self.sink_tokens : self.ahead]
            counts["kept_position"] = [-1 if token is None else token.number for token in kept]
        return found | {name: torch.tensor(count, device=self.memory.device) for name, count in counts.items()}
