"""The settings of vLLM with which a model with a memory runs."""

import logging
from typing import Any

from vllm.model_executor.models.config import MambaModelConfig, VerifyAndUpdateConfig

from ...options import refuse

logger = logging.getLogger(__name__)


class MemorySettings(VerifyAndUpdateConfig):
    """Refuses what would change a result, and leaves out what only makes others faster."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Called by vLLM before a model is loaded. `vllm_config`: all of its settings, changed in
        place. ValueError for what a model with a memory cannot run with."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        cache = vllm_config.cache_config
        refuse(
            (
                parallel.world_size > 1,
                "a model of hf_infini runs on one device in vLLM, and this is "
                f"tensor_parallel_size={parallel.tensor_parallel_size} and "
                f"pipeline_parallel_size={parallel.pipeline_parallel_size}: leave both at 1; for "
                "several devices start one server on each, or use data_parallel_size",
            ),
            (
                model.quantization is not None,
                f"a model of hf_infini has plain weights in vLLM, and this is quantization="
                f"{model.quantization!r}: leave it out, and give dtype='bfloat16' to save memory",
            ),
            (
                vllm_config.lora_config is not None,
                "a model of hf_infini takes no LoRA in vLLM: merge the adapter into the weights "
                "(merge_and_unload of PEFT), save the model, and leave out enable_lora",
            ),
            (
                vllm_config.speculative_config is not None,
                "a memory cannot be cropped after tokens that were guessed and refused: leave out "
                "speculative_config",
            ),
            (
                vllm_config.kv_transfer_config is not None,
                "the states of a model of hf_infini are not sent between servers: leave out "
                "kv_transfer_config",
            ),
        )
        off = []
        if cache.enable_prefix_caching:
            cache.enable_prefix_caching = False
            off.append("prefix caching")
        if not model.enforce_eager:
            model.enforce_eager = True
            off.append("torch.compile and CUDA graphs")
        if off:
            logger.warning("%s switched off: a model of hf_infini runs without.", ", ".join(off))
        # One page per request and layer. vLLM does so by itself only where some layer is of another
        # kind than full attention.
        MambaModelConfig.verify_and_update_config(vllm_config)
