"""The page that asks a document: served, opened in a browser, and used by its own client."""

import subprocess

import pytest

from browser import BROWSER, needs_browser
from corpora.tokenization import train_bpe
from decoders import decoder
from hf_infini import patch_model
from running import sample_text

gradio = pytest.importorskip("gradio", reason="pip install 'hf-infini[demo]'")
TEXT = sample_text()[:900].strip()


@pytest.fixture(scope="module")
def address():
    from hf_infini.tools.demo import Demo

    tokenizer = train_bpe([sample_text()], 400)
    tokenizer.chat_template = (
        "{% for turn in messages %}{{ turn.role }}\n{{ turn.content }}\n{% endfor %}"
    )
    options = {"segment_length": 16, "sink_tokens": 2, "kept_tokens": 12}
    model = patch_model(decoder("qwen3", vocab_size=400), **options).eval()
    page = Demo(model, tokenizer, max_new_tokens=6).page()
    _, local, _ = page.launch(prevent_thread_lock=True, quiet=True)
    yield local
    page.close()


def test_a_document_is_read_asked_and_what_is_kept_shown(address, tmp_path):
    from gradio_client import Client, handle_file

    client = Client(address, verbose=False)
    with pytest.raises(Exception, match="Read a document first"):
        client.predict("Who?", [], api_name="/answer")
    with pytest.raises(Exception, match="Choose a document first"):
        client.predict(None, api_name="/read")
    (tmp_path / "play.txt").write_text(TEXT, encoding="utf-8")
    table, chat = client.predict([handle_file(str(tmp_path / "play.txt"))], api_name="/read")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]
    assert len({row[1] for row in rows}) == 1 and len({row[2] for row in rows}) == 4 and chat == []
    for turn in range(2):
        question, chat = client.predict("Who speaks?", chat, api_name="/answer")
        assert question == "" and [said["role"] for said in chat] == ["user", "assistant"] * (
            turn + 1
        )
    kept = client.predict(1, 0, api_name="/kept")
    assert "".join(piece["token"] for piece in kept) == TEXT
    assert 1 <= len([piece for piece in kept if piece["class_or_confidence"] == "kept"]) <= 12


@needs_browser
def test_the_page_opens_in_a_browser(address, tmp_path):
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--dump-dom",
    ]
    command += ["--virtual-time-budget=30000", "--enable-logging=stderr", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "Ask a document" in done.stdout and "What a head keeps" in done.stdout
    assert "Uncaught" not in done.stderr, done.stderr[-2000:]
