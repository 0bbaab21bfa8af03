"""The page of a model's heads in a browser: no errors, nothing wider than the window, and it says what was found."""

import sys
import tempfile
import webbrowser
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from browser import needs_browser, visit
from hf_infini.tools.inspection import inspect_attention
from hf_infini.tools.inspection.page import inspection_page
from models import gpt2, infini_gpt2, token_ids

WIDTHS = (1280, 390)


def point_at(query: int, key: int) -> str:
    """A step: what the tip says of this cell."""
    return f"() => {{ moveTo({query}, {key}); return Object.fromEntries(facts()); }}"


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_a_memory_is_seen_in_map_tip_and_text(width, tmp_path):
    inspection = inspect_attention(infini_gpt2(update_rule="delta", n_positions=256), token_ids(1, 200))
    layer, page = inspection.layers[1], inspection_page(inspection, title="a model")
    steps = [point_at(30, 28), point_at(30, 5), point_at(30, 190), '() => $("language").click()', '() => $("theme").click()']
    steps += ["() => choose(state.layer, MEAN)", '() => { $("view").value = "before"; $("view").onchange(); }']
    steps += ['() => [...$("sentence").children].filter(part => part.className === "later").length']
    steps += [point_at(30, 5)]
    seen = visit(page, tmp_path, steps, width=width, address="#layer=1&head=2&language=en")
    gate = layer.token_gate.values[0, 2, 30].item()
    weight, memory = layer.weights.values[0, 2, 30, 28].item(), layer.memory_weights.values[0, 2, 30, 5].item()
    # Three digits of small numbers
    local, through, none = (step["value"] for step in seen[:3])
    assert float(local["local weight"]) == pytest.approx(weight, rel=5e-3)
    assert float(local["in the output"]) == pytest.approx((1 - gate) * weight, rel=5e-3)
    assert float(through["memory weight"]) == pytest.approx(memory, rel=5e-3)
    assert float(through["in the output"]) == pytest.approx(gate * memory, rel=5e-3)
    assert none["weight"] == "none: the key comes later"
    assert "purple where their weight is negative" in seen[0]["text"] and seen[0]["language"] == "en"
    assert "Camada 1, cabeça 2 (infini)" in seen[3]["text"] and seen[3]["language"] == "pt"
    assert "Layer" not in seen[3]["text"]
    assert "theme=dark" in seen[4]["address"]
    assert "média das cabeças" in seen[5]["text"] and "head=mean" in seen[5]["address"]
    assert "weights=before" in seen[6]["address"]
    assert seen[7]["value"] == 200 - 31  # every token before the query is seen, the later ones are not
    mean, memories = seen[8]["value"], layer.memory_weights.values[0, :, 30, 5]
    assert float(mean["peso na memória"]) == pytest.approx(memories.mean().item(), rel=5e-3)
    mixed = (layer.token_gate.values[0, :, 30] * memories).mean().item()
    assert float(mean["na saída"]) == pytest.approx(mixed, rel=5e-3) and "pontuação" not in mean


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
    inspection = inspect_attention(gpt2(), token_ids(1, 60))
    page = inspection_page(inspection, title="a-name-without-a-break" * 8)
    steps = [point_at(59, 57), "() => choose(state.layer, MEAN)", point_at(59, 57)]
    seen, _, mean = visit(page, tmp_path, steps, width=width)
    assert "emory" not in seen["text"] and "gate" not in seen["text"]
    weights = inspection.layers[0].weights.values[0, :, 59, 57]
    assert float(seen["value"]["weight"]) == pytest.approx(weights[0].item(), rel=5e-3)
    assert float(mean["value"]["weight"]) == pytest.approx(weights.mean().item(), rel=5e-3)


# --- show -------------------------------------------------------------------------------------------------------------


def test_a_browser_shows_a_temporary_file(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    inspection = inspect_attention(gpt2(), token_ids(2, 9))
    file = inspection.show(row=1)
    assert opened == [file.as_uri()] and file.parent == tmp_path
    assert file.read_text(encoding="utf-8") == inspection_page(inspection, title="GPT2LMHeadModel", row=1)
    with pytest.raises(ValueError, match="row must be 0 to 1; got 2"):
        inspection.show(row=2)


def test_a_notebook_shows_the_page_below_the_cell(monkeypatch):
    shown = []
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=lambda text: text, display=shown.append))
    inspection = inspect_attention(infini_gpt2(), token_ids(1, 20))
    assert inspection.show(title="<m>") is None
    frames = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: frames.append((tag, dict(attributes)))
    for text in (*shown, inspection._repr_html_()):
        parser.feed(text)
    assert [tag for tag, _ in frames] == ["iframe"] * 2
    assert frames[0][1]["srcdoc"] == inspection_page(inspection, title="<m>")
    assert frames[1][1]["srcdoc"] == inspection_page(inspection, title="InfiniGPT2LMHeadModel")
