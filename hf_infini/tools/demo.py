"""A page in the browser that reads a document and answers, and shows the cache beside a plain one
and what heads keep."""

import functools
import html
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import gradio
import torch
from transformers import StoppingCriteria, TextIteratorStreamer

from ..cache.joined import tokens_read
from ..options import key_heads
from .documents import read_document
from .estimate import estimate
from .excerpts import Marked, excerpts, token_borders
from .passages import SOURCES
from .reader import Reader

LENGTHS = (8_192, 131_072, 1_048_576)
NO_BORDERS = "This tokenizer does not say where in a text its tokens are."
# One call of the model at a time, whichever page asks; the others wait
ONE_AT_A_TIME: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1}


@dataclass(eq=False)
class Session:
    """What one page has read: the texts of its documents, and their names; and whether its answer
    is to stop."""

    reader: Reader
    texts: list[str]
    names: list[str]
    stopped: Event = field(default_factory=Event)

    def __post_init__(self):
        # a long text takes seconds
        self.borders = functools.cache(
            lambda n: token_borders(self.reader.tokenizer, self.texts[n])
        )

    def looked_at(self) -> tuple[str, list[tuple[str, str | None]]]:
        """The passages that the last answer looked at: a list of the first ones; and all, marked in
        some text of their documents, those of the list with their numbers there."""
        listed, marked = [], {number: [] for number in range(len(self.texts))}
        for place, (document, tokens, text) in enumerate(self.reader.passages[0], 1):
            label = str(place) if place <= SOURCES else "further"
            if place <= SOURCES:
                name = f"{self.names[document]}: " if len(self.names) > 1 else ""
                listed.append(f"[{label}] {name}{text.strip()}")
            if (borders := self.borders(document)) is not None:
                begin, end = int(borders[tokens[0], 0]), int(borders[tokens[-1], 1])
                marked[document].append(Marked(begin, end, label))
        pieces: list[tuple[str, str | None]] = []
        for number, own in marked.items():
            if own and len(self.names) > 1:
                pieces.append((f"\n\n{self.names[number]}\n\n", None))
            pieces += excerpts(self.texts[number], own) if own else []
        if None in map(self.borders, marked):
            pieces = [(NO_BORDERS, None)]
        return "\n\n".join(listed), pieces


# A text with marks would push what is below it off the page; it scrolls
STYLE = ".passages > * { max-height: 360px; }"


class Stopped(StoppingCriteria):
    """Ends an answer at its next token, once the event is set."""

    def __init__(self, event: Event):
        self.event = event

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), self.event.is_set(), device=input_ids.device)


