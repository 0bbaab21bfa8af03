"""Tasks of RULER (Hsieh et al. 2024, arXiv:2404.06654): documents full of lines like the one that
is asked for, and a chain of assignments among repeated sentences.

They are those of its code (github.com/NVIDIA/RULER, scripts/data/synthetic): its forms, its words,
its example before the question, its count of generated tokens, its score. What is drawn differs,
and each document has as many lines as fit. `rng` and `encode` are as in [`examples`].
"""

import functools
import math
import random
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import StoppingCriteriaList

from cli import UserError
from evaluation.inference import check_length, read_in_chunks
from hf_infini import InfiniCache
from hf_infini.compat.cache_name import CACHE

from .examples import Document, DoesNotFit, Encode
from .tasks import Runner, run_cells, wilson_interval

HOPS = 4  # assignments of one variable to another
SHOT_TOKENS = 500  # of the few-shot example
NEEDLE = "One of the special magic {kind}s for {key} is: {value}.\n"
HAYSTACK = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the {kind} afterwards.\n"
)
ASKS_NEEDLE = (
    "What is the special magic {kind} for {key} mentioned in the provided text? The special magic "
    "{kind} for {key} mentioned in the provided text is"
)
NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
CHAIN = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
# RULER ends in a space, which the tokens of a name begin with
ASKS_CHAIN = (
    "Question: Find all variables that are assigned the value {value} in the text above. Answer: "
    "According to the chain(s) of variable assignment in the text above, {count} variables are "
    "assigned the value {value}, they are:"
)


@dataclass(frozen=True)
class Prompt:
    """What a model goes on from: `tokens` (1-D, int64), of which those from `begins` on ask; the
    `answers` that it shall give, and the first and last token of the line that has each,
    `stated`."""

    tokens: np.ndarray
    begins: int
    answers: tuple[str, ...]
    stated: tuple[tuple[int, int], ...]


# --- the examples ---------------------------------------------------------------------------------


def needle_prompt(rng: random.Random, encode: Encode, length: int, key: str, value: str) -> Prompt:
    """Lines that each give a value to another key, one of which is asked for: at most `length`
    tokens, by less than a line. `key`, `value`: kinds, of [`_DRAWN`]."""
    used: set[str] = set()

    def line() -> tuple[str, str, np.ndarray]:
        name, own = (_unlike(used, functools.partial(_DRAWN[kind], rng)) for kind in (key, value))
        (tokens,) = encode([NEEDLE.format(kind=value, key=name, value=own)])
        return name, own, tokens

    wanted, answer, needle = line()
    texts = HAYSTACK.format(kind=value), ASKS_NEEDLE.format(kind=value, key=wanted)
    head, asks = encode(texts)
    room, lines = length - sum(map(len, (head, needle, asks))), []
    while room >= 0:
        *_, tokens = line()
        room -= len(tokens)
        lines += [tokens] if room >= 0 else []
    if not lines:
        raise DoesNotFit(f"{length} tokens have no room for two lines and the question")
    place, document = rng.randint(0, len(lines)), Document()
    stated = document.add(head, *lines[:place], needle)
    begins = document.add(*lines[place:], asks)[0]
    return Prompt(document.tokens(), begins, (answer,), (stated,))


def chain_prompt(rng: random.Random, encode: Encode, length: int) -> Prompt:
    """A number is assigned to a variable, that one to a second, and so on, in lines among repeated
    sentences, after a shorter example with its answer; asked for are all of them. At most `length`
    tokens, by less than a line of sentences."""
    ours, example = map(str, rng.sample(range(10_000, 100_000), 2))
    shot, names, _ = _chain(rng, encode, SHOT_TOKENS, 3, example)
    (said,) = encode([f" {' '.join(names)}\n\n"])
    room = length - sum(map(len, shot)) - len(said)
    parts, names, spans = _chain(rng, encode, room, 5, ours)
    document = Document()
    first = document.add(*shot, said)[1] + 1
    begins = document.add(*parts)[0]
    stated = tuple((first + start, first + end) for start, end in spans)
    return Prompt(document.tokens(), begins, names, stated)


