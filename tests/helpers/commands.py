"""The command in this process, with small models."""

import io
import sys
from pathlib import Path

import pytest

from corpora.tokenization import train_bpe
from decoders import decoder
from hf_infini import command
from models import infini_gpt2
from running import sample_text

TEXT = sample_text()[:600].strip()


def save_models(base: Path) -> dict[str, Path]:
    """A plain model, one with a memory, and a document; their tokens are pieces of words."""
    tokenizer = train_bpe([sample_text()], 400)
    tokenizer.chat_template = (
        "{% for turn in messages %}<|endoftext|>{{ turn.role }}\n{{ turn.content }}\n{% endfor %}"
    )
    plain = decoder("llama", vocab_size=400, pad_token_id=tokenizer.pad_token_id)
    models = {"plain": plain, "memory": infini_gpt2(vocab_size=400, position_encoding="rope")}
    for name, model in models.items():
        for part in (model, tokenizer):
            part.save_pretrained(base / name)
    (base / "play.txt").write_text(TEXT, encoding="utf-8")
    return {name: base / name for name in (*models, "play.txt")}


def command_in(kept: Path, monkeypatch, capsys):
    """A function that runs the command: what it printed, on standard output and on standard error.
    `kept`: the cache folder; `status`: the exit status that it must have; `typed`: standard input,
    closed where it is `None`."""
    monkeypatch.setattr(command, "KEPT", kept)

    def call(*words, status: int = 0, typed: str | None = ""):
        monkeypatch.setattr(sys, "argv", ["hf-infini", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", None if typed is None else io.StringIO(typed))
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            command.main()
        printed = capsys.readouterr()
        assert (stop.value.code or 0) == status, printed.err
        return printed

    return call
