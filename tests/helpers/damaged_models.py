"""Saved models of each kind, copies of which tests damage; and the one line with which they must be refused."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from decoders import decoder
from hf_infini import patch_model
from hf_infini.models.loading import load_causal_lm, load_tokenizer
from models import causal_mha, gpt2, infini_gpt2

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"


def infini_llama():
    return patch_model(decoder("llama", num_hidden_layers=3, vocab_size=89), segment_length=8)


def from_scratch():
    return causal_mha(attention="infini", segment_length=8, position_encoding="rope")


KINDS = {"infini_gpt2": infini_gpt2, "infini_llama": infini_llama, "causal_mha": from_scratch, "gpt2": gpt2}


def save_models(folders: Path) -> Path:
    """Writes one folder of each kind of model, with a tokenizer, and one in shards."""
    words = {f"w{number}": number for number in range(89)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), eos_token="w0")
    for kind, make in KINDS.items():
        make().save_pretrained(folders / kind)
    infini_gpt2().save_pretrained(folders / "shards", max_shard_size="20KB")
    for folder in folders.iterdir():
        tokenizer.save_pretrained(folder)
    for folder in folders.iterdir():  # whole, all of them can be loaded
        load_tokenizer(folder, load_causal_lm(folder))
    return folders


def state(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refused(action, message: str, place: str = "") -> None:
    """The action ends with a ValueError, or an OSError of transformers', whose one line has the message and the place."""
    with pytest.raises((ValueError, OSError), match=message) as found:
        action()
    text = str(found.value)
    assert "\n" not in text and place in text, text


def check_refused(saved, tmp_path, kind, damage, message, load=AutoModelForCausalLM.from_pretrained, **options):
    folder = tmp_path / kind
    shutil.copytree(saved / kind, folder)
    damage(folder)
    before = state(folder)
    refused(lambda: load(folder, **options), message, str(folder))
    assert state(folder) == before


def write(content: bytes, name=WEIGHTS):
    return lambda folder: (folder / name).write_bytes(content)


def cut(to, name=WEIGHTS):
    """Keeps so many bytes, or this share of them."""

    def damage(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: to if isinstance(to, int) else int(len(content) * to)])

    return damage


def entries(**changes):
    def damage(folder):
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | changes))

    return damage
