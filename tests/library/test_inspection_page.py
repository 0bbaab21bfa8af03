"""The page of a model's heads in a browser: no errors, and it says what was found."""

import json
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from browser import needs_browser, visit
from decoders import decoder
from hf_infini import patch_model
from hf_infini.tools.inspection import FATES, Inspection, LayerInspection, inspect_attention
from hf_infini.tools.inspection.heads import KEPT, MEMORY
from hf_infini.tools.inspection.page import _codes, farthest, inspection_page, reach
from models import causal_mha, infini_gpt2, token_ids

WIDTHS = (1280, 390)


def point_at(query: int, key: int) -> str:
    """A step: what the tip says of this cell."""
    return f"() => {{ moveTo({query}, {key}); return Object.fromEntries(facts()); }}"


def family(model_type: str):
    options = {
        "segment_length": 8,
        "local_segments": 1,
        "sink_tokens": 2,
        "kept_tokens": 6,
        "keep_score": "half",
    }
    return patch_model(decoder(model_type), **options, gate_init=0.3)


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_a_memory_is_seen_in_map_tip_and_text(width, tmp_path):
    inspection = inspect_attention(
        infini_gpt2(update_rule="delta", n_positions=256), token_ids(1, 200)
    )
    layer, page = inspection.layers[1], inspection_page(inspection, title="a model")
    steps = [
        point_at(30, 28),
        point_at(30, 5),
        point_at(30, 190),
        '() => $("language").click()',
        '() => $("theme").click()',
    ]
    steps += [
        "() => choose(state.layer, MEAN)",
        '() => { $("view").value = "before"; $("view").onchange(); }',
    ]
    steps += ['() => [...$("sentence").children].filter(part => part.className === "later").length']
    steps += [point_at(30, 5)]
    seen = visit(page, tmp_path, steps, width=width, address="#layer=1&head=2&language=en")
    gate = layer.token_gate[0, 2, 30].item()
    weight, memory = layer.weights[0, 2, 30, 28].item(), layer.memory_weights[0, 2, 30, 5].item()
    # Three digits of bfloat16
    local, through, none = (step["value"] for step in seen[:3])
    assert float(local["local weight"]) == pytest.approx(weight, rel=1e-2)
    assert float(local["in the output"]) == pytest.approx((1 - gate) * weight, rel=1e-2)
    assert float(through["memory weight"]) == pytest.approx(memory, rel=1e-2)
    assert float(through["in the output"]) == pytest.approx(gate * memory, rel=1e-2)
    assert none["weight"] == "none: the key comes later"
    assert (
        "purple where their weight is negative" in seen[0]["text"] and seen[0]["language"] == "en"
    )
    assert "Camada 1, cabeça 2 (infini)" in seen[3]["text"] and seen[3]["language"] == "pt"
    assert "Layer" not in seen[3]["text"]
    assert "theme=dark" in seen[4]["address"]
    assert "média das cabeças" in seen[5]["text"] and "head=mean" in seen[5]["address"]
    assert "weights=before" in seen[6]["address"]
    # every token before the query is seen, the later ones are not
    assert seen[7]["value"] == 200 - 31
    mean, memories = seen[8]["value"], layer.memory_weights[0, :, 30, 5]
    close = {"rel": 1e-2, "abs": 2**-8 * float(memories.abs().max())}  # they cancel
    assert float(mean["peso na memória"]) == pytest.approx(memories.mean().item(), **close)
    assert float(mean["na saída"]) == pytest.approx(
        (layer.token_gate[0, :, 30] * memories).mean().item(), **close
    )


