"""What transformers and other libraries decide by a model's type or class name: the families get what GPT-2 gets."""

import pytest
import torch
from models import causal_mha, gpt2, infini_gpt2, token_ids
from transformers import Trainer, TrainingArguments

from hf_infini import patch_model

FAMILIES = {
    "patched": lambda: patch_model(gpt2(), segment_length=8),
    "infini_gpt2": infini_gpt2,
    "causal_mha": causal_mha,
}


def smoothed_loss(logits, labels, smoothing: float):
    """Cross-entropy against the next token's label, of which `smoothing` is spread over the whole vocabulary."""
    loss = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)
    return loss(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.fixture(params=["gpt2", *FAMILIES])
def model(request):
    return FAMILIES.get(request.param, gpt2)()


def test_smoothed_labels_are_those_of_the_next_token(model, tmp_path):
    options = TrainingArguments(tmp_path, label_smoothing_factor=0.1, use_cpu=True, report_to="none")
    trainer, ids = Trainer(model=model, args=options), token_ids(4, 24)
    with torch.no_grad():
        model.eval()  # making a Trainer turns dropout on
        wanted = smoothed_loss(model(ids).logits, ids, 0.1)
        loss = trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
    # Float32 sums of the same 92 terms in another order
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
