"""What a study measures on each finished run: losses by row and by document, the cache's bytes, a sample, long texts."""

import functools
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cli import UserError
from corpora.blocks import read_documents
from evaluation.inference import load_model
from evaluation.perplexity import measure_perplexity, text_rows
from hf_infini.configurations import context_limit
from hf_infini.metrics import stream_losses, summarize
from hf_infini.rows import RowReader
from support.measurement import cache_bytes
from support.stages import write_json
from training import batch_probe

from .planning import BASE, Run

CHUNK = 1024  # tokens per call of the model in long texts
BATCH_ROWS = 4  # rows per call while losses are measured
SAMPLING = {"temperature": 0.8, "top_p": 0.95}


def kept(file: Path, settings: dict, measure: Callable[[], dict]) -> dict:
    """The content of `file` if it was measured with the same settings, otherwise what `measure` returns, written there."""
    if file.is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["settings"] == settings:
            return content
    content = measure() | {"settings": settings}
    write_json(file, content)
    return content


def evaluate_run(run: Run, data: Path, documents: list[dict], context: int, fingerprint: str) -> None:
    """Writes row_losses.json into the folder of a finished run, unless it is there.

    Args:
        data: the prepared folder that it was trained on; fingerprint: its.
        documents: the study's validation documents; those that the run was trained on are left out.
    """
    read = set() if run.data == BASE else trained_on(data)
    judged = [document for document in documents if document["id"] not in read]
    settings = {"trained": _trained(run), "context": context, "documents": len(judged), "data_fingerprint": fingerprint}

    def measure() -> dict:
        model, tokenizer = load_run(run)
        if run.data == BASE:
            check_rows(data, tokenizer, documents, context)
        end_of_text = tokenizer.eos_token_id if run.options.get("separate_documents") else None
        return measure_losses(model, tokenizer, judged, context, BATCH_ROWS, end_of_text)

    kept(run.folder / "row_losses.json", settings, measure)


@dataclass
class Description:
    """What is measured on one run of each variant.

    Attributes:
        state_tokens: tokens after which the cache is measured; text: what fills it.
        prompt, new_tokens, seed: of the sample.
        long_texts: documents that are read beyond the trained context; long_length, context: tokens per row there.
    """

    state_tokens: list[int]
    text: str
    prompt: str
    new_tokens: int
    seed: int
    long_texts: list[str]
    long_length: int
    context: int


def describe_run(run: Run, wanted: Description) -> None:
    """Writes state_bytes.json, sample.json and positions.json into the folder of a finished run, unless they are there."""
    load, trained = functools.cache(lambda: load_run(run)), {"trained": _trained(run)}
    given = vars(wanted)
    settings = trained | {"tokens": wanted.state_tokens}
    kept(run.folder / "state_bytes.json", settings, lambda: measure_state(*load(), wanted.text, wanted.state_tokens))
    settings = trained | {name: given[name] for name in ("prompt", "new_tokens", "seed")} | SAMPLING
    kept(run.folder / "sample.json", settings, lambda: sample(*load(), wanted.prompt, wanted.new_tokens, wanted.seed))
    digest = hashlib.sha256("\n".join(wanted.long_texts).encode()).hexdigest()[:16]
    settings = trained | {"texts": digest} | {name: given[name] for name in ("long_length", "context")}
    separate = bool(run.options.get("separate_documents"))
    lengths = {"long": wanted.long_length, "context": wanted.context}
    kept(run.folder / "positions.json", settings, lambda: measure_positions(*load(), wanted.long_texts, lengths, separate))


def load_run(run: Run):
    """The model and tokenizer of a finished run, where it was trained to be: on the CPU or a GPU."""
    return load_model(str(run.trained), "cpu" if run.options.get("use_cpu") else "auto")


def _trained(run: Run) -> str:
    """When a run was finished: what was measured on another training of the same folder is not used again."""
    return json.loads((run.trained / "result.json").read_text(encoding="utf-8"))["date"]


# --- the text ---------------------------------------------------------------------------------------------------------


