"""The page that asks a document: served, opened in a browser, and used by its own client."""

import subprocess
from pathlib import Path

import pytest

from browser import BROWSER, needs_browser
from corpora.tokenization import train_bpe
from decoders import decoder
from hf_infini import patch_model
from running import sample_text

gradio = pytest.importorskip("gradio", reason="pip install 'hf-infini[demo]'")
TEXT = sample_text()[:900].strip()


@pytest.fixture(scope="module")
def demo():
    from hf_infini.tools.demo import Demo

    tokenizer = train_bpe([sample_text()], 400)
    tokenizer.chat_template = (
        "{% for turn in messages %}{{ turn.role }}\n{{ turn.content }}\n{% endfor %}"
    )
    options = {"segment_length": 16, "sink_tokens": 2, "kept_tokens": 80}
    model = patch_model(decoder("qwen3", vocab_size=400), **options).eval()
    return Demo(model, tokenizer, max_new_tokens=100, archive=True)


@pytest.fixture(scope="module")
def address(demo):
    page = demo.page()
    _, local, _ = page.launch(prevent_thread_lock=True, quiet=True)
    yield local
    page.close()


def read(client, folder, text: str = TEXT) -> list[str]:
    from gradio_client import handle_file

    (folder / "play.txt").write_text(text, encoding="utf-8")
    table, chat = client.predict([handle_file(str(folder / "play.txt"))], api_name="/read")
    assert chat == []
    return table.splitlines()[2:]


def said(chat: list[dict]) -> list[str]:
    return ["".join(part["text"] for part in turn["content"]) for turn in chat]


def test_a_document_is_read_asked_and_what_is_kept_shown(address, tmp_path):
    from gradio_client import Client

    client = Client(address, verbose=False)
    for early in (("Who?", [], "/answer"), (1, 0, "/kept")):
        with pytest.raises(Exception, match="Read a document first"):
            client.predict(*early[:2], api_name=early[2])
    with pytest.raises(Exception, match="Choose a document first"):
        client.predict(None, api_name="/read")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in read(client, tmp_path)
    ]
    assert len({row[1] for row in rows}) == 1 and len({row[2] for row in rows}) == 4
    assert not any(" " in cell for row in rows for cell in row)  # no line breaks inside of one
    chat = []
    for turn in range(2):
        box, chat, passages = client.predict("Who speaks?", chat, api_name="/answer")
        assert passages.split("\n\n…\n\n")[0][:20] in TEXT
        assert box["submit_btn"] and not box["stop_btn"] and "value" not in box
        assert [each["role"] for each in chat] == ["user", "assistant"] * (turn + 1)
    with pytest.raises(Exception, match="Type a question first"):
        client.predict(" ", chat, api_name="/answer")
    kept = client.predict(1, 0, api_name="/kept")
    assert "".join(piece["token"] for piece in kept) == TEXT
    assert 1 <= len([piece for piece in kept if piece["class_or_confidence"] == "kept"]) <= 80


@pytest.mark.parametrize("name", ["<b>play<b>.txt", "play.pdf"])
def test_a_refused_file_has_its_own_name_and_no_traceback(address, name, tmp_path, capfd):
    from gradio_client import Client, handle_file

    client = Client(address, verbose=False)
    (tmp_path / name).write_bytes(b"\xff words")
    with pytest.raises(Exception) as refused:
        client.predict([handle_file(str(tmp_path / name))], api_name="/read")
    message = str(refused.value)
    assert Path(name).stem.strip("<>b") in message and "<" not in message
    assert str(tmp_path) not in message and "gradio" not in message and "/" not in message
    assert "Traceback" not in "".join(capfd.readouterr())


def test_pages_have_their_own_documents(address, tmp_path):
    from gradio_client import Client

    first, second = (Client(address, verbose=False) for _ in range(2))
    read(first, tmp_path)
    with pytest.raises(Exception, match="Read a document first"):
        second.predict("Who?", [], api_name="/answer")
    read(second, tmp_path, TEXT[:450])
    for client, text in ((first, TEXT), (second, TEXT[:450].strip())):
        kept = client.predict(1, 0, api_name="/kept")
        assert "".join(piece["token"] for piece in kept) == text


def test_a_stopped_answer_stays_and_the_next_question_works(demo, tmp_path):
    """The generator that the page runs, between whose pieces the stop button is pressed."""
    (tmp_path / "play.txt").write_text(TEXT, encoding="utf-8")
    session, *_ = demo.read([str(tmp_path / "play.txt")])
    whole = [*demo.answer("Who speaks?", [], session)][-1][1]
    session, *_ = demo.read([str(tmp_path / "play.txt")])
    steps = demo.answer("Who speaks?", [], session)
    box, chat, _ = next(steps)
    assert box.value == "" and box.stop_btn and not box.submit_btn and chat[-1]["content"] == ""
    box, chat, _ = next(steps)
    assert "value" not in box  # what is typed now stays
    demo.stop(session)
    steps = [*steps]
    box, chat, _ = steps[-1]
    assert box.submit_btn and not box.stop_btn
    assert len(chat) == 2 and whole[1]["content"].startswith(chat[1]["content"])
    read = session.reader.turns[-1][1].get_seq_length()
    assert read < len(TEXT) + demo.max_new_tokens  # the model has stopped, too
    again = [*demo.answer("And then?", chat, session)][-1][1]
    assert again[:2] == chat and len(again) == 4
    demo.stop(None)


def test_a_page_that_is_closed_ends_its_answer(demo, tmp_path):
    (tmp_path / "play.txt").write_text(TEXT, encoding="utf-8")
    session, *_ = demo.read([str(tmp_path / "play.txt")])
    steps = demo.answer("Who speaks?", [], session)
    next(steps), next(steps)
    steps.close()
    assert session.stopped.is_set()


def test_an_answer_that_fails_gives_the_question_back(demo, tmp_path):
    (tmp_path / "play.txt").write_text(TEXT, encoding="utf-8")
    session, *_ = demo.read([str(tmp_path / "play.txt")])
    turns, steps = [{"role": "user", "content": "x"}], []
    session.reader.chunk = None  # and nothing can be read
    with pytest.raises(gradio.Error, match="NoneType"):
        for step in demo.answer("Who speaks?", turns, session):
            steps.append(step)
    box, chat, _ = steps[-1]
    assert box.value == "Who speaks?" and box.submit_btn and chat == turns


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
