"""Where tokens are in a text, by tokenizers of several kinds, and pieces of a text around what is
marked."""

import itertools
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from corpora.tokenization import train_bpe
from hf_infini.tools.excerpts import AROUND, Marked, excerpts, token_borders
from running import sample_text

PIECES = (
    "naïve café ",
    "cafe\u0301",  # an accent of its own, which NFC puts into the letter
    "line\r\nline\n\n",
    "👩‍👩‍👧 🇧🇷",  # several characters each, of four bytes
    "<|endoftext|>",
    "<|pad|> <s>",
    "   \t",
    "日本語",
    "\u00a0",
)
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=8).map("".join)


def of_bytes():
    return train_bpe([sample_text()], 400)


def of_normal_bytes():
    """As Qwen's, and with offsets that leave white space out."""
    own = train_bpe([sample_text()], 400)
    own.backend_tokenizer.normalizer = normalizers.NFC()
    own.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return own


def of_pieces():
    """As Llama's and Gemma's: spaces are letters, and what is unknown is bytes."""
    letters = [*dict.fromkeys("▁abcdefghijklmnopqrstuvwxyz<|>")]
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "in", "▁c"]
    merges = [("i", "n"), ("▁", "c")]
    numbers = {name: number for number, name in enumerate(names)}
    own = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=True))
    own.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first")
    own.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    own.add_special_tokens(["<unk>", "<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", unk_token="<unk>")


KINDS = {kind.__name__: kind() for kind in (of_bytes, of_normal_bytes, of_pieces)}


def ids_of(tokenizer, text: str) -> list[int]:
    """As a reader reads a document."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_tokens_have_the_characters_of_their_bytes(text):
    """Each of this tokenizer's tokens is some bytes: a character for each."""
    tokenizer = KINDS["of_bytes"]
    tokens = tokenizer.convert_ids_to_tokens(ids_of(tokenizer, text))
    character = [number for number, one in enumerate(text) for _ in one.encode()]
    borders, ends = token_borders(tokenizer, text), [*itertools.accumulate(map(len, tokens))]
    assert len(borders) == len(tokens)
    for first, last, (begin, end) in zip([0, *ends], ends, borders.tolist(), strict=False):
        assert (begin, end) == (character[first], character[last - 1] + 1)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_a_range_of_tokens_is_the_text_that_it_decodes_to(kind, text):
    """But for a form of accents that a tokenizer does not keep, and white space at its ends; no
    character is left out, and each ends where the next begins, unless they share one."""
    tokenizer = KINDS[kind]
    ids, borders = ids_of(tokenizer, text), token_borders(tokenizer, text)
    assert len(ids) == len(borders)
    shown = 0
    for begin, end in borders.tolist():
        assert begin <= shown <= end
        shown = end
    assert shown == len(text) or not ids
    whole = [
        at
        for at in range(len(ids) + 1)
        if at in (0, len(ids)) or borders[at, 0] == borders[at - 1, 1]
    ]
    for first, last in itertools.pairwise(whole[:: max(1, len(whole) // 8)]):
        own = text[borders[first, 0] : borders[last - 1, 1]]
        decoded = tokenizer.decode(ids[first:last], clean_up_tokenization_spaces=False)
        if "\ufffd" not in decoded:  # that the token in front has begun
            found, wanted = (unicodedata.normalize("NFC", one).strip() for one in (decoded, own))
            assert found == wanted


def test_a_tokenizer_that_does_not_say_it():
    assert token_borders(ByT5Tokenizer(), "text") is None
    assert token_borders(KINDS["of_bytes"], "").shape == (0, 2)


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(1, 6 * AROUND),
    spans=st.lists(st.tuples(st.integers(0, 6 * AROUND), st.integers(0, AROUND)), max_size=6),
)
def test_excerpts_have_what_is_marked_and_some_text_around(size, spans):
    """Each character that is near to a mark once, in order, marked or not, and no other."""
    text = "".join(chr(0x4E00 + place) for place in range(size))  # all different
    spans = [(min(begin, size), min(begin + length, size)) for begin, length in spans]
    marks = {place for begin, end in spans for place in range(begin, end)}
    near = {at + by for at in marks for by in range(-AROUND, AROUND + 1) if 0 <= at + by < size}
    pieces = excerpts(text, [Marked(*span, "x") for span in spans])
    shown = [
        (ord(one) - 0x4E00, label) for piece, label in pieces for one in piece if ord(one) >= 0x4E00
    ]
    assert [place for place, _ in shown] == sorted(near)
    assert {place for place, label in shown if label} == marks
    # where some are left out, a piece says where it goes on
    said = [piece for piece, _ in pieces if "character" in piece]
    gaps = [place for place in sorted(near) if place and place - 1 not in near]
    wanted = [f"from character {place:,} of {size:,}" for place in gaps]
    assert [piece.strip("\n… :") for piece in said] == wanted
    assert all(piece for piece, _ in pieces)


def test_a_long_text_is_not_shown_whole():
    pieces = excerpts("word " * 10**6, [Marked(place, place + 9, "1") for place in (50, 4 * 10**6)])
    assert sum(len(piece) for piece, _ in pieces) < 5 * AROUND
