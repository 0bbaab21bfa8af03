"""A causal language model from scratch: pre-norm decoder blocks around
[`CausalMultiHeadAttention`]."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, LlamaForCausalLM, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.gptj.modeling_gptj import GPTJMLP
from transformers.utils.output_capturing import capture_outputs

from ...cache.cache import InfiniCache
from ...compat.cache_name import CACHE, takes_either_name
from ...compat.hub_code import carry_code
from ...ops.positions import sinusoidal_encoding
from ..base import (
    SavedModelMixin,
    begin_call,
    cache_as_it_was,
    check_positions,
    counted_positions,
    tokens_of,
)
from ..generation import MemoryGenerationMixin
from .attention import CausalMultiHeadAttention
from .configuration import CausalMHAConfig


class CausalMHABlock(GradientCheckpointingLayer):
    """`Y = X + MHA(LN(X))`, `Z = Y + FFN(LN(Y))` with GPT-J's FFN; with `attention="none"` only the
    second half. `config`: of the model; `layer_idx`: which of its layers this is, from 0."""

    def __init__(self, config: CausalMHAConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        if config.attention != "none":
            self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
            sizes = (config.n_embd, config.n_embd, config.n_head, config.dropout, config.qkv_bias)
            self.attn = CausalMultiHeadAttention(*sizes, layer_idx=layer_idx, config=config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = GPTJMLP(4 * config.n_embd if config.n_inner is None else config.n_inner, config)
        self.dropout = nn.Dropout(config.dropout)

    @takes_either_name
    def forward(
        self,
        hidden_states: Tensor,
        output_attentions: bool = False,
        *,
        cache: Cache | None = None,
        **visible,
    ) -> Tensor:
        """The layer's output, of the shape of `hidden_states`, `[batch, tokens, n_embd]`; `cache`:
        of the model; `visible`: the attention's other arguments, by name. With `output_attentions`
        the attention computes its weights, which hooks record."""
        if hasattr(self, "attn"):
            output = self.attn(
                self.ln_1(hidden_states),
                cache=cache,
                output_attentions=output_attentions,
                **visible,
            )
            hidden_states = hidden_states + self.dropout(output[0] if output_attentions else output)
        elif cache is not None:
            # A key of one number for each token: caches tell how many tokens they have seen by
            # counting keys
            marks = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
            cache.update(marks, marks, self.layer_idx)
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class CausalMHAPreTrainedModel(SavedModelMixin, PreTrainedModel):
    """What both models share: the configuration, `config`, and the first values of the weights."""

    config: CausalMHAConfig
    config_class = CausalMHAConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["CausalMHABlock"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _input_embed_layer = "wte"
    _can_record_outputs = {"hidden_states": CausalMHABlock, "attentions": CausalMultiHeadAttention}

    def __init__(self, config: CausalMHAConfig):
        super().__init__(config)
        # a memory cannot be cropped, so assisted decoding is refused
        self._is_stateful = bool(config.infini_layers)

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        # What ends a residual branch is smaller: the hidden state adds up 2 · n_layer of them
        # (GPT-2)
        last = getattr(
            module,
            {CausalMultiHeadAttention: "out_proj", GPTJMLP: "fc_out"}.get(type(module), ""),
            None,
        )
        if last is not None:
            init.normal_(
                last.weight, 0.0, self.config.initializer_range / math.sqrt(2 * self.config.n_layer)
            )
        if isinstance(module, CausalMultiHeadAttention):
            module.init_head_parameters()


class CausalMHAModel(CausalMHAPreTrainedModel):
    """Embeddings, decoder blocks and a last norm; see [`CausalMHAConfig`], of which `config` is
    one, for what its heads can be."""

    def __init__(self, config: CausalMHAConfig):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if config.position_encoding == "learned":
            self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(
            CausalMHABlock(config, layer_idx) for layer_idx in range(config.n_layer)
        )
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.post_init()

    @takes_either_name
    @cache_as_it_was
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        memory_mask: Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids, inputs_embeds, cache, use_cache: as of [`InfiniModelMixin`]; without a memory
                with a `DynamicCache`.
            attention_mask: `[batch, past + tokens]`, 1 = real, 0 = padding.
            position_ids: `[batch, tokens]`; without them a row's real tokens are counted. Without
                mask and cache, positions that go back begin a new document that sees nothing of the
                one before (packing).
            output_attentions: whether the layers' weights are among the outputs; `None`: as the
                configuration says.
            memory_mask: as of [`InfiniModelMixin`], with `attention="infini"` only.

        Raises:
            ValueError: a position beyond `n_positions` with learned positions; with a memory, a
                cache or mask of another kind; a memory_mask for a model without memory.
        """
        given = tokens_of(input_ids, inputs_embeds)
        output_attentions = (
            self.config.output_attentions if output_attentions is None else output_attentions
        )
        embeddings = self.wte(given) if inputs_embeds is None else given
        infini, counted = None, position_ids is None and cache is None
        if self.config.attention == "infini":
            masks = {
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "memory_mask": memory_mask,
            }
            first: Any = self.h[0]
            call = (
                embeddings,
                first.attn.window_tables(embeddings),
                cache,
                use_cache,
                output_attentions,
            )
            infini, cache, use_cache = begin_call(self, input_ids, *call, **masks)
            visible: dict[str, Any] = {"infini": infini}
            if position_ids is None:
                position_ids = counted_positions(infini.layouts[self.config.window], cache)
        else:
            if memory_mask is not None:
                raise ValueError(
                    "memory_mask says what is written into a memory, and this model "
                    "has none: leave it out."
                )
            if use_cache is None:
                use_cache = self.config.use_cache and not self.training
            past = 0 if cache is None else cache.get_seq_length()
            mask = self._mask(embeddings, attention_mask, position_ids, cache, past)
            cache = DynamicCache(config=self.config) if cache is None and use_cache else cache
            # by name, as checkpoints of gradients take it away
            visible = {"mask": mask, CACHE: cache}
            if position_ids is None and attention_mask is not None and attention_mask.dim() == 2:
                # How many real tokens of its row came before each
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[
                    :, -embeddings.shape[1] :
                ]
            elif position_ids is None:
                position_ids = torch.arange(
                    past, past + embeddings.shape[1], device=embeddings.device
                ).unsqueeze(0)
        hidden_states = self.drop(self._with_positions(embeddings, position_ids, counted))
        for block in self.h:
            hidden_states = block(
                hidden_states, output_attentions, position_ids=position_ids, **visible
            )
        hidden_states = self.ln_f(hidden_states)
        if infini is not None and infini.cache is not None and isinstance(cache, InfiniCache):
            cache.advance(infini.cache, input_ids, embeddings.shape[1])
        output: dict[str, Any] = {
            "last_hidden_state": hidden_states,
            CACHE: cache if use_cache else None,
        }
        return BaseModelOutputWithPast(**output)

    def _with_positions(self, embeddings: Tensor, position_ids: Tensor, counted: bool) -> Tensor:
        """The token embeddings and what their positions add to them; `counted`: as of
        [`check_positions`]."""
        if self.config.position_encoding == "sinusoidal":
            # Times √n_embd, as in the paper (section 3.4): sines of size 1 would drown embeddings
            # that start near 0
            encoding = sinusoidal_encoding(position_ids, self.config.n_embd)
            return embeddings * self.config.n_embd**0.5 + encoding.to(embeddings.dtype)
        if self.config.position_encoding != "learned":
            return embeddings
        check_positions(position_ids, self.config.n_positions, "train a model", counted)
        return embeddings + self.wpe(position_ids)

    def _mask(
        self, embeddings, attention_mask: Tensor | None, position_ids: Tensor | None, cache, past
    ) -> Tensor | None:
        """Which keys the tokens of this call see: [`CausalMultiHeadAttention`]'s mask."""
        columns = past + embeddings.shape[1]
        if (
            attention_mask is not None
            and attention_mask.dim() == 2
            and attention_mask.shape[1] != columns
        ):
            raise ValueError(
                f"attention_mask must be [batch, {columns}], past + tokens; got "
                f"{list(attention_mask.shape)}."
            )
        if self.config.attention == "none":
            return None
        make_mask = (
            create_causal_mask
            if self.config.sliding_window is None
            else create_sliding_window_causal_mask
        )
        # Without a cache, the mask function finds packed documents by their positions
        mask: Any = make_mask(self.config, embeddings, attention_mask, cache, position_ids)
        # the eager form is added to the scores
        return mask if mask is None or mask.dtype == torch.bool else mask == 0


class CausalMHAForCausalLM(MemoryGenerationMixin, CausalMHAPreTrainedModel, GenerationMixin):
    """[`CausalMHAModel`] of this `config` with a head that gives the next token's logits."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: CausalMHAConfig):
        super().__init__(config)
        self.transformer = CausalMHAModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    # As [`CausalMHAModel`]'s, with labels, logits_to_keep and their outputs as those of a Llama
    forward = takes_either_name(cache_as_it_was(LlamaForCausalLM.forward))

    @property
    def model(self) -> CausalMHAModel:
        """The base model, by the name that Llama's forward has for it."""
        return self.transformer


AUTO_CLASSES = {"AutoModel": CausalMHAModel, "AutoModelForCausalLM": CausalMHAForCausalLM}
carry_code("models.scratch.modeling", **AUTO_CLASSES)
