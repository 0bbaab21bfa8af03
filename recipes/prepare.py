r"""Corpus -> tokenizer -> blocks: what `train.py` and the evaluations read.

    python recipes/prepare.py --config recipes/configs/prepare_carolina.yaml --source CAROLINA \
        --out data/carolina
    python recipes/prepare.py --source biographies --vocab_size 2000 --out data/biographies
    python recipes/prepare.py --source plays.txt --tokenizer characters --split_by block \
        --test 0.02 --out data/plays

--out then holds `tokenizer/`, `train/`, `validation/` and, with --test, `test/` (for
`datasets.load_from_disk`: a column `input_ids`, rows of `--context` tokens),
`validation_documents.jsonl` and `test_documents.jsonl` (id, title, source and text of every
held-out document) and `manifest.json` (options, counts, hashes), which is written last: a folder
without it is not finished. `.stages/` keeps the documents; a second run redoes only what depends on
an option that changed. Choose by the validation split, report the test split: with --test or
without it, the same documents (or blocks) are held out for validation.

Exits with 1 and a message for damaged, missing or empty input, with 2 for unknown or malformed
options.
"""

import dataclasses
import functools
import os
import shlex
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cli import UserError, exit_on_error, needed, option, parse_options
from cli.corpus_options import CorpusOptions


@dataclass
class TokenizerOptions:
    tokenizer: str = option(
        "bpe", "bpe (byte-level), characters, or a name or folder.", group="tokenizer"
    )
    vocab_size: int = option(
        8000, "bpe: entries, 258 bytes and special tokens among them.", at_least=258, at_most=2**26
    )
    tokenizer_sample: float = option(
        0.35, "bpe: share of the training documents.", greater_than=0, at_most=1, rare=True
    )


@dataclass
class BlockOptions:
    out: str = needed("The folder to write.", group="output")
    context: int = option(
        1024, "Tokens per block.", at_least=1, at_most=2**31 - 1, group="blocks and splits"
    )
    validation: float = option(
        0.02, "Share of the documents (or blocks) held out for validation.", greater_than=0, below=1
    )
    test: float = option(
        0.0, "Share of the documents (or blocks) held out for a test split.", at_least=0, below=1
    )
    split_by: str = option(
        "document",
        "document: none is in two splits; block: blocks of all documents are shuffled and split.",
        choices=["document", "block"],
    )
    max_tokens: int | None = option(
        None, "Stop the training text after so many tokens.", at_least=1
    )


@exit_on_error(when_stopped="finished stages are kept; the same command goes on from the last one")
def main(argv: list[str] | None = None) -> None:
    corpus, tokens, blocks = parse_options(
        CorpusOptions, TokenizerOptions, BlockOptions, description=__doc__, argv=argv
    )
    check_options(corpus, tokens, blocks)
    from support.stages import locked_folder

    with locked_folder(Path(blocks.out), owner="prepare.py") as out:
        manifest = prepare(corpus, tokens, blocks, out)
    source, size = manifest["source"], manifest["tokenizer"]["vocabulary"]
    if others := ", ".join(f"{count:,} {suffix}" for suffix, count in source["left_out"].items()):
        print(f"left out, as their suffixes tell another kind: {others}")
    if source["duplicates"]:
        print(
            f"{source['duplicates']:,} documents have exactly the text of an earlier one, so "
            "that held-out text may be in training, too; --drop_duplicates keeps one of each"
        )
    for name, split in manifest["splits"].items():
        rows = f"{split['blocks']:,} blocks of {blocks.context:,} tokens"
        print(f"{name}: {rows}, {split['documents']:,} documents")
    print(f"{out}: vocabulary {size:,}, {manifest['wall_seconds']} s")
    config = "recipes/configs/quickstart_infini.yaml"
    words = f"--config {config} --data {shlex.quote(blocks.out)} --out runs/infini"
    print(f"next: python recipes/train.py {words}")


def check_options(corpus: CorpusOptions, tokens: TokenizerOptions, blocks: BlockOptions) -> None:
    if blocks.validation + blocks.test >= 1:
        raise UserError(
            f"--validation {blocks.validation} and --test {blocks.test} leave nothing for "
            "training; give shares that are below 1 together"
        )
    source, out = (Path(os.path.realpath(path)) for path in (corpus.source, blocks.out))
    if source.is_dir() and out.is_relative_to(source):
        what = "is inside --source and would be read as a source next time"
        raise UserError(f"--out {blocks.out} {what}; move it")


