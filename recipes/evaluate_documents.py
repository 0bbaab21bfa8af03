r"""Questions about long documents: what a model answers when it has read all of the document, a
window of it, kept tokens, or the passages that a search finds.

    python recipes/evaluate_documents.py --model smollm2 --adapter model_cards/smollm2 \
        --data data/documents --max_tokens 7800 --out runs/documents

--data is a folder of recipes/prepare_documents.py. Each way (--ways) reads a document once, and
every question goes on from a copy of what it holds then:

plain       all tokens: its cache grows with the text;
window      sinks, and a window of all other tokens, --tokens together;
kept        sinks, a window and kept tokens, by the scores of --adapter or by --keep_score;
recall      sinks, a window and the latest tokens, in whose places each question puts what it
            recalls from an archive of all tokens;
recall-int8 the same from an archive in 8 bits;
bm25        no cache: the passages that BM25 finds for the question, as many as make --tokens with
            it, are read again by the plain model;
embedding   the same with the passages nearest by the embeddings of --embedder
            (pip install sentence-transformers);
quantized   all tokens, in --bits bits (transformers' QuantizedCache; pip install optimum-quanto);
StreamingLLM, SnapKV, KeyDiff, ExpectedAttention
            presses of kvpress, which compress before they have seen a question;
WAY+lora    any of these with the LoRA of --lora in the model's weights.

Measured are the nats per token of the first right answer; of questions with options, how often the
right one has the fewest nats per token (the model does not see them); with --generate also the
model's own answers: F1 and whether a right answer is contained, by SQuAD's rules, and ROUGE-L of
summaries; how much of the evidence the cache holds, on average over layers and heads; seconds and
bytes. Words of code are its names and numbers. Differences to --against are paired; their intervals
of 95 % are of resampled documents, or, marked *, of resampled questions where there are fewer than
8 documents.

The development half is to choose and to tune by; read the test half once, at the end.

Stopped and started again with the same command, it goes on after the last question; another
--ways, --tokens, --sets, --documents or --questions adds to what is there: name the earlier ones
again, and give --adapter and --lora from the start. Writes OUT.jsonl, a line for every question,
whose "nats" are the sum over the "tokens" of the answer, and one for every reading; OUT.json,
OUT.png, and on standard output the table, where fewer than 5 questions have no interval.
"""

import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from cli import SEED, UserError, exit_on_error, option, parse_options
from cli.model_options import KEEP_SCORES
from cli.names import check_name
from document_sets.prepared import read_prepared

PRESSES = ("StreamingLLM", "SnapKV", "KeyDiff", "ExpectedAttention")
WAYS = ("plain", "window", "kept", "recall", "recall-int8", "bm25", "embedding", "quantized")
WAYS += PRESSES
WAYS += tuple(f"{name}+lora" for name in WAYS)
# What a result depends on; the other options choose which results there are
IDENTITY = ("model", "adapter", "keep_score", "window", "segments", "passage", "bits", "chat")
IDENTITY += ("generate", "chunk", "precision", "lora", "embedder")


