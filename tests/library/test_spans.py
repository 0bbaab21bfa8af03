"""Parts of rows: their losses, and whether greedy decoding gives them, against one pass over each
row."""

import pytest
import torch

from hf_infini.tools.spans import score_spans
from models import gpt2, infini_gpt2, token_ids

MODELS = {"gpt2": gpt2, "infini": lambda: infini_gpt2(position_encoding="segment")}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_spans_are_the_naive_losses(make):
    model, rows = (
        make(),
        [row[:length] for row, length in zip(token_ids(3, 40), (40, 9, 22), strict=True)],
    )
    with torch.no_grad():
        predicted = [
            model(input_ids=row[None], use_cache=False).logits[0].double().log_softmax(-1)
            for row in rows
        ]
    # the last token is then the one that greedy decoding gives
    rows[2][-1] = predicted[2][-2].argmax()
    spans = [(0, 1, 40), (1, 8, 9), (2, 21, 22), (0, 30, 33)]
    for chunk in (7, 100):
        found = score_spans(model, [row.numpy() for row in rows], spans, chunk)
        for (row, first, end), (loss, greedy) in zip(spans, found, strict=True):
            wanted, tokens = predicted[row][first - 1 : end - 1], rows[row][first:end]
            assert loss == pytest.approx(-wanted.gather(1, tokens[:, None]).sum().item(), rel=1e-4)
            assert greedy == wanted.argmax(-1).equal(tokens)
        assert found[2][1] and not found[0][1]


@pytest.mark.parametrize("chunk", (3, 7, 100))
@pytest.mark.parametrize("before", (1, 5, 20))
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_spans_behind_a_cache_are_those_of_the_whole_row(make, before, chunk):
    model, (row,) = make(), token_ids(1, 40)
    spans = [(0, 21, 22), (0, 30, 33), (0, 39, 40)]
    with torch.no_grad():
        cache = model(input_ids=row[None, :before], use_cache=True).past_key_values
    behind = [(0, first - before, end - before) for _, first, end in spans]
    found = score_spans(model, [row[before:]], behind, chunk, cache=cache)
    for (loss, greedy), whole in zip(found, score_spans(model, [row], spans, 100), strict=True):
        assert loss == pytest.approx(whole[0], rel=1e-4) and greedy == whole[1]
