"""Small models with random weights, and the token ids they read."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_infini import (
    CausalMHAConfig,
    CausalMHAForCausalLM,
    InfiniGPT2Config,
    InfiniGPT2LMHeadModel,
    naive_infini_attention,
)

FLOAT32 = 1e-4  # of logits up to about 30, through three layers
SIZES = dict(
    vocab_size=89, n_positions=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
)
# The position encodings of the from-scratch model, and what its tokens see
POSITIONS = ("learned", "sinusoidal", "relative_key", "t5", "alibi", "rope", "none")
REACHES = {
    "global": {},
    "local": {"attention": "local", "sliding_window": 7},
    "infini": {"attention": "infini", "segment_length": 8},
    "none": {"attention": "none"},
}


def gpt2(seed=0, **options) -> GPT2LMHeadModel:
    """A GPT-2 in evaluation mode whose attention is far from uniform: ten times the usual scale of
    weights."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(**SIZES | {"initializer_range": 0.2} | options)).eval()


def infini_gpt2(seed=0, **options) -> InfiniGPT2LMHeadModel:
    """The same with Infini-attention; gates spread from −1 to 1 so that local attention and memory
    both matter."""
    torch.manual_seed(seed)
    options = SIZES | {"initializer_range": 0.2, "segment_length": 8} | options
    model = InfiniGPT2LMHeadModel(InfiniGPT2Config(**options)).eval()
    for layer in model.config.infini_layers if model.config.update_rule != "none" else ():
        model.transformer.h[layer].attn.gate.weight.data.copy_(torch.linspace(-1, 1, 4))
    return with_rates(model)


def causal_mha(seed=0, **options) -> CausalMHAForCausalLM:
    """A model from scratch of the same sizes, its tables, score weights and convolutions far from
    their small starts."""
    torch.manual_seed(seed)
    encoding = options.get("position_encoding")
    small = {"max_distance": 12} if encoding in ("relative_key", "t5") else {}
    small |= {"num_buckets": 8} if encoding == "t5" else {}
    options = {"initializer_range": 0.2} | small | options
    model = CausalMHAForCausalLM(CausalMHAConfig(**SIZES | options)).eval()
    for block in model.transformer.h:
        for name, parameter in getattr(block, "attn", model.lm_head).named_parameters():
            if name in ("gate.weight", "score_weight", "score_vector"):
                parameter.data.normal_()
            if name in ("memory_conv", "memory_write"):
                parameter.data.normal_(std=0.3)
    return with_rates(model)


def with_rates(model):
    """The model with rates of the gated delta rule that differ from token to token, so that
    memories forget."""
    for name, parameter in model.named_parameters():
        if name.endswith("memory_rates"):
            parameter.data.normal_(std=0.3)
        if name.endswith("memory_rates_bias"):
            parameter.data.copy_(torch.tensor([0.0, 3.0]))
    return model


class RowsOf:
    """The part of a dataset that a dilution uses, around `[rows, tokens]`."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index]}


def token_ids(batch: int, tokens: int, seed=0) -> torch.Tensor:
    """`[batch, tokens]`, never 0, the end-of-text id."""
    return torch.randint(1, 89, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[torch.Tensor]) -> dict:
    width = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, width - row.shape[1] :] = row[0]
        mask[number, width - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, new=20, **options):
    """Always `new` tokens: rows that ended early would be compared on padding."""
    options = {
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
        "pad_token_id": 0,
    } | options
    with torch.no_grad():
        return model.generate(**options)


@torch.no_grad()
def in_calls(model, ids, edges, cache=None, **columns) -> torch.Tensor:
    """Logits of cached calls between the edges, of which the first is 0 for a new cache; `columns`
    are cut likewise."""
    logits = []
    for begin, end in zip(edges, edges[1:], strict=False):
        parts = {name: tensor[:, begin:end] for name, tensor in columns.items()}
        output = model(ids[:, begin:end], past_key_values=cache, use_cache=True, **parts)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, 1)


def naive_attend(call):
    """Stands in for the fast function inside a model; covers calls without padding or packing."""
    given = call.layout.window._asdict()
    of_rule = ("update_rule", "feature_map") if call.rule else ()
    given |= {"update_rule": "none"} | {name: getattr(call.rule, name) for name in of_rule}
    given |= {
        name: getattr(call.softmax, name) for name in ("rotary", "turn", "scaling", "softcap")
    }
    given |= {"log_weight": call.tokens.log_weight, "state": call.state, "return_state": True}
    return *naive_infini_attention(call.query, *call.tokens[:2], call.gate, **given), None
