"""The generation recipe: only the text on standard output, chunks and padding that change nothing,
clear refusals."""

import io
import sys

import pytest

from bad_input import refused
from running import continuations, greedy, load_recipe, sample_text, straight_run, trained

generate = load_recipe("generate")


@pytest.fixture(scope="module")
def model(base):
    return straight_run(base)


@pytest.fixture(scope="module")
def long_prompt() -> str:
    return sample_text()[:700]  # eleven times the context that the model was trained with


def test_standard_output_is_the_text_alone(model, tmp_path, long_prompt, capfd):
    (tmp_path / "prompt.txt").write_text(long_prompt, encoding="utf-8")
    options = ["--model", model, "--prompt_file", tmp_path / "prompt.txt", "--chunk", 100]
    options += ["--max_new_tokens", 12]
    capfd.readouterr()
    generate.main([*map(str, options), "--device", "cpu"])
    shown = capfd.readouterr()
    assert shown.out == greedy(model, long_prompt, 12) + "\n" and "Loading weights" not in shown.err


def test_a_padded_batch_in_any_chunks_is_the_prompts_one_by_one(model, capsys, long_prompt):
    prompts = [long_prompt[:90], long_prompt[300:307], long_prompt[100:150]]
    for chunk in (1, 20, 89, 4096):
        found = continuations(
            capsys, "--model", model, "--prompt", *prompts, "--chunk", chunk, "--max_new_tokens", 8
        )
        assert [row["text"] for row in found] == [greedy(model, prompt, 8) for prompt in prompts]
    assert [row["prompt"] for row in found] == prompts


def test_the_seed_decides_in_any_chunks(model, capsys, long_prompt):
    options = ["--model", model, "--prompt", long_prompt[:90], long_prompt[90:150]]
    options += ["--max_new_tokens", 8]
    drawn = [*options, "--do_sample", "true", "--temperature", 1.5]
    first = continuations(capsys, *drawn, "--seed", 1)
    assert (
        first
        == continuations(capsys, *drawn, "--seed", 1, "--chunk", 25)
        != continuations(capsys, *drawn, "--seed", 2)
    )
    # Among the single likeliest token there is nothing to draw
    assert continuations(capsys, *drawn, "--top_k", 1) == continuations(capsys, *options)


def test_prompts_are_shown_apart_from_what_follows_them(model, capfd, monkeypatch):
    common = ["--model", str(model), "--device", "cpu", "--max_new_tokens", "4"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the king\n")))
    generate.main(common)  # one, which appears while it is made
    shown = capfd.readouterr()
    assert (
        shown.err.splitlines()[-1] == "> the king"
        and shown.out == greedy(model, "the king", 4) + "\n"
    )
    long = "b" * generate.SHOWN + " and so"
    generate.main([*common, "--prompt", "two\nlines", long])
    shown = capfd.readouterr()
    assert shown.err.splitlines()[-3:] == ["> two", "> lines", f"> … {long[-generate.SHOWN :]}"]
    assert shown.out == "".join(greedy(model, prompt, 4) + "\n" for prompt in ("two\nlines", long))
    generate.main([*common, "--prompt", "", "--json", "true"])  # the beginning of a text
    shown = capfd.readouterr()
    assert "> " not in shown.err and '"prompt": "", "text": ' in shown.out  # it is in the object


def test_what_is_refused(base, capsys, long_prompt):
    learned = trained(base, "infini")
    for options, message in (
        (["--prompt", "a", "--top_k", "5"], "--top_k has no effect on greedy search"),
        (["--prompt", "a", "--prompt_file", "x"], "not both"),
        (["--prompt_file", "none.txt"], "none.txt"),
        (["--prompt", "a", "--model", "nowhere"], "while loading the model nowhere"),
        (
            ["--prompt", long_prompt[:60], "--max_new_tokens", 5],
            "65 tokens, but this model has 64 learned positions",
        ),
    ):
        refused(generate.main, ["--model", learned, *options, "--device", "cpu"], capsys, message)
