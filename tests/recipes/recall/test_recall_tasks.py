"""The recall tasks: scores that greedy decoding confirms, memory off, cells that are kept,
impossible or guessed."""

import functools
import json
import shutil
import types
from pathlib import Path

import pytest
import torch

from bad_input import refused
from corpora.biographies import SENTENCES, biography_documents
from corpora.tokenization import train_bpe
from decoders import begin_with_bos
from evaluation.inference import switch_memory_off
from evaluation.perplexity import text_rows
from hf_infini.models.loading import load_causal_lm, load_tokenizer
from models import causal_mha, gpt2, infini_gpt2, token_ids
from recall import tasks
from recall.examples import WORDING, Example, Question
from recall.facts import FACT_NAMES
from recall.tasks import constant_guesses, score_answers, wilson_interval
from running import kill_when, load_recipe
from support.stages import sealed, write_json

evaluate_model = load_recipe("evaluate_model")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("recall_tasks")


@functools.cache
def texts(base: Path) -> Path:
    lines = [
        json.dumps({"text": document.text}) + "\n" for document in biography_documents(12, seed=9)
    ]
    (base / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    return base / "text.jsonl"


@functools.cache
def saved(base: Path, kind: str) -> Path:
    """A model with random weights and a tokenizer of 600 entries."""
    if kind == "infini":
        model = infini_gpt2(segment_length=32, position_encoding="segment", vocab_size=600)
    else:
        model = gpt2(vocab_size=600, n_positions=512)
    model.save_pretrained(base / kind)
    lines = [
        json.loads(line)["text"] for line in texts(base).read_text(encoding="utf-8").splitlines()
    ]
    train_bpe(
        [*lines, *WORDING["pt"]["needles"], *WORDING["pt"]["questions"]], 600
    ).save_pretrained(base / kind)
    return base / kind


def evaluate(out: Path, *options) -> dict:
    """Runs the recipe in this process and returns its JSON."""
    evaluate_model.main([*map(str, options), "--device", "cpu", "--out", str(out)])
    return json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))


# --- scoring --------------------------------------------------------------------------------------


def greedy_example(model, seed: int, length: int, width: int, wrong: int | None = None) -> Example:
    """Random tokens, then as the answer what greedy decoding goes on with; token `wrong` of it is
    another one."""
    prompt = token_ids(1, length, seed)
    # the model may go on with any token of its own
    never = {"eos_token_id": 10**6, "pad_token_id": 0}
    tokens = model.generate(prompt, max_new_tokens=width, do_sample=False, **never)[0].numpy()
    if wrong is not None:
        tokens[length + wrong] = tokens[length + wrong] % 88 + 1
    return Example(tokens, (Question("work", "", (0, width - 1), (length, length + width - 1)),))


@pytest.mark.parametrize(
    ("build", "chunk"),
    [
        (functools.partial(infini_gpt2, position_encoding="segment"), 5),
        (infini_gpt2, 16),
        (gpt2, 5),
        (causal_mha, 1000),
    ],
)
def test_an_answer_is_right_when_greedy_decoding_gives_it(build, chunk):
    model = build()
    # 1, 2 or 3 tokens behind 20 to 40; the batch has rows of different lengths, and chunks that end
    # inside of answers
    cases = [
        (20 + 3 * number, 1 + number % 3, None if number % 2 else number % 3) for number in range(8)
    ]
    examples = [greedy_example(model, seed, *case) for seed, case in enumerate(cases)]
    answers = score_answers(model, examples, chunk)
    assert [answer.correct for answer in answers] == [wrong is None for _, _, wrong in cases]
    for example, answer in zip(examples, answers, strict=True):
        ((first, last),) = (question.asked for question in example.questions)
        with torch.no_grad():
            logits = (
                model(input_ids=torch.tensor(example.tokens)[None], use_cache=False)
                .logits[0]
                .double()
            )
        expected = -logits.log_softmax(-1)[
            range(first - 1, last), example.tokens[first : last + 1]
        ].sum()
        # float32 sums in another order
        assert (
            answer.loss == pytest.approx(expected.item(), rel=1e-4)
            and answer.tokens == last - first + 1
        )


