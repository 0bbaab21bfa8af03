"""The quickstart's text: from the Hub where it answers, otherwise made here, after one line."""

import contextlib
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from running import ROOT

SHARD = b"the shard"


class Hub(BaseHTTPRequestHandler):
    """One file, as the Hub's client asks for it."""

    def log_message(self, *arguments): ...

    def do_HEAD(self):
        self.send_response(200)
        for name, value in {"ETag": '"1"', "X-Repo-Commit": "0" * 40, "Content-Length": str(len(SHARD))}.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(SHARD)


@contextlib.contextmanager
def hub():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def choose_text(endpoint: str, cache: Path) -> tuple[str, str]:
    """Runs the lines of quickstart.sh that choose the text. Returns it, and all that is said."""
    script = (ROOT / "recipes" / "quickstart.sh").read_text(encoding="utf-8")
    begin, end = script.index("source=("), script.index("python recipes/prepare.py")
    before = "set -euo pipefail; corpus=; step() { printf '%s\\n' \"$*\" >&2; }\n"
    lines = before + script[begin:end] + '\necho "${source[1]}"'
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, env=environment, check=True)
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_a_hub_that_does_not_answer_takes_one_line_and_one_that_does_gives_the_text(tmp_path):
    text, said = choose_text("http://127.0.0.1:9", tmp_path / "empty")
    generated = "Preparing built-in generated biographies (no --corpus, and nothing came from the Hub)"
    assert text == "biographies" and said.splitlines() == [generated]
    with hub() as endpoint:
        text, said = choose_text(endpoint, tmp_path / "cache")
    assert Path(text).read_bytes() == SHARD and said.splitlines() == [f"Preparing {text}"]
    assert choose_text(endpoint, tmp_path / "cache") == (text, said)  # nobody listens there any more: the cache's copy
