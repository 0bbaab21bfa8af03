"""Contestants of recipes/compare_caches.py: one model with caches of equal size, what each predicts
and recalls."""

import contextlib
import copy
import functools
from collections.abc import Iterator

import torch

from cli import UserError
from hf_infini import cache_bytes, patch_model, unpatch_model
from hf_infini.layers.memory_layer import memory_layers
from hf_infini.models.adapter import read_adapter, read_record, restore_adapter
from hf_infini.models.loading import with_finite_weights
from hf_infini.models.structure import decoder_of
from hf_infini.ops.keeping import SCORES
from hf_infini.options import KEEP_SCORES, key_heads, recalling_window
from recall import ruler, tasks
from support.markdown import markdown_table
from support.rows import RowReader

from .bootstrap import difference_interval, mean_interval
from .inference import check_length, gates_closed
from .perplexity import losses_of, text_rows
from .texts import generated_texts

RECALL = "recall"
# of the others the model stays as it is
BOUNDED = ("window", "random", *KEEP_SCORES, RECALL)
LEARNED = [name for name, score in SCORES.items() if score.learns]  # by an adapter
SINKS, WINDOW, SEGMENTS, LONGEST_SEGMENT = 4, 256, 2, 128


def memory_options(way: str, cache: int, window: int = WINDOW, segments: int = SEGMENTS) -> dict:
    """Options of [`hf_infini.patch_model`] with which each key/value head holds `cache` tokens.

    A window moves by whole segments, and with shorter ones a query sees more of it. That beside
    kept tokens has so many `segments`, and `window` tokens, at most half of the cache; beside those
    that are recalled, see [`recalling_window`]. That of the way "window", which has nothing else,
    has segments of at most [`LONGEST_SEGMENT`].
    """
    options, room = {"sink_tokens": SINKS, "update_rule": "none"}, cache - SINKS
    if way == "window":
        return options | window_of(room, SINKS + 1, LONGEST_SEGMENT)
    score = {"random": "learned", RECALL: "recent"}.get(way, way)
    length = min(window, cache // 2) // segments
    if score == "recent":
        length, segments = recalling_window(cache, window, segments)
    options |= {"segment_length": length, "local_segments": segments - 1, "keep_score": score}
    return options | {"kept_tokens": room - segments * length}


def window_of(tokens: int, shortest: int, longest: int) -> dict:
    """Segments of a window of as many tokens as fit, at most `tokens`: of those that fill it best
    the longest."""
    longest = min(longest, tokens)
    lengths = range(max(shortest, longest // 2), longest + 1)
    length = min(lengths, key=lambda size: (tokens % size, -size))
    return {"segment_length": length, "local_segments": tokens // length - 1}


@contextlib.contextmanager
def bounded(
    model, adapter: str | None, way: str, cache: int | None, window=WINDOW, segments=SEGMENTS
) -> Iterator[None]:
    """Within it, a plain model has the cache of a way; in the end it is the plain model again.

    Raises UserError where the model cannot have it, or the adapter's scores are of another model.
    """
    if way not in BOUNDED:
        yield
        return
    options = memory_options(way, cache, window, segments)
    try:
        if way != "window" and adapter is not None:
            record = read_record(adapter)
            has = decoder_of(model).config.num_hidden_layers
            if (layers := record["model"]["layers"]) != has:
                raise UserError(
                    f"--adapter {adapter} is of another model, with {layers} layers; --model has "
                    f"{has}"
                )
            options["kept_shares"] = record["options"].get("kept_shares")
        patch_model(model, **options)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{way}, --caches {cache} --window {window} --segments {segments}: {error}"
        ) from error
    draw = torch.Generator().manual_seed(0)

    def drawn(inputs: torch.Tensor, heads: int) -> torch.Tensor:
        shape = inputs.shape[0], heads, inputs.shape[1], 1
        return torch.rand(shape, generator=draw).to(inputs.device)

    try:
        if way in LEARNED:
            try:
                found = read_adapter(adapter)
                of_score = {
                    name: tensor
                    for name, tensor in found.tensors.items()
                    if name.partition(".")[2] in SCORES[way].learns
                }  # its memory, if it has one, is not compared
                restore_adapter(model, found._replace(tensors=of_score))
            except (OSError, ValueError) as error:
                raise UserError(f"{way}, --caches {cache}: {error}") from error
            with_finite_weights(model, f"--adapter {adapter}")  # damage ends the comparison
        if way == "random":
            for layer in memory_layers(model).values():
                layer.learned_score = functools.partial(drawn, heads=len(layer.keep_weight))
        yield
    finally:
        for layer in memory_layers(model).values():
            vars(layer).pop("learned_score", None)
        unpatch_model(model)


# --- the parts of a model with a memory -----------------------------------------------------------

WHOLE, NO_MEMORY, NO_KEPT = "as it is", "memory off", "no kept tokens"
ONLY_WINDOW, LONGER_WINDOW = "window only", "window of equal bytes"


def parts_of(config) -> list[dict]:
    """`way` and `cache` (`None`) of each contestant that a model with such a configuration has;
    UserError where it has no memory."""
    config = config.get_text_config(decoder=True)
    if not getattr(config, "infini_layers", ()):
        raise UserError("--attribute: --model has no memory; give one that has, or an --adapter")
    kept = [NO_KEPT, ONLY_WINDOW] if config.kept_tokens else []
    return [{"way": way, "cache": None} for way in (WHOLE, NO_MEMORY, *kept, LONGER_WINDOW)]


@contextlib.contextmanager
def with_part(model, way: str, cache: None) -> Iterator[None]:
    """Within it, a model with a memory has only this part of it."""
    config, changes = decoder_of(model).config, {}
    if way in (NO_KEPT, ONLY_WINDOW, LONGER_WINDOW):
        changes = {"kept_tokens": 0, "keep_score": "attention"}
    if way == LONGER_WINDOW:
        changes |= window_of_equal_bytes(config)
    before = {name: getattr(config, name) for name in changes}
    with contextlib.ExitStack() as stack:
        if way in (NO_MEMORY, ONLY_WINDOW, LONGER_WINDOW):
            stack.enter_context(gates_closed(model))
        for name, value in before.items():
            stack.callback(setattr, config, name, value)
            setattr(config, name, changes[name])
        yield


def window_of_equal_bytes(config) -> dict:
    """Segments of a window that takes as many bytes as all that a configuration's layers hold of a
    sequence, with keys and values of 16 bits."""
    config = copy.deepcopy(config)
    config.dtype = torch.bfloat16
    heads, *widths = key_heads(config)
    of_token = len(config.infini_layers) * heads * sum(widths) * config.dtype.itemsize
    room = cache_bytes(config) // of_token - config.sink_tokens
    return window_of(room, config.sink_tokens + 1, config.segment_length)


# --- what is measured -----------------------------------------------------------------------------


def nats(runner: tasks.Runner, texts: list[str]) -> dict:
    """Of each row the summed losses (nats) and counted tokens, `by_position` (from 2^k on) and
    `beyond` --count_from."""
    options, length = runner.options, runner.options.length
    check_length(runner.model.config, length)
    rows = text_rows(runner.tokenizer, texts, length)
    rows = [row for row in rows if len(row[0]) == length]
    if not rows:
        what = f"the texts have no row of --length {length:,} tokens"
        raise UserError(f"{what}: give more text, or a shorter length")
    # rows from everywhere in the texts
    rows = rows[:: max(1, len(rows) // options.rows)][: options.rows]
    losses = torch.zeros(len(rows), length, dtype=torch.double)
    measured = losses_of(runner.model, rows, RowReader(()), options.chunk, options.batch_size)
    for batch, first, found, _ in measured:
        losses[batch, first : first + found.shape[1]] = found.double().cpu()
    begins = [2**power for power in range((length - 1).bit_length())]
    parts = {str(begin): losses[:, begin : 2 * begin] for begin in begins}
    beyond = losses[:, options.count_from :]
    return {
        "by_position": {begin: part.sum(1).tolist() for begin, part in parts.items()},
        "counts": {begin: part.shape[1] for begin, part in parts.items()},
        "beyond": beyond.sum(1).tolist(),
        "beyond_count": beyond.shape[1],
    }


def found_numbers(runner: tasks.Runner, texts: list[str] | None) -> dict:
    """The cells of [`tasks.run_passkey`]."""
    lengths, depths = runner.options.lengths, tasks.depths_of(runner.options.depths)
    return tasks.run_passkey(runner, texts or generated_texts(), lengths, depths, pooled=True)


def recalled_facts(runner: tasks.Runner, texts: list[str] | None) -> dict:
    """The cells of [`tasks.run_facts`]."""
    return tasks.run_facts(runner, runner.options.distances, runner.options.segment_length, texts)


def answered(runner: tasks.Runner, texts: None) -> dict:
    """The cells of [`ruler.run_ruler`]."""
    return ruler.run_ruler(runner, runner.options.task, runner.options.lengths)


MEASURES = {"perplexity": nats, "passkey": found_numbers, "facts": recalled_facts}
MEASURES |= dict.fromkeys(ruler.TASKS, answered)

# --- tables ---------------------------------------------------------------------------------------


def summarize_nats(contestants: list[dict]) -> list[dict]:
    """Of each contestant `mean`, `above` the first (paired) and `closed`, the share of the gap
    between the smallest window and the plain model that it closes (`None` without these two), as
    [`bootstrap.Interval`]s but for the last."""
    columns = [
        (each["beyond"], [each["beyond_count"]] * len(each["beyond"])) for each in contestants
    ]
    means = [mean_interval(*column) for column in columns]
    found = [
        (each["way"], each["cache"], mean.value)
        for each, mean in zip(contestants, means, strict=True)
    ]
    windows = [(cache, value) for way, cache, value in found if way == "window"]
    plain = [value for way, _, value in found if way == "plain"]
    summaries = []
    for column, mean in zip(columns, means, strict=True):
        closed = None
        if plain and windows:
            widest = min(windows)[1]
            closed = (widest - mean.value) / (widest - plain[0])
        above = difference_interval(*column, *columns[0])
        summaries.append({"mean": mean, "above": above, "closed": closed})
    return summaries


def name_of(contestant: dict) -> str:
    way, cache = contestant["way"], contestant["cache"]
    return way if cache is None else f"{way}, {cache:,}"


def nats_table(contestants: list[dict]) -> str:
    """Nats beyond --count_from, and by position."""
    first, rows, summaries = contestants[0], [], summarize_nats(contestants)
    gap = [] if summaries[0]["closed"] is None else ["gap closed"]
    begins = [begin for begin in first["by_position"] if int(begin) >= 256]
    for each, found in zip(contestants, summaries, strict=True):
        mean, above = found["mean"], found["above"]
        row = [name_of(each), f"{mean.value:.3f} ({mean.low:.3f} to {mean.high:.3f})"]
        row += [f"{above.value:+.3f} ({above.low:+.3f} to {above.high:+.3f})"]
        row += [f"{found['closed']:.0%}" for _ in gap]
        for begin in begins:
            tokens = len(each["beyond"]) * each["counts"][begin]
            row.append(f"{sum(each['by_position'][begin]) / tokens:.3f}")
        rows.append(row)
    header = [_first_column(first), "nats", f"above {name_of(first)}", *gap]
    header += [f"from {int(begin):,}" for begin in begins]
    return markdown_table(header, rows, left=1)


def shares_table(contestants: list[dict]) -> str:
    """Right answers by length (all depths together) or distance, with 95 % intervals."""
    rows = [
        [name_of(each), *(_share(cell) for cell in pooled(each["cells"]))] for each in contestants
    ]
    places = [f"{cell['place']:,}" for cell in pooled(contestants[0]["cells"])]
    return markdown_table([_first_column(contestants[0]), *places], rows, left=1)


def _first_column(contestant: dict) -> str:
    return "the model" if contestant["way"] == WHOLE else "tokens in the cache"


def pooled(cells: list[dict]) -> list[dict]:
    """`place` (a length or a distance), `correct`, `samples`, `low` and `high` over all depths; the
    last four are `None` where nothing could be measured."""
    places: dict[int, list[dict]] = {}
    for cell in cells:
        places.setdefault(cell["length"] if "length" in cell else cell["distance"], []).append(cell)
    found = []
    for place, own in places.items():
        correct, samples = (
            sum(cell.get(name, 0) for cell in own) for name in ("correct", "samples")
        )
        low, high = tasks.wilson_interval(correct, samples) if samples else (None, None)
        counts = {"correct": correct, "samples": samples or None, "low": low, "high": high}
        found.append({"place": place, **counts})
    return found


def _share(cell: dict) -> str:
    if cell["samples"] is None:
        return "not possible"
    return f"{cell['correct']:.3g} of {cell['samples']} ({cell['low']:.0%} to {cell['high']:.0%})"
