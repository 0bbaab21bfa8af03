"""The options that say which model a recipe trains, and the configuration and model that they make."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import NotPossible, UserError, option

# What --attention may be; the first is the default. Every other check is the configuration's own.
ATTENTIONS = {"gpt2": ("infini", "self"), "causal_mha": ("global", "local", "infini", "none")}


@dataclass
class ModelOptions:
    """What was given; `None` is the default that the help text names or, with `--init_from`, what that model has."""

    model: Literal["gpt2", "causal_mha"] = option("gpt2", "Model family.", group="model")
    attention: Literal["self", "infini", "global", "local", "none"] | None = option(
        None, "gpt2: self or infini, default infini. causal_mha: global, local, infini or none, default global."
    )
    init_from: str | None = option(
        None, "Model folder to start from; what is not given below stays as it is there. gpt2 infini also starts from a "
        "plain gpt2. Default: random weights."
    )
    n_layer: int | None = option(None, "Layers; default: 4.")
    n_embd: int | None = option(None, "Width; default: 256.")
    n_head: int | None = option(None, "Heads per layer; default: 4.")
    dropout: float = option(0.0, "Dropout of the embeddings, the residual stream and the attention, 0 to 1.")
    segment_length: int | None = option(
        None, "infini: tokens per segment; default: context / 8.", group="segments and memory (--attention infini)"
    )
    update_rule: Literal["linear", "delta"] | None = option(None, "infini: how memory is written; default: linear.")
    local_segments: int | None = option(None, "infini: earlier segments that local attention sees too; default: 0.")
    feature_map: Literal["elu", "exp"] | None = option(
        None, "gpt2 infini: positive features of the memory's queries and keys; default: elu (ELU + 1, the paper)."
    )
    denominator: Literal["separate", "shared"] | None = option(
        None, "gpt2 infini: separate for window and memory, the gate alone sets the memory's share (the paper); or shared, "
        "the share depends on what a token finds; default: separate."
    )
    gate_init: float | None = option(None, "infini: start of the gates, a logit; default: 0 (half memory).")
    n_segments: int | None = option(None, "gpt2 infini: segments per context; this or segment_length.")
    memory_init: Literal["zeros", "learned", "noise"] | None = option(None, "gpt2 infini: empty memory; default: zeros.")
    layers: list[int] | None = option(None, "gpt2 infini: the layers that have a memory, from 0; default: all.")
    memory_conv: int | None = option(
        None, "gpt2 infini: taps of a short causal convolution of the layer's input, 0 for none; more than --init_from has "
        "start at zero; default: 0."
    )
    memory_write: Literal["equal", "learned"] | None = option(
        None, "gpt2 infini: what a token weighs in the memory, all alike or as learned (needs feature_map exp); default: "
        "equal."
    )
    mask_special_tokens: bool | None = option(
        None, "Special tokens (end of text, padding) are not learned to be predicted, nor written into a memory; default: "
        "true.", group="model"
    )
    position_encoding: Literal[
        "learned", "segment", "rope", "sinusoidal", "relative_key", "t5", "alibi", "none"
    ] | None = option(
        None, "What tells positions apart. gpt2 infini: learned (of the place in the text, as GPT-2), segment (of "
        "the place in the segment: any length) or rope (rotary: any length, best from scratch); causal_mha: all others. "
        "Default: learned.", group="model"
    )
    sliding_window: int | None = option(
        None, "causal_mha local: tokens that a token sees, itself included; default: context / 8.",
        group="model from scratch (--model causal_mha)"
    )
    score: Literal["scaled_dot", "dot", "general", "additive"] | None = option(
        None, "causal_mha: how a query and a key are compared; default: scaled_dot."
    )
    max_distance: int | None = option(
        None, "causal_mha relative_key, t5: tokens of distance beyond which all are alike; default: 128."
    )
    num_buckets: int | None = option(None, "causal_mha t5: buckets of distances; default: 32.")
    rope_theta: float | None = option(None, "causal_mha rope: base of the wavelengths; default: 10000.")
    n_inner: int | None = option(None, "causal_mha: width inside the feed-forward; default: 4 n_embd.")
    activation_function: str | None = option(
        None, "causal_mha: of the feed-forward, a name that transformers knows; default: gelu."
    )
    qkv_bias: bool | None = option(
        None, "causal_mha: whether the projections to query, key and value have a bias, true or false; default: false."
    )
    tie_word_embeddings: bool | None = option(
        None, "causal_mha: whether the output head is the token embedding, true or false; default: false."
    )
    initializer_range: float | None = option(
        None, "causal_mha: standard deviation of the matrices at the start; default: 0.02."
    )


SIZES = ("n_layer", "n_embd", "n_head")
INFINI = ("segment_length", "update_rule", "local_segments", "gate_init")
GPT2_INFINI = (
    *INFINI,
    "feature_map",
    "denominator",
    "n_segments",
    "memory_init",
    "layers",
    "position_encoding",
    "memory_conv",
    "memory_write",
    "mask_special_tokens",
)
# The other options of causal_mha: what each of them needs, without which it does nothing.
ANY_ATTENTION = ("global", "local", "infini")
CAUSAL_MHA = {
    **dict.fromkeys(INFINI, ("attention", ("infini",))),
    "sliding_window": ("attention", ("local",)),
    "score": ("attention", ANY_ATTENTION),
    "qkv_bias": ("attention", ANY_ATTENTION),
    "max_distance": ("position_encoding", ("relative_key", "t5")),
    "num_buckets": ("position_encoding", ("t5",)),
    "rope_theta": ("position_encoding", ("rope",)),
    **dict.fromkeys(("mask_special_tokens", "position_encoding", "n_inner", "activation_function"), None),
    **dict.fromkeys(("tie_word_embeddings", "initializer_range"), None),
}
# What the weights of a model folder decide.
FIXED = (*SIZES, "n_inner", "qkv_bias", "tie_word_embeddings", "initializer_range")


def build_config(options: ModelOptions, tokenizer, context: int):
    """The configuration that the options ask for, checked.

    Args:
        options: what was given. A GPT-2 with self-attention takes infini's options and does without them, so that the two
            runs of a comparison can differ in `--attention` alone; any other option that would do nothing is refused.
        tokenizer: of the data; sets the vocabulary, and the ids of its special tokens.
        context: tokens per row; sets the positions, and the default of segments and windows.

    Raises UserError when the options do not go together, or not with the model folder that they start from.
    """
    _check_family(options)
    start = {} if options.init_from is None else _config_of(options, tokenizer)
    values = dict(zip(SIZES, (4, 256, 4), strict=True)) | {"vocab_size": len(tokenizer), "n_positions": context}
    values |= start | _given(options, SIZES)
    values |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    add_own = _gpt2 if options.model == "gpt2" else _causal_mha
    config_class, values = add_own(options, values, context)
    try:
        config = config_class(**values)
    except Exception as error:  # strict dataclasses wrap what their checks raise in classes of their own
        raise NotPossible(str(error.__cause__ or error)) from error
    if config.n_embd % config.n_head:
        raise NotPossible(f"--n_head {config.n_head} does not divide --n_embd {config.n_embd}")
    _check_reach(options, config, context)
    return config


def build_model(config, init_from: str | None):
    """The model of a configuration: with random weights, or in float32 with those of a model folder.

    Where the folder's model has a shorter convolution, the taps that it does not have start at zero.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if init_from is None:
        model = AutoModelForCausalLM.from_config(config)
    else:
        taps = getattr(config, "memory_conv", 0)
        saved = getattr(AutoConfig.from_pretrained(init_from), "memory_conv", 0)
        grows = 0 < saved < taps  # where there is none at all, transformers starts it
        if grows:
            config = copy.deepcopy(config)
            config.memory_conv = saved
        model = AutoModelForCausalLM.from_pretrained(init_from, config=config, dtype=torch.float32)
        if grows:
            _grow_convolutions(model, taps)
    model.loss_type = "ForCausalLM"  # what transformers falls back to, with a warning
    return model


