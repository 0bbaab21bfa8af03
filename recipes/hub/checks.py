"""What must be right in a run's folder before any of it goes to the Hub; every finding says where and how to mend it."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from cards.data import NO_MANIFEST, NOT_STATED, licenses_of_texts
from cards.files import read_json
from cards.run import Run
from cli import UserError

from .files import CARD, CONFIG, VOCABULARIES, WEIGHTS, Published, card_images, code_files, is_binary
from .text import local_names, scan

LARGEST_FILE = 50_000_000  # bytes of a file that holds no weights
SLACK = 1_000_000  # bytes that weight files may have beyond their float32 numbers: names and shapes
REQUIRED_METADATA = ("model_name", "language", "license", "library_name", "pipeline_tag", "eval_results")


@dataclass(frozen=True)
class Finding:
    """Something that keeps a folder from being published: the file, its line where it has one, and what mends it."""

    path: str
    line: int | None
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path}{'' if self.line is None else f':{self.line}'}: {self.problem}. {self.fix}"


def check_model(folder: Path) -> list[Finding]:
    """Whether the weights are whole, finite and load, and the tokenizer fits them."""
    weights = sorted(folder.glob(WEIGHTS))
    if not weights:
        return [Finding("model.safetensors", None, "there is none", "Finish the run with the same recipes/train.py")]
    findings = [finding for file in weights for finding in _not_finite(file)]
    model, more = _load_model(folder)
    findings += more
    if model is not None:
        findings += _weight_bytes(folder, weights, model)
        findings += _tokenizer(folder, model.config)
    return findings


def check_card(folder: Path, run: Run) -> list[Finding]:
    """Whether the card is of this training, its metadata complete, its figures numbers, its images there, and its data and
    licences stated.

    Args:
        run: what the card was written from; that of a study has its own folder.
    """
    from huggingface_hub import ModelCard

    text = (folder / CARD).read_text(encoding="utf-8")
    data, findings = ModelCard(text).data, []
    if run.result != read_json(folder / "result.json"):
        fix = "Publish the folder that the study made, or write the card with --run"
        findings.append(Finding(CARD, None, "the study that the card is written from holds another training", fix))
    for name in REQUIRED_METADATA:
        if not getattr(data, name, None):
            findings.append(Finding(CARD, 1, f"the metadata have no {name}", "Write the card with recipes/write_card.py"))
    for entry in data.eval_results or []:
        if not isinstance(entry.metric_value, int | float) or not math.isfinite(entry.metric_value):
            problem = f"{entry.metric_name} is {entry.metric_value}, no number that the Hub can show"
            findings.append(Finding(CARD, 1, problem, "Train or evaluate the model again"))
    again = "and recipes/write_card.py keeps what it was told for the next push"
    unstated = any(licence is None for _, licence in licenses_of_texts(run))
    for missing, words, problem, fix in (
        (unstated, f"| {NOT_STATED}", "the licence of the text is not stated", f"--data_license says it, {again}"),
        (run.manifest is None, NO_MANIFEST, "the data are not described", f"--data names the prepared folder, {again}"),
    ):
        if missing:
            line = next((number for number, line in enumerate(text.split("\n"), start=1) if words in line), None)
            findings.append(Finding(CARD, line, problem, fix))
    for number, path in card_images(folder):
        inside = (folder / path).resolve().is_relative_to(folder.resolve())
        if not inside or not (folder / path).is_file():
            fix = "Keep it in the folder, or take it out of the --notes of recipes/write_card.py"
            findings.append(Finding(CARD, number, f"the image {path} is not in the folder", fix))
    return findings


def check_files(folder: Path, files: list[Published], repo_id: str, allowed: Iterable[str] = ()) -> list[Finding]:
    """Whether the files that go up are plain files of usual size, without secrets, local paths and names.

    Args:
        repo_id: the names in it are public.
        allowed: texts that may go up although they look like something that must not.
    """
    findings = []
    for name in code_files(folder):
        if not (folder / name).is_file():
            fix = "Save the model again, which writes its code beside it, or take auto_map out"
            findings.append(Finding(CONFIG, None, f"auto_map needs {name}, which is not in the folder", fix))
    names = sorted(local_names(repo_id))
    for published in files:
        links = [path for path in (published.file, published.file.parent) if path.is_symlink() and path != folder]
        if links:
            findings.append(Finding(published.path, None, "it is a symbolic link", "Put the file itself there"))
        if published.size > LARGEST_FILE and not published.path.endswith(".safetensors"):
            size = f"it has {published.size / 1e6:,.0f} MB, more than {LARGEST_FILE / 1e6:,.0f}"
            findings.append(Finding(published.path, None, size, "See what made it so large, and make it again"))
            continue
        vocabulary = published.path in VOCABULARIES  # whose entries are words of the corpus, names among them
        findings += _text_findings(published, allowed, () if vocabulary else names)
    return findings


def list_findings(folder: Path, findings: list[Finding]) -> UserError:
    lines = "".join(f"\n  {finding}" for finding in findings)
    return UserError(f"{folder} cannot go to the Hub, nothing was sent; {len(findings)} finding(s):{lines}")


# --- weights and tokenizer --------------------------------------------------------------------------------------------


def _not_finite(file: Path) -> Iterator[Finding]:
    from safetensors import SafetensorError, safe_open

    fix = "Training diverged: train again with a lower learning rate"
    try:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                tensor = tensors.get_tensor(name)
                count = int((~torch.isfinite(tensor)).sum())
                if count:
                    yield Finding(file.name, None, f"{name} has {count:,} of {tensor.numel():,} not finite", fix)
    except (SafetensorError, OSError):
        return  # which loading the model says


def _load_model(folder: Path):
    from transformers import AutoModelForCausalLM

    fix = "Finish or repeat the run with recipes/train.py"
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of any library on the way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return None, [Finding("model.safetensors", None, f"AutoModelForCausalLM cannot load the folder ({reason})", fix)]
    findings = [
        Finding("model.safetensors", None, f"{kind.replace('_', ' ')}: {', '.join(map(str, sorted(report[kind])))}", fix)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if report.get(kind)
    ]
    return model, findings


def _weight_bytes(folder: Path, weights: list[Path], model) -> Iterator[Finding]:
    """More bytes than the model has, or another number of parameters than the run says that it has."""
    expected = 4 * sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())) + SLACK
    size = sum(file.stat().st_size for file in weights)
    if size > expected:
        problem = f"the weights have {size:,} bytes, the model at most {expected:,}"
        yield Finding(weights[0].name, None, problem, "Remove the weight files that are not of this model")
    try:
        parameters = read_json(folder / "result.json").get("parameters")
    except UserError:  # which writing the card says
        return
    if parameters != model.num_parameters():
        problem = f"the model has {model.num_parameters():,} parameters, result.json says {parameters:,}"
        yield Finding("result.json", None, problem, "Use the folder as recipes/train.py wrote it")


def _tokenizer(folder: Path, config) -> Iterator[Finding]:
    from transformers import AutoTokenizer

    fix = "Copy the tokenizer of the prepared data into the folder"
    if not (folder / "tokenizer_config.json").is_file():
        yield Finding("tokenizer_config.json", None, "there is no tokenizer", fix)
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any library on the way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        yield Finding("tokenizer.json", None, f"AutoTokenizer cannot load the folder ({reason})", fix)
        return
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest < 0 or largest >= config.vocab_size:
        problem = f"its ids reach {largest:,}, the embeddings of the model {config.vocab_size - 1:,}"
        yield Finding("tokenizer.json", None, problem, fix)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        number = getattr(config, name, None)
        if isinstance(number, int) and not 0 <= number < config.vocab_size:
            yield Finding(CONFIG, None, f"{name} is {number}, the vocabulary ends at {config.vocab_size - 1}", fix)


# --- texts ------------------------------------------------------------------------------------------------------------


def _text_findings(published: Published, allowed: Iterable[str], names: Iterable[str]) -> Iterator[Finding]:
    """Of a text, its lines; of weights, the notes in their header; of other binary files nothing."""
    from safetensors import SafetensorError, safe_open

    if published.path.endswith(".safetensors"):
        try:
            with safe_open(published.file, "pt") as tensors:
                text = str(tensors.metadata())
        except SafetensorError:
            return  # which loading the model says
    elif is_binary(published.file):
        return
    else:
        try:
            text = published.file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            yield Finding(published.path, None, f"it is no UTF-8 text (byte {error.start:,})", "Write it anew as UTF-8")
            return
    mended_at = " in what recipes/write_card.py reads: every push writes the card anew" if published.path == CARD else ""
    for line, problem, fix in sorted(scan(text, allowed, names)):
        yield Finding(published.path, line, problem, f"{fix[0].upper()}{fix[1:]}{mended_at}")
