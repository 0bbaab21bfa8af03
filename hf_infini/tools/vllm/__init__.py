"""Patched models in vLLM: a plugin, which vLLM finds where it is installed beside this package.

`register` is the entry point, settings.py says with which settings of vLLM a model runs, models.py
has vLLM's own models around our attention, and pages.py a state as a page of vLLM's cache.
"""

# By `model_type` of the plain model: its class, of the same name in transformers and in vLLM
FAMILIES = {
    "gemma": "GemmaForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def register() -> None:
    """Tells vLLM of the models; every process of vLLM calls it. Importing this package has told
    transformers."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .settings import MemorySettings

    for own in FAMILIES.values():
        name = f"Infini{own}"
        # vLLM imports it when it is asked for
        ModelRegistry.register_model(name, f"{__name__}.models:{name}")
        MODELS_CONFIG_MAP[name] = MemorySettings
