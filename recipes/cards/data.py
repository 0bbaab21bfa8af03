"""The data in a model card: which corpus and how much of it, what was left out, the rows, licences, what to cite."""

import re
from pathlib import PurePath

from corpora.carolina import CAROLINA_FOLDERS, CAROLINA_REPOSITORY
from corpora.selection import PARAGRAPH_CHARACTERS, PROSE_SHARE
from support.markdown import fence, markdown_table

from .model import kind_of
from .run import Run, Stage, corpus_of
from .text import last_part, shorten_path

KINDS_OF_ROWS = {  # recipes/prepare_recall.py
    "passkey": "real text with a five-digit number that is asked for behind it",
    "facts": "the opening of a generated biography, and questions for its facts among invented and real text",
    "codes": "real text in which people are given codes, all of which are asked for",
    "echo": "real text in which short passages come again",
    "paragraphs": "invented paragraphs full of people and years that nobody asks for",
    "text": "the text as it is",
}
NOT_STATED = "not stated"  # of a licence
NO_MANIFEST = "The folder of the data was not at hand when this card was written: more is not known here."
WIKI_LICENSES = "documents CC BY-SA 3.0, those of Wikinews CC BY 2.5; headers, which no model here reads, CC BY 4.0"
PAPER = """\
@misc{munkhdalai2024leave,
  title         = {Leave No Context Behind: Efficient Infinite Context Transformers with Infini-attention},
  author        = {Tsendsuren Munkhdalai and Manaal Faruqui and Siddharth Gopal},
  year          = {2024},
  eprint        = {2404.07143},
  archivePrefix = {arXiv},
  primaryClass  = {cs.CL}
}"""
CAROLINA = """\
@misc{crespo2023carolina,
  title         = {Carolina: a General Corpus of Contemporary Brazilian Portuguese with Provenance, Typology and
                   Versioning Information},
  author        = {Maria Clara Ramos Morales Crespo and Maria Lina de Souza Jeannine Rocha and Mariana Lourenço
                   Sturzeneker and Felipe Ribas Serras and Guilherme Lamartine de Mello and Aline Silva Costa and
                   Mayara Feliciano Palma and Renata Morais Mesquita and Raquel de Paula Guets and Mariana Marques da
                   Silva and Marcelo Finger and Maria Clara Paixão de Sousa and Cristiane Namiuti and Vanessa Martins
                   do Monte},
  year          = {2023},
  eprint        = {2303.16098},
  archivePrefix = {arXiv},
  primaryClass  = {cs.CL}
}"""
PACKAGE = """\
@misc{{hf_infini,
  title   = {{hf\\_infini: Infini-attention for Hugging Face causal language models}},
  note    = {{Version {version}, Apache License 2.0}}
}}"""


# --- what the manifest says -------------------------------------------------------------------------------------------


def language_of(manifest: dict) -> str:
    """The language of the corpora that are known to be Portuguese; English is taken for the others."""
    return "en" if corpus_of(manifest) == "other" else "pt"


def is_recall(manifest: dict | None) -> bool:
    """Whether the rows are those of recipes/prepare_recall.py."""
    return manifest is not None and "prepared_from" in manifest["options"]


def taxonomies(manifest: dict) -> list[str]:
    """The codes of the Carolina parts that were read; a shard's name begins with its part's code."""
    codes = {PurePath(entry["file"]).name[:3].lower() for entry in manifest["source"]["files"]}
    return [code for code in CAROLINA_FOLDERS if code in codes]


# --- sections ---------------------------------------------------------------------------------------------------------


def data_section(run: Run) -> str:
    manifest, result = run.manifest, run.result
    rows = [("Data", f"{run.data}, fingerprint `{result['data_fingerprint']}`")]
    if manifest is None:
        return f"## Data\n\n{markdown_table(['', ''], rows, left=2)}\n\n{NO_MANIFEST}"
    options, splits, stream = manifest["options"], manifest["splits"], result.get("stream")
    read = f"{shorten_path(options['source'])}, {manifest['source']['documents']:,} document(s)"
    if stream is None:
        rows.append(("Source", read))
    else:
        rows[0] = ("Tokenizer and held-out rows", rows[0][1])
        read += f" of {stream['tokens']:,} tokens, {stream['passes']:,} time(s) read to its end"
        packed = f"{result['tokens'] // run.context:,} of {run.context:,} tokens, packed on the way and not stored"
        rows += [("Trained on a stream of", read), ("Rows, train", packed)]
    rows += [("Filters", words)] if (words := describe_filters(options, stream is not None)) else []
    dropped = manifest["source"].get("dropped")
    rows += [("Left out", ", ".join(f"{count:,} {reason}" for reason, count in dropped.items()))] if dropped else []
    rows.append(("Tokenizer", f"{shorten_path(options['tokenizer'])}, {manifest['tokenizer']['vocabulary']:,} entries"))
    by_document = options["split_by"] == "document"
    for name, split in splits.items():
        documents = f", from {split['documents']:,} documents" if by_document and "documents" in split else ""
        rows.append((f"Rows, {name}", f"{split['blocks']:,} of {options['context']:,} tokens{documents}"))
    rows.append(("Held out", "whole documents" if by_document else "rows of the same documents"))
    rows += [("Seed of what is drawn", str(options["seed"]))] if "seed" in options else []
    if stream is None:
        rows.append(("Passes over the training rows", f"{result['tokens'] / splits['train']['tokens']:.2f}"))
    parts = ["## Data", describe_corpus(manifest, run.share), recall_rows(manifest) if is_recall(manifest) else ""]
    return "\n\n".join(filter(None, [*parts, markdown_table(["", ""], rows, left=2)]))


