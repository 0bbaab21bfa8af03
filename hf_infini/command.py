"""A model that you have, with a memory of constant size, and documents to ask.

Answers and texts go to standard output, everything else to standard error.
"""

import functools
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from huggingface_hub.constants import HF_HOME
from transformers import TextStreamer

from .cache.cache import InfiniCache
from .models.loading import load_config
from .options import context_limit
from .tools import cache_folder
from .tools.arguments import (
    Adapter,
    Archived,
    ArchivedInt8,
    Device,
    Documents,
    Dtype,
    EightBits,
    FourBits,
    KeptTokens,
    Model,
    NewTokens,
    OwnTemperature,
    Penalty,
    Temperature,
    archive_of,
    bits_of,
)
from .tools.documents import files_in, read_document, read_documents
from .tools.estimate import estimate as estimate_cache
from .tools.estimate import weight_bytes
from .tools.inspection import inspect_attention
from .tools.inspection.page import farthest, inspection_page
from .tools.one_line import TRACEBACK, run, say, while_
from .tools.outputs import check_output, replacing
from .tools.passages import SOURCES
from .tools.reader import Reader
from .tools.ready import (
    KEPT_TOKENS,
    WINDOW,
    adapted,
    fit_score,
    has_memory,
    load_ready,
    load_saved,
    what_helps,
)
from .tools.serving import options as serving
from .tools.terminal import Asked, chat, read_through, say_what_was_read, typed, words_of

# memory files by the content of a text, and fitted scores by the model
KEPT = Path(HF_HOME) / "hf_infini"
LENGTHS = [8_192, 131_072, 1_048_576]  # of texts, in `estimate`
# of `inspect`: tokens of a model without a memory; and heads · tokens² of a page of some megabytes
INSPECTED, PAGE_WEIGHTS = 200, 44_000_000
PAGE_LAYERS = 6  # of a page for which no layers were chosen
LARGEST_PAGE = 100_000_000  # bytes; browsers take long over more


def _drawn(temperature: float) -> dict[str, Any]:
    """How `generate` draws tokens at a temperature."""
    return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}


app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.command()
def ask(
    model: Model,
    documents: Annotated[
        list[Path],
        typer.Argument(
            help="Text, Markdown, code, HTML or PDF, or folders of them. Several are read apart, "
            "and only those that are new or have changed; with --memory, --no-archive, a memory of "
            "what leaves the window, or only short ones, as one text.",
            exists=True,
        ),
    ],
    question: Annotated[
        list[str] | None,
        typer.Option(
            "--question",
            "-q",
            help="Asked of the documents; without one, a chat begins.",
            callback=words_of,
        ),
    ] = None,
    memory: Annotated[
        Path | None,
        typer.Option(
            help="Memory file of all documents. [default: by the content of each, see `cache`]",
            dir_okay=False,
        ),
    ] = None,
    chat_template: Annotated[
        bool, typer.Option(help="The model's own template, or plain questions and answers.")
    ] = True,
    max_new_tokens: NewTokens = 300,
    temperature: OwnTemperature = None,
    repetition_penalty: Penalty = None,
    sources: Annotated[
        bool, typer.Option(help="Show the passages that each answer looked at first.")
    ] = False,
    archive: Archived = None,
    archive_int8: ArchivedInt8 = False,
    adapter: Adapter = None,
    kept_tokens: KeptTokens = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    load_in_4bit: FourBits = False,
    load_in_8bit: EightBits = False,
) -> None:
    """Reads documents once, and answers questions about them.

    What was read is kept in a memory file, and beside it in an archive, from which each question
    recalls passages: the next start reads nothing. With --no-archive, a plain model without an
    adapter gets a score of what to keep, which is fitted first, on text of the documents.
    """
    documents = files_in(documents)
    if memory is not None:
        check_output("--memory", memory, *documents)
    bits, archived = bits_of(load_in_4bit, load_in_8bit), archive_of(archive, archive_int8)
    texts = _texts_of(documents)
    apart = len(texts) > 1 and memory is None
    whole = "\n\n".join(texts)
    how = adapter, kept_tokens, device, dtype, whole, archived, memory
    net, tokenizer, archived = _load(model, *how, several=apart, bits=bits)
    if sources and not archived:
        raise ValueError(
            "--sources shows what a question recalls from an archive, and there is none: leave "
            "out --sources, or --no-archive."
        )
    tokenizer.chat_template = tokenizer.chat_template if chat_template else None
    reader = Reader(net, tokenizer, archive=archived)
    roles = ("user", "assistant", "user")
    with while_("applying the chat template of", model, "--no-chat-template asks without it."):
        reader.rendered([{"role": role, "content": "?"} for role in roles])
    if not (apart and reader.reads_apart(texts)):
        texts = {whole: ", ".join(texts.values())}
    name = cache_folder.memory_names(net, tokenizer, archived)
    files = [memory or KEPT / "memories" / name(text) for text in texts]
    known = sum(file.exists() for file in files)
    make = functools.partial(Reader, net, tokenizer, archive=archived)
    asked = Asked(make, [*texts], files, mend=memory is None)
    cache = asked.read()
    for file, names in zip(files, texts.values(), strict=True) if memory is None else ():
        cache_folder.note(file, model=model, adapter=adapter, documents=[names])
    file = files[0] if len(files) == 1 else files[0].parent
    say_what_was_read(net.config, cache)
    say(
        f"memory file: {file}"
        if len(files) == 1
        else f"{len(files)} memory files in {file}, {known} of them from before"
    )
    drawn: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if temperature is not None:
        drawn |= _drawn(temperature)
    if repetition_penalty is not None:
        drawn["repetition_penalty"] = repetition_penalty

    def answer(messages: list[dict[str, str]]) -> str:
        said = asked.chat(messages, streamer=_streamer(tokenizer), **drawn)
        names = [f"{name}: " if len(texts) > 1 else "" for name in texts.values()]
        shown = asked.reader.passages[0][:SOURCES] if sources else ()
        for number, passage in enumerate(shown, 1):
            say(f"  [{number}] {names[passage.document]}{' '.join(passage.text.split())}")
        return said

    for text in question or ():
        say(f"> {text}")
        with while_("answering", repr(text), kept=f"{file} is kept: nothing is read again"):
            answer([{"role": "user", "content": text}])
    if not question:
        chat(answer, file)


