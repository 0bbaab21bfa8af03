"""Perplexity of a model on a prepared folder or on a text, overall and by position in the context, at any length.

    python recipes/evaluate_model.py --model runs/infini --data data/quickstart
    python recipes/evaluate_model.py --model runs/infini --data data/quickstart --length 32768
    python recipes/evaluate_model.py --model runs/mha --data data/shakespeare --split test
    python recipes/evaluate_model.py --model runs/infini --text plays.txt --length 8192 --out runs/infini/plays
    python recipes/evaluate_model.py --model runs/infini --text documents.jsonl --length 4096 --join false

Without --length, --data is evaluated on its validation rows as they are, which is the number in train.py's result.json.
--split test reads the test rows instead, for the one model that the validation rows chose. With --length, texts are read
in rows of that length, in chunks through the model's cache: a model with segment positions (`positions: segment`) takes
any length in constant memory; one with absolute or learned positions stops at its `n_positions`.
Writes OUT.json, OUT.png (perplexity by position, log-2 buckets), and the same table on standard output.
"""

import json
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hf_infini.cli import UserError, exit_on_user_error, option, parse_options


@dataclass
class Options:
    model: str = field(metadata={"help": "Model folder or name on the Hub."})
    data: str | None = option(None, "Folder made by recipes/prepare.py. Or --text.")
    split: Literal["validation", "test"] = option("validation", "--data: the held-out rows or documents to read.")
    text: str | None = option(None, "Text file (one document) or .jsonl file (one document per line). Or --data.")
    text_field: str = option("text", "The field of a .jsonl file that holds the text.")
    length: int | None = option(None, "Tokens per row; default: the rows of --data, or the model's n_positions.")
    join: bool = option(True, "Put the documents one after the other, an end-of-text token between, and cut rows of "
                        "--length; false: a row per document, its first --length tokens.")  # fmt: skip
    min_characters: int = option(0, "Leave out documents shorter than this.")
    max_tokens: int | None = option(None, "Stop after the row in which so many tokens are reached; default: read all.")
    chunk: int = option(1024, "Tokens per call of the model in rows longer than this: memory grows with it.")
    batch_size: int = option(4, "Rows per call of the model.")
    precision: Literal["float32", "bf16"] = option("float32", "bf16: autocast.")
    device: str = option("auto", "cpu, cuda, cuda:1, …; auto: a GPU where there is one.")
    out: str | None = option(None, "Files to write, without suffix; default: evaluation (--split test: evaluation_test) "
                           "in the model's folder.")  # fmt: skip


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    if (options.data is None) == (options.text is None):
        raise UserError("give exactly one of --data and --text")
    if options.text is not None and options.split != "validation":
        raise UserError(f"--split {options.split} chooses among the rows of --data, and --text has none: leave it out")
    manifest = read_manifest(options)
    if options.text is not None and not Path(options.text).is_file():
        raise UserError(f"--text: there is no file {options.text}")
    for name in ("length", "chunk", "batch_size", "max_tokens"):
        value = getattr(options, name)
        if value is not None and value < (2 if name == "length" else 1):
            raise UserError(f"--{name} must be at least {2 if name == 'length' else 1}, got {value}")

    import torch
    from torch.nn.utils.rnn import pad_sequence
    from tqdm import tqdm

    from hf_infini import inference, measurement, metrics, plots, run_folder, training
    from hf_infini.perplexity_metric import TokenPerplexity

    model, tokenizer = inference.load_model(options.model, options.device)
    if options.out is None and not Path(options.model).is_dir():
        raise UserError(f"--out is needed, as --model {options.model} is no folder here")
    name = options.out or str(Path(options.model) / f"evaluation{'_test' if options.split == 'test' else ''}")
    if options.data is not None and options.length is None:
        rows, source = prepared_rows(options), options.data
    else:
        length = options.length or model.config.n_positions
        inference.check_length(model.config, length)
        rows, source = text_rows(options, tokenizer, length), options.text or options.data
    length = options.length or max(map(len, rows))
    inference.check_length(model.config, length)
    complete = sum(len(row) == length for row in rows)
    print(f"{len(rows):,} rows, {complete:,} of them of {length:,} tokens", file=sys.stderr)

    positions, metric = metrics.LossByPosition(), TokenPerplexity()
    rows.sort(key=len, reverse=True)  # a batch's rows are then about as long, and too little memory shows at once
    batches = [rows[start : start + options.batch_size] for start in range(0, len(rows), options.batch_size)]
    started = time.perf_counter()
    with tqdm(total=sum(len(batch) * len(batch[0]) for batch in batches), unit="token", unit_scale=True) as bar:
        for batch in batches:
            tensors = [torch.as_tensor(row, dtype=torch.long) for row in batch]
            # Padding stands on the right, where a causal model's other tokens do not see it
            input_ids = pad_sequence(tensors, batch_first=True)
            labels = pad_sequence(tensors, batch_first=True, padding_value=-100)
            with torch.autocast(model.device.type, torch.bfloat16, enabled=options.precision == "bf16"):
                for first, losses, targets in metrics.stream_losses(model, input_ids, options.chunk, labels):
                    positions.add(first, losses, targets)
                    loss_sum, tokens = losses.sum(dtype=torch.float64).item(), int((targets != -100).sum())
                    metric.add_batch(loss_sums=[loss_sum], token_counts=[tokens])
                    bar.update(targets.numel())
    seconds = time.perf_counter() - started

    result = {
        **metric.compute(),
        "by_position": positions.table(),
        "model": options.model,
        "source": source,
        "split": options.split if manifest else None,
        "data_fingerprint": training.data_fingerprint(manifest) if manifest else None,
        "rows": len(rows),
        "complete_rows": complete,
        "length": length,
        "tokens_per_second": round(sum(map(len, rows)) / seconds, 1),
        **measurement.peak_memory(),
        "options": vars(options),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        **measurement.environment(),
    }
    print(f"{'positions':>17}  {'tokens':>10}  {'nats':>7}  {'perplexity':>10}")
    for row in result["by_position"]:
        place = f"{row['first']}–{row['last']}"
        print(f"{place:>17}  {row['tokens']:>10,}  {row['cross_entropy']:7.4f}  {row['perplexity']:10.2f}")
    print(f"{'all':>17}  {result['tokens']:>10,}  {result['cross_entropy']:7.4f}  {result['perplexity']:10.2f}")
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    run_folder.write_json(Path(f"{name}.json"), result)
    plots.plot_positions(result["by_position"], Path(f"{name}.png"), f"{Path(options.model).name} on {Path(source).name}")
    print(f"{name}.json, {name}.png", file=sys.stderr)


