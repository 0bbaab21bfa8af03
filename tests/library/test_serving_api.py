"""The server by the client of OpenAI and by raw requests: nobody gets the text of another, and
nobody is left without a word."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
import uvicorn

import hf_infini
from decoders import decoder
from hf_infini.tools.reader import Reader
from hf_infini.tools.serving.prompts import Prompts
from running import sample_text
from served import alone, served_model, served_tokenizer

openai = pytest.importorskip("openai", reason="pip install '.[test]'")
pytest.importorskip("prometheus_client", reason="pip install '.[serve]'")

from hf_infini.tools.serving.server import Settings, application  # noqa: E402

TEXT = sample_text()
TOKENIZER = served_tokenizer()
GREEDY = {"temperature": 0}


@contextlib.contextmanager
def running(folder: Path, kind: str = "llama, recalls", slow: float = 0, **options):
    """A server of a small model in this process, on a free port; `slow`: seconds of each call."""
    model = served_model(kind, TOKENIZER)
    if slow:
        model.model.register_forward_pre_hook(lambda *args: time.sleep(slow))
    settings = Settings("small", folder, **{"max_tokens": 200} | options)
    app, engine, library = application(model, TOKENIZER, kind == "llama, recalls", settings)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(512)
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        server.engine, server.library, server.model = engine, library, model
        server.address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        try:
            yield server
        finally:
            engine.stop()
            library.close()
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("kept"), slots=4) as server:
        yield server


def client_of(server, **options):
    given = {"api_key": "none", "max_retries": 0} | options
    return openai.OpenAI(base_url=f"{server.address}/v1", **given)


@pytest.fixture
def client(server):
    return client_of(server)


def wait_until(holds, seconds: int = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def wanted(server, messages, new: int, stops=(), seed=0, **options):
    """The text, and how it ends, of a request that nobody else is beside."""
    model = server.model
    prompt = Prompts(Reader(model, TOKENIZER, archive=True)).of_chat(messages)
    config, _ = model._prepare_generation_config(None, **options or {"do_sample": False})
    _, text, reason = alone(model, TOKENIZER, prompt, config, new, stops, seed, archive=True)
    return text, reason


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def asked(client, messages, **options):
    return client.chat.completions.create(model="small", messages=messages, **options)


CHATS = {
    "short": user("To be"),
    "long, whose end recalls from its beginning": user(TEXT[:1500]),
    "several turns": [
        {"role": "system", "content": TEXT[40:100]},
        *user(TEXT[:200]),
        {"role": "assistant", "content": TEXT[500:560]},
        *user("And then?"),
    ],
    "in parts": [{"role": "user", "content": [{"type": "text", "text": "To "}] * 2}],
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_answered_as_without_a_server(server, client, name):
    messages = CHATS[name]
    flat = [
        turn if isinstance(turn["content"], str) else {**turn, "content": "To To "}
        for turn in messages
    ]
    text, reason = wanted(server, flat, 12)
    reply = asked(client, messages, max_tokens=12, **GREEDY)
    [choice] = reply.choices
    assert (choice.message.content, choice.finish_reason) == (text, reason)
    assert choice.message.role == "assistant"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    again = asked(client, messages, max_completion_tokens=12, **GREEDY)
    assert again.choices[0].message.content == text
    if "long" in name:
        assert again.usage.prompt_tokens_details.cached_tokens > 1000
    stream = asked(
        client,
        messages,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    pieces = [*stream]
    said = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    assert "".join(said) == text and pieces[-1].usage.total_tokens == reply.usage.total_tokens
    assert [p.choices[0].finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 2) + [
        reason
    ]


def test_seeds_penalties_and_stop_strings(server, client):
    messages = user("Who is there?")
    text, reason = wanted(
        server, messages, 40, ("e",), 7, do_sample=True, temperature=0.9, top_p=0.9
    )
    options = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 40, "stop": "e"}
    replies = [asked(client, messages, seed=seed, **options).choices[0] for seed in (7, 7, 8)]
    assert [replies[0].message.content, replies[0].finish_reason] == [text, reason]
    assert replies[1].message.content == text != replies[2].message.content
    plain, penal = (
        asked(client, messages, max_tokens=30, extra_body=body, **GREEDY).choices[0].message.content
        for body in ({}, {"repetition_penalty": 1.5})
    )
    assert (
        penal == wanted(server, messages, 30, do_sample=False, repetition_penalty=1.5)[0] != plain
    )
    token = TOKENIZER("z", add_special_tokens=False)["input_ids"][0]
    biased = asked(client, messages, max_tokens=5, logit_bias={token: 100}, **GREEDY)
    assert biased.choices[0].message.content == "zzzzz"


def test_a_text_goes_on_by_itself_or_by_its_ids(server, client):
    ids = TOKENIZER(TEXT[:50])["input_ids"]
    found = [
        client.completions.create(model="small", prompt=prompt, max_tokens=9, **GREEDY)
        for prompt in (TEXT[:50], ids, [TEXT[:50]], [ids])
    ]
    [text] = {reply.choices[0].text for reply in found}
    config, _ = server.model._prepare_generation_config(None, do_sample=False)
    prompt = Prompts(Reader(server.model, TOKENIZER, archive=True)).of_text(TEXT[:50])
    assert text == alone(server.model, TOKENIZER, prompt, config, 9, archive=True)[1]
    stream = client.completions.create(
        model="small", prompt=ids, max_tokens=9, stream=True, **GREEDY
    )
    assert "".join(piece.choices[0].text for piece in stream) == text


def test_the_model_is_listed_and_metrics_are_counted(server, client):
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "hf_infini"
    assert httpx.get(f"{server.address}/health").json() == {"status": "ok"}

    def count(name: str) -> float:
        lines = httpx.get(f"{server.address}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = count('hf_infini_tokens_total{of="new"}')
    reply = asked(client, user("Count"), max_tokens=7, **GREEDY)
    new = count('hf_infini_tokens_total{of="new"}') - before
    assert new == reply.usage.completion_tokens
    assert count("hf_infini_running") == count("hf_infini_waiting") == 0


def upload(client, text: str, name: str = "play.txt"):
    document = client.files.create(file=(name, text.encode()), purpose="user_data")
    wait_until(lambda: client.files.retrieve(document.id).status == "processed")
    return document


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


BODY = {"model": "small", "messages": user("To be"), "max_tokens": 4, "temperature": 0}
# What is sent, and what of the reply: its status, and words of the message
WRONG = {
    "no JSON": (b"{", 400, "JSON"),
    "no object": (b"[1]", 400, "dictionary"),
    "nothing": (b"", 400, "required"),
    "another model": (BODY | {"model": "large"}, 404, "this one is 'small'"),
    "two answers": (BODY | {"n": 2}, 400, "n=2 is not supported"),
    "logprobs": (BODY | {"logprobs": True}, 400, "logprobs=True is not supported"),
    "tools": (BODY | {"tools": [{"type": "function"}]}, 400, "tools"),
    "a JSON answer": (BODY | {"response_format": {"type": "json_object"}}, 400, "response_format"),
    "a penalty": (BODY | {"presence_penalty": 1.0}, 400, "presence_penalty"),
    "an unknown field": (BODY | {"temprature": 1}, 400, "temprature"),
    "a cold temperature": (BODY | {"temperature": -1}, 400, "temperature"),
    "top_p": (BODY | {"top_p": 0}, 400, "top_p"),
    "too many tokens": (BODY | {"max_tokens": 201}, 400, "200 tokens"),
    "no tokens": (BODY | {"max_tokens": 0}, 400, "max_tokens"),
    "an empty stop string": (BODY | {"stop": ""}, 400, "stop"),
    "a huge seed": (BODY | {"seed": 2**63}, 400, "seed"),
    "no messages": (BODY | {"messages": []}, 400, "messages"),
    "no user": (BODY | {"messages": [{"role": "system", "content": "?"}]}, 400, "role is user"),
    "an unknown role": (BODY | {"messages": [{"role": "king", "content": "?"}]}, 400, "role"),
    "an image": (
        BODY | {"messages": user([{"type": "image_url", "image_url": {"url": "x"}}])},
        400,
        "text",
    ),
    "half of a character": (json.dumps(BODY | {"messages": user("\ud800")}).encode(), 400, "half"),
    "an unknown document": (BODY | {"document": "file-0"}, 404, "no document 'file-0'"),
    "a bias of no token": (BODY | {"logit_bias": {"99999": 1}}, 400, ""),
}


def refused(reply: httpx.Response, status: int) -> dict:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_in_the_form_of_openai_and_the_server_goes_on(server, name):
    body, status, words = WRONG[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    url, headers = f"{server.address}/v1/chat/completions", {"content-type": "application/json"}
    for stream in (False, True):
        if stream and isinstance(body, dict):
            content = json.dumps(body | {"stream": True}).encode()
        error = refused(httpx.post(url, content=content, headers=headers), status)
        assert words in error["message"]
    assert httpx.post(url, json=BODY).status_code == 200
    wait_until(lambda: not server.engine._open)


def test_prompts_of_texts_that_are_wrong(server):
    url = f"{server.address}/v1/completions"
    for prompt, status in (("", 400), ([], 400), ([9999], 400), ([-1], 400), (["a", "b"], 400)):
        refused(httpx.post(url, json={"model": "small", "prompt": prompt}), status)
    refused(httpx.get(f"{server.address}/v1/nothing"), 404)
    refused(httpx.get(url), 405)
    refused(httpx.post(f"{server.address}/v1/files", files={"file": ("a.txt", b"\x00\xff")}), 400)
    refused(httpx.post(f"{server.address}/v1/files", data={"purpose": "x"}), 400)


def test_requests_that_end_early_or_never_or_are_no_http(server, client):
    """Each on a connection of its own; then the server answers."""
    host, port = server.address.removeprefix("http://").split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
    for sent in (
        b"",
        b"\x16\x03\x01\x02\x00",
        b"GET",
        f"{head}Content-Length: 100\r\n\r\n{{".encode(),
        f"{head}Content-Length: -5\r\n\r\n".encode(),
        f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode(),
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
    assert asked(client, user("To be"), max_tokens=3, **GREEDY).choices
    wait_until(lambda: not server.engine._open)


def test_large_requests_keys_and_hosts(tmp_path):
    with running(tmp_path, key="secret", max_megabytes=0.01) as server:
        url = f"{server.address}/v1/chat/completions"
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secre"}):
            error = refused(httpx.post(url, json=BODY, headers=headers), 401)
            assert error["code"] == "invalid_api_key"
        refused(httpx.get(f"{server.address}/metrics"), 401)
        assert httpx.get(f"{server.address}/health").status_code == 200
        key = {"authorization": "Bearer secret", "content-type": "application/json"}
        assert httpx.post(url, json=BODY, headers=key).status_code == 200
        large = json.dumps(BODY | {"messages": user("x" * 20_000)}).encode()
        halves = large[:9000], large[9000:]
        for content in (large, iter(halves)):  # which says its length, and which does not
            refused(httpx.post(url, content=content, headers=key), 413)
        files = {"file": ("a.txt", b"x" * 20_000)}
        url = f"{server.address}/v1/files"
        bare = {"authorization": "Bearer secret"}
        refused(httpx.post(url, files=files, headers=bare), 413)
        assert client_of(server, api_key="secret").models.list().data
    with running(tmp_path) as server:
        refused(httpx.get(f"{server.address}/v1/models", headers={"host": "evil.example"}), 403)
        assert httpx.get(server.address.replace("127.0.0.1", "localhost") + "/health").is_success


def test_who_may_ask(monkeypatch):
    monkeypatch.delenv("HF_INFINI_API_KEY", raising=False)
    folder = Path("x")
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.9"):
        assert Settings("m", folder, host=host).key_to_ask_for() is None
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.com"):
        with pytest.raises(ValueError, match="--no-key"):
            Settings("m", folder, host=host).key_to_ask_for()
        assert Settings("m", folder, host=host, no_key=True).key_to_ask_for() is None
        assert Settings("m", folder, host=host, key="k").key_to_ask_for() == "k"
    with pytest.raises(ValueError, match="one of the two"):
        Settings("m", folder, key="k", no_key=True).key_to_ask_for()
    monkeypatch.setenv("HF_INFINI_API_KEY", "k")
    assert Settings("m", folder, host="0.0.0.0").key_to_ask_for() == "k"


def said_in(line: str) -> dict:
    """What an event of a stream has."""
    return json.loads(line.removeprefix("data: "))


def streamed(server, body: dict):
    url = f"{server.address}/v1/chat/completions"
    return httpx.stream("POST", url, json=body | {"stream": True}, timeout=60)


def test_a_full_queue_late_requests_and_clients_that_go(tmp_path):
    endless = BODY | {"max_tokens": 200, "logit_bias": {str(TOKENIZER.eos_token_id): -100}}
    url = "/v1/chat/completions"
    with running(tmp_path, slow=0.02, slots=1, queue=1, timeout=600) as server:
        open_ = server.engine._open
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(streamed(server, endless))
            parts = first.iter_raw()  # which closes the connection when it is dropped
            next(parts)
            with ThreadPoolExecutor(1) as pool:
                second = pool.submit(httpx.post, server.address + url, json=BODY, timeout=60)
                wait_until(lambda: len(open_) == 2 or second.done())
                assert not second.done(), second.result().text
                third = httpx.post(server.address + url, json=BODY)
                refused(third, 429)
                assert third.headers["retry-after"] == "1"
                stack.close()  # the first client goes
                assert second.result().status_code == 200
        wait_until(lambda: not open_)
        with pytest.raises(httpx.ReadTimeout):  # gone before its first token
            httpx.post(server.address + url, json=endless, timeout=0.3)
        wait_until(lambda: not open_)
        counted = httpx.get(f"{server.address}/metrics").text.splitlines()
        for end, number in {"cancelled": 2, "refused": 1, "length": 1}.items():
            assert f'hf_infini_requests_total{{end="{end}"}} {number}.0' in counted, counted
    with running(tmp_path, slow=0.02, timeout=0.5) as server:
        refused(httpx.post(server.address + url, json=endless), 504)
        with streamed(server, endless) as reply:
            lines = [line for line in reply.iter_lines() if line]
        assert (
            "time of this request"
            in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
        )
        with pytest.raises(openai.APIError, match="time of this request"):
            [*asked(client_of(server), BODY["messages"], max_tokens=200, stream=True)]


def test_a_model_that_fails_is_told_and_the_next_is_answered(tmp_path):
    with running(tmp_path) as server:
        url, fails = f"{server.address}/v1/chat/completions", [True]

        def fail(module, args):
            if fails:
                raise RuntimeError("no memory")

        server.model.get_input_embeddings().register_forward_pre_hook(fail)
        assert "no memory" in refused(httpx.post(url, json=BODY), 500)["message"]
        fails.clear()
        assert httpx.post(url, json=BODY).status_code == 200


@pytest.mark.slow
def test_a_hundred_clients_get_their_own_answers(server):
    """Some stream, some read slowly, some go away; each that gets an end gets its own text."""
    texts = [wanted(server, user(TEXT[n * 37 : n * 37 + 40 + n % 50]), 12)[0] for n in range(100)]
    assert len({*texts}) > 90

    def ask(number: int) -> str | None:
        messages = user(TEXT[number * 37 : number * 37 + 40 + number % 50])
        client = client_of(server, max_retries=5, timeout=120)
        if number % 3 == 0:
            return asked(client, messages, max_tokens=12, **GREEDY).choices[0].message.content
        said = ""
        for piece in asked(client, messages, max_tokens=12, stream=True, **GREEDY):
            said += piece.choices[0].delta.content or ""
            if number % 10 == 1 and said:
                assert texts[number].startswith(said)
                return None  # and goes
            if number % 10 == 2:
                time.sleep(0.2)
        return said

    with ThreadPoolExecutor(100) as pool:
        found = [*pool.map(ask, range(100))]
    for said, text in zip(found, texts, strict=True):
        assert said is None or said == text
    wait_until(lambda: not server.engine._open)
    assert not server.engine.loop.requests


@pytest.mark.slow
def test_who_does_not_read_keeps_no_slot(tmp_path):
    with running(tmp_path, slots=1) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(streamed(server, BODY | {"max_tokens": 100}))  # unread
            reply = httpx.post(f"{server.address}/v1/chat/completions", json=BODY, timeout=60)
            assert reply.status_code == 200
            wait_until(lambda: not server.engine._open)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A plain model, which the command serves with an archive."""
    found = tmp_path_factory.mktemp("model") / "plain"
    sizes = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 2048}
    ids = {f"{name}_token_id": getattr(TOKENIZER, f"{name}_token_id") for name in ("eos", "pad")}
    decoder("llama", **sizes | ids, bos_token_id=None).save_pretrained(found)
    TOKENIZER.save_pretrained(found)
    return found


