"""What must hold exactly, for random configurations: hypothesis draws the model, its memory, the
batch and how it is cut.

Ten examples of each property; see `examples` in tests/helpers/cases.py for more.
"""

import copy
import tempfile
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from cases import examples
from decoders import decoder
from hf_infini import InfiniCache, patch_model, unpatch_model
from hf_infini.ops.rules import RULES
from hf_infini.options import UPDATE_RULES
from models import causal_mha, gpt2

# Of the largest number that is compared. Sums in another order round differently: float64 leaves
# what is below any mistake. In float32 the delta rule and exponential features can lose three
# digits more, over three layers.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
FAMILIES = ("gpt2", "causal_mha", "llama", "qwen2", "gpt_neox", "gemma2")


@st.composite
def memories(draw, layers: int, family: str) -> dict:
    """Options of a memory that go together."""
    options = {"segment_length": draw(st.integers(1, 9))}
    options["update_rule"] = draw(st.sampled_from(UPDATE_RULES))
    rule = RULES.get(options["update_rule"])
    if rule:
        options["feature_map"] = draw(st.sampled_from(["elu", "exp"]))
        options["gate_init"] = draw(st.floats(-4, 4, width=32))
    options["local_segments"] = draw(st.integers(0, 2))
    options["sink_tokens"] = draw(st.integers(0, min(3, options["segment_length"] - 1)))
    options["memory_conv"] = draw(st.integers(0, 4))
    options["mask_special_tokens"] = draw(st.booleans())
    if rule and rule.normalised and options["feature_map"] != "elu":
        options["memory_write"] = draw(st.sampled_from(["equal", "learned"]))
    if family != "causal_mha":
        options["layers"] = draw(
            st.none() | st.lists(st.integers(0, layers - 1), min_size=1, unique=True)
        )
    if family == "gpt2":
        options["position_encoding"] = draw(st.sampled_from(["learned", "segment", "rope"]))
    return options


@st.composite
def plain_models(draw, families=FAMILIES):
    """A model without memory (or what makes one from scratch), and its family."""
    family, layers = draw(st.sampled_from(families)), draw(st.integers(1, 3))
    heads, groups, seed = (
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2])),
        draw(st.integers(0, 3)),
    )
    if family in ("gpt2", "causal_mha"):
        sizes = {"n_layer": layers, "n_head": 2 * heads, "n_embd": 16, "seed": seed}
        return family, layers, sizes if family == "causal_mha" else gpt2(**sizes)
    sizes = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads * groups,
        "num_key_value_heads": heads,
    }
    sizes |= {"hidden_size": 8 * heads * groups, "vocab_size": 89}
    if family == "gemma2":
        sizes["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"][
            -layers:
        ]
        if "full_attention" not in sizes["layer_types"]:
            sizes["layer_types"] = ["full_attention"]
    return family, layers, decoder(family, **sizes)


@st.composite
def infini_models(draw):
    family, layers, plain = draw(plain_models())
    options, dtype = (
        draw(memories(layers, family)),
        draw(st.sampled_from([torch.float64, torch.float32])),
    )
    if family == "causal_mha":
        encoding = draw(st.sampled_from(["learned", "sinusoidal", "rope", "none"]))
        score = draw(st.sampled_from(["scaled_dot", "dot"]))
        widths = {name: draw(st.sampled_from([None, 2, 6])) for name in ("head_dim", "value_dim")}
        model = causal_mha(
            **plain,
            **options,
            **widths,
            attention="infini",
            position_encoding=encoding,
            score=score,
        )
    else:
        model = patch_model(plain, **options)
    noise = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("gate.weight", "memory_conv", "memory_write", "memory_rates")):
            # far from the start at zero
            parameter.data += 0.5 * torch.randn(parameter.shape, generator=noise)
    return model.to(dtype)


