"""hf_infini: Infini-attention for Hugging Face causal language models.

Importing it registers the model types with `AutoConfig`, `AutoModel` and the other Auto classes
that load a GPT-2. Its rooms, from the bottom up, are ops, compat, cache, layers, models and tools.
Each says in its `__init__` what it is for.
"""

import transformers
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from .cache.cache import InfiniCache
from .cache.files import cache_bytes
from .models.adapter import load_adapter, lora_config, save_adapter
from .models.families import PROBED, infini_class, register_lazily

# InfiniGPT2LMHeadModel, InfiniLlamaForCausalLM and so on
from .models.families import __getattr__ as __getattr__
from .models.gpt2 import InfiniGPT2Config
from .models.patching import patch_model, unpatch_model
from .models.scratch.attention import CausalMultiHeadAttention
from .models.scratch.configuration import CausalMHAConfig
from .models.scratch.modeling import AUTO_CLASSES, CausalMHAForCausalLM, CausalMHAModel
from .ops.attention import infini_attention
from .ops.naive import naive_infini_attention
from .ops.state import InfiniState
from .tools.asking_rows import asking_rows
from .tools.backends import backend_of
from .tools.estimate import estimate
from .tools.inspection import inspect_attention
from .tools.keep_score import fit_keep_score
from .tools.reader import Reader
from .tools.text_rows import text_rows

GPT2InfiniAttention = infini_class(GPT2Attention)
transformers.AutoConfig.register("causal_mha", CausalMHAConfig, exist_ok=True)
transformers.AutoConfig.register("infini_gpt2", InfiniGPT2Config, exist_ok=True)
for auto_class, model in AUTO_CLASSES.items():
    getattr(transformers, auto_class).register(CausalMHAConfig, model, exist_ok=True)
register_lazily(PROBED)

__version__ = "0.1.0"
__all__ = [
    "CausalMHAConfig",
    "CausalMHAForCausalLM",
    "CausalMHAModel",
    "CausalMultiHeadAttention",
    "GPT2InfiniAttention",
]
__all__ += [
    "InfiniCache",
    "InfiniGPT2Config",
    "InfiniState",
    "Reader",
    "asking_rows",
    "backend_of",
    "cache_bytes",
]
__all__ += [
    "estimate",
    "fit_keep_score",
    "infini_attention",
    "inspect_attention",
    "load_adapter",
    "lora_config",
]
__all__ += ["naive_infini_attention", "patch_model", "save_adapter", "text_rows", "unpatch_model"]
