"""The options that say which model a recipe trains, and the configuration and model that they make.

Names, types, choices and help texts come from hf_infini's modules of options, where it has the
option.
"""

import copy
import importlib.util
import re
import runpy
import types
import typing
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Literal

from . import NotPossible, UserError, one_line, option

# without it there is --help, and a clear error once a model is needed
_INSTALLED = importlib.util.find_spec("hf_infini")
_FOLDER = Path(_INSTALLED.origin).parent if _INSTALLED else Path(__file__).parents[2] / "hf_infini"
# As files, without the package around them, whose import takes seconds
_OPTIONS, _OF_SCRATCH = (
    runpy.run_path(str(_FOLDER / f"{name}.py")) for name in ("options", "models/scratch/options")
)
UPDATE_RULES, KEEP_SCORES = _OPTIONS["UPDATE_RULES"], _OPTIONS["KEEP_SCORES"]
_MEMORY, _SCRATCH = _OPTIONS["MemoryOptions"], _OF_SCRATCH["ScratchOptions"]
MEMORY, SCRATCH = (tuple(entry.name for entry in fields(kind)) for kind in (_MEMORY, _SCRATCH))
# What --attention may be; the first is the default. Every other check is the configuration's own.
ATTENTIONS = {
    "gpt2": ("infini", "self"),
    "causal_mha": typing.get_args(_SCRATCH.__annotations__["attention"]),
}
SIZES = ("n_layer", "n_embd", "n_head")
# of the memory's options, in --help
SHOWN = ("segment_length", "local_segments", "update_rule", "memory_conv")
# What a recipe adds to what hf_infini says of an option
NOTES = dict.fromkeys(("segment_length", "sliding_window"), "Default: an eighth of the context.")
NOTES["mask_special_tokens"] = (
    "Nor are they learned to be predicted, with or without a memory. Default: True."
)


@dataclass
class MainOptions:
    """The options that both families have."""

    model: Literal["gpt2", "causal_mha"] = option("gpt2", "Model family.", group="model")
    attention: Literal[tuple(sorted({*ATTENTIONS["gpt2"], *ATTENTIONS["causal_mha"]}))] | None = (
        option(
            None,
            "gpt2: self or infini (the default). causal_mha: global (the default), local, infini "
            "or none.",
        )
    )
    init_from: str | None = option(
        None,
        "Model folder to start from; what is not given below stays as it is there. gpt2 infini "
        "also starts from a plain gpt2. Default: random weights.",
    )
    n_layer: int | None = option(None, "Layers; default: 4.")
    n_embd: int | None = option(None, "Width; default: 256.")
    n_head: int | None = option(None, "Heads per layer; default: 4.")
    dropout: float = option(
        0.0, "Dropout of embeddings, residual stream and attention.", at_least=0, below=1
    )
    position_encoding: str | None = option(
        None,
        "learned (up to the context, the default), rope (rotary: any length), or another that the "
        "model has, see docs/options.md and docs/notes/from-scratch.md.",
    )


def help_texts(options: type) -> dict[str, str]:
    """The help text of each option of a class by name: in its docstring, the text below ``name
    (`type`, …):``; and the limits of a number."""
    entry = r"^        (\w+) \(`[^\n]*\):\n((?:            [^\n]*\n)+)"
    ranges = {entry.name: _OPTIONS["in_words"](entry.metadata) for entry in fields(options)}
    texts = {}
    for name, text in re.findall(entry, options.__doc__ or "", re.MULTILINE):
        words = text.split() + ([f"{ranges[name].capitalize()}."] if ranges.get(name) else [])
        texts[name] = " ".join(words)
    return texts