def test_wilson_interval():
    for successes, trials in ((0, 10), (1, 10), (5, 10), (10, 10), (37, 480)):
        low, high = wilson_interval(successes, trials)
        share = successes / trials
        # by definition, as far from the share as 1.96 of its own standard deviations
        for end in (low, high):
            # At 1 the rounding of 1e-16 stands under a root
            assert abs(end - share) == pytest.approx(
                1.959964 * (end * (1 - end) / trials) ** 0.5, abs=1e-7
            )
        assert 0 <= low <= share <= high <= 1
    # as in the literature
    assert wilson_interval(5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-6)


# --- the memory off -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        functools.partial(infini_gpt2, position_encoding="segment"),
        functools.partial(infini_gpt2, position_encoding="segment", update_rule="delta"),
        functools.partial(
            causal_mha, attention="infini", segment_length=8, position_encoding="rope"
        ),
    ],
)
def test_without_its_memory_a_model_knows_only_the_segment(build):
    model, ids = build(), token_ids(2, 40)

    def segments() -> torch.Tensor:
        """The logits of each segment read for itself, in which there is no memory yet."""
        return torch.cat([model(input_ids=part).logits for part in ids.split(8, 1)], 1)

    with torch.no_grad():
        with_memory = model(input_ids=ids).logits
        switch_memory_off(model)
        off, expected = model(input_ids=ids).logits, segments()
        cached = model(input_ids=ids[:, :21], use_cache=True)
        cached = torch.cat(
            [
                cached.logits,
                model(input_ids=ids[:, 21:], past_key_values=cached.past_key_values).logits,
            ],
            1,
        )
    # float32 products of other shapes
    torch.testing.assert_close(off, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cached, expected, rtol=1e-4, atol=1e-4)
    assert (with_memory[:, 8:] - off[:, 8:]).abs().max() > 0.1


# --- the recipe -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("task", ("passkey", "facts"))
def test_examples_follow_what_the_tokenizer_puts_in_front_of_a_text(base, tmp_path, task):
    options = types.SimpleNamespace(samples=2, batch_size=2, chunk=99, seed=0, language="pt")
    model, examples = load_causal_lm(saved(base, "infini")).eval(), {}
    for begins in (False, True):
        own = examples[begins] = []

        def score(model, batch, chunk, progress, own=own):
            own += batch
            return score_answers(model, batch, chunk, progress)

        tokenizer = load_tokenizer(saved(base, "infini"))
        if begins:
            begin_with_bos(tokenizer)
        runner = tasks.Runner(model, tokenizer, options, tmp_path / f"{begins}.json", {}, score)
        if task == "passkey":
            tasks.run_passkey(runner, ["um texto " * 200], [200], [0.5])
        else:
            tasks.run_facts(runner, [2], 64)
    for plain, begun in zip(examples[False], examples[True], strict=True):
        assert begun.tokens.tolist() == [tokenizer.bos_token_id, *plain.tokens]
        for one, other in zip(plain.questions, begun.questions, strict=True):
            for first, then in ((one.stated, other.stated), (one.asked, other.asked)):
                span = slice(first[0], first[1] + 1), slice(then[0], then[1] + 1)
                assert (plain.tokens[span[0]] == begun.tokens[span[1]]).all()
            assert other.begins == (None if one.begins is None else one.begins + 1)


