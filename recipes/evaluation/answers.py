"""How good an answer is: what a model makes of the right one, and of what it says itself."""

import re
import string
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .prompts import Document, Prompter
from .ways import Way

ARTICLES = {"en": "a an the", "pt": "o a os as um uma uns umas"}


@torch.inference_mode()
def ask(
    way: Way, reading: Any, document: Document, prepared: dict, prompter: Prompter, generate: int
) -> dict:
    """What is measured of a question.

    Args:
        reading: what the way made of the document.
        prepared: the question, an entry of a prepared line.
        generate: tokens of the model's own answer; 0: none.

    Returns:
        `nats` and `tokens` of the first right answer, summed; `right`, of a choice: whether the
        right option has the fewest nats per token; `evidence`: which share of it is in the cache,
        where the set says; `answer` with `f1` and `contained`, or `rouge`, where it is generated;
        `seconds` up to the logits of the answer's first token; `bytes` of the cache then.
    """
    question = prompter.question(prepared, document.language)
    started = time.perf_counter()
    cache = way.asked(reading, question)
    asked = time.perf_counter()
    evidence, held = document.tokens_of(prepared["evidence"]), way.held(cache, document)
    share = held[evidence].mean().item() if len(evidence) and held is not None else None
    resumed = time.perf_counter()
    last = way.call(cache, question.ids)[-1]
    last.sum().item()  # waits for a GPU
    seconds = asked - started + time.perf_counter() - resumed
    found: dict[str, Any] = {
        "evidence": share,
        "seconds": round(seconds, 4),
        "bytes": way.bytes(cache),
    }
    answers = prepared["options"] or prepared["answers"][:1]
    nats = {}
    for text in answers:
        ids = prompter.answer(text)
        nats[text] = (_nats(way, cache, last, ids), len(ids))
    loss, tokens = nats[prepared["answers"][0]]
    found |= {"nats": loss, "tokens": tokens, "right": None}
    if prepared["options"]:
        best = min(nats, key=lambda text: nats[text][0] / nats[text][1])
        found["right"] = best == prepared["answers"][0]
    elif generate:
        answer = _generated(way, way.fork(cache), last, prompter, generate)
        found |= compare(answer, prepared["answers"], prepared["kind"], document.language)
    return found


def _nats(way: Way, cache: Any, last: Tensor, ids: Tensor) -> float:
    """The summed loss of ids `[tokens]` behind a cache, whose last logits are `last`."""
    logits = last[None]
    if len(ids) > 1:
        logits = torch.cat([logits, way.call(way.fork(cache), ids[:-1])])
    return float(F.cross_entropy(logits.float(), ids.to(logits.device), reduction="sum"))


def _generated(way: Way, cache: Any, last: Tensor, prompter: Prompter, tokens: int) -> str:
    """The model's own answer: at each step the likeliest token, up to one that ends the turn, or
    the line of a model that has no chats."""
    ends = way.model.generation_config.eos_token_id
    ends = {prompter.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    ids: list[int] = []
    while len(ids) < tokens:
        ids.append(int(last.argmax()))
        text = prompter.tokenizer.decode(ids, skip_special_tokens=True)
        if ids[-1] in ends or not prompter.chat and "\n" in text.lstrip():
            break
        last = way.call(cache, torch.tensor(ids[-1:]))[-1]
    return prompter.tokenizer.decode(ids, skip_special_tokens=True).strip()


def compare(answer: str, right: Sequence[str], kind: str, language: str) -> dict:
    """`answer` with `rouge` (L, F-measure) for a summary; else with `f1` and `contained`, of the
    right answer that it is nearest to."""
    if kind == "summary":
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(["rougeL"], use_stemmer=language == "en")
        return {"answer": answer, "rouge": scorer.score_multi(right, answer)["rougeL"].fmeasure}
    said, *wanted = (words_of(text, kind, language) for text in (answer, *right))
    return {
        "answer": answer,
        "f1": max(f1(said, words) for words in wanted),
        "contained": any(f" {' '.join(words)} " in f" {' '.join(said)} " for words in wanted),
    }


def words_of(text: str, kind: str, language: str) -> list[str]:
    """The words of an answer as SQuAD compares them: small letters, no punctuation, no articles.
    Of code the names and numbers as they are."""
    if kind == "code":
        return re.findall(r"\w+", text)
    text = "".join(" " if letter in string.punctuation else letter for letter in text.lower())
    return [
        word for word in re.split(r"\s+", text) if word and word not in ARTICLES[language].split()
    ]


def f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    """The harmonic mean of which share of the words is right, and which share of the right ones
    was said."""
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else float(said == wanted)
