"""Options and YAML files: every number has a range, and what is malformed is refused before anything is read or written."""

import dataclasses
import typing

import pytest

from bad_input import refused
from cli import bounds_in_words
from running import ROOT, load_recipe

NEEDED = {
    "benchmark": ["--out", "x.json"],
    "convert": ["--model", "x", "--data", "x", "--out", "x"],
    "evaluate_model": ["--model", "x"],
    "generate": ["--model", "x"],
    "inspect_heads": ["--model", "x"],
    "memorize": ["--model", "x", "--text", "x", "--out", "x"],
    "mqar": ["--out", "x"],
    "ngram_baseline": ["--data", "x", "--out", "x.json"],
    "prepare": ["--source", "x", "--out", "x"],
    "prepare_recall": ["--data", "x", "--out", "x"],
    "push": ["--run", "x", "--out", "x", "--language", "pt", "--data_license", "x", "--prompt", "x"],
    "study": ["--out", "x"],
    "train": ["--data", "x", "--out", "x"],
}
NO_WHOLE_NUMBERS = ["nan", "inf", "1.5", "1e3", "many", ""]
# What each number must not be, beside what no number may be: infinite, not a number, no number
NUMBERS = {
    "benchmark": {"contexts": [0, -1], "rounds": [0, -5], "threads": [0, -1, 10**6], "seed": [-1, 2**32]},
    "convert": {
        "memory_in": [-1],
        "repeat_up_to": [0.5, -1],
        "memory_layers": [0, -1],
        "transfer_rows": [0],
        "transfer_steps": [-1, 10**30],
        "together_steps": [-1],
        "transfer_learning_rate": [0, -1],
        "together_learning_rate": [0, -1],
        "lora_rank": [-1],
        "text_weight": [-0.1, 1.1],
        "narrow": [-0.1, 1.1],
        "narrow_to": [0, -1],
        "dilute_up_to": [0.5, -1],
        "dilute_share": [-0.1, 1.1],
        "batch_size": [0, -1],
        "gradient_accumulation": [0, -1],
        "save_steps": [0, -1],
        "evaluation_rows": [0, -1],
        "evaluation_from": [0, -1],
        "seed": [-1, 2**32],
    },
    "evaluate_model": {
        "length": [1, 0, -8],
        "lengths": [1, -1],
        "depths": [-0.5, 10**9],
        "distances": [-1],
        "segment_length": [0, -1],
        "samples": [0, -1],
        "seed": [-1, 2**40],
        "min_characters": [-1],
        "max_tokens": [0, -1],
        "chunk": [0, -1],
        "batch_size": [0, -4],
    },
    "generate": {
        "max_new_tokens": [0, -1, 10**30],
        "temperature": [0, -1],
        "top_k": [0, -1, 10**30],
        "top_p": [0, -0.1, 1.01],
        "repetition_penalty": [0, -1],
        "seed": [-1, 2**64],
        "chunk": [0, -1],
        "batch_size": [0, -1],
    },
    "inspect_heads": {"max_tokens": [0, -1], "layers": [-1]},
    "memorize": {"chunk_tokens": [0, -1], "checkpoint_tokens": [0, -1]},
    "mqar": {
        "d_model": [0, -1],
        "heads": [0, -1],
        "segment_length": [0, -1],
        "window": [0, -1],
        "learning_rates": [0, -1],
        "epochs": [0, -1, 10**30],
        "stop_above": [-0.1, 1.1],
        "batch_size": [0, -1],
        "seed": [-1, 2**32],
        "vocabulary": [7, 0, -1, 10**12],
        "save_steps": [0, -1],
        "threads": [0, -1, 10**6],
    },
    "ngram_baseline": {"orders": [-1, 6]},
    "prepare": {
        "biographies": [0, -1, 10**30],
        "biography_distance": [-1],
        "prose_min_characters": [-1],
        "fraction": [0, -0.1, 1.1],
        "max_documents": [0, -1],
        "max_file_gb": [0, -1],
        "seed": [-1, 2**32],
        "vocab_size": [40, 257, 0, -1, 10**12],
        "tokenizer_sample": [0, 2],
        "context": [0, -1, 2**40],
        "validation": [-0.1, 1],
        "test": [-0.1, 1],
        "max_tokens": [0, -1],
    },
    "prepare_recall": {
        "context": [1, 0, -1, 2**40],
        "rows": [0, -1],
        "validation_rows": [0, -1],
        "questions": [0, -1],
        "seed": [-1, 2**32],
    },
    "push": {"max_new_tokens": [0, -1], "seed": [-1, 2**32]},
    "study": {"seeds": [-1, 2**32], "jobs": [0, -1, 10**6], "threads": [0, -1, 10**6]},
    "train": {
        "epochs": [0, -1],
        "max_tokens": [0, -1],
        "max_steps": [0, -1, 10**30],
        "dilute_up_to": [0.5, -1],
        "dilute_share": [-0.1, 1.1],
        "repeat_up_to": [0.5, -1],
        "num_processes": [0, -1],
        "context_parallel_size": [0, -1],
        "seed": [-1, 2**32],
        "batch_size": [0, -1],
        "gradient_accumulation": [0, -1],
        "learning_rate": [0, -1],
        "gate_learning_rate": [-1],
        "warmup": [-0.1],
        "weight_decay": [-1],
        "max_grad_norm": [0, -1],
        "eval_steps": [0, -1],
        "eval_rows": [0, -1],
        "save_steps": [0, -1],
        "logging_steps": [0, -1],
    },
}


