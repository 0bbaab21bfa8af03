"""A small random model of every family that is known to go with Infini-attention."""

import torch
from tokenizers.processors import TemplateProcessing
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_infini.models.families import PROBED

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
# What the families need beside these sizes
OPTIONS = {
    "apertus": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12e6,
            "factor": 8.0,
            "low_freq_factor": 1.0,
        }
        | {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    },
    "cohere2": MIXED,
    "exaone4": MIXED,
    "exaone_moe": EXPERTS | {"num_experts": 4} | MIXED,
    "gemma2": MIXED,
    "gemma3_text": MIXED,
    "hy_v3": EXPERTS | {"num_experts": 4},
    "kolibri1": EXPERTS | {"num_experts": 4} | MIXED,
    "llama4_text": EXPERTS | {"num_local_experts": 4, "attention_chunk_size": 16},
    "minimax_m2": EXPERTS | {"num_local_experts": 4},
    "ministral": MIXED,
    "mistral": {"sliding_window": None},
    "mixtral": EXPERTS | {"num_local_experts": 4},
    "olmo3": MIXED,
    "olmoe": EXPERTS | {"num_experts": 4},
    "qwen3_moe": EXPERTS | {"num_experts": 4},
}
TYPES = ("gpt2", *(name for name in PROBED if name in CONFIG_MAPPING))


def decoder(model_type: str, **options):
    """A model for language of this type, in evaluation mode, whose weights are large enough to tell
    layers apart."""
    config_class = CONFIG_MAPPING[model_type]
    given = SIZES | OPTIONS.get(model_type, {}) | options
    known = config_class.__dataclass_fields__.keys() | config_class.attribute_map.keys()
    config = config_class(**{name: value for name, value in given.items() if name in known})
    model = AutoModelForCausalLM.from_config(config).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw).to(parameter.dtype) * 0.2
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    return model


def token_ids(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random ordinary tokens."""
    return torch.randint(
        3, SIZES["vocab_size"], (batch, tokens), generator=torch.Generator().manual_seed(seed)
    )


def fitted(model):
    """A patched model with learned scores, as those of a fit."""
    for name, parameter in model.named_parameters():
        if name.endswith("keep_weight"):
            draw = torch.Generator().manual_seed(1 + name.endswith("passage_keep_weight"))
            torch.nn.init.normal_(parameter, generator=draw)
    return model


def begin_with_bos(tokenizer) -> None:
    """From now on a tokenizer puts its bos token in front of every text, as Gemma's does."""
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
