"""What a model card is written from: the run, the trainings before it, the study that it is part of."""

import shlex
from dataclasses import dataclass, field

from .text import last_part


@dataclass
class Stage:
    """One training of a model.

    Attributes:
        name: of its folder, as shown to the reader.
        result: the content of its result.json, None where the folder is no longer there.
        manifest: of the data that it read (see [`of_stream`]), None where that is not there.
        share: how much of its corpus that is, as [`study.planning.corpus_share`] says it; None where there is no manifest.
    """

    name: str
    result: dict | None = None
    manifest: dict | None = None
    share: str | None = None

    @property
    def data(self) -> str:
        """The name of what it was trained on, as far as it is known."""
        return f"the data of {self.name}" if self.result is None else trained_on(self.result, self.manifest)


@dataclass
class Run:
    """What a card is written from.

    Attributes:
        name, language, license, base_model: of the metadata; `base_model` is a name on the Hub or None.
        folder: where to load the model from, as shown to the reader.
        config, result, manifest, evaluations, baselines, samples: contents of the files that [`card`] names.
        share: as in [`Stage`].
        data_license: the licence of the text, where the user stated it.
        earlier: the runs that this one was continued from, the first one first.
        study, variant: the content of a study's report.json, and the entry of this model in it.
        prompts: `title`, `source` and `continuation` of the prompts that are the beginning of a document.
        figures: captions and relative links, by the place where they belong: training, study, or an evaluation's task.
        limits: Markdown for the section of limits; None states those that follow from the JSON.
    """

    name: str
    folder: str
    config: dict
    result: dict
    language: str = "en"
    license: str = "apache-2.0"
    base_model: str | None = None
    evaluations: list[dict] = field(default_factory=list)
    baselines: list[dict] = field(default_factory=list)
    manifest: dict | None = None
    share: str | None = None
    data_license: str | None = None
    earlier: list[Stage] = field(default_factory=list)
    study: dict | None = None
    variant: dict | None = None
    samples: dict | None = None
    prompts: dict[str, dict] = field(default_factory=dict)
    figures: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    limits: str | None = None

    @property
    def stages(self) -> list[Stage]:
        """All trainings of the model, this run the last."""
        return [*self.earlier, Stage(self.name, self.result, self.manifest, self.share)]

    @property
    def data(self) -> str:
        """The name of the folder that holds its validation rows and, unless it trained on a stream, its training rows."""
        return data_name(self.result, self.manifest)

    @property
    def context(self) -> int:
        """Tokens of a row of its last training; what its configuration says where the data is not at hand."""
        return self.config["n_positions"] if self.manifest is None else self.manifest["options"]["context"]

    def of_task(self, task: str) -> list[dict]:
        """The evaluations of a task; those that are older than the option measured perplexity."""
        return [found for found in self.evaluations if found["options"].get("task", "perplexity") == task]

    def show(self, place: str) -> str:
        """The figures of a place as Markdown, each behind an empty line."""
        return "".join(f"\n\n![{caption}]({link})" for caption, link in self.figures.get(place, []))


def data_folder(result: dict) -> str | None:
    """What --data was in the command of a result.json; None where a --config file named it."""
    words = [piece for word in shlex.split(result["command"]) for piece in word.split("=", 1)]
    return next((words[number + 1] for number, word in reversed([*enumerate(words[:-1])]) if word == "--data"), None)


def data_name(result: dict, manifest: dict | None = None) -> str:
    """The name of the folder that a run was trained on, or the data's fingerprint where its command does not say; in front
    of it the corpus, where it is known and has no part in the name."""
    folder = data_folder(result)
    name = f"data {result['data_fingerprint']}" if folder is None else last_part(folder)
    corpus = {"carolina": "Carolina", "biographies": "biographies"}.get("other" if manifest is None else corpus_of(manifest))
    return name if corpus is None or corpus.lower() in name.lower() else f"{corpus}, {name}"


def trained_on(result: dict, manifest: dict | None = None) -> str:
    """The name of what a run was trained on: its data, or the corpus that it read as a stream."""
    if "stream" not in result:
        return data_name(result, manifest)
    return f"{last_part(result['stream']['source'])}, streamed"


def of_stream(manifest: dict, result: dict) -> dict:
    """The manifest of a run's data; where the run trained on a stream, with what was streamed in place of the training rows,
    and of the small share of the corpus, that recipes/prepare.py made."""
    if "stream" not in result:
        return manifest
    stream = result["stream"]
    whole = {"source": stream["source"], "source_type": stream["source_type"]}
    whole |= {"fraction": 1.0, "max_documents": -1, "max_tokens": -1}
    held_out = {name: split for name, split in manifest["splits"].items() if name != "train"}
    return manifest | {"options": manifest["options"] | whole, "source": stream, "splits": held_out}


def corpus_of(manifest: dict) -> str:
    """carolina, biographies, or other."""
    options, files = manifest["options"], manifest["source"].get("files", [])
    if "biographies" in (options["source"], options.get("source_type")):
        return "biographies"
    return "carolina" if files and all(entry["file"].endswith(".xml.gz") for entry in files) else "other"