@app.command()
def read(
    model: Model,
    documents: Documents,
    out: Annotated[
        Path,
        typer.Option(
            help="Memory file to write; after a kill the same command goes on.", dir_okay=False
        ),
    ],
    archive: Archived = None,
    archive_int8: ArchivedInt8 = False,
    adapter: Adapter = None,
    kept_tokens: KeptTokens = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    load_in_4bit: FourBits = False,
    load_in_8bit: EightBits = False,
) -> None:
    """Reads documents once, and writes a memory file for `continue`, and its archive."""
    check_output("--out", out, *files_in(documents))
    bits, archived = bits_of(load_in_4bit, load_in_8bit), archive_of(archive, archive_int8)
    text = _text_of(documents)
    ready = _load(model, adapter, kept_tokens, device, dtype, text, archived, out, bits=bits)
    net, tokenizer, archived = ready
    reader = Reader(net, tokenizer, archive=archived)
    reading = functools.partial(reader.read, text, file=out, split_special_tokens=True)
    cache = read_through(reading, out)
    plain = estimate_cache(net.config, cache.get_seq_length()).plain
    say(
        f"{out}: {out.stat().st_size:,} bytes for {cache.get_seq_length():,} tokens; all keys "
        f"and values: {plain:,}"
    )


@app.command(name="continue")
def go_on(
    model: Model,
    memory: Annotated[
        Path, typer.Argument(help="Memory file of `read`.", exists=True, dir_okay=False)
    ],
    texts: Annotated[
        list[str],
        typer.Argument(
            help="What comes next; each of several goes on from the memory.", callback=words_of
        ),
    ],
    temperature: Temperature = 0,
    max_new_tokens: NewTokens = 200,
    archive: Archived = None,
    adapter: Adapter = None,
    kept_tokens: KeptTokens = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    load_in_4bit: FourBits = False,
    load_in_8bit: EightBits = False,
) -> None:
    """Goes on with a text that was read, from its memory file.

    Text and memory are tokenised apart: begin with the space or line break that belongs between
    them.
    """
    bits = bits_of(load_in_4bit, load_in_8bit)
    ready = _load(model, adapter, kept_tokens, device, dtype, None, archive, memory, bits=bits)
    net, tokenizer, _ = ready
    with while_("loading the memory file", memory, "`hf-infini read` writes it again."):
        cache = InfiniCache.from_pretrained(memory, net, archive=archive is not False)
        reader = Reader(net, tokenizer, cache=cache)
    options = _drawn(temperature) | {"max_new_tokens": max_new_tokens}
    with while_("going on from", memory, kept="the memory file is as it was"):
        if len(texts) == 1:
            reader.generate(texts[0], streamer=_streamer(tokenizer), **options)
            return
        found = reader.generate(texts, **options)
    for text, more in zip(texts, found, strict=True):
        say(f"> {text}")
        print(more)