def numbers_of(recipe: str) -> dict[str, tuple[type, dict]]:
    """The type and the metadata of each option that is a number, or a list of them, of a recipe's own and the corpora's."""
    module, found = load_recipe(recipe), {}
    for name, kind in vars(module).items():
        if not (dataclasses.is_dataclass(kind) and name.endswith("Options") and name != "ModelOptions"):
            continue  # the model's options are the library's
        hints = typing.get_type_hints(kind)
        for entry in dataclasses.fields(kind):
            types = {hints[entry.name], *typing.get_args(hints[entry.name])}
            types |= {inner for one in types for inner in typing.get_args(one)}
            number = types & {int, float}
            if number:
                found[entry.name] = number.pop(), entry.metadata
    return found


def test_all_recipes_are_here():
    assert NUMBERS.keys() == NEEDED.keys() == {file.stem for file in (ROOT / "recipes").glob("*.py")}


@pytest.mark.parametrize("recipe", NUMBERS)
def test_every_number_has_a_range_that_help_shows(recipe, capsys):
    numbers = numbers_of(recipe)
    assert numbers.keys() == NUMBERS[recipe].keys()
    assert all(bounds_in_words(metadata) for _, metadata in numbers.values())
    main, shown = load_recipe(recipe).main, ""
    with_rare = ("convert", "evaluate_model", "memorize", "prepare", "train")
    for flag in ("--help", "--help_all") if recipe in with_rare else ("--help",):
        with pytest.raises(SystemExit):
            main([flag])
        shown = " ".join(capsys.readouterr().out.split())
    for _, metadata in numbers.values():
        assert f"{bounds_in_words(metadata).capitalize()}." in shown


def bad_numbers():
    for recipe, options in NUMBERS.items():
        for name, values in options.items():
            for value in values:
                yield pytest.param(recipe, name, str(value), id=f"{recipe}-{name}-{value}")


@pytest.mark.parametrize(("recipe", "name", "value"), list(bad_numbers()))
def test_numbers_out_of_their_range(recipe, name, value, capsys):
    argv = [*NEEDED[recipe], f"--{name}", value]
    refused(load_recipe(recipe).main, argv, capsys, f"--{name} must be ", f"got {value}")


@pytest.mark.parametrize("recipe", NUMBERS)
def test_no_numbers(recipe, capsys):
    main = load_recipe(recipe).main
    for name, (kind, _) in numbers_of(recipe).items():
        for value in ["nan", "inf", "-inf"] if kind is float else []:
            refused(main, [*NEEDED[recipe], f"--{name}={value}"], capsys, f"--{name} must be ", f"got {value}")
        for value in ["many", ""] if kind is float else NO_WHOLE_NUMBERS:
            refused(main, [*NEEDED[recipe], f"--{name}={value}"], capsys, f"--{name}", repr(value), code=2)


