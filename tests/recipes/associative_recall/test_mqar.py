"""MQAR: rows that are zoology's, a model that a loop can follow, a loss of labelled places, runs
that go on after a kill."""

import hashlib
import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from associative_recall import model as models
from associative_recall.rows import Part, Rows, make_all_rows, make_rows, seeds_of
from associative_recall.training import summarize, train
from bad_input import refused
from running import kill_when, load_recipe, run_recipe
from small_runs import cut, empty, entry, flip

# The first 16 digits of the SHA-256 of inputs and labels (as little-endian 64-bit integers) that
# zoology's multiquery_ar, at commit d88d6f5, made after torch.manual_seed(seed): of length, pairs,
# rows, vocabulary and seed
OF_ZOOLOGY = {
    (64, 4, 50, 8192, 7): ("a5e078dbcebdc8fa", "723845c11b484ccb"),
    (256, 64, 5, 8192, 4_000_000_000): ("c1b10766344372b7", "3e4936917bd6be3d"),
    (16, 3, 4, 33, 1): ("822fbbb25745c51e", "bf55d573eb9b9dcf"),
}
TINY = "--vocabulary 40 --train 16x2x40 24x3x20 --test 16x2x10 32x4x6 --batch_size 8".split()
TINY += [
    *"--d_model 16 --segment_length 8 --window 4 --use_cpu true".split(),
    *"--learning_rates 0.01".split(),
]


def labels_of(rows: Rows) -> torch.Tensor:
    """As zoology has them: −100 where nothing is counted."""
    return torch.full(rows.inputs.shape, -100).scatter(1, rows.places, rows.values)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().astype("<i8").tobytes()).hexdigest()[:16]


def test_rows_and_seeds_are_those_of_zoology():
    for (length, pairs, count, vocabulary, seed), digests in OF_ZOOLOGY.items():
        rows = make_rows(Part(length, pairs, count), vocabulary, seed)
        assert (digest(rows.inputs), digest(labels_of(rows))) == digests
    # of `prepare_data`, five parts of the training and seven of the tests
    train, test = seeds_of(123, 5, 7)
    assert train == [843828734, 914636141, 1228959102, 1840268610, 974319580]
    assert test == [
        2967327842,
        2367878886,
        3088727057,
        3090095699,
        4256823402,
        3964712059,
        3350193721,
    ]


def test_every_pair_is_asked_for_once_after_all_pairs():
    part = Part(64, 16, 20)
    rows = make_rows(part, 100, 3)
    keys, values = rows.inputs[:, 0:32:2], rows.inputs[:, 1:32:2]
    assert torch.equal(rows.inputs.gather(1, rows.places), keys) and torch.equal(
        rows.values, values.long()
    )
    assert all(
        len(set(row)) == 16 for tensor in (keys, values, rows.places) for row in tensor.tolist()
    )
    assert (
        1 <= keys.min()
        and keys.max() < 50 <= values.min()
        and rows.places.min() >= 32
        and not (rows.places % 2).any()
    )
    batches = list(rows.batches(8))
    assert [len(batch) for batch in batches] == [8, 8, 4] and torch.equal(
        batches[2].inputs, rows.inputs[16:]
    )


def build(mixer: str, window: int = 4, **widths):
    torch.manual_seed(0)
    config = models.mixer_config(mixer, 16, 2, window, {"segment_length": 8}, **widths)
    return models.Recaller(config, 40).double()


