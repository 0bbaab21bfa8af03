"""Tokenizers: exact round trips, saved is what loads, and special tokens stand only where the
caller puts them."""

import pytest
from transformers import AutoTokenizer

from cli import UserError
from corpora.biographies import biography_documents
from corpora.tokenization import build_character_tokenizer, encode_texts, load_tokenizer, train_bpe

TEXTS = [document.text for document in biography_documents(20)]
AWKWARD = [
    "",
    " ",
    "  dois espaços , antes de vírgula .",
    "fim\r\n\r\n\ttab\x00\x07",
    "e\u0301 não é \u00e9",
    "🧑🏽‍🚀 ﷽ 漢字",
    " <|endoftext|> <|pad|>",
    "d'água n't 's I 'm",
    "\ufeff\u200b\u00a0",
    "ÀÁÂ" * 300,
]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 600)


def test_bpe_round_trip_is_exact_also_after_saving(bpe, tmp_path):
    bpe.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for tokenizer in (bpe, loaded):
        for text, ids in zip(
            AWKWARD + TEXTS, encode_texts(tokenizer, AWKWARD + TEXTS), strict=True
        ):
            assert tokenizer.decode(ids) == text
        assert tokenizer.decode(tokenizer.encode(AWKWARD[2])) == AWKWARD[2]
        assert len(tokenizer) == tokenizer.vocab_size == 600
        assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == (
            "<|endoftext|>",
            "<|endoftext|>",
            "<|pad|>",
        )
        assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert [list(ids) for ids in encode_texts(loaded, TEXTS)] == [
        list(ids) for ids in encode_texts(bpe, TEXTS)
    ]


def test_spelled_out_special_tokens_stay_text(bpe):
    (ids,) = encode_texts(bpe, ["a<|endoftext|>b"])
    assert bpe.eos_token_id not in ids and bpe.decode(ids) == "a<|endoftext|>b"
    # The tokenizer itself goes on to understand its special tokens, as generation prompts need.
    assert bpe.eos_token_id in bpe.encode("a<|endoftext|>b")


def test_bpe_vocabulary_sizes():
    assert len(train_bpe(TEXTS, 258)) == 258  # bytes and special tokens only
    assert len(train_bpe(["abab"], 5000)) < 300  # a small corpus gives fewer entries than asked


def test_characters(tmp_path):
    tokenizer = build_character_tokenizer(["baça", "<é>\n"])
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == [
        "<|endoftext|>",
        "<|pad|>",
        "<|unk|>",
        "\n",
        "<",
        ">",
        "a",
        "b",
        "ç",
        "é",
    ]
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.pad_token, loaded.unk_token, loaded.eos_token) == (
        "<|pad|>",
        "<|unk|>",
        "<|endoftext|>",
    )
    (ids,) = encode_texts(loaded, ["aça\nbz"])
    assert loaded.convert_ids_to_tokens(ids) == ["a", "ç", "a", "\n", "b", "<|unk|>"]
    assert loaded.decode(encode_texts(loaded, ["<é>\n\nab ".replace(" ", "")])[0]) == "<é>\n\nab"


def test_ready_tokenizers(bpe, tmp_path):
    bpe.pad_token = None
    try:
        bpe.save_pretrained(tmp_path / "no-pad")
    finally:
        bpe.pad_token = "<|pad|>"
    loaded = load_tokenizer(str(tmp_path / "no-pad"))
    assert loaded.pad_token == loaded.eos_token and len(loaded) == len(bpe)
    with pytest.raises(UserError, match="--tokenizer: there is no folder .*missing"):
        load_tokenizer(str(tmp_path / "missing"))
    bpe.eos_token, kept = None, bpe.eos_token
    try:
        bpe.save_pretrained(tmp_path / "no-eos")
    finally:
        bpe.eos_token = kept
    with pytest.raises(UserError, match="has no end-of-text token"):
        load_tokenizer(str(tmp_path / "no-eos"))
