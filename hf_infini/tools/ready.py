"""A model with a constant cache, and its tokenizer, ready to read: from what the command was given,
with a window whose places questions fill from an archive, or with an adapter, whose score is
fitted where there is none."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..cache.files import kept_and_archived
from ..cache.tensor_files import FileKind
from ..models.adapter import RECORD, load_adapter, merged, read_adapter, save_adapter
from ..models.loading import few_bits, find_folder, load_causal_lm, load_tokenizer
from ..models.patching import patch_model, unpatch_model
from ..models.structure import trained_places
from ..options import Window
from . import cache_folder
from .asking_rows import asking_rows
from .keep_score import fit_keep_score
from .one_line import say, while_
from .outputs import check_output
from .text_rows import text_rows

# of a plain model without an adapter
WINDOW: dict[str, Any] = {"segment_length": 128, "local_segments": 1, "sink_tokens": 4}
WINDOW |= {"update_rule": "none"}
KEPT_TOKENS = 1788  # 2,048 places with these
PLACES_STEP = 64  # of the places of a short text
ROW = 1700  # tokens of a row of the fit, at most
FILE = FileKind("JSON file of a model", "get it again, or save it again")


def load_ready(
    model: str,
    adapter: str | None,
    kept_tokens: int | None,
    device: str,
    dtype: str,
    scores: Path,
    text: str | None = None,
    archive: bool | str | None = False,
    memory: Path | None = None,
    several: bool = False,
    bits: int | None = None,
):
    """A model with a memory and its tokenizer.

    Args:
        model, adapter, kept_tokens, device, dtype: as the command takes them.
        scores: the folder of fitted scores, by the model.
        text: that is read; on it the score of a plain model may be fitted. `None`: ValueError where
            it would have to be.
        archive: whether, and how, what is read is archived, as of [`InfiniCache`]: then a plain
            model needs no score. `None`: where the model has places that a question may fill.
        memory: a memory file. One that is there says what its model had, also instead of a text.
        several: whether documents are read apart where what is read is archived: with as many
            places whatever their lengths, so that one more changes nothing for the others.
        bits: as of [`load_saved`]. ValueError for an adapter with a LoRA.

    Returns:
        Model, tokenizer, and whether, and how, what is read is archived.
    """
    if adapter is not None:
        place = find_folder(adapter, "adapter folder")  # before the model, which takes longer
        if bits is not None:
            with while_("loading the adapter", adapter, lambda: what_helps(adapter)):
                _check_no_lora(model, adapter, str(place or adapter), bits)
    net, tokenizer = load_saved(model, device, dtype, bits)
    if has_memory(model, net.config, adapter, kept_tokens):
        return net, tokenizer, net.config.kept_tokens > 0 if archive is None else archive
    archive = True if archive is None else archive
    if memory is not None and adapter is None and memory.exists():
        with while_("looking into the memory file", memory, "`hf-infini read` writes it again."):
            of_file, archived = kept_and_archived(memory)
        if archived:
            return recalling(net, kept_tokens or of_file), tokenizer, archive
        archive = text is not None and archive
    if archive and adapter is None:
        needed = KEPT_TOKENS
        if text is not None and not several:
            needed = len(tokenizer(text, verbose=False)["input_ids"])
        net = recalling(net, kept_tokens or needed, kept_tokens is None)
        return net, tokenizer, archive
    fitted = scores / cache_folder.key_of(net, "two")  # of the model, and of how it is fitted
    if adapter is None and not (fitted / RECORD).exists():  # the file that is written last
        if text is None:
            raise ValueError(
                f"{model} has no memory: give the --adapter with which the text was read."
            )
        check_output("HF_HOME", fitted)
        fit_score(net, tokenizer, text, fitted, KEPT_TOKENS)
        cache_folder.note(fitted, model=model)
        unpatch_model(net)
    return adapted(net, adapter or str(fitted), kept_tokens).eval(), tokenizer, archive


def recalling(net, kept_tokens: int, at_most: bool = False):
    """A plain model, `net`, with `kept_tokens` places for the latest tokens, until a question
    recalls others. `at_most`: these are as many as a text has; so in steps, and no more than
    [`KEPT_TOKENS`] or than the model was trained for."""
    if at_most:
        window = Window(**{name: WINDOW[name] for name in Window._fields if name in WINDOW})
        most = int(min(KEPT_TOKENS, trained_places(net.config) - window.places))
        kept_tokens = max(PLACES_STEP, min(most, -(-kept_tokens // PLACES_STEP) * PLACES_STEP))
    options = WINDOW | {"kept_tokens": kept_tokens, "keep_score": "recent"}
    options["mask_special_tokens"] = False  # as the plain model, which sees them
    return patch_model(net, **options | positions_of(net)).eval()


def learned_options(net, kept_tokens: int) -> dict[str, Any]:
    """Options of [`patch_model`] with which a head of a plain model, `net`, keeps `kept_tokens` on
    average, by two scores that are to be fitted."""
    return WINDOW | {"kept_tokens": kept_tokens, "keep_score": "two_learned"} | positions_of(net)


def positions_of(net) -> dict[str, Any]:
    """The option of a model, `net`, whose texts would end with its learned positions."""
    return {"position_encoding": "segment"} if net.config.model_type == "gpt2" else {}


def _check_no_lora(model: str, adapter: str, place: str, bits: int) -> None:
    """ValueError where the adapter at a `place` has a LoRA: its small changes of the weights would
    be rounded away."""
    if read_adapter(place).lora:
        raise ValueError(
            f"{adapter} has a LoRA, and {bits} bits would round away what it changes in the "
            f"weights: merge it first, hf-infini convert {model} --adapter {adapter} "
            f"--out FOLDER, and give FOLDER with --load-in-{bits}bit."
        )


def load_saved(model: str, device: str, dtype: str, bits: int | None = None):
    """The model of a folder or Hub name as it was saved, on a device and in a `dtype` (`None`:
    its own), and its tokenizer. `bits`: of its matrices, 4 or 8, as of [`few_bits`]; `None`: as
    they are."""
    option = f"--device {device}".rstrip()
    with while_("using", option, "cpu can be used."):
        found: Any = device
        if device == "auto":
            found = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        torch.ones(1, device=found).cpu()  # now, and not after the model is read
    with while_("loading the model", model, lambda: what_helps(model)):
        few = {} if bits is None else few_bits(model, bits, dtype, found)
        net: Any = load_causal_lm(model, dtype=dtype, **few)
        tokenizer = load_tokenizer(model, net)
    if few:  # it is there
        return net.eval(), tokenizer
    with while_("moving the model to", option, "cpu can be used."):
        return net.eval().to(found), tokenizer


def has_memory(model: str, config, adapter: str | None, kept_tokens: int | None) -> bool:
    """Whether a model has a memory, as its `config` says; ValueError where it has one and options
    of one are given. `model`, `adapter`, `kept_tokens`: as of [`load_ready`]."""
    if not hasattr(config, "infini_layers"):
        return False
    if adapter is not None or kept_tokens is not None:
        raise ValueError(
            f"{model} has the options of its memory: leave --adapter and --kept-tokens out."
        )
    return True


def adapted(net, adapter: str, kept_tokens: int | None):
    """A plain model, `net`, with the memory of an `adapter`, a folder or a name of the Hub, and
    PEFT's adapter in its weights; `kept_tokens`: `None` is as many as the adapter has."""
    with while_("loading the adapter", adapter, lambda: what_helps(adapter)):
        place = find_folder(adapter, "adapter folder") or adapter
        return merged(load_adapter(net, str(place), kept_tokens=kept_tokens))