def naive(model, ids: list[int], window: int) -> torch.Tensor:
    """The logits of one row, token by token as the equations say."""
    parameters = dict(model.named_parameters())

    def linear(name, vector):
        return parameters[f"{name}.weight"] @ vector + parameters[f"{name}.bias"]

    def norm(name, vector):
        centred = vector - vector.mean()
        return (
            centred / (centred.square().mean() + 1e-5).sqrt() * parameters[f"{name}.weight"]
            + parameters[f"{name}.bias"]
        )

    def added(states, layer, mixed):
        states = [state + output for state, output in zip(states, mixed, strict=True)]
        return [state + norm(f"norms.{layer}.1", state) for state in states]

    states = [parameters["embedding.weight"][token] for token in ids]
    inputs = [norm("norms.0.0", state) for state in states]
    taps, mixed = parameters["mixers.0.taps"], []
    for place, vector in enumerate(inputs):
        convolved = (
            sum(taps[back] * inputs[place - back] for back in range(min(3, place + 1)))
            + parameters["mixers.0.bias"]
        )
        mixed.append(convolved * linear("mixers.0.projection", vector) + vector)
    states = added(states, 0, mixed)
    inputs, mixed, heads = [norm("norms.1.0", state) for state in states], [], 2
    queries, keys, values = (
        [linear(f"mixers.1.W_{name}", vector).view(heads, -1) for vector in inputs]
        for name in ("query", "key", "value")
    )
    for place, query in enumerate(queries):
        seen, outputs = range(max(0, place + 1 - window), place + 1), []
        for head in range(heads):
            scores = torch.stack([query[head] @ keys[other][head] for other in seen]) / math.sqrt(
                query.shape[1]
            )
            weights = scores.exp() / scores.exp().sum()
            outputs.append(
                sum(
                    weight * values[other][head]
                    for weight, other in zip(weights, seen, strict=True)
                )
            )
        mixed.append(linear("mixers.1.out_proj", torch.cat(outputs)))
    states = added(states, 1, mixed)
    return torch.stack(
        [parameters["embedding.weight"] @ norm("last_norm", state) for state in states]
    )


@pytest.mark.parametrize(("mixer", "window"), [("attention", 99), ("window", 4)])
def test_the_model_is_what_a_loop_computes(mixer, window):
    """Also its loss, of labelled places only, and which answers are right."""
    rows, model = make_rows(Part(16, 3, 3), 40, 1), build(mixer).eval()
    logits = torch.stack([naive(model, ids, window) for ids in rows.inputs.tolist()])
    torch.testing.assert_close(model(rows.inputs) @ model.embedding.weight.T, logits)
    wanted = F.cross_entropy(logits.flatten(0, 1), labels_of(rows).flatten())
    # The sums of the loss are float32
    torch.testing.assert_close(model.loss(rows, torch.float64).double(), wanted, rtol=1e-6, atol=0)
    right = (logits.argmax(-1) == labels_of(rows)).sum(1)
    assert torch.equal(model.correct(rows), right)
    with torch.no_grad():  # the answers that it gives are right
        rows = Rows(rows.inputs, rows.places, logits.argmax(-1).gather(1, rows.places))
    assert model.correct(rows).tolist() == [3, 3, 3]


def test_the_loss_and_its_gradients_are_those_of_all_logits(monkeypatch):
    monkeypatch.setitem(models.CHUNK_LOGITS, "cpu", 50 * 4)  # four rows of logits at a time
    torch.manual_seed(0)
    tensors = [torch.randn(9, 6, requires_grad=True), torch.randn(50, 6, requires_grad=True)]
    values = torch.randint(50, (9,))
    gradients = []
    for loss in (
        lambda states, weight: F.cross_entropy(states @ weight.T, values),
        lambda states, weight: models.LabelledLoss.apply(states, weight, values),
    ):
        gradients.append((loss(*tensors), *torch.autograd.grad(3 * loss(*tensors), tensors)))
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        short = models.LabelledLoss.apply(*(tensor.bfloat16() for tensor in tensors), values)
    assert short == pytest.approx(gradients[0][0].item(), rel=0.02)  # bfloat16 has 8 binary digits


def test_bytes_of_state():
    """A memory of [2, 8, 8] and its normaliser, and a window of 8 keys and values, in float64;
    counters have some bytes."""
    assert build("attention").state_bytes(20) == 2 * 20 * 16 * 8
    assert build("window").state_bytes(20) == 2 * 3 * 16 * 8
    linear, gated = build("linear").state_bytes(20), build("gated_delta").state_bytes(20)
    of_memory = (2 * 8 * 8 + 2 * 8 + 2 * 8 * 16) * 8
    assert of_memory <= linear < of_memory + 64
    # no normaliser, but α and β
    assert linear == build("linear").state_bytes(500) and gated < linear + 8 * 2 * 2 * 8
    assert build("linear+conv").state_bytes(20) == linear + 3 * 16 * 8
    # two values fewer in the memory, and in the window
    narrow = build("linear", value_dim=6).state_bytes(20)
    assert linear - narrow == (2 * 8 * 2 + 2 * 8 * 2) * 8


