"""The server by the client of OpenAI and by raw requests: nobody gets the text of another, and
nobody is left without a word."""

import asyncio
import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

openai = pytest.importorskip("openai", reason="pip install '.[test]'")
pytest.importorskip("prometheus_client", reason="pip install '.[serve]'")

from hf_infini.tools.reader import Reader  # noqa: E402
from hf_infini.tools.serving.api import Stream  # noqa: E402
from hf_infini.tools.serving.prompts import Prompts  # noqa: E402
from hf_infini.tools.serving.server import Settings  # noqa: E402
from served import alone  # noqa: E402
from serving import (  # noqa: E402
    BODY,
    GREEDY,
    TEXT,
    TOKENIZER,
    asked,
    client_of,
    refused,
    running,
    said_in,
    streamed,
    user,
    wait_until,
    wanted,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("kept"), slots=4) as server:
        yield server


@pytest.fixture
def client(server):
    return client_of(server)


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
    "a bias of no token": (BODY | {"logit_bias": {"99999": 1}}, 400, "logit_bias"),
    "a bias below all tokens": (BODY | {"logit_bias": {"-1": 1}}, 400, "logit_bias"),
    "two limits": (BODY | {"max_completion_tokens": 4}, 400, "max_completion_tokens"),
    "a temperature near 0": (BODY | {"temperature": 1e-9}, 400, "0.0001"),
}


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
        for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
            for name in ({"origin": "null"}, headers):  # a page of elsewhere, in a browser here
                refused(httpx.get(f"{server.address}/v1/models", headers=name), 403)
        near = {"origin": "http://localhost:3000"}
        assert httpx.get(f"{server.address}/v1/models", headers=near).is_success
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
        assert "time of this request" in said_in(lines[-1])["error"]["message"]
        with pytest.raises(openai.APIError, match="time of this request"):
            [*asked(client_of(server), BODY["messages"], max_tokens=200, stream=True)]


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("error", (RuntimeError, ValueError, Panic))
def test_a_model_that_fails_is_told_and_the_next_is_answered(tmp_path, error):
    with running(tmp_path) as server:
        url, fails = f"{server.address}/v1/chat/completions", [True]

        def fail(module, args):
            if fails:
                raise error("no memory")

        server.model.get_input_embeddings().register_forward_pre_hook(fail)
        assert "no memory" in refused(httpx.post(url, json=BODY), 500)["message"]
        fails.clear()
        assert httpx.post(url, json=BODY).status_code == 200


def test_a_stream_is_closed_where_nothing_of_it_is_sent():
    """As of a client that has gone before."""
    closed = []

    async def pieces():
        yield "never"

    async def gone(*args):
        raise OSError("gone")

    stream = Stream(pieces(), lambda: closed.append(True))
    with pytest.raises(Exception, match="gone|"):
        asyncio.run(stream({"type": "http", "asgi": {"spec_version": "2.4"}}, gone, gone))
    assert closed == [True]


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
