"""The server's paths, like those of OpenAI's API."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from ...cache.files import MemoryFileError
from . import requests
from .engine import Engine, Refused
from .guard import error_body, error_reply
from .library import Document, Library
from .metrics import Metrics
from .prompts import Prompts
from .requests import Ended, Prompt
from .schemas import Asked, Chat, Completion

GONE = 499  # as nginx says it of a client that did not wait


class Limits(NamedTuple):
    """Of a request."""

    max_tokens: int  # of an answer, and of one whose request does not say
    seconds: float  # until it ends


class Answer:
    """What an engine tells of a request, in the event loop.

    Args:
        metrics: that count it.
        http: the request of the client, who may go.
    """

    def __init__(self, metrics: Metrics, http: Request):
        self.request: requests.Request | None = None  # once the engine has taken it
        self.ended: Ended | None = None
        self._metrics, self._began, self._first = metrics, time.monotonic(), True
        self._parts: asyncio.Queue = asyncio.Queue()
        self._loop, self._gone = asyncio.get_running_loop(), asyncio.create_task(_gone(http))

    def tell(self, part: str | Ended) -> None:
        """Takes a `part`, in any thread."""
        self._loop.call_soon_threadsafe(self._parts.put_nowait, part)

    async def next(self) -> str | Ended | None:
        """The next part; `None`: the client has gone."""
        part = asyncio.create_task(self._parts.get())
        await asyncio.wait({part, self._gone}, return_when=asyncio.FIRST_COMPLETED)
        if not part.done():
            part.cancel()
            return None
        found = part.result()
        if self._first and isinstance(found, str):
            self._first = False
            self._metrics.first.observe(time.monotonic() - self._began)
        if isinstance(found, Ended):
            self.ended = found
        return found

    @property
    def gone(self) -> bool:
        """Whether nobody waits for it."""
        return self._gone.done()

    def close(self, engine: Engine) -> None:
        """Ends what the `engine` still answers, and counts it."""
        self._gone.cancel()
        if self.ended is None and self.request is not None:
            engine.cancel(self.request)
        ended, taken = self.ended, self.request is not None
        how = ended.reason or "error" if ended else "cancelled" if taken else "refused"
        self._metrics.ended(how, None if ended is None else ended.usage)
        self._metrics.whole.observe(time.monotonic() - self._began)


class Stream(StreamingResponse):
    """A reply whose pieces come one by one.

    Args:
        pieces: of it.
        close: is called when no piece follows, whoever has ended it and wherever.
    """

    def __init__(self, pieces: AsyncIterator[str], close: Callable[[], None]):
        super().__init__(pieces, media_type="text/event-stream")
        self._close = close

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


class Server:
    """Answers by an engine.

    Args:
        engine: that answers.
        prompts: what is asked, by a tokenizer that no other thread uses.
        library: of documents.
        name: of the model.
        limits: of each request.
    """

    def __init__(
        self, engine: Engine, prompts: Prompts, library: Library, name: str, limits: Limits
    ):
        self.engine, self.prompts, self.library = engine, prompts, library
        self.name, self.limits, self.metrics = name, limits, Metrics(engine)
        self.created = int(time.time())
        self._pool = ThreadPoolExecutor(1, "hf_infini prompts")
        self._tokenizer = engine.loop.tokenizer
        self._known = engine.loop.model.config.vocab_size
        self._beside = 0  # requests that the engine does not have yet

    def app(self) -> FastAPI:
        """The application."""
        app = FastAPI(title="hf_infini", docs_url=None, redoc_url=None, openapi_url=None)
        app.state.server = self
        routes: dict[str, tuple[str, Callable]] = {
            "/health": ("GET", self.health),
            "/metrics": ("GET", self.read_metrics),
            "/v1/models": ("GET", self.models),
            "/v1/models/{model:path}": ("GET", self.model),
            "/v1/chat/completions": ("POST", self.chat),
            "/v1/completions": ("POST", self.complete),
            "/v1/files/{document}": ("GET", self.document),
        }
        for path, (method, function) in routes.items():
            app.add_api_route(path, function, methods=[method], response_model=None)
        for method, function in {"GET": self.documents, "POST": self.upload}.items():
            app.add_api_route("/v1/files", function, methods=[method], response_model=None)
        app.add_api_route(
            "/v1/files/{document}", self.delete, methods=["DELETE"], response_model=None
        )
        app.add_exception_handler(RequestValidationError, _wrong)
        app.add_exception_handler(HTTPException, _refused)
        app.add_exception_handler(Exception, _broken)
        return app

    async def health(self) -> Response:
        """Whether it takes requests."""
        if self.engine.stopping:
            return error_reply(503, "the server is stopping.")
        return JSONResponse({"status": "ok"})

    async def read_metrics(self) -> Response:
        """[`Metrics`]."""
        return PlainTextResponse(self.metrics.text())

    async def models(self) -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, model: str) -> dict[str, Any]:
        """The `model` of this name."""
        self._check_model(model)
        return self._model()

    async def chat(self, asked: Chat, http: Request) -> Response:
        """Answers a chat, `asked` by `http`, perhaps about documents."""
        documents = [self._found(name, "document") for name in asked.documents]
        turns = [message.turn() for message in asked.messages]
        stops = asked.stops
        if not self._tokenizer.chat_template:  # it would go on with questions
            stops += ("\n",)

        def make() -> Prompt:
            context = self.library.contexts(documents, self.prompts)
            return self.prompts.of_chat(turns, [one.text for one in documents], context)

        return await self._answered(_ChatForm, asked, stops, make, http, documents)

    async def complete(self, asked: Completion, http: Request) -> Response:
        """Goes on with a text, `asked` by `http`."""
        make = lambda: self.prompts.of_text(asked.text)  # noqa: E731
        return await self._answered(_TextForm, asked, asked.stops, make, http, [])

    async def upload(self, file: UploadFile, http: Request) -> Response:
        """Takes a document, the `file` of `http`."""
        if self.engine.stopping:
            raise HTTPException(503, "the server is stopping.")
        content = await file.read()
        try:
            document = await asyncio.to_thread(self.library.add, file.filename or "file", content)
        except ValueError as error:
            return error_reply(400, str(error), "file")
        return JSONResponse(_file(document))

    async def documents(self) -> dict[str, Any]:
        """All documents, the latest first."""
        return {"object": "list", "data": [_file(one) for one in self.library], "has_more": False}

    async def document(self, document: str) -> dict[str, Any]:
        """The `document` of this id."""
        return _file(self._found(document))

    async def delete(self, document: str) -> dict[str, Any]:
        """Deletes the `document` of this id."""
        self._found(document)
        with contextlib.suppress(KeyError):  # somebody else has deleted it meanwhile
            await asyncio.to_thread(self.library.remove, document)
        return {"id": document, "object": "file", "deleted": True}

    async def _answered(
        self,
        form: type["_Form"],
        asked: Asked,
        stops: tuple[str, ...],
        make: Callable[[], Prompt],
        http: Request,
        documents: list[Document],
    ) -> Response:
        """The reply to what was asked, once its first part is known."""
        self._check_model(asked.model)
        if (asked.max_tokens or 0) > (most := self.limits.max_tokens):
            return error_reply(400, f"an answer has at most {most:,} tokens here.", "max_tokens")
        with contextlib.ExitStack() as open_:
            answer, made = Answer(self.metrics, http), form(self.name, documents)
            open_.callback(answer.close, self.engine)
            try:
                with self._place():
                    for document in documents:  # it is read for all, and not for each who asks
                        await self._wait_for(document, answer)
                    request = await asyncio.get_running_loop().run_in_executor(
                        self._pool, self._request, answer, asked, stops, make
                    )
                made.apart = len(request.prompt.contexts) == len(documents)
                self.engine.ask(request)
            except MemoryFileError as error:
                return self._damaged(documents, error)
            except (ValueError, TypeError) as error:
                return error_reply(400, str(error))
            except Refused as error:
                return error_reply(*_status_of(error))
            answer.request = request
            first = await answer.next()
            if isinstance(first, Ended) and isinstance(first.error, MemoryFileError):
                return self._damaged(documents, first.error)
            if first is None or isinstance(first, Ended) and first.error is not None:
                return _unanswered(first)
            if asked.stream:
                usage = asked.stream_options is not None and asked.stream_options.include_usage
                close = open_.pop_all().close
                return Stream(self._events(answer, first, made, usage), close)
            text, part = "", first
            while isinstance(part, str):
                text += part
                part = await answer.next()
            if part is None or part.error is not None:
                return _unanswered(part)
            return JSONResponse(made.whole(text, part))

    @contextlib.contextmanager
    def _place(self) -> Generator[None]:
        """Within it, a request waits for the engine; [`Refused`] where there is no place."""
        self.engine.check(self._beside)
        self._beside += 1
        try:
            yield
        finally:
            self._beside -= 1

    def _damaged(self, documents: list[Document], error: Exception) -> Response:
        """The reply where what was read of documents is damaged; it is read again."""
        self.library.read_again(documents)
        return error_reply(503, f"it is read again, send the request once more: {error}")

    def _request(
        self, answer: Answer, asked: Asked, stops: tuple[str, ...], make: Callable[[], Prompt]
    ) -> requests.Request:
        """A request for the engine; ValueError where it cannot be answered."""
        prompt, model = make(), self.engine.loop.model
        own = {"num_beams": 1, "num_return_sequences": 1} | asked.options()
        config, unknown = model._prepare_generation_config(None, **own)
        if unknown:
            raise ValueError(f"this model takes no {', '.join(unknown)}.")
        if wrong := [token for token in asked.logit_bias or () if not 0 <= token < self._known]:
            raise ValueError(f"logit_bias: tokens are from 0 to {self._known - 1}, got {wrong[0]}.")
        most = asked.max_tokens or self.limits.max_tokens
        if self.prompts.limit is not None:
            most = min(most, self.prompts.limit - prompt.tokens)
        return requests.Request(
            model,
            self._tokenizer,
            prompt,
            answer.tell,
            config=config,
            seed=asked.seed,
            max_new_tokens=most,
            stops=stops,
            seconds=self.limits.seconds,
        )

    async def _events(
        self, answer: Answer, part: Any, form: "_Form", usage: bool
    ) -> AsyncIterator[str]:
        """The parts of an answer as they come."""
        for piece in form.begin():
            yield _event(piece)
        while isinstance(part, str):
            yield _event(form.piece(part))
            part = await answer.next()
        if part is None:
            return
        if part.error is not None:
            yield _event(error_body(*_status_of(part.error)))
            return
        yield _event(form.end(part))
        if usage:
            yield _event(form.last(part))
        yield "data: [DONE]\n\n"

    async def _wait_for(self, document: Document, answer: Answer) -> None:
        """Until a document was read."""
        end = time.monotonic() + self.limits.seconds
        while not document.reading.done():
            if time.monotonic() > end:
                raise HTTPException(504, f"{document.id} is still being read: ask again later.")
            if answer.gone:
                raise HTTPException(GONE)
            await asyncio.sleep(0.05)
        if document.status == "error":
            raise HTTPException(503, f"{document.id} was not read: {_why(document)}")

    def _found(self, name: str, param: str | None = None) -> Document:
        try:
            return self.library.get(name)
        except KeyError:
            raise HTTPException(404, f"there is no document {name!r:.80}.") from None

    def _check_model(self, name: str) -> None:
        if name != self.name:
            raise HTTPException(404, f"there is no model {name!r:.80}; this one is {self.name!r}.")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "hf_infini",
        }


class _Form:
    """How an answer is said; one of these for each. `model`: its name; `documents`: that it is
    about."""

    kind, whole_object, piece_object = "", "", ""

    def __init__(self, model: str, documents: list[Document]):
        self.documents, self.apart = documents, False
        self._common = {
            "id": f"{self.kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def begin(self) -> list[dict[str, Any]]:
        """What comes before the first piece."""
        return []

    def whole(self, text: str, ended: Ended) -> dict[str, Any]:
        """The reply of a `text`, and how it has `ended`."""
        choice = self.of_text(text) | self._ends(ended.reason)
        found = {"object": self.whole_object, "choices": [choice], "usage": _usage(ended)}
        return self._common | found | self._sources(ended)

    def piece(self, text: str) -> dict[str, Any]:
        """A piece of `text`."""
        return self._event(self.of_piece(text) | self._ends(None))

    def end(self, ended: Ended) -> dict[str, Any]:
        """The last one, which says how it has `ended`."""
        return self._event(self.of_piece("") | self._ends(ended.reason)) | self._sources(ended)

    def last(self, ended: Ended) -> dict[str, Any]:
        """The tokens of what has `ended`."""
        return self._common | {
            "object": self.piece_object,
            "choices": [],
            "usage": _usage(ended),
        }

    def of_text(self, text: str) -> dict[str, Any]:
        """A choice with a `text`."""
        raise NotImplementedError

    def of_piece(self, text: str) -> dict[str, Any]:
        """A choice with a piece of `text`, or with none."""
        return self.of_text(text)

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._common | {"object": self.piece_object, "choices": [choice]}

    def _ends(self, reason: str | None) -> dict[str, Any]:
        return {"index": 0, "logprobs": None, "finish_reason": reason}

    def _sources(self, ended: Ended) -> dict[str, Any]:
        """Which passages of documents an answer looked at."""
        if not self.documents:
            return {}
        names = [document.id for document in self.documents]
        return {
            "sources": [
                {"document": names[each.document] if self.apart else None, "text": each.text}
                for each in ended.passages
            ]
        }


class _ChatForm(_Form):
    kind, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self) -> list[dict[str, Any]]:
        choice = {"delta": {"role": "assistant", "content": ""}} | self._ends(None)
        return [self._event(choice)]

    def of_text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def of_piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


class _TextForm(_Form):
    kind, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def of_text(self, text: str) -> dict[str, Any]:
        return {"text": text}


def _usage(ended: Ended) -> dict[str, Any]:
    usage = ended.usage
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.new,
        "total_tokens": usage.prompt + usage.new,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _file(document: Document) -> dict[str, Any]:
    """A document as OpenAI's API has files."""
    found = {
        "id": document.id,
        "object": "file",
        "bytes": document.bytes,
        "created_at": document.created,
        "filename": document.filename,
        "purpose": "user_data",
        "status": document.status,
    }
    return found | ({"status_details": _why(document)} if document.status == "error" else {})


