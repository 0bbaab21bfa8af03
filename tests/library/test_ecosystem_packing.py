"""TRL's SFTTrainer with packing: documents that share a row are as far apart as if each were
alone."""

import pytest
import torch

from corpora.tokenization import build_character_tokenizer
from models import causal_mha, infini_gpt2

trl = pytest.importorskip("trl", reason="pip install trl")
from datasets import Dataset  # noqa: E402

TEXTS = [
    "o gato sobe no tapete",
    "a casa",
    "x",
    "o rato roeu a roupa do rei de roma",
    "bem",
    "dias de sol",
]
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
KINDS = {
    "segment": dict(position_encoding="segment", **NO_DROPOUT),
    "gated_delta": dict(
        update_rule="gated_delta", memory_conv=3, position_encoding="rope", **NO_DROPOUT
    ),
    "mixed": dict(layers=[1], **NO_DROPOUT),  # full attention in the other layers
    "causal_mha": dict(attention="infini", segment_length=8, dropout=0.0),
}
tokenizer = build_character_tokenizer(TEXTS)


def sft_trainer(kind: str, folder, texts: list[str], **options) -> "trl.SFTTrainer":
    ids = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    make = causal_mha if kind == "causal_mha" else infini_gpt2
    model = make(vocab_size=len(tokenizer), **KINDS[kind], **ids)
    arguments = trl.SFTConfig(
        str(folder),
        max_length=48,
        per_device_train_batch_size=8,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        max_steps=1,
        **options,
    )
    rows = Dataset.from_dict({"text": texts})
    return trl.SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer)


@torch.no_grad()
def token_losses(model, ids: list[int]) -> torch.Tensor:
    """Of one document alone, plainly by the model: a number for each token but the first."""
    ids = torch.tensor([ids])
    return torch.nn.functional.cross_entropy(
        model.eval()(ids, use_cache=False).logits[0, :-1], ids[0, 1:], reduction="none"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_rows_loss_is_that_of_its_documents_alone(kind, tmp_path):
    trainer = sft_trainer(kind, tmp_path, TEXTS, packing=True)
    lengths = trainer.train_dataset["seq_lengths"]
    assert len(lengths) < len(TEXTS) and max(map(len, lengths)) > 2  # rows of several documents
    documents = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in TEXTS]
    assert sorted(length for row in lengths for length in row) == sorted(map(len, documents))
    alone = torch.cat([token_losses(trainer.model, ids) for ids in documents]).mean()
    [batch] = trainer.get_train_dataloader()
    assert batch["input_ids"].shape == (1, sum(map(len, documents)))  # padding-free: one row of all
    with torch.no_grad():
        torch.testing.assert_close(
            trainer.compute_loss(trainer.model, dict(batch)), alone, rtol=1e-5, atol=1e-5
        )
        whole = (
            trainer.model(batch["input_ids"], labels=batch["labels"]) if kind == "segment" else None
        )
    # read as one text, the row is something else
    assert whole is None or abs(whole.loss - alone) > 0.01
    trainer.train()  # the loss of its first step is the same number
    torch.testing.assert_close(
        trainer.state.log_history[0]["loss"], float(alone), rtol=1e-4, atol=1e-4
    )