@needs_browser
@pytest.mark.parametrize(("model_type", "width"), zip(("qwen3", "gemma2"), WIDTHS, strict=True))
def test_families(model_type, width, tmp_path):
    # no special token
    inspection = inspect_attention(family(model_type), token_ids(1, 60).clamp(min=3))
    layer, classes = (
        inspection.layers[1],
        ('[...$("fates").querySelectorAll("span")].map(part => part.className)'),
    )
    evicted = (layer.fates[0, 2, -1] == MEMORY).nonzero()[0].item()
    kept = (layer.fates[0, 2, 5] == KEPT).nonzero().flatten().tolist()
    kept_to_the_end = (layer.fates[0, 2, -1] == KEPT).nonzero()[0].item()
    steps = [point_at(59, 57), point_at(59, evicted), f"() => {classes}"]
    steps += [
        f'() => {{ $("moment").value = 5; $("moment").dispatchEvent(new Event("input")); '
        f"return {classes}; }}"
    ]
    steps += [f"() => Object.fromEntries(fateFacts({kept[0]}, 5))"]
    steps += [
        point_at(59, kept_to_the_end),
        f"() => {{ choose(state.layer, MEAN); return {classes}; }}",
    ]
    steps += [point_at(59, kept_to_the_end)]
    seen = visit(
        inspection_page(inspection, title="m"),
        tmp_path,
        steps,
        width=width,
        address="#layer=1&head=2&language=en",
    )
    weight, memory = (tensor[0, 2, 59] for tensor in (layer.weights, layer.memory_weights))
    assert float(seen[0]["value"]["local weight"]) == pytest.approx(weight[57].item(), rel=1e-2)
    assert float(seen[1]["value"]["memory weight"]) == pytest.approx(
        memory[evicted].item(), rel=1e-2
    )
    assert "What it keeps: Layer 1, head 2" in seen[0]["text"]
    for step, moment in ((2, -1), (3, 5)):
        assert seen[step]["value"] == [
            FATES[number] for number in layer.fates[0, 2, moment].tolist()
        ]
    assert "kept 6" in seen[3]["text"] and "moment=5" in seen[3]["address"]
    until = (layer.fates[0, 2, :, kept[0]] == KEPT).nonzero()[-1].item()
    facts = seen[4]["value"]
    assert facts["kept"] == f"segments {kept[0] // 8 + 2} to {'end' if until == 8 else until}"
    any_head = (layer.fates[0, :, 5] == KEPT).any(0).tolist()
    assert ["kept" in name for name in seen[6]["value"]] == any_head
    assert float(seen[5]["value"]["local weight"]) == pytest.approx(
        weight[kept_to_the_end].item(), rel=1e-2
    )
    gates, weights, memories = (
        getattr(layer, name)[0] for name in ("token_gate", "weights", "memory_weights")
    )
    gates = gates[:, 59, None]
    wanted = (
        (gates * memories[:, 59] + (1 - gates) * weights[:, 59]).mean(0)[kept_to_the_end].item()
    )
    assert float(seen[7]["value"]["in the output"]) == pytest.approx(wanted, rel=1e-2, abs=1e-6)


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.floats(width=32), min_size=1, max_size=20),
    floor=st.floats(1e-6, 2e-3),
    step=st.floats(0.01, 0.2),
)
def test_a_code_is_the_weight_within_its_rounding(weights, floor, step):
    codes = _codes(torch.tensor(weights), floor, step).tolist()
    for weight, code in zip(weights, codes, strict=True):
        assert 0 <= code < 2**16 and (code == 1) == math.isnan(weight)
        if code > 1 and math.isfinite(weight):  # as the page reads it
            shown = math.log(floor) + (code // 2 - 1) * step
            assert shown == pytest.approx(math.log(abs(weight)), abs=step / 2 + 1e-4)
            assert code % 2 == (weight < 0)
        elif code == 0:
            assert abs(weight) <= floor * (1 + 1e-6)
        else:
            assert code >= 2**16 - 4 or math.isnan(weight)  # infinite there, too


DECODED = """() => withHeads.map(layer => [...Array(layer.heads).keys()].map(head => {
  const {before, kinds} = decode(layer, head);
  return PLACES.map(place => kinds[place] ? before[place] : null);
}))"""


def assert_same_weights(inspection, places, tmp_path) -> tuple[float, float]:
    """The page shows each weight within its rounding, and those below its floor as 0; both as it
    says."""
    page = inspection_page(inspection, title="m")
    floor, step = (float(re.search(f'"{name}": ([^,]+),', page)[1]) for name in ("floor", "step"))
    (found,) = visit(page, tmp_path, [DECODED.replace("PLACES", str(places))], width=1280)
    for layer, heads in zip(inspection.layers.values(), found["value"], strict=True):
        weights, unseen = layer.weights[0], layer.scores[0].isinf()
        if layer.gate is not None:
            through = layer.fates[0][:, layer.segments[0]] == MEMORY
            weights = torch.where(through, layer.memory_weights[0], weights)
            unseen &= ~through
        later = torch.ones(weights.shape[1:], dtype=torch.bool).triu(1)
        exact, hidden = weights.flatten(1)[:, places], (unseen | later).flatten(1)[:, places]
        shown = torch.tensor([[number or 0.0 for number in head] for head in heads])
        none = torch.tensor([[number is None for number in head] for head in heads])
        assert torch.equal(none, hidden)
        exact = exact.masked_fill(hidden, 0.0)
        allowed = exact.abs() * math.expm1(step / 2 + 1e-4) + 1e-12
        allowed = allowed.masked_fill(exact.abs() < floor * 1.001, floor * 1.001)
        assert bool(((shown - exact).abs() <= allowed).all())
        assert bool((shown != 0).any())
    return floor, step
    return floor, step


@needs_browser
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_the_page_has_the_exact_weights_within_its_rounding(rule, tmp_path):
    model = infini_gpt2(update_rule=rule, n_positions=256)
    inspection = inspect_attention(model, token_ids(1, 70))
    floor, step = assert_same_weights(inspection, list(range(70 * 70)), tmp_path)
    assert floor < 1e-5 and step == 0.01


@needs_browser
@pytest.mark.slow
def test_a_large_page_is_small_and_rounded(tmp_path):
    count = 1600
    scores = (
        4 * torch.randn(1, 2, count, count, generator=torch.Generator().manual_seed(0))
    ).tril()
    scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -math.inf)
    tensors = {"scores": scores, "weights": scores.softmax(-1)}
    layers = {0: LayerInspection(0, "global", tensors)}
    inspection = Inspection(token_ids(1, count), [["·a"] * count], layers, "m")
    assert len(inspection_page(inspection)) < 0.2 * 2 * count**2  # bytes: noise is the worst case
    places = torch.randint(count**2, (4000,), generator=torch.Generator().manual_seed(1)).tolist()
    floor, step = assert_same_weights(inspection, places, tmp_path)
    assert floor == pytest.approx(1e-10 * count**2) and step == pytest.approx(1e-8 * count**2)


