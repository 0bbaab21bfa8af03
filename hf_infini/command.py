"""A model that you have, with a memory of constant size, and documents to ask.

Answers and texts go to standard output, everything else to standard error.
"""

import functools
import hashlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from huggingface_hub.constants import HF_HOME
from transformers import AutoConfig, TextStreamer

from .cache.cache import InfiniCache
from .cache.files import MemoryFileError
from .models.adapter import RECORD, describe, load_adapter, merged, save_adapter
from .models.loading import load_causal_lm, load_tokenizer
from .models.patching import patch_model, unpatch_model
from .tools.asking_rows import asking_rows
from .tools.documents import read_document, read_documents
from .tools.estimate import estimate as estimate_cache
from .tools.inspection import inspect_attention
from .tools.inspection.page import inspection_page
from .tools.keep_score import fit_keep_score
from .tools.reader import Reader

# memory files by the content of a text, and fitted scores by the model
KEPT = Path(HF_HOME) / "hf_infini"
# of a plain model without an adapter
WINDOW = {"segment_length": 128, "local_segments": 1, "sink_tokens": 4}
LENGTHS = [8_192, 131_072, 1_048_576]  # of texts, in `estimate`
KEPT_TOKENS = 1788  # 2,048 places with these

Model = Annotated[str, typer.Argument(help="A causal language model: folder or name on the Hub.")]
Documents = Annotated[
    list[Path],
    typer.Argument(help="Text, Markdown, HTML or PDF; several are read as one.", exists=True),
]
Adapter = Annotated[
    str | None, typer.Option(help="Fitted memory of the model: folder or name on the Hub.")
]
KeptTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Tokens that a head keeps on average. [default: {KEPT_TOKENS}, or the adapter's]",
    ),
]
NewTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto: a GPU where there is one.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Type of the weights; auto: as they are saved."),
]

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.command()
def ask(
    model: Model,
    documents: Documents,
    question: Annotated[
        list[str] | None,
        typer.Option(
            "--question", "-q", help="Asked of the documents; without one, a chat begins."
        ),
    ] = None,
    memory: Annotated[
        Path | None, typer.Option(help="Memory file. [default: by the content, in a cache folder]")
    ] = None,
    chat_template: Annotated[
        bool, typer.Option(help="The model's own template, or plain questions and answers.")
    ] = True,
    max_new_tokens: NewTokens = 300,
    adapter: Adapter = None,
    kept_tokens: KeptTokens = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Reads documents once, and answers questions about them.

    What was read is kept in a memory file: the next start reads nothing. A plain model without an
    adapter gets a window and kept tokens, whose score is fitted first, on text of the documents;
    that is kept, too.
    """
    text = read_documents(documents)
    net, tokenizer = _load(model, adapter, kept_tokens, device, dtype, text)
    tokenizer.chat_template = tokenizer.chat_template if chat_template else None
    reader = Reader(net, tokenizer)
    key = _hash(
        model,
        adapter,
        net.config.to_json_string(),
        str(net.dtype),
        str(tokenizer.chat_template),
        text,
    )
    file = memory or KEPT / "memories" / f"{key}.safetensors"
    try:
        cache = reader.read_document(text, file=file)
    except MemoryFileError as error:
        if memory is not None:
            raise
        _say(f"reading again, for {error}")
        file.unlink(missing_ok=True)
        cache = reader.read_document(text, file=file)
    tokens = cache.get_seq_length()
    plain = estimate_cache(net.config, tokens).plain
    _say(
        f"{tokens:,} tokens in a cache of {cache.nbytes() / 1e6:,.1f} MB, all keys and values: "
        f"{plain / 1e6:,.1f} MB"
    )
    _say(f"memory file: {file}")
    answer = functools.partial(
        reader.chat, max_new_tokens=max_new_tokens, streamer=_streamer(tokenizer)
    )
    for asked in question or ():
        _say(f"> {asked}")
        answer([{"role": "user", "content": asked}])
    messages = []
    while not question and (asked := _typed()):
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answer(messages)})


@app.command()
def read(
    model: Model,
    documents: Documents,
    out: Annotated[
        Path, typer.Option(help="Memory file to write; after a kill the same command goes on.")
    ],
    adapter: Adapter = None,
    kept_tokens: KeptTokens = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Reads documents once, and writes a memory file for `continue`."""
    text = read_documents(documents)
    net, tokenizer = _load(model, adapter, kept_tokens, device, dtype, text)
    cache = Reader(net, tokenizer).read(text, file=out, split_special_tokens=True)
    plain = estimate_cache(net.config, cache.get_seq_length()).plain
    _say(
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
        list[str], typer.Argument(help="What comes next; each of several goes on from the memory.")
    ],
    temperature: Annotated[
        float, typer.Option(min=0, help="Above 0 tokens are drawn; 0: the likeliest.")
    ] = 0,
    max_new_tokens: NewTokens = 200,
    adapter: Adapter = None,
    kept_tokens: KeptTokens = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Goes on with a text that was read, from its memory file.

    Text and memory are tokenised apart: begin with the space or line break that belongs between
    them.
    """
    net, tokenizer = _load(model, adapter, kept_tokens, device, dtype)
    reader = Reader(net, tokenizer, cache=InfiniCache.from_pretrained(memory, net))
    options: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    )
    if len(texts) == 1:
        reader.generate(
            texts[0], streamer=_streamer(tokenizer), max_new_tokens=max_new_tokens, **options
        )
        return
    for text, more in zip(
        texts, reader.generate(texts, max_new_tokens=max_new_tokens, **options), strict=True
    ):
        _say(f"> {text}")
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
    _fit(*_loaded(model, device, dtype), read_documents(documents), out, kept_tokens)
    _say(f"{out}: use it with --adapter, or hf_infini.load_adapter")


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
    net, tokenizer = _load(model, adapter, kept_tokens, "cpu", dtype)
    net.save_pretrained(out, save_code=code)
    tokenizer.save_pretrained(out)
    _say(f"{out}: AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it")


@app.command()
def estimate(
    model: Model,
    tokens: Annotated[
        list[int], typer.Option(min=1, help="Length of a text; give several.")
    ] = LENGTHS,
    kept_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that a head keeps on average.")
    ] = KEPT_TOKENS,
) -> None:
    """Megabytes of a cache, with all tokens and with a memory. Only the model's configuration is
    needed."""
    config = AutoConfig.from_pretrained(model)
    options = {} if hasattr(config, "infini_layers") else WINDOW | {"kept_tokens": kept_tokens}
    print(f"{'tokens':>12} {'all':>12} {'memory':>12}")
    for count in tokens:
        plain, infini = estimate_cache(config, count, **options)
        print(f"{count:>12,} {plain / 1e6:>9,.1f} MB {infini / 1e6:>9,.1f} MB")


@app.command()
def inspect(
    model: Model,
    document: Annotated[
        Path, typer.Argument(help="Text, Markdown, HTML or PDF.", exists=True, dir_okay=False)
    ],
    out: Annotated[Path, typer.Option(help="HTML page to write.", dir_okay=False)],
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of its beginning; a head takes 1.3 · tokens² bytes.")
    ] = 200,
    adapter: Adapter = None,
    kept_tokens: KeptTokens = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Writes a page of what every head does with a text. It has the weights and, of a memory, what
    is kept."""
    net, tokenizer = _loaded(model, device, dtype)
    net = net if adapter is None else merged(load_adapter(net, adapter, kept_tokens=kept_tokens))
    ids = tokenizer(read_document(document), add_special_tokens=False, return_tensors="pt")[
        "input_ids"
    ][:, :max_tokens]
    out.write_text(
        inspection_page(inspect_attention(net, ids, tokenizer), title=Path(model).name),
        encoding="utf-8",
    )
    _say(f"{out}: open it in a browser")


@app.command()
def demo(
    model: Model,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the page, which only this machine sees.")
    ] = 7860,
    adapter: Adapter = None,
    kept_tokens: KeptTokens = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Serves a page for the browser that reads and answers. It shows the cache and what the heads
    keep. A plain model needs --adapter, or a score that `ask` has fitted before."""
    from .tools.demo import Demo

    net, tokenizer = _load(model, adapter, kept_tokens, device, dtype)
    Demo(net, tokenizer).page().launch(server_port=port)


def main() -> None:
    """Runs the command; what ends it early is one line on standard error."""
    try:
        app()
    except KeyboardInterrupt:
        _say("")
        raise SystemExit(130) from None
    except ModuleNotFoundError as error:
        extra = "demo" if error.name == "gradio" else "documents"
        _say(f"error: {error.name} is not installed: pip install 'hf-infini[{extra}]'")
        raise SystemExit(1) from None
    except (ValueError, OSError) as error:
        _say(f"error: {' '.join(str(error).split())}")
        raise SystemExit(1) from None


def _load(
    model: str,
    adapter: str | None,
    kept_tokens: int | None,
    device: str,
    dtype: str,
    text: str | None = None,
):
    """A model with a memory and its tokenizer; `text`: on which the score of a plain one may be
    fitted."""
    net, tokenizer = _loaded(model, device, dtype)
    if hasattr(net.config, "infini_layers"):
        if adapter is not None or kept_tokens is not None:
            raise ValueError(
                f"{model} has the options of its memory: leave --adapter and --kept-tokens out."
            )
        return net, tokenizer
    # of the model, and of how it is fitted
    fitted = KEPT / "scores" / _hash(json.dumps(describe(net)), "shares")
    if adapter is None and not (fitted / RECORD).exists():  # the file that is written last
        if text is None:
            raise ValueError(
                f"{model} has no memory: give the --adapter with which the text was read."
            )
        _fit(net, tokenizer, text, fitted, KEPT_TOKENS)
        unpatch_model(net)
    try:
        net = merged(load_adapter(net, adapter or fitted, kept_tokens=kept_tokens))
    except OSError as error:
        raise ValueError(f"cannot load the adapter {adapter or fitted}: {error}") from error
    return net.eval(), tokenizer


def _loaded(model: str, device: str, dtype: str):
    """A model as it was saved, on a device, and its tokenizer."""
    try:
        net: Any = load_causal_lm(model, dtype=dtype)
        tokenizer = load_tokenizer(model, net)
    except OSError as error:
        raise ValueError(f"cannot load {model}: {error}") from error
    found = (
        torch.accelerator.current_accelerator(check_available=True) if device == "auto" else device
    )
    try:
        return net.eval().to(found or "cpu"), tokenizer
    except (AssertionError, RuntimeError) as error:  # of torch: unknown, not there, or too small
        raise ValueError(f"--device {device} cannot be used; cpu can: {error}") from error


def _fit(net, tokenizer, text: str, folder: Path, kept_tokens: int) -> None:
    """Gives a plain model a window and kept tokens, fits their score, and writes it."""
    if hasattr(net.config, "infini_layers"):
        raise ValueError("this model has a memory already; a score is fitted for a plain one.")
    folder.mkdir(parents=True, exist_ok=True)  # now, if it cannot be made, and not after the fit
    options: dict[str, Any] = WINDOW | {
        "kept_tokens": kept_tokens,
        "keep_score": "learned",
        "gate_init": -1000.0,
    }
    if net.config.model_type == "gpt2":
        options["position_encoding"] = "segment"  # texts longer than its positions
    patch_model(net, **options)
    _say("fitting which tokens are worth keeping; this is done once for a model")
    fit_keep_score(
        net, asking_rows(tokenizer, text, length=min(1700, net.config.max_position_embeddings))
    )
    save_adapter(net, folder, torch.bfloat16)


def _typed() -> str:
    """A question from standard input; empty at its end."""
    print("> ", end="", file=sys.stderr, flush=True)
    try:
        return input()
    except EOFError:
        return ""


def _streamer(tokenizer) -> TextStreamer:
    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _hash(*parts: str | None) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
