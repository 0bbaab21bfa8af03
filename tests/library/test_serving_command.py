"""The command `serve`: what it refuses, how it stops, and what the next start finds."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

pytest.importorskip("openai", reason="pip install '.[test]'")
pytest.importorskip("prometheus_client", reason="pip install '.[serve]'")

import hf_infini  # noqa: E402
from commands import command_in  # noqa: E402
from decoders import decoder  # noqa: E402
from hf_infini.cache.files import read_memory_file  # noqa: E402
from serving import BODY, TEXT, TOKENIZER, refused, said_in, wait_until  # noqa: E402


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
        assert said_in(rest[-2])["choices"][0]["finish_reason"] == "length"
        assert process.wait(60) == 0
    [partial] = (tmp_path / "hf_infini" / "memories").glob("*.safetensors.partial")
    read = columns_of(partial)
    assert 0 < read < len(long)
    with command(folder, tmp_path, "--chunk", "4096") as (process, address):
        documents = httpx.get(f"{address}/v1/files").json()["data"]
        assert [document["id"] for document in documents] == [name]
        process.kill()  # and after a kill the document is there, too
        process.wait()
    assert columns_of(partial) >= read if partial.exists() else True
    with command(folder, tmp_path, "--grace", "0") as (process, address):
        assert httpx.get(f"{address}/v1/files/{name}").status_code == 200
        with httpx.stream(
            "POST", f"{address}/v1/chat/completions", json=body | {"stream": True}, timeout=200
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)  # without grace: told, and not silent
            rest = [line for line in lines if line]
        assert "the server stopped" in said_in(rest[-1])["error"]["message"]
        assert process.wait(60) == 0


def columns_of(file: Path) -> int:
    """Tokens that a memory file has."""
    return read_memory_file(file)[0]["columns"]


def test_what_is_wrong_is_said_before_the_model_is_loaded(tmp_path, monkeypatch, capsys):
    call = command_in(tmp_path, monkeypatch, capsys)
    assert "--no-key" in call("serve", tmp_path / "none", "--host", "0.0.0.0", status=1).err
    assert "no such" in call("serve", tmp_path / "none", status=1).err


def test_where_a_port_is_taken_nothing_is_begun(folder, tmp_path, monkeypatch, capsys):
    """Such as the reading of documents, whose end the command would wait for."""
    call = command_in(tmp_path, monkeypatch, capsys)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        port = bound.getsockname()[1]
        said = call("serve", folder, "--port", port, "--device", "cpu", status=1)
    assert f"--port {port}" in said.err
    assert not [*tmp_path.rglob("documents")]