class Demo:
    """What the page does; each page that is open has a [`Session`].

    Args:
        model, tokenizer, archive: as of [`Reader`].
        max_new_tokens: of an answer.
    """

    def __init__(
        self, model: Any, tokenizer: Any, max_new_tokens: int = 300, archive: bool | str = False
    ):
        self.model, self.tokenizer, self.max_new_tokens = model, tokenizer, max_new_tokens
        self.archive = archive
        Reader(model, tokenizer)  # says now, and not on the page, what it cannot take

    def read(
        self,
        files: list[str] | None,
        progress=gradio.Progress(track_tqdm=True),  # noqa: B008
    ) -> tuple[Session, str, list]:
        """Reads files, several apart where that can be, and says how large the cache is; new
        documents begin a new chat. `progress`: gradio's bar."""
        if not files:
            raise _refusal("Choose a document first: text, Markdown, HTML or PDF.")
        try:
            reader = Reader(self.model, self.tokenizer, archive=self.archive)
            found: dict[str, list[str]] = {}  # the same text is one document
            for file in files:
                found.setdefault(read_document(file), []).append(Path(file).name)
            texts, names = [*found], [", ".join(each) for each in found.values()]
            if len(texts) > 1 and not reader.reads_apart(texts):
                texts, names = ["\n\n".join(texts)], [", ".join(names)]
            session = Session(reader, texts, names)
            cache = reader.read_documents(texts)
        except Exception as error:
            raise _refusal(error, files) from error
        lines = ["| tokens | this cache | plain cache |", "| ---: | ---: | ---: |"]
        for tokens in (tokens_read(cache), *LENGTHS):
            plain = estimate(self.model.config, tokens).plain
            sizes = (f"{size / 1e6:,.1f}\u00a0MB" for size in (cache.nbytes(), plain))
            lines.append(f"| {tokens:,} | {' | '.join(sizes)} |")
        return session, "\n".join(lines), []

    def answer(
        self, question: str, turns: list[dict], session: Session | None
    ) -> Iterator[tuple[Any, list[dict], Any, Any]]:
        """Adds the question and, as it is made, its answer to the `turns` of the chat, and then
        shows the passages that it looked at, as a list and in the text. Meanwhile the button stops
        it, and what is typed stays. `session`: of the page."""
        if session is None:
            raise _refusal("Read a document first.")
        if not question.strip():
            raise _refusal("Type a question first.")
        session.stopped.clear()
        messages = [{"role": turn["role"], "content": _words(turn["content"])} for turn in turns]
        messages.append({"role": "user", "content": question})
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        shown = [*messages, {"role": "assistant", "content": ""}]
        yield gradio.Textbox(value="", submit_btn=False, stop_btn=True), shown, "", []
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(
                session.reader.chat,
                messages,
                streamer=streamer,
                stopping_criteria=[Stopped(session.stopped)],
                max_new_tokens=self.max_new_tokens,
            )
            # also after an error: the page would wait for ever
            done.add_done_callback(lambda _: streamer.end())
            try:
                for piece in streamer:
                    shown[-1]["content"] += piece
                    yield gradio.skip(), shown, gradio.skip(), gradio.skip()
            finally:
                session.stopped.set()  # a page that was closed reads no further
        asks = {"submit_btn": True, "stop_btn": False}
        if error := done.exception():
            yield gradio.Textbox(value=question, **asks), turns, "", []
            raise _refusal(error) from error
        passages, marked = session.looked_at() if self.archive else ("", [])
        yield gradio.Textbox(**asks), shown, passages, marked

    def stop(self, session: Session | None) -> None:
        """Ends the answer of the page with this `session`, which stays as far as it came."""
        if session is not None:
            session.stopped.set()

    def kept(self, layer: int, head: int, session: Session | None) -> list[tuple[str, str | None]]:
        """The document of a `session` in pieces, of which those that a `head` of a `layer` keeps
        have a label."""
        if session is None:
            raise _refusal("Read a document first.")
        reader = session.reader
        cache = reader.texts[max(reader.texts, key=len)]
        # of several documents the one whose end is in the window
        number = 0 if cache.archive is None else cache.archive.rows()[0].number
        text, state = session.texts[number], cache.layers[int(layer)].state
        if (borders := session.borders(number)) is None:
            raise _refusal(NO_BORDERS)
        before = int(state.tokens_seen[0]) - len(borders)  # of the chat's template
        kept = set((state.kept_position[0, int(head)] - before).tolist())
        runs = itertools.groupby(
            range(len(borders)), lambda token: "kept" if token in kept else None
        )
        pieces, shown = [], 0
        for label, run in runs:
            end = int(borders[[*run][-1], 1])
            pieces.append((text[shown:end], label))
            shown = end
        return [piece for piece in (*pieces, (text[shown:], None)) if piece[0]]

    def page(self) -> gradio.Blocks:
        """The page, to be launched with `css` [`STYLE`]."""
        config = self.model.config
        with gradio.Blocks(title="hf_infini", analytics_enabled=False) as page:
            session = gradio.State()
            gradio.Markdown("# Ask a document\nIt is read once, into a cache that does not grow.")
            files = gradio.File(
                label="Text, Markdown, HTML or PDF", file_count="multiple", height=140
            )
            read, table = gradio.Button("Read", variant="primary"), gradio.Markdown()
            # no button that publishes it
            chat = gradio.Chatbot(label="Chat", height=300, buttons=["copy_all"])
            question = gradio.Textbox(label="Question", submit_btn=True)
            with gradio.Row(visible=bool(self.archive), elem_classes="passages"):
                passages = gradio.Textbox(
                    label="Passages that the last answer looked at first", lines=4, max_lines=12
                )
                marked = gradio.HighlightedText(label="All that it looked at, in the text")
            for stops in (question.stop, read.click):
                stops(self.stop, session, queue=False, api_visibility="private")
            read.click(self.read, files, [session, table, chat], api_name="read", **ONE_AT_A_TIME)
            question.submit(
                self.answer,
                [question, chat, session],
                [question, chat, passages, marked],
                api_name="answer",
                **ONE_AT_A_TIME,
            )
            if config.kept_tokens:
                with gradio.Accordion("What a head keeps of the document", open=False):
                    layers = [
                        each for each in config.infini_layers if config.window_of(each).kept_tokens
                    ]
                    window = config.local_segments * config.segment_length + 1
                    layer = gradio.Dropdown(layers, value=layers[len(layers) // 2], label="Layer")
                    head = gradio.Dropdown(
                        list(range(key_heads(config)[0])), value=0, label="Key/value head"
                    )
                    label = (
                        f"Coloured: kept. The last {window:,} tokens or more are in the "
                        "window, and stay, too."
                    )
                    show, kept = (
                        gradio.Button("Show"),
                        gradio.HighlightedText(label=label, show_inline_category=False),
                    )
                    show.click(self.kept, [layer, head, session], kept, api_name="kept")
        return page


def _refusal(error: str | BaseException, files: Sequence[str] = ()) -> gradio.Error:
    """What the page says, which takes it for HTML; the files are copies, and have their own names
    in folders that nobody knows."""
    said = str(error) or type(error).__name__
    for file in files:
        said = said.replace(file, Path(file).name)
    return gradio.Error(html.escape(said), print_exception=False)


def _words(content) -> str:
    """The text of a turn, which the chat may hold in parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
