"""output_attentions: an entry for every layer, and weights that the output is computed from."""

import pytest
import torch
from models import infini_gpt2, token_ids


@pytest.mark.parametrize("layers", [[1], [0, 2]])
def test_layers_of_full_attention_need_the_eager_implementation(layers):
    model, ids = infini_gpt2(layers=layers), token_ids(2, 20)
    generation = {"max_new_tokens": 2, "pad_token_id": 0, "return_dict_in_generate": True, "output_attentions": True}
    full = 3 - len(layers)
    message = f"needs the eager implementation for this model's {full} layers of full attention: sdpa computes no weights"
    for call in (lambda: model(ids, output_attentions=True), lambda: model.generate(ids, **generation)):
        with pytest.raises(ValueError, match=f"{message}.*set_attn_implementation"):
            call()
    assert model(ids).attentions is None
    model.set_attn_implementation("eager")

    def shapes(attentions):
        return [tuple(weights.shape) for weights in attentions]

    def wanted(queries, keys):
        return [(2, 4, queries, 8 if layer in layers else keys) for layer in range(3)]

    weights = model(ids, output_attentions=True).attentions
    assert shapes(weights) == wanted(20, 20)
    for layer in weights:
        torch.testing.assert_close(layer.sum(-1), torch.ones(2, 4, 20))  # float32
    first, second = model.generate(ids, **generation).attentions
    assert shapes(first) == wanted(20, 20) and shapes(second) == wanted(1, 21)
