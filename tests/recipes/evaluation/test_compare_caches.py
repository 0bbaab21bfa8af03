"""Caches of equal size: a cache that holds all of a text is the plain model, each way holds as many
tokens, runs go on."""

import functools
import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from bad_input import refused
from corpora.biographies import portuguese_names
from corpora.tokenization import build_character_tokenizer, encode_texts
from decoders import decoder, fitted
from evaluation import caches, inference, presses
from hf_infini import InfiniCache, patch_model, save_adapter, unpatch_model
from hf_infini.compat.cache_name import CACHE
from hf_infini.models.loading import load_causal_lm, load_tokenizer
from hf_infini.tools.passages import term_numbers
from recall import tasks
from recall.examples import passkey_example
from recall.facts import FACT_NAMES, fact_example
from recall.filler import Filler
from running import load_recipe

compare_caches = load_recipe("compare_caches")
TEXT = "".join(f"word {number} of {number * number} " for number in range(400))
NATS = ["--length", 100, "--rows", 3, "--count_from", 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, an adapter with scores, and a text."""
    path, tokenizer = (
        tmp_path_factory.mktemp("caches"),
        build_character_tokenizer([TEXT + "The secret number is. Remember"]),
    )
    # not kept
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")
    }
    model = decoder("llama", vocab_size=len(tokenizer), max_position_embeddings=512, **special)
    model.save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    (path / "text.txt").write_text(TEXT, encoding="utf-8")
    fitted(patch_model(model, **caches.memory_options("two_learned", 64)))
    save_adapter(model, path / "adapter")
    unpatch_model(model)
    return path


def compare(folder, out, *options) -> dict:
    """Runs the recipe in this process and returns its JSON."""
    given = [
        *f"--model {folder / 'model'} --adapter {folder / 'adapter'}".split(),
        *f"--text {folder / 'text.txt'} --device cpu".split(),
    ]
    compare_caches.main([*map(str, given), *map(str, options), "--out", str(out)])
    return json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))


def test_a_cache_that_holds_everything_is_the_plain_model(folder, tmp_path, capsys):
    options = [*NATS, "--ways", *compare_caches.OWN, "--caches", 32, 144]
    found = compare(folder, tmp_path / "nats", *options)["contestants"]
    (plain, *others), ways = found, len(compare_caches.OWN) - 1
    assert plain["way"] == "plain" and len(found) == 1 + 2 * ways and plain["beyond_count"] == 60
    for each in others:
        # float32 sums in another order; of 60 tokens, 3 to 5 nats each
        assert (each["beyond"] == pytest.approx(plain["beyond"], rel=1e-5)) == (
            each["cache"] == 144
        ), each["way"]
    small = [tuple(each["beyond"]) for each in others if each["cache"] == 32]
    assert len({*small}) == ways  # no way is another under a second name
    summaries = caches.summarize_nats(found)
    assert (
        summaries[0]["closed"] == 1 and summaries[0]["above"].low == summaries[0]["above"].high == 0
    )
    closed = {
        (each["way"], each["cache"]): summary["closed"]
        for each, summary in zip(found, summaries, strict=True)
    }
    assert closed["window", 32] == 0 and closed["half", 144] == pytest.approx(1, abs=1e-3)
    assert "| half, 144" in capsys.readouterr().out


def test_a_run_goes_on_after_the_last_finished_contestant(folder, tmp_path, monkeypatch):
    options = [*NATS, "--ways", "window", "half", "--caches", 32]
    whole, measured = compare(folder, tmp_path / "whole", *options), []

    def killed_at_the_second(runner, texts):
        measured.append(texts)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return caches.nats(runner, texts)

    with monkeypatch.context() as patch:
        patch.setitem(caches.MEASURES, "perplexity", killed_at_the_second)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            compare(folder, tmp_path / "killed", *options)
        assert len(json.loads((tmp_path / "killed.cells.json").read_text())["cells"]) == 1
        found = compare(folder, tmp_path / "killed", *options)
    assert len(measured) == 3  # the first contestant was not measured again
    assert [each["beyond"] for each in found["contestants"]] == [
        each["beyond"] for each in whole["contestants"]
    ]
    assert (
        not (tmp_path / "killed.cells.json").exists()
        and not (tmp_path / "killed.part.json").exists()
    )


@pytest.mark.parametrize("window", ((), (512, 8)))
@pytest.mark.parametrize("cache", (32, 64, 256, 512, 1023, 1024, 2048))
@pytest.mark.parametrize("way", caches.BOUNDED)
def test_each_way_holds_as_many_tokens(way, cache, window):
    options = caches.memory_options(way, cache, *window)
    held = options["sink_tokens"] + options.get("kept_tokens", 0)
    held += (options["local_segments"] + 1) * options["segment_length"]
    # No length of a segment divides every window
    assert cache - (options["segment_length"] if way == "window" else 1) < held <= cache
    assert cache % 2 or held == cache
    if window and way != "window":
        sizes = options["local_segments"] + 1, options["segment_length"]
        assert options["kept_tokens"] == cache - 4 - sizes[0] * sizes[1]
        if way in (caches.RECALL, "recent"):
            assert sizes[0] * sizes[1] <= max(cache // 8, 16) and (sizes[1] >= 64 or sizes[0] == 1)
        else:
            assert sizes == (8, min(512, cache // 2) // 8)


def test_the_layers_have_the_shares_of_an_adapter_and_hold_as_many_tokens(folder, tmp_path):
    model = load_causal_lm(folder / "model")
    shares = [0.5, 1.5, 2, 0]
    fitted(patch_model(model, **caches.memory_options("two_learned", 64) | {"kept_shares": shares}))
    save_adapter(model, tmp_path)
    unpatch_model(model)
    for way in caches.BOUNDED:
        with caches.bounded(model, str(tmp_path), way, 64):
            assert model.config.kept_shares == (None if way == "window" else shares)
            held = {layer: window.places for layer, window in model.config.windows.items()}
            assert inference.tokens_held(model.config) == 64
            if way == "window":
                continue
            # the fourth layer has sinks and window only
            window = 16 if way in (caches.RECALL, "recent") else 32
            room = 64 - 4 - window
            assert [*held.values()] == [4 + window + int(share * room) for share in shares]
            assert inference.first_beyond(model.config) == window


def test_numbers_and_facts_are_counted_by_length(folder, tmp_path, monkeypatch):
    asked, score = [], tasks.score_answers

    def listened(model, examples, *args, **kwargs):
        asked.extend(example.questions[0].answer for example in examples)
        return score(model, examples, *args, **kwargs)

    monkeypatch.setattr(tasks, "score_answers", listened)
    options = "--task passkey --language en --lengths 200 240 --depths 0 0.5 --samples 2".split()
    found = compare(
        folder, tmp_path / "found", *options, "--ways", "plain", "half", "--caches", 256
    )["contestants"]
    for each in found:  # the cache holds everything
        pooled = caches.pooled(each["cells"])
        assert [(cell["place"], cell["samples"]) for cell in pooled] == [(200, 4), (240, 4)]
        losses = [cell["cross_entropy"] for cell in each["cells"]]
        assert losses == pytest.approx(
            [cell["cross_entropy"] for cell in found[0]["cells"]], rel=1e-4
        )
    # All depths are one sample: each has other numbers, and all contestants and lengths have the
    # same
    assert len(asked) == 16 and len({*asked}) == 4 and {*asked[:4]} == {*asked}


def examples_of(task: str, tokenizer) -> list[tasks.Example]:
    encode = functools.partial(encode_texts, tokenizer)
    if task == "facts":
        names, lines = portuguese_names(), TEXT.split(" of ")
        return [
            fact_example(random.Random(fact), encode, names, fact, 2, 400, lines)
            for fact in FACT_NAMES[:2]
        ]
    filler = Filler(encode([TEXT])[0], tokenizer.eos_token_id, encode(["\n\n"])[0])
    return [
        passkey_example(random.Random(seed), encode, filler, 700 + 90 * seed, 0.3, language="en")
        for seed in range(2)
    ]


@pytest.mark.parametrize("chunk", (300, 10_000))
@pytest.mark.parametrize("task", ("passkey", "facts"))
def test_a_question_recalls_as_by_hand(folder, task, chunk):
    model, tokenizer = (load(folder / "model") for load in (load_causal_lm, load_tokenizer))
    examples, terms = examples_of(task, tokenizer), term_numbers(tokenizer)
    with caches.bounded(model, None, "recall", 200):
        found = tasks.score_recalled(model, examples, chunk, terms=terms)
        latest = tasks.score_answers(model, examples, chunk)
        for example, answer in zip(examples, found, strict=True):
            ids, (question,) = torch.as_tensor(example.tokens)[None], example.questions
            first, begins = question.asked[0], question.begins
            cache = InfiniCache(model.config, archive=True)
            with torch.no_grad():
                model(input_ids=ids[:, :begins], **{CACHE: cache})
                cache = cache.recall(ids[0, begins:first], terms=terms)
                logits = model(input_ids=ids[:, begins:-1], **{CACHE: cache}).logits[0]
            losses = logits[first - begins - 1 :].log_softmax(-1).gather(1, ids[0, first:, None])
            # float32 sums in another order
            assert answer.loss == pytest.approx(-losses.sum().item(), rel=1e-4)
            assert (answer.fact, answer.tokens) == (question.fact, ids.shape[1] - first)
    assert all(
        abs(asked.loss - other.loss) > 1e-3 * other.loss
        for asked, other in zip(found, latest, strict=True)
    )


@pytest.mark.parametrize(
    "task", ("passkey --language en --lengths 240 --depths 0 0.5", "facts --distances 1")
)
def test_recall_of_what_is_in_sight_is_the_plain_model(folder, tmp_path, capsys, task):
    options = ["--task", *task.split(), "--segment_length", 240, "--samples", 2]
    ways = ["--ways", "plain", "recall", "recent", "--caches", 64, 1024]
    found = compare(folder, tmp_path / "found", *options, *ways)["contestants"]
    nats = {
        (each["way"], each["cache"]): [cell["cross_entropy"] for cell in each["cells"]]
        for each in found
    }
    assert len(nats) == 5
    plain = pytest.approx(nats["plain", None], rel=1e-4)
    assert nats["recall", 1024] == plain and nats["recent", 1024] == plain
    few = nats["recall", 64], nats["recent", 64], nats["plain", None]
    assert len({*map(tuple, few)}) == 3
    assert "| recall, 64" in capsys.readouterr().out


def test_a_way_that_is_not_possible_is_named_and_the_others_are_shown(folder, tmp_path, capsys):
    other = decoder(
        "llama", vocab_size=61, num_attention_heads=2, num_key_value_heads=1, head_dim=16
    )
    fitted(patch_model(other, **caches.memory_options("half", 64)))
    save_adapter(other, tmp_path / "other")
    options = [*NATS, "--ways", "half", "window", "--caches", 32, "--adapter", tmp_path / "other"]
    refused, window = compare(folder, tmp_path / "some", *options)["contestants"]
    assert "keep_weight" in refused["not_possible"] or "gate" in refused["not_possible"]
    printed = capsys.readouterr()
    assert (
        "half, 32: " in printed.err
        and "| window, 32" in printed.out
        and "| half" not in printed.out
    )
    # The model was the plain one again when the next way began
    (same,) = compare(folder, tmp_path / "one", *NATS, "--ways", "window", "--caches", 32)[
        "contestants"
    ]
    assert window["beyond"] == same["beyond"]


def test_a_part_of_a_model_is_the_model_that_never_had_the_others(folder, tmp_path, capsys):
    tokenizer = load_tokenizer(folder / "model")
    kept = {"kept_tokens": 6, "keep_score": "half"}
    window = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2}

    def parts(**options) -> dict[str, list[float]]:
        model = patch_model(
            decoder("llama", vocab_size=len(tokenizer)), feature_map="exp", **window | options
        )
        for layer in caches.memory_layers(model).values():
            if hasattr(layer, "keep_weight"):
                torch.nn.init.normal_(layer.keep_weight, generator=torch.Generator().manual_seed(1))
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        given = ["--model", tmp_path / "model", "--attribute"]
        given += ["--text", folder / "text.txt", "--device", "cpu", "--out", tmp_path / "parts"]
        compare_caches.main([*map(str, given), *map(str, NATS)])
        found = json.loads((tmp_path / "parts.json").read_text(encoding="utf-8"))["contestants"]
        return {each["way"]: each["beyond"] for each in found}

    found = parts(**kept)
    out = capsys.readouterr().out
    assert "| no kept tokens" in out and "gap closed" not in out
    assert len({tuple(losses) for losses in found.values()}) == 5
    longer = caches.window_of_equal_bytes(load_causal_lm(tmp_path / "model").config)
    # With heads 8 wide a memory in float32 takes as many bytes as 9 keys and values of 16 bits, and
    # scores some more
    assert 24 + 9 < 2 + longer["segment_length"] * (longer["local_segments"] + 1) <= 24 + 9 + 8
    closed = {"gate_init": -1000.0}
    for way, options in {
        "memory off": kept | closed,
        "no kept tokens": {},
        "window only": closed,
    }.items():
        assert found[way] == parts(**options)["as it is"], way
    assert found["window of equal bytes"] == parts(**closed, **longer)["as it is"]


def test_bad_options(folder, tmp_path, capsys):
    argv = [
        *map(
            str,
            ("--model", folder / "model", "--text", folder / "text.txt", "--out", tmp_path / "bad"),
        )
    ]
    for options, message in [
        (["--ways", "half"], "--adapter"),
        (["--count_from", "9000"], "must be below --length 8192"),
        (["--ways", "SnapKV"], "--task passkey only"),
        (["--ways", "recall"], "--ways recall: running text asks"),
        (["--ways", "window", "--length", "9000", "--rows", "2"], "no row of --length 9,000"),
        (["--caches", "64", "64", "--ways", "window"], "name each once"),
        (["--attribute"], "--model has no memory"),
        (["--attribute", "--caches", "64"], "leave out --caches"),
    ]:
        refused(compare_caches.main, [*argv, "--device", "cpu", *options], capsys, message)
    refused(
        compare_caches.main,
        [*argv, *f"--adapter {tmp_path / 'none'} --ways half --length 100 --count_from 40".split()],
        capsys,
        "there is no folder",
    )
    # absent, or beside a transformers that it does not know
    with pytest.raises(Exception, match="kvpress"):
        presses.scorer("SnapKV blind", 64)


def test_scores_that_are_not_finite_are_refused(folder, tmp_path, capsys):
    adapter = shutil.copytree(folder / "adapter", tmp_path / "adapter")
    (file,) = adapter.glob("*.safetensors")
    tensors = load_file(file)
    next(value for name, value in tensors.items() if "keep_weight" in name).view(-1)[0] = torch.nan
    save_file(tensors, file)
    words = ["--model", folder / "model", "--adapter", adapter, "--text", folder / "text.txt"]
    words += [*NATS, "--ways", "half", "--caches", 32, "--device", "cpu", "--out", tmp_path / "out"]
    refused(compare_caches.main, words, capsys, str(adapter), keeps=adapter)
    assert not (tmp_path / "out.json").exists()


def test_an_adapter_that_has_a_memory_gives_its_scores_only(folder, tmp_path):
    options = [*NATS, "--ways", "half", "--caches", 32]
    without = compare(folder, tmp_path / "without", *options)["contestants"]
    model = load_causal_lm(folder / "model")
    fitted(patch_model(model, **caches.memory_options("half", 64) | {"update_rule": "linear"}))
    save_adapter(model, tmp_path / "adapter")
    assert any("gate" in name for name in load_file(*(tmp_path / "adapter").glob("*.safetensors")))
    options += ["--adapter", tmp_path / "adapter"]
    assert (
        compare(folder, tmp_path / "with", *options)["contestants"][0]["beyond"]
        == (without[0]["beyond"])
    )
