"""A page in the browser that reads a document and answers, and shows the cache beside a plain one
and what heads keep."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gradio
from transformers import TextIteratorStreamer

from ..options import key_heads
from .documents import read_documents
from .estimate import estimate
from .reader import Reader

LENGTHS = (8_192, 131_072, 1_048_576)


class Demo:
    """What the page does, for one [`Reader`] at a time."""

    def __init__(self, model: Any, tokenizer: Any, max_new_tokens: int = 300):
        self.model, self.tokenizer, self.max_new_tokens = model, tokenizer, max_new_tokens
        self.reader = Reader(model, tokenizer)

    def read(
        self,
        files: list[str] | None,
        progress=gradio.Progress(track_tqdm=True),  # noqa: B008
    ) -> tuple[str, list]:
        """Reads files, and says how large the cache is; a new document begins a new chat."""
        if not files:
            raise gradio.Error("Choose a document first: text, Markdown, HTML or PDF.")
        try:
            text = read_documents(files)
            reader = Reader(self.model, self.tokenizer)
            cache = reader.read_document(text)
        except (ValueError, OSError) as error:
            raise gradio.Error(str(error)) from error
        self.reader, lines = (
            reader,
            ["| tokens | this cache | all keys and values |", "| ---: | ---: | ---: |"],
        )
        for tokens in (cache.get_seq_length(), *LENGTHS):
            plain = estimate(self.model.config, tokens).plain
            lines.append(f"| {tokens:,} | {cache.nbytes() / 1e6:,.1f} MB | {plain / 1e6:,.1f} MB |")
        return "\n".join(lines), []

    def answer(self, question: str, turns: list[dict]) -> Iterator[tuple[str, list[dict]]]:
        """Adds the question and, as it is made, its answer to the chat."""
        if not self.reader.document:
            raise gradio.Error("Read a document first.")
        messages = [{"role": turn["role"], "content": _words(turn["content"])} for turn in turns]
        messages.append({"role": "user", "content": question})
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        shown = [*messages, {"role": "assistant", "content": ""}]
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(
                self.reader.chat, messages, streamer=streamer, max_new_tokens=self.max_new_tokens
            )
            # also after an error: the page would wait for ever
            done.add_done_callback(lambda _: streamer.end())
            for piece in streamer:
                shown[-1]["content"] += piece
                yield "", shown
        if error := done.exception():
            raise gradio.Error(str(error)) from error

    def kept(self, layer: int, head: int) -> list[tuple[str, str | None]]:
        """The document in pieces, of which those that a head keeps have a label."""
        state = self.reader.texts[max(self.reader.texts, key=len)].layers[int(layer)].state
        ids = self.tokenizer(
            self.reader.document, add_special_tokens=False, split_special_tokens=True
        )["input_ids"]
        before = int(state.tokens_seen[0]) - len(ids)  # of the chat's template
        kept = set(state.kept_position[0, int(head)].tolist())
        runs = itertools.groupby(
            enumerate(ids, before), lambda one: "kept" if one[0] in kept else None
        )
        return [(self.tokenizer.decode([token for _, token in run]), label) for label, run in runs]

    def page(self) -> gradio.Blocks:
        """The page, to be launched."""
        config = self.model.config
        with gradio.Blocks(title="hf_infini", analytics_enabled=False) as page:
            gradio.Markdown("# Ask a document\nIt is read once, into a cache that does not grow.")
            files = gradio.File(
                label="Text, Markdown, HTML or PDF", file_count="multiple", height=140
            )
            read, table = gradio.Button("Read", variant="primary"), gradio.Markdown()
            # no button that publishes it
            chat = gradio.Chatbot(label="Chat", height=300, buttons=["copy_all"])
            question = gradio.Textbox(label="Question", submit_btn=True)
            read.click(self.read, files, [table, chat])
            question.submit(self.answer, [question, chat], [question, chat])
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
                    show.click(self.kept, [layer, head], kept)
        return page


def _words(content) -> str:
    """The text of a turn, which the chat may hold in parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
