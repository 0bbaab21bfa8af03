"""The page of a model's heads: whole, self-contained, and with inspect_attention's numbers."""

import base64
import json
import re
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from corpora.tokenization import build_character_tokenizer, train_bpe
from hf_infini.tools.inspection import inspect_attention
from hf_infini.tools.inspection.page import inspection_page
from models import causal_mha, gpt2, infini_gpt2

TEXT = "A ação do coração é a razão da canção. Não há pão; há mãos, e a ação é ü."


class Page(HTMLParser):
    """What a browser's parser makes of the page: its tags, its attributes, and the content of each
    element."""

    VOID = {"meta", "input", "br"}

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.open, self.content = [], [], [], {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            self.content[self.open[-1]] = self.content.get(self.open[-1], "") + data

    def data(self) -> dict:
        return json.loads(self.content["script", "data"])


def unpacked(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)


def decoded(data: dict, layer: dict, head: int) -> np.ndarray:
    """Weights [queries, keys] of a head from the page's data, NaN where a query sees nothing."""
    count, planes = len(data["tokens"]), unpacked(layer["weights"])
    planes = planes.reshape(-1, layer["heads"], count * (count + 1) // 2).astype(int)
    codes = sum(plane[head] << 8 * place for place, plane in enumerate(planes))
    sizes = data["floor"] * np.exp((codes // 2 - 1) * data["step"]) * np.where(codes % 2, -1, 1)
    weights = np.full((count, count), np.nan)
    weights.T[np.triu_indices(count)] = np.where(codes == 0, 0, np.where(codes == 1, np.nan, sizes))
    return weights


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([TEXT] * 3, 300)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (
            infini_gpt2,
            {
                "sink_tokens": 2,
                "segment_length": 4,
                "layers": [0, 2],
                "kept_tokens": 3,
                "keep_score": "half",
            },
        ),
        (causal_mha, {"attention": "local", "sliding_window": 5, "position_encoding": "alibi"}),
    ],
)
def test_the_page_holds_the_inspection_s_numbers(make, options, bpe):
    model, row = make(vocab_size=len(bpe), **options), 1
    ids = bpe(TEXT, add_special_tokens=False, return_tensors="pt")["input_ids"]
    inspection = inspect_attention(model, torch.cat([ids.flip(1), ids]), bpe)
    data = Page(inspection_page(inspection, title="model", row=row)).data()
    assert data["tokens"] == inspection.texts[row] and data["title"] == "model"
    for number, found in enumerate(data["layers"]):
        layer = inspection.layers[number]
        assert (found["layer"], found["kind"]) == (number, layer.kind)
        wanted = layer.weights[row].masked_fill(layer.scores[row].isinf(), torch.nan)
        assert ("gate" in found) == (layer.kind == "infini")
        if layer.kind == "infini":
            assert found["segments"] == layer.segments[row].tolist()
            memory = layer.memory_weights[row]
            wanted = torch.where(memory == 0, wanted, memory)
            # Five digits are kept
            tensors = {
                "tokenGate": layer.token_gate,
                "share": layer.memory_share,
                "memory": layer.memory_norm,
            }
            for name, tensor in tensors.items():
                assert np.array(found[name]) == pytest.approx(tensor[row].numpy(), rel=1e-4)
            assert found["gate"] == pytest.approx(layer.gate.tolist(), rel=1e-4)
            assert unpacked(found["fates"]).tolist() == layer.fates[row].flatten().tolist()
        for head in range(4):  # half a step, and those below the floor
            assert decoded(data, found, head) == pytest.approx(
                wanted[head].numpy(), rel=0.0051, abs=data["floor"], nan_ok=True
            )


def test_no_token_breaks_the_page():
    text = (
        "</script><script>alert(1)</script><b>&amp;</b> <!-- <script ]]> \\u003c \"'`${a}` \u2028\n"
    )
    tokenizer = build_character_tokenizer([text])
    backend_texts = ["</script>", "<b>", "<!--", "&lt;", "\\u003c"]
    inspection = inspect_attention(
        infini_gpt2(vocab_size=len(tokenizer), n_positions=128), text, tokenizer
    )
    inspection.texts[0][:5] = backend_texts  # pieces of several letters, as a BPE has them
    page = Page(inspection_page(inspection, title='<i>m</i> </title> & "m"'))
    plain = Page(
        inspection_page(inspect_attention(gpt2(), torch.ones(1, 3, dtype=torch.long)), title="m")
    )
    assert page.tags == plain.tags and page.tags.count("script") == 2
    assert page.data()["tokens"] == inspection.texts[0] and page.data()["title"] == (
        '<i>m</i> </title> & "m"'
    )
    assert page.content["title", None] == 'Attention heads: <i>m</i> </title> & "m"'


def test_the_page_needs_nothing_else(bpe):
    text = inspection_page(
        inspect_attention(gpt2(vocab_size=len(bpe), n_positions=128), TEXT, bpe), title="m"
    )
    addresses = re.findall(
        r"https?://[^\"'\s]*|url\(|@import|fetch\(|import\(|XMLHttpRequest", text
    )
    # the name of a namespace, which nobody loads
    assert addresses == ["http://www.w3.org/2000/svg"]
    policy = next(
        value
        for name, value in Page(text).attributes
        if name == "content" and "default-src" in value
    )
    assert "default-src 'none'" in policy and "http" not in policy


def test_numbers_that_are_not_finite_and_layers_without_attention():
    inspection = inspect_attention(infini_gpt2(), torch.ones(1, 20, dtype=torch.long))
    inspection.layers[0].memory_norm[0, 0, 1] = float("inf")
    assert Page(inspection_page(inspection, title="m")).data()["layers"][0]["memory"][0][1] is None
    inspection = inspect_attention(
        causal_mha(attention="none"), torch.ones(1, 20, dtype=torch.long)
    )
    assert Page(inspection_page(inspection)).data()["layers"][1] == {"layer": 1, "kind": "none"}
