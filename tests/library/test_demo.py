"""The page that asks a document: served, opened in a browser, and used by its own client."""

import re
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
        box, chat, passages, marked = client.predict("Who speaks?", chat, api_name="/answer")
        assert passages.startswith("[1] ") and passages[4:24] in TEXT
        labels = [each["class_or_confidence"] for each in marked if each["token"] in TEXT]
        assert {"1"} <= {*labels} <= {None, "1", "2", "3", "further"}
        assert box["submit_btn"] and not box["stop_btn"] and "value" not in box
        assert [each["role"] for each in chat] == ["user", "assistant"] * (turn + 1)
    with pytest.raises(Exception, match="Type a question first"):
        client.predict(" ", chat, api_name="/answer")
    kept = client.predict(1, 0, api_name="/kept")
    assert "".join(piece["token"] for piece in kept) == TEXT
    assert 1 <= len([piece for piece in kept if piece["class_or_confidence"] == "kept"]) <= 80


FACTS = (
    "The gardener keeps zinnias.",
    "Ein Kapitän 👩‍👩‍👧 hid the café’s compass.",
    "<|endoftext|>!",
)


@pytest.fixture(scope="module")
def several(demo):
    """Without a memory of what leaves the window, and with fewer places than the documents have."""
    from hf_infini.tools.demo import Demo

    options = {"segment_length": 16, "sink_tokens": 2, "kept_tokens": 400, "update_rule": "none"}
    options |= {"local_segments": 1, "keep_score": "recent", "mask_special_tokens": False}
    plain = decoder("llama", vocab_size=400, max_position_embeddings=8192)
    model = patch_model(plain, **options).eval()
    return Demo(model, demo.tokenizer, max_new_tokens=5, archive=True)


def files_of(folder, texts) -> list[str]:
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8", newline="")
    return [str(folder / f"{number}.txt") for number in range(len(texts))]


@pytest.mark.parametrize("pages", [[1], [8], [1, 8, 2, 1]])
def test_files_are_read_apart_and_what_an_answer_looked_at_is_marked(pages, several, tmp_path):
    """In the text as it is, and not all of a long one; the list has the first ones, by number."""
    words = sample_text()
    texts = [
        "\r\n".join(
            [f"{number}{words[:400]}", *FACTS[number % 3 :][:1] * 2, words[400 : 900 * size]]
        )
        for number, size in enumerate(pages)
    ]
    session, table, _ = several.read(files_of(tmp_path, [*texts, texts[0]]))  # one of them twice
    tokens = int(table.splitlines()[2].split("|")[1].replace(",", ""))
    read = "\n\n".join(session.texts)
    assert len(several.tokenizer(read)["input_ids"]) <= tokens + len(pages) * 2
    *_, (_, _, listed, marked) = several.answer(FACTS[0], [], session)
    names = [f"0.txt, {len(texts)}.txt"] + [f"{number}.txt" for number in range(1, len(pages))]
    assert session.names == names and session.texts == [
        "\n".join(text.splitlines()).strip() for text in texts
    ]
    if len(pages) > 1:
        assert listed.startswith(f"[1] {names[0]}: ")
    first = [piece for piece, label in marked if label == "1"]
    assert len(first) == 1 and "zinnias" in "".join(piece for piece, label in marked if label)
    passages = session.reader.passages[0]
    for number, passage in enumerate(passages[:3], 1):
        assert re.search(rf"\[{number}\] .*{re.escape(passage.text.strip())}", listed, re.DOTALL)
        own = [piece for piece, label in marked if label == str(number)]
        # halves of a character at its ends are decoded to none
        assert passage.text.strip("\ufffd \n") in own[0] in session.texts[passage.document]
    assert len([label for _, label in marked if label]) == len(passages)
    assert sum(len(piece) for piece, _ in marked) < 6000 < max(9000, len(read))
    shown = "".join(piece for piece, _ in marked)
    assert ("…\n\n" in shown or "… from" in shown) == (max(pages) > 1)


def test_files_that_cannot_be_read_apart_are_one_text(demo, tmp_path):
    """Of a model with a memory of what leaves its window."""
    session, *_ = demo.read(files_of(tmp_path, [TEXT[:400], TEXT[400:]]))
    assert len(session.texts) == 1 and session.names == ["0.txt, 1.txt"]
    assert "".join(piece for piece, _ in demo.kept(1, 0, session)) == session.texts[0]


def test_what_a_head_keeps_is_shown_in_the_document_that_goes_on(several, tmp_path):
    texts = [sample_text()[:3000], f"{FACTS[1]} " * 60, FACTS[0]]
    session, *_ = several.read(files_of(tmp_path, texts))
    kept = several.kept(1, 0, session)
    assert "".join(piece for piece, _ in kept) == session.texts[1]
    # the latest ones that have left the window, and their characters whole
    [(place, shown)] = [(place, one) for place, (one, label) in enumerate(kept) if label]
    assert len(shown) > 200 and place == len(kept) - 2 and "\ufffd" not in shown


def test_a_tokenizer_that_does_not_say_where_tokens_are(several, tmp_path, monkeypatch):
    monkeypatch.setattr(type(several.tokenizer), "is_fast", False)
    session, *_ = several.read(files_of(tmp_path, [sample_text()[:3000]]))
    *_, (_, chat, listed, marked) = several.answer("Who?", [], session)
    assert len(chat) == 2 and listed and "does not say where" in marked[0][0]
    with pytest.raises(gradio.Error, match="does not say where"):
        several.kept(1, 0, session)


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
    box, chat, *_ = next(steps)
    assert box.value == "" and box.stop_btn and not box.submit_btn and chat[-1]["content"] == ""
    box, chat, *_ = next(steps)
    assert "value" not in box  # what is typed now stays
    demo.stop(session)
    steps = [*steps]
    box, chat, *_ = steps[-1]
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
    box, chat, *_ = steps[-1]
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
