"""Loading a trained model for evaluation and generation, and how long its inputs may be."""

import contextlib
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

from cli import UserError, one_line
from cli.names import check_name
from corpora.tokenization import encode_texts
from hf_infini.compat.cache_name import CACHE, cache_of
from hf_infini.layers.memory_layer import gates_of
from hf_infini.models.adapter import load_adapter, merged, read_adapter, read_record
from hf_infini.models.loading import find_folder, load_causal_lm, with_finite_weights
from hf_infini.models.patching import unpatch_model
from hf_infini.options import context_limit
from hf_infini.tools.ready import adapted, load_saved
from support.measurement import keep_freed_memory
from support.stages import check_unchanged


def load_model(
    name: str, device: str = "auto", adapter: str | None = None, precision: str = "float32"
):
    """The causal language model of a folder or Hub name, in evaluation mode, and its tokenizer.

    Args:
        device: a torch device, or "auto" for the GPU where there is one.
        adapter: folder or Hub name of one that is put on the model, its LoRA added to the weights;
            `None`: none.
        precision: of weights and calculations, "float32" or "bf16".

    Raises an error that names what is wrong when there is no such model, adapter or device, a file
    is damaged, or a weight is not finite.
    """
    check_name("--model", name)
    if adapter is not None:
        check_name("--adapter", adapter)
    device = usable_device(device)
    check_unchanged(Path(name))
    model, tokenizer = load_saved(name, device, "bfloat16" if precision == "bf16" else precision)
    if adapter is not None:
        model = with_finite_weights(adapted(model, adapter, None), adapter).to(device)
    if device == "cpu":
        keep_freed_memory()
    return model.eval(), tokenizer


def load_plain(name: str, device: str, precision: str, why: str):
    """As [`load_model`]; UserError also for a model with a memory, which says `why` a plain one is
    needed."""
    model, tokenizer = load_model(name, device, precision=precision)
    if getattr(model.config, "infini_layers", ()):
        raise UserError(
            f"--model {name} has a memory, and {why}: give the one that it was made from"
        )
    return model, tokenizer


def with_lora(model, name: str):
    """A plain model with a LoRA added to its weights, in place: PEFT's, or that of an adapter of
    this library, whose memory is left out. `name`: its folder or Hub name; UserError where it
    cannot be taken, or the adapter has none."""
    from peft import PeftModel

    try:
        place = str(find_folder(name, "adapter folder") or name)
        try:
            own = bool(read_record(place))
        except OSError:
            own = False
        if not own:
            return merged(PeftModel.from_pretrained(model, place))
        if not read_adapter(place).lora:
            raise UserError(f"--lora {name}: this adapter has no LoRA; give the folder of one")
        return unpatch_model(merged(load_adapter(model, place)))
    except UserError:
        raise
    except Exception as error:  # whatever PEFT may raise
        raise UserError(f"--lora {name}: --model cannot take it ({one_line(error)})") from error


def read_model(option: str, path: str | Path, **options):
    """The model that [`load_causal_lm`] makes of a path with these options; UserError, with the
    recipe's `option` that named the path, where there is none, its files are damaged, they are not
    those that a finished run left, or a weight is not finite."""
    check_unchanged(Path(path))
    try:
        return load_causal_lm(path, **options)
    except Exception as error:  # safetensors and others have kinds that are no ValueErrors
        raise UserError(f"{option}: cannot load {path}: {one_line(error)}") from error


def usable_device(name: str) -> str:
    """A torch device by its name, or "auto" for the GPU where there is one; UserError unless torch
    can compute there."""
    if name == "auto":
        return str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        no_gpu = name.startswith("cuda") and not torch.cuda.is_available()
        reason = ": torch finds no GPU here" if no_gpu else ""
        raise UserError(
            f"--device: cannot use {name}{reason}; give cpu, cuda, cuda:1, …, or auto"
        ) from error
    return name


