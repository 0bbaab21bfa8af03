"""Which blocks a question chooses, and by which terms: as the reference says."""

import random

import pytest
import torch

from hf_infini.ops.naive import naive_recalled, naive_relevance, naive_words
from hf_infini.ops.recall import Terms, block_relevance, have_left, recalled_numbers
from hf_infini.options import Window

# texts of tokens
SIGNS = ["", " ", ", ", "'s", "run", " run", "ning", " ab", "cdefgh", "é", "x1", " 73", "-", "_"]
SIGNS += ["\n", " the cat", "a b", "b,", " b ", "ção", "日本", "語です"]


@pytest.mark.parametrize("seed", range(12))
def test_relevance_and_choice_are_those_of_the_reference(seed):
    draw = random.Random(seed)
    tokens = draw.choice([1, 63, 64, 65, 500, 1000])
    terms = [draw.choice([-1, *range(draw.choice([3, 30, 300]))]) for _ in range(tokens)]
    question = [draw.choice([-1, -1, 3, 5, 10**6, *terms[:9]]) for _ in range(draw.randrange(12))]
    relevance = block_relevance(torch.tensor(terms), torch.tensor(question, dtype=torch.long))
    wanted = torch.tensor(naive_relevance(terms, question), dtype=torch.float64)
    torch.testing.assert_close(relevance, wanted, atol=1e-9, rtol=1e-9)  # float64
    window = Window(*(draw.randrange(least, 40) for least in (3, 0, 0, 1)))
    eligible = [draw.random() < 0.9 for _ in range(tokens)]
    least = draw.choice([0, 0.1, 0.2, 0.5, 0.9])
    numbers, ranks = naive_recalled(relevance.tolist(), eligible, tokens, window, least)
    first, end = have_left(tokens, window)
    left = torch.tensor(eligible) & (torch.arange(tokens) >= first) & (torch.arange(tokens) < end)
    if int(left.sum()) <= window.kept_tokens:  # what fits is kept without a recall
        least = 0
    found = recalled_numbers(relevance, left, window.kept_tokens, least)
    assert found[0].tolist() == numbers and found[1].tolist() == ranks


@pytest.mark.parametrize("seed", range(20))
def test_words_are_those_of_the_reference(seed):
    """However a word was cut into tokens; ids without a text end it."""
    draw = random.Random(seed)
    terms = Terms.of_texts(SIGNS)
    ids = [draw.randrange(-1, len(SIGNS) + 1) for _ in range(draw.randrange(200))]
    texts = [SIGNS[token] or None if 0 <= token < len(SIGNS) else None for token in ids]
    tokens, words = terms.of(torch.tensor(ids, dtype=torch.long)).tolist()
    wanted = naive_words(texts)
    assert [word >= 0 for word in words] == [word is not None for word in wanted]
    pairs = {*zip(words, wanted, strict=True)}
    assert len(pairs) == len({*words}) == len({*wanted})
    for token, text in zip(tokens, texts, strict=True):
        means = text is not None and any(map(str.isalnum, text))
        assert (token >= 0) == means
    assert terms.tokens[SIGNS.index("run")] == terms.tokens[SIGNS.index(" run")]


@pytest.mark.parametrize("seed", range(6))
def test_relevance_by_words_is_that_of_the_reference(seed):
    """Of one document or several, whose words go on in none of the others."""
    draw = random.Random(seed)
    terms, ids = Terms.of_texts(SIGNS), range(-1, len(SIGNS))
    documents = [[*draw.choices(ids, k=n)] for n in draw.choices([1, 64, 65, 300], k=seed % 3 + 1)]
    question = [*draw.choices(ids, k=draw.randrange(1, 9))]

    def of(part: list) -> tuple[list, list]:
        texts = [SIGNS[token] or None if token >= 0 else None for token in part]
        tokens = [int(terms.tokens[token]) if token >= 0 else -1 for token in part]
        return tokens, [-1 if word is None else word for word in naive_words(texts)]

    tokens, words = zip(*map(of, documents), strict=True)
    wanted = naive_relevance([*tokens], of(question)[0], [*words], of(question)[1])
    found = block_relevance(
        [terms.of(torch.tensor(part)) for part in documents], terms.of(torch.tensor(question))
    )
    torch.testing.assert_close(
        found, torch.tensor(wanted, dtype=torch.float64), atol=1e-9, rtol=1e-9
    )


def test_endings_of_a_word_do_not_count():
    """Of one that has more than five letters; its tokens are different ones."""
    signs = [" the", " open", "ing", " opened", "s", " corr", "ection", "ecting", " hang", "ed"]
    terms = Terms.of_texts(signs)
    text = torch.zeros(64 * 9, dtype=torch.long)
    text[64 * 4 : 64 * 4 + 2] = torch.tensor([5, 6])  # correction
    text[64 * 7 : 64 * 7 + 2] = torch.tensor([1, 2])  # opening
    asked = terms.of(torch.tensor([0, 5, 7, 4]))  # correctings
    assert block_relevance(terms.of(text), asked).argmax() == 4
    assert block_relevance(terms.of(text), asked[:, :2]).argmax() == 4
    alone = torch.tensor([-1, -1]), terms.of(torch.tensor([5, 7]))[1]
    assert block_relevance(terms.of(text), torch.stack(alone)).argmax() == 4
    of_words = [terms.of(torch.tensor(own))[1, 0].item() for own in ([1, 2], [3], [8], [8, 9])]
    assert len({*of_words}) == 4  # openi, opene, hang, hange


def test_blocks_beside_rare_terms_come_first():
    terms = torch.arange(64 * 9) % 7
    terms[64 * 4 + 3] = 99
    relevance = block_relevance(terms, torch.tensor([99, 99, 1]))
    assert relevance.argsort(descending=True)[:3].tolist()[0] == 4
    assert set(relevance.argsort(descending=True)[:7].tolist()) == {1, 2, 3, 4, 5, 6, 7}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("filler", [None, 1, 2])
def test_a_number_is_found_by_its_digits_in_their_order(seed, filler):
    """Where each block has all digits, and tokens without a term are between them or not."""
    draw = random.Random(seed)
    blocks = [draw.sample(range(10), 10) * 6 + [-1] * 4 for _ in range(30)]
    digits = [draw.randrange(10) for _ in range(8)]
    parted = [digit for each in digits for digit in (each, *[-1] * (filler or 0))]
    at = draw.randrange(4, 30 - 4)
    blocks[at][11 : 11 + len(parted)] = parted
    own = block_relevance(torch.tensor(sum(blocks, [])), torch.tensor([-1, *digits, -1]))
    assert own.argmax() == at