def fit_score(net, tokenizer, text: str, folder: Path, kept_tokens: int) -> None:
    """Gives a plain model, `net`, a window and `kept_tokens`, fits their scores on `text` by its
    `tokenizer`, one on invented facts in it, one on passages of it that are read twice, and writes
    them into a `folder`, as an adapter."""
    if hasattr(net.config, "infini_layers"):
        raise ValueError("this model has a memory already; a score is fitted for a plain one.")
    patch_model(net, **learned_options(net, kept_tokens))
    say("fitting which tokens are worth keeping; this is done once for a model")
    again = "nothing is kept of a fit: the same command begins it again"
    with while_("fitting into", folder, "--adapter takes a score that was fitted before.", again):
        length = min(ROW, net.config.max_position_embeddings)
        passages = text_rows(tokenizer, text, length=length // 2)  # which are read twice
        fit_keep_score(net, asking_rows(tokenizer, text, length=length), passages=passages)
        save_adapter(net, folder, torch.bfloat16)


def what_helps(name: str) -> str:
    """What helps where the folder `name` cannot be loaded: which file is damaged, if one is."""
    place = Path(name).expanduser()
    if not place.exists():
        return f"There is no folder {name} in {Path.cwd()}, either."
    for file in sorted(place.glob("*.json")) + sorted(place.glob("*.safetensors")):
        try:
            if file.suffix == ".json":
                FILE.object_of(file, file.read_bytes())
            else:
                safe_open(file, "pt")
        except (OSError, ValueError, SafetensorError) as error:
            said = str(error)
            return said if str(file) in said else f"{file} is damaged ({said}): {FILE.remedy}."
    return "Its files may be of several versions, or of a kind that cannot be taken."
