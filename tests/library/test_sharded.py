"""Models in pieces: FSDP2 by `accelerate launch` trains, saves and resumes as one process does, and
a sharded model is saved with the same code."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModelForCausalLM

from hf_infini import InfiniGPT2LMHeadModel
from hf_infini.tools import training
from hub_files import code_of
from models import infini_gpt2, token_ids
from ranks import ended_well, on_ranks
from running import ROOT, SIZES, load_recipe, losses, prepared_data, recipe, result, run
from sharded_on_cpu import run_as_sharded_rank

pytestmark = pytest.mark.slow  # they share trained runs


train = load_recipe("train")

CONFIGS = ROOT / "recipes" / "configs"
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", 2]
FSDP2 = ["--config_file", CONFIGS / "accelerate_fsdp2.yaml"]


def options(base: Path) -> list:
    found = ["--data", prepared_data(base), *SIZES, "--attention", "infini", "--segment_length", 16]
    found += ["--position_encoding", "segment", "--precision", "float32"]
    found += [
        "--batch_size",
        4,
        "--max_steps",
        3,
        "--eval_steps",
        2,
        "--logging_steps",
        1,
        "--save_steps",
        2,
    ]
    # The last batch of an evaluation is the first process's alone, and yet both have to call the
    # model
    return found + ["--eval_rows", 12]


@pytest.fixture(scope="module")
def sharded(base) -> tuple[Path, Callable[[], str]]:
    """A run of two processes, and what starts it again."""
    script = [Path(__file__).parents[1] / "helpers" / "sharded_on_cpu.py", *recipe("train")[1:]]
    words = [*options(base), "--gradient_accumulation", 2, "--out", base / "fsdp2"]
    run(*ACCELERATE, *FSDP2, *script, *words)

    def again() -> str:
        """What the first process says, without the time that three interpreters take to start."""
        return ended_well(on_ranks(run_as_sharded_rank, 2, FSDP2[1], "train", words))

    return base / "fsdp2", again


@pytest.fixture(scope="module")
def alone(base) -> Path:
    """The same run of one process."""
    train.main(
        [
            *map(str, options(base)),
            "--gradient_accumulation",
            "4",
            "--out",
            str(base / "not_sharded"),
        ]
    )
    return base / "not_sharded"


def test_two_sharded_processes_train_what_one_does(sharded, alone):
    folder, again = sharded
    assert len(losses(alone)) == 5  # 3 steps, 2 evaluations
    for of_one, of_two in zip(losses(alone), losses(folder), strict=True):
        assert of_one[0] == of_two[0]
        for wanted, found in zip(of_one[1:3], of_two[1:3], strict=True):
            assert found == (None if wanted is None else pytest.approx(wanted, rel=1e-4))
        for layer, heads in (of_one[3] or {}).items():
            assert of_two[3][layer] == pytest.approx(heads, abs=1e-4)
    assert result(folder)["cross_entropy"] == pytest.approx(
        result(alone)["cross_entropy"], rel=1e-4
    )
    assert result(folder)["gates"] != {"0": [0.5, 0.5], "1": [0.5, 0.5]}
    (folder / "result.json").unlink()
    (folder / "checkpoint-3" / "complete.json").unlink()
    before = losses(folder)
    assert "from step 2" in again()
    assert losses(folder) == before


def test_what_a_sharded_run_saves_is_whole(sharded):
    folder, _ = sharded
    found, checkpoint = (
        AutoModelForCausalLM.from_pretrained(path) for path in (folder, folder / "checkpoint-3")
    )
    assert type(found) is type(checkpoint) is InfiniGPT2LMHeadModel
    weights = found.state_dict()
    assert all(
        torch.equal(weights[name], weight) for name, weight in checkpoint.state_dict().items()
    )
    assert training.gate_values(found) == result(folder)["gates"]
    assert code_of(folder) == code_of(folder / "checkpoint-3") and code_of(folder).keys() == {
        "needs_hf_infini.py"
    }
    configs = [
        json.loads((path / "config.json").read_text()) for path in (folder, folder / "checkpoint-3")
    ]
    assert configs[0]["auto_map"] == configs[1]["auto_map"] and configs[1]["architectures"] == [
        "InfiniGPT2LMHeadModel"
    ]


def test_the_deepspeed_file_leaves_to_the_trainer_what_train_py_is_told():
    """What accelerate reads of it, with or without DeepSpeed."""
    config = HfDeepSpeedConfig(str(CONFIGS / "deepspeed_zero2.json"))
    assert config.is_zero2() and not config.is_zero3() and not config.is_offload()
    # train.py's, the gates' own rate
    assert config.get_value("optimizer") is None and config.get_value("scheduler") is None
    trainer_s = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    assert all(config.get_value(name) == "auto" for name in (*trainer_s, "bf16.enabled"))


@pytest.fixture
def process_group():
    """Of this process alone."""
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


def test_a_model_that_is_sharded_carries_the_same_code(process_group, tmp_path):
    model = infini_gpt2()
    model.save_pretrained(tmp_path / "plain", save_code=True)
    with torch.no_grad():
        wanted = model(token_ids(2, 20)).logits
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    assert isinstance(model, FSDPModule) and type(model).__name__.startswith("FSDP")
    with torch.no_grad():
        assert torch.equal(model(token_ids(2, 20)).logits, wanted)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    model.save_pretrained(tmp_path / "sharded", state_dict=weights, save_code=True)
    code = code_of(tmp_path / "plain")
    assert len(code) > 10 and code_of(tmp_path / "sharded") == code
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "sharded" / name).read_bytes() == (
            tmp_path / "plain" / name
        ).read_bytes(), name
