"""What a model expects after each token: inspect_attention's predictions are the model's, and the page has them."""

import pytest
import torch

from browser import needs_browser, visit
from corpora.tokenization import train_bpe
from hf_infini.tools.inspection import inspect_attention
from hf_infini.tools.inspection.labels import token_texts
from hf_infini.tools.inspection.page import inspection_page
from models import gpt2, infini_gpt2, token_ids

TEXT = "A ação do coração é a razão da canção."


@pytest.mark.parametrize("make", [gpt2, infini_gpt2])
def test_predictions_are_the_model_s_own(make):
    bpe, texts = train_bpe([TEXT], 270), [TEXT, "ü e ü"]
    model = make(vocab_size=len(bpe))
    bpe.padding_side = "left"
    inspection = inspect_attention(model, texts, bpe)
    for text, row, labels in zip(texts, inspection.predictions, inspection.texts, strict=True):
        ids = bpe(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            likely = model(ids).logits[0].softmax(-1)
        assert len(row) == len(labels) == len(likely) and row[-1].following is None
        for place, (likeliest, following) in enumerate(row):
            best = likely[place].topk(5)
            assert [text for text, _ in likeliest] == token_texts(bpe, best.indices.tolist())
            # A padded batch adds in another order
            assert [probability for _, probability in likeliest] == pytest.approx(best.values.tolist(), rel=1e-3)
            if following is not None:
                assert following == pytest.approx(likely[place, ids[0, place + 1]].item(), rel=1e-3)
    assert inspect_attention(model.transformer, texts, bpe).predictions is None


@needs_browser
def test_predictions_are_below_the_text(tmp_path):
    inspection = inspect_attention(gpt2(), token_ids(1, 9))
    steps = ["() => moveTo(3, 3)", "() => moveTo(8, 0)"]
    seen = [step["text"] for step in visit(inspection_page(inspection, title="m"), tmp_path, steps, width=390)]
    likeliest, _ = inspection.predictions[0][3]
    assert f"The model expects next: {likeliest[0][0]} {100 * likeliest[0][1]:.1f} %" in seen[0]
    assert f"the text goes on with: {inspection.texts[0][4]} " in seen[0] and "goes on" not in seen[1]
    page = inspection_page(inspect_attention(gpt2().transformer, token_ids(1, 9)), title="m")
    assert "expects" not in visit(page, tmp_path, steps, width=390)[0]["text"]
