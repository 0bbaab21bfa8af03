"""The largest batch: the search on known costs, and real processes with a real budget."""

import functools
import threading

import pytest
import torch

from hf_infini import InfiniGPT2Config
from running import load_recipe
from training import batch_probe

recipe = load_recipe("batch_probe")


@pytest.mark.parametrize("limit", [*range(0, 20), 63, 64, 65, 1000])
@pytest.mark.parametrize("waste", [0, 3_000, 40])
def test_the_search_finds_the_largest_that_fits(limit, waste):
    """Costs of 100 a row on top of `waste`, and of an unevenness that small numbers of rows hide."""

    def cost(rows: int) -> int:
        return waste + 100 * rows + 7 * (rows % 3)

    budget = waste + 100 * limit + 50  # between limit and limit + 1 rows, as the unevenness is 14 at most
    found = batch_probe.search(cost, budget)
    rows = found["rows"]
    assert rows == limit if limit < 100 else 0.98 * limit <= rows <= limit  # the precision that is promised
    assert found["peak_bytes"] == (cost(rows) if rows else None)
    tried = [rows for rows, _ in found["measured"]]
    assert len(set(tried)) == len(tried) and any(rows < one <= max(rows + 1, 1.02 * rows) for one in tried)
    assert len(tried) <= 9  # doubling and bisection alone take up to 20 for 1,000


def test_the_search_does_not_need_a_number_where_memory_ran_out():
    found = batch_probe.search(lambda rows: rows**2 if rows < 90 else None, 10_000)
    assert found["rows"] == 89 and [90, None] in [list(one) for one in found["measured"]]


def test_the_search_survives_costs_that_do_not_grow_at_first():
    found = batch_probe.search(lambda rows: 500 if rows < 8 else 100 * rows, 3_000)
    assert found["rows"] == 30


# --- real steps -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose vocabulary makes one row of 256 tokens cost more than 24 MB."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 256, "vocab_size": 12_000}
    InfiniGPT2Config(**sizes, segment_length=64).save_pretrained(folder)
    return folder


def test_a_budget_is_kept_and_used(model):
    options = batch_probe.Options(model=str(model), budget_gib=20, context=256, device="cpu")
    measure = functools.cache(functools.partial(batch_probe.measure_in_process, options))
    logits = 256 * 12_000 * 4  # bytes of one row's, in float32
    budget = measure(16) + logits
    found = batch_probe.search(measure, budget)
    # One more row costs at least its logits and their gradient; two processes differ by less than either
    assert found["rows"] == 16 and found["peak_bytes"] <= budget
    peaks = dict(found["measured"])
    assert peaks[17] > budget
    # In bf16 the step holds them in both precisions, and not ten copies of them
    assert 2 * logits < (peaks[16] - peaks[4]) / 12 < 10 * logits


def test_less_than_the_libraries_take_ends_the_process(model):
    options = batch_probe.Options(model=str(model), budget_gib=0.1, context=64, device="cpu")
    assert batch_probe.measure_in_process(options, 1) is None


def test_errors_name_what_is_wrong(model, tmp_path, capsys):
    for options, message in (
        (["--model", str(tmp_path), "--budget_gib", "1000", "--rows", "1"], "--model: cannot read"),
        (["--model", str(model), "--budget_gib", "0"], "--budget_gib must be greater than 0"),
        (["--model", str(model), "--budget_gib", "1e6"], "a budget of 1e+06 GiB, but"),
    ):
        with pytest.raises(SystemExit) as stopped:
            recipe.main([*options, "--device", "cpu"])
        assert stopped.value.code == 1 and message in capsys.readouterr().err
    # The watch that ends a process ends with the step that it watched, whatever became of that
    assert "memory watch" not in [thread.name for thread in threading.enumerate()]
    options = batch_probe.Options(model=str(model), budget_gib=20, device="cpu")
    with pytest.raises(batch_probe.UserError, match="a training step of 0 rows failed: --rows must be greater than 0"):
        batch_probe.measure_in_process(options, 0)


def test_a_step_is_a_step_of_training(model, monkeypatch):
    """The optimiser's state is there before the step that counts, and both steps change the weights."""
    seen, step = [], torch.optim.AdamW.step

    def watched(optimizer, *args, **kwargs):
        seen.append((len(optimizer.state), step(optimizer, *args, **kwargs)))

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    batch_probe.train_step(batch_probe.Options(model=str(model), budget_gib=1, context=64, rows=2), on_gpu=False)
    assert [count for count, _ in seen][0] == 0 and seen[1][0] > 10