def prepare(
    corpus: CorpusOptions, tokens: TokenizerOptions, blocks: BlockOptions, out: Path
) -> dict:
    """Runs the stages; each is redone only when its options, its input files or an earlier stage
    changed."""
    import datasets
    from transformers import AutoTokenizer

    from corpora import blocks as blocking
    from support import preparation, stages

    datasets.disable_progress_bars()  # they would stand between those of this program
    start, hidden, record = time.perf_counter(), out / stages.LOCK_FOLDER, {}
    # 1. Documents: read, filter, sample.
    settings = dataclasses.asdict(corpus) | {"files": stages.state_of_files(corpus.source)}
    record["documents"] = preparation.run_stage(
        hidden / "documents", settings, functools.partial(collect, corpus)
    )
    documents = blocking.read_documents(hidden / "documents")

    # 2. The split. By document it comes before the tokenizer, which learns from training documents
    # only.
    by_document, seed = blocks.split_by == "document", corpus.seed
    shares = {"validation": blocks.validation} | ({"test": blocks.test} if blocks.test > 0 else {})
    of_documents = {name: share * by_document for name, share in shares.items()}
    parts = split_documents(documents, of_documents, seed)
    split = {"documents": record["documents"]["key"], "seed": seed}
    split["shares"] = shares if by_document else None

    # 3. The tokenizer.
    make = functools.partial(
        blocking.save_tokenizer, parts["train"], seed=corpus.seed, **dataclasses.asdict(tokens)
    )
    settings = dataclasses.asdict(tokens) | {"files": stages.state_of_files(tokens.tokenizer)}
    settings |= split if tokens.tokenizer in ("bpe", "characters") else {}
    record["tokenizer"] = preparation.run_stage(out / "tokenizer", settings, make)
    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer", trust_remote_code=False)

    # 4. Rows: of each split's documents, or of all documents, which are then shuffled and dealt
    # out.
    def check_rows(name: str, count: int, text: int) -> None:
        if count == 0:
            now = ", ".join(f"--{split} (now {share})" for split, share in shares.items())
            raise UserError(
                f"the text of {text:,} tokens that {name} is cut from is too few for a block of "
                f"{blocks.context:,}; lower --context, take more documents, or change {now}"
            )

    def pack(name: str, folder: Path) -> dict:
        limit, counts = blocks.max_tokens if name == "train" else None, Counter()
        rows = blocking.pack_rows(parts[name], tokenizer, blocks.context, counts, limit)
        batches = ({"input_ids": batch} for batch in rows)
        saved = blocking.write_rows(batches, ["input_ids"], blocks.context, folder)
        check_rows(name, saved["blocks"], counts["stream_tokens"])
        return {**counts, **saved}

    def deal(name: str, folder: Path) -> dict:
        rows, packed = datasets.load_from_disk(hidden / "rows"), record["rows"]["result"]
        numbers = blocking.shuffle_blocks(len(rows), shares, seed)[name]
        saved = blocking.save_rows(rows.select(numbers), folder)
        check_rows(name, saved["blocks"], packed["stream_tokens"])
        # Whole documents are counted where they are trained on: a held-out block is a part of one
        counted = ("documents", "characters", "stream_tokens") if name != "train" else ()
        return {**packed, **saved, **dict.fromkeys(counted, 0)}

    settings = split | {"tokenizer": record["tokenizer"]["key"], "context": blocks.context}
    settings["max_tokens"] = blocks.max_tokens
    if not by_document:
        record["rows"] = preparation.run_stage(
            hidden / "rows", settings, functools.partial(pack, "train")
        )
    for name in ("train", *shares):
        build = functools.partial(pack if by_document else deal, name)
        record[name] = preparation.run_stage(out / name, settings | {"shares": shares}, build)

    # 5. The held-out documents, and the manifest, which says that all is done. Without a test
    # split, what an earlier run held out for testing is trained on.
    if "test" not in shares:
        shutil.rmtree(out / "test", ignore_errors=True)
        (out / "test_documents.jsonl").unlink(missing_ok=True)
    for name in shares:
        with stages.new_file(out / f"{name}_documents.jsonl") as part:
            parts[name].to_json(part, force_ascii=False)
    return preparation.write_manifest(
        out / "manifest.json",
        options=vars(corpus) | vars(tokens) | vars(blocks),
        source=record["documents"]["result"],
        record=record,
        splits=["train", *shares],
        start=start,
    )


def collect(corpus: CorpusOptions, folder: Path) -> dict:
    """Reads the corpus into `folder` and returns what was read, left out and why."""
    from corpora.blocks import write_documents
    from corpora.documents import ReadingLog
    from corpora.sources import corpus_documents

    log = ReadingLog()
    count = write_documents(corpus_documents(corpus, log), folder)
    if count == 0:
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in log.dropped.items())
        what = reasons or "none was found"
        raise UserError(f"--source {corpus.source}: no document is left ({what})")
    return {"documents": count, **vars(log)}


def split_documents(documents, shares: dict[str, float], seed: int) -> dict:
    """The documents of each held-out split, chosen by chance in this order, and the rest as
    `"train"`."""
    from corpora.selection import choose

    ids, sides = documents["id"][:], {}
    for name, share in shares.items():
        sides[name] = choose(ids, share, seed, name, exclude=sum(sides.values(), []))
    sides["train"] = sorted(set(range(len(ids))).difference(*sides.values()))
    if not sides["train"]:
        what = f"the corpus has {len(ids)} document(s), which leaves none to train on"
        raise UserError(f"{what}; use --split_by block")
    return {name: documents.select(positions) for name, positions in sides.items()}


if __name__ == "__main__":
    main()
