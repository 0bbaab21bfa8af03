r"""What a model predicts and recalls: perplexity, a number hidden in a text, facts of invented
people, at any length.

    python recipes/evaluate_model.py --model runs/infini --data data/quickstart
    python recipes/evaluate_model.py --model runs/infini --data data/quickstart --length 32768
    python recipes/evaluate_model.py --model runs/mha --data data/shakespeare --split test
    python recipes/evaluate_model.py --model runs/infini --text plays.txt --length 8192 \
        --out runs/infini/plays
    python recipes/evaluate_model.py --model model_cards/recall --task passkey \
        --lengths 1024 131072 --out runs/passkey
    python recipes/evaluate_model.py --model runs/recall --task passkey --data data/carolina \
        --lengths 1024 8192
    python recipes/evaluate_model.py --model runs/recall --task facts --distances 0 1 4 16 64 \
        --memory off
    python recipes/evaluate_model.py --model runs/recall --task facts --data data/carolina

perplexity: overall and by position in the context. Without --length, --data is evaluated on its
validation rows as they are, which is the number in train.py's result.json. --split test reads the
test rows instead, for the one model that the validation rows chose. With --length, texts are read
in rows of that length.

passkey: five digits are hidden in a text (the documents of --data or --text; without them,
generated biographies) and asked for at its end, for every length and depth. facts: a generated
biography states a fact and asks for it --distances segments later; between them are invented
paragraphs, full of other people and years, or with --data or --text lines of these documents. Both
count the answers that greedy decoding gives exactly, with 95 % intervals. A started task that was
killed goes on where it was.

Everything is read in chunks through the model's cache: a model with Infini-attention whose
`position_encoding` is rope or segment takes any length in constant memory; one with learned
positions stops at its `n_positions`. --memory off leaves it only its local attention.

Writes OUT.json, and the same as a table on standard output.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cli import UserError, exit_on_error, option, parse_options
from cli.evaluation_options import EvaluationOptions
from cli.names import home_of


@dataclass(kw_only=True)
class Options(EvaluationOptions):
    memory: Literal["on", "off"] = option(
        "on", "off: the same model with its memory switched off.", group="model"
    )
    length: int | None = option(
        None,
        "Tokens per row; default: the rows of --data, or the context.",
        at_least=2,
        group="data",
    )
    separate_documents: bool = option(False, "Keep documents of a row apart, as train.py.")
    max_tokens: int | None = option(
        None, "Stop after the row that reaches this number of tokens.", at_least=1
    )
    lengths: list[int] = option(
        [1024, 2048, 4096, 8192],
        "passkey: lengths of the examples in tokens.",
        at_least=2,
        group="passkeys and facts",
    )
    distances: list[int] = option(
        [0, 1, 2, 4, 8, 16, 32, 64], "facts: segments from a fact to its question.", at_least=0
    )
    segment_length: int | None = option(
        None, "facts: tokens per segment; default: the model's own.", rare=True, at_least=1
    )
    samples: int = option(48, "passkey, facts: examples per cell.", at_least=1)
    chunk: int = option(
        1024, "Tokens per call, in longer rows.", at_least=1, group="machine", rare=True
    )
    out: str | None = option(
        None,
        "File to write, without .json; default: in the folder of the adapter or model, evaluation "
        "or the task, with _text (facts among lines of text), _test and _memory_off appended.",
        group="output",
    )


# Options that only some tasks use
TASKS = dict.fromkeys(("length", "separate_documents", "max_tokens"), ("perplexity",))
TASKS |= dict.fromkeys(("lengths", "depths", "language"), ("passkey",))
TASKS |= dict.fromkeys(("distances", "segment_length"), ("facts",))
TASKS |= dict.fromkeys(("samples", "seed"), ("passkey", "facts"))


@exit_on_error(
    when_stopped="finished cells of a recall task are kept; the same command goes on from them"
)
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    manifest = check_options(options)

    from evaluation import inference
    from support import measurement
    from support.stages import check_place, sealed, write_json
    from training import setup

    model, tokenizer = inference.load_model(
        options.model, options.device, options.adapter, options.precision
    )
    if options.memory == "off":
        inference.switch_memory_off(model)
    # A name for each kind of result, so that none overwrites another
    plain = options.task == "perplexity" and options.memory == "on"
    parts = ["evaluation" if plain else options.task]
    parts += ["text"] if options.task == "facts" and options.source else []
    parts += ["test"] if options.split == "test" else []
    parts += ["memory_off"] if options.memory == "off" else []
    home = home_of(options)
    name = options.out or str(home / "_".join(parts))
    check_place(Path(f"{name}.json"), {"options": dict, "model": str, "memory": str})
    task = {"perplexity": perplexity, "passkey": passkey, "facts": facts}[options.task]
    result = task(options, model, tokenizer, name)
    result |= {key: getattr(options, key) for key in ("model", "adapter", "memory", "source")}
    result["split"] = options.split if manifest else None
    result["data_fingerprint"] = setup.data_fingerprint(manifest) if manifest else None
    result |= {**measurement.peak_memory(), "options": vars(options), **measurement.environment()}
    write_json(Path(f"{name}.json"), sealed(result))
    Path(f"{name}.cells.json").unlink(missing_ok=True)
    print(f"{name}.json", file=sys.stderr)


def perplexity(options: Options, model, tokenizer, name: str) -> dict:
    from evaluation.inference import check_length
    from evaluation.perplexity import measure_perplexity, positions_table, prepared_rows, text_rows
    from evaluation.texts import read_texts
    from support.prepared import read_tokenizer
    from support.rows import RowReader

    if options.data is not None and options.length is None:
        if read_tokenizer(Path(options.data)).get_vocab() != tokenizer.get_vocab():
            raise UserError(
                f"--data {options.data} was made with another tokenizer than that of --model "
                f"{options.model}: prepare it with --tokenizer and the model's folder, or give "
                "--length to read its documents"
            )
        rows = prepared_rows(Path(options.data), options.split, options.max_tokens)
    else:
        length = options.length or model.config.max_position_embeddings
        check_length(model.config, length)
        rows = text_rows(tokenizer, read_texts(options), length, options.max_tokens)
    length = options.length or max(len(tokens) for tokens, _ in rows)
    check_length(model.config, length)
    complete = sum(len(tokens) == length for tokens, _ in rows)
    print(f"{len(rows):,} rows, {complete:,} of them of {length:,} tokens", file=sys.stderr)
    # Special tokens do not count, as in train.py's own evaluations
    reader = RowReader(
        tokenizer.all_special_ids, tokenizer.eos_token_id if options.separate_documents else None
    )
    found = measure_perplexity(model, rows, reader, options.chunk, options.batch_size)
    print(positions_table(found))
    return {**found, "rows": len(rows), "complete_rows": complete, "length": length}


def passkey(options: Options, model, tokenizer, name: str) -> dict:
    from evaluation.texts import generated_texts, read_texts
    from recall.tasks import depths_of, passkey_table, run_passkey

    texts = read_texts(options) if options.source else generated_texts()
    found = run_passkey(
        runner(options, model, tokenizer, name), texts, options.lengths, depths_of(options.depths)
    )
    print(passkey_table(found["cells"]))
    return found


def facts(options: Options, model, tokenizer, name: str) -> dict:
    from evaluation.texts import read_texts
    from recall.tasks import facts_table, run_facts

    length = options.segment_length or getattr(model.config, "segment_length", None)
    if length is None:
        raise UserError(
            "--segment_length is needed: this model has no segments of its own to count distances "
            "in"
        )
    texts = read_texts(options) if options.source else None
    found = run_facts(runner(options, model, tokenizer, name), options.distances, length, texts)
    print(facts_table(found["cells"]))
    return found


def runner(options: Options, model, tokenizer, name: str):
    """What all cells of a recall task share. Cells in NAME.cells.json are reused if model, text and
    options are the same."""
    from evaluation.texts import source_file
    from recall.tasks import Runner
    from support.stages import state_of_files

    folders = [Path(folder) for folder in (options.model, options.adapter) if folder]
    files = [
        file
        for folder in folders
        for pattern in ("config.json", "*.safetensors")
        for file in sorted(folder.glob(pattern))
    ]
    files += [source_file(options)] if options.source else []
    identity = {**vars(options), "dtype": str(model.dtype)}
    del identity["out"]
    identity["files"] = [state_of_files(str(file)) for file in files]
    return Runner(model, tokenizer, options, Path(f"{name}.cells.json"), identity)


def check_options(options: Options) -> dict | None:
    """The manifest of --data, where it is given; UserError for options that cannot work or that the
    task does not use."""
    from support.stages import read_manifest

    defaults = Options(model="")
    given = {name for name in vars(options) if getattr(options, name) != getattr(defaults, name)}
    for name, tasks in TASKS.items():
        if name in given and options.task not in tasks:
            raise UserError(
                f"--{name} does nothing with --task {options.task}: it belongs to "
                f"{' and '.join(tasks)}"
            )
    for name in ("lengths", "distances"):
        values = getattr(options, name)
        if len(set(values)) < len(values):
            raise UserError(f"--{name} {' '.join(map(str, values))}: give different numbers")
    one, depths = len(options.depths) == 1, options.depths
    if not all(0 <= depth <= 1 or (one and depth >= 2 and depth % 1 == 0) for depth in depths):
        raise UserError(
            f"--depths {' '.join(map(str, depths))}: give shares from 0 to 1, or one number of "
            "depths from 2 on"
        )
    if options.source is None and options.task != "perplexity":
        for name in ("split", "min_characters"):
            if name in given:
                raise UserError(
                    f"--{name} chooses among the texts of --data or --text: give one of them, or "
                    "leave it out"
                )
        return None
    if (options.data is None) == (options.text is None):
        how = "exactly" if options.task == "perplexity" else "at most"
        raise UserError(f"give {how} one of --data and --text")
    if options.text is None:
        return read_manifest(Path(options.data), options.split)
    if options.split != "validation":
        raise UserError(
            f"--split {options.split} chooses among the rows of --data, and --text has none: leave "
            "it out"
        )
    if not Path(options.text).is_file():
        raise UserError(f"--text: there is no file {options.text}")
    return None


if __name__ == "__main__":
    main()
