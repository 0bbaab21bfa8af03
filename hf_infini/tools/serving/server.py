"""Runs the server until it is told to stop."""

import asyncio
import copy
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

from .api import Limits, Server
from .engine import Engine
from .guard import Guard
from .library import Library, TurnReader
from .loop import Loop
from .prompts import Prompts

KEY = "HF_INFINI_API_KEY"
LAST_SECONDS = 10  # for those who read the end of an answer slowly


class Settings(NamedTuple):
    """How a server is run."""

    name: str  # of the model
    folder: Path  # of what is kept
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any
    key: str | None = None
    no_key: bool = False
    slots: int = 8
    queue: int = 100
    chunk: int = 512
    max_tokens: int = 1024
    max_prompt_tokens: int | None = None
    max_megabytes: float = 32
    kept_megabytes: float = 2000
    timeout: float = 600  # seconds of a request
    grace: float = 30  # seconds for requests when the server stops

    def key_to_ask_for(self) -> str | None:
        """The key; ValueError where others than this machine could reach a server without one, and
        nobody has said so."""
        key = self.key or os.environ.get(KEY) or None
        if key is None and not self.no_key and not _is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} lets other machines ask this server: give --api-key or {KEY}, "
                "or say --no-key."
            )
        if key is not None and self.no_key:
            raise ValueError("--no-key, and a key was given: give one of the two.")
        return key


class GracefulServer(uvicorn.Server):
    """Stops at the first signal when what is answered has ended, or the time is over; at the second
    one at once.

    Args:
        config: of uvicorn.
        engine, library: that are stopped.
        grace: seconds for what is answered.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, library: Library, grace: float):
        super().__init__(config)
        self.engine, self.library, self.grace = engine, library, grace
        self._stopping: asyncio.Task | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Takes the signal `sig`, at any place of the program, `frame`."""
        if self._stopping is None and self.started:
            self._stopping = asyncio.get_event_loop().create_task(self._stop())
        else:
            super().handle_exit(sig, frame)

    async def _stop(self) -> None:
        try:
            await asyncio.to_thread(self.engine.stop, self.grace)
            await asyncio.to_thread(self.library.close)
        finally:
            self.should_exit = True


def application(
    model: Any, tokenizer: Any, archive: bool | str, settings: Settings
) -> tuple[Any, Engine, Library]:
    """The application, and what is to be stopped after it.

    Args:
        model, tokenizer, archive: as of [`Loop`].
        settings: of the server.

    Returns:
        The ASGI application, its engine and its library.
    """
    key, kept = settings.key_to_ask_for(), int(settings.kept_megabytes * 1e6)
    sizes = {"slots": settings.slots, "chunk": settings.chunk, "kept_bytes": kept}
    engine = Engine(Loop(model, tokenizer, archive=archive, **sizes), settings.queue)
    library = Library(
        settings.folder / "documents",
        settings.folder / "memories",
        engine,
        copy.deepcopy(tokenizer),
        model=settings.name,
        kept_bytes=kept,
    )
    reader = TurnReader(engine, copy.deepcopy(tokenizer), chunk=settings.chunk)
    prompts = Prompts(reader, settings.max_prompt_tokens)
    limits = Limits(settings.max_tokens, settings.timeout)
    app = Server(engine, prompts, library, settings.name, limits).app()
    local = key is None and not settings.no_key
    hosts = {"127.0.0.1", "localhost", "[::1]", settings.host} if local else None
    return Guard(app, key, hosts, int(settings.max_megabytes * 1e6)), engine, library


def serve(model: Any, tokenizer: Any, archive: bool | str, settings: Settings, say: Any) -> None:
    """Answers until a signal comes.

    Args:
        model, tokenizer, archive, settings: as of [`application`].
        say: is called with a line when the server takes requests.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((settings.host, settings.port))  # before threads read documents
        bound.listen(2048)
        app, engine, library = application(model, tokenizer, archive, settings)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=LAST_SECONDS
        )
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            url = f"http://{host}:{bound.getsockname()[1]}/v1"
            say(f"{url} answers as {settings.name}; Ctrl-C ends it")
            GracefulServer(config, engine, library, settings.grace).run([bound])
        finally:
            engine.stop()
            library.close()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
