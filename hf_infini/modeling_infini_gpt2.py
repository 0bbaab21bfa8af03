"""GPT-2 whose attention layers read and write a compressive memory."""

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2LMHeadModel, GPT2Model, GPT2PreTrainedModel
from transformers.utils.output_capturing import capture_outputs

from .cache import InfiniCache, StatesOfCall
from .configuration_infini_gpt2 import InfiniGPT2Config
from .generation import MemoryGenerationMixin
from .hub_code import HubModelMixin
from .layout import Layout
from .memory_layer import MemoryLayerMixin, rope
from .modeling_common import (
    InitializationMixin,
    check_inputs,
    check_positions,
    checkpoints_gradients,
    counted_positions,
    full_attention_mask,
    layout_of_call,
    memory_cache,
    memory_mask_of,
)
from .positions import Rotary
from .window import Softmax


class GPT2InfiniAttention(MemoryLayerMixin, GPT2Attention):
    """GPT-2's attention over segments, with a memory of everything before the local window.

    The projections are GPT-2's; [`MemoryLayerMixin`] describes the new parameters.

    GPT-2 adds its positions to the hidden state, so the memory stores them too; with `position_encoding="rope"` only the
    window has positions.
    """

    def __init__(self, config: InfiniGPT2Config, layer_idx: int | None = None):
        super().__init__(config, layer_idx=layer_idx)
        self.add_memory_parameters(self.embed_dim)
        self.init_memory_parameters()

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
        layout: Layout | None = None,
        position_ids: Tensor | None = None,
        rotary: Rotary | None = None,
        states: StatesOfCall | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """As GPT-2's attention.

        Args:
            hidden_states: `[batch, tokens, width]`.
            past_key_values, attention_mask, layout, position_ids, states: as [`MemoryLayerMixin.begin`] takes them.
            rotary: what the model made for all layers, with `position_encoding="rope"`; `None`: it is made here.

        Returns:
            The output `[batch, tokens, width]`, and, with `output_attentions` or the eager implementation, the local weights
            `[batch, heads, tokens, sink_tokens + (local_segments + 1) * segment_length]`: column `c` is place `c` of the
            query's window, in which the sinks come first and the query's own segment last. Padding has zeros.
        """
        if encoder_hidden_states is not None:
            raise ValueError("GPT2InfiniAttention is causal self-attention; cross-attention is not supported.")
        call = self.begin(
            hidden_states,
            layout=layout,
            states=states,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
        )
        query, key, value = self.project(call.hidden_states)
        softmax = self.window_softmax(query, rotary, bool(output_attentions))
        output, weights = self.attend_with_memory(call, query, key, value, softmax, softmax.written_out)
        merged = output.transpose(1, 2).flatten(2).contiguous()
        return self.resid_dropout(self.c_proj(merged)), weights

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `[batch, tokens, width]`, `[batch, heads, tokens, head_dim]` each."""
        parts = self.c_attn(hidden_states).split(self.split_size, dim=2)
        return tuple(part.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for part in parts)

    def window_softmax(self, query: Tensor, rotary: Rotary | None = None, return_weights: bool = False) -> Softmax:
        """How this layer's windows are computed; arguments as of `forward`."""
        if rotary is None and self.config.position_encoding == "rope":
            rotary = rope(self.config.window, self.head_dim, query)
        eager = self.config._attn_implementation == "eager"
        upcast = eager and self.reorder_and_upcast_attn
        dropout = self.attn_dropout.p if self.training else 0.0
        return Softmax(self.scaling, dropout, written_out=return_weights or eager, upcast=upcast, rotary=rotary)


class InfiniGPT2PreTrainedModel(HubModelMixin, InitializationMixin, GPT2PreTrainedModel):
    """What both models share: configuration, initialisation, and what generation may not do with a memory."""

    config: InfiniGPT2Config
    config_class = InfiniGPT2Config
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False
    _is_stateful = True  # a memory cannot be cropped, so assisted decoding is refused

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, GPT2InfiniAttention):
            module.init_memory_parameters()


