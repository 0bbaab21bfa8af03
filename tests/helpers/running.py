"""Runs the recipes: as programs and as modules, on a small text, with tiny models."""

import contextlib
import functools
import importlib.util
import io
import json
import lzma
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support import stages

ROOT = Path(__file__).parents[2]
# real text, where there is some
DATA = Path(os.environ.get("HF_INFINI_DATA", ROOT.parent / "shared" / "data"))
CONTEXT = 64
SIZES = ["--n_layer", "2", "--n_embd", "32", "--n_head", "2", "--use_cpu", "true"]


@functools.cache
def load_recipe(name: str):
    """A file of recipes/ as a module, for the checks that need no process of their own."""
    specification = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def run(*command, check: bool = True) -> subprocess.CompletedProcess:
    """Runs a command in the repository; two threads in all, so that distributed runs do not crowd
    each other out."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def run_recipe(name: str, *argv, check: bool = True) -> subprocess.CompletedProcess:
    """[`run`] of a recipe in this process, without the seconds that imports take: what it prints
    and its exit status."""
    words, code = [*map(str, argv)], 0
    with (
        # results record the command
        mock.patch.object(sys, "argv", [f"recipes/{name}.py", *words]),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        try:
            load_recipe(name).main(words)
        except SystemExit as stop:
            code = stop.code or 0
    assert not check or code == 0, errors.getvalue()
    return subprocess.CompletedProcess([name, *words], code, out.getvalue(), errors.getvalue())


def kill_when(ready, name: str, *argv, seconds: int = 200) -> None:
    """Starts a recipe in a process and kills it, without a chance to clean up, as soon as `ready()`
    is true. The process is forked from a server that has imported the libraries and done
    nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.trainer", "datasets", "hf_infini.tools.training"])
    with tempfile.NamedTemporaryFile("r") as log:
        process = context.Process(target=_main_of, args=(name, [*map(str, argv)], log.name))
        process.start()
        try:
            deadline = time.monotonic() + seconds
            while not ready():
                assert process.is_alive(), f"ended too early\n{log.read()}"
                assert time.monotonic() < deadline, f"not ready after {seconds} s"
                time.sleep(0.002)
        finally:
            process.kill()
            process.join()


def _main_of(name: str, argv: list[str], log: str) -> None:
    with open(log, "w", buffering=1) as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
        load_recipe(name).main(argv)


def recipe(name: str) -> list[str]:
    """The command of a recipe as a program."""
    return [sys.executable, str(ROOT / "recipes" / f"{name}.py")]


@functools.cache
def sample_text() -> str:
    """40,000 characters of Shakespeare, or made-up sentences where the file is missing."""
    file = DATA / "shakespeare" / "complete_works.txt.xz"
    if file.is_file():
        return lzma.open(file, "rt", encoding="utf-8").read()[300_000:340_000]
    draw = random.Random(0)
    syllables = [first + second for first in "bcdfghjklmnpqrstvwxyz" for second in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(500)]
    # lines as long as Shakespeare's
    verses = (" ".join(draw.choices(words, k=6)) for _ in range(1100))
    lines = (f"{verse.capitalize()}{draw.choice(',.;:?!-_()')}" for verse in verses)
    return "To be, or not to be\n" + "\n".join(lines)


def write_documents(file: Path, text: str, lines: int) -> None:
    """A JSON-lines file of documents: so many lines of the text each."""
    found = text.splitlines()
    texts = ["\n".join(found[start : start + lines]) for start in range(0, len(found), lines)]
    rows = [
        json.dumps({"id": f"{number:03}", "text": text}) + "\n" for number, text in enumerate(texts)
    ]
    file.write_text("".join(rows), encoding="utf-8")


@functools.cache
def prepared_data(base: Path) -> Path:
    """A folder by recipes/prepare.py: characters, rows of CONTEXT tokens."""
    base = base / "train_data"
    base.mkdir()
    write_documents(base / "text.jsonl", sample_text(), 30)
    options = ["--source", base / "text.jsonl", "--tokenizer", "characters", "--context", CONTEXT]
    run_recipe("prepare", *options, "--validation", 0.1, "--out", base / "data")
    return base / "data"


@functools.cache
def straight_run(base: Path) -> Path:
    """An uninterrupted run of an infini model with segment positions, dropout and more than two
    epochs."""
    run_recipe("train", *infini_options(prepared_data(base)), "--out", base / "straight")
    return base / "straight"


def infini_options(data: Path) -> list:
    options = [
        "--data",
        data,
        *SIZES,
        *"--attention infini --segment_length 16 --position_encoding segment".split(),
    ]
    options += [
        *"--dropout 0.1 --batch_size 32 --gradient_accumulation 2 --epochs 2.5".split(),
        *"--save_steps 3".split(),
    ]
    return options + "--eval_steps 5 --eval_rows 16 --logging_steps 2 --learning_rate 0.005".split()


def self_options(data: Path) -> list:
    options = [
        "--data",
        data,
        *SIZES,
        *"--attention self --batch_size 4 --max_steps 5 --eval_steps 2".split(),
    ]
    return options + ["--logging_steps", 1, "--save_steps", 2, "--precision", "float32"]


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def losses(folder: Path) -> list[tuple]:
    lines = stages.read_jsonl(folder / "metrics.jsonl")
    return [
        (line["step"], line.get("train_loss"), line.get("eval_loss"), line.get("gates"))
        for line in lines
    ]


# --- the model from scratch ---

KINDS = {
    "global": "--score additive --position_encoding t5 --num_buckets 8 --max_distance 20".split(),
    "local": "--sliding_window 5 --position_encoding rope --rope_theta 100 --n_inner 48".split(),
    "infini": ["--segment_length", "16", "--score", "dot", "--gate_init", "-1", "--dropout", "0.1"],
    "none": [
        *"--position_encoding sinusoidal --tie_word_embeddings true".split(),
        *"--activation_function relu".split(),
    ],
}
STEPS = 9


def causal_mha_options(base, kind: str) -> list[str]:
    options = [
        *f"--model causal_mha --attention {kind}".split(),
        *KINDS[kind],
        "--data",
        str(prepared_data(base)),
        *SIZES,
    ]
    options += [
        *f"--batch_size 16 --gradient_accumulation 1 --max_steps {STEPS}".split(),
        *"--learning_rate 0.01".split(),
    ]
    return options + "--eval_steps 3 --save_steps 3 --logging_steps 1 --precision float32".split()


def trained(base, kind: str):
    """The folder of a finished run of one kind of attention; trained when it is first asked for."""
    folder = base / f"causal_mha_{kind}"
    if not (folder / "result.json").exists():
        load_recipe("train").main([*causal_mha_options(base, kind), "--out", str(folder)])
    return folder


# --- generation ---


def continuations(capsys, *options) -> list[dict]:
    """Runs the recipe in this process with --json and returns its objects."""
    capsys.readouterr()
    load_recipe("generate").main([*map(str, options), "--device", "cpu", "--json", "true"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def greedy(folder, prompt: str, count: int) -> str:
    """The likeliest token again and again, each from a fresh pass over everything before it."""
    net, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    start = len(ids)
    for _ in range(count):
        with torch.no_grad():
            ids.append(
                net(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item()
            )
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True)