def _optional(kind: type, group: str, shown: tuple[str, ...] = ()) -> list[tuple]:
    """The options of a class of hf_infini as fields that may be left out (None), but for those of
    `MainOptions`; the parser takes numbers as floats."""
    texts, kinds, made = help_texts(kind), typing.get_type_hints(kind), []
    for entry in fields(kind):
        if entry.name in MainOptions.__dataclass_fields__:
            continue
        alternatives = set(typing.get_args(kinds[entry.name])) - {types.NoneType}
        one = kinds[entry.name]
        if isinstance(one, types.UnionType):
            one = float if float in alternatives else alternatives.pop()
            one = list[float] if one == list[float | int] else one  # as numbers are above
        note = NOTES.get(entry.name, "" if entry.default is None else f"Default: {entry.default}.")
        text = f"{texts.get(entry.name, '')} {note}".replace("`", "").replace("%", "%%").strip()
        metadata = {"help": text, "group": group, "rare": entry.name not in shown}
        made.append((entry.name, one | None, field(default=None, metadata=metadata)))
    return made


_DOC = "What was given; `None` is the configuration's default or what it has in `--init_from`."
ModelOptions = make_dataclass(
    "ModelOptions",
    _optional(_MEMORY, "memory (--attention infini)", SHOWN)
    + _optional(_SCRATCH, "model from scratch (--model causal_mha)"),
    bases=(MainOptions,),
    namespace={"__doc__": _DOC},
)


def attention_of(config) -> str:
    """A model's kind of attention: "self" or "infini" of a GPT-2, the configuration's own word for
    it otherwise."""
    return {"gpt2": "self", "infini_gpt2": "infini"}.get(config.model_type) or config.attention


def given_options(options, names=None) -> dict:
    """Those of a dataclass, or of these names of it, that were given."""
    names = [entry.name for entry in fields(options)] if names is None else names
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def build_config(options: ModelOptions, tokenizer, context: int):
    """The configuration that the options ask for, checked: an option that would do nothing is
    refused.

    Args:
        tokenizer: of the data; sets the vocabulary, and the ids of its special tokens.
        context: tokens per row; sets the positions, and the default of segments and windows: an
            eighth.

    Raises UserError when the options do not go together, or not with the model folder that they
    start from."""
    from transformers import GPT2Config

    from hf_infini import CausalMHAConfig, InfiniGPT2Config
    from hf_infini.models.loading import fingerprint
    from hf_infini.models.scratch.configuration import NEEDS
    from hf_infini.options import context_limit

    family = options.model
    if options.attention not in (None, *ATTENTIONS[family]):
        raise NotPossible(
            f"--attention {options.attention}, but --model {family} has "
            f"{', '.join(ATTENTIONS[family])}"
        )
    given = given_options(options, (*SIZES, *MEMORY, *SCRATCH))
    own = {*SIZES, *MEMORY, "attention", "position_encoding"}
    if family == "gpt2" and (others := given.keys() - own):
        raise NotPossible(
            f"--{min(others)} belongs to --model causal_mha and does nothing with --model gpt2: "
            "leave it out"
        )
    start = {} if options.init_from is None else _config_of(options, tokenizer)
    values = {"n_layer": 4, "n_embd": 256, "n_head": 4, "position_encoding": "learned"}
    values |= {"vocab_size": len(tokenizer), "n_positions": context}
    values |= {"attention": ATTENTIONS[family][0]} | start | given
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values[name] = getattr(tokenizer, name)
    values["tokenizer_sha256"] = fingerprint(tokenizer)  # load_tokenizer refuses another one

    # An option that needs another one is refused where it was given, and dropped where --init_from
    # has it
    for name, (needed, kinds) in NEEDS.items():
        if values[needed] not in kinds and (name in MEMORY or family == "causal_mha"):
            if name in given:
                raise NotPossible(
                    f"--{name} belongs to --{needed} {' or '.join(kinds)} and does nothing with "
                    f"--{needed} {values[needed]}: leave it out"
                )
            values.pop(name, None)
    length = {"local": "sliding_window", "infini": "segment_length"}.get(values["attention"])
    if length and not values.get(length):
        values[length] = max(1, context // 8)

    if family == "causal_mha":
        config_class, values["dropout"] = CausalMHAConfig, options.dropout
        if values["position_encoding"] != "learned":  # these have no table that ends
            values["n_positions"] = max(values["n_positions"], context)
    else:
        values |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), options.dropout)
        config_class = GPT2Config if values.pop("attention") == "self" else InfiniGPT2Config
        if config_class is GPT2Config:
            if (encoding := values.pop("position_encoding")) != "learned":
                raise NotPossible(
                    f"--position_encoding {encoding}, but GPT-2's self-attention has learned "
                    "positions only: leave it out, or take --model causal_mha --attention global, "
                    "which has others"
                )
            # of what is learned to be predicted, which the recipe sees to
            values.pop("mask_special_tokens", None)
    try:
        config = config_class(**values)
    except Exception as error:  # strict dataclasses wrap what their checks raise in other classes
        raise NotPossible(str(error.__cause__ or error)) from error
    if config.n_embd % config.n_head:
        raise NotPossible(f"--n_head {config.n_head} does not divide --n_embd {config.n_embd}")
    limit = context_limit(config)
    if limit is not None and limit < context:
        other = "--attention infini --position_encoding segment"
        other = other if family == "gpt2" else "--position_encoding rope"
        raise UserError(
            f"--init_from: {options.init_from} has {limit} positions, the data's rows {context} "
            f"tokens: prepare shorter rows, or use {other}"
        )
    return config


