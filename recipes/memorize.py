"""Reads a text of any length with a trained model and keeps what it remembers: a memory file, small and of a size that does
not depend on the text.

    python recipes/memorize.py --model runs/infini --text livro.txt --out livro.safetensors
    python recipes/generate.py --model runs/infini --memory livro.safetensors --prompt " O autor" --max_new_tokens 200

While it reads, OUT.partial keeps the memory so far: after a kill, the same command continues there and ends with the same
bytes; after the end it does nothing.

The model needs Infini-attention; with learned positions it takes texts up to its context. The text is taken as it is, its
last line break included, without special tokens. Text and prompt are tokenised apart: where a BPE would join the last
characters of the text and the first of the prompt, it cannot. End the text with a line break, or begin the prompt with the
space that belongs there.
"""

import glob
import hashlib
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cli import ADAPTER, UserError, exit_on_error, option, parse_options


@dataclass
class Options:
    model: str = field(metadata={"help": "Model folder or name on the Hub.", "group": "model"})
    text: str = field(metadata={"help": "UTF-8 text file.", "group": "text"})
    out: str = field(metadata={"help": "Memory file to write.", "group": "output"})
    adapter: str | None = option(None, ADAPTER, group="model")
    chunk_tokens: int = option(4096, "Tokens per call of the model; memory use grows with it.", greater_than=0,
                               group="machine", rare=True)  # fmt: skip
    checkpoint_tokens: int = option(65536, "Save the memory so far every so many tokens.", greater_than=0, rare=True)
    device: str = option("auto", "cpu, cuda, cuda:1, …; auto: a GPU where there is one.")
    dtype: Literal["float32", "bfloat16"] = option("float32", "Of weights and memory; generate.py then needs the same.")


@exit_on_error(when_stopped="OUT.partial has the memory so far; the same command goes on")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    text, file = Path(options.text), Path(options.out)
    if not text.is_file():
        raise UserError(f"--text: there is no file {text}")

    import torch
    from tqdm import tqdm

    from corpora.documents import read_text
    from corpora.tokenization import encode_texts
    from evaluation import inference
    from hf_infini import InfiniCache
    from hf_infini.cache.files import describe_model
    from hf_infini.compat.cache_name import CACHE

    model, tokenizer = inference.load_model(options.model, options.device, options.adapter)
    model = model.to(getattr(torch, options.dtype))
    description, text_sha256 = describe_model(model), [hashlib.sha256(text.read_bytes()).hexdigest()]
    file.parent.mkdir(parents=True, exist_ok=True)  # now, if it cannot be made, and not after hours
    partial = file.with_name(f"{file.name}.partial")
    if read_cache(file, model, text_sha256, "--out: choose another name, or delete it") is not None:
        partial.unlink(missing_ok=True)
        print(f"{file} is there already", file=sys.stderr)
        return
    with torch.inference_mode():
        tokens = torch.cat([torch.as_tensor(encode_texts(tokenizer, [p])[0]) for p in pieces_of(read_text(text))])
        inference.check_length(model.config, len(tokens))
        cache = read_cache(partial, model, text_sha256, "To start from the beginning of the text, delete it")
        cache = InfiniCache(model.config) if cache is None else cache
        begin, start = cache.get_seq_length(), time.perf_counter()
        if begin:
            print(f"continuing after {begin:,} tokens", file=sys.stderr)
        bar = tqdm(total=len(tokens), initial=begin, desc=f"reading {text.name}", unit="token", unit_scale=True)
        for place in range(begin, len(tokens), options.chunk_tokens):
            ids = tokens[place : place + options.chunk_tokens].to(model.device)
            model.base_model(ids.unsqueeze(0), use_cache=True, **{CACHE: cache})
            bar.update(len(ids))
            end = place + len(ids)
            if end < len(tokens) and end // options.checkpoint_tokens > place // options.checkpoint_tokens:
                cache.save_pretrained(partial, description, text_sha256=text_sha256)
        bar.close()
        cache.save_pretrained(file, description, text_sha256=text_sha256)
        seconds = time.perf_counter() - start
    for left in (partial, *partial.parent.glob(f"{glob.escape(partial.name)}.*.part")):  # of earlier starts that were killed
        left.unlink(missing_ok=True)
    print(summary(file, text, cache, len(tokens), (len(tokens) - begin) / seconds))


def pieces_of(text: str, size: int = 1_000_000) -> Iterator[str]:
    """The text in pieces of about `size` characters, which end with a line: a tokenizer takes 165 bytes for a character."""
    begin = 0
    while begin < len(text):
        found = re.compile(r"\n(?=\S)").search(text, begin + size)
        end = found.end() if found else len(text)
        yield text[begin:end]
        begin = end


def read_cache(file: Path, model, text_sha256: list[str], remedy: str):
    """The cache of a memory file of this text, None where there is no file.

    Raises UserError, with the remedy, where the file is something else, damaged, or of another model or text.
    """
    from hf_infini import InfiniCache
    from hf_infini.cache.files import MemoryFileError, read_memory_file

    if not file.exists():
        return None
    try:
        cache = InfiniCache.from_pretrained(file, model)
        if read_memory_file(file)[0]["text_sha256"] == text_sha256:
            return cache
    except MemoryFileError as error:
        raise UserError(f"{error} {remedy}") from error
    raise UserError(f"{file} is the memory of another text. {remedy}")


def summary(file: Path, text: Path, cache, tokens: int, speed: float) -> str:
    """The size of the memory file, and of the keys and values that full attention would keep in every layer."""
    size, kept = file.stat().st_size, ("local_key", "local_value", "keys", "values")  # [1, heads, tokens, width] each
    tensors = [tensor for name, tensor in cache.tensors().items() if name.endswith(kept)]
    full = sum(tensor.nbytes // tensor.shape[2] for tensor in tensors) * tokens
    return (
        f"{file}: {size:,} bytes for {tokens:,} tokens of {text.name}, read at {speed:,.0f} tokens/s; a full key/value "
        f"cache would take {full:,} bytes, {full / size:,.1f} times as many"
    )


if __name__ == "__main__":
    main()
