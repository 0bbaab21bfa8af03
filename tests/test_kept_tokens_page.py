"""What docs/notes/how-it-works.md says of kept tokens is enough to write them again: this reference
follows its words, and the library's gives the same."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoders import decoder
from hf_infini import naive_infini_attention, patch_model
from hf_infini.layers.memory_layer import memory_layers
from hf_infini.ops.positions import rotate, rotation

# Of each `keep_score` the scores that choose, in this order, and how many of K places each has
CHOICES = {
    "attention": lambda most: {"attention": most},
    "learned": lambda most: {"learned": most},
    "half": lambda most: {"attention": math.ceil(most / 2), "learned": most // 2},
    "two_learned": lambda most: {"learned": most - most // 4, "second": most // 4},
}


def keep(kept, segment, scores, shares):
    """Which of these numbers of tokens stay, by `scores[name][number]`; `shares`: by name."""
    left, stays = kept + segment, []
    for name, share in shares.items():
        others = [number for number in left if number not in stays]
        stays += sorted(others, key=lambda number: (-scores[name][number], number))[:share]
    return sorted(stays)


def by_the_page(query, key, value, learned, length, local, sinks, most, keep_score, tables):
    """One key/value head, `[heads or 1, tokens, width]`; the memory closed. The output, and what is
    kept at the end. `learned`: two scores, `[tokens, 2]`."""
    tokens, kept, received = key.shape[1], [], torch.zeros(key.shape[1], dtype=torch.float64)
    scores, outputs = {"attention": {}}, []
    scores["learned"], scores["second"] = learned.T.tolist()

    def turned(states, numbers, places):
        return rotate(states[:, numbers], *(table[places] for table in tables))

    for t in range(tokens):
        segment = t // length
        first = max(0, segment - local) * length
        window, far = list(range(first, t + 1)), segment > local
        own = sinks + most + local * length + t % length
        places = {number: own - (t - number) for number in window}
        before = sinks + most - len(kept)
        places |= {number: before + at for at, number in enumerate(kept)} if far else {}
        places |= {number: before - sinks + number for number in range(sinks)} if far else {}

        def weights(numbers, places=places, t=t, own=own):
            at = [places[number] for number in numbers]
            dots = turned(query, [t], [own]) @ turned(key, numbers, at).mT
            return (dots.squeeze(1) * key.shape[-1] ** -0.5).softmax(-1)

        seen = sorted(places)
        outputs.append(weights(seen) @ value[0, seen])
        unkept = [*range(sinks if far else 0), *window]
        for number, weight in zip(unkept, weights(unkept).mean(0), strict=True):
            received[number] += weight if number in window else 0
        if (t + 1) % length == 0 and segment >= local:  # the oldest segment leaves
            leaving = [number for number in window[:length] if number >= sinks]
            for number in leaving:
                mean = received[number] / ((local + 1) * length - number % length)
                scores["attention"][number] = math.log(max(mean, 2**-126)) + number / (2 * most)
            kept = keep(kept, leaving, scores, CHOICES[keep_score](most))
    return torch.stack(outputs, 1), kept


def test_a_layer_rounds_the_learned_score_as_the_page_says():
    """To 15 bits of what float64 gives, in calls of any length."""
    model = patch_model(decoder("llama"), cache_tokens=64, keep_score="half")
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 40, model.config.hidden_size, generator=draw)
    for layer in memory_layers(model).values():
        layer.keep_weight.data.normal_(generator=draw)
        exact = torch.einsum("btd,hd->bht", hidden.double(), layer.keep_weight.data.double())
        exact = exact.unsqueeze(-1)
        mantissa, exponent = exact.frexp()
        expected = (mantissa * 2**15).round().ldexp(exponent - 15)
        steps = [layer.learned_score(part) for part in hidden.split([1, 1, 7, 31], 1)]
        for score in (layer.learned_score(hidden), torch.cat(steps, 2)):
            assert torch.equal(score.double(), expected)
        assert not torch.equal(exact.float().double(), expected)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(2, 5),
    local=st.integers(0, 2),
    sinks=st.integers(0, 1),
    most=st.integers(2, 7),
    keep_score=st.sampled_from([*CHOICES]),
    seed=st.integers(0, 99),
)
def test_a_reference_written_from_the_page_is_the_library_s(
    length, local, sinks, most, keep_score, seed
):
    draw = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, heads, 26, 8, generator=draw, dtype=torch.float64) for heads in (2, 1, 1)
    )
    query = query * 3
    learned = torch.randint(0, 4, (1, 1, 26, 2), generator=draw).double()  # with ties
    given = {"attention": None, "two_learned": learned}.get(keep_score, learned[..., 0])
    tables = rotation(torch.arange(sinks + most + (local + 1) * length), 8, torch.float64)
    window = {"local_segments": local, "sink_tokens": sinks, "kept_tokens": most}
    found, state = naive_infini_attention(
        query,
        key,
        value,
        torch.full((2,), -1000.0, dtype=torch.float64),
        length,
        **window,
        keep_score=keep_score,
        learned_score=given,
        rotary=tables,
        return_state=True,
    )
    output, kept = by_the_page(
        query[0], key[0], value[0], learned[0, 0], length, local, sinks, most, keep_score, tables
    )
    torch.testing.assert_close(found[0], output)
    assert [n for n in state.kept_position[0, 0].tolist() if n >= 0] == kept
    exact = ((sinks + most) // length + local + 1) * length  # up to which nothing is missing
    angles = rotation(torch.arange(26), 8, torch.float64)
    plain = torch.nn.functional.scaled_dot_product_attention(
        rotate(query, *angles), rotate(key, *angles), value, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(found[:, :, :exact], plain[:, :, :exact])
    if exact < 26:
        with pytest.raises(AssertionError):
            torch.testing.assert_close(found[:, :, : exact + 1], plain[:, :, : exact + 1])
