"""torch.compile with the models: one graph, eager's numbers, no compiling again for every token.

What takes most of the time is the generation of code, by "inductor". The backend "eager" runs the graphs as they are: there
the numbers must be eager's, and whether there is one graph is seen as well.
"""

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from decoders import decoder
from hf_infini import InfiniCache, patch_model
from hf_infini.ops.layout.build import segment_layout
from models import causal_mha, infini_gpt2, token_ids

# Fused kernels round in float32 in other places, and add in another order.
TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
MODELS = {
    "gpt2": lambda: infini_gpt2(n_layer=1, position_encoding="segment"),
    "gated_delta": lambda: infini_gpt2(n_layer=1, update_rule="gated_delta", memory_init="learned", segment_length=10),
    "convolution": lambda: infini_gpt2(n_layer=1, memory_conv=2, local_segments=1, position_encoding="rope"),
    "causal_mha": lambda: causal_mha(n_layer=1, attention="infini", segment_length=8, position_encoding="rope"),
    "gemma2": lambda: patch_model(decoder("gemma2", num_hidden_layers=2, **MIXED), segment_length=8, local_segments=1),
}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


def rows(padded: bool, packed: bool) -> dict:
    """Three rows of 30 tokens: padding at both ends, three documents in each, special tokens that no memory takes."""
    ids = token_ids(3, 30)
    ids[:, 4::9] = 0
    inputs = {"input_ids": ids, "labels": ids}
    if padded:
        inputs["attention_mask"] = torch.ones(3, 30, dtype=torch.long)
        inputs["attention_mask"][0, :7] = inputs["attention_mask"][1, 20:] = 0
        inputs["labels"] = ids.masked_fill(inputs["attention_mask"] == 0, -100)
    if packed:
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in (11, 5, 14)]).expand(3, -1).contiguous()
    return inputs


def loss_and_gradients(model, call, inputs) -> tuple[torch.Tensor, dict]:
    model.zero_grad()
    loss = call(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, padded, backend",
    [
        ("gated_delta", True, "eager"),
        ("convolution", True, "eager"),
        ("causal_mha", False, "inductor"),
    ],
)
def test_a_training_step_is_one_graph_with_eagers_loss_and_gradients(name, padded, backend):
    model, inputs = MODELS[name](), rows(padded, packed=False)
    wanted, wanted_gradients = loss_and_gradients(model, model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    loss, gradients = loss_and_gradients(model, compiled, inputs)
    torch.testing.assert_close(loss, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert gradients.keys() == wanted_gradients.keys()
    for key, gradient in gradients.items():
        difference = float((gradient - wanted_gradients[key]).abs().max())
        assert difference <= GRADIENT_TOLERANCE * float(wanted_gradients[key].abs().max()), key


@pytest.mark.slow
def test_any_padding_is_the_same_graph_and_a_batch_of_another_size_is_not():
    compiled = torch.compile(MODELS["gpt2"](), backend="eager")
    graphs = []
    for batch, tokens, padded in ((3, 30, slice(0, 9)), (3, 30, slice(25, 30)), (2, 17, slice(0))):
        inputs = {name: tensor[:batch, :tokens] for name, tensor in rows(padded=False, packed=False).items()}
        inputs["attention_mask"] = torch.ones(batch, tokens, dtype=torch.long)
        inputs["attention_mask"][0, padded] = 0
        compiled(**inputs, use_cache=False).loss.backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 2] and not counters["graph_break"]


@pytest.mark.slow
def test_packed_rows_leave_the_graph_for_the_layout_alone():
    model, inputs = MODELS["gpt2"](), rows(padded=False, packed=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="position_ids can begin any number of documents"):
        torch.compile(model, fullgraph=True, backend="eager")(**inputs)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**inputs, use_cache=False).loss, model(**inputs, use_cache=False).loss)
    assert counters["graph_break"] and all("segment_layout" in reason for reason in counters["graph_break"])


@pytest.mark.slow
@pytest.mark.parametrize("name, batch", [("gated_delta", 2), ("gemma2", 1)])
def test_decoding_is_one_graph_for_all_tokens(name, batch):
    """Over three borders of segments, with rows at different places; the second call may still compile, no later one."""
    model = MODELS[name]()
    ids = token_ids(batch, 40)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, use_cache=False).logits
        cache = InfiniCache(model.config)
        model(ids[:, :14], attention_mask=mask[:, :14], past_key_values=cache, use_cache=True)
        step = torch.compile(model, fullgraph=True, backend="eager")
        for column in range(14, 40):
            seen = mask[:, : column + 1].contiguous()  # as generate() makes it
            inputs = {"attention_mask": seen, "past_key_values": cache, "use_cache": True}
            with torch._dynamo.config.patch(error_on_recompile=column > 15):
                logits = step(ids[:, column : column + 1], **inputs).logits
            torch.testing.assert_close(logits[:, 0], wanted[:, column], rtol=TOLERANCE, atol=TOLERANCE)
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
def test_padded_masks_compile_for_avx2():
    """Of booleans that it pads, torch.compile wrote C++ that is none; other machines are made to write for AVX2."""
    attention_mask, memory_mask = torch.ones(3, 30, dtype=torch.long), torch.arange(90).view(3, 30) % 7 != 0
    attention_mask[0, :7] = attention_mask[1, 20:] = 0

    def written(attention_mask, memory_mask):
        return segment_layout(3, 30, 8, 1, attention_mask=attention_mask, memory_mask=memory_mask).written

    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        compiled = torch.compile(written, fullgraph=True)(attention_mask, memory_mask)
    assert torch.equal(compiled, written(attention_mask, memory_mask))
