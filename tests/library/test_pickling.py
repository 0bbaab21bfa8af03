"""Models, layers and configurations as other processes get them: by pickle, torch.save, copies, or
as an argument of a worker."""

import copy
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

import hf_infini
from decoders import TYPES, decoder, token_ids
from hf_infini import lora_config, patch_model, unpatch_model
from hf_infini.models.structure import attention_layers, decoder_of
from models import causal_mha

IDS = token_ids(2, 40) % 89
OPTIONS = {"segment_length": 8}


def with_lora(config):
    """A patched Llama with an adapter that is not zero; `config`: which configuration it gets."""
    model = patch_model(decoder("llama"), **OPTIONS)
    model = get_peft_model(model, config(model))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.1)
    return model.eval()


MAKERS = {
    "gpt2 with rope": lambda: patch_model(decoder("gpt2"), **OPTIONS, position_encoding="rope"),
    "causal_mha": lambda: causal_mha(attention="infini", **OPTIONS),
    "base model": lambda: patch_model(decoder("llama").model, **OPTIONS),
    "lora": lambda: with_lora(lambda _: LoraConfig(task_type="CAUSAL_LM")),
    "lora and gates": lambda: with_lora(lora_config),
}
MAKERS |= {
    name: lambda name=name: patch_model(decoder(name), **OPTIONS)
    for name in ("gpt2", "llama", "gemma2", "olmoe", "llama4_text", "stablelm")
}


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False)[0]


LOADED = """
import pickle, sys
import torch

for folder in sys.argv[1:]:
    with open(folder + "/pickled", "rb") as file:
        layer, config, model = pickle.load(file)
    ids, wanted = torch.load(folder + "/tensors")
    saved = torch.load(folder + "/saved", weights_only=False)
    with torch.no_grad():
        for each in (model, saved):
            assert torch.equal(each(ids, use_cache=False)[0], wanted), folder
    assert type(model) is type(saved) and type(layer) in map(type, model.modules())
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model
    assert type(config) is type(inside.config)
    model.save_pretrained(folder + "/again")
    if inside is model and hasattr(model, "lm_head"):
        import transformers
        again = transformers.AutoModelForCausalLM.from_pretrained(folder + "/again")
        assert type(again) is type(model)
"""


@pytest.mark.slow
def test_another_process_reads_what_one_has_written(tmp_path):
    """One that has imported neither hf_infini nor transformers, and reads a layer first."""
    folders = [tmp_path / name for name in MAKERS]
    for folder in folders:
        folder.mkdir()
        model = MAKERS[folder.name]()
        layer = next(part for part in model.modules() if type(part).__name__.endswith("Attention"))
        config = copy.deepcopy(decoder_of(model).config)
        (folder / "pickled").write_bytes(pickle.dumps((layer, config, model)))
        torch.save((IDS, logits(model)), folder / "tensors")
        torch.save(model, folder / "saved")
    environment = os.environ | {"PYTHONPATH": str(Path(hf_infini.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *folders], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_spawned_worker_takes_a_model_and_gives_one_back():
    model = MAKERS["llama"]()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert torch.equal(pool.submit(logits, model).result(), logits(model))
        plain = pool.submit(unpatch_model, model).result()
    assert type(plain) is LlamaForCausalLM
    assert torch.equal(logits(plain), logits(unpatch_model(model)))


@pytest.mark.slow
def test_a_worker_of_joblib_takes_a_model():
    joblib, model = pytest.importorskip("joblib"), MAKERS["llama"]()
    [found] = joblib.Parallel(n_jobs=2)([joblib.delayed(logits)(model)])
    joblib.externals.loky.get_reusable_executor().shutdown()  # else its workers wait for minutes
    assert torch.equal(found, logits(model))


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("name", ["llama", "gpt2 with rope", "lora and gates"])
def test_copies_are_of_the_same_classes_and_can_be_unpatched(name, protocol):
    model, stored = MAKERS[name](), io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    copies = (
        pickle.loads(pickle.dumps(model, protocol)),
        torch.load(stored, weights_only=False),
        copy.deepcopy(model),
    )
    wanted, layers = logits(model), attention_layers(decoder_of(model))
    for each in copies:
        assert type(each) is type(model) and torch.equal(logits(each), wanted)
        assert type(decoder_of(each).config) is type(decoder_of(model).config)
        assert [*map(type, attention_layers(decoder_of(each)))] == [*map(type, layers)]
        if "lora" not in name:
            plain = logits(unpatch_model(copy.deepcopy(model)))
            assert torch.equal(logits(unpatch_model(each)), plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_the_classes_of_every_family_are_found_by_their_names(name):
    for part in patch_model(decoder(name), **OPTIONS).modules():
        assert pickle.loads(pickle.dumps(type(part))) is type(part)