@dataclass
class Options:
    model: str = field(
        metadata={"help": "Folder or name on the Hub, of a plain model.", "group": "model"}
    )
    data: str = field(
        metadata={"help": "Folder made by recipes/prepare_documents.py.", "group": "data"}
    )
    out: str = field(metadata={"help": "Files to write, without suffix.", "group": "output"})
    adapter: str | None = option(
        None, "kept: adapter with the scores, a folder or a name on the Hub.", group="model"
    )
    lora: str | None = option(
        None,
        "WAY+lora: LoRA of PEFT, or adapter with one, a folder or a name on the Hub. By default "
        "that of --adapter.",
        group="model",
    )
    keep_score: str | None = option(
        None,
        "kept: the keep score. By default the adapter's, or attention.",
        choices=[*KEEP_SCORES],
    )
    chat: bool = option(True, "Use the model's chat template, where it has one.")
    before: str = option(
        "",
        "Text in front of the document. {} in it is the question: then the document is read again "
        "for each.",
    )
    asks: str | None = option(
        None,
        "Text behind the document; {} in it is the question. By default it also says, in the "
        "language of the document, to answer from the text in a few words or in a paragraph.",
    )
    ways: list[str] = option(
        ["plain", "window", "kept", "recall", "bm25"],
        "What is compared.",
        choices=[*WAYS],
        group="ways",
    )
    against: str = option(
        "plain",
        "The way whose results are taken off the others', with the first of --tokens.",
        choices=[*WAYS],
    )
    tokens: list[int] = option(
        [2048],
        "Tokens in the cache of each key/value head, on average; of several sizes each way is "
        "measured with each, but for plain and quantized, which have no bound.",
        at_least=64,
    )
    window: int = option(
        256,
        "Tokens of the window beside kept tokens, at most half of the cache; of recall an eighth.",
        at_least=1,
    )
    segments: int = option(2, "Segments of that window.", at_least=1)
    passage: int | None = option(
        None,
        "bm25, embedding: tokens of a passage. By default an eighth of --tokens.",
        at_least=8,
    )
    embedder: str | None = option(
        None, "embedding: model of sentence-transformers, a folder or a name on the Hub."
    )
    bits: Literal["2", "4"] = option("4", "quantized: bits of a number.")
    sets: list[str] = option([], "Sets to read. By default all that --data has.", group="questions")
    half: Literal["development", "test"] = option("development", "Half of the documents.")
    documents: int | None = option(
        None, "Documents of each set at most, drawn by --seed.", at_least=1
    )
    questions: int | None = option(
        None, "Questions of each document at most, drawn by --seed.", at_least=1
    )
    max_tokens: int | None = option(
        None, "Leave out documents of more tokens than this, before they are drawn.", at_least=1
    )
    seed: int = option(0, "Seed of what is drawn.", **SEED)
    generate: int = option(0, "Tokens of the model's own answers; 0: none.", at_least=0)
    chunk: int = option(2048, "Tokens per call of the model.", at_least=1, group="machine")
    precision: Literal["float32", "bf16"] = option("float32", "Of weights and calculations.")
    device: str = option("auto", "cpu, cuda, cuda:1, …; auto: a GPU where there is one.")


@exit_on_error(
    when_stopped="measured questions are kept; the same command goes on from them, and reads again "
    "the document that it was at"
)
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    check_options(options)
    other = "test" if options.half == "development" else "development"
    prepared = read_prepared(options.data, options.sets, options.half, f"--half {other}")

    from evaluation import answer_table, inference
    from evaluation.prompts import Prompter
    from plots.documents import plot_ways
    from support import measurement
    from support.lines import Lines, only_writer
    from support.stages import check_place, new_file, state_of_files, write_json

    lines_file, picture_file = Path(f"{options.out}.jsonl"), Path(f"{options.out}.png")
    result_file = Path(f"{options.out}.json")
    check_place(result_file, {"options": dict, "rows": list}, [picture_file])
    with only_writer(lines_file):
        why = "the ways begin with a plain model"
        model, tokenizer = inference.load_plain(
            options.model, options.device, options.precision, why
        )
        identity = {name: getattr(options, name) for name in IDENTITY}
        # only where given: lines of earlier runs have no such names
        said = {"before": options.before, "asks": options.asks}
        identity |= {name: text for name, text in said.items() if text}
        given = (options.model, options.adapter, options.lora, options.embedder)
        read = [path for path in given if path and Path(path).exists()]
        files = [
            [state for state in state_of_files(path) if not state[0].endswith((".md", ".png"))]
            for path in read
        ]
        identity |= {"dtype": str(model.dtype), "files": files}
        lines = Lines(lines_file, identity)
        prompter = Prompter(tokenizer, options.chat, options.before, options.asks)
        drawn = draw(prepared, prompter, options)
        measure(model, prompter, drawn, lines, options)
        wanted = {(own["id"], number) for own, numbers in drawn for number in (*numbers, None)}
        labels = labelled(options)
        records = [
            {**record, "way": labels[record["way"], record["tokens_held"]]}
            for record in lines.records
            if (record["document"], record["question"]) in wanted
            and (record["way"], record["tokens_held"]) in labels
        ]
        against = next(own for (name, _), own in labels.items() if name == options.against)
        rows = answer_table.compared(records, [*labels.values()], against)
        if not rows:
            raise UserError("no document was short enough for any of --ways: give others")
        print(answer_table.table(rows, against))
        result = {
            "rows": [{name: _plain(value) for name, value in row.items()} for row in rows],
            "options": vars(options),
            **measurement.peak_memory(),
            **measurement.environment(),
        }
        sizes = " and ".join(f"{tokens:,}" for tokens in options.tokens)
        subtitle = f"{Path(options.model).name}, {sizes} tokens, {options.half} half"
        with new_file(picture_file) as picture:  # both files are new, or none is
            plot_ways(rows, against, picture, subtitle)
            write_json(result_file, result)
    print(f"{result_file}, {picture_file}, {lines_file}", file=sys.stderr)


