"""A server in this process, and what the tests ask of it."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

import httpx
import openai
import uvicorn

from hf_infini.tools.reader import Reader
from hf_infini.tools.serving.prompts import Prompts
from hf_infini.tools.serving.server import Settings, application
from running import sample_text
from served import alone, served_model, served_tokenizer

TEXT = sample_text()
TOKENIZER = served_tokenizer()
GREEDY = {"temperature": 0}


@contextlib.contextmanager
def running(folder: Path, kind: str = "llama, recalls", slow: float = 0, archive=True, **options):
    """A server of a small model in this process, on a free port; `slow`: seconds of each call;
    `archive`: of a model that recalls."""
    model = served_model(kind, TOKENIZER)
    if slow:
        model.model.register_forward_pre_hook(lambda *args: time.sleep(slow))
    settings = Settings("small", folder, **{"max_tokens": 200} | options)
    app, engine, library = application(
        model, TOKENIZER, kind == "llama, recalls" and archive, settings
    )
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(512)
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        server.engine, server.library, server.model = engine, library, model
        server.api = app.app.state.server
        server.prompts = server.api.prompts
        server.address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        try:
            yield server
        finally:
            engine.stop()
            library.close()
            server.should_exit = True
            thread.join()


def client_of(server, **options):
    given = {"api_key": "none", "max_retries": 0} | options
    return openai.OpenAI(base_url=f"{server.address}/v1", **given)


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


def upload(client, text: str, name: str = "play.txt"):
    document = client.files.create(file=(name, text.encode()), purpose="user_data")
    wait_until(lambda: client.files.retrieve(document.id).status == "processed")
    return document


BODY = {"model": "small", "messages": user("To be"), "max_tokens": 4, "temperature": 0}


def refused(reply: httpx.Response, status: int) -> dict:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    return error


def said_in(line: str) -> dict:
    """What an event of a stream has."""
    return json.loads(line.removeprefix("data: "))


def streamed(server, body: dict):
    url = f"{server.address}/v1/chat/completions"
    return httpx.stream("POST", url, json=body | {"stream": True}, timeout=60)
