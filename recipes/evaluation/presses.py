"""kvpress (NVIDIA) as a contestant: its presses compress the cache of a plain model after the
prompt was read whole.

kvpress 0.5 asks for transformers before 5.3; `pip install --no-deps kvpress cachetools fire
termcolor` puts it beside later ones, and it works with those before 5.24.
"""

import functools

import torch
from torch.nn import functional as F
from transformers import DynamicCache

from cli import UserError
from hf_infini.compat.cache_name import CACHE
from recall.tasks import Answer

BLIND = " blind"  # after the name of a press that has not seen the question when it compresses
# tokens of an example that a blind press reads after it has compressed: the question is among them
LAST = 32


def scorer(way: str, cache: int):
    """As [`recall.tasks.score_answers`], through a press that leaves each key/value head `cache`
    tokens in the end."""
    press = press_of(way.removesuffix(BLIND))
    return functools.partial(_answers, press=press, kept=cache, blind=way.endswith(BLIND))


def press_of(name: str):
    """A press of kvpress by its name without "Press"; UserError where it cannot run."""
    try:
        import kvpress
    except ImportError as error:
        raise UserError(
            f"{name}: pip install --no-deps kvpress cachetools fire termcolor ({error})"
        ) from error
    if CACHE != "past_key_values":
        raise UserError(f"{name}: kvpress needs transformers before 5.24")
    return getattr(kvpress, f"{name}Press")


@torch.no_grad()
def _answers(
    model, examples, chunk: int, progress, *, press, kept: int, blind: bool
) -> list[Answer]:
    found: list[Answer] = []
    for example in examples:
        (question,) = example.questions
        first, last = question.asked
        tokens = torch.as_tensor(example.tokens, device=model.device)[None, : last + 1]
        read = first - LAST if blind else first - 1  # the last token of the question asks
        rest, places = tokens[:, read:-1], torch.arange(last, device=model.device)
        # The press keeps int(read * (1 - ratio)) tokens; in the end there are `kept`, and those
        # after the compression too
        compress = press(compression_ratio=1 - (kept - rest.shape[1] + 0.5) / read)
        cache, how = DynamicCache(), {"cache_position": places[:read]}
        with compress(model):
            model.model(input_ids=tokens[:, :read], past_key_values=cache, **how)
        how = {"position_ids": places[None, read:], "cache_position": places[read:]}
        logits = model(input_ids=rest, past_key_values=cache, **how).logits
        if (left := cache.layers[0].keys.shape[2]) != kept:
            raise RuntimeError(f"{press.__name__} left {left} tokens in the cache, not {kept}")
        logits, targets = logits[0, first - 1 - read :].float(), tokens[0, first:]
        loss = float(F.cross_entropy(logits, targets, reduction="sum"))
        right = bool((logits.argmax(-1) == targets).all())
        found.append(Answer(question.fact, right, loss, len(targets)))
    return found