def describe_corpus(manifest: dict, share: str | None) -> str:
    """A sentence on a corpus that is known; empty for others, of which the table says all there is."""
    corpus = corpus_of(manifest)
    if corpus == "biographies":
        return "Biographies of invented people in Portuguese, which the package generates."
    if corpus == "other":
        return ""
    text = f"[Carolina](https://huggingface.co/datasets/{CAROLINA_REPOSITORY}), a corpus of contemporary Brazilian "
    return text + f"Portuguese: {_share(share)}."


def _share(share: str | None) -> str:
    counts = re.findall(r"(\d+) of (\d+)", share or "")
    if not counts:
        return f"{share or 'a part of it'}; how many there are in all was not at hand"
    words = re.sub(r"(\d+) of (\d+)", r"\1 of the \2", share)
    return words if all(read == there for read, there in counts) else f"{words}, not a random sample of them"


def describe_filters(options: dict, streamed: bool = False) -> str:
    """The documents that stayed, after the options of recipes/prepare.py; of a stream, which knows no earlier documents,
    only near-duplicates of held-out ones are gone."""
    words = []
    if options.get("prose_filter"):
        host = "" if options["prose_host"] == "any" else f"from {options['prose_host']}, "
        words.append(
            f"running prose alone: {host}at least {options['prose_min_characters']:,} characters, at least "
            f"{100 * PROSE_SHARE:g} % of them in paragraphs of {PARAGRAPH_CHARACTERS} characters and more"
        )
    if options.get("prose_filter") or options.get("deduplicate"):
        words.append("no near-duplicates" + " of held-out documents" * streamed)
    words += [f"{100 * options['fraction']:g} % of the documents, drawn at random"] if options.get("fraction", 1) < 1 else []
    limits = {"max_documents": "the first {:,} documents", "max_tokens": "the first {:,} training tokens"}
    return "; ".join(words + [text.format(options[name]) for name, text in limits.items() if options.get(name, -1) > 0])


def recall_rows(manifest: dict) -> str:
    """How many rows of each kind there are to train on, and what of them is learned."""
    options, split = manifest["options"], manifest["splits"]["train"]
    rows = [
        [kind, what, f"{split['rows_by_kind'][kind]:,}", f"{split['counted_tokens'].get(kind, 0):,}"]
        for kind, what in KINDS_OF_ROWS.items()
        if kind in split["rows_by_kind"]
    ]
    learned = "the answers alone are learned" if options["answers_only"] else "every token is learned"
    text = f"Rows that train recall, made by recipes/prepare_recall.py of the rows of {last_part(options['prepared_from'])}"
    text += f": where they ask, {learned}."
    return f"{text}\n\n{markdown_table(['rows', 'what is in them', 'training rows', 'learned tokens'], rows, left=2)}"


def licenses_section(run: Run) -> str:
    rows = [("weights", run.license), ("code (hf_infini)", "Apache-2.0")]
    rows += [(text, licence or NOT_STATED) for text, licence in licenses_of_texts(run)]
    text = "What the model writes may repeat text of its corpus, whose licence holds there."
    text += " So it does for the prompt above, and how it goes on." if run.prompts else ""
    return f"## Licences\n\n{markdown_table(['', 'licence'], rows, left=2)}\n\n{text}"


def licenses_of_texts(run: Run) -> list[tuple[str, str | None]]:
    """The texts that a model was trained on, and the licence of each, None where nobody stated it."""
    return list(dict.fromkeys(row for stage in run.stages for row in text_licenses(stage, run.data_license)))


def text_licenses(stage: Stage, stated: str | None) -> list[tuple[str, str | None]]:
    """What text a stage was trained on, and its licence: that of a corpus that is known, or as the user stated it."""
    manifest = stage.manifest
    if manifest is None:
        return [(f"text of {stage.data}", stated)]
    corpus = corpus_of(manifest)
    if corpus == "biographies":
        rows = [("text: generated biographies", "none")]
    elif corpus == "carolina":
        licenses = [WIKI_LICENSES if code == "wik" else "as each document's header says" for code in taxonomies(manifest)]
        rows = [(f"text: Carolina, `{c}`", words) for c, words in zip(taxonomies(manifest), licenses, strict=True)]
    else:
        rows = [(f"text of {last_part(manifest['options']['source'])}", stated)]
    if is_recall(manifest) and corpus != "biographies":
        rows.append(("text: generated sentences of recall", "none"))
    return rows


def citation_section(run: Run) -> str:
    entries = [PAPER]
    entries += [CAROLINA] if uses_carolina(run) else []
    entries.append(PACKAGE.format(version=run.result["versions"]["hf_infini"]))
    method = "method" if kind_of(run.config) == "infini" else "method that the package is for"
    what = f"The {method}, the corpus and the package:" if len(entries) == 3 else f"The {method}, and the package:"
    return f"## Citation\n\n{what}\n\n" + fence("\n\n".join(entries), "bibtex")


def uses_carolina(run: Run) -> bool:
    return any(stage.manifest is not None and corpus_of(stage.manifest) == "carolina" for stage in run.stages)
