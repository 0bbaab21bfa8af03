"""Documents of a server: read once, asked by their ids, mended, and deleted wholly."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

openai = pytest.importorskip("openai", reason="pip install '.[test]'")
pytest.importorskip("prometheus_client", reason="pip install '.[serve]'")

from hf_infini.tools.reader import Reader  # noqa: E402
from served import served_model  # noqa: E402
from serving import (  # noqa: E402
    BODY,
    GREEDY,
    TEXT,
    TOKENIZER,
    asked,
    client_of,
    running,
    upload,
    user,
    wait_until,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("kept"), slots=4) as server:
        yield server


@pytest.fixture
def client(server):
    return client_of(server)


def test_documents_are_read_once_and_asked_by_their_id(server, client):
    texts = [TEXT[2000:4500].strip(), TEXT[9000:10500].strip()]  # as files are read
    documents = [upload(client, text, f"{number}.txt") for number, text in enumerate(texts)]
    listed = {each.id: each for each in client.files.list()}
    assert {document.id for document in documents} <= listed.keys()
    assert listed[documents[0].id].bytes == len(texts[0].encode())
    assert upload(client, texts[0], "again.txt").id == documents[0].id  # the same text
    question = user("Who is the king?")
    for chosen in (documents[:1], documents):
        reader = Reader(server.model, TOKENIZER, archive=True)
        reader.read_documents(texts[: len(chosen)], progress=False)
        said = reader.chat(question, max_new_tokens=12, do_sample=False)
        body = {"document": [document.id for document in chosen]}
        reply = asked(client, question, max_tokens=12, extra_body=body, **GREEDY)
        assert reply.choices[0].message.content.strip() == said
        assert reply.usage.prompt_tokens_details.cached_tokens > sum(map(len, texts[: len(chosen)]))
        found = [(source["document"], source["text"]) for source in reply.sources]
        shown = [(chosen[each.document].id, each.text) for each in reader.passages[0]]
        assert found and found == shown[:3]
    # after another beginning of the chat it is read once more
    messages = [{"role": "system", "content": "Say little."}, *question]
    reader = Reader(server.model, TOKENIZER, archive=True)
    reader.read_document(texts[0], progress=False, before=messages[:1])
    said = reader.chat(messages, max_new_tokens=12, do_sample=False)
    body = {"document": documents[0].id}
    for cached in (False, True):
        reply = asked(client, messages, max_tokens=12, extra_body=body, **GREEDY)
        assert reply.choices[0].message.content.strip() == said
        assert (reply.usage.prompt_tokens_details.cached_tokens > len(texts[0])) == cached
    assert client.files.delete(documents[0].id).deleted
    with pytest.raises(openai.NotFoundError, match="no document"):
        asked(client, question, extra_body=body)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(documents[0].id)
    kept = [path.name for path in server.library.memories.glob("*.safetensors")]
    assert len(kept) == len([*server.library])


def test_documents_are_archived_in_8_bits(tmp_path):
    """And a server without that option reads them into other files."""
    texts, sizes = [TEXT[2000:4500].strip(), TEXT[9000:10500].strip()], []
    for archive in ("int8", True):
        model = served_model("llama, recalls", TOKENIZER)
        reader = Reader(model, TOKENIZER, archive=archive)
        reader.read_documents(texts, progress=False)
        said = reader.chat(user("Who is the king?"), max_new_tokens=12, do_sample=False)
        with running(tmp_path, archive=archive) as server:
            client = client_of(server)
            body = {"document": [upload(client, text, "one.txt").id for text in texts]}
            reply = asked(
                client, user("Who is the king?"), max_tokens=12, extra_body=body, **GREEDY
            )
            assert reply.choices[0].message.content.strip() == said
            files = server.library.memories.glob("*.archive")
            sizes.append(sum(file.stat().st_size for file in files))
    assert len([*server.library.memories.glob("*.archive")]) == 4
    width = model.config.head_dim  # of float64
    assert (sizes[1] - sizes[0]) * (width + 4) == pytest.approx(sizes[0] * width * 8, rel=0.01)


def test_short_documents_are_read_as_one_text(server, client):
    texts = ["A rose.", "A thorn."]
    documents = [upload(client, text, f"{number}.txt") for number, text in enumerate(texts)]
    reader = Reader(server.model, TOKENIZER, archive=True)
    reader.read_document("\n\n".join(texts), progress=False)
    said = reader.chat(user("What?"), max_new_tokens=9, do_sample=False)
    body = {"document": [document.id for document in documents]}
    reply = asked(client, user("What?"), max_tokens=9, extra_body=body, **GREEDY)
    assert reply.choices[0].message.content.strip() == said
    for document in documents:
        client.files.delete(document.id)


def test_the_ids_of_a_document_are_made_once(server):
    context = server.prompts.context
    assert context("<user>", TEXT[:500]) is context("<user>", TEXT[:500])


def kept_of(server) -> list[str]:
    return sorted(path.name for path in server.library.memories.glob("*"))


@pytest.mark.parametrize("part", (".archive", ""))
def test_what_is_damaged_is_read_again(tmp_path, part):
    """A question finds it out, and is answered when it is sent once more."""
    with running(tmp_path) as server:
        client = client_of(server)
        document = upload(client, TEXT[2000:6000])
        body = {"document": document.id}
        if part:  # the cache is in memory, and its archive damaged
            said = asked(client, user("Who?"), max_tokens=9, extra_body=body, **GREEDY)
        [file] = server.library.memories.glob(f"*.safetensors{part}")
        content = bytearray(file.read_bytes())
        content[len(content) // 4 :] = bytes(len(content) - len(content) // 4)
        file.write_bytes(content)
        with pytest.raises(openai.InternalServerError, match="read again"):
            asked(client, user("Who?"), max_tokens=9, extra_body=body, **GREEDY)
        again = asked(client, user("Who?"), max_tokens=9, extra_body=body, **GREEDY)
        if part:
            assert again.choices[0].message.content == said.choices[0].message.content
        assert again.sources and not server.engine._open


@pytest.mark.slow
def test_nothing_is_left_of_a_document_that_is_deleted_while_it_is_read(tmp_path):
    with running(tmp_path, slow=0.01, chunk=16) as server:
        client, engine = client_of(server), server.engine
        document = client.files.create(file=("long.txt", TEXT[:20_000].encode()), purpose="x")
        wait_until(lambda: kept_of(server))
        client.files.delete(document.id)
        wait_until(lambda: not engine._turns)
        assert asked(client, user("To be"), max_tokens=3, **GREEDY).choices
        again = client.files.create(file=("long.txt", TEXT[:2000].encode()), purpose="x")
        wait_until(lambda: client.files.retrieve(again.id).status == "processed")
        [memory] = server.library.memories.glob("*.safetensors")
        assert {name.partition(".")[0] for name in kept_of(server)} == {memory.stem}


@pytest.mark.slow
def test_who_waits_for_a_document_takes_a_place(tmp_path):
    with running(tmp_path, slow=0.02, chunk=32, slots=1, queue=1) as server:
        client = client_of(server)
        document = client.files.create(file=("long.txt", TEXT[:4000].encode()), purpose="x")
        url, body = f"{server.address}/v1/chat/completions", BODY | {"document": document.id}
        with ThreadPoolExecutor(5) as pool:
            sent = [pool.submit(httpx.post, url, json=body, timeout=120) for _ in range(5)]
            found = sorted(each.result().status_code for each in sent)
        assert found == [200, 200, 429, 429, 429]
        assert server.api._beside == 0


def test_the_same_document_may_come_many_times_at_once(tmp_path):
    with running(tmp_path) as server:
        content = TEXT[:3000].encode()
        with ThreadPoolExecutor(8) as pool:
            found = [*pool.map(lambda _: server.library.add("a.txt", content), range(8))]
        assert len({id(each) for each in found}) == 1