def check_length(config, tokens: int) -> None:
    """UserError, with the remedy, if the model has fewer positions than `tokens`."""
    limit = context_limit(config)
    if limit is not None and tokens > limit:
        raise UserError(
            f"{tokens:,} tokens, but this model has {limit:,} learned positions: ask for fewer, "
            "or train one that takes any length: `--attention infini --position_encoding rope`, "
            "or `--model causal_mha --position_encoding rope`"
        )


def first_beyond(config) -> int:
    """The first position of a text that, in some layer, does not see all tokens before it: by
    window, sinks, kept tokens."""
    length, local, sinks, kept = min(config.windows.values())
    return (local + 1 + (sinks + kept) // length) * length


def tokens_held(config) -> int:
    """How many tokens each key/value head holds at most, on average over the layers with a
    memory."""
    return round(statistics.fmean(window.places for window in config.windows.values()))


def reads_memory(config, tokens: int) -> bool:
    """Whether any token of a text of `tokens` tokens reads a memory; if not, gates mean nothing.

    The tokens of the first window, and of those after it from which all are kept, find it empty.
    """
    return getattr(config, "has_memory", False) and tokens > first_beyond(config)


@torch.inference_mode()
def read_in_chunks(model, ids: torch.Tensor, chunk: int, cache=None):
    """The cache of a model that has read `[batch, tokens]`, `chunk` tokens a call, into a new
    `cache` that is given, or its own."""
    for piece in ids.split(chunk, dim=1):
        cache = cache_of(model(input_ids=piece, use_cache=True, logits_to_keep=1, **{CACHE: cache}))
    return cache


def continue_texts(model, tokenizer, prompts: list[str], **arguments) -> list[tuple[str, int]]:
    """What a model goes on with after each of the prompts, which it reads as one batch, and the
    number of new tokens.

    Args:
        prompts: an empty one is the beginning of a text, after the end of another.
        arguments: of `generate`; beams and the like of the model's own generation config are not
            used.

    Raises UserError where prompt and new tokens are more than the model's positions, or the
    tokenizer has no end-of-text token.
    """
    # any will do, as padding is never looked at
    tokenizer.padding_side, end = "left", tokenizer.eos_token_id
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if tokenizer.pad_token is None or end is None:
        raise UserError("the model's tokenizer has no end-of-text token (eos_token): give it one")
    ids = encode_texts(tokenizer, prompts, split_special_tokens=False)
    rows = {"input_ids": [row.tolist() or [end] for row in ids]}
    inputs = tokenizer.pad(rows, return_tensors="pt").to(model.device)
    length = inputs["input_ids"].shape[1]
    check_length(model.config, length + arguments["max_new_tokens"])
    own = {"use_cache": True, "num_beams": 1, "num_return_sequences": 1}
    output = model.generate(**inputs, pad_token_id=tokenizer.pad_token_id, **own | arguments)
    counts = (output[:, length:] != tokenizer.pad_token_id).sum(1).tolist()
    texts = tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
    return list(zip(texts, counts, strict=True))


def switch_memory_off(model) -> None:
    """Closes every gate of a model's memories for good: what is left is its local attention alone.

    sigmoid(−∞) is exactly 0, so the memory has no share of any head's output. Layers with full
    attention stay.

    Raises UserError when the model has no gates.
    """
    gates = _gates(model)
    if not gates:
        raise UserError("--memory off: this model has no memory to switch off")
    with torch.no_grad():
        for gate in gates:
            gate.fill_(-torch.inf)


@contextlib.contextmanager
def gates_closed(model) -> Iterator[None]:
    """Within it, a model has its window only: no head takes anything from its memory."""
    before = [(gate, gate.detach().clone()) for gate in _gates(model)]
    switch_memory_off(model)
    try:
        yield
    finally:
        with torch.no_grad():
            for gate, value in before:
                gate.copy_(value)


def _gates(model) -> list[torch.nn.Parameter]:
    return [parameter for gate in gates_of(model).values() for parameter in gate.parameters()]
