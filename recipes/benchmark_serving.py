r"""Tokens a second, and times to the first token, of any server with an API like OpenAI's, such as
`hf-infini serve`, `transformers serve`, vLLM or llama.cpp's.

    hf-infini serve MODEL --slots 16 &
    python recipes/benchmark_serving.py --url http://127.0.0.1:8000/v1 --model MODEL \
        --tokenizer MODEL --text war_and_peace.txt --requests 1 4 16 --tokens 1024 8192 \
        --out runs/serving.json

Each request has a part of the text of its own, so that no server has read its beginning before, and
asks for a summary. The requests of a row are sent at the same moment, or, with `--sent in_turn`,
each after the answer before; a short one comes first and is not measured. Tokens of answers are
counted as the server says them, over the time from the first request to the last answer. An answer
that fails ends the measurement. For figures of record let nothing else run.

With `--minutes 60 --process PID` it is load instead: as many clients as --requests says send one
request after the other, of each of the lengths in turn, and each minute has a row of what was
answered and of the resident memory of the server's process.

Prints a table and writes OUT, after every measurement.
"""

import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from cli import NotPossible, UserError, exit_on_error, needed, option, parse_options

LOAD = "| minute | answers | tokens/s | resident (MiB) |\n| ---: | ---: | ---: | ---: |"
ROWS = (
    "| tokens before | requests | sent | tokens/s | first token, median | 95 % |\n"
    "| ---: | ---: | --- | ---: | ---: | ---: |"
)
QUESTION = "\n\nSummarize this text in a few sentences."


@dataclass
class Options:
    url: str = needed("Address of the API, such as http://127.0.0.1:8000/v1.", group="server")
    model: str = needed("Name of the model, as the server has it.")
    tokenizer: str = needed("Folder or Hub name by which prompts are measured.", group="requests")
    text: str = needed("Text file that prompts are parts of.")
    out: str = needed("JSON file to write.")
    requests: list[int] = option([1, 4, 16], "Requests at the same moment.", at_least=1)
    tokens: list[int] = option([1024, 8192], "Tokens of a prompt.", at_least=16)
    sent: list[str] = option(["together"], "How.", choices=["together", "in_turn"])
    new_tokens: int = option(64, "Tokens of an answer, at most.", at_least=1)
    key: str = option("none", "Key of the server.")
    timeout: int = option(3600, "Seconds of a request, at most.", at_least=1)
    minutes: float | None = option(None, "Load for so long, instead of rows.", greater_than=0)
    process: int | None = option(None, "With --minutes: the server's process.", at_least=1)


@dataclass
class Answer:
    first: float  # seconds to the first text
    end: float  # seconds to its end
    prompt_tokens: int
    new_tokens: int


@exit_on_error("finished rows are in --out")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)

    from support.stages import check_place, write_json

    out = Path(options.out)
    check_place(out, {"rows": list})
    if (options.minutes is None) != (options.process is None):
        raise UserError("--minutes and --process belong together: give both, or neither")
    if options.minutes is not None and (len(options.requests), options.sent) != (1, ["together"]):
        raise UserError(
            "--minutes has one number of clients, each of which sends in turn: give one of "
            "--requests, and leave out --sent"
        )
    prompts, found = parts_of(options), []
    answer(options, "Hello")
    if options.minutes is not None:
        head, rows, line_of = LOAD, load(options, prompts), line_of_load
    else:
        head, rows, line_of = ROWS, rows_of(options, prompts), line_of_row
    print(head, flush=True)
    for row in rows:
        found.append(row)
        print(line_of(row), flush=True)
        write_json(out, {"options": vars(options), "rows": found})
    print(out)


def parts_of(options: Options) -> dict:
    """Of each length, parts of the text, none of which begins as another."""
    from corpora.tokenization import load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer)
    ids = tokenizer(Path(options.text).read_text("utf-8"), verbose=False)["input_ids"]
    most = max(options.tokens)
    if len(ids) < 2 * most:
        raise UserError(f"--text has {len(ids):,} tokens: give one of {2 * most:,} at least")

    def parts(tokens: int):
        place = 0
        while True:  # 997 is prime: it goes round without meeting itself
            place = (place + 997) % (len(ids) - tokens)
            yield tokenizer.decode(ids[place : place + tokens]) + QUESTION

    return {tokens: parts(tokens) for tokens in options.tokens}


