"""The folder of a published model: weights in bfloat16, tokenizer, the code that travels, and
samples by that model."""

import shutil
from pathlib import Path

import torch
from transformers import set_seed

from cli import UserError
from corpora.tokenization import encode_texts
from evaluation import inference
from hf_infini.models.loading import load_tokenizer
from hf_infini.options import context_limit

LOSS_CURVE = "loss_curve.png"
# whatever the model's own generation config says
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
METHODS = ({"do_sample": False, "num_beams": 1}, {"do_sample": True, **NEUTRAL, "top_p": 0.9})


def write_model(run: Path, folder: Path) -> None:
    """Writes the model, in bfloat16 and with its code, the tokenizer and the loss curve of a run
    into an empty folder.

    Raises UserError where weights of the run are missing or damaged, and the errors of
    [`load_tokenizer`] where its tokenizer does not fit.
    """
    model = inference.read_model("--run", run, dtype=torch.bfloat16, local_files_only=True)
    tokenizer = load_tokenizer(run, model=model, local_files_only=True)
    model.save_pretrained(folder, save_code=True)  # models of transformers ignore it
    tokenizer.save_pretrained(folder)
    if (run / LOSS_CURVE).is_file():
        shutil.copyfile(run / LOSS_CURVE, folder / LOSS_CURVE)


def generate_samples(
    folder: Path, prompts: list[str], new_tokens: int, seed: int, device: str = "auto"
) -> list[dict]:
    """A continuation of each prompt by each of [`METHODS`]: `prompt`, `arguments` (of `generate`),
    `seed`, `text`."""
    model, tokenizer = inference.load_model(str(folder), device)
    limit, samples = context_limit(model.config), []
    for prompt in prompts:
        (ids,) = encode_texts(tokenizer, [prompt], split_special_tokens=False)
        if len(ids) == 0:
            raise UserError(f"--prompt {prompt!r} has no token in the vocabulary of the model")
        inference.check_length(model.config, len(ids) + 1)
        room = new_tokens if limit is None else min(new_tokens, limit - len(ids))
        for method in METHODS:
            arguments = {**method, "max_new_tokens": room}
            set_seed(seed)
            ((text, _),) = inference.continue_texts(model, tokenizer, [prompt], **arguments)
            samples.append({"prompt": prompt, "arguments": arguments, "seed": seed, "text": text})
    return samples
