"""The page of a model's heads and the recipe that writes it: whole, self-contained, and with
inspect_attention's numbers."""

import base64
import json
import re
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from bad_input import refused
from corpora.tokenization import build_character_tokenizer, train_bpe
from hf_infini.tools.inspection import inspect_attention
from hf_infini.tools.inspection.page import inspection_page
from models import causal_mha, gpt2, infini_gpt2
from plots.kept import COLUMNS, LOOKS, token_places
from running import load_recipe

inspect_heads = load_recipe("inspect_heads")
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


# --- the recipe -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory, bpe):
    """Folders of small models with a tokenizer, by kind."""
    base, sizes = (
        tmp_path_factory.mktemp("models"),
        {"vocab_size": len(bpe), "pad_token_id": bpe.pad_token_id},
    )
    made = {
        "hybrid": infini_gpt2(layers=[0, 2], position_encoding="segment", kept_tokens=4, **sizes),
        "gpt2": gpt2(**sizes),
        "none": causal_mha(attention="none", **sizes),
        "long": infini_gpt2(
            segment_length=90, local_segments=1, position_encoding="rope", n_layer=1, **sizes
        ),
    }
    for name, model in made.items():
        model.save_pretrained(base / name)
        bpe.save_pretrained(base / name)
    return base


def inspect(*options) -> None:
    inspect_heads.main([*map(str, options), "--device", "cpu"])


def data_of(out, *others) -> dict:
    assert sorted(file.name for file in out.iterdir()) == ["heads.html", *others]
    return Page((out / "heads.html").read_text(encoding="utf-8")).data()


def test_a_checkpoint_and_a_text_become_a_page(models, bpe, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(f"{TEXT} {TEXT}\n", encoding="utf-8")
    inspect(
        "--model",
        models / "hybrid",
        "--text_file",
        tmp_path / "text.txt",
        "--max_tokens",
        30,
        "--picture",
        2,
        3,
    )
    shown, out = capsys.readouterr(), models / "hybrid" / "heads"
    ids = bpe(f"{TEXT} {TEXT}", add_special_tokens=False)["input_ids"]
    assert (
        shown.out.startswith(f"{out / 'heads.html'} (")
        and (f"30 of the text's {len(ids)} tokens") in shown.err
    )
    data = data_of(out, "kept_2_3.png")
    pixels = (255 * imread(out / "kept_2_3.png")[..., :3]).round().astype(np.uint8)
    shades = {bytes(pixel) for pixel in np.unique(pixels.reshape(-1, 3), axis=0)}
    seen = {
        name
        for name, (_, background, _) in LOOKS.items()
        if bytes.fromhex(background[1:]) in shades
    }
    assert seen == {"kept", "window", "memory", "none"}  # the last two are white; there is no sink
    assert len(data["tokens"]) == 30 and [layer["kind"] for layer in data["layers"]] == [
        "infini",
        "global",
        "infini",
    ]
    model = infini_gpt2(
        layers=[0, 2], position_encoding="segment", kept_tokens=4, vocab_size=len(bpe)
    )
    layer = inspect_attention(model, torch.tensor([ids[:30]])).layers[2]
    wanted = (layer.weights + layer.memory_weights)[0, 3].numpy()  # a token has one of the two
    found = np.nan_to_num(decoded(data, data["layers"][2], 3))
    assert found == pytest.approx(wanted, rel=0.0051, abs=data["floor"])


def test_lines_of_the_picture_end_between_words():
    texts = ["In", "·the", "·begin", "ning", "⏎", "·a", *["·word", "s"] * 60, *["xyz"] * 40]
    places = token_places(texts)
    assert places[3:6] == [(0, 12), (0, 16), (1, 0)]  # the line break itself is still in its line
    assert all(
        column + len(text) <= COLUMNS for text, (_, column) in zip(texts, places, strict=True)
    )
    assert all(
        line == places[number - 1][0]
        for number, (line, _) in enumerate(places)
        if texts[number] == "s"
    )
    assert places[-1][0] == 6


def test_without_a_text_a_story_reaches_the_memory(models, tmp_path, capsys):
    for name, tokens in (("gpt2", 64), ("long", 270)):
        inspect("--model", models / name, "--layers", 0, "--out", tmp_path)
        assert "no token reads" not in capsys.readouterr().err
        data = data_of(tmp_path)
        assert len(data["tokens"]) == tokens
    assert all(share > 0 for head in data["layers"][0]["share"] for share in head[-90:])
    inspect("--model", models / "long", "--text", TEXT, "--out", tmp_path)
    assert "no token reads the memory: that takes more than 180 tokens" in capsys.readouterr().err


def test_what_is_refused(models, tmp_path, capsys, monkeypatch):
    for name, options, message in (
        (
            "gpt2",
            ["--text", "a" * 65],
            "65 tokens, but this model has 64 learned positions: ask for fewer",
        ),
        ("hybrid", ["--text", "a", "--picture", "2"], "--picture takes two numbers"),
        (
            "hybrid",
            ["--text", "a", "--picture", "1", "0"],
            "--picture 1 0: there is no such head with a memory",
        ),
        (
            "hybrid",
            ["--text", "a", "--picture", "2", "4"],
            "--picture 2 4: there is no such head with a memory",
        ),
        (
            "gpt2",
            ["--text", "a", "--text_file", "b"],
            "give one of --text and --text_file, not both",
        ),
        ("none", ["--text", "a"], "has no attention heads"),
    ):
        refused(
            inspect_heads.main,
            ["--model", models / name, *options, "--out", tmp_path / "out"],
            capsys,
            message,
        )
    refused(
        inspect_heads.main,
        ["--model", "nowhere"],
        capsys,
        "--out is needed, as --model nowhere is no folder here",
    )
    monkeypatch.setattr(inspect_heads, "LARGEST_PAGE", 1000)
    argv = ["--model", models / "gpt2", "--text", "a", "--out", tmp_path / "out"]
    refused(inspect_heads.main, argv, capsys, "choose fewer --layers or --max_tokens")
    assert not (tmp_path / "out").exists()