def test_rows_of_texts_follow_what_the_tokenizer_puts_in_front_of_a_text(base):
    tokenizer = load_tokenizer(saved(base, "infini"))
    (whole, _), *_ = text_rows(tokenizer, ["um texto " * 40], 10_000)
    begin_with_bos(tokenizer)
    rows = [row for row, _ in text_rows(tokenizer, ["um texto " * 40], 32)]
    assert {len(row) for row in rows[:-1]} == {32}
    assert {row[0] for row in rows} == {tokenizer.bos_token_id}
    joined = [token for row in rows for token in row[1:]]
    assert joined == whole[: len(joined)].tolist() and len(whole) - len(joined) < 2


def test_passkeys_of_a_random_model(base, capsys):
    options = [
        "--model",
        saved(base, "infini"),
        "--text",
        texts(base),
        *"--task passkey --lengths 256 700".split(),
    ]
    found = evaluate(base / "passkey", *options, "--depths", 3, "--samples", 6, "--chunk", 100)
    assert [(cell["length"], cell["depth"]) for cell in found["cells"]] == [
        (length, depth) for length in (256, 700) for depth in (0, 0.5, 1)
    ]
    for cell in found["cells"]:
        # Five random digits of 600 tokens: a model that has learned nothing gives none of them
        assert (cell["samples"], cell["correct"], cell["accuracy"], cell["low"]) == (6, 0, 0, 0)
        assert cell["high"] == pytest.approx(wilson_interval(0, 6)[1]) and cell["cross_entropy"] > 3
    assert (
        found["memory"] == "on" and found["options"]["samples"] == 6 and found["versions"]["torch"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].replace("|", "").split() == [
        "tokens",
        "depth",
        "0",
        "depth",
        "0.5",
        "depth",
        "1",
        "questions",
    ]
    assert lines[-1].count(" 0.0 % (0–39) ") == 3 and lines[-1].endswith(" 6 |")
    assert not (base / "passkey.cells.json").exists()
    off = evaluate(base / "off", *options, "--depths", 0, 1, "--samples", 6, "--memory", "off")
    assert off["memory"] == "off"
    for depth in (0, 1):
        on, without = (
            [c for c in part["cells"] if c["depth"] == depth][0]["cross_entropy"]
            for part in (found, off)
        )
        assert on != without


def test_files_lie_in_the_model_s_folder_and_are_no_perplexities_of_it(base, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(saved(base, "infini"), folder)
    options = ["--model", str(folder), "--device", "cpu", "--memory", "off"]
    evaluate_model.main([*options, "--task", "facts", "--samples", "1", "--distances", "3"])
    evaluate_model.main(
        [*options, "--text", str(texts(base)), "--length", "64", "--max_tokens", "64"]
    )
    evaluate_model.main(
        [*options, "--task", "passkey", "--samples", "1", "--lengths", "200", "--depths", "0"]
    )
    found = json.loads((folder / "passkey_memory_off.json").read_text(encoding="utf-8"))
    # biographies, the same everywhere
    assert found["source"] is None and found["filler_tokens"] > 100_000
    names = {file.name for file in folder.glob("*memory_off*")}
    tasks = ("facts", "perplexity", "passkey")
    assert names == {f"{name}_memory_off.json" for name in tasks}
    # the name of what is measured on the model as it is
    assert not list(folder.glob("evaluation*"))


@pytest.mark.slow
def test_facts_of_a_random_model(base, capsys):
    options = [
        "--model",
        saved(base, "infini"),
        *"--task facts --samples 24 --batch_size 5".split(),
    ]
    found = evaluate(base / "facts", *options, "--distances", 0, 1, 6)
    assert found["segment_length"] == 32
    first, second, last = found["cells"]
    # no sentence and question is so short
    assert "take" in first["not_possible"] and "segment 32" in first["not_possible"]
    assert last["samples"] == 24 and last["skipped"] == {}
    assert last["by_fact"] == {fact: {"samples": 2, "correct": 0} for fact in FACT_NAMES}
    # A statement that ends its segment has 63 tokens to the end of the next: some fit, and those
    # that do not are counted
    assert second["samples"] == 24 and sum(second["skipped"].values()) > 0
    guesses = found["constant_guesses"]
    # Nine numbers of children among 2,000 people: 222 each, 267 is three standard deviations of 15
    # more
    assert (
        guesses["children"]["answer"] in SENTENCES["numbers"]
        and 1 / 9 <= guesses["children"]["share"] < 267 / 2000
    )
    mean = sum(guess["share"] for guess in guesses.values()) / 12
    assert last["chance"] == pytest.approx(mean) and guesses == constant_guesses(
        0
    ) != constant_guesses(1)
    assert "not possible" in capsys.readouterr().out


def test_cells_beyond_a_model_s_reach(base, capsys):
    options = [
        "--model",
        saved(base, "gpt2"),
        "--text",
        texts(base),
        *"--task passkey --depths 0.5 --samples 2".split(),
    ]
    found = evaluate(base / "reach", *options, "--lengths", 20, 400, 600)
    short, fits, long = found["cells"]
    assert "more than 20" in short["not_possible"] and fits["samples"] == 2
    assert "600 tokens, but this model has 512 learned positions" in long["not_possible"]
    for beyond in (
        [*options, "--lengths", 600, 700],
        [
            "--model",
            saved(base, "gpt2"),
            *"--task facts --segment_length 256 --distances 2 4".split(),
        ],
    ):
        with pytest.raises(SystemExit) as stopped:
            evaluate(base / "too_long", *beyond)
        assert stopped.value.code == 1 and "512 learned positions" in capsys.readouterr().err
    assert not list(base.glob("too_long*"))


@pytest.mark.slow
def test_a_killed_task_goes_on_where_it_was(base, tmp_path):
    options = [
        "--model",
        saved(base, "infini"),
        "--text",
        texts(base),
        *"--task passkey --depths 0.2 0.8".split(),
    ]
    options += ["--samples", 4, "--chunk", 64, "--batch_size", 2]
    options = [*map(str, options), "--lengths", *map(str, range(200, 1200, 200))]
    file = tmp_path / "out.cells.json"
    command = ["evaluate_model", *options, "--device", "cpu", "--out", str(tmp_path / "out")]
    kill_when(
        lambda: file.exists() and len(json.loads(file.read_text(encoding="utf-8"))["cells"]) >= 2,
        *command,
    )
    assert not (tmp_path / "out.json").exists()
    kept = json.loads(file.read_text(encoding="utf-8"))
    assert 2 <= len(kept["cells"]) < 10
    kept["cells"][1]["accuracy"] = 0.125  # recognisable: no four samples give it
    write_json(file, sealed(kept))
    found = evaluate(tmp_path / "out", *options)
    assert found["cells"][1]["accuracy"] == 0.125 and not file.exists()
    assert found["cells"][: len(kept["cells"])] == kept["cells"] and len(found["cells"]) == 10
    straight = evaluate(tmp_path / "straight", *options, "--lengths", 200, 400)
    assert (
        straight["cells"][0] == found["cells"][0] and straight["cells"][2:] == found["cells"][2:4]
    )
    write_json(file, sealed(kept))  # cells of other samples are not used
    other = evaluate(tmp_path / "out", *options, "--lengths", 200, "--samples", 3)
    assert [cell["samples"] for cell in other["cells"]] == [3, 3]


def test_user_errors(capsys):
    for options, message in (
        (
            ["--task", "facts", "--split", "test"],
            "--split chooses among the texts of --data or --text",
        ),
        (
            ["--task", "facts", "--text", __file__, "--data", "d"],
            "at most one of --data and --text",
        ),
        (
            ["--task", "passkey", "--length", "64"],
            "--length does nothing with --task passkey: it belongs to perplexity",
        ),
        (
            ["--task", "passkey", "--text", __file__, "--lengths", "64", "64"],
            "--lengths 64 64: give different numbers",
        ),
    ):
        refused(evaluate_model.main, ["--model", "m", *options], capsys, message)