# --- malformed words of a command line ---

WORDS = {
    "unknown option": ("prepare", ["--sorce", "x"], ["--sorce", "did you mean --source?"], 2),
    "abbreviated option": ("train", ["--learning", "1"], ["--learning"], 2),
    "no value": ("prepare", ["--context"], ["--context"], 2),
    "choice": ("prepare", ["--split_by", "line"], ["--split_by", "document"], 2),
    "several values for one": ("train", ["--max_steps", "2", "--seed", "1", "2"], ["2; --seed takes one value"], 2),
    "two words for one": ("generate", ["--prompt", "a", "b", "--json", "true", "b"], ["--json takes one value"], 2),
    "boolean": ("train", ["--use_cpu", "perhaps"], ["perhaps"], 2),
    "needed option empty": ("prepare", ["--out", ""], ["--out '' is empty"], 1),
    "needed option empty (train)": ("train", ["--data", ""], ["--data '' is empty"], 1),
    "half a character": ("prepare", ["--out", "a\udce9b"], ["--out", "not UTF-8", "another name"], 1),
    "half a character in a prompt": ("generate", ["--prompt", "a\ud800"], ["--prompt", "not UTF-8"], 1),
    "half a character in a list": ("memorize", ["--text", "a", "b\udcff"], ["--text", "not UTF-8"], 1),
    "NUL in a name": ("study", ["--out", "a\0b"], ["--out", "NUL"], 1),
    "shares of all": ("prepare", ["--validation", "0.5", "--test", "0.5"], ["leave nothing for training"], 1),
    "no share": ("prepare_recall", ["--mix", "facts=nan"], ["--mix facts=nan", "facts=0.4"], 1),
    "a mix of too much": ("prepare_recall", ["--mix", "facts=0.9", "text=0.2"], ["the shares sum to 1.1"], 1),
    "no shape": ("benchmark", ["--shapes", "4096"], ["--shapes 4096", "4096x256"], 1),
    "no json": ("ngram_baseline", ["--out", "x.txt"], ["--out x.txt", ".json"], 1),
    "depths": ("evaluate_model", ["--task", "passkey", "--depths", "0.5", "3"], ["--depths 0.5 3.0", "from 0 to 1"], 1),
    "two prompts": ("generate", ["--prompt", "a", "--prompt_file", "b"], ["--prompt or --prompt_file"], 1),
    "greedy with a temperature": ("generate", ["--temperature", "0.5"], ["--temperature", "add --do_sample true"], 1),
    "nothing to study": ("study", [], ["--study"], 1),
    "study without data": ("study", ["--grid", "score=dot"], ["--source and --data"], 1),
    "grid without values": ("study", ["--data", "x", "--grid", "score="], ["--grid score=", "OPTION=VALUE,VALUE"], 1),
    "set without a value": ("study", ["--data", "x", "--set", "train.seed"], ["--set train.seed", "train.max_steps=20"], 1),
    "set of broken YAML": ("study", ["--data", "x", "--set", "train.seed=[1"], ["--set train.seed=[1", "not valid YAML"], 1),
    "set of YAML twice": ("study", ["--data", "x", "--set", "train={seed: 1, seed: 2}"], ["has 'seed' twice"], 1),
    "no launcher": ("study", ["--data", "x", "--grid", "score=dot", "--launcher", "nope"], ["no program nope"], 1),
}


@pytest.mark.parametrize("case", WORDS)
def test_words(case, capsys, tmp_path, monkeypatch):
    recipe, words, mentions, code = WORDS[case]
    monkeypatch.chdir(tmp_path)
    refused(load_recipe(recipe).main, [*NEEDED[recipe], *words], capsys, *mentions, keeps=tmp_path, code=code)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["zzz", "meta", "cuda:77"])
