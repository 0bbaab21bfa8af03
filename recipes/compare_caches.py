r"""What a bounded cache costs a pretrained model: all tokens, a window with sinks, and kept tokens,
at equal sizes.

    python recipes/compare_caches.py --model smollm2 --adapter model_cards/smollm2 \
        --data data/en --out runs/nats_en
    python recipes/compare_caches.py --model smollm2 --adapter model_cards/smollm2 \
        --data data/en --task passkey \
        --language en --caches 512 1024 --lengths 2048 4096 8192 --out runs/passkeys_en
    python recipes/compare_caches.py --model runs/infini --attribute --data data/quickstart \
        --out runs/infini/parts

The contestants (--ways) have the same weights, the same sinks and, but for plain, the same number
of tokens in the cache of each key/value head (--caches), on average: sinks, kept tokens and window
together.

plain       the model as it is: its cache grows with the text;
window      sinks, and a window of all other tokens;
random      sinks, a window (--window, --segments), and tokens kept by chance;
attention, learned, half, two_learned, key_norm
            the same, kept by that `keep_score`; learned, half and two_learned take the scores of
            --adapter, made by hf-infini fit.

recall      as recent, which keeps the latest tokens, but all tokens are in an archive in host
            memory, and each question puts those that share its rarest words in their places
            (passkey and facts only: running text asks nothing, and would be that of recent).

With --adapter the layers have the shares of the kept tokens that it says, whichever way they are
kept.

StreamingLLM, SnapKV, KeyDiff, ExpectedAttention
            presses of kvpress (passkey only): they read the whole prompt with a growing cache, then
            leave so many tokens; with " blind" after the name they compress before they have seen
            the question, as all others here do.

Of these none reads a memory: all gates are closed. --attribute asks a model that has a memory, of
any family, what it owes to which part (a converted model may live on its window only, however good
its loss): it is compared as it is, with the memory off, without kept tokens (they go into the
memory), with the window only, and with a longer window that takes as many bytes as window, kept
tokens and memory together, in 16 bits as models are served, the memory in 32.

perplexity: nats per token from position --count_from on in rows of --length tokens, and which share
of the gap between the smallest window and plain is closed. passkey and facts: as in
evaluate_model.py. niah_multikey_2, niah_multikey_3 and vt: tasks of RULER, which make their own
text, and RULER's score of what the model says: a number among numbers, an identifier among
identifiers, the variables of a chain of assignments.

Stopped and started again with the same command, it goes on after the last finished contestant.
Writes OUT.json, and the table on standard output.
"""

import functools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cli import UserError, exit_on_error, needed, option, parse_options
from cli.evaluation_options import EvaluationOptions
from cli.model_options import KEEP_SCORES
from cli.names import check_name

OWN = ("plain", "window", "random", *KEEP_SCORES)
PRESSES = ("StreamingLLM", "SnapKV", "KeyDiff", "ExpectedAttention")
PRESSES = [f"{press}{end}" for press in PRESSES for end in ("", " blind")]
RECALL = "recall"
RULER = ("niah_multikey_2", "niah_multikey_3", "vt")
WAYS = [*OWN, RECALL, *PRESSES]


@dataclass(kw_only=True)
class Options(EvaluationOptions):
    task: Literal["perplexity", "passkey", "facts", "niah_multikey_2", "niah_multikey_3", "vt"] = (
        option("perplexity", "What to measure.", group="measurement")
    )
    out: str = needed("File to write, without .json.", group="output")
    adapter: str | None = option(
        None, "Adapter with scores for learned and half, or with the memory to --attribute."
    )
    ways: list[str] = option(
        ["plain", "window", "attention"], "What is compared.", choices=WAYS, group="measurement"
    )
    attribute: bool = option(
        False, "Compare the parts of --model, which has a memory or gets one with --adapter."
    )
    caches: list[int] = option(
        [512], "Tokens in the cache of each key/value head, one after the other.", at_least=16
    )
    window: int = option(
        256,
        "Tokens of the window beside kept tokens, at most half of the cache; of recall an eighth.",
        at_least=1,
    )
    segments: int = option(
        2, "Segments of it: with more a query sees more, and reading is slower.", at_least=1
    )
    length: int = option(8192, "perplexity: tokens per row.", at_least=2)
    rows: int = option(16, "perplexity: rows.", at_least=1)
    count_from: int = option(1024, "perplexity: first position that counts.", at_least=1)
    lengths: list[int] = option(
        [2048, 4096, 8192],
        "passkey and RULER's: lengths of the examples in tokens.",
        at_least=2,
        group="passkeys and facts",
    )
    distances: list[int] = option(
        [0, 1, 2, 4, 8, 16, 32], "facts: segments from a fact to its question.", at_least=0
    )
    segment_length: int = option(
        256, "facts: tokens per segment, in which distances are counted.", at_least=1
    )
    samples: int = option(
        8, "Examples per cell: a length (passkey: and a depth), or a distance.", at_least=1
    )
    chunk: int = option(2048, "Tokens per call of the model.", at_least=1, group="machine")


