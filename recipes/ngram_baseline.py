"""What the last few tokens alone predict: entropies of the training rows, and smoothed n-grams on a held-out split.

    python recipes/ngram_baseline.py --data data/shakespeare --out runs/ngrams.json
    python recipes/ngram_baseline.py --data data/shakespeare --split test --orders 0 1 2 3 --out runs/ngrams_test.json

Order k predicts a token from the k tokens before it: 0 from none (unigram), 1 from the last (bigram), 2 from the last two
(trigram). A model without attention sees one token, as the bigram does. `entropy` is that of the training rows' counts:
from k tokens alone nothing predicts these rows better. `cross_entropy` is of the tokens that train.py and
evaluate_model.py count in the same rows (special tokens are not), and stands beside their number; its smoothing
(recipes/evaluation/ngrams.py gives formula and sources) is chosen on the training rows. Prints a table and writes --out.
"""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cli import UserError, exit_on_error, option, parse_options

HIGHEST = 5  # beyond that a window is mostly seen once, and its code may not fit into an integer


@dataclass
class Options:
    data: str = field(metadata={"help": "Folder made by recipes/prepare.py.", "group": "data"})
    out: str = field(metadata={"help": "The .json file to write.", "group": "output"})
    split: Literal["validation", "test"] = option("validation", "The held-out rows to predict.", group="data")
    orders: list[int] = option([0, 1, 2], "Earlier tokens to predict from.", at_least=0, at_most=HIGHEST, group="n-grams")


@exit_on_error(when_stopped="nothing was written; the same command starts again")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    if not options.out.endswith(".json"):
        raise UserError(f"--out {options.out}: give a file that ends in .json")

    from tqdm import tqdm

    from corpora.blocks import read_rows
    from evaluation import ngrams
    from hf_infini.tools import metrics
    from support import measurement
    from support.markdown import markdown_table
    from support.prepared import read_tokenizer
    from support.stages import check_place, read_manifest, write_json
    from training import setup

    started, data, out = time.perf_counter(), Path(options.data), Path(options.out)
    manifest = read_manifest(data, options.split)
    check_place(out, {"orders": list, "training_tokens": int})
    vocabulary = manifest["tokenizer"]["vocabulary"]
    train, held_out = (read_rows(data / split) for split in ("train", options.split))
    try:
        orders = tqdm(range(max(options.orders) + 1), desc="counting", unit="order")
        tables = [ngrams.NgramCounts(train, order, vocabulary) for order in orders]
        entropies = {order: ngrams.conditional_entropy(tables[order]) for order in sorted(set(options.orders))}
    except ValueError as error:
        raise UserError(f"--orders {' '.join(map(str, options.orders))}: {error}") from error
    alphas = ngrams.choose_alphas(tables)
    special_ids = read_tokenizer(data).all_special_ids
    rows = []
    for order, entropy in tqdm(entropies.items(), desc="predicting", unit="order"):
        loss, tokens = ngrams.held_out_loss(tables[: order + 1], alphas, held_out, special_ids)
        row = {"order": order, "name": ngrams.name_of(order), "entropy": entropy, **metrics.summarize([loss], [tokens])}
        rows.append({**row, "alpha": alphas[order], "different_windows": len(tables[order].codes)})
    result = {
        "orders": rows,
        "source": options.data,
        "split": options.split,
        "training_tokens": int(train.size),
        "vocabulary": vocabulary,
        "seconds": round(time.perf_counter() - started, 2),
        "data_fingerprint": setup.data_fingerprint(manifest),
        "options": vars(options),
        **measurement.peak_memory(),
        **measurement.environment(),
    }
    write_json(out, result)
    columns = {"order": "", "entropy": ".4f", "cross_entropy": ".4f", "perplexity": ".2f", "tokens": ",", "alpha": ".4g"}
    print(markdown_table(list(columns), [[format(row[name], how) for name, how in columns.items()] for row in rows], left=0))
    print(f"{out}: {options.split} rows of {options.data}, nats per token", file=sys.stderr)


if __name__ == "__main__":
    main()
