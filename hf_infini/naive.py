"""Infini-attention straight from the equations: first segment by segment, without padding or documents, then token by token
with every option. Slow, obvious, and the reference of every test."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from .memory import EPS, FEATURE_MAPS
from .state import InfiniState


def attend_by_segments(
    segments: Iterable[tuple[Tensor, Tensor, Tensor]], gate: Tensor, update_rule: str = "linear"
) -> Tensor:
    """The paper's algorithm (arXiv 2404.07143, section 2): query, key and value of one segment after the other,
    `[batch, heads, tokens, head_dim]` each, gate `[heads]`; returns the output of all tokens."""
    share, memory, outputs = torch.sigmoid(gate)[:, None, None], None, []
    for query, key, value in segments:
        wide = torch.promote_types(query.dtype, torch.float32)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # equation 2
        query, key, value = F.elu(query.to(wide)) + 1, F.elu(key.to(wide)) + 1, value.to(wide)  # σ(Q), σ(K), V
        if memory is None:  # the first segment finds nothing in the memory
            memory, normaliser = 0, 0
        else:
            read = query @ memory / (query @ normaliser + EPS)  # equation 3
            # Equation 5: (1 − share) · output + share · read
            output = torch.lerp(output.to(wide), read, share.to(wide)).to(output.dtype)
            if update_rule == "delta":
                value = value - key @ memory / (key @ normaliser + EPS)
        outputs.append(output)
        memory = memory + key.mT @ value  # equation 4
        normaliser = normaliser + key.sum(-2).unsqueeze(-1)
    return torch.cat(outputs, 2)


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
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    memory_mask: Tensor | None = None,
    state: InfiniState | None = None,
    return_state: bool = False,
    memory_query: Tensor | None = None,
    memory_key: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    eps: float = EPS,
) -> Tensor | tuple[Tensor, InfiniState]:
    """[`infini_attention`] with the same arguments and results, one token after the other, all in float32 or wider."""
    if state is None:
        state = InfiniState.initial(
            key, value, segment_length, local_segments, separate_memory_key=memory_key is not None
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    real = torch.ones(query.shape[0], query.shape[2]) if attention_mask is None else attention_mask
    rows = []
    states = []
    for row in range(query.shape[0]):
        rule = (update_rule, FEATURE_MAPS[feature_map], denominator)
        reader = _Row(state, row, query.shape[1], segment_length, local_segments, rule, scaling, dropout, eps)
        outputs = []
        for token in range(query.shape[2]):
            if not real[row, token]:
                outputs.append(torch.zeros_like(reader.widen(value[row, :1, token])).expand(query.shape[1], -1))
                continue
            position = None if position_ids is None else int(position_ids[row, token])
            reader.begin_document_at(position)
            q, k, v = (reader.widen(tensor[row, :, token]) for tensor in (query, key, value))
            mq = q if memory_query is None else reader.widen(memory_query[row, :, token])
            mk = k if memory_key is None else reader.widen(memory_key[row, :, token])
            skipped = memory_mask is not None and not memory_mask[row, token]
            outputs.append(reader.attend(q, k, v, mq, mk, gate.to(q.dtype), skipped))
        rows.append(torch.stack(outputs, 1))
        states.append(reader.state(key.dtype, value.dtype))
    output = torch.stack(rows).to(query.dtype)
    if not return_state:
        return output
    names = ("memory", "normaliser", "local_key", "local_value", "local_memory_key", "local_skipped")
    names += ("tokens_seen", "last_position", "memory_tokens")
    stacked = {n: None if states[0][n] is None else torch.stack([s[n] for s in states]) for n in names}
    return output, InfiniState(**stacked, start_memory=state.start_memory, start_normaliser=state.start_normaliser)


class _Row:
    """One row of the batch: its memory, and the segments (lists of tokens) that are still in the local window."""

    def __init__(self, state, row, heads, segment_length, local_segments, rule, scaling, dropout, eps):
        self.length, self.local_segments = segment_length, local_segments
        self.rule, self.feature_map, self.denominator = rule
        self.scaling, self.dropout, self.eps = scaling, dropout, eps
        self.memory, self.normaliser = state.memory[row], state.normaliser[row]
        self.start, self.heads, self.initial = (state.start_memory, state.start_normaliser), heads, state
        self.seen, self.last_position = int(state.tokens_seen[row]), int(state.last_position[row])
        self.memory_tokens = int(state.memory_tokens[row])
        self.window = []  # segments, oldest first; a segment is a list of (key, value, memory key, skipped)
        current = self.seen // segment_length
        for place in range(local_segments + 1):
            tokens = min(self.seen - (current - local_segments + place) * segment_length, segment_length)
            if current - local_segments + place < 0:
                continue
            slots = [place * segment_length + slot for slot in range(tokens)]
            keys, values = state.local_key[row], state.local_value[row]
            memory_keys = keys if state.local_memory_key is None else state.local_memory_key[row]
            skipped = None if state.local_skipped is None else state.local_skipped[row]
            self.window.append(
                [
                    (*(self.widen(t[:, s]) for t in (keys, values, memory_keys)), skipped is not None and bool(skipped[s]))
                    for s in slots
                ]
            )

    def widen(self, tensor):
        return tensor.to(self.memory.dtype)

    def begin_document_at(self, position):
        """A position that does not go on from the last one starts a new document with a fresh memory."""
        if position is not None and self.seen and position <= self.last_position:
            memory, normaliser = self.start
            self.memory = torch.zeros_like(self.memory) if memory is None else self.widen(memory)
            self.normaliser = torch.zeros_like(self.normaliser) if memory is None else self.widen(normaliser)
            self.window, self.seen, self.memory_tokens = [[]], 0, 0
        self.last_position = self.last_position + 1 if position is None else position

    def attend(self, q, k, v, memory_query, memory_key, gate, skipped):
        """Equations 2, 3 and 5 for one token; `q` is `[heads, head_dim]`."""
        self.window[-1].append((k, v, memory_key, skipped))
        heads_per_key = self.heads // k.shape[0]
        columns = list(zip(*sum(self.window, []), strict=True))
        keys, values = (torch.stack(column, 1) for column in columns[:2])  # [kv_heads, tokens, dim]
        keys, values = (tensor.repeat_interleave(heads_per_key, 0) for tensor in (keys, values))
        scores = (keys @ q.unsqueeze(-1)).squeeze(-1) * self.scaling
        weights = torch.softmax(scores, -1)
        weights = F.dropout(weights, self.dropout)
        output = (weights.unsqueeze(1) @ values).squeeze(1)
        if self.memory_tokens or self.start[0] is not None:
            features = self.feature_map(memory_query).unsqueeze(1)  # [heads, 1, head_dim]
            numerator = (features @ self.memory.repeat_interleave(heads_per_key, 0)).squeeze(1)
            denominator = (features.squeeze(1) * self.normaliser.repeat_interleave(heads_per_key, 0)).sum(-1, keepdim=True)
            if self.denominator == "separate":
                share = torch.sigmoid(gate).unsqueeze(-1)
            else:
                of_memory = gate.exp().unsqueeze(-1) * (denominator + self.eps) / memory_query.shape[-1]
                share = of_memory / (of_memory + scores.exp().sum(-1, keepdim=True))
            output = share * numerator / (denominator + self.eps) + (1 - share) * output
        self.seen += 1
        if self.seen % self.length == 0:
            if len(self.window) > self.local_segments:
                self.write(self.window.pop(0))
            self.window.append([])
        return output

    def write(self, segment):
        """Equation 4, or the delta rule, for the segment that leaves the window."""
        segment = [token for token in segment if not token[3]]
        if not segment:
            return
        _, values, memory_keys = (torch.stack(column, 1) for column in list(zip(*segment, strict=True))[:3])
        features = self.feature_map(memory_keys)  # [kv_heads, length, head_dim]
        if self.rule == "delta":
            retrieved = features @ self.memory / (features @ self.normaliser.unsqueeze(-1) + self.eps)
            values = values - retrieved
        self.memory = self.memory + features.transpose(1, 2) @ values
        self.normaliser = self.normaliser + features.sum(1)
        self.memory_tokens += len(segment)

    def state(self, key_dtype, value_dtype):
        """The row's share of an [`InfiniState`]."""
        empty = [None] * self.length
        missing = self.local_segments + 1 - len(self.window)
        slots = empty * missing + sum((segment + empty[len(segment) :] for segment in self.window), [])
        windows = []
        for part, like in enumerate((self.initial.local_key, self.initial.local_value, self.initial.local_key)):
            blank = torch.zeros_like(like[0, :, 0], dtype=self.memory.dtype)
            windows.append(torch.stack([blank if slot is None else slot[part] for slot in slots], 1))
        skipped = [slot is not None and slot[3] for slot in slots]
        separate = self.initial.local_memory_key is not None
        return {
            "memory": self.memory,
            "normaliser": self.normaliser,
            "local_key": windows[0].to(key_dtype),
            "local_value": windows[1].to(value_dtype),
            "local_memory_key": windows[2].to(key_dtype) if separate else None,
            "local_skipped": torch.tensor(skipped, device=self.memory.device),
            "tokens_seen": torch.tensor(self.seen, device=self.memory.device),
            "last_position": torch.tensor(self.last_position, device=self.memory.device),
            "memory_tokens": torch.tensor(self.memory_tokens, device=self.memory.device),
        }
