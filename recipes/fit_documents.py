r"""Fits which tokens a model keeps on real documents and the questions that people asked of them.

    python recipes/fit_documents.py --model qwen --data data/documents --sets faquad locomo \
        --out runs/fitted
    python recipes/evaluate_documents.py --model qwen --adapter runs/fitted --data data/documents \
        --sets faquad locomo --half test --ways plain kept --out runs/documents

--data is a folder of recipes/prepare_documents.py. Only its development half is read, and of that
no document of --without: choose by these, and read the test half once, at the end. Rows are
passages of the documents of --sets, with the questions whose answers lie in them and their right
answers: what the model looks at then is worth keeping (hf_infini.fit_keep_score). --facts adds rows
of their text with invented facts, as `hf-infini fit` makes them, which needs no questions. Without
these rows the score keeps what people ask about, and loses a single line that is unlike its text.

Nothing is kept of a fit that was stopped: the same command begins it again. Writes the folder OUT,
for --adapter and hf_infini.load_adapter, and OUT.json, which says what it was made from.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cli import SEED, UserError, exit_on_error, needed, one_line, option, parse_options
from document_sets.prepared import check_not_invented, read_prepared


@dataclass
class Options:
    model: str = needed("Folder or name on the Hub, of a plain model.", group="model")
    data: str = needed("Folder made by recipes/prepare_documents.py.", group="data")
    sets: list[str] = needed("Sets that say where answers are; as many rows of each.")
    out: str = needed("Folder to write, and the name of a file without .json.", group="output")
    without: list[str] = option(
        [], "Ids of documents to leave out, which you choose by.", group="data"
    )
    rows: int = option(24, "Rows.", at_least=1, group="rows")
    facts: int = option(8, "Rows of invented facts besides.", at_least=0)
    passage: int = option(1250, "Tokens of a row's passage.", at_least=1)
    least: int = option(
        3, "Questions of a passage, at least: what is asked is here and there in it.", at_least=1
    )
    length: int = option(1700, "Tokens of a row with its questions, at most.", at_least=1)
    seed: int = option(0, "Seed of what is drawn.", **SEED)
    kept_tokens: int = option(
        252, "Tokens that a head keeps on average; load_adapter takes others.", at_least=1
    )
    precision: Literal["float32", "bf16"] = option(
        "float32", "Of weights and calculations.", group="machine"
    )
    device: str = option("auto", "cpu, cuda, cuda:1, …; auto: a GPU where there is one.")


@exit_on_error(when_stopped="nothing is kept of a fit; the same command begins it again")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    documents = read_prepared(options.data, options.sets, "development")
    check_not_invented(options.data, options.sets)
    documents = without(documents, options.without)
    made = {"options": vars(options), "documents": [document["id"] for document in documents]}

    import torch

    from document_sets.asked import asked_rows, fact_rows
    from evaluation import inference
    from hf_infini import fit_keep_score, patch_model, save_adapter
    from hf_infini.tools.outputs import check_output
    from hf_infini.tools.ready import learned_options
    from support import measurement
    from support.stages import check_place, read_json, write_json

    record = Path(f"{options.out}.json")
    check_place(record, {"options": dict, "documents": list})
    if record.exists():
        there = read_json(record)
        ours, theirs = made["options"], there["options"]
        other = [
            name
            for name in ours.keys() | theirs.keys()
            if ours.get(name) != theirs.get(name) and name not in ("out", "device")
        ]
        if other or there["documents"] != made["documents"]:
            differs = ", ".join(sorted(other)) or "documents"
            raise UserError(
                f"--out {options.out} has a fit with other {differs}: choose another --out"
            )
    if Path(options.out).is_file():
        raise UserError(f"--out {options.out} is a file: give a folder for the adapter")
    try:
        check_output("--out", Path(options.out), options.model)
    except (OSError, ValueError) as error:
        raise UserError(one_line(error)) from error
    why = "a score is fitted for a plain model"
    model, tokenizer = inference.load_plain(options.model, options.device, options.precision, why)
    positions = model.config.get_text_config(decoder=True).max_position_embeddings
    if options.length > positions:
        raise UserError(
            f"--length {options.length}: --model {options.model} was trained with {positions:,} "
            "positions; give at most as many, and a shorter --passage"
        )
    names = ("rows", "passage", "least", "length", "seed")
    rows = asked_rows(tokenizer, documents, **{name: getattr(options, name) for name in names})
    rows += fact_rows(
        tokenizer, documents, rows=options.facts, length=options.length, seed=options.seed
    )
    try:
        # a second score, as of `hf-infini fit`, was not measured beside people's questions
        one = learned_options(model, options.kept_tokens) | {"keep_score": "learned"}
        patch_model(model, **one)
        fit_keep_score(model, rows)
        save_adapter(model, options.out, torch.bfloat16)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--model {options.model}, --out {options.out}: {one_line(error)}"
        ) from error
    tokens = [len(row) for row in rows]
    write_json(record, {**made, "tokens": tokens, **measurement.environment()})
    print(f"{options.out}: use it with --adapter, or hf_infini.load_adapter", file=sys.stderr)


def without(documents: list[dict], ids: list[str]) -> list[dict]:
    """The documents but for those with these ids, all of which must be there."""
    if unknown := set(ids) - {document["id"] for document in documents}:
        raise UserError(
            f"--without {' '.join(sorted(unknown))}: no document of the development half of --sets "
            "has this id"
        )
    left = [document for document in documents if document["id"] not in ids]
    if not left:
        raise UserError("--without leaves no document: name fewer")
    return left


if __name__ == "__main__":
    main()