def _grow_convolutions(model, taps: int) -> None:
    """Gives every layer's convolution so many taps, the new ones zero: the model computes what it did."""
    import torch

    for module in model.modules():
        if hasattr(module, "memory_conv"):
            longer = module.memory_conv.new_zeros(taps, module.memory_conv.shape[1])
            longer[: len(module.memory_conv)] = module.memory_conv.detach()
            module.memory_conv = torch.nn.Parameter(longer)
    model.config.memory_conv = taps


def _given(options: ModelOptions, names) -> dict:
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _check_family(options: ModelOptions) -> None:
    """UserError for an attention or an option of the other family."""
    family = options.model
    if options.attention not in (None, *ATTENTIONS[family]):
        raise NotPossible(f"--attention {options.attention}, but --model {family} has {', '.join(ATTENTIONS[family])}")
    own = {"gpt2": set(GPT2_INFINI), "causal_mha": set(CAUSAL_MHA)}
    other = "causal_mha" if family == "gpt2" else "gpt2"
    for name in _given(options, sorted(own[other] - own[family])):
        raise NotPossible(f"--{name} belongs to --model {other} and does nothing with --model {family}: leave it out")


def _config_of(options: ModelOptions, tokenizer) -> dict:
    """The entries of the configuration in `--init_from`, after the checks that need no other."""
    from transformers import AutoConfig

    folder = options.init_from
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"--init_from: {folder} holds no config.json; give the folder of a saved model")
    config = AutoConfig.from_pretrained(folder)
    wanted = f"--model {options.model}"
    fitting = [options.model]
    if options.model == "gpt2":
        wanted += f" --attention {options.attention or 'infini'}"
        fitting += [] if options.attention == "self" else ["infini_gpt2"]
    if config.model_type not in fitting:
        raise UserError(f"--init_from: {folder} is a {config.model_type} model, {wanted} starts from {' or '.join(fitting)}")
    for name, value in _given(options, FIXED).items():
        has = 4 * config.n_embd if name == "n_inner" and config.n_inner is None else getattr(config, name)
        if value != has:
            raise UserError(f"--{name} {value}, but {folder} has {has}: leave --{name} out")
    taps = getattr(config, "memory_conv", 0)
    if options.memory_conv is not None and options.memory_conv < taps:
        raise UserError(f"--memory_conv {options.memory_conv}, but {folder} has {taps} taps: give as many, or more")
    if config.vocab_size < len(tokenizer):
        raise UserError(f"--init_from: {folder} knows {config.vocab_size} tokens, the data has {len(tokenizer)}")
    own = ("model_type", "architectures", "auto_map", "use_cache")  # of the folder's class and its last use
    return {name: value for name, value in config.to_dict().items() if name not in own}


