"""train.py with processes that share rows: what one process trains, killed and resumed, and what is
refused."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import distributed
from transformers import GPT2Config

from cli import UserError
from hf_infini import InfiniGPT2Config
from ranks import ended_well, on_ranks, run_as_rank
from running import CONTEXT, ROOT, SIZES, load_recipe, losses, prepared_data, result, run_recipe
from sharded_on_cpu import run_as_sharded_rank
from training import setup

train = load_recipe("train")


def options(base, sharing: int, processes: int) -> list:
    """Of 4 rows for each step, whoever trains them."""
    given = [
        "--data",
        prepared_data(base),
        *SIZES,
        *"--attention infini --segment_length 8 --local_segments 1".split(),
    ]
    given += [
        *"--position_encoding segment --sink_tokens 2 --memory_conv 3".split(),
        *"--separate_documents true".split(),
    ]
    given += "--max_steps 8 --eval_steps 4 --eval_rows 12 --logging_steps 1 --save_steps 4".split()
    given += [
        *"--precision float32 --batch_size 2 --gradient_accumulation".split(),
        2 * sharing // processes,
    ]
    return given + (["--context_parallel_size", sharing] if processes > 1 else [])


@pytest.fixture(scope="module")
def alone(base):
    run_recipe("train", *options(base, 1, 1), "--out", base / "shared_by_one")
    return base / "shared_by_one"


def killed_at(file: Path, *command: list) -> None:
    """train.py on every rank, the last of which is killed as soon as there is a file."""

    def wait() -> None:
        while not file.is_file():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    if distributed.get_rank() == distributed.get_world_size() - 1:
        threading.Thread(target=wait, daemon=True).start()
    run_as_rank("train", *command)


def check(base, alone, out) -> None:
    assert [line[0] for line in losses(alone)] == [line[0] for line in losses(out)]
    for (_, *of_one, _), (_, *of_many, _) in zip(losses(alone), losses(out), strict=True):
        # Gradients are summed in another order, and 8 steps of AdamW let that grow
        assert of_one == [
            pytest.approx(value, rel=1e-4) if value is not None else None for value in of_many
        ]
    assert result(alone)["tokens"] == result(out)["tokens"]
    assert result(alone)["cross_entropy"] == pytest.approx(result(out)["cross_entropy"], rel=1e-4)


@pytest.mark.slow
def test_four_processes_that_share_rows_in_pairs_train_what_one_does(base, alone):
    """After one of them was killed."""
    out = base / "shared_by_four"
    command = [*options(base, 2, 4), "--out", out]
    with pytest.raises(AssertionError, match=r"ranks \[3\] ended"):
        on_ranks(killed_at, 4, out / "checkpoint-4" / "complete.json", command)
    said = ended_well(on_ranks(run_as_rank, 4, "train", command))
    assert "from step 4" in said
    check(base, alone, out)


@pytest.mark.slow
def test_two_sharded_processes_that_share_rows_train_what_one_does(base, alone):
    config, out = ROOT / "recipes" / "configs" / "accelerate_fsdp2.yaml", base / "shared_by_two"
    ended_well(
        on_ranks(run_as_sharded_rank, 2, config, "train", [*options(base, 2, 2), "--out", out])
    )
    check(base, alone, out)


def test_what_cannot_share_rows_is_refused(base, tmp_path, monkeypatch):
    for config, given, message in (
        (GPT2Config(n_layer=2), {}, r"layers \[0, 1\] of this model have no memory"),
        (
            InfiniGPT2Config(segment_length=16),
            {"context_parallel_size": 33},
            "64 tokens are too short for 33 shards of 2",
        ),
        (
            InfiniGPT2Config(segment_length=16),
            {"dilute_with": "data"},
            "does not go with --dilute_with",
        ),
    ):
        both = SimpleNamespace(
            **{"context_parallel_size": 2, "dilute_with": None, "torch_compile": False} | given
        )
        with pytest.raises((UserError, ValueError), match=message):
            setup.check_sharing(both, both, config, CONTEXT)
    # as `accelerate launch --use_deepspeed` says it
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    both = SimpleNamespace(context_parallel_size=2, dilute_with=None, torch_compile=False)
    with pytest.raises(UserError, match="does not go with DeepSpeed"):
        setup.check_sharing(both, both, InfiniGPT2Config(segment_length=16), CONTEXT)
    monkeypatch.undo()
    done = run_recipe(
        "train",
        *options(base, 1, 1),
        *f"--context_parallel_size 2 --out {tmp_path / 'o'}".split(),
        check=False,
    )
    assert (
        done.returncode == 1 and "--context_parallel_size 2, but 1 processes started" in done.stderr
    )