def check_options(options: Options) -> None:
    """UserError for options that do not go together."""
    for name in ("adapter", "lora", "embedder"):
        if (given := getattr(options, name)) is not None:
            check_name(f"--{name}", given)
    for name in ("ways", "tokens"):
        if len(set(getattr(options, name))) < len(getattr(options, name)):
            given = " ".join(map(str, getattr(options, name)))
            raise UserError(f"--{name} {given}: name each once")
    if options.against not in options.ways:
        raise UserError(
            f"--against {options.against} must be one of --ways {' '.join(options.ways)}: add it "
            f"there, or give --against {options.ways[0]}"
        )
    if options.asks is not None and "{}" not in options.asks:
        raise UserError(f"--asks {options.asks!r} needs {{}}, the place of the question")
    if options.embedder is None and any(name.startswith("embedding") for name in options.ways):
        raise UserError("embedding: give the --embedder, a model of sentence-transformers")
    if options.adapter is None and options.keep_score is None and "kept" in options.ways:
        print("kept: by the attention in the window, without an --adapter", file=sys.stderr)
    tuned = [name for name in options.ways if name.endswith("+lora")]
    if tuned and options.lora is None and options.adapter is None:
        raise UserError(f"{tuned[0]}: give the --lora, or an --adapter that has one")
    if options.keep_score in ("learned", "half", "two_learned") and options.adapter is None:
        raise UserError(
            f"--keep_score {options.keep_score}: give the --adapter that has its scores"
        )


def draw(prepared: list[dict], prompter, options: Options) -> list[tuple[dict, list[int]]]:
    """The documents to read, and the numbers of the questions to ask of each."""
    found, left_out = [], 0
    for name in dict.fromkeys(document["set"] for document in prepared):
        own = [document for document in prepared if document["set"] == name]
        random.Random(f"{options.seed}/{name}").shuffle(own)
        taken = 0
        for document in own:
            if taken == options.documents:
                break
            if options.max_tokens and len(prompter.document(document).ids) > options.max_tokens:
                left_out += 1
                continue
            numbers = list(range(len(document["questions"])))
            random.Random(f"{options.seed}/{document['id']}").shuffle(numbers)
            found.append((document, numbers[: options.questions]))
            taken += 1
    if left_out:
        print(
            f"documents that are longer than --max_tokens {options.max_tokens:,}, and left out: "
            f"{left_out:,}",
            file=sys.stderr,
        )
    if not found:
        raise UserError(f"no document has at most --max_tokens {options.max_tokens}")
    return found


