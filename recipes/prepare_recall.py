r"""Rows that train a model to recall: a number hidden in real text, facts of invented people, and
running text.

    python recipes/prepare_recall.py --data data/carolina --out data/recall
    python recipes/prepare_recall.py --data data/carolina --context 4096 \
        --mix passkey=0.5 text=0.5 --out data/passkeys

--data is a folder of recipes/prepare.py: its tokenizer is used, its training rows are the real text
of the new training rows, its validation rows that of the new validation rows. --out has the same
format (`tokenizer/`, `train/`, `validation/`, `validation_documents.jsonl`, `manifest.json`) with a
second column `labels`, which train.py follows: -100 where nothing is learned. Every row is one
document of exactly --context tokens:

passkey: real text with a five-digit number at a depth drawn at random, asked for --questions times
    after it, the last time at the very end;
facts: the opening of a generated biography, then invented paragraphs and real text, and among them,
    at any distance, a question for every fact of the opening;
codes: people in real text are given codes, all of which are asked for until the row is full;
forms: real text with invented facts of 14 forms (lockers, prices, birthplaces, …), all asked for
    at the end; `hf_infini.fit_keep_score` learns from them which tokens are worth keeping;
echo: real text in which short passages come again, each learned from its third token on;
paragraphs: the invented paragraphs alone, full of people and years that nobody asks for;
text: a block of the text of --data, as it is.

A model that starts from nothing learns recall from codes and echo in short rows first (--context
256), where it is asked often; passkeys and facts in longer rows then teach it to keep what it was
told.

The people and numbers of training rows, of validation rows, and of `evaluate_model.py --task
passkey|facts` are drawn apart from each other. A second run makes only what an option has changed.
Exits with 1 and a message for a --data that cannot be used and for rows too short, with 2 for
unknown or malformed options.
"""

import functools
import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from cli import SEED, UserError, exit_on_error, needed, option, parse_options


@dataclass
class Options:
    data: str = needed("Folder made by recipes/prepare.py, split by document.", group="data")
    out: str = needed("The folder to write.", group="output")
    context: int = option(1024, "Tokens per row.", at_least=2, at_most=2**31 - 1, group="rows")
    rows: int = option(20_000, "Training rows.", at_least=1)
    validation_rows: int = option(200, "Validation rows.", at_least=1)
    mix: list[str] = option(
        ["passkey=0.3", "facts=0.4", "text=0.3"],
        "Shares of the rows by kind (passkey, facts, codes, echo, forms, paragraphs, text), 1 "
        "together.",
    )
    questions: int = option(4, "passkey: how often a row asks for its number.", at_least=1)
    language: str = option(
        "pt", "Language of passkeys, codes and forms; facts are Portuguese.", choices=["pt", "en"]
    )
    answers_only: bool = option(
        True, "Where rows ask, only the answers are learned; false: every token."
    )
    seed: int = option(0, "Seed of every choice by chance.", **SEED)


@exit_on_error(when_stopped="a finished folder stays as it was; the same command starts again")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    from recall.rows import read_mix
    from support.stages import locked_folder

    shares = read_mix(options.mix)
    source = read_source(Path(options.data))
    if Path(options.out).resolve() == Path(options.data).resolve():
        raise UserError(f"--out {options.out} is --data itself: choose another folder")
    with locked_folder(Path(options.out), owner="prepare_recall.py") as out:
        manifest = prepare(options, shares, source, out)
    for name, split in manifest["splits"].items():
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in split["rows_by_kind"].items())
        counted = sum(split["counted_tokens"].values())
        learned = f"{counted:,} of {split['tokens']:,} tokens are learned"
        print(f"{name}: {split['blocks']:,} rows ({kinds}), {learned}")
    print(f"{out}: {manifest['wall_seconds']} s")
    words = f"--config recipes/configs/recall.yaml --data {shlex.quote(options.out)}"
    print(f"next: python recipes/train.py {words} --out runs/recall")


def read_source(data: Path) -> dict:
    """The manifest of --data; a UserError where it is missing or its rows are not running text."""
    from support.stages import read_manifest

    manifest = read_manifest(data)
    options, blocks = manifest["options"], manifest["splits"]["validation"]["blocks"]
    if options["split_by"] != "document" or blocks == 0:
        how = "prepare it with --split_by document and --validation"
        raise UserError(f"--data: {data} has no validation documents; {how}")
    if "prepared_from" in options:
        raise UserError(f"--data: {data} holds recall rows itself; give {options['prepared_from']}")
    return manifest


def prepare(options: Options, shares: dict[str, float], source: dict, out: Path) -> dict:
    """Runs the stages; each is redone only when its options or --data changed."""
    import datasets

    from corpora.blocks import read_rows
    from recall.rows import make_rows, write_rows
    from support import preparation, stages
    from support.prepared import read_tokenizer

    datasets.disable_progress_bars()  # they would stand between those of this program
    start, data, record = time.perf_counter(), Path(options.data), {}

    tokenizer = read_tokenizer(data)

    def copy_tokenizer(folder: Path) -> dict:
        own = shutil.ignore_patterns("stage.json")
        shutil.copytree(data / "tokenizer", folder, dirs_exist_ok=True, ignore=own)
        return source["tokenizer"]

    states = stages.state_of_files(str(data / "tokenizer"))
    files = [state for state in states if not state[0].endswith("stage.json")]
    record["tokenizer"] = preparation.run_stage(out / "tokenizer", {"files": files}, copy_tokenizer)

    def build(split: str, settings: dict, folder: Path) -> dict:
        rows = make_rows(tokenizer, read_rows(data / split).reshape(-1), split=split, **settings)
        return write_rows(rows, settings["rows"], options.context, folder)

    names = ("context", "questions", "answers_only", "language", "seed")
    same = {name: getattr(options, name) for name in names} | {"shares": shares}
    for split, rows in (("train", options.rows), ("validation", options.validation_rows)):
        settings = {**same, "rows": rows}
        identity = settings | {"text": source["splits"][split]["sha256"]}
        identity["tokenizer"] = record["tokenizer"]["key"]
        make = functools.partial(build, split, settings)
        record[split] = preparation.run_stage(out / split, identity, make)
    with stages.new_file(out / "validation_documents.jsonl") as part:
        shutil.copyfile(data / "validation_documents.jsonl", part)
    return preparation.write_manifest(
        out / "manifest.json",
        options={**source["options"], **vars(options), "prepared_from": options.data},
        source=source["source"],
        record=record,
        splits=["train", "validation"],
        start=start,
    )


if __name__ == "__main__":
    main()