@contextlib.contextmanager
def command(model: Path, home: Path, *options):
    """The command in a process: it, and its address."""
    environment = os.environ | {"HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(hf_infini.__file__).parents[1])
    words = ["serve", str(model), "--port", "0", "--device", "cpu", *map(str, options)]
    program = "from hf_infini.command import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if line.startswith("http://"):
                break
        assert lines and lines[-1].startswith("http://"), lines
        threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True).start()
        yield process, lines[-1].split("/v1")[0]
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_stop_loses_nothing_and_the_next_start_goes_on(folder, tmp_path):
    """Running requests end, new ones are refused, what was read of a document is kept."""
    body = BODY | {"model": "plain", "max_tokens": 600, "stop": None}
    body |= {"logit_bias": {str(TOKENIZER.eos_token_id): -100}}
    long = (TEXT * 12)[:400_000]
    options = ("--chunk", "64", "--grace", "120", "--timeout", "300")
    with command(folder, tmp_path, *options) as (process, address):
        files = {"file": ("long.txt", long.encode())}
        name = httpx.post(f"{address}/v1/files", files=files, timeout=60).json()["id"]
        with httpx.stream(
            "POST", f"{address}/v1/chat/completions", json=body | {"stream": True}, timeout=200
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{address}/health").status_code == 503)
            refusal = httpx.post(f"{address}/v1/chat/completions", json=body)
            refused(refusal, 503)
            assert refusal.headers["retry-after"]
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert (
            json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        )
        assert process.wait(60) == 0
    [partial] = (tmp_path / "hf_infini" / "memories").glob("*.safetensors.partial")
    read = hf_infini_columns(partial)
    assert 0 < read < len(long)
    with command(folder, tmp_path, "--chunk", "4096") as (process, address):
        documents = httpx.get(f"{address}/v1/files").json()["data"]
        assert [document["id"] for document in documents] == [name]
        process.kill()  # and after a kill the document is there, too
        process.wait()
    assert hf_infini_columns(partial) >= read if partial.exists() else True
    with command(folder, tmp_path, "--grace", "0") as (process, address):
        assert httpx.get(f"{address}/v1/files/{name}").status_code == 200
        with httpx.stream(
            "POST", f"{address}/v1/chat/completions", json=body | {"stream": True}, timeout=200
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)  # without grace: told, and not silent
            rest = [line for line in lines if line]
        assert (
            "the server stopped" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
        )
        assert process.wait(60) == 0


def hf_infini_columns(file: Path) -> int:
    """Tokens that a memory file has."""
    from hf_infini.cache.files import read_memory_file

    return read_memory_file(file)[0]["columns"]


def test_the_command_says_what_is_missing_before_it_loads_the_model(tmp_path, monkeypatch, capsys):
    from commands import command_in

    call = command_in(tmp_path, monkeypatch, capsys)
    said = call("serve", tmp_path / "none", "--host", "0.0.0.0", status=1)
    assert "--no-key" in said.err
    said = call("serve", tmp_path / "none", status=1)
    assert "no such" in said.err