def looking(*ago: list[int]) -> Inspection:
    """Layers of heads, each of which looks at the token that is so many before."""
    count, layers = 40, {}
    hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
    for number, heads in enumerate(ago):
        places = torch.arange(count)
        keys = torch.stack([(places - far).clamp(min=0) for far in heads])
        weights = torch.nn.functional.one_hot(keys, count).float()[None]
        scores = torch.zeros_like(weights).masked_fill(hidden, -math.inf)
        layers[number] = LayerInspection(number, "global", {"scores": scores, "weights": weights})
    layers[len(ago)] = LayerInspection(len(ago), "none")
    return Inspection(token_ids(1, count), [["·a"] * count], layers, "m")


@settings(max_examples=50, deadline=None)
@given(
    ago=st.lists(
        st.lists(st.integers(0, 34), min_size=2, max_size=2), min_size=1, max_size=5
    ).filter(lambda layers: len({far for heads in layers for far in heads}) == 2 * len(layers)),
    most=st.integers(1, 6),
)
def test_layers_are_chosen_by_the_head_that_looks_farthest_back(ago, most):
    """The weights of the first four tokens do not count, as most heads look there."""
    found = looking(*ago)
    for number, heads in enumerate(ago):
        assert reach(found.layers[number]).tolist() == pytest.approx(heads)
    wanted = sorted(range(len(ago)), key=lambda number: -max(ago[number]))[:most]
    assert [*farthest(found, most).layers] == sorted(wanted)
    first = json.loads(re.search(r'"farthest": (\[.*?\])', inspection_page(found))[1])
    assert first == [wanted[0], ago[wanted[0]].index(max(ago[wanted[0]]))]