@app.command()
def fit(
    model: Model,
    documents: Documents,
    out: Annotated[Path, typer.Option(help="Folder of the adapter to write.", file_okay=False)],
    kept_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that a head keeps on average.")
    ] = KEPT_TOKENS,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Fits on documents which tokens are worth keeping, for --adapter."""
    check_output("--out", out)
    text = _text_of(documents)
    fit_score(*load_saved(model, device, dtype), text, out, kept_tokens)
    say(f"{out}: use it with --adapter, or hf_infini.load_adapter")


@app.command()
def convert(
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder of the model to write.", file_okay=False)],
    adapter: Annotated[
        str,
        typer.Option(
            help="That `fit` or recipes/finetune_lora.py wrote: folder or name on the Hub."
        ),
    ],
    kept_tokens: KeptTokens = None,
    code: Annotated[
        bool, typer.Option(help="Also for machines without hf-infini (trust_remote_code=True).")
    ] = False,
    dtype: Dtype = "auto",
) -> None:
    """Writes model and memory as one folder. After `import hf_infini`, `from_pretrained` loads
    it."""
    check_output("--out", out, model, adapter)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out {out} has files already: remove them, or give another folder.")
    net, tokenizer, _ = _load(model, adapter, kept_tokens, "cpu", dtype)
    with while_("writing", out), replacing(out) as folder:
        net.save_pretrained(folder, save_code=code)
        tokenizer.save_pretrained(folder)
    say(f"{out}: AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it")


@app.command()
def estimate(
    model: Model,
    tokens: Annotated[
        list[int], typer.Option(min=1, help="Length of a text; give several.")
    ] = LENGTHS,
    kept_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Tokens that a head keeps on average. [default: {KEPT_TOKENS}, or the model's]",
        ),
    ] = None,
    archive_int8: ArchivedInt8 = False,
) -> None:
    """Megabytes of a cache, with all tokens and of constant size, and of an archive on the disk.
    Only the model's configuration is needed."""
    with while_("reading the configuration of", model, lambda: what_helps(model)):
        config = load_config(model)
    options: dict[str, Any] = {"archive": archive_of(True, archive_int8)}
    if not has_memory(model, config, None, kept_tokens):
        options |= WINDOW | {"kept_tokens": kept_tokens or KEPT_TOKENS}
        options["update_rule"] = "none"
    with while_("estimating", model):
        found = [estimate_cache(config, count, **options) for count in tokens]
        weights = weight_bytes(config)
    say(
        f"weights: {weights.plain / 1e6:,.1f} MB; {weights.eight_bits / 1e6:,.1f} MB in 8 bits; "
        f"{weights.four_bits / 1e6:,.1f} MB in 4 bits"
    )
    print(f"{'tokens':>12} {'all':>12} {'memory':>12} {'archive':>12}")
    for count, (plain, infini, archive) in zip(tokens, found, strict=True):
        sizes = (f"{size / 1e6:>9,.1f} MB" for size in (plain, infini, archive))
        print(f"{count:>12,} {' '.join(sizes)}")


