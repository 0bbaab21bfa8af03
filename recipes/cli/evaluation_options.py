"""The options that evaluations share: the model, the texts, recall and the machine."""

from dataclasses import dataclass
from typing import Literal

from . import ADAPTER, SEED, needed, option


@dataclass(kw_only=True)
class EvaluationOptions:
    model: str = needed("Model folder or name on the Hub.", group="model")
    adapter: str | None = option(None, ADAPTER)
    task: Literal["perplexity", "passkey", "facts"] = option(
        "perplexity", "What to measure.", group="measurement"
    )
    data: str | None = option(None, "Folder made by recipes/prepare.py. Or --text.", group="data")
    split: Literal["validation", "test"] = option(
        "validation", "--data: the held-out rows or documents to read."
    )
    text: str | None = option(
        None, "Text file, or JSON, CSV, parquet (one text per row, field text). Or --data."
    )
    min_characters: int = option(0, "Leave out documents shorter than this.", at_least=0)
    depths: list[float] = option(
        [5],
        "passkey: shares of the text before the number; one number from 2 on: so many, even ones.",
        at_least=0,
        at_most=1000,
        group="passkeys and facts",
    )
    language: Literal["pt", "en"] = option(
        "pt", "passkey: language of the sentences about the number."
    )
    seed: int = option(0, "passkey, facts: seed of the examples.", **SEED)
    batch_size: int = option(4, "Rows per call of the model.", at_least=1, group="machine")
    precision: Literal["float32", "bf16"] = option(
        "float32", "Of weights and calculations; bf16, in which models are served, is faster."
    )
    device: str = option("auto", "cpu, cuda, cuda:1, …; auto: a GPU where there is one.")

    @property
    def source(self) -> str | None:
        return self.text or self.data