@st.composite
def batches(draw):
    """Ids `[batch, tokens]`, 0 (which ends a text) among them; a mask or positions that pack
    documents, or neither; and where they are cut."""
    batch, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    ids = torch.randint(0, 89, (batch, tokens), generator=numbers)
    kind, mask, positions = (
        draw(st.sampled_from(["plain", "left", "anywhere", "packed"])),
        None,
        None,
    )
    if kind == "left":
        begins = torch.randint(0, tokens, (batch, 1), generator=numbers)
        mask = (torch.arange(tokens) >= begins).long()
    if kind == "anywhere":
        mask = (torch.rand(batch, tokens, generator=numbers) < 0.7).long()
    if kind == "packed":
        starts, columns = (
            torch.rand(batch, tokens, generator=numbers) < 0.15,
            torch.arange(tokens).expand(batch, tokens),
        )
        positions = columns - torch.where(starts, columns, 0).cummax(1).values
    cuts = (
        draw(st.lists(st.integers(1, max(1, tokens - 1)), max_size=4, unique=True))
        if tokens > 1
        else []
    )
    return ids, mask, positions, sorted(cuts)


@torch.no_grad()
def logits(model, batch, cuts, cache=None):
    """Of cached calls between the cuts."""
    ids, mask, positions, _ = batch
    edges, found = [0, *cuts, ids.shape[1]], []
    for begin, end in zip(edges, edges[1:], strict=False):
        options = {} if mask is None else {"attention_mask": mask[:, :end]}
        options |= {} if positions is None else {"position_ids": positions[:, begin:end]}
        output = model(ids[:, begin:end], past_key_values=cache, use_cache=True, **options)
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, 1), cache


def assert_close(found, wanted, batch, model) -> None:
    """Where the tokens are real."""
    kept = model.config.num_hidden_layers - len(model.config.infini_layers)
    # Layers with their own attention have a softmax in float32, if they do it by themselves (Gemma
    # 2)
    dtype = torch.float32 if kept and model.config._attn_implementation == "eager" else model.dtype
    mask = batch[1]
    real = torch.ones_like(batch[0], dtype=torch.bool) if mask is None else mask.bool()
    if real.any():
        scale = wanted[real].abs().max()
        assert wanted[real].isfinite().all()
        assert (found[real] - wanted[real]).abs().max() <= TOLERANCE[dtype] * max(1.0, scale)


@examples(10)
@given(infini_models(), batches())
def test_one_pass_chunks_and_single_steps_agree(model, batch):
    ids, _, _, cuts = batch
    wanted, _ = logits(model, batch, [])
    for places in (cuts, range(1, ids.shape[1])):
        found, _ = logits(model, batch, places)
        assert_close(found, wanted, batch, model)


@examples(10)
@given(infini_models(), batches())
def test_saved_and_loaded_is_the_same_bit_for_bit(model, batch):
    """Twice: transformers computes what it does not save, such as a factor of embeddings, in the
    dtype of loading."""
    once = saved_and_loaded(model)
    twice = saved_and_loaded(once)
    assert type(once) is type(twice) is type(model) and once.dtype == model.dtype
    assert once.config.to_json_string() == twice.config.to_json_string()
    named = dict(twice.named_parameters())
    assert all(torch.equal(parameter, named[name]) for name, parameter in model.named_parameters())
    wanted, cache = logits(once, batch, batch[3])
    assert torch.equal(logits(twice, batch, batch[3])[0], wanted)
    with tempfile.TemporaryDirectory() as folder:
        cache.save_pretrained(f"{folder}/memory", once)
        memory = InfiniCache.from_pretrained(f"{folder}/memory", twice)
        memory.save_pretrained(f"{folder}/again", twice)
        assert Path(folder, "again").read_bytes() == Path(folder, "memory").read_bytes()
    # positions go on to 60, of 64
    if batch[1] is None and batch[2] is None and batch[0].shape[1] < 30:
        more = (batch[0], None, None, [])
        assert_close(
            logits(twice, more, [], memory)[0], logits(once, more, [], cache)[0], more, once
        )


def saved_and_loaded(model):
    """A copy, because torch rounds a product of one token otherwise where tensors are as a file has
    them, not aligned."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return copy.deepcopy(AutoModelForCausalLM.from_pretrained(folder))


@examples(10)
@given(
    plain_models(families=tuple(name for name in FAMILIES if name != "causal_mha")),
    batches(),
    st.data(),
)
def test_patched_and_unpatched_is_the_same_bit_for_bit(made, batch, data):
    family, layers, model = made
    ids, config = batch[0], copy.deepcopy(model.config)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        wanted = model(ids).logits
        patch_model(model, **data.draw(memories(layers, family)))
        model(ids)
        unpatch_model(model)
        assert torch.equal(model(ids).logits, wanted)
    assert type(model.config) is type(config) and model.config.to_dict() == config.to_dict()
    assert tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
