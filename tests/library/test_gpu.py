"""The same on a GPU as on a CPU. Left out where there is none."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given

from cases import assert_equals_reference, assert_same_gradients, cut_cases, examples, random_state
from hf_infini import InfiniCache, infini_attention
from hf_infini.ops.window import Rotary
from models import causal_mha, infini_gpt2, token_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
RULES = ("linear", "delta", "gated_delta")
FLOAT64 = 1e-9  # rounding: as between two ways on a CPU
FLOAT32 = 1e-4  # of logits up to about 30, through three layers; of gradients, in other orders


def moved(value, device):
    """Tensors, and what holds tensors, on another device."""
    if isinstance(value, Rotary):
        return Rotary(tuple(table.to(device) for table in value.tables), value.turn)
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    return value.to(device) if torch.is_tensor(value) else value


def moved_state(state, device):
    return replace(state, **{field.name: moved(getattr(state, field.name), device) for field in fields(state)})


def attention_on_gpu(*tensors, state=None, **options):
    """[`infini_attention`] of tensors on the CPU, with results there."""
    options = {name: moved(option, "cuda") for name, option in options.items()}
    state = None if state is None else moved_state(state, "cuda")
    output, state = infini_attention(*moved(tensors, "cuda"), state=state, **options)
    return output.cpu(), moved_state(state, "cpu")


@examples(40)
@given(cut_cases())
def test_attention_is_the_naive_reference_however_the_input_is_cut(cut):
    case, cuts = cut
    assert_equals_reference(case, attention_on_gpu, FLOAT64, cuts, random_state(case, 0))


MODELS = {rule: lambda rule=rule: infini_gpt2(update_rule=rule, memory_conv=3) for rule in RULES}
MODELS["local"] = lambda: causal_mha(attention="local", sliding_window=7)
MODELS["alibi"] = lambda: causal_mha(position_encoding="alibi")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_same_logits_gradients_and_cached_tokens(name):
    model, ids = MODELS[name](), token_ids(3, 45)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    labels = ids.masked_fill(mask == 0, -100)

    def results(device):
        placed = model.to(device)
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        placed.zero_grad()
        found = placed(**inputs, labels=labels.to(device))
        found.loss.backward()
        options = {"max_new_tokens": 15, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        written = placed.generate(**inputs, **options)
        gradient = [parameter.grad.cpu().clone() for parameter in placed.parameters()]
        return found.logits.detach().cpu()[mask.bool()], written.sequences.cpu(), torch.stack(written.logits).cpu(), gradient

    wanted, sequences, scores, gradient = results("cpu")
    logits, found_sequences, found_scores, found_gradient = results("cuda")
    torch.testing.assert_close(logits, wanted, rtol=FLOAT32, atol=FLOAT32)
    assert torch.equal(found_sequences, sequences)
    torch.testing.assert_close(found_scores, scores, rtol=FLOAT32, atol=FLOAT32)
    assert_same_gradients(found_gradient, gradient, FLOAT32)


def test_a_memory_file_of_one_device_goes_on_on_the_other(tmp_path):
    model, ids = infini_gpt2(), token_ids(1, 45)
    with torch.no_grad():
        wanted = model(ids).logits[:, 30:]
        for here, there in (("cpu", "cuda"), ("cuda", "cpu")):
            cache = model.to(here)(ids[:, :30].to(here), use_cache=True).past_key_values
            cache.save_pretrained(tmp_path / f"{here}.safetensors", model)
            cache = InfiniCache.from_pretrained(tmp_path / f"{here}.safetensors", model.to(there))
            logits = model(ids[:, 30:].to(there), past_key_values=cache).logits.cpu()
            torch.testing.assert_close(logits, wanted, rtol=FLOAT32, atol=FLOAT32)