@exit_on_error(when_stopped="finished contestants are kept; the same command goes on from them")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    check_options(options)
    if options.adapter is not None:
        check_name("--adapter", options.adapter)

    import torch

    from evaluation import caches, inference, presses
    from evaluation.texts import read_texts
    from hf_infini.tools.passages import term_numbers
    from recall.ruler import continued
    from recall.tasks import Runner, run_cells, score_recalled
    from support import measurement
    from support.stages import check_place, state_of_files, write_json

    out = Path(f"{options.out}.json")
    check_place(out, {"options": dict, "contestants": list})
    adapter = options.adapter if options.attribute else None
    model, tokenizer = inference.load_model(
        options.model, options.device, adapter, options.precision
    )
    contestants = caches.parts_of(model.config) if options.attribute else contestants_of(options)
    texts = read_texts(options) if options.source else None
    read = [path for path in (options.model, options.adapter, options.text) if path is not None]
    identity = {**vars(options), "out": None, "dtype": str(model.dtype)}
    identity["files"] = [state_of_files(path) for path in read if Path(path).exists()]
    cells, part_file = Path(f"{options.out}.cells.json"), Path(f"{options.out}.part.json")
    runner = Runner(model, tokenizer, options, cells, identity)
    own = {"adapter": options.adapter, "window": options.window, "segments": options.segments}
    part = caches.with_part if options.attribute else functools.partial(caches.bounded, **own)

    def run(cell: dict) -> dict:
        score = presses.scorer(**cell) if cell["way"] in PRESSES else None
        terms = term_numbers(tokenizer) if cell["way"] == RECALL else None
        if options.task in RULER:
            score = functools.partial(continued, tokenizer=tokenizer, terms=terms)
        elif terms is not None:
            score = functools.partial(score_recalled, terms=terms)
        inner = Runner(model, tokenizer, options, part_file, identity | cell, score)
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        with part(model, **cell):
            found = caches.MEASURES[options.task](inner, texts)
        part_file.unlink(missing_ok=True)
        seconds = round(time.perf_counter() - started, 1)
        return {**found, "seconds": seconds, **measurement.peak_memory()}

    measured = run_cells(runner, contestants, run)
    found = [each for each in measured if "not_possible" not in each]
    for each in (each for each in measured if "not_possible" in each):
        print(f"{caches.name_of(each)}: {each['not_possible']}", file=sys.stderr)
    print(caches.nats_table(found) if options.task == "perplexity" else caches.shares_table(found))
    result = {"contestants": measured, "options": vars(options)}
    write_json(out, {**result, **measurement.peak_memory(), **measurement.environment()})
    cells.unlink(missing_ok=True)
    print(out, file=sys.stderr)


def check_options(options: Options) -> None:
    """UserError for options that do not go together."""
    defaults = Options(model="", out="")
    for name in ("ways", "caches", "window", "segments") if options.attribute else ():
        if getattr(options, name) != getattr(defaults, name):
            raise UserError(
                f"--attribute compares the parts of the model as it is: leave out --{name}"
            )
    if options.adapter is None:
        from evaluation.caches import LEARNED

        if learned := [way for way in options.ways if way in LEARNED]:
            raise UserError(f"--ways {' '.join(learned)}: give the --adapter that has their scores")
    for name in ("ways", "caches"):
        values = getattr(options, name)
        if len(set(values)) < len(values):
            raise UserError(f"--{name} {' '.join(map(str, values))}: name each once")
    if options.task == "perplexity" and options.count_from >= options.length:
        raise UserError(
            f"--count_from {options.count_from} must be below --length {options.length}"
        )
    if options.task == "perplexity" and options.source is None:
        raise UserError("--task perplexity reads texts: give one of --data and --text")
    if options.task in RULER and options.source is not None:
        raise UserError(f"--task {options.task} makes its own text: leave out --data and --text")
    if options.data is not None and options.text is not None:
        raise UserError("give at most one of --data and --text")
    if options.task == "perplexity" and RECALL in options.ways:
        raise UserError(
            "--ways recall: running text asks no question that could recall; give another --task, "
            "or --ways recent, which predicts it alike"
        )
    if options.task != "passkey" and (presses := [way for way in options.ways if way in PRESSES]):
        raise UserError(f"--ways {' '.join(presses)}: kvpress is compared by --task passkey only")


def contestants_of(options: Options) -> list[dict]:
    """`way` and `cache` (tokens a head, `None` for plain) of each."""
    found = [{"way": "plain", "cache": None}] if "plain" in options.ways else []
    others = [way for way in options.ways if way != "plain"]
    return found + [{"way": way, "cache": size} for size in options.caches for way in others]


if __name__ == "__main__":
    main()