@pytest.mark.parametrize("recipe", ["benchmark", "evaluate_model", "generate", "inspect_heads", "memorize", "push"])
def test_devices_are_tried_before_anything_is_loaded(recipe, device, capsys, tmp_path, monkeypatch):
    """Model and data are missing, too, and that is not said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("x")
    more = {"evaluate_model": ["--text", "x"], "generate": ["--prompt", "x"], "memorize": [], "benchmark": []}
    more = more.get(recipe, ["--out", "y"])
    argv = [*NEEDED[recipe], *more, "--device", device]
    refused(load_recipe(recipe).main, argv, capsys, f"--device: cannot use {device}", "give cpu", keeps=tmp_path)


# --- YAML ---

NESTED = "a: &a [x, x]\nb: &b [*a, *a]\nsource: [*b, *b]\n"
YAML = {
    "twice": ("context: 64\nseed: 1\ncontext: 128\n", "'context' twice: keep one"),
    "unknown": ("contxt: 64\n", "unknown option 'contxt'; did you mean context?"),
    "no name": ("1: 2\n", "unknown option '1'"),
    "a list for a name": ("[a]: 1\n", "not valid YAML"),
    "an entry in an entry": ("context: {a: 1}\n", "context must be a value or a list of values"),
    "a list in a list": ("taxonomy: [[wik]]\n", "taxonomy must be a value or a list of values"),
    "nothing in a list": ("taxonomy: [null]\n", "taxonomy must be a value or a list of values"),
    "empty list": ("taxonomy: []\n", "taxonomy must be a value or a list of values"),
    "a list for a number": ("context: [64, 128]\n", "config.yaml: context takes one value, got the list [64, 128]"),
    "word for a number": ("context: many\n", "'many'"),
    "fraction for a whole number": ("context: 64.0\n", "'64.0'"),
    "octal": ("context: 0o17\n", "'0o17'"),
    "sexagesimal": ("context: 1:30\n", "'1:30'"),
    "date": ("context: 2026-01-01\n", "'2026-01-01'"),
    "boolean for a number": ("context: true\n", "'true'"),
    "choice": ("split_by: line\n", "'line'"),
    "list": ("- context\n- 64\n", "got a list"),
    "text": ("context\n", "got a str"),
    "number": ("3\n", "got a str"),
    "two documents": ("context: 64\n---\ncontext: 64\n", "not valid YAML"),
    "open list": ("taxonomy: [wik\n", "not valid YAML"),
    "tab": ("context:\t- 1\n\t- 2\n", "not valid YAML"),
    "python object": ("context: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    "unknown anchor": ("context: *a\n", "not valid YAML"),
    "deep": ("context: " + "[" * 5000, "not valid YAML"),
    "binary": (b"\x89PNG\r\n\x1a\n\0\0", "cannot be read"),
    "UTF-16": ("context: 64\n".encode("utf-16"), "cannot be read"),
    "NUL": (b"context: 64\0\n", "not valid YAML"),
    "large": (b"#" * 1_000_001, "more than 1,000,000 bytes"),
    "a bomb of aliases": (NESTED, "unknown option 'a'"),
    "a bomb of aliases in an option": ("taxonomy: [&a [x, x], *a, &b [*a, *a], *b]\n", "taxonomy must be a value"),
    "merge": ("<<: {context: 3}\n", "unknown option '<<'"),
    "not a number": ("tokenizer_sample: .nan\n", "'.nan'"),
}


@pytest.mark.parametrize("case", YAML)
def test_yaml(case, capsys, tmp_path):
    content, message = YAML[case]
    file = tmp_path / "config.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(load_recipe("prepare").main, [*NEEDED["prepare"], "--config", file], capsys, message, keeps=tmp_path, code=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("validation: .inf\n", "'.inf'"),
        ("validation: nan\n", "--validation must be greater than 0 and below 1, got nan"),
        ("seed: -1\n", "--seed must be at least 0"),
        ('out: "a\\0b"\n', "NUL"),
        ("source: ''\n", "--source '' is empty"),
    ],
)
def test_values_of_yaml_are_checked_as_flags_are(text, message, capsys, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    argv = [*NEEDED["prepare"][: 0 if "out" in text or "source" in text else 4], "--config", tmp_path / "config.yaml"]
    argv += ["--out", "x"] if "source" in text else ["--source", "x"] if "out" in text else []
    refused(load_recipe("prepare").main, argv, capsys, message, keeps=tmp_path, code=2 if ".inf" in text else 1)


@pytest.mark.parametrize("recipe", NEEDED)
def test_a_folder_or_nothing_as_config(recipe, capsys, tmp_path):
    main = load_recipe(recipe).main
    for file in (tmp_path, tmp_path / "missing.yaml"):
        argv = [*NEEDED[recipe], "--config", file]
        refused(main, argv, capsys, f"--config {file}: there is no file of this name", keeps=tmp_path, code=2)


@pytest.mark.parametrize("recipe", NEEDED)
def test_no_option_of_one_value_takes_a_list(recipe, capsys, tmp_path):
    module, file = load_recipe(recipe), tmp_path / "config.yaml"
    kinds = [kind for kind in vars(module).values() if dataclasses.is_dataclass(kind) and isinstance(kind, type)]
    entries = [(entry.name, typing.get_type_hints(kind)[entry.name]) for kind in kinds for entry in dataclasses.fields(kind)]
    single = [name for name, hint in entries if "list" not in str(hint)]
    assert single
    for name in single:
        for values in (["1"], ["1", "2"]):
            file.write_text(f"{name}: [{', '.join(values)}]\n")
            message = f"--config {file}: {name} takes one value, got the list [{', '.join(values)}]"
            refused(module.main, [*NEEDED[recipe], "--config", file], capsys, message, code=2)


STUDIES = {
    "twice": ("train:\n  seed: 1\n  seed: 2\n", "has 'seed' twice"),
    "section twice": ("train: {}\ntrain: {}\n", "has 'train' twice"),
    "unknown section": ("trian: {}\n", "no section 'trian'"),
    "list": ("- a\n", "got a list"),
    "section of another kind": ("train: [1]\n", "the section 'train'"),
    "seeds of another kind": ("seeds: 3\n", "the section 'seeds'"),
    "binary": (b"\xff\xfe\0", "cannot be read"),
    "deep": ("train: " + "{a: " * 3000, "not valid YAML"),
    "a list for one value": ("train: {seed: [1, 2]}\ngrid: {n_layer: [1]}\n", "--seed takes one value"),
    "grid without lists": ("grid: {score: dot}\n", "gives each option a list of values"),
}  # fmt: skip


@pytest.mark.parametrize("case", STUDIES)
def test_studies(case, capsys, tmp_path):
    content, message = STUDIES[case]
    file = tmp_path / "study.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    argv = ["--study", file, "--data", tmp_path, "--out", tmp_path / "out"]
    code = 2 if "takes one value" in message else 1
    refused(load_recipe("study").main, argv, capsys, message, keeps=tmp_path, code=code)


def test_merges_of_merges_stay_small(capsys, tmp_path):
    """Twelve lines that could make a thousand billion entries make one in each variant, whose name is no option."""
    lines = [f"  v{i}: &v{i} {{<<: [{', '.join([f'*v{i - 1}'] * 10)}]}}" if i else "  v0: &v0 {a: 1}" for i in range(12)]
    (tmp_path / "study.yaml").write_text("\n".join(["train: {a0: 1}", "variants:", *lines]))
    argv = ["--study", tmp_path / "study.yaml", "--data", tmp_path, "--out", tmp_path / "out"]
    refused(load_recipe("study").main, argv, capsys, "unrecognised arguments: --a0 1 --a 1", keeps=tmp_path, code=2)


@pytest.mark.parametrize("option", ["--study", "--train"])
def test_missing_files_of_a_study(option, capsys, tmp_path):
    for file in (tmp_path, tmp_path / "missing.yaml"):
        argv = [option, file, "--data", tmp_path, "--out", tmp_path / "out"]
        refused(load_recipe("study").main, argv, capsys, f"{option} {file}", "no file of this name", keeps=tmp_path)