def test_the_memory_does_not_decay():
    model = build("gated_delta+conv")
    groups = model.parameter_groups(0.1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(names)
    own = {names[parameter].removeprefix("mixers.1.") for parameter in groups[1]["params"]}
    assert own == {"gate.weight", "memory_conv", "memory_rates", "memory_rates_bias"}


def test_the_interval_counts_rows_that_answer_alike_as_one_answer():
    together, apart = torch.tensor([0.0, 1.0] * 50), torch.tensor([0.5, 0.4, 0.6] * 33 + [0.5])
    wide, narrow, all_right = (
        summarize(shares.double()) for shares in (together, apart, torch.ones(100))
    )
    assert (
        wide["accuracy"] == 0.5 and narrow["accuracy"] == pytest.approx(0.5) and wide["rows"] == 100
    )
    assert wide["low"] == pytest.approx(0.404, abs=1e-3) and narrow["low"] == pytest.approx(
        0.484, abs=1e-3
    )
    assert all_right["high"] == 1 and all_right["low"] == pytest.approx(0.963, abs=1e-3)


def test_the_training_is_that_of_zoology(tmp_path):
    """AdamW, torch's cosine over epochs, batches in their order, the cross-entropy of all logits;
    with dropout."""
    training, tests = make_all_rows([Part(16, 2, 20), Part(24, 3, 10)], [Part(16, 2, 4)], 40, 5)
    model, plain = build("attention").float(), build("attention").float()
    options = SimpleNamespace(epochs=3, batch_size=8, stop_above=1, precision="float32", seed=5)
    history = train(model, training, tests, options, 0.01, tmp_path / "state.pt")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    batches = [
        (rows.inputs[k : k + 8], labels_of(rows)[k : k + 8])
        for rows in training
        for k in range(0, len(rows), 8)
    ]
    for epoch in range(3):
        losses = []
        for place, (inputs, labels) in enumerate(batches):
            torch.manual_seed(5 + epoch * len(batches) + place)
            optimizer.zero_grad()
            losses.append(
                F.cross_entropy(
                    (plain(inputs) @ plain.embedding.weight.T).flatten(0, 1), labels.flatten()
                )
            )
            losses[-1].backward()
            optimizer.step()
        schedule.step()
        assert history[epoch]["loss"] == pytest.approx(
            sum(loss.item() for loss in losses) / len(batches), rel=1e-5
        )
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        # Adam makes steps of 0.01 of whatever is not 0
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def weights(folder) -> dict[str, torch.Tensor]:
    return torch.load(folder / "state.pt", weights_only=True)["model"]


def test_all_mixers_train_and_are_compared(tmp_path):
    mixers = load_recipe("mqar").MIXERS
    options = [*TINY, "--epochs", 1, "--out", tmp_path, "--memory", "gate_init=-1"]
    shown = run_recipe("mqar", "--mixers", *mixers, *options).stdout
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == shown
    assert [shown.count(f"| {mixer}-d16-h2") for mixer in mixers] == [1] * len(mixers)
    results = [
        json.loads(file.read_text(encoding="utf-8")) for file in tmp_path.glob("*/result.json")
    ]
    assert {result["mixer"] for result in results} == set(mixers)
    for result in results:
        assert [(test["length"], test["pairs"], test["questions"]) for test in result["tests"]] == [
            (16, 2, 20),
            (32, 4, 24),
        ]
        assert (
            result["tokens"] == 40 * 16 + 20 * 24
            and result["epochs"] == 1
            and not result["diverged"]
        )
        assert 0 <= result["low"] <= result["accuracy"] <= result["high"] <= 1
    again = run_recipe("mqar", "--mixers", "attention", *options)
    assert again.stdout == shown and "attention-d16-h2-float32-lr0.01: finished" in again.stderr
    assert "making" not in again.stderr
    worse = run_recipe(
        "mqar", "--mixers", "attention", *options, "--learning_rates", 0.01, 1e-9
    ).stdout
    assert worse == shown  # of two learning rates, the better one is shown


def test_attention_learns_to_recall_and_diverges_at_a_rate_too_high(tmp_path):
    """What is recalled is in the row only: a guess among its values is right one time in two."""
    options = [
        *TINY,
        *"--train 16x2x4000 --test 16x2x200 --batch_size 32 --epochs 6 --stop_above 0.9".split(),
    ]
    run_recipe("mqar", "--mixers", "attention", *options, "--out", tmp_path)
    result = json.loads(next(tmp_path.glob("*/result.json")).read_text(encoding="utf-8"))
    assert (
        result["accuracy"] > 0.9
        and [line["accuracy"] > 0.9 for line in result["history"][:-1]].count(True) == 0
    )
    run_recipe(
        *"mqar --mixers attention".split(),
        *TINY,
        *f"--learning_rates 1e30 --epochs 3 --out {tmp_path / 'broken'}".split(),
    )
    result = json.loads(next(tmp_path.glob("broken/*/result.json")).read_text(encoding="utf-8"))
    assert result["diverged"] and result["epochs"] == 1 and result["history"][0]["loss"] is None


@pytest.mark.slow
def test_killed_it_goes_on_and_ends_the_same(tmp_path):
    options = ["--mixers", "gated_delta", *TINY, "--train", "16x2x400", "--epochs", 3]
    folder = "gated_delta-d16-h2-s8-float32-lr0.01"
    run_recipe("mqar", *options, "--out", tmp_path / "whole")
    kill_when(
        (tmp_path / "killed" / folder / "state.pt").exists,
        "mqar",
        *options,
        "--out",
        tmp_path / "killed",
    )
    assert not (tmp_path / "killed" / folder / "result.json").exists()
    assert "from epoch" in run_recipe("mqar", *options, "--out", tmp_path / "killed").stderr
    whole, killed = (weights(tmp_path / name / folder) for name in ("whole", "killed"))
    assert whole.keys() == killed.keys() and all(
        torch.equal(whole[key], killed[key]) for key in whole
    )
    results = [
        json.loads((tmp_path / name / folder / "result.json").read_text())
        for name in ("whole", "killed")
    ]
    for result in results:
        result["history"] = [{**line, "seconds": None} for line in result["history"]]
    assert results[0]["history"] == results[1]["history"]


REFUSED = [
    (["--memory", "gat_init=1"], ["--memory gat_init=1", "NAME=VALUE", "gate_init"]),
    (["--memory", "gate_init"], ["--memory gate_init: give NAME=VALUE"]),
    (["--memory", "gate_init=1", "gate_init=2"], ["--memory gate_init=2", "once"]),
    (["--memory", "update_rule=delta"], ["--memory update_rule=delta"]),  # which the mixers say
    (["--memory", "memory_write=learned"], ["--mixers gated_delta: ", "memory_write='learned'"]),
    (["--heads", 3], ["--heads 3 must divide --d_model 16"]),
    (["--test", "16x5x10"], ["--test 16x5x10: the length must be even, at least 4 * pairs = 20"]),
    (["--test", "63x4x10"], ["--test 63x4x10: the length must be even"]),
    (["--train", "64x4"], ["--train 64x4: give LENGTHxPAIRSxROWS"]),
    (["--train", "64x4x0"], ["--train 64x4x0: give LENGTHxPAIRSxROWS"]),
    (["--vocabulary", 16], ["--train 16x2x40: ", "below --vocabulary 16"]),
]


def test_what_is_refused(capsys, tmp_path):
    main, argv = (
        load_recipe("mqar").main,
        ["--mixers", "attention", "gated_delta", *TINY, "--out", tmp_path],
    )
    for options, mentions in REFUSED:
        refused(main, [*argv, *options], capsys, *mentions, keeps=tmp_path)
    folder = tmp_path / "attention-d16-h2-float32-lr0.01"
    argv = ["--mixers", "attention", *TINY, "--epochs", 1, "--out", tmp_path]
    run_recipe("mqar", *argv)
    refused(main, [*argv, "--seed", 1], capsys, "seed was 123 and is now 1", keeps=tmp_path)
    result, state = folder / "result.json", folder / "state.pt"
    whole = result.read_bytes()
    for damage in (flip, cut, entry("accuracy", value=1.0)):
        damage(result)
        refused(main, argv, capsys, str(result), "delete it", keeps=tmp_path)
        result.write_bytes(whole)
    result.unlink()
    whole = state.read_bytes()
    for damage in (flip, cut, empty):
        damage(state)
        mentions = f"cannot read {state}", "delete it to train again"
        refused(main, argv, capsys, *mentions, keeps=tmp_path)
        state.write_bytes(whole)
