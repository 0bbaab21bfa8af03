"""Tokenizers and texts for recall examples."""

import functools

import numpy as np

from corpora.biographies import biography_documents, portuguese_names
from corpora.tokenization import build_character_tokenizer, encode_texts, train_bpe
from recall import examples
from recall.filler import Filler

NAMES = portuguese_names()
TEXTS = [biography.text for biography in biography_documents(30, seed=5, distance=2000)]


@functools.cache
def tokenizer(kind: str):
    said = examples.WORDING["pt"]
    texts = [*TEXTS, *said["needles"], *said["questions"], "0123456789 ÁÂÃÉÊÍÓÔÕÚÇ áâãàéêíóôõúüç"]
    return train_bpe(texts, 600) if kind == "bpe" else build_character_tokenizer(texts)


def encoder(kind: str):
    return functools.partial(encode_texts, tokenizer(kind))


@functools.cache
def filler(kind: str) -> Filler:
    (blank_line, *documents), end = encoder(kind)(["\n\n", *TEXTS]), tokenizer(kind).eos_token_id
    return Filler(
        np.concatenate([np.append(document, end) for document in documents]), end, blank_line
    )


def text_at(kind: str, example, span: tuple[int, int]) -> str:
    return tokenizer(kind).decode(example.tokens[span[0] : span[1] + 1])


def assert_answered(kind: str, example):
    """Every question has the answer's tokens, with the space in front, at both of its places."""
    for question in example.questions:
        assert (
            text_at(kind, example, question.stated)
            == text_at(kind, example, question.asked)
            == (f" {question.answer}")
        )
        places = [
            example.tokens[first : last + 1] for first, last in (question.stated, question.asked)
        ]
        assert np.array_equal(*places) and question.stated[1] < question.asked[0]
