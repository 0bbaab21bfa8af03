"""The generation recipe: only the text on standard output, chunks and padding that change nothing, clear refusals."""

import io
import sys

import pytest

from running import continuations, greedy, load_recipe, recipe, run, sample_text, straight_run, trained

generate = load_recipe("generate")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return straight_run(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def long_prompt() -> str:
    return sample_text()[:700]  # eleven times the context that the model was trained with


@pytest.mark.slow
def test_standard_output_is_the_text_alone(model, tmp_path, long_prompt):
    (tmp_path / "prompt.txt").write_text(long_prompt, encoding="utf-8")
    options = ["--model", model, "--prompt_file", tmp_path / "prompt.txt", "--chunk", 100, "--max_new_tokens", 12]
    done = run(*recipe("generate"), *options, "--device", "cpu")
    assert done.stdout == greedy(model, long_prompt, 12) + "\n"
    assert "reading 700 tokens" in done.stderr and "Loading weights" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 33, 699, 4096])
def test_any_chunk_reads_the_same_prompt(model, capsys, long_prompt, chunk):
    prompt = long_prompt[:200] if chunk == 1 else long_prompt
    [found] = continuations(capsys, "--model", model, "--prompt", prompt, "--chunk", chunk, "--max_new_tokens", 8)
    assert found == {"prompt": prompt, "text": greedy(model, prompt, 8), "new_tokens": found["new_tokens"]}
    assert found["new_tokens"] == 8 or found["text"] == ""


@pytest.mark.parametrize("chunk", [20, 4096])
def test_a_padded_batch_is_the_prompts_one_by_one(model, capsys, long_prompt, chunk):
    prompts = [long_prompt[:90], long_prompt[300:307], long_prompt[100:150]]
    found = continuations(capsys, "--model", model, "--prompt", *prompts, "--chunk", chunk, "--max_new_tokens", 8)
    assert [row["text"] for row in found] == [greedy(model, prompt, 8) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["global", "local", "infini", "none"])
def test_every_kind_of_attention_reads_in_chunks(kind, tmp_path_factory, capsys, long_prompt):
    folder = trained(tmp_path_factory.getbasetemp(), kind)
    length = 50 if kind == "infini" else 150  # that one has learned positions, 64 of them
    prompts = [long_prompt[:length], long_prompt[300:307]]
    expected = [greedy(folder, prompt, 8) for prompt in prompts]
    for chunk in (7, 4096):
        found = continuations(capsys, "--model", folder, "--prompt", *prompts, "--chunk", chunk, "--max_new_tokens", 8)
        assert [row["text"] for row in found] == expected


def test_learned_positions_end(tmp_path_factory, capsys, long_prompt):
    folder = trained(tmp_path_factory.getbasetemp(), "infini")
    with pytest.raises(SystemExit):
        continuations(capsys, "--model", folder, "--prompt", long_prompt[:60], "--max_new_tokens", 5)
    assert "65 tokens, but this model has 64 learned positions" in capsys.readouterr().err


def test_samples_go_on_from_a_prompt_in_chunks(model, capsys, long_prompt):
    options = ["--model", model, "--prompt", long_prompt[:90], long_prompt[90:150], "--max_new_tokens", 8]
    options += ["--do_sample", "true"]
    whole = continuations(capsys, *options)
    assert len(whole) == 2 and whole == continuations(capsys, *options, "--chunk", 25)


def test_the_seed_decides(model, capsys, long_prompt):
    options = ["--model", model, "--prompt", long_prompt[:40], "--do_sample", "true", "--temperature", 1.5]
    first, again, other = (continuations(capsys, *options, "--seed", seed) for seed in (1, 1, 2))
    assert first == again != other
    # Among the single likeliest token there is nothing to draw
    [only] = continuations(capsys, *options, "--top_k", 1, "--max_new_tokens", 8)
    assert only["text"] == greedy(model, long_prompt[:40], 8)


def test_a_prompt_from_standard_input_and_several_prompts(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the king\n")))
    common = ["--model", str(model), "--device", "cpu", "--max_new_tokens", "4"]
    generate.main(common)  # the streamed way
    expected = [greedy(model, prompt, 4) for prompt in ("the king", "and so")]
    assert capsys.readouterr().out == expected[0] + "\n"
    generate.main([*common, "--prompt", "the king", "and so"])
    assert capsys.readouterr().out == "\n".join(expected) + "\n"


def test_prompts_are_shown_apart_from_what_follows_them(model, capfd):
    common = ["--model", str(model), "--device", "cpu", "--max_new_tokens", "4", "--prompt"]
    long = "b" * generate.SHOWN + " and so"
    generate.main([*common, "the king"])
    alone = capfd.readouterr()
    assert alone.err.splitlines()[-1] == "> the king" and alone.out == greedy(model, "the king", 4) + "\n"
    capfd.readouterr()
    generate.main([*common, "two\nlines", long])
    shown = capfd.readouterr()
    assert shown.err.splitlines()[-3:] == ["> two", "> lines", f"> … {long[-generate.SHOWN :]}"]
    assert shown.out == "".join(greedy(model, prompt, 4) + "\n" for prompt in ("two\nlines", long))
    generate.main([*common, "the king", "--json", "true"])
    assert "> " not in capfd.readouterr().err  # it is in the object


def test_an_empty_prompt_begins_a_text(model, capsys):
    [found] = continuations(capsys, "--model", model, "--prompt", "", "--max_new_tokens", 5)
    assert found["prompt"] == "" and found["new_tokens"] >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top_k", "5"], "--top_k has no effect on greedy search"),
        (["--do_sample", "true", "--top_p", "1.5"], "--top_p must be greater than 0 and at most 1, got 1.5"),
        (["--do_sample", "true", "--temperature", "0"], "--temperature must be greater than 0, got 0"),
        (["--max_new_tokens", "0"], "--max_new_tokens must be greater than 0"),
        (["--prompt_file", "x"], "not both"),
    ],
)
def test_user_errors(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        generate.main(["--model", "m", "--prompt", "a", *options])
    assert stopped.value.code == 1 and message in capsys.readouterr().err


def test_missing_files(tmp_path, capsys):
    for options, message in (
        (["--model", "nowhere", "--prompt", "a"], "cannot load nowhere"),
        (["--model", "m", "--prompt_file", str(tmp_path / "none.txt")], "none.txt"),
    ):
        with pytest.raises(SystemExit) as stopped:
            generate.main(options)
        assert stopped.value.code == 1 and message in capsys.readouterr().err
