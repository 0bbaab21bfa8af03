"""Texts on their way to training rows: the sources, the choice of documents, tokenizers, and blocks
of token ids."""