@pytest.mark.parametrize("gate_init", [-1000.0, 0.3])
def test_how_far_a_head_looks_counts_its_memory_by_the_gate(gate_init):
    """By hand, from what each token weighs in a head's output."""
    options = {"segment_length": 8, "kept_tokens": 6, "gate_init": gate_init}
    model = patch_model(decoder("qwen3"), **options)
    layer = inspect_attention(model, token_ids(1, 60).clamp(min=3)).layers[1]
    gate = layer.token_gate[0, 2]
    far = whole = 0.0
    for query in range(60):
        for key in range(4, query + 1):
            through = layer.fates[0, 2, layer.segments[0, query], key] == MEMORY
            local, memory = (
                part[0, 2, query, key].item() for part in (layer.weights, layer.memory_weights)
            )
            weight = gate[query] * abs(memory) if through else (1 - gate[query]) * local
            far, whole = far + float(weight) * (query - key), whole + float(weight)
    assert reach(layer)[2].item() == pytest.approx(far / whole, rel=1e-4)


@needs_browser
def test_the_page_opens_with_the_head_that_looks_farthest_back(tmp_path):
    page = inspection_page(looking([3, 5], [7, 30], [20, 9]))
    (seen,) = visit(page, tmp_path, ["() => remember()"], width=1280, address="#language=en")
    assert "Layer 1, head 1" in seen["text"] and "layer=1&head=1&" in seen["address"]


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_a_closed_memory_is_called_closed(width, tmp_path):
    options = {"segment_length": 8, "kept_tokens": 6, "gate_init": -1000.0}
    model = patch_model(decoder("qwen3"), **options)
    page = inspection_page(inspect_attention(model, token_ids(1, 60).clamp(min=3)), title="m")
    (seen,) = visit(page, tmp_path, ["() => 0"], width=width, address="#language=en")
    assert "the memory is closed (g = 0)" in seen["text"]
    assert "in the memory 0" not in seen["text"]
    assert re.search(r"Weights are rounded to 0.5 %; sizes below 0.00000\d+ are", seen["text"])


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_no_name_of_a_head_is_cut(width, tmp_path):
    inspection = inspect_attention(causal_mha(n_head=9, n_embd=72), token_ids(1, 20))
    names = """() => [...document.querySelectorAll("#thumbs .name")].map(name => {
      const text = document.createRange(), box = name.getBoundingClientRect();
      text.selectNodeContents(name);
      return text.getBoundingClientRect().width <= box.width + 1 &&
        box.right <= $("thumbs").getBoundingClientRect().right + 1;
    })"""
    (seen,) = visit(inspection_page(inspection, title="m"), tmp_path, [names], width=width)
    assert len(seen["value"]) > 10 and all(seen["value"])


@needs_browser
def test_an_address_brings_the_view_back(tmp_path):
    page = inspection_page(inspect_attention(infini_gpt2(), token_ids(1, 40)), title="m")
    view = "#layer=2&head=mean&query=20&key=3&weights=before&colours=log&language=pt&theme=dark"
    seen = visit(page, tmp_path, ["() => remember()", point_at(20, 3)], width=1280, address=view)
    assert seen[0]["address"] == view
    wrong = "#layer=9&head=x&query=-1&key=1e9&weights=x&colours=x&language=x&theme=x"
    seen = visit(page, tmp_path, ["() => 0"], width=1280, address=wrong)
    assert "39" in seen[0]["text"]


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_models_without_a_memory(width, tmp_path):
    model = causal_mha(attention="local", sliding_window=5, position_encoding="alibi")
    inspection = inspect_attention(model, token_ids(1, 60))
    page = inspection_page(inspection, title="a-name-without-a-break" * 8)
    steps = [point_at(59, 57), "() => choose(state.layer, MEAN)", point_at(59, 57)]
    address = "#layer=0&head=0"
    seen, _, mean = visit(page, tmp_path, steps, width=width, address=address)
    assert "emory" not in seen["text"] and "gate" not in seen["text"]
    weights = inspection.layers[0].weights[0, :, 59, 57]
    assert float(seen["value"]["weight"]) == pytest.approx(weights[0].item(), rel=1e-2)
    assert float(mean["value"]["weight"]) == pytest.approx(weights.mean().item(), rel=1e-2)


@needs_browser
def test_a_broken_page_is_noticed(tmp_path):
    for body, message in (
        ("<script>console.warn('so')</script>", "so"),
        ("<script>missing()</script>", "missing is not defined"),
        ("<p style='width: 2000px'>wide</p>", "390, 16"),
    ):
        with pytest.raises(AssertionError, match=message):
            visit(
                f"<!DOCTYPE html><html><head></head><body>{body}</body></html>",
                tmp_path,
                ["() => 0"],
                width=390,
            )
