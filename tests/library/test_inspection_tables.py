"""What inspect_attention labels: tokens as text, tables by token; and the inputs that it
refuses."""

import pytest
from transformers import BertConfig, BertModel

from corpora.tokenization import build_character_tokenizer, train_bpe
from hf_infini.tools.inspection import inspect_attention
from hf_infini.tools.inspection.heads import token_texts, unique_labels
from models import gpt2, infini_gpt2, token_ids

TEXTS = [
    "A ação do coração é a razão da canção.",
    "Não há pão; há mãos.\n\tE a ação?",
    "ação ação " * 20,
]


# --- labels and tables
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 270)


def test_labels_show_every_token(bpe):
    texts = token_texts(bpe, bpe(TEXTS[1], add_special_tokens=False)["input_ids"])
    assert "|".join(texts) == "N|ão|·há|·|p|ão|;|·há|·|m|ão|s|.|⏎|⇥|E|·a|·ação|?"
    labels = "N|ão@1|·há@2|·@3|p|ão@5|;|·há@7|·@8|m|ão@10|s|.|⏎|⇥|E|·a|·ação|?"
    assert "|".join(unique_labels(texts)) == labels
    assert token_texts(None, [7, 8]) == ["#7", "#8"] and token_texts(bpe, [10**6]) == ["#1000000"]
    assert token_texts(bpe, [bpe.eos_token_id]) == ["<|endoftext|>"]
    assert unique_labels(["a", "b", "a", "a@2"]) == ["a@0", "b@1", "a@2", "a@2@3"]
    assert unique_labels(["a", "b", "a"]) == ["a@0", "b", "a@2"]


def test_a_letter_split_over_two_tokens(bpe):
    # not in the texts, so that its bytes were never joined
    ids = bpe("ü", add_special_tokens=False)["input_ids"]
    assert len(ids) == 2 and token_texts(bpe, ids) == ["Ã", "¼"]  # the bytes C3 and BC
    marks = build_character_tokenizer(["e\u0301\u200b\u00a0\ufffd"])
    ids = marks("e\u0301\u200b\u00a0\ufffd", add_special_tokens=False)["input_ids"]
    assert token_texts(marks, ids) == ["e", "\u0301", "⟨U+200B⟩", "⟨U+00A0⟩", "\ufffd"]


def test_tables_are_labelled_by_token(bpe):
    model = infini_gpt2(vocab_size=len(bpe), n_positions=128, sink_tokens=1, kept_tokens=3)
    inspection = inspect_attention(model, "ü e ü", bpe)
    table = inspection.table("weights", layer=1, head=2)
    assert list(table.columns) == [f"K:{label}" for label in unique_labels(inspection.texts[0])]
    assert list(table.index) == [f"Q:{label}" for label in unique_labels(inspection.texts[0])]
    assert table.index[0] == "Q:Ã@0" and "Q:e" in table.index
    assert table.sum(axis=1).to_numpy() == pytest.approx(1, abs=1e-6)
    assert table.loc["Q:e", "K:¼@1"] == inspection.layers[1].weights[0, 2, 3, 1]
    assert (inspection.table("scores").to_numpy()[0, 1:] == float("-inf")).all()
    assert inspection.table("memory_norm").index.tolist() == ["S:0", "S:end"]
    inspection = inspect_attention(model, TEXTS[0], bpe)
    share = inspection.table("memory_share", layer=1)
    assert list(share.columns) == ["H:0", "H:1", "H:2", "H:3"] and share.index[0].startswith("Q:A")
    assert share.to_numpy()[:, 3] == pytest.approx(inspection.layers[1].memory_share[0, 3].numpy())
    tokens = len(inspection.texts[0])
    assert inspection.table("heads").shape == (tokens, 8) and inspection.table("output").shape == (
        tokens,
        32,
    )
    assert inspection.table("gate").index.tolist() == ["H:0", "H:1", "H:2", "H:3"]
    assert inspection.table("memory_norm").index.tolist() == [
        *(f"S:{n}" for n in range(-(-tokens // 8))),
        "S:end",
    ]
    fates = inspection.table("fates", layer=1, head=2)
    assert fates.index[0] == "S:0" and fates.columns[0].startswith("K:A")
    seen = [["none", "sink", "window", "kept", "memory"].index(name) for name in fates.iloc[-2]]
    assert seen == inspection.layers[1].fates[0, 2, -2].tolist() and {1, 2, 3, 4} <= set(seen)


# --- what is refused
# --------------------------------------------------------------------------------------------------


def test_refusals(bpe):
    model, ids = gpt2(), token_ids(1, 8)
    bert = BertModel(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    for arguments, message in (
        ((bert, ids), "a BertModel cannot have Infini-attention"),
        ((model, "text"), "a text needs the model's tokenizer"),
        ((model, {"input_ids": ids, "attention_mask": 0 * ids}), "only rows without padding"),
    ):
        with pytest.raises(ValueError, match=message):
            inspect_attention(*arguments)
    with pytest.raises(ValueError, match="layers must be numbers from 0 to 2; got"):
        inspect_attention(model, ids, layers=[0, 3])
    with pytest.raises(
        ValueError, match="layer 0 has the tensors scores, weights, heads, output; got 'gate'"
    ):
        inspect_attention(model, ids).table("gate")
