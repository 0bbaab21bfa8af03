"""Reads texts of any length with a trained model and keeps what it remembers: one memory file a text, small and of a size
that does not depend on the text.

    python recipes/memorize.py --model runs/infini --text livro.txt --out livro.safetensors
    python recipes/memorize.py --model runs/infini --text capitulos/01.txt capitulos/02.txt --out memories
    python recipes/generate.py --model runs/infini --memory livro.safetensors --prompt " O autor" --max_new_tokens 200
    torchrun --nproc_per_node 4 recipes/memorize.py --model runs/infini --text enciclopedia.txt --out tudo.safetensors

With one text, --out is the file; with several it is a folder, and each text's file there has the text's name. While it
reads, FILE.partial keeps the memory so far: after a kill, the same command continues there and ends with the same bytes;
after the end it does nothing.

Several processes share every text, if all layers have a memory; the numbers then differ in their last digits.

The model needs Infini-attention; with learned positions it takes texts up to its context. The text is taken as
it is, its last line break included, without special tokens. Text and prompt are tokenised apart: where a BPE would join the
last characters of the text and the first of the prompt, it cannot. End the text with a line break, or begin the prompt with
the space that belongs there.
"""

import glob
import hashlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cli import ADAPTER, UserError, exit_on_error, option, parse_options


@dataclass
class Options:
    model: str = field(metadata={"help": "Model folder or name on the Hub.", "group": "model"})
    text: list[str] = field(metadata={"help": "UTF-8 text files, each of which gets a memory file.", "group": "text"})
    out: str = field(
        metadata={"help": "Memory file to write; for several texts, the folder of their files.", "group": "output"}
    )
    adapter: str | None = option(None, ADAPTER, group="model")
    chunk_tokens: int = option(4096, "Tokens per call of the model, of each process; memory use grows with it.",
                               greater_than=0, group="machine", rare=True)  # fmt: skip
    checkpoint_tokens: int = option(65536, "Save the memory so far every so many tokens.", greater_than=0, rare=True)
    device: str = option("auto", "cpu, cuda, cuda:1, …; auto: a GPU where there is one.")
    dtype: Literal["float32", "bfloat16"] = option("float32", "Of weights and memory; generate.py then needs the same.")


@exit_on_error(when_stopped="finished files are kept, and FILE.partial with the memory so far; the same command goes on")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    files = memory_files_of(options)

    import torch

    from evaluation import inference
    from hf_infini.cache.files import describe_model

    device, group = inference.processes(options.device)
    model, tokenizer = inference.load_model(options.model, device, options.adapter)
    model = model.to(getattr(torch, options.dtype))
    description = describe_model(model)
    if group is not None:
        inference.check_shared(model, options.model)
    for text, file in files.items():
        memorize(options, model, tokenizer, description, text, file, group)


def memory_files_of(options: Options) -> dict[Path, Path]:
    """The memory file of each text; UserError for options that cannot work."""
    texts, out = [Path(text) for text in options.text], Path(options.out)
    for text in texts:
        if not text.is_file():
            raise UserError(f"--text: there is no file {text}")
    if out.is_dir() if len(texts) == 1 else out.is_file():
        raise UserError(f"--out {out}: with one text it is a file, with several the folder of their memory files")
    files = {text: out if len(texts) == 1 else out / f"{text.stem}.safetensors" for text in texts}
    if len(set(files.values())) < len(options.text):
        raise UserError("--text: two texts of the same name would have one memory file: read them one by one")
    return files


def memorize(options: Options, model, tokenizer, description: dict, text: Path, file: Path, group) -> None:
    """Reads one text, from where an earlier start was stopped, writes its memory file and prints its size; `group`: the
    processes that share it, or `None`."""
    import torch
    from tqdm import tqdm

    from corpora.long_texts import tokens_of_file
    from evaluation import inference
    from hf_infini import InfiniCache
    from hf_infini.compat.cache_name import CACHE
    from hf_infini.tools.parallel import read_rows

    first = inference.is_first(group)
    file.parent.mkdir(parents=True, exist_ok=True)  # now, if it cannot be made, and not after hours
    with text.open("rb") as source:
        text_sha256 = [hashlib.file_digest(source, "sha256").hexdigest()]
    partial = file.with_name(f"{file.name}.partial")
    if read_cache(file, model, text_sha256, "--out: choose another name, or delete it") is not None:
        if first:
            partial.unlink(missing_ok=True)
            print(f"{file} is there already", file=sys.stderr)
        return
    with torch.inference_mode():
        tokens = tokens_of_file(text, tokenizer)
        inference.check_length(model.config, len(tokens))
        cache = read_cache(partial, model, text_sha256, "To start from the beginning of the text, delete it")
        cache = InfiniCache(model.config) if cache is None else cache
        begin, start = cache.get_seq_length(), time.perf_counter()
        if begin and first:
            print(f"continuing after {begin:,} tokens", file=sys.stderr)
        bar = tqdm(
            total=len(tokens), initial=begin, desc=f"reading {text.name}", unit="token", unit_scale=True, disable=not first
        )
        step = inference.tokens_per_call(options.chunk_tokens, model.config, group)
        for place in range(begin, len(tokens), step):
            ids = torch.tensor(tokens[place : place + step], dtype=torch.long, device=model.device)
            if group is None:
                model.base_model(ids.unsqueeze(0), use_cache=True, **{CACHE: cache})
            else:
                _, cache = read_rows(model.base_model, {"input_ids": ids.unsqueeze(0)}, cache, group)
            bar.update(len(ids))
            end = place + len(ids)
            if first and end < len(tokens) and end // options.checkpoint_tokens > place // options.checkpoint_tokens:
                cache.save_pretrained(partial, description, text_sha256=text_sha256)
        bar.close()
        if not first:
            return
        cache.save_pretrained(file, description, text_sha256=text_sha256)
        seconds = time.perf_counter() - start
    for left in (partial, *partial.parent.glob(f"{glob.escape(partial.name)}.*.part")):  # of earlier starts that were killed
        left.unlink(missing_ok=True)
    print(summary(file, text, cache, len(tokens), (len(tokens) - begin) / seconds))


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
