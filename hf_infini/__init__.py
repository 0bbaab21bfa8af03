"""hf_infini: Infini-attention for Hugging Face causal language models.

Importing it registers the model types with `AutoConfig`, `AutoModel`, `AutoModelForCausalLM` and the other Auto classes that
load a GPT-2.

The modules of the models go from `memory` (equations 3 to 5) and `window` (equation 2) over `layout` and `attention` to the
`modeling_…` modules. A saved model carries copies of these, so they are all in this folder and import each other with one
dot. The others are the `naive` reference, `patching`, `lora`, `configurations`, `inspection` (what each head did with a
text), and modules to import by name: `training` (the Trainer and its parameter groups), `rows`, `context_parallel` (one text
on several devices), `metrics`, `perplexity_metric` and `lm_eval_model`. The scripts are in recipes/.
"""

import transformers

from . import configuration_infini, families, gate_watch, lookups, lora, modeling_causal_mha
from .attention import infini_attention
from .cache import InfiniCache
from .causal_mha import CausalMultiHeadAttention
from .configuration_causal_mha import CausalMHAConfig
from .configuration_infini_gpt2 import InfiniGPT2Config
from .families import AutoInfiniModelForCausalLM
from .inspection import inspect_attention
from .lora import lora_config
from .memory_adapter import load_adapter, save_adapter
from .modeling_causal_mha import CausalMHAForCausalLM, CausalMHAModel
from .modeling_infini_gpt2 import GPT2InfiniAttention
from .naive import naive_infini_attention
from .patching import patch_model, unpatch_model
from .state import InfiniState

InfiniGPT2Model, InfiniGPT2LMHeadModel, InfiniGPT2DoubleHeadsModel = (
    families.infini_class(getattr(transformers, name)) for name in ("GPT2Model", "GPT2LMHeadModel", "GPT2DoubleHeadsModel")
)
InfiniGPT2ForSequenceClassification, InfiniGPT2ForTokenClassification, InfiniGPT2ForQuestionAnswering = (
    families.infini_class(getattr(transformers, f"GPT2For{task}"))
    for task in ("SequenceClassification", "TokenClassification", "QuestionAnswering")
)
transformers.AutoConfig.register("causal_mha", CausalMHAConfig, exist_ok=True)
transformers.AutoConfig.register("infini_gpt2", InfiniGPT2Config, exist_ok=True)
for auto_class, model in modeling_causal_mha.AUTO_CLASSES.items():
    getattr(transformers, auto_class).register(CausalMHAConfig, model, exist_ok=True)
configuration_infini.register_lazily(families.PROBED)
lookups.LISTENERS += [lora.listen, gate_watch.listen]

__version__ = "0.1.0"
__all__ = [
    "AutoInfiniModelForCausalLM",
    "CausalMHAConfig",
    "CausalMHAForCausalLM",
    "CausalMHAModel",
    "CausalMultiHeadAttention",
    "GPT2InfiniAttention",
    "InfiniCache",
    "InfiniGPT2Config",
    "InfiniGPT2DoubleHeadsModel",
    "InfiniGPT2ForQuestionAnswering",
    "InfiniGPT2ForSequenceClassification",
    "InfiniGPT2ForTokenClassification",
    "InfiniGPT2LMHeadModel",
    "InfiniGPT2Model",
    "InfiniState",
    "infini_attention",
    "inspect_attention",
    "load_adapter",
    "lora_config",
    "naive_infini_attention",
    "patch_model",
    "save_adapter",
    "unpatch_model",
]