def build_model(config, init_from: str | None):
    """The model of a configuration: with random weights, or in float32 with those of a model
    folder, whose convolution may be shorter: the taps that it does not have start at zero.
    UserError when that model is damaged."""
    import torch
    from transformers import AutoModelForCausalLM

    from evaluation.inference import read_model

    if init_from is None:
        model = AutoModelForCausalLM.from_config(config)
    else:
        taps = getattr(config, "memory_conv", 0)
        saved = getattr(_read_config(init_from), "memory_conv", 0)
        grows = 0 < saved < taps  # where there is none at all, transformers starts it
        if grows:
            config = copy.deepcopy(config)
            config.memory_conv = saved
        model = read_model("--init_from", init_from, config=config, dtype=torch.float32)
        if grows:
            _grow_convolutions(model, taps)
    model.loss_type = "ForCausalLM"  # what transformers falls back to, with a warning
    return model


def _grow_convolutions(model, taps: int) -> None:
    """Gives every layer's convolution so many taps, the new ones zero: the model computes what it
    did."""
    import torch

    for module in model.modules():
        if hasattr(module, "memory_conv"):
            longer = module.memory_conv.new_zeros(taps, module.memory_conv.shape[1])
            longer[: len(module.memory_conv)] = module.memory_conv.detach()
            module.memory_conv = torch.nn.Parameter(longer)
    model.config.memory_conv = taps


def _read_config(folder: str):
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # nobody knows what all of transformers raises for what a file may hold
    except Exception as error:
        what = one_line(error)[:200]
        raise UserError(f"--init_from: cannot read {folder}/config.json: {what}") from error


def _config_of(options: ModelOptions, tokenizer) -> dict:
    """The entries of the configuration in `--init_from`, after the checks that need no other."""
    from hf_infini.models.loading import fingerprint

    folder, fitting = options.init_from, [options.model]
    if not (Path(folder) / "config.json").is_file():
        raise UserError(
            f"--init_from: {folder} holds no config.json; give the folder of a saved model"
        )
    config, wanted = _read_config(folder), f"--model {options.model}"
    if options.model == "gpt2":
        wanted += f" --attention {options.attention or 'infini'}"
        fitting += [] if options.attention == "self" else ["infini_gpt2"]
    if config.model_type not in fitting:
        raise UserError(
            f"--init_from: {folder} is a {config.model_type} model, {wanted} starts from "
            f"{' or '.join(fitting)}"
        )
    if config.vocab_size < len(tokenizer):
        raise UserError(
            f"--init_from: {folder} knows {config.vocab_size} tokens, the data has {len(tokenizer)}"
        )
    if getattr(config, "tokenizer_sha256", None) not in (None, fingerprint(tokenizer)):
        what = "was trained with another tokenizer"
        raise UserError(f"--init_from: {folder} {what}: prepare the data with that one")
    # of the folder's class and its last use
    own = ("model_type", "architectures", "auto_map", "use_cache")
    return {name: value for name, value in config.to_dict().items() if name not in own}
