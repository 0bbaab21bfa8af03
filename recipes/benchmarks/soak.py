"""A million tokens and more through a cached model: whether its memory, its time and its results stay what they were.

The results are compared with [`Reference`], which computes the paper's equations in float64, one segment after the other. It
shares the weights with the model and nothing else: it has no cache, no chunks and no function of hf_infini, so that it has
none of their mistakes. It is affordable, as its state does not grow; attention over the whole text is not.
"""

import copy
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_infini.compat.cache_name import CACHE, cache_of
from hf_infini.ops.naive import EPS, FEATURE_MAPS
from hf_infini.ops.rules import RULES
from hf_infini.options import UPDATE_RULES
from support.measurement import cache_bytes

from . import measuring, models

MODELS = {
    **{rule.replace("_", " "): {"update_rule": rule} for rule in UPDATE_RULES},
    "linear, exp, learned weights": {"feature_map": "exp", "memory_write": "learned"},
}
FORGETTING = 6.0  # logit of α: 0.9975, so that 1,000 tokens leave 8 %; the start's 0.999994 would forget nothing here
SINGLE = 96  # tokens at the end that are read one a call, as `generate` does
WARM_UP = 20  # calls, until the allocator has all it needs
# What may be, at most. float32 loses about 1e-5 in a million tokens; a hundred times that is a mistake.
LIMITS = {"held_growth": 0.01, "output_error": 1e-3, "normaliser_drift": 1e-3, "memory_drift": 1e-3}


class Streamed(NamedTuple):
    """What a stream leaves.

    Attributes:
        ends: tokens read after each call; logits: `[calls, vocabulary]`, of the last of them.
        seconds, held: seconds per token (of the processors on a CPU, where other programs may delay a call), and bytes
            held, of each call but those of a single token.
        cache: after the last call.
    """

    ends: list[int]
    logits: Tensor
    seconds: list[float]
    held: list[int]
    cache: object


def soak(how) -> Iterator[list[dict]]:
    """A row for each update rule: figures, and what is `broken` of what must hold."""
    for tokens in how.size.soaked:
        for name in MODELS:
            yield [_measured(how, name, tokens)]


def _measured(how, name: str, tokens: int) -> dict:
    model, ids = build(MODELS[name], how.spec), models.random_ids(how.spec, 1, tokens)
    # No multiple of a segment: calls end at every place of one
    streamed = stream(model, ids, how.size.chunk - 1)
    tenth = len(streamed.held) // 10
    found = {
        "seconds_first": statistics.median(streamed.seconds[:tenth]),
        "seconds_last": statistics.median(streamed.seconds[-tenth:]),
        "held_bytes": streamed.held[WARM_UP],
        "held_growth": max(streamed.held[WARM_UP:]) / streamed.held[WARM_UP] - 1,
        "cache_bytes": cache_bytes(streamed.cache),
        **compare(model, ids, streamed),
    }
    above = [key for key, limit in LIMITS.items() if not found[key] <= limit]  # NaN is, too
    broken = [f"{name}: {key} {found[key]:.1e} is above {LIMITS[key]:g}" for key in above]
    length = how.spec.segment_length
    for layer in streamed.cache.layers:
        counts = layer.state.tokens_seen.item(), layer.state.memory_tokens.item()
        if counts != (tokens, tokens // length * length):
            broken.append(f"{name}: of {tokens:,} tokens {counts[0]:,} are counted, and {counts[1]:,} in the memory")
    work = f"soak: one row in chunks of {how.size.chunk - 1:,}, then {SINGLE} single tokens"
    return {"work": work, "name": name, "tokens": tokens, **found, "broken": broken}


def build(changes: dict, spec: models.ModelSpec):
    """A model with queries, keys and values of variance 1 and different gates. With the small weights that a training starts
    from, all tokens weigh the same, and a wrong memory hardly shows."""
    model = models.build("infini", spec, 0, changes)
    draw = torch.Generator().manual_seed(spec.seed)
    for name, parameter in model.named_parameters():
        if name.endswith("memory_rates_bias"):
            parameter.data[:, 1] = FORGETTING
        if name.endswith(("c_attn.weight", "memory_write", "memory_rates", "gate.weight")):
            scale = 1 if name.endswith("gate.weight") else spec.n_embd**-0.5
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=draw))
    return model


