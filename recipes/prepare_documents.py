r"""Reads public sets of documents with questions, as they were downloaded, and writes them in one
form for recipes/evaluate_documents.py.

    git clone https://github.com/OpenLMLab/LEval downloads/LEval
    git clone https://github.com/snap-research/locomo downloads/LoCoMo
    python recipes/prepare_documents.py --source downloads --out data/documents

These are two of the five repositories that sets are read from. A set is found by where its files
lie in its repository, such as data/locomo10.json, anywhere under --source. OUT gets a file for each
set, a line of JSON for each document:

    {"id", "set", "language", "half", "text", "questions": [
        {"question", "kind", "answers", "options", "evidence"}]}

Your own documents are the set "own": files such as own.jsonl or own_contracts.jsonl, whose lines
are {"text": "…", "questions": [{"question": "…", "answers": ["…"]}]}. A document may also have a
"language", "en" or "pt", and a question "kind", "options" and "evidence".

"kind" is "short", "choice", "summary" or "code". "evidence" is where the answer is, from and to a
character of the text, where the set says so.

Each document belongs to the development half or to the test half, by a hash of its name or of its
first letters, so that it stays there, and a text that two sets have is in one half. Choose and
tune on the development half, and read the test half once, at the end.

An entry that is damaged, or of another form, is an error; --skip_damaged leaves it out and says so.
Another call with the same --out adds sets, and makes those again that it reads.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from cli import UserError, exit_on_error, option, parse_options
from document_sets.prepared import MANIFEST, write_set
from document_sets.sets import SETS, DocumentSet


@dataclass
class Options:
    source: list[str] = field(
        metadata={"help": "Downloads: folders, or files of the sets.", "group": "data"}
    )
    out: str = field(metadata={"help": "Folder to write the prepared sets to.", "group": "output"})
    sets: list[str] = option(
        [], "Sets to prepare. By default those that --source has.", choices=[*SETS], group="sets"
    )
    skip_damaged: bool = option(
        False, "Leave out entries that are damaged or of another form, and say which."
    )
    join: int = option(
        45_000,
        "Characters to which short texts (faquad) are joined, those of one half: some 12,000 "
        "tokens.",
        at_least=1,
    )


@exit_on_error(when_stopped="finished sets are kept; the same command makes them again")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)

    from support.markdown import markdown_table
    from support.stages import locked_folder

    found, made = files_of(options), {}
    with locked_folder(Path(options.out), "prepare_documents.py") as folder:
        for name, files in found.items():
            lines, left_out = prepare(name, files, options)
            made_from = {"files": [str(file) for file in files], "left_out": left_out}
            made_from["repository"] = SETS[name].repository
            made[name] = write_set(folder, name, lines, **made_from)
    header = ["set", "development", "test", "questions", "characters a document", "left out"]
    rows = [
        [
            name,
            *(str(own["documents"].get(half, 0)) for half in ("development", "test")),
            f"{own['questions']:,}",
            f"{own['characters'] // sum(own['documents'].values()):,}",
            ", ".join(f"{count} {reason}" for reason, count in own["left_out"].items()),
        ]
        for name, own in made.items()
    ]
    print(markdown_table(header, rows, left=1))


def files_of(options: Options) -> dict[str, list[Path]]:
    """The files of each set that is to be prepared; UserError where one that was asked for has
    none."""
    from support.stages import source_files

    there = []
    for source in options.source:
        if not Path(source).exists():
            raise UserError(f"--source {source} is not there: give a folder or a file")
        there += source_files(source)
    there = [file for file in there if not (file.parent / MANIFEST).is_file()]  # made before
    found = {
        name: [file for file in there if fits(file, wanted)]
        for name, wanted in SETS.items()
        if name in (options.sets or SETS)
    }
    missing = [name for name, files in found.items() if not files]
    if missing:
        if options.sets or len(missing) == len(found):
            needed = "; ".join(f"{name}: {SETS[name].described}" for name in missing)
            raise UserError(f"--source {' '.join(options.source)} has no file of {needed}")
        names = ", ".join(missing)
        print(
            f"sets that --source has no file of are left out: {names} (--sets NAME says which file "
            "it needs)",
            file=sys.stderr,
        )
    return {name: files for name, files in found.items() if files}


def fits(file: Path, wanted: DocumentSet) -> bool:
    """Whether a file lies where one of a set does."""
    return any(file.absolute().match(pattern) for pattern in wanted.files)


def prepare(name: str, files: list[Path], options: Options) -> tuple[list[dict], dict[str, int]]:
    """The lines of a set, and what was left out of it, how often, by the reason."""
    from document_sets.documents import half_of, joined, merged, record

    wanted, texts, left_out = SETS[name], [], Counter()
    for file in files:
        empty = True
        for where, entry in wanted.entries(file):
            empty = False
            try:
                if isinstance(entry, UserError):
                    raise entry
                texts.append(wanted.read(entry, where).check(where))
            except UserError as error:
                if not options.skip_damaged:
                    raise UserError(
                        f"{error}; mend or download it, or leave such entries out with "
                        "--skip_damaged true"
                    ) from None
                print(f"left out: {error}", file=sys.stderr)
                left_out["damaged"] += 1
        if empty:
            raise UserError(
                f"{file} is empty, and needs entries of the set {name}; download it again"
            )
    texts = merged(texts)
    pairs = (
        joined(texts, options.join)
        if wanted.short
        else ((half_of(text.key), text) for text in texts)
    )
    lines = []
    for half, text in pairs:
        left_out += text.left_out
        if text.questions:
            lines.append(record(name, wanted.language, half, text))
    if not lines:
        raise UserError(f"{', '.join(map(str, files))}: nothing is left of the set {name}")
    return lines, dict(left_out)


if __name__ == "__main__":
    main()
