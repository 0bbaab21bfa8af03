"""RULER's tasks: forms, answers that are in the text once, lengths, its score, and what a model
says with and without a recall."""

import functools
import itertools
import json
import random
import re

import pytest
import torch

from bad_input import refused
from corpora.tokenization import encode_texts, train_bpe
from decoders import decoder
from evaluation import caches
from hf_infini import InfiniCache
from hf_infini.compat.cache_name import CACHE
from hf_infini.models.loading import load_causal_lm, load_tokenizer
from hf_infini.tools.passages import term_numbers
from recall import ruler
from recall.examples import DoesNotFit
from running import load_recipe

compare_caches = load_recipe("compare_caches")
TASKS = sorted(ruler.TASKS)
FORMS = {
    "niah_multikey_2": (r"[\w' -]+", r"\d{7}"),
    "niah_multikey_3": (r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",) * 2,
}


@functools.cache
def tokenizer():
    asks = ruler.ASKS_CHAIN.format(value=12345, count=5)
    texts = [ruler.NOISE, ruler.CHAIN, asks, ruler.ASKS_NEEDLE, ruler.HAYSTACK, ruler.NEEDLE]
    return train_bpe(4 * texts, 700)


def prompt_of(task: str, seed: int, length: int) -> ruler.Prompt:
    encode = functools.partial(encode_texts, tokenizer())
    return ruler.TASKS[task][0](random.Random(seed), encode, length)


def text_of(tokens) -> str:
    return tokenizer().decode(tokens)


@pytest.mark.parametrize("length", (900, 1024, 2500))
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_fills_its_length_and_says_once_where_it_says_the_answers(task, seed, length):
    prompt = prompt_of(task, seed, length)
    (noise,) = encode_texts(tokenizer(), [ruler.NOISE])
    lines = [end + 1 - start for start, end in prompt.stated]
    assert length - max(*lines, len(noise)) - 40 < len(prompt.tokens) <= length
    text, asks = text_of(prompt.tokens[: prompt.begins]), text_of(prompt.tokens[prompt.begins :])
    own = [text_of(prompt.tokens[start : end + 1]) for start, end in prompt.stated]
    for answer, line in zip(prompt.answers, own, strict=True):
        assert answer in line and text.count(line) == 1 and answer not in asks
        # a variable is also in the line of the next one
        assert text.count(answer) == (1 if task != "vt" or answer == prompt.answers[-1] else 2)
    again = prompt_of(task, seed, length)
    assert (again.tokens == prompt.tokens).all() and again.answers == prompt.answers
    assert prompt_of(task, seed + 1, length).answers != prompt.answers


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("task", [*FORMS])
def test_lines_look_like_the_one_that_is_asked_for(task, seed):
    prompt = prompt_of(task, seed, 1500)
    kind = "number" if task == "niah_multikey_2" else "uuid"
    key, value = FORMS[task]
    form = re.compile(rf"One of the special magic {kind}s for ({key}) is: ({value})\.\n")
    head, *lines = text_of(prompt.tokens[: prompt.begins]).splitlines(keepends=True)
    assert head == ruler.HAYSTACK.format(kind=kind)
    pairs = [form.fullmatch(line).groups() for line in lines]
    assert len(pairs) > 10 and all(len({*each}) == len(pairs) for each in zip(*pairs, strict=True))
    ((wanted, answer),) = [pair for pair in pairs if pair[1] == prompt.answers[0]]
    asks = ruler.ASKS_NEEDLE.format(kind=kind, key=wanted)
    assert text_of(prompt.tokens[prompt.begins :]) == asks and asks.count(wanted) == 2


def test_the_needle_is_anywhere():
    places = [prompt_of("niah_multikey_2", seed, 1500) for seed in range(40)]
    shares = sorted(prompt.stated[0][0] / prompt.begins for prompt in places)
    assert shares[0] < 0.2 and shares[-1] > 0.8 and 0.3 < shares[20] < 0.7


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_assigns_each_variable_to_the_next(seed):
    prompt = prompt_of("vt", seed, 2000)
    assert len(prompt.answers) == 1 + ruler.HOPS
    lines = [text_of(prompt.tokens[start : end + 1]) for start, end in prompt.stated]
    value = re.fullmatch(rf"VAR {prompt.answers[0]} = (\d{{5}})\n", lines[0])[1]
    for line, (before, name) in zip(lines[1:], itertools.pairwise(prompt.answers), strict=True):
        assert line == f"VAR {name} = VAR {before} \n"
    assert prompt.stated == tuple(sorted(prompt.stated))
    asks = ruler.ASKS_CHAIN.format(value=value, count=len(prompt.answers))
    assert text_of(prompt.tokens[prompt.begins :]) == asks
    # the example in front of it: its own chain, question and answers, at most 500 tokens
    shot, text = text_of(prompt.tokens[: prompt.begins]).split(f"\n\n{ruler.CHAIN}")
    names = re.findall(r"VAR (\w{3}) = ", shot)
    assert shot.startswith(ruler.CHAIN) and shot.endswith(f"they are: {' '.join(names)}")
    assert len({*names}) == 1 + ruler.HOPS and value not in shot
    assert all(line in f"{ruler.NOISE}{''.join(lines)}" for line in text.splitlines())


@pytest.mark.parametrize("task", TASKS)
def test_what_does_not_fit_is_said(task):
    with pytest.raises(DoesNotFit, match="no room for"):
        prompt_of(task, 0, 130)


@pytest.mark.parametrize(
    ("said", "answers", "score"),
    [
        (" 1234567. And", ["1234567"], 1),
        (" 123456 7", ["1234567"], 0),
        ("abc, DEF and", ["ABC", "def", "GHI", "JKL"], 0.5),
        ("", ["a"], 0),
    ],
)
def test_the_score_is_the_share_of_the_answers_that_are_said(said, answers, score):
    assert ruler.match_all(said, answers) == score


# --- what a model says ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ruler")
    special = {f"{name}_token_id": None for name in ("pad", "bos", "eos")}
    model = decoder("llama", vocab_size=len(tokenizer()), max_position_embeddings=4096, **special)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("way", ("plain", "recall", "window"))
@pytest.mark.parametrize("task", TASKS)
def test_a_model_says_its_first_choices_until_all_is_said(folder, task, way):
    model, terms = load_causal_lm(folder), term_numbers(load_tokenizer(folder))
    prompt = prompt_of(task, 1, 1000)
    given = {"tokenizer": tokenizer(), "terms": terms if way == "recall" else None}
    with caches.bounded(model, None, way, 200), torch.no_grad():
        ids, begins = torch.as_tensor(prompt.tokens)[None], prompt.begins
        cache = InfiniCache(model.config, archive=True) if way == "recall" else None
        out = model(input_ids=ids[:, :begins], use_cache=True, **{CACHE: cache})
        cache = out[CACHE]
        if way == "recall":
            cache = cache.recall(ids[0, begins:], terms=terms)
        expected, part = [], ids[:, begins:]
        for _ in range(12):
            logits = model(input_ids=part, use_cache=True, **{CACHE: cache}).logits
            part = logits[:, -1:].argmax(-1)
            expected.append(int(part))
        for chunk in (333, 4096):
            assert ruler.continued(model, prompt, 12, chunk, **given) == text_of(expected)
        # no more than what has all answers
        known = ruler.Prompt(prompt.tokens, begins, (text_of(expected[:5]),), ())
        assert ruler.continued(model, known, 12, 4096, **given) == text_of(expected[:5])


@pytest.mark.slow
def test_a_cache_that_holds_everything_says_what_the_model_says(folder, tmp_path, capsys):
    argv = [*f"--model {folder} --device cpu --task vt --lengths 900 1000".split()]
    argv += "--samples 2 --ways plain recall window --caches 64 1024".split()
    argv += ["--out", str(tmp_path / "found")]
    compare_caches.main(argv)
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["contestants"]
    said = {(e["way"], e["cache"]): [c["said"] for c in e["cells"]] for e in found}
    assert len(said) == 5 and [len(each) for each in said["plain", None]] == [2, 2]
    assert said["recall", 1024] == said["window", 1024] == said["plain", None]
    assert said["recall", 64] != said["plain", None] != said["window", 64]
    for cell in (cell for each in found for cell in each["cells"]):
        assert cell["correct"] == sum(cell["scores"]) and cell["low"] <= cell["high"]
    assert "| recall, 64" in (out := capsys.readouterr().out) and "of 2 (" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "any.txt"], "makes its own text: leave out --data and --text"),
        (["--lengths", "200"], "no room for"),
        (["--ways", "SnapKV"], "--task passkey only"),
    ],
)
def test_bad_options(folder, tmp_path, capsys, options, message):
    argv = ["--model", str(folder), "--device", "cpu", "--task", "vt", "--ways", "plain"]
    argv += ["--samples", "1", "--out", str(tmp_path / "bad"), *options]
    refused(compare_caches.main, argv, capsys, message)