@app.command()
def inspect(
    model: Model,
    document: Annotated[
        Path, typer.Argument(help="Text, Markdown, HTML or PDF.", exists=True, dir_okay=False)
    ],
    out: Annotated[Path, typer.Option(help="HTML page to write.", dir_okay=False)],
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of its beginning. [default: so many that some have left the window, in a "
            "page of some megabytes]",
        ),
    ] = None,
    layers: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Layer to look into, from 0; give several. [default: those with the heads that "
            f"look farthest back, {PAGE_LAYERS} at most]",
        ),
    ] = None,
    all_layers: Annotated[
        bool, typer.Option("--all-layers", help="All layers, in a page several times as large.")
    ] = False,
    adapter: Adapter = None,
    kept_tokens: KeptTokens = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Writes a page of what every head does with a text. It has the weights and, of a memory, what
    is kept."""
    check_output("--out", out, document)
    if layers and all_layers:
        raise ValueError("--all-layers has those of --layers, too: give one of the two.")
    text = _text_of([document])
    net, tokenizer = load_saved(model, device, dtype)
    if not has_memory(model, net.config, adapter, kept_tokens):
        if adapter is None and kept_tokens is not None:
            raise ValueError(
                f"{model} has no score of kept tokens: give an --adapter (`hf-infini fit` writes "
                "one), or leave --kept-tokens out to see the plain model."
            )
        net = net if adapter is None else adapted(net, adapter, kept_tokens)
    encoded = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)
    limit = context_limit(net.config)
    ids = encoded["input_ids"][:, : max_tokens or min(_inspected(net.config), limit or sys.maxsize)]
    if limit is not None and ids.shape[1] > limit:
        raise ValueError(f"{model} has {limit:,} positions: give at most so many --max-tokens.")
    seen = _places(net.config, kept=False)
    if seen is not None and ids.shape[1] <= seen:
        say(
            f"none of the {ids.shape[1]:,} tokens has left the window of {seen:,}, so nothing is "
            "kept yet: give a longer document, or more --max-tokens"
        )
    with while_("inspecting", model, "Fewer --max-tokens need less memory."):
        found = inspect_attention(net, ids, tokenizer, layers=layers)
        if all(layer.weights is None for layer in found.layers.values()):
            raise ValueError(f"{model} has no attention heads in these layers.")
        shown = found if layers or all_layers else farthest(found, PAGE_LAYERS)
        page = inspection_page(shown, title=Path(model).name)
    if len(page) > LARGEST_PAGE:
        raise ValueError(
            f"the page would have {len(page) / 1e6:,.0f} MB, more than {LARGEST_PAGE / 1e6:,.0f}: "
            "give fewer --layers or --max-tokens."
        )
    with while_("writing", out), replacing(out) as file:
        file.write_text(page, encoding="utf-8")
    if len(shown.layers) < len(found.layers):
        chosen = ", ".join(map(str, shown.layers))
        say(
            f"it has the layers whose heads look farthest back, {chosen} of {len(found.layers)}; "
            "--layers chooses others, --all-layers shows all"
        )
    say(f"{out}: open it in a browser")


@app.command()
def demo(
    model: Model,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the page, which only this machine sees.")
    ] = 7860,
    archive: Archived = None,
    archive_int8: ArchivedInt8 = False,
    adapter: Adapter = None,
    kept_tokens: KeptTokens = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    load_in_4bit: FourBits = False,
    load_in_8bit: EightBits = False,
) -> None:
    """Serves a page for the browser that reads and answers. It shows the cache, what heads keep,
    and the passages that an answer looked at."""
    from .tools.demo import STYLE, Demo

    bits, archived = bits_of(load_in_4bit, load_in_8bit), archive_of(archive, archive_int8)
    ready = _load(model, adapter, kept_tokens, device, dtype, archive=archived, bits=bits)
    net, tokenizer, archived = ready
    with while_("serving the page on", f"--port {port}", kept="the page is closed"):
        Demo(net, tokenizer, archive=archived).page().launch(server_port=port, css=STYLE)


@app.command()
def serve(
    model: Model,
    host: serving.Host = "127.0.0.1",
    port: serving.Port = 8000,
    api_key: serving.ApiKey = None,
    no_key: serving.NoKey = False,
    name: serving.Name = None,
    slots: serving.Slots = 8,
    queue: serving.Queue = 100,
    chunk: serving.Chunk = 512,
    max_tokens: serving.MaxTokens = 1024,
    max_prompt_tokens: serving.MaxPromptTokens = None,
    max_megabytes: serving.MaxMegabytes = 32,
    kept_megabytes: serving.KeptMegabytes = 2000,
    timeout: serving.Timeout = 600,
    grace: serving.Grace = 30,
    archive: Archived = None,
    archive_int8: ArchivedInt8 = False,
    adapter: Adapter = None,
    kept_tokens: KeptTokens = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    load_in_4bit: FourBits = False,
    load_in_8bit: EightBits = False,
) -> None:
    """Answers many requests at once, by an API like OpenAI's.

    Each has a cache of constant size. Documents are uploaded and read once, and asked by their id;
    what a prompt begins with is not read again. Ctrl-C lets running requests end.
    """
    from .tools.serving.server import Settings, serve

    settings = Settings(
        name=name or Path(model).name,
        folder=KEPT,
        host=host,
        port=port,
        key=api_key,
        no_key=no_key,
        slots=slots,
        queue=queue,
        chunk=chunk,
        max_tokens=max_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_megabytes=max_megabytes,
        kept_megabytes=kept_megabytes,
        timeout=timeout,
        grace=grace,
    )
    settings.key_to_ask_for()  # now, and not when the model is there
    bits, archived = bits_of(load_in_4bit, load_in_8bit), archive_of(archive, archive_int8)
    ready = _load(model, adapter, kept_tokens, device, dtype, archive=archived, bits=bits)
    net, tokenizer, archived = ready
    with while_("serving on", f"--host {host} --port {port}", kept="documents are kept"):
        serve(net, tokenizer, archived, settings, say)


@app.command(name="cache")
def cache_(
    remove: Annotated[
        list[str] | None,
        typer.Option(help="Name, or its beginning, of an entry to remove; give several; or all."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without a question.")] = False,
) -> None:
    """Lists what earlier starts have kept, the latest first: memories of texts, and fitted scores.
    Removes them with --remove."""
    with while_("reading the cache folder", KEPT):
        kept = cache_folder.entries(KEPT)
        chosen = cache_folder.chosen(kept, remove or ())
    size = sum(one.bytes for one in chosen or kept) / 1e6
    if not remove:
        print(cache_folder.listed(kept))
        say(f"{len(kept)} in {KEPT}, {size:,.1f} MB; --remove NAME or all removes them")
        return
    print(cache_folder.listed(chosen))
    asked = f"Remove these {len(chosen)}, {size:,.1f} MB? [y/N] "
    if not yes and typed(asked).strip().lower() not in ("y", "yes"):
        raise ValueError("nothing was removed: answer y, or give --yes.")
    with while_("removing from", KEPT, kept="some entries are removed; the same command goes on"):
        cache_folder.remove(chosen)
    say(f"{len(chosen)} entries removed, {size:,.1f} MB")


@app.callback()
def _main(
    traceback: Annotated[  # `run` takes it from wherever it is
        bool, typer.Option(TRACEBACK, help="Show where an error comes from; also after a command.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs the command; what ends it early is one line on standard error."""
    run(app)


