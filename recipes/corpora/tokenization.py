"""Tokenizers of a corpus: byte-level BPE trained on a sample of it, its characters, or a ready one.

All three come back as fast `transformers` tokenizers with an end-of-text token that stands between
two documents (it is `bos_token` as well, as in GPT-2) and a padding token;
`AutoTokenizer.from_pretrained` reads what their `save_pretrained` wrote.
"""

import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from cli import UserError, one_line
from cli.names import check_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
UNKNOWN = "<|unk|>"
# characters; each merge of a BPE's training reads all of every word that has its pair
LONGEST_WORD = 1000


def train_bpe(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerBase":
    """Trains a byte-level BPE tokenizer, for which `decode(encode(text)) == text` for every text.

    Args:
        texts: the training texts, read once. Learning is linear in them also where they have no
            white space: longer stretches are cut after 1,000 characters.
        vocab_size: entries of the vocabulary, the 256 bytes and the 2 special tokens among them. A
            small corpus can give fewer: no pair of tokens that occurs only once is merged."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    trained = ByteLevelBPETokenizer()
    pieces = itertools.chain.from_iterable(map(_without_long_words, texts))
    trained.train_from_iterator(
        pieces, vocab_size, min_frequency=2, special_tokens=[END_OF_TEXT, PADDING]
    )
    return _wrap(Tokenizer.from_str(trained.to_str()))


def _without_long_words(text: str) -> Iterator[str]:
    """The text in pieces, in which neither a word nor white space is longer than `LONGEST_WORD`;
    mostly in one piece."""
    begin, long_space = 0, rf"\s{{{LONGEST_WORD}}}"
    if max(map(len, text.split()), default=0) > LONGEST_WORD or re.search(long_space, text):
        for stretch in re.finditer(rf"\S{{{LONGEST_WORD}}}|{long_space}", text):
            yield text[begin : stretch.end()]
            begin = stretch.end()
    yield text[begin:]


def build_character_tokenizer(texts: Iterable[str]) -> "PreTrainedTokenizerBase":
    """Builds a tokenizer with one token per character (Unicode code point) that occurs in `texts`.

    The special tokens come first, among them one for unknown characters, then the characters in
    code-point order.
    """
    from tokenizers import Tokenizer, decoders, models

    tokens = [END_OF_TEXT, PADDING, UNKNOWN, *sorted(set(itertools.chain.from_iterable(texts)))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # A BPE without merges splits into characters and, unlike WordLevel, needs no regular expression
    # to do so.
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN, fuse_unk=False))
    backend.decoder = decoders.Fuse()
    return _wrap(backend, unk_token=UNKNOWN)


def load_tokenizer(name_or_path: str) -> "PreTrainedTokenizerBase":
    """Loads a ready tokenizer by its name on the Hub (`gpt2`) or its folder, whose code is not
    executed. A missing padding token becomes the end-of-text token: a new one would be beyond the
    embedding of the tokenizer's model.

    Raises UserError where there is none, it is damaged, or it has no end-of-text token."""
    from transformers import AutoTokenizer

    what = f"--tokenizer {name_or_path}"
    remedy = "give bpe, characters, the folder of a saved tokenizer, or a name on the Hub"
    check_name("--tokenizer", name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
    # of a damaged file, tokenizers and transformers raise almost anything
    except Exception as error:
        raise UserError(
            f"{what} cannot be loaded as a tokenizer ({one_line(error)[:300]}): {remedy}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{what} has no end-of-text token to put between documents: set eos_token in its "
            "tokenizer_config.json, or take another one"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encode_texts(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], split_special_tokens: bool = True
) -> list[np.ndarray]:
    """The token ids (int64) of each text (one at least), without added special tokens.

    A text that spells a special token out is encoded as plain text, unless `split_special_tokens`
    is off: only the caller puts end-of-text tokens between documents. The first time that a text
    has an unknown token, standard error says so.
    """
    how = {"add_special_tokens": False, "verbose": False, "return_attention_mask": False}
    how["split_special_tokens"] = split_special_tokens
    encoded = tokenizer(list(texts), **how)["input_ids"]
    unknown = tokenizer.unk_token_id
    if any(unknown in ids for ids in encoded) and not vars(tokenizer).get("unknown_was_said"):
        tokenizer.unknown_was_said = True
        if int(os.environ.get("RANK", 0)) == 0:
            said = f"the tokenizer does not know all of the text: {tokenizer.unk_token}"
            tqdm.write(f"{said} stands for the rest", sys.stderr)
    return [np.asarray(ids, dtype=np.int64) for ids in encoded]


def _wrap(backend, **special_tokens: str) -> "PreTrainedTokenizerBase":
    from transformers import PreTrainedTokenizerFast

    special_tokens |= {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "pad_token": PADDING}
    inputs = ["input_ids", "attention_mask"]
    how = {"clean_up_tokenization_spaces": False, "model_input_names": inputs}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **how, **special_tokens)
