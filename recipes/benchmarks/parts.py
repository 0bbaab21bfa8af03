"""The parts of recipes/benchmark.py: which cells each measures, its tables and its plot.

`options` are those of the recipe, by the names of its flags. Each function measures what the JSON file does not hold yet,
draws the plot, and returns the tables.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from cli import UserError
from plots.benchmark import plot_attention, plot_compiled, plot_decoding, plot_models, plot_options, plot_scaling

from . import layer, machine, report, whole_models
from .contestants import CONTESTANTS
from .layer import How
from .models import KINDS, ModelSpec
from .store import Results
from .timing import give_back_memory
from .work import Shape

RULES = ("infini", "infini-delta")  # what is measured where this package is measured against itself
Cell = tuple[dict, Callable[[How], list[dict]]]


def check_contestants(names: list[str] | None) -> None:
    """A UserError for names that no contestant has."""
    unknown = sorted(set(names or []) - set(CONTESTANTS))
    if unknown:
        raise UserError(f"--contestants: there is no {', '.join(unknown)}; allowed are {', '.join(CONTESTANTS)}")


def measured(results: Results, how: How, part: str, cells: list[Cell]) -> list[dict]:
    """The rows of all cells of a part: what describes a cell, and the function that measures it."""
    from tqdm import tqdm

    rows = []
    with tqdm(cells, desc=part) as bar:
        told = replace(how, say=lambda text: bar.set_postfix_str(str(text)))
        for cell, measure in bar:
            described = {"rounds": how.rounds, "seed": how.seed, "limits": [how.once_above, how.skip_above], **cell}
            rows += results.rows(part, described, partial(measure, told))
            give_back_memory()
    return rows


def machine_rows(results: Results, how: How, size: int | None) -> list[dict]:
    """Rows of [`machine.measure`]."""
    measure = [({"size": size}, lambda how: machine.measure(how.device, size, how.rounds, how.seed))]
    return measured(results, how, "machine", measure)


def attention(
    results: Results, how: How, options, shapes: list[tuple[int, int]], peaks: dict[str, float], picture: Path
) -> str:
    """Contestants on every shape (tokens, segment length) and dtype; `peaks` are [`machine.peaks`]."""
    names = options.contestants or list(CONTESTANTS)
    cells = [
        ({"contestants": names, **vars(shape)}, partial(layer.attention_rows, shape=shape, names=names))
        for dtype in options.dtypes
        for shape in (_shape(options, tokens, segment, dtype) for tokens, segment in shapes)
    ]
    rows = measured(results, how, "attention", cells)
    plot_attention(rows, picture)
    return report.attention_tables(rows, peaks)


def scaling(results: Results, how: How, options, picture: Path) -> str:
    """Both rules over the length, and their memory over the segment length."""
    cells, memory_cells = [], []
    for dtype in options.dtypes:
        for rule in RULES:
            shapes = [_shape(options, tokens, options.scaling_segment, dtype) for tokens in options.scaling_tokens]
            cell = {"contestant": rule, **vars(shapes[0]), "tokens": options.scaling_tokens}
            cells.append((cell, partial(layer.scaling_rows, shapes=shapes, name=rule)))
            for segment in options.memory_segments:
                shape = _shape(options, options.memory_tokens, segment, dtype)
                memory_cells.append(
                    ({"contestant": rule, **vars(shape)}, partial(layer.memory_rows, shape=shape, name=rule))
                )
    rows = measured(results, how, "scaling", cells)
    memory_rows = measured(results, how, "segment_memory", memory_cells)
    plot_scaling(rows, memory_rows, picture)
    return f"{report.scaling_table(rows)}\n\n{report.memory_table(memory_rows)}"


def model(results: Results, how: How, options, picture: Path) -> str:
    """Training steps, prompts and padded batches of both models."""
    spec = _model_spec(options, how)
    prompts = [
        {"kind": kind, "context": tokens, "chunk": options.chunk, "dtype": options.dtype}
        for kind in KINDS
        for tokens in options.prompts
        if kind != "gpt2" or tokens <= options.stock_prompt_limit
    ]
    batch = {"batch": options.padded_batch, "context": options.padded_context}
    batch |= {"steps": options.steps, "dtype": options.dtype}
    training_rows = measured(results, how, "training", _cells(whole_models.training_rows, spec, _steps(options)))
    prefill_rows = measured(results, how, "prefill", _cells(whole_models.prefill_rows, spec, prompts))
    batch_rows = measured(results, how, "padded_batch", _cells(whole_models.batch_rows, spec, [batch]))
    plot_models(training_rows, prefill_rows, picture)
    tables = (report.training_table(training_rows), report.prefill_table(prefill_rows), report.batch_table(batch_rows))
    return "\n\n".join(tables)


def options(results: Results, how: How, options, picture: Path) -> str:
    """Training steps with one option of the memory changed."""
    changes = list(whole_models.CHANGES)  # a list that has grown since is measured anew
    cells = _cells(whole_models.option_rows, _model_spec(options, how), _steps(options))
    rows = measured(results, how, "options", [({**cell, "changes": changes}, measure) for cell, measure in cells])
    plot_options(rows, picture)
    return report.options_table(rows)


def compiled(results: Results, how: How, options, picture: Path) -> str:
    """Training steps and new tokens of the model with Infini-attention, as it is and compiled."""
    spec, same = _model_spec(options, how), {"steps": options.steps, "dtype": options.dtype}
    contexts = [{"context": context, **same} for context in options.training_contexts]
    cells = _cells(whole_models.compiled_training_rows, spec, _steps(options))
    cells += _cells(whole_models.compiled_decoding_rows, spec, contexts)
    rows = measured(results, how, "compiled", cells)
    plot_compiled(rows, picture)
    return report.compiled_table(rows)


def decoding(results: Results, how: How, options, picture: Path) -> str:
    """New tokens after every context."""
    same = {name: getattr(options, name) for name in ("chunk", "steps", "stock_limit", "dtype")}
    contexts = [{"context": context, **same} for context in options.contexts]
    rows = measured(results, how, "decoding", _cells(whole_models.decoding_rows, _model_spec(options, how), contexts))
    plot_decoding(rows, picture)
    return report.decoding_table(rows)


def _cells(measure: Callable, spec: ModelSpec, settings: list[dict]) -> list[Cell]:
    """A cell for each of the `settings`, which are arguments of `measure`."""
    return [({**setting, **vars(spec)}, partial(measure, spec=spec, **setting)) for setting in settings]


def _steps(options) -> list[dict]:
    """The training steps that the options ask for."""
    return [
        {"context": context, "rows": options.training_rows, "precision": precision}
        for precision in options.precisions
        for context in options.training_contexts
    ]


def _shape(options, tokens: int, segment: int, dtype: str) -> Shape:
    return Shape(tokens, segment, options.heads, options.head_dim, options.batch, dtype)


def _model_spec(options, how: How) -> ModelSpec:
    names = ("n_layer", "n_embd", "n_head", "vocab_size", "segment_length", "local_segments", "update_rule")
    return ModelSpec(**{name: getattr(options, name) for name in names}, device=how.device, seed=how.seed)