def rows_of(options: Options, prompts: dict) -> Iterator[dict]:
    """The rows of the table."""
    for tokens, count, sent in itertools.product(options.tokens, options.requests, options.sent):
        together = sent == "together"
        texts = [next(prompts[tokens]) for _ in range(count)]
        yield row_of(tokens, *measured(options, texts, together), together)


def measured(options: Options, prompts: list[str], together: bool) -> tuple[list[Answer], float]:
    """The answers, and the seconds until the last one."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts) if together else 1) as pool:
        found = [*pool.map(lambda prompt: answer(options, prompt), prompts)]
    return found, time.perf_counter() - began


def load(options: Options, prompts: dict) -> Iterator[dict]:
    """A row for each minute: the answers so far, tokens a second of those that ended in it, and the
    resident bytes of the server at its end. UserError where there is no such process."""
    import psutil

    try:
        process = psutil.Process(options.process)
        process.memory_info()
    except psutil.Error as error:
        raise UserError(f"--process {options.process}: {error}") from error
    clients, began = options.requests[0], time.monotonic()
    parts = zip(*prompts.values(), strict=True)  # of each length one, over and over
    texts = itertools.chain.from_iterable(parts)
    answers, waiting = 0, set()
    with ThreadPoolExecutor(clients) as pool:
        for whole in range(math.ceil(options.minutes)):
            minute, tokens = min(whole + 1, options.minutes), 0
            while (left := began + 60 * minute - time.monotonic()) > 0:
                while len(waiting) < clients:
                    waiting.add(pool.submit(answer, options, next(texts)))
                ended, waiting = wait(waiting, left, FIRST_COMPLETED)
                tokens += sum(each.result().new_tokens for each in ended)
                answers += len(ended)
            yield {
                "minute": minute,
                "answers": answers,
                "tokens_per_second": tokens / (60 * (minute - whole)),
                "resident": process.memory_info().rss,
            }


def answer(options: Options, prompt: str) -> Answer:
    """A request, and its stream to the end."""
    import httpx

    body = {"model": options.model, "messages": [{"role": "user", "content": prompt}]}
    body |= {"max_tokens": options.new_tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    how = {"headers": {"Authorization": f"Bearer {options.key}"}, "timeout": options.timeout}
    began, first, pieces, usage = time.perf_counter(), None, 0, {}
    with httpx.stream("POST", f"{options.url}/chat/completions", json=body, **how) as reply:
        if reply.status_code != 200:
            raise NotPossible(f"{options.url} said {reply.status_code}: {reply.read()[:300]!r}")
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise NotPossible(f"{options.url} said {event['error']}")
            usage = event.get("usage") or usage
            if any(choice["delta"].get("content") for choice in event["choices"]):
                first, pieces = first or time.perf_counter() - began, pieces + 1
    end = time.perf_counter() - began
    tokens = usage.get("completion_tokens", pieces)
    return Answer(first or end, end, usage.get("prompt_tokens", 0), tokens)


def row_of(tokens: int, found: list[Answer], seconds: float, together: bool) -> dict:
    """A row of the table."""
    first = sorted(each.first for each in found)
    return {
        "tokens": tokens,
        "requests": len(found),
        "together": together,
        "seconds": seconds,
        "tokens_per_second": sum(each.new_tokens for each in found) / seconds,
        "first_median": statistics.median(first),
        "first_95": first[min(len(first) - 1, int(0.95 * len(first)))],
        "answers": [asdict(each) for each in found],
    }


def line_of_load(row: dict) -> str:
    """A row of --minutes in Markdown."""
    return (
        f"| {row['minute']:g} | {row['answers']:,} | {row['tokens_per_second']:.2f} | "
        f"{row['resident'] / 2**20:,.0f} |"
    )


def line_of_row(row: dict) -> str:
    """A row in Markdown."""
    sent = "together" if row["together"] else "in turn"
    return (
        f"| {row['tokens']:,} | {row['requests']} | {sent} | {row['tokens_per_second']:.2f} | "
        f"{row['first_median']:.2f} s | {row['first_95']:.2f} s |"
    )


if __name__ == "__main__":
    main()
