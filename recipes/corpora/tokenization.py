"""Tokenizers of a corpus: byte-level BPE trained on a sample of it, its characters, or a ready one.

All three come back as fast `transformers` tokenizers with an end-of-text token that stands between two documents (it is
`bos_token` as well, as in GPT-2) and a padding token; `AutoTokenizer.from_pretrained` reads what their
`save_pretrained` wrote.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cli import UserError

from .documents import one_line

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
UNKNOWN = "<|unk|>"


def train_bpe(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerBase":
    """Trains a byte-level BPE tokenizer, for which `decode(encode(text)) == text` holds for every text.

    Args:
        texts: the training texts, read once.
        vocab_size: entries of the vocabulary, the 256 bytes and the 2 special tokens among them. A small corpus can give
            fewer: no pair of tokens that occurs only once is merged.

    Raises:
        UserError: `vocab_size` has no room for the bytes and the special tokens.
    """
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    if vocab_size < 258:
        raise UserError(f"--vocab_size is {vocab_size}; byte-level BPE needs at least 258 (256 bytes and 2 special tokens)")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size, min_frequency=2, special_tokens=[END_OF_TEXT, PADDING])
    return _wrap(Tokenizer.from_str(trained.to_str()))


def build_character_tokenizer(texts: Iterable[str]) -> "PreTrainedTokenizerBase":
    """Builds a tokenizer with one token per character (Unicode code point) that occurs in `texts`.

    The special tokens come first, among them one for unknown characters, then the characters in code-point order.
    """
    from tokenizers import Tokenizer, decoders, models

    characters = sorted(set(itertools.chain.from_iterable(texts)))
    vocabulary = {token: number for number, token in enumerate([END_OF_TEXT, PADDING, UNKNOWN, *characters])}
    # A BPE without merges splits into characters and, unlike WordLevel, needs no regular expression to do so.
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN, fuse_unk=False))
    backend.decoder = decoders.Fuse()
    return _wrap(backend, unk_token=UNKNOWN)


def load_tokenizer(name_or_path: str) -> "PreTrainedTokenizerBase":
    """Loads a ready tokenizer by its name on the Hub (`gpt2`) or its folder; it comes back with a padding token.

    A missing padding token becomes the end-of-text token: a new one would be beyond the embedding of the tokenizer's
    model.

    Raises:
        UserError: there is no such tokenizer, or it has no end-of-text token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"--tokenizer: {name_or_path!r} is not 'bpe' or 'characters', and cannot be loaded as a tokenizer "
            f"({one_line(error)[:300]})"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"--tokenizer {name_or_path}: it has no end-of-text token (eos_token) to put between documents")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encode_texts(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> "list[np.ndarray]":
    """The token ids (int64) of each text (one at least), without added special tokens.

    A text that spells a special token out is encoded as plain text: only the caller puts end-of-text tokens between
    documents.
    """
    import numpy as np

    encoded = tokenizer(
        list(texts), add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )
    return [np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"]]


def _wrap(backend, **special_tokens: str) -> "PreTrainedTokenizerBase":
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **special_tokens,
    )
