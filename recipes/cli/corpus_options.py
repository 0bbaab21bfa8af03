"""The options that say which documents a recipe reads, and which of them it keeps."""

from dataclasses import dataclass

from . import SEED, needed, option


@dataclass
class CorpusOptions:
    source: str = needed(
        "A path, a dataset's name on the Hub, or 'biographies' (makes them).", group="corpus"
    )
    encoding: str = option(
        "utf-8", "Encoding of text, JSON, CSV and XML, as Python names it: utf-16, latin-1, cp1252."
    )
    text_unit: str = option(
        "file", "Text files: what one document is.", choices=["file", "line", "paragraph"]
    )
    text_field: str = option(
        "text", "JSON, CSV and datasets: the field that holds the text; a nested one: outer.inner."
    )
    dataset_config: str | None = option(None, "Datasets on the Hub: the configuration's name.")
    dataset_split: str = option("train", "Datasets on the Hub: the split to read.")
    revision: str | None = option(None, "Sources on the Hub: branch, tag or commit.")
    biographies: int = option(
        1000, "Generated biographies: how many.", at_least=1, group="generated biographies"
    )
    biography_distance: int = option(
        6000, "Generated biographies: characters between a fact and its return.", at_least=0
    )
    prose_filter: bool = option(
        False,
        "Keep running prose only: of --prose_host, --prose_min_characters long, half of it in "
        "paragraphs of 80 characters or more; near-duplicates are removed.",
        group="choice of documents",
    )
    prose_host: str = option(
        "pt.wikipedia.org", "Prose filter: the host to keep, or 'any'; without a URL all pass."
    )
    prose_min_characters: int = option(
        1000, "Prose filter: the shortest document, in characters.", at_least=0
    )
    drop_duplicates: bool = option(False, "Keep the first of documents with the same text.")
    fraction: float = option(
        1.0, "Share of the documents; a smaller is part of a larger.", greater_than=0, at_most=1
    )
    max_documents: int | None = option(
        None, "Stop reading after so many documents, in the corpus's order.", at_least=1
    )
    seed: int = option(0, "Seed of every choice by chance.", **SEED)