def _text_of(documents: list[Path]) -> str:
    with while_("reading", ", ".join(map(str, documents)), "Is it damaged, or of another kind?"):
        return read_documents(files_in(documents))


def _texts_of(documents: list[Path]) -> dict[str, str]:
    """The different texts of files, and the names of the files that have them."""
    names: dict[str, list[str]] = {}
    for document in documents:
        with while_("reading", document, "Is it damaged, or of another kind?"):
            names.setdefault(read_document(document), []).append(str(document))
    return {text: ", ".join(each) for text, each in names.items()}


def _load(model: str, adapter, kept_tokens, device: str, dtype: str, *what, **else_):
    """[`load_ready`], with the fitted scores of the cache folder."""
    return load_ready(model, adapter, kept_tokens, device, dtype, KEPT / "scores", *what, **else_)


def _places(config, kept: bool) -> int | None:
    """Tokens that the softmax of a model with a memory sees at most, with or without the `kept`
    ones; `None` without a memory."""
    if not getattr(config, "infini_layers", None):
        return None
    return config.places - (0 if kept else config.window.kept_tokens)


def _inspected(config) -> int:
    """Tokens of a page: more than the places of a memory, while it is no larger than it may be."""
    heads = config.num_hidden_layers * config.num_attention_heads
    places = _places(config, kept=True) or 0
    return max(INSPECTED, min(places + places // 4, math.isqrt(PAGE_WEIGHTS // heads)))


def _streamer(tokenizer) -> TextStreamer:
    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