def _why(document: Document) -> str:
    reading = document.reading
    return "it was stopped." if reading.cancelled() else f"{reading.exception()}"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _status_of(error: BaseException) -> tuple[int, str]:
    """The status and the message of what has ended a request."""
    if isinstance(error, Refused):
        return 503 if error.stopping else 429, str(error)
    if isinstance(error, TimeoutError):
        return 504, str(error)
    return 500, f"the model has failed: {type(error).__name__}: {error}"


def _unanswered(ended: Any) -> Response:
    """The reply where an answer has `ended` by an error, or whoever asked has gone."""
    return Response(status_code=GONE) if ended is None else error_reply(*_status_of(ended.error))


async def _gone(http: Request) -> None:
    """Until the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _wrong(http: Request, error: Any) -> Response:
    """What does not have the form of a request."""
    # of alternatives the one that goes farthest into what was given
    first = max(error.errors(), key=lambda each: len(each["loc"]))
    place = ".".join(str(part) for part in first["loc"][1:])
    message = first["msg"].removeprefix("Value error, ")
    return error_reply(400, f"{place}: {message}" if place else message, place or None)


async def _refused(http: Request, error: Any) -> Response:
    return error_reply(error.status_code, str(error.detail))


async def _broken(http: Request, error: Exception) -> Response:
    return error_reply(500, f"{type(error).__name__}: {error}")