def _gpt2(options: ModelOptions, values: dict, context: int) -> tuple[type, dict]:
    """The configuration class and its entries of `--model gpt2`."""
    from transformers import GPT2Config

    from hf_infini.configuration_infini_gpt2 import InfiniGPT2Config

    values |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), options.dropout)
    if options.attention == "self":
        return GPT2Config, values
    infini = _given(options, GPT2_INFINI)
    if {"segment_length", "n_segments"} & infini.keys():  # exactly one of the two: a new one replaces the old
        values |= {"segment_length": None, "n_segments": None}
    elif not (values.get("segment_length") or values.get("n_segments")):
        values["segment_length"] = max(1, context // 8)
    return InfiniGPT2Config, values | infini


def _causal_mha(options: ModelOptions, values: dict, context: int) -> tuple[type, dict]:
    """The configuration class and its entries of `--model causal_mha`."""
    from hf_infini.configuration_causal_mha import CausalMHAConfig

    given = _given(options, ("attention", *CAUSAL_MHA))
    values = {"attention": "global", "position_encoding": "learned"} | values | given | {"dropout": options.dropout}
    for name in given.keys() & CAUSAL_MHA.keys():
        if CAUSAL_MHA[name] is not None:
            needed, kinds = CAUSAL_MHA[name]
            if values[needed] not in kinds:
                raise NotPossible(
                    f"--{name} belongs to --{needed} {' or '.join(kinds)} and does nothing with "
                    f"--{needed} {values[needed]}: leave it out"
                )
    for name, kind in (("segment_length", "infini"), ("sliding_window", "local")):
        fallback = values.get(name) or max(1, context // 8)
        values[name] = given.get(name, fallback) if values["attention"] == kind else None
    if values["position_encoding"] != "learned":  # these have no table that ends
        values["n_positions"] = max(values["n_positions"], context)
    return CausalMHAConfig, values


def _check_reach(options: ModelOptions, config, context: int) -> None:
    """UserError when the model that training starts from has too few positions for the data's rows."""
    from hf_infini.configurations import context_limit

    limit = context_limit(config)
    if limit is not None and limit < context:
        other = "--attention infini --position_encoding segment" if options.model == "gpt2" else "--position_encoding rope"
        raise UserError(
            f"--init_from: {options.init_from} has {limit} positions, the data's rows {context} tokens: prepare shorter "
            f"rows, or use {other}"
        )
