"""How often a model recalls: exact answers in [`examples`], by length and depth or by distance in
segments."""

import functools
import itertools
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from cli import UserError
from corpora.biographies import invent_person, portuguese_names
from corpora.tokenization import encode_texts
from evaluation.inference import check_length, read_in_chunks
from hf_infini import InfiniCache
from hf_infini.models.loading import opening
from hf_infini.tools.spans import score_spans
from support.markdown import markdown_table
from support.stages import read_json, sealed, write_json

from .examples import DoesNotFit, Example, passkey_example
from .facts import FACT_NAMES, fact_example
from .filler import Filler

_TRIES = 20  # examples drawn for each one wanted, before a distance is called impossible
_GUESSED_FROM = 2000  # invented people


@dataclass(frozen=True)
class Answer:
    """How a model answered a question: whether every token is its first choice, and their loss in
    nats."""

    fact: str
    correct: bool
    loss: float
    tokens: int


@dataclass
class Runner:
    """What all cells of a task share.

    Args:
        model: a causal language model in evaluation mode.
        options: of evaluate_model.py: `chunk` and `batch_size` of the model's calls, `samples`
            (examples per cell), the `language` of passkeys, and the `seed`, the same for all cells,
            so that they ask about the same numbers and people.
        file: keeps the finished cells, so that a task that was killed goes on where it was; delete
            it in the end.
        identity: JSON-safe; cells that were kept under another identity are not used.
        score: answers a batch of examples; as [`score_answers`]."""

    model: object
    tokenizer: object
    options: object
    file: Path
    identity: dict
    score: Callable[..., list[Answer]] | None = None

    def encode(self, texts: Sequence[str]) -> list:
        return encode_texts(self.tokenizer, texts)

    def random(self, number: int) -> random.Random:
        """The source of example `number`: other people and numbers than prepare_recall.py's rows
        have."""
        return random.Random(f"evaluation/{self.options.seed}/{number}")


# --- scoring --------------------------------------------------------------------------------------


def score_answers(model, examples: Sequence[Example], chunk: int, progress=iter) -> list[Answer]:
    """Asks a model every question of the examples: one [`Answer`] each, in their order.

    An answer is correct when each of its tokens is the arg-max after the true tokens before it,
    which is when greedy decoding gives exactly this answer. The examples are read in chunks of
    `chunk` tokens; `progress`: of [`score_spans`].
    """
    asked = [
        (question, row, question.asked[0], question.asked[1] + 1)
        for row, example in enumerate(examples)
        for question in example.questions
    ]
    tokens, spans = [example.tokens for example in examples], [span for _, *span in asked]
    found = score_spans(model, tokens, spans, chunk, progress)
    return [
        Answer(question.fact, correct, loss, end - first)
        for (question, _, first, end), (loss, correct) in zip(asked, found, strict=True)
    ]


