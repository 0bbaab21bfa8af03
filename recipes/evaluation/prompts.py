"""Prompts of a document and a question: what comes before the text, the text, and what asks."""

import uuid
from dataclasses import dataclass

import torch
from torch import Tensor

from cli import UserError, one_line
from hf_infini.tools.passages import term_numbers
from hf_infini.tools.reader import plain_template

# The place of the question
BLANK = "{}"
ASKED = {
    "en": {
        "short": "Question: {} Answer in a few words, from the text.",
        "choice": "Question: {} Answer in a few words, from the text.",
        "summary": "Question: {} Answer in a paragraph, from the text.",
        "code": "Complete this code, as the text says. Answer with the missing code only.\n\n{}",
    },
    "pt": {
        "short": "Pergunta: {} Responda em poucas palavras, com base no texto.",
        "choice": "Pergunta: {} Responda em poucas palavras, com base no texto.",
        "summary": "Pergunta: {} Responda em um parágrafo, com base no texto.",
        "code": "Complete este código com base no texto. Responda só com o que falta.\n\n{}",
    },
}


@dataclass
class Document:
    """A document as a model reads it.

    Args:
        id, language: as they were prepared.
        text: what the questions are about.
        ids: `[tokens]`, of all before the question: the template's first tokens, then the text.
        first: number of the text's first token.
        spans: from and to a character, of each of the text's tokens.
    """

    id: str
    language: str
    text: str
    ids: Tensor
    first: int
    spans: list[tuple[int, int]]

    def tokens_of(self, evidence: list[list[int]]) -> Tensor:
        """Numbers in `ids` of the tokens that have a character of the evidence, `[tokens]`."""
        found = [
            self.first + number
            for number, (start, end) in enumerate(self.spans)
            if any(start < last and first < end for first, last in evidence)
        ]
        return torch.tensor(found, dtype=torch.long)


@dataclass
class Question:
    """A question as a model reads it: `text`, what is asked; `ids` `[tokens]`, of all behind the
    document up to where the answer begins; `words` `[tokens]`, of the text, and `terms`
    `[vocabulary]`, which of them are the same to a recall."""

    text: str
    ids: Tensor
    words: Tensor
    terms: Tensor


class Prompter:
    """Makes the prompts of a model.

    Args:
        tokenizer: its fast tokenizer.
        chat: whether its chat template is used, where it has one.
        before: what is in front of the document; `{}` in it is the question.
        asks: what is behind it; `{}` is the question. `None`: [`ASKED`], in the language of
            the document.
    """

    def __init__(self, tokenizer, chat: bool, before: str = "", asks: str | None = None):
        if not tokenizer.is_fast:
            raise UserError("--model: its tokenizer is not fast, and cannot say where tokens are")
        self.tokenizer, self.chat = tokenizer, chat and bool(tokenizer.chat_template)
        self.begin, self.asks = f"{before}\n\n" if before else "", asks
        self.terms = term_numbers(tokenizer)
        text, asked = uuid.uuid4().hex, uuid.uuid4().hex
        how = {} if self.chat else {"chat_template": plain_template(tokenizer)}
        turn = {"role": "user", "content": f"{text}\n\n{asked}"}
        try:
            rendered = tokenizer.apply_chat_template(
                [turn], tokenize=False, add_generation_prompt=True, **how
            )
        except Exception as error:  # whatever a template may raise
            raise UserError(
                f"--model: its chat template fails ({one_line(error)}); give --chat false"
            ) from error
        self.head, found, rest = rendered.partition(text)
        self.before, asks, self.after = rest.partition(asked)
        if not found or not asks:
            raise UserError("--model: its chat template changes what is said; give --chat false")

    @property
    def question_first(self) -> bool:
        """Whether the question is in front of the document, so that each has a reading."""
        return BLANK in self.begin

    def document(self, prepared: dict, entry: dict | None = None) -> Document:
        """The document of a prepared line, behind the question of this `entry` of it where that
        comes first. What in the text spells a special token is plain text."""
        begin = self.begin.replace(BLANK, _sentence(entry) if entry else "")
        head = self._encode(self.head + begin)
        found = self.tokenizer(
            prepared["text"],
            add_special_tokens=False,
            split_special_tokens=True,
            return_offsets_mapping=True,
            verbose=False,
        )
        ids = torch.tensor(head + found["input_ids"], dtype=torch.long)
        names = {name: prepared[name] for name in ("id", "language", "text")}
        return Document(**names, ids=ids, first=len(head), spans=found["offset_mapping"])

    def question(self, prepared: dict, language: str) -> Question:
        """The question of a prepared line's entry."""
        asks = self.asks or ASKED[language][prepared["kind"]]
        text = asks.replace(BLANK, _sentence(prepared))
        texts = self.before + text + self.after, prepared["question"]
        ids, words = (torch.tensor(self._encode(each), dtype=torch.long) for each in texts)
        return Question(prepared["question"], ids, words, self.terms)

    def answer(self, text: str) -> Tensor:
        """The ids of an answer, `[tokens]`, as it goes on behind the question."""
        begins = not self.after or self.after[-1].isspace()
        return torch.tensor(self._encode(text if begins else f" {text}"), dtype=torch.long)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _sentence(prepared: dict) -> str:
    """The question of a prepared line's entry, with a mark at its end, but for code."""
    asked = prepared["question"].strip()
    return asked if prepared["kind"] == "code" or asked[-1] in ".?!:”\"'" else f"{asked}?"