def read_manifest(options: Options) -> dict | None:
    """The manifest of --data, None for --text; a UserError when it has no such split."""
    if options.data is None:
        return None
    file = Path(options.data) / "manifest.json"
    if not file.is_file():
        raise UserError(f"--data: {options.data} has no manifest.json; make the folder with recipes/prepare.py")
    manifest = json.loads(file.read_text(encoding="utf-8"))
    if manifest["splits"].get(options.split, {"blocks": 0})["blocks"] == 0:
        raise UserError(
            f"--split {options.split}: {options.data} has no {options.split} rows; prepare it again with "
            f"--{options.split} SHARE, and train on what that leaves"
        )
    return manifest


def prepared_rows(options: Options) -> list:
    """The rows of --data's --split as train.py reads them, [length] tokens each."""
    from datasets import load_from_disk

    rows = load_from_disk(str(Path(options.data) / options.split)).with_format("numpy")
    return enough(list(rows["input_ids"][:]), options.max_tokens)


def text_rows(options: Options, tokenizer, length: int) -> list:
    """Rows of up to `length` tokens from the documents of --text or --data: joined and cut, or one per document."""
    import numpy as np

    from hf_infini.corpora import iterate_documents
    from hf_infini.tokenization import encode_texts

    file = options.text or str(Path(options.data) / f"{options.split}_documents.jsonl")
    if options.data is not None and Path(file).stat().st_size == 0:
        raise UserError(f"{options.data} was split by block and holds no documents: give the source with --text")
    kind = "jsonl" if options.data is not None else "auto"
    texts = [document.text for document in iterate_documents(file, kind, text_field=options.text_field)]
    texts = [text for text in texts if len(text) >= options.min_characters]
    end = np.array([tokenizer.eos_token_id])
    documents = [np.concatenate([tokens, end]) for tokens in encode_texts(tokenizer, texts)]
    if options.join and documents:
        stream = np.concatenate(documents)
        rows = [stream[start : start + length] for start in range(0, len(stream), length)]
    else:
        rows = [tokens[:length] for tokens in documents]
    rows = [row for row in rows if len(row) >= 2]  # one token alone predicts nothing
    if not rows:
        raise UserError(f"{file} has no document of at least --min_characters {options.min_characters}")
    return enough(rows, options.max_tokens)


def enough(rows: list, max_tokens: int | None) -> list:
    """The first rows, up to the one with which `max_tokens` are reached; all of them for None."""
    if max_tokens is not None:
        total = 0
        for number, row in enumerate(rows, start=1):
            total += len(row)
            if total >= max_tokens:
                return rows[:number]
    return rows


if __name__ == "__main__":
    main()