def score_recalled(
    model, examples: Sequence[Example], chunk: int, progress=iter, *, terms: Tensor
) -> list[Answer]:
    """As [`score_answers`], of examples that ask one question: what is in front of it is read with
    an archive, and the question recalls from it by its own tokens, as `terms` of
    [`InfiniCache.recall`], before it is read itself."""
    found = []
    for example in examples:
        (question,) = example.questions
        ids, (first, last) = torch.as_tensor(example.tokens), question.asked
        begins, cache = question.begins, InfiniCache(model.config, archive=True)
        read_in_chunks(model, ids[None, :begins].to(model.device), chunk, cache)
        cache = cache.recall(ids[begins:first], terms=terms)
        span = (0, first - begins, last + 1 - begins)
        ((loss, right),) = score_spans(model, [ids[begins:]], [span], chunk, progress, cache)
        found.append(Answer(question.fact, right, loss, last + 1 - first))
    return found


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of a share, of 95 % for the default z (the normal distribution's
    97.5 % quantile).

    E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", 1927.
    Unlike the usual p ± z √(p (1 − p) / n), it is of use for shares of 0 and 1 and for few trials.
    """
    share, square = successes / trials, z * z / trials
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    # not a rounding beyond them
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def summarize_answers(answers: Sequence[Answer]) -> dict:
    """`samples`, `correct`, `accuracy`, its 95 % interval `low` to `high`, and `cross_entropy`
    (nats per answer token)."""
    samples, correct = len(answers), sum(answer.correct for answer in answers)
    low, high = wilson_interval(correct, samples)
    found = {"samples": samples, "correct": correct, "accuracy": correct / samples}
    losses = math.fsum(answer.loss for answer in answers)
    mean = losses / sum(answer.tokens for answer in answers)
    return {**found, "low": low, "high": high, "cross_entropy": mean}


# --- the tasks ------------------------------------------------------------------------------------


def run_passkey(
    runner: Runner, texts: Sequence[str], lengths: list[int], depths: list[float], pooled=False
) -> dict:
    """A number hidden in real text: `cells` by `length` (tokens) and `depth`, and `filler_tokens`,
    how much text there is.

    Args:
        texts: the articles; the filler begins anywhere in them and goes on from the first when it
            needs more.
        pooled: whether each depth has other numbers and places in the texts, so that all depths are
            one sample.
    """
    blank_line, *documents = runner.encode(["\n\n", *texts])
    end, samples = runner.tokenizer.eos_token_id, runner.options.samples
    stream = np.concatenate([np.append(document, end) for document in documents])
    how = {"encode": runner.encode, "filler": Filler(stream, end, blank_line)}
    how["language"] = runner.options.language

    def run_cell(cell: dict) -> dict:
        check_length(runner.model.config, cell["length"])
        first = samples * depths.index(cell["depth"]) if pooled else 0
        numbers = map(runner.random, range(first, first + samples))
        return summarize_answers(
            _ask(runner, (passkey_example(rng, **how, **cell) for rng in numbers))
        )

    cells = [{"length": length, "depth": depth} for length in lengths for depth in depths]
    return {"cells": run_cells(runner, cells, run_cell), "filler_tokens": len(stream)}


def depths_of(given: Sequence[float]) -> list[float]:
    """The shares of the text before the number: as given, or so many evenly spaced where one number
    from 2 on is given."""
    if len(given) == 1 and given[0] >= 2:
        return [place / (given[0] - 1) for place in range(int(given[0]))]
    return list(given)


def run_facts(
    runner: Runner, distances: list[int], segment_length: int, texts: Sequence[str] | None = None
) -> dict:
    """Facts of invented people: `cells` by `distance` (segments), and the `constant_guesses` to
    compare them with.

    All kinds of facts come in turn. Examples that do not fit are passed over and counted, by fact,
    as `skipped`.

    Args:
        texts: articles whose lines stand between a fact and its question; `None`: invented
            paragraphs.
    """
    samples, names = runner.options.samples, portuguese_names()
    guesses, lines = constant_guesses(runner.options.seed), None
    if texts is not None:
        lines = [line for text in texts for line in text.splitlines() if line.strip()]

    def run_cell(cell: dict) -> dict:
        skipped, lengths, reasons = Counter(), [], []
        how = cell["distance"], segment_length, lines

        def draw() -> Iterator[Example]:
            for number in range(_TRIES * samples):
                fact, rng = FACT_NAMES[number % len(FACT_NAMES)], runner.random(number)
                try:
                    example = fact_example(rng, runner.encode, names, fact, *how)
                except DoesNotFit as error:
                    skipped[fact] += 1
                    reasons.append(error)
                    continue
                lengths.append(len(example.tokens))
                yield example
                if len(lengths) == samples:
                    return
            if not lengths:
                raise reasons[-1]

        check_length(runner.model.config, cell["distance"] * segment_length + 1)
        answers, by_fact = _ask(runner, draw()), {}
        for fact in FACT_NAMES:
            if own := [answer.correct for answer in answers if answer.fact == fact]:
                by_fact[fact] = {"samples": len(own), "correct": sum(own)}
        chance = statistics.fmean(guesses[answer.fact]["share"] for answer in answers)
        found = {**summarize_answers(answers), "chance": chance, "by_fact": by_fact}
        return {**found, "skipped": dict(skipped), "longest": max(lengths)}

    cells = run_cells(runner, [{"distance": distance} for distance in distances], run_cell)
    return {"cells": cells, "segment_length": segment_length, "constant_guesses": guesses}


def constant_guesses(seed: int) -> dict[str, dict]:
    """The most frequent answer to every kind of fact, and its share, among 2,000 people that no
    example is about.

    A model that recalls nothing can know this by heart. Among the examples themselves, often only a
    few of a kind, the most frequent answer would have a larger share by chance.
    """
    names, rng = portuguese_names(), random.Random(f"guesses/{seed}")
    names.seed_instance(rng.getrandbits(64))
    people = [invent_person(rng, names) for _ in range(_GUESSED_FROM)]
    guesses = {}
    for fact in FACT_NAMES:
        ((answer, count),) = Counter(person.answers[fact] for person in people).most_common(1)
        guesses[fact] = {"answer": answer, "share": count / len(people)}
    return guesses


def _ask(runner: Runner, examples: Iterable[Example]) -> list[Answer]:
    """The answers to examples, batch by batch; a UserError where one is longer than the model
    reaches."""
    answers, options, begin = [], runner.options, opening(runner.tokenizer)
    examples = tqdm(examples, total=options.samples, unit="example", leave=False)
    examples = (example.after(begin) for example in examples)
    # of long texts
    progress = functools.partial(tqdm, desc="reading", unit="chunk", leave=False, delay=1)
    while batch := list(itertools.islice(examples, options.batch_size)):
        check_length(runner.model.config, max(len(example.tokens) for example in batch))
        answers += (runner.score or score_answers)(runner.model, batch, options.chunk, progress)
    return answers


def run_cells(runner: Runner, cells: list[dict], run_cell: Callable[[dict], dict]) -> list[dict]:
    """Runs the cells that the runner's file does not hold yet, and puts each there as soon as it is
    finished.

    A cell that the model or the examples cannot do gets the reason as its `not_possible`; when that
    is every cell, the first reason is raised as a UserError.
    """
    kept = {"identity": json.loads(json.dumps(runner.identity)), "cells": []}  # as it comes back
    if runner.file.is_file():
        remedy = "delete it: its finished cells are measured again"
        found = read_json(runner.file, {"identity": dict, "cells": list}, remedy)
        kept = found if found["identity"] == kept["identity"] else kept
    done = kept["cells"]
    for cell in tqdm(cells[len(done) :], initial=len(done), total=len(cells), unit="cell"):
        try:
            done.append({**cell, **run_cell(cell)})
        except (DoesNotFit, UserError) as error:
            done.append({**cell, "not_possible": str(error)})
        write_json(runner.file, sealed(kept))
    if all("not_possible" in cell for cell in done):
        runner.file.unlink()
        raise UserError(done[0]["not_possible"])
    return done


# --- tables ---------------------------------------------------------------------------------------


def passkey_table(cells: Sequence[dict]) -> str:
    """Accuracy with its 95 % interval by length (rows) and depth (columns), and the questions of a
    cell."""
    depths, rows = dict.fromkeys(cell["depth"] for cell in cells), []
    for length in dict.fromkeys(cell["length"] for cell in cells):
        own = {cell["depth"]: cell for cell in cells if cell["length"] == length}
        asked = max(cell.get("samples", 0) for cell in own.values())
        found = [f"{_percent(own[depth])}{_interval(own[depth])}" for depth in depths]
        rows.append([f"{length:,}", *found, f"{asked:,}"])
    header = ["tokens", *(f"depth {depth:g}" for depth in depths), "questions"]
    return markdown_table(header, rows, left=0)


def facts_table(cells: Sequence[dict]) -> str:
    """Accuracy, its interval, the loss and the share of the most frequent answers by distance."""
    rows = []
    for cell in cells:
        row = [str(cell["distance"]), _percent(cell)]
        if "accuracy" in cell:
            row.append(f"{100 * cell['low']:.1f}–{100 * cell['high']:.1f} %")
            row += [f"{cell['cross_entropy']:.4f}", f"{100 * cell['chance']:.1f} %"]
            row.append(f"{cell['samples']:,}")
        rows.append(row + [""] * (6 - len(row)))
    header = ["segments between", "right", "95 % interval", "nats per token"]
    return markdown_table([*header, "most frequent answer", "questions"], rows, left=0)


def _interval(cell: dict) -> str:
    return f" ({100 * cell['low']:.0f}–{100 * cell['high']:.0f})" if "accuracy" in cell else ""


def _percent(cell: dict) -> str:
    return f"{100 * cell['accuracy']:.1f} %" if "accuracy" in cell else "not possible"
