"""The folder of a published model: weights in bfloat16, tokenizer, the code that travels, the card; written and checked."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from transformers import set_seed

from cli import UserError
from corpora.tokenization import encode_texts
from evaluation import inference
from hf_infini.compat.hub_code import STUB
from hf_infini.models.loading import load_causal_lm, load_tokenizer
from hf_infini.options import context_limit

CARD, LOSS_CURVE = "README.md", "loss_curve.png"
# All that is ever pushed: the code is in a folder, or was beside the weights
CODE = f"hf_infini_{'[0-9a-f]' * 8}[/_]*.py"
ALLOWED = (CARD, LOSS_CURVE, "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
           CODE, f"{STUB}.py", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
           "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja")  # fmt: skip
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # whatever the model's own generation config says
METHODS = ({"do_sample": False, "num_beams": 1}, {"do_sample": True, **NEUTRAL, "top_p": 0.9})


def allowed(path: str) -> bool:
    """Whether a file may be pushed; of what is in folders, only code."""
    return any(fnmatchcase(path, pattern) for pattern in ([CODE] if "/" in path else ALLOWED))


def pushed_files(folder: Path) -> list[str]:
    """Paths in the folder."""
    files = [file for pattern in ("*", "hf_infini_*/*") for file in folder.glob(pattern) if file.is_file()]
    return sorted(filter(allowed, (file.relative_to(folder).as_posix() for file in files)))


@contextlib.contextmanager
def new_version(folder: Path) -> Iterator[Path]:
    """Gives an empty folder to write into, whose files replace those of `folder` in the end; after an error, `folder` has
    the files that it had.

    Raises UserError where `folder` holds other things than a published model.
    """
    card = folder / CARD
    is_ours = card.is_file() and "\n- hf_infini\n" in card.read_text(encoding="utf-8", errors="replace")
    if folder.exists() and any(folder.iterdir()) and not is_ours:
        raise UserError(f"--out {folder} holds files, and no card of this recipe: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part_", dir=folder) as name:
        yield (part := Path(name))
        old, new = pushed_files(folder), pushed_files(part)
        for file in new:
            (folder / file).parent.mkdir(exist_ok=True)
            os.replace(part / file, folder / file)
        for file in {*old} - {*new}:
            (folder / file).unlink()
            with contextlib.suppress(OSError):  # not empty
                (folder / file).parent.rmdir()


def write_model(run: Path, folder: Path) -> None:
    """Writes the model, in bfloat16 and with its code, the tokenizer and the loss curve of a run into an empty folder.

    Raises ValueError where weights of the run are missing or its tokenizer does not fit, and the errors of transformers.
    """
    model = load_causal_lm(run, dtype=torch.bfloat16, local_files_only=True)
    tokenizer = load_tokenizer(run, model=model, local_files_only=True)
    model.save_pretrained(folder, save_code=True)  # models of transformers ignore it
    tokenizer.save_pretrained(folder)
    if (run / LOSS_CURVE).is_file():
        shutil.copyfile(run / LOSS_CURVE, folder / LOSS_CURVE)


def generate_samples(folder: Path, prompts: list[str], new_tokens: int, seed: int, device: str = "auto") -> list[dict]:
    """A continuation of each prompt by each of [`METHODS`]: `prompt`, `arguments` (of `generate`), `seed`, `text`."""
    model, tokenizer = inference.load_model(str(folder), device)
    limit, samples = context_limit(model.config), []
    for prompt, ids in zip(prompts, encode_texts(tokenizer, prompts, split_special_tokens=False), strict=True):
        input_ids = torch.from_numpy(ids)[None].to(model.device)
        inputs, length = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}, len(ids)
        if length == 0:
            raise UserError(f"--prompt {prompt!r} has no token in the vocabulary of the model")
        inference.check_length(model.config, length + 1)
        room = new_tokens if limit is None else min(new_tokens, limit - length)
        for method in METHODS:
            arguments = {**method, "max_new_tokens": room}
            set_seed(seed)
            with torch.no_grad():
                output = model.generate(**inputs, **arguments)
            text = tokenizer.decode(output[0, length:], skip_special_tokens=True)
            samples.append({"prompt": prompt, "arguments": arguments, "seed": seed, "text": text})
    return samples
