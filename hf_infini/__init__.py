"""hf_infini: Infini-attention for Hugging Face causal language models.

Importing it registers the model types with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`.

This folder holds what models consist of, from `memory` (equations 3 and 4) over `segments` and `attention` to the
`modeling_…` modules. A saved model carries these as they are, so they stay side by side and import each other with one dot.
Beside them are the `naive` reference, `patching`, `configurations`, `inspection` (what each head did with a text), and what
programs import by name: `training` (the Trainer and its groups of parameters), `rows`, `metrics`, `perplexity_metric`,
`lm_eval_model`. Nothing here knows of a command line: what the scripts in recipes/ are made of is beside them.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .attention import infini_attention
from .cache import InfiniCache
from .causal_mha import CausalMultiHeadAttention
from .configuration_causal_mha import CausalMHAConfig
from .configuration_infini_gpt2 import InfiniGPT2Config
from .inspection import inspect_attention
from .modeling_causal_mha import CausalMHAForCausalLM, CausalMHAModel
from .modeling_infini_gpt2 import GPT2InfiniAttention, InfiniGPT2LMHeadModel, InfiniGPT2Model
from .naive import naive_infini_attention
from .patching import patch_model, unpatch_model
from .state import InfiniState

for config, model, language_model in (
    (InfiniGPT2Config, InfiniGPT2Model, InfiniGPT2LMHeadModel),
    (CausalMHAConfig, CausalMHAModel, CausalMHAForCausalLM),
):
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, model, exist_ok=True)
    AutoModelForCausalLM.register(config, language_model, exist_ok=True)

__version__ = "0.1.0"
__all__ = [
    "CausalMHAConfig",
    "CausalMHAForCausalLM",
    "CausalMHAModel",
    "CausalMultiHeadAttention",
    "GPT2InfiniAttention",
    "InfiniCache",
    "InfiniGPT2Config",
    "InfiniGPT2LMHeadModel",
    "InfiniGPT2Model",
    "InfiniState",
    "infini_attention",
    "inspect_attention",
    "naive_infini_attention",
    "patch_model",
    "unpatch_model",
]
