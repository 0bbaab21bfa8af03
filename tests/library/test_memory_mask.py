"""memory_mask of the models: tokens that are seen and never written, with ids and with
embeddings."""

import pytest
import torch

from hf_infini import InfiniCache
from models import causal_mha, infini_gpt2, token_ids

MODELS = [
    (
        infini_gpt2,
        {"layers": [1], "position_encoding": "rope", "memory_conv": 2, "update_rule": "delta"},
    ),
    (
        causal_mha,
        {
            "attention": "infini",
            "segment_length": 8,
            "position_encoding": "rope",
            "local_segments": 1,
        },
    ),
    (
        infini_gpt2,
        {
            "update_rule": "gated_delta",
            "local_segments": 1,
            "sink_tokens": 2,
            "position_encoding": "rope",
        },
    ),
]
all_models = pytest.mark.parametrize(("make", "options"), MODELS)
FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}  # logits up to about 30, through three layers


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def special_places():
    """Ids with the end-of-text id, 0, at some places, and the mask that leaves these out."""
    ids = token_ids(2, 40)
    ids[0, [3, 9, 17]] = ids[1, [1, 20]] = 0
    return ids, ids != 0


@all_models
def test_embeddings_with_a_mask_are_ids_with_special_tokens(make, options):
    model = make(**options)
    ids, mask = special_places()
    wanted = model(ids).logits
    embeddings = model.transformer.wte(ids)
    # all are written
    assert not torch.allclose(model(inputs_embeds=embeddings).logits, wanted, **FLOAT32)
    for given in (mask, mask.long()):
        torch.testing.assert_close(
            model(inputs_embeds=embeddings, memory_mask=given).logits, wanted, **FLOAT32
        )
        base = model.transformer(inputs_embeds=embeddings, memory_mask=given).last_hidden_state
        torch.testing.assert_close(model.lm_head(base), wanted, **FLOAT32)
    parts, cache = [], InfiniCache(model.config)
    for begin, end in ((0, 9), (9, 10), (10, 31), (31, 40)):  # each call has its own columns
        call = {"memory_mask": mask[:, begin:end], "past_key_values": cache}
        parts.append(model(inputs_embeds=embeddings[:, begin:end], **call).logits)
    torch.testing.assert_close(torch.cat(parts, 1), wanted, **FLOAT32)


@all_models
def test_with_ids_both_masks_apply(make, options):
    model = make(**options)
    ids, mask = special_places()
    own = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.6
    both = model(ids, memory_mask=own).logits
    assert not torch.allclose(both, model(ids).logits, **FLOAT32)
    model.config.mask_special_tokens = False
    torch.testing.assert_close(model(ids, memory_mask=own & mask).logits, both, **FLOAT32)
    assert not torch.allclose(model(ids, memory_mask=own).logits, both, **FLOAT32)


@all_models
def test_embeddings_without_a_mask_are_all_written(make, options):
    model, ids = make(**options), special_places()[0]
    embeddings, length = model.transformer.wte(ids), {"max_new_tokens": 4, "min_new_tokens": 4}
    generated = model.generate(inputs_embeds=embeddings, **length, do_sample=False, pad_token_id=0)
    model.config.mask_special_tokens = False
    wanted = model.generate(ids, **length, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, wanted[:, 40:])


def test_masks_that_do_not_fit_are_refused():
    ids = token_ids(2, 12)
    for make, options in MODELS:
        model = make(**options)
        for wrong in (torch.ones(2, 13), torch.ones(12), torch.ones(1, 12)):
            with pytest.raises(
                ValueError, match=r"memory_mask must be \[batch, tokens\] = \[2, 12\], got"
            ):
                model(ids, memory_mask=wrong)
        # which generate() would have to make longer
        with pytest.raises(ValueError, match="memory_mask"):
            model.generate(ids, memory_mask=torch.ones(2, 12), max_new_tokens=3, pad_token_id=0)
    with pytest.raises(
        ValueError, match="memory_mask says what is written into a memory, and this model has none"
    ):
        causal_mha()(ids, memory_mask=torch.ones(2, 12))