def _chain(
    rng: random.Random, encode: Encode, length: int, letters: int, number: str
) -> tuple[list[np.ndarray], tuple[str, ...], list[tuple[int, int]]]:
    """The parts of a document of at most `length` tokens, the last of which asks; the names of its
    variables; where the line of each is."""
    used: set[str] = set()
    draw = functools.partial(rng.choices, string.ascii_uppercase, k=letters)
    names = [_unlike(used, lambda: "".join(draw())) for _ in range(HOPS + 1)]
    lines = [f"VAR {names[0]} = {number}\n"]
    lines += [f"VAR {name} = VAR {other} \n" for other, name in zip(names, names[1:], strict=False)]
    asks = ASKS_CHAIN.format(value=number, count=len(names))
    head, noise, asks, *lines = encode([CHAIN, NOISE, asks, *lines])
    count = (length - sum(map(len, (head, asks, *lines)))) // len(noise)
    if count < len(names):
        raise DoesNotFit(f"{length} tokens have no room for {len(names)} assignments and sentences")
    document, spans = Document(), []
    document.add(head)
    places = sorted(rng.sample(range(count), len(names)))
    for before, place, line in zip([0, *places], places, lines, strict=False):
        spans.append(document.add(*[noise] * (place - before), line))
    document.add(*[noise] * (count - places[-1]), asks)
    return document.parts, tuple(names), spans


def _unlike(used: set[str], draw: Callable[[], str]) -> str:
    """What is drawn first that is not in `used`, where it is put."""
    while (found := draw()) in used:
        pass
    used.add(found)
    return found


@functools.cache
def _words() -> tuple[list[str], list[str]]:
    """RULER's adjectives and nouns."""
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        raise UserError(f"niah_multikey_2: pip install wonderwords ({error})") from error
    words = RandomWord()
    return words.filter(include_categories=["adjective"]), words.filter(include_categories=["noun"])


_DRAWN: dict[str, Callable[[random.Random], str]] = {
    "word": lambda rng: "-".join(map(rng.choice, _words())),
    "number": lambda rng: str(rng.randrange(10**6, 10**7)),
    "uuid": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}
# how a prompt is made, and how many tokens the model generates at most
TASKS: dict[str, tuple[Callable[..., Prompt], int]] = {
    "niah_multikey_2": (functools.partial(needle_prompt, key="word", value="number"), 128),
    "niah_multikey_3": (functools.partial(needle_prompt, key="uuid", value="uuid"), 128),
    "vt": (chain_prompt, 30),
}

# --- scoring --------------------------------------------------------------------------------------


def match_all(said: str, answers: Sequence[str]) -> float:
    """RULER's score of what a model said: which share of the answers it contains, in small or
    capital letters."""
    return sum(answer.lower() in said.lower() for answer in answers) / len(answers)


@torch.inference_mode()
def continued(
    model, prompt: Prompt, tokens: int, chunk: int, *, tokenizer, terms: Tensor | None = None
) -> str:
    """What a model says next: at each step the likeliest token, at most `tokens` of them, up to
    where all answers are given.

    Args:
        model: a causal language model in evaluation mode.
        chunk: tokens per call of the model.
        terms: of [`InfiniCache.recall`], by which what asks recalls from an archive of all that is
            in front of it; `None`: it recalls nothing.
    """
    ids, begins = torch.as_tensor(prompt.tokens)[None].to(model.device), prompt.begins
    cache = None if terms is None else InfiniCache(model.config, archive=True)
    cache = read_in_chunks(model, ids[:, :begins], chunk, cache)
    if terms is not None:
        cache = cache.recall(ids[0, begins:], terms=terms)

    def said(found: Tensor) -> str:
        return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)

    def done(found: Tensor, *args, **kwargs) -> Tensor:
        return torch.tensor([match_all(said(found), prompt.answers) == 1], device=found.device)

    greedy = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}
    greedy |= dict.fromkeys(("temperature", "top_p", "top_k"))  # of the model's own sampling
    greedy |= {"max_new_tokens": tokens, "pad_token_id": tokenizer.eos_token_id, CACHE: cache}
    ends = StoppingCriteriaList([done])
    return said(model.generate(ids, stopping_criteria=ends, **greedy))


def run_ruler(runner: Runner, task: str, lengths: list[int]) -> dict:
    """`cells` by `length`, in tokens, those that the model generates among them: `samples`,
    `correct`, their summed scores, with a 95 % interval `low` to `high` of the mean, and of each
    example its score in `scores` and what was `said`.

    The interval is that of answers which are right or wrong; shares vary less.

    Args:
        runner: its `score` is [`continued`] with a tokenizer.
        task: a key of [`TASKS`].
    """
    (make, tokens), options, score = TASKS[task], runner.options, runner.score

    def run_cell(cell: dict) -> dict:
        check_length(runner.model.config, cell["length"])
        scores, every = [], []
        for number in tqdm(range(options.samples), unit="example", leave=False):
            prompt = make(runner.random(number), runner.encode, cell["length"] - tokens)
            every.append(score(runner.model, prompt, tokens, options.chunk))
            scores.append(match_all(every[-1], prompt.answers))
        correct, samples = math.fsum(scores), len(scores)
        low, high = wilson_interval(correct, samples)
        found = {"samples": samples, "correct": correct, "low": low, "high": high}
        return {**found, "scores": scores, "said": every}

    return {"cells": run_cells(runner, [{"length": length} for length in lengths], run_cell)}