@torch.inference_mode()
def stream(model, ids: Tensor, chunk: int) -> Streamed:
    """Reads `[1, tokens]` in calls of `chunk` tokens, and the last [`SINGLE`] one by one."""
    pieces = [*ids[:, :-SINGLE].split(chunk, 1), *ids[:, -SINGLE:].split(1, 1)]
    # All of it is held from the beginning, so that it does not count as growth
    logits = torch.full((len(pieces), model.config.vocab_size), torch.nan, device=ids.device)
    seconds, held, cache, device = [], [], None, str(ids.device)
    clock = time.process_time if device == "cpu" else time.perf_counter
    for number, piece in enumerate(pieces):
        begin = clock()
        output = model(input_ids=piece, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        cache, logits[number] = cache_of(output), output.logits[0, -1]
        measuring.wait_for(device)
        if piece.shape[1] == chunk:
            seconds.append((clock() - begin) / chunk)
            held.append(measuring.held_bytes(device))
    ends = torch.tensor([piece.shape[1] for piece in pieces]).cumsum(0).tolist()
    return Streamed(ends, logits, seconds, held, cache)


@torch.inference_mode()
def compare(model, ids: Tensor, streamed: Streamed) -> dict[str, float]:
    """How far the stream is from the reference.

    Returns:
        output_error: the largest difference of a logit, of all that the stream kept, in units of their standard deviation;
        normaliser_drift: the largest relative one of a number of z, 0 where there is none; memory_drift: that of M, by its
        norm in each head.
    """
    reference, length = Reference(model), model.config.segment_length
    left, errors, variances = deque(zip(streamed.ends, streamed.logits, strict=True)), [], []
    for begin in range(0, ids.shape[1], length):
        hidden = reference.read(ids[0, begin : begin + length])
        while left and left[0][0] <= begin + length:
            end, logits = left.popleft()
            wanted = reference.logits(hidden[end - 1 - begin])
            errors.append((wanted - logits).abs().max())
            variances.append(wanted.var())
    of_z, of_memory = [ids.new_zeros((), dtype=torch.float64)], []  # some rules have no z
    for layer, memory, normaliser in zip(streamed.cache.layers, reference.memories, reference.normalisers, strict=True):
        if reference.rule.normalised:
            of_z.append((layer.state.normaliser[0] / normaliser - 1).abs().max())
        of_memory.append(((layer.state.memory[0] - memory).norm(dim=(1, 2)) / memory.norm(dim=(1, 2))).max())
    return {
        "output_error": (torch.stack(errors).max() / torch.stack(variances).mean().sqrt()).item(),
        "normaliser_drift": torch.stack(of_z).max().item(),
        "memory_drift": torch.stack(of_memory).max().item(),
    }


class Reference:
    """The algorithm of the paper (arXiv 2404.07143, section 2) with a GPT-2's weights, in float64, by the naive form of the
    update rule.

    Attributes:
        memories, normalisers: of each layer, `[heads, head_dim, head_dim]` and `[heads, head_dim]`; `None` before the first
            whole segment.
    """

    def __init__(self, model):
        self.config, self.rule = model.config, RULES[model.config.update_rule]
        self.model = copy.deepcopy(model).double()  # its layers' own modules are used, and none that has a memory
        self.memories, self.normalisers = [None] * self.config.n_layer, [None] * self.config.n_layer

    def read(self, ids: Tensor) -> Tensor:
        """The hidden states `[tokens, width]` of the next segment, which only the last may have too few tokens for."""
        gpt2 = self.model.transformer
        hidden = gpt2.wte(ids) + gpt2.wpe(torch.arange(len(ids), device=ids.device))
        for number, block in enumerate(gpt2.h):
            hidden = hidden + block.attn.c_proj(self._attention(number, block.attn, block.ln_1(hidden)))
            hidden = hidden + block.mlp(block.ln_2(hidden))
        return gpt2.ln_f(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden)

    def _attention(self, number: int, layer, inputs: Tensor) -> Tensor:
        """The heads' output, `[tokens, width]`; writes a whole segment into the memory."""
        heads = (self.config.n_head, -1)
        query, key, value = (part.unflatten(-1, heads).transpose(0, 1) for part in layer.c_attn(inputs).chunk(3, -1))
        scores = query @ key.mT / query.shape[-1] ** 0.5
        future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        output = scores.masked_fill(future, -torch.inf).softmax(-1) @ value  # equation 2
        rule, memory, normaliser = self.rule, self.memories[number], self.normalisers[number]
        if memory is None or normaliser is None:
            memory, normaliser = key.new_zeros(len(key), key.shape[2], value.shape[2]), torch.zeros_like(key[:, 0])
        else:
            read, mass = rule.naive_read(self.features(query), memory, normaliser, EPS)  # equation 3
            share = torch.sigmoid(layer.gate.weight)[:, None, None]
            output = (1 - share) * output + share * read / mass  # equation 5
        if len(inputs) == self.config.segment_length:
            rates = self._log_rates(layer, inputs)
            written = rule.naive_write(memory, normaliser, self.features(key, rates), value, rates, EPS)  # equation 4
            self.memories[number], self.normalisers[number] = written
        return output.transpose(0, 1).flatten(1)

    def _log_rates(self, layer, inputs: Tensor) -> Tensor:
        """The logarithms of the tokens' rates, `[heads, tokens, rates]`."""
        if own := {name: getattr(layer, name) for name in self.rule.parameters(1, 1)}:
            return self.rule.log_rates(inputs[None], **own)[0]
        if self.config.memory_write == "learned":
            return (inputs @ layer.memory_write.T).T.unsqueeze(-1)
        return inputs.new_zeros(1, 1, self.rule.rates)

    def features(self, x: Tensor, log_rates: Tensor | int = 0) -> Tensor:
        """Features of queries, or of keys with their rates."""
        return self.rule.naive_features(x, log_rates, FEATURE_MAPS[self.config.feature_map], EPS)
