"""What a study measures on a finished run: the losses of each validation row and document, and the
bytes of the cache."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from cli import UserError
from corpora.blocks import read_documents
from evaluation.inference import load_model, read_in_chunks
from evaluation.perplexity import losses_of, prepared_rows
from hf_infini.models.loading import PLAIN_TEXT
from hf_infini.options import context_limit
from support.measurement import cache_bytes
from support.prepared import REMEDY
from support.rows import RowReader
from support.stages import read_json, read_jsonl, read_manifest, sealed, write_json
from training.run_folder import METRICS, RESULT, read_result
from training.setup import data_fingerprint

from .execution import evaluation_file
from .plan import BASE, Run
from .report import FinishedRun

BATCH_ROWS = 4  # rows per call while losses are measured
EVALUATION = {"perplexity": float}  # what the report uses of one
CONTEXTS = 8  # the cache is measured after one trained context and after this number of them


def measure_runs(
    runs: list[Run], data: dict[str, Path], out: Path, evaluations: list[str], threads: int
) -> list[FinishedRun]:
    """Measures finished runs, and reads what train.py and evaluate_model.py found.

    Args:
        data: the prepared folders by name; evaluations: names of files in the runs' folders.

    Raises UserError where a run is not finished, or was trained on other data than its data folder.
    """
    import torch

    torch.set_num_threads(threads)
    results = {run.name: read_result(run.folder) for run in runs}
    names = dict.fromkeys(run.data for run in runs)
    fingerprints = {name: data_fingerprint(read_manifest(data[name])) for name in names}
    for run in runs:
        if results[run.name]["data_fingerprint"] != fingerprints[run.data]:
            raise UserError(
                f"{run.folder} was trained on different data than {data[run.data]} holds; compare "
                "runs on the same"
            )
    others = [data[name] for name in names if name != BASE]
    documents = unseen_documents(data[BASE], others) if len(names) > 1 else []
    (out / "measured").mkdir(exist_ok=True)
    found = []
    for run in tqdm(runs, desc="measuring", unit="run"):
        result, file = results[run.name], out / "measured" / f"{run.name}.json"
        measured = measure_run(run.folder, result, data[run.data], documents, file)
        remedy = f"delete {run.folder / RESULT}, and the run's command makes both again"
        lines = read_jsonl(run.folder / METRICS, {"step": int, "tokens": int}, remedy)
        read, remedy = {}, f"delete it, and evaluate {run.folder} again"
        for name in evaluations:
            if (file := evaluation_file(run, name)).is_file():
                read[name] = read_json(file, EVALUATION, remedy)
        made = FinishedRun(run.name, run.variant, run.folder, result, lines, measured, read)
        found.append(made)
    return found


def measure_run(run: Path, result: dict, data: Path, documents: list[dict], file: Path) -> dict:
    """The content of `file` if it was measured on this very run and text, otherwise what is
    measured now, kept there: `rows` (`[loss sum, tokens]` of each validation row), `documents` (id
    → `[loss sum, characters]`) and `cache_bytes` (by tokens read; None beyond the model's
    positions).

    Args:
        run: out folder of a finished run of train.py; result: its result.json.
        data: the prepared folder that it was trained on.
        documents: what is also read document by document, for the losses per character."""
    identity = {"trained": result["date"], "data": result["data_fingerprint"]}
    identity["documents"] = [document["id"] for document in documents]
    if file.is_file():
        content = read_json(file, {"identity": dict}, "delete it: the run is measured again")
        if content["identity"] == identity:
            return content
    model, tokenizer = load_model(str(run), "cpu" if result["options"]["use_cpu"] else "auto")
    end_of_text = tokenizer.eos_token_id if result["options"]["separate_documents"] else None
    reader = RowReader(tokenizer.all_special_ids, end_of_text)
    tokens, labels = map(np.stack, zip(*prepared_rows(data, "validation"), strict=True))
    sums = (column.sum(1) for column in token_losses(model, reader, tokens, labels))
    context = tokens.shape[1]
    lengths = (context, CONTEXTS * context)
    content = {"identity": identity}
    content["rows"] = [[float(loss), int(count)] for loss, count in zip(*sums, strict=True)]
    content["documents"] = document_losses(model, tokenizer, reader, documents, context)
    content["cache_bytes"] = {str(size): state_bytes(model, size, context) for size in lengths}
    write_json(file, sealed(content))
    return content


def token_losses(
    model, reader: RowReader, tokens: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of every token of rows `[rows, tokens]`, in nats, and whether it counts: `[rows,
    tokens]` each.

    Special tokens never count, nor does the first token of a row, which nothing predicts.
    """
    losses, counted = np.zeros(tokens.shape), np.zeros(tokens.shape, dtype=bool)
    pairs = list(zip(tokens, labels, strict=True))
    for rows, first, values, targets in losses_of(model, pairs, reader, None, BATCH_ROWS):
        places = slice(first, first + values.shape[1])
        losses[rows, places] = values.double().cpu().numpy()
        counted[rows, places] = (targets != -100).cpu().numpy()
    return losses * counted, counted