def labelled(options: Options) -> dict[tuple[str, int | None], str]:
    """What the table calls each way with each size of its cache, `None` for a way without."""
    from evaluation.ways import WAYS as CLASSES

    several = len(options.tokens) > 1
    return {
        (name, size): name if size is None or not several else f"{name}, {size:,}"
        for name in options.ways
        for size in (options.tokens if CLASSES[name].bounded else [None])
    }


def measure(model, prompter, drawn, lines, options: Options) -> None:
    """Asks each way what is not in the lines yet."""
    import torch
    from tqdm import tqdm

    from evaluation.answers import ask
    from evaluation.ways import WAYS as CLASSES

    done = {(r["way"], r["tokens_held"], r["document"], r["question"]) for r in lines.records}
    labels = labelled(options)
    total = len(labels) * sum(len(numbers) for _, numbers in drawn)
    asked = {(own["id"], number) for own, numbers in drawn for number in numbers}
    for name, size in labels:  # what cannot be is said before hours of reading
        if not asked <= {(d, q) for way, held, d, q in done if (way, held) == (name, size)}:
            with CLASSES[name](name, model, options, size).ready():
                pass
    with tqdm(total=total, unit="question") as bar:
        for (name, size), label in labels.items():
            way = CLASSES[name](name, model, options, size)
            with way.ready(), torch.inference_mode():
                for prepared, numbers in drawn:
                    key = (name, size, prepared["id"])
                    open_ones = [number for number in numbers if (*key, number) not in done]
                    bar.update(len(numbers) - len(open_ones))
                    if not open_ones and (*key, None) in done:
                        continue
                    document = prompter.document(prepared)
                    if (limit := way.limit()) is not None:
                        needed = longest(prompter, document, prepared, options.generate)
                        if needed > limit:
                            bar.write(
                                f"{prepared['id']}: {needed:,} tokens with question and answer, "
                                f"and {label} holds {limit:,}: left out of its rows",
                                sys.stderr,
                            )
                            bar.update(len(open_ones))
                            continue
                    record = {"way": name, "tokens_held": size}
                    record |= {"set": prepared["set"], "document": prepared["id"]}
                    tokens = len(document.ids)
                    bar.set_description(f"{label}, {prepared['id']}, {tokens:,} tokens")
                    for number, whole, reading, read in readings(
                        way, prompter, prepared, document, open_ones or numbers[:1]
                    ):
                        if (*key, None) not in done:  # of the first reading
                            lines.add({**record, "question": None, **read})
                            done.add((*key, None))
                        if number not in open_ones:
                            continue
                        entry = prepared["questions"][number]
                        found = ask(way, reading, whole, entry, prompter, options.generate)
                        lines.add({**record, "question": number, "kind": entry["kind"], **found})
                        bar.update()


def readings(way, prompter, prepared: dict, document, numbers: list[int]):
    """For the questions with these numbers the document, what the way knows of it, and `seconds`
    and `tokens` of reading it: once, or for each question where that is in front of the text. The
    `document` has no question."""
    reading, read = None, {}
    for number in numbers:
        if prompter.question_first:
            document = prompter.document(prepared, prepared["questions"][number])
        if not read or prompter.question_first:
            started = time.perf_counter()
            reading = way.read(document)
            seconds = round(time.perf_counter() - started, 3)
            read = {"seconds": seconds, "tokens": len(document.ids)}
        yield number, document, reading, read


def longest(prompter, document, prepared: dict, generate: int) -> int:
    """The tokens of a document with its longest question, which may come first, too, and answer."""
    return len(document.ids) + max(
        len(prompter.question(asked, document.language).ids) * (1 + prompter.question_first)
        + max(
            generate, *(len(prompter.answer(text)) for text in asked["options"] + asked["answers"])
        )
        for asked in prepared["questions"]
    )


def _plain(value):
    """A value of a row for JSON."""
    return asdict(value) if hasattr(value, "low") else value


if __name__ == "__main__":
    main()