def validation_documents(data: Path) -> list[dict]:
    """The documents (id, title, source, text) that a prepared folder holds out for validation."""
    with open(data / "validation_documents.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def trained_on(data: Path) -> set[str]:
    """The ids of the documents that a prepared folder holds out for nothing."""
    held_out: set[str] = set()
    for name in ("validation", "test"):
        file = data / f"{name}_documents.jsonl"
        if file.is_file():
            with open(file, encoding="utf-8") as lines:
                held_out |= {json.loads(line)["id"] for line in lines}
    return set(read_documents(data / ".stages" / "documents")["id"]) - held_out


def encode_documents(tokenizer, texts: list[str]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The tokens of each text as recipes/prepare.py cuts them, with the end-of-text token behind, and how many characters of
    the text each of them adds; a letter of several tokens counts with its first."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError("the tokenizer cannot say which characters its tokens cover (it is no fast tokenizer)")
    before, backend.encode_special_tokens = backend.encode_special_tokens, True
    try:
        encodings = backend.encode_batch(texts, add_special_tokens=False)
    finally:
        backend.encode_special_tokens = before
    tokens, characters = [], []
    for encoding in encodings:
        ends = np.asarray([end for _, end in encoding.offsets], dtype=np.int64)
        covered = np.maximum.accumulate(np.concatenate([[0], ends]))
        tokens.append(np.asarray([*encoding.ids, tokenizer.eos_token_id], dtype=np.int64))
        characters.append(np.append(np.diff(covered), 0))
    return tokens, characters


def cut(pieces: list[np.ndarray], context: int) -> np.ndarray:
    """[rows, context]: all pieces one after the other; a tail shorter than a row is left out."""
    stream = np.concatenate(pieces)
    return stream[: len(stream) // context * context].reshape(-1, context)


# --- losses -----------------------------------------------------------------------------------------------------------


def measure_losses(
    model, tokenizer, documents: list[dict], context: int, batch_size: int, end_of_text: int | None = None
) -> dict:
    """Losses of the documents, put one after the other and cut into rows of `context` tokens, summed by row and by document.

    Special tokens are never counted, nor is the first token of a row, which nothing predicts. `end_of_text` keeps the
    documents of a row apart, see [`RowReader`].

    Returns `cross_entropy`, `perplexity` and `tokens` of all, `rows` (`[loss sum, tokens, characters]` each) and
    `documents` (`[id, loss sum, tokens, characters]` each; those of which nothing is predicted are left out).
    """
    import torch
    from tqdm import tqdm

    tokens, characters = encode_documents(tokenizer, [document["text"] for document in documents])
    rows, characters = cut(tokens, context), cut(characters, context)
    owners = cut([np.full(len(piece), number) for number, piece in enumerate(tokens)], context)
    if len(rows) == 0:
        raise UserError(f"the validation documents are too short for a row of {context:,} tokens: hold more of them out")
    reader = RowReader(tokenizer.all_special_ids, end_of_text)
    losses, counted = np.zeros(rows.shape), np.zeros(rows.shape, dtype=bool)
    for start in tqdm(range(0, len(rows), batch_size), desc="evaluating", unit="batch"):
        piece = slice(start, start + batch_size)
        for first, values, targets in stream_losses(model, **reader({"input_ids": torch.as_tensor(rows[piece])})):
            places = slice(first, first + values.shape[1])
            losses[piece, places] = values.double().cpu().numpy()
            counted[piece, places] = (targets != -100).cpu().numpy()
    sums = {"losses": losses * counted, "tokens": counted, "characters": characters * counted}
    by_row = {name: values.sum(1) for name, values in sums.items()}
    by_document = {name: np.bincount(owners.ravel(), values.ravel()) for name, values in sums.items()}
    return {
        **summarize(by_row["losses"].tolist(), by_row["tokens"].tolist()),
        "rows": [[float(loss), int(n), int(c)] for loss, n, c in zip(*by_row.values(), strict=True)],
        "documents": [
            [documents[number]["id"], float(loss), int(n), int(c)]
            for number, (loss, n, c) in enumerate(zip(*by_document.values(), strict=True))
            if c > 0
        ],
    }


def check_rows(data: Path, tokenizer, documents: list[dict], context: int) -> None:
    """UserError unless the validation rows of a prepared folder are its validation documents, cut as in
    [`measure_losses`]: the runs of this data are then judged on the very rows that they were evaluated on in training."""
    from datasets import load_from_disk

    prepared = load_from_disk(str(data / "validation")).with_format("numpy")
    rows = cut(encode_documents(tokenizer, [document["text"] for document in documents])[0], context)
    if not np.array_equal(np.stack(prepared["input_ids"][:]), rows):
        raise UserError(f"{data}: the validation rows are not its validation documents; prepare it again in a new --out")


# --- caches and samples -----------------------------------------------------------------------------------------------


def measure_state(model, tokenizer, text: str, lengths: list[int]) -> dict:
    """`{"bytes": …}`: of the cache, by the number of tokens that it has really read; None beyond the model's positions.

    Args:
        text: what is read, over again if need be.
    """
    import torch

    limit, found, cache, read = context_limit(model.config), {}, None, 0
    tokens = encode_documents(tokenizer, [text])[0][0]
    stream = torch.as_tensor(np.resize(tokens, max(lengths)), device=model.device)[None]
    for length in sorted(lengths):
        if limit is not None and length > limit:
            found[str(length)] = None
            continue
        while read < length:
            piece = stream[:, read : min(length, read + CHUNK)]
            with torch.no_grad():
                cache = model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
            read += piece.shape[1]
        found[str(length)] = cache_bytes(cache)
    return {"bytes": found}


def choose_prompt(documents: list[dict], words: int, host: str = "pt.wikipedia.org", characters: int = 2000) -> dict:
    """The first words of the first document from `host` with at least so many characters (of the first long one, or else
    the longest, where there is none), and the words that really follow."""
    long = [document for document in documents if len(document["text"]) >= characters]
    from_host = [document for document in long if f"//{host}/" in document["source"]]
    chosen = (from_host or long or [max(documents, key=lambda document: len(document["text"]))])[0]
    text = chosen["text"].strip()
    prompt = re.match(rf"(?:\S+\s+){{0,{words - 1}}}\S+", text)[0]
    continuation = re.match(rf"(?:\s*\S+){{0,{2 * words}}}", text[len(prompt) :])[0]
    return {"title": chosen["title"], "source": chosen["source"], "prompt": prompt, "continuation": continuation}


def sample(model, tokenizer, prompt: str, new_tokens: int, seed: int) -> dict:
    """A sampled continuation of a prompt: its text, or the reason why the model cannot make one."""
    import torch
    from transformers import set_seed

    inputs = tokenizer([prompt], return_tensors="pt", add_special_tokens=False).to(model.device)
    length, limit = inputs["input_ids"].shape[1], context_limit(model.config)
    room = new_tokens if limit is None else min(new_tokens, limit - length)
    if room < 1:
        return {"text": None, "reason": f"the prompt has {length:,} tokens, the model {limit:,} positions"}
    set_seed(seed)
    with torch.no_grad():
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            pad_token_id=tokenizer.pad_token_id,
            max_new_tokens=room,
            do_sample=True,
            top_k=0,
            **SAMPLING,
        )
    new = output[0, length:]
    return {"text": tokenizer.decode(new, skip_special_tokens=True), "new_tokens": len(new), "prompt_tokens": length}


# --- long texts and large batches -------------------------------------------------------------------------------------


def measure_positions(model, tokenizer, texts: list[str], lengths: dict[str, int], separate_documents: bool) -> dict:
    """Perplexity by position (see [`measure_perplexity`]) of the texts one after the other, in rows of each length that the
    model's positions reach; None for the others, and where there is no text."""
    limit, found = context_limit(model.config), dict.fromkeys(lengths)
    reader = RowReader(tokenizer.all_special_ids, tokenizer.eos_token_id if separate_documents else None)
    for name, length in lengths.items():
        if texts and (limit is None or length <= limit):
            rows = text_rows(tokenizer, texts, length)
            found[name] = measure_perplexity(model, rows, reader, chunk=CHUNK, batch_size=1) | {"length": length}
    return found


def largest_batch(run: Run, context: int, budget_gib: float) -> dict:
    """The content of largest_batch.json in the folder of a finished run, measured unless it is there."""
    options = json.loads((run.trained / "result.json").read_text(encoding="utf-8"))["options"]
    probe = batch_probe.Options(
        model=str(run.trained),
        budget_gib=budget_gib,
        context=context,
        precision=options["precision"],
        gradient_checkpointing=options["gradient_checkpointing"],
        device="cpu" if options["use_cpu"] else "auto",
    )

    settings = {"trained": _trained(run), **vars(probe)}
    return kept(run.folder / "largest_batch.json", settings, lambda: batch_probe.largest_batch(probe))
