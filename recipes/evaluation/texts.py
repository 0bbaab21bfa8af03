"""The documents that an evaluation reads: of --data or --text, or generated ones."""

from pathlib import Path

from cli import UserError

BIOGRAPHIES = 60


def source_file(options) -> str:
    """The file of --text, or of the documents of --data."""
    return options.text or str(Path(options.data) / f"{options.split}_documents.jsonl")


def read_texts(options) -> list[str]:
    """The documents of --text or --data that are long enough; UserError if none is."""
    from cli.corpus_options import CorpusOptions
    from corpora.sources import corpus_documents

    file = source_file(options)
    if not Path(file).is_file():
        what = f"{file} is missing; prepare {options.data} again"
        raise UserError(f"{what}, or give the source with --text")
    if options.data is not None and Path(file).stat().st_size == 0:
        raise UserError(
            f"{file} holds no documents: {options.data} was split by block, or is damaged; give "
            "the source with --text"
        )
    least = options.min_characters
    texts = [document.text for document in corpus_documents(CorpusOptions(file))]
    texts = [text for text in texts if text and len(text) >= least]
    if not texts:
        raise UserError(f"{file} has no document of at least --min_characters {least}")
    return texts


def generated_texts() -> list[str]:
    """Generated biographies, the same on every machine: about 150,000 tokens, repeated in longer
    examples."""
    from corpora.biographies import biography_documents

    return [document.text for document in biography_documents(BIOGRAPHIES)]