def document_losses(
    model, tokenizer, reader: RowReader, documents: list[dict], context: int
) -> dict[str, list]:
    """`[loss sum, characters]` of each document, read one after the other in rows of `context`
    tokens.

    The characters are those of the predicted tokens; a document of which nothing is predicted is
    left out.
    """
    if not documents:
        return {}
    tokens, characters = encode_documents(tokenizer, [document["text"] for document in documents])
    owners = [np.full(len(piece), number) for number, piece in enumerate(tokens)]
    tokens, characters, owners = (
        _rows_of(pieces, context) for pieces in (tokens, characters, owners)
    )
    losses, counted = token_losses(model, reader, tokens, tokens)
    sums = [np.bincount(owners.ravel(), part.ravel()) for part in (losses, characters * counted)]
    found = zip(documents, *sums, strict=False)  # the last ones may be in no row
    return {one["id"]: [float(loss), int(count)] for one, loss, count in found if count > 0}


def encode_documents(tokenizer, texts: list[str]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The tokens of each text as recipes/prepare.py makes them, followed by the end-of-text token,
    and the number of characters that each token adds; a letter of several tokens counts with the
    first."""
    encoded = tokenizer(texts, **PLAIN_TEXT, return_offsets_mapping=True)
    tokens, characters = [], []
    for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        covered = np.maximum.accumulate(
            np.asarray([0, *(end for _, end in offsets)], dtype=np.int64)
        )
        tokens.append(np.asarray([*ids, tokenizer.eos_token_id], dtype=np.int64))
        characters.append(np.append(np.diff(covered), 0))
    return tokens, characters


def _rows_of(pieces: list[np.ndarray], context: int) -> np.ndarray:
    """[rows, context]: all pieces one after the other; a tail shorter than a row is left out."""
    stream = np.concatenate(pieces)
    return stream[: len(stream) // context * context].reshape(-1, context)


def state_bytes(model, length: int, chunk: int) -> int | None:
    """Bytes of one row's cache after `length` tokens, measured; None beyond the model's
    positions."""
    import torch

    limit = context_limit(model.config)
    if limit is not None and length > limit:
        return None
    tokens = torch.arange(length, device=model.device)[None] % model.config.vocab_size
    return cache_bytes(read_in_chunks(model, tokens, chunk))


def unseen_documents(data: Path, others: Sequence[Path]) -> list[dict]:
    """The validation documents of a prepared folder that none of the other folders has for training
    or its tokenizer."""
    seen = set().union(*map(trained_on, others))
    found = held_out_documents(data / "validation_documents.jsonl")
    return [document for document in found if document["id"] not in seen]


def held_out_documents(file: Path) -> list[dict]:
    """The documents in a `SPLIT_documents.jsonl` of a prepared folder."""
    return read_jsonl(file, {"id": str, "text": str}, REMEDY)


def trained_on(data: Path) -> set[str]:
    """The ids of the documents that a prepared folder holds out for nothing."""
    files = map(held_out_documents, data.glob("*_documents.jsonl"))
    held_out = {document["id"] for found in files for document in found}
    return set(read_documents(data / ".stages" / "documents")["id"]) - held_out