class InfiniGPT2Model(InfiniGPT2PreTrainedModel, GPT2Model):
    """`GPT2Model` with [`GPT2InfiniAttention`] in the layers that the configuration names."""

    def __init__(self, config: InfiniGPT2Config):
        super().__init__(config)
        for layer in config.infini_layers:
            self.h[layer].attn = GPT2InfiniAttention(config, layer_idx=layer)
        if config.position_encoding == "rope":
            self.wpe = None
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: InfiniCache | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        max_documents: int | None = None,
        memory_mask: Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """As `GPT2Model.forward`, with the same shapes, and these differences:

        Args:
            past_key_values: an [`InfiniCache`]; made if `use_cache` is set and none is given. Gradients go through it from
                call to call, also with gradient checkpointing, unless some layers have full attention.
            use_cache: `None`: as the configuration says, but not in training with gradient checkpointing.
            attention_mask: `[batch, tokens]` or `[batch, past + tokens]`, 1 = real. A padded token is in no segment and no
                memory, wherever it is in the row.
            position_ids: `[batch, tokens]`; where they go back, a new document begins with an empty memory. Without them a
                row's real tokens are counted.
            max_documents: how many documents a row holds at most, so that packed rows compile into one graph:
                [`segment_layout`].
            memory_mask: `[batch, tokens]` of this call, 0 = the token is seen inside the window but not written into the
                memory. With `mask_special_tokens`, special tokens are left out as well if input_ids are given. With
                inputs_embeds the model cannot know which tokens are special, and without a memory_mask all are written.

        Raises:
            ValueError: a position beyond `n_positions` with learned positions; a cache or mask of another kind;
                `output_attentions` of layers with full attention that are not computed by the eager implementation.
        """
        output_attentions = kwargs.pop("output_attentions", None)
        kwargs.pop("output_hidden_states", None)
        full_layers = self.config.n_layer - len(self.config.infini_layers)
        if output_attentions and full_layers and self.config._attn_implementation != "eager":
            raise ValueError(
                f"output_attentions=True needs the eager implementation for this model's {full_layers} layers of full "
                f"attention: {self.config._attn_implementation} computes no weights there. Load the model with "
                "attn_implementation='eager', or call model.set_attn_implementation('eager')."
            )
        if encoder_hidden_states is not None or encoder_attention_mask is not None:
            raise ValueError("an infini_gpt2 model has no cross-attention: encoder inputs are not supported.")
        check_inputs(input_ids, inputs_embeds)
        rows = None
        if input_ids is not None and input_ids.dim() == 3:  # [batch, choices, tokens], of a GPT2DoubleHeadsModel
            rows = input_ids.shape[:2]
            flat = (
                x if x is None else x.flatten(0, 1)
                for x in (input_ids, attention_mask, token_type_ids, position_ids, memory_mask)
            )
            input_ids, attention_mask, token_type_ids, position_ids, memory_mask = flat
        memory_mask = memory_mask_of(self.config, input_ids, inputs_embeds, memory_mask)
        if inputs_embeds is None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
            inputs_embeds = self.wte(input_ids)
        batch, tokens = inputs_embeds.shape[:2]
        if use_cache is None:
            use_cache = self.config.use_cache and not checkpoints_gradients(self)
        past_key_values = memory_cache(self, past_key_values, use_cache, batch)
        states = None if past_key_values is None else past_key_values.states()
        masks = (attention_mask, position_ids, memory_mask)
        layout = layout_of_call(self.config, inputs_embeds, *masks, past_key_values, max_documents)
        hidden_states = inputs_embeds
        if self.wpe is not None:
            hidden_states = hidden_states + self.wpe(self._embedded_positions(layout, position_ids, past_key_values))
        if token_type_ids is not None:
            hidden_states = hidden_states + self.wte(token_type_ids)
        hidden_states = self.drop(hidden_states)
        rotary = None
        if self.config.position_encoding == "rope":
            rotary = rope(self.config.window, self.config.n_embd // self.config.n_head, hidden_states)
        full_mask = None
        if full_layers:
            full_mask = self._full_attention_mask(layout, tokens, past_key_values, states, hidden_states.dtype)
        for block in self.h:
            hidden_states = block(
                hidden_states,
                past_key_values,
                full_mask,
                layout=layout,
                rotary=rotary,
                states=states,
                output_attentions=output_attentions,
                **kwargs,
            )
        if past_key_values is not None:
            past_key_values.advance(states, input_ids, layout, tokens)
        hidden_states = self.ln_f(hidden_states)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states if rows is None else hidden_states.unflatten(0, rows),
            past_key_values=past_key_values if use_cache else None,
        )

    def _embedded_positions(self, layout, position_ids: Tensor | None, cache: InfiniCache | None) -> Tensor:
        """Which rows of the position embedding the tokens take, `[batch or 1, tokens]`."""
        if self.config.position_encoding == "segment":
            return layout.positions % self.config.tokens_per_segment
        positions = counted_positions(layout, cache) if position_ids is None else position_ids
        remedy = (
            "For texts of any length train a model with position_encoding='rope', or pass position_encoding='segment' to "
            "patch_model() or from_pretrained() and fine-tune briefly; or shorten the input."
        )
        check_positions(positions, self.config.n_positions, "learned", remedy)
        return positions

    def _full_attention_mask(self, layout, tokens, cache, states, dtype) -> Tensor | None:
        past = 0 if cache is None else cache.get_seq_length()
        mask, documents = full_attention_mask(layout, tokens, past, None if states is None else states.documents)
        if states is not None:
            states.documents = documents
        if self.config._attn_implementation != "eager":
            return mask
        if mask is None:
            mask = torch.ones(tokens, past + tokens, dtype=torch.bool, device=layout.tokens_seen.device).tril(past)
            mask = mask[None, None]
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


class InfiniGPT2LMHeadModel(InfiniGPT2PreTrainedModel, MemoryGenerationMixin, GPT2LMHeadModel):
    """`GPT2LMHeadModel` on an [`InfiniGPT2Model`].

    `from_pretrained` also takes a plain GPT-2 checkpoint with the memory's options, `segment_length=…` and so on: the gates
    are then initialised as `gate_init` says.
    """

    # transformers looks for a loss by the class's name, finds none, and says so: a warning breaks a graph of torch.compile
    _loss_function = staticmethod(ForCausalLMLoss)

    def __init__(self, config: InfiniGPT2Config):
        super(GPT2LMHeadModel, self).__init__(config)  # past GPT2LMHeadModel's, which would build a plain GPT2Model
        self.transformer = InfiniGPT2Model(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()
