"""`--load-in-4bit` and `--load-in-8bit` of the command, by the real bitsandbytes on a CPU."""

import importlib.util
import json
import logging
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from commands import command_in
from corpora.tokenization import train_bpe
from decoders import decoder
from hf_infini import command, lora_config, patch_model
from hf_infini.cache.files import describe_model
from hf_infini.models.adapter import save_adapter
from hf_infini.models.loading import few_bits, load_causal_lm
from hf_infini.tools.estimate import weight_bytes
from models import gpt2
from running import sample_text

pytest.importorskip("bitsandbytes", reason="pip install 'hf-infini[bitsandbytes]'")
BITS = (4, 8)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
ASKED = ("-q", "Who speaks?", "--max-new-tokens", 4, "--device", "cpu", "--kept-tokens", 100)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A plain model in bfloat16, its adapter with a LoRA, a model with a memory, and a document."""
    base = tmp_path_factory.mktemp("few")
    tokenizer = train_bpe([sample_text()], 400)
    options = {"vocab_size": 400, "pad_token_id": tokenizer.pad_token_id, **SIZES}
    window = {"segment_length": 16, "kept_tokens": 20, "update_rule": "none"}
    decoder("llama", **options).to(torch.bfloat16).save_pretrained(base / "plain")
    patch_model(decoder("llama", **options), **window).save_pretrained(base / "memory")
    from peft import get_peft_model

    with_memory = patch_model(decoder("llama", **options), **window)
    save_adapter(with_memory, base / "score")
    save_adapter(get_peft_model(with_memory, lora_config(with_memory, r=2)), base / "lora")
    for name in ("plain", "memory"):
        tokenizer.save_pretrained(base / name)
    (base / "play.txt").write_text(sample_text()[:1500], encoding="utf-8")
    return {path.name: path for path in base.iterdir()}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    return command_in(tmp_path / "kept", monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_ask_reads_with_few_bits_and_keeps_its_files_apart(bits, folders, run, tmp_path, caplog):
    words = ("ask", folders["plain"], folders["play.txt"], *ASKED)
    option, memories = f"--load-in-{bits}bit", tmp_path / "kept" / "memories"
    run(*words)
    [plain] = memories.glob("*.safetensors")
    with caplog.at_level(logging.WARNING):
        first = run(*words, option)
    assert "reading:" in first.err and not caplog.records  # not a line for each product
    assert len({*memories.glob("*.safetensors")} - {plain}) == 1
    again = run(*words, option)
    assert "reading:" not in again.err and again.out == first.out
    shutil.copy(plain, tmp_path / "of_plain")
    refused = run(*words, option, "--memory", tmp_path / "of_plain", status=1)
    assert "of another model" in refused.err or "other weights" in refused.err


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("how", [("plain",), ("plain", "--adapter", "score"), ("memory",)])
def test_a_text_goes_on_as_in_python(how, bits, folders, run, tmp_path, monkeypatch):
    """The weights are those of transformers' own option, whatever gives them a memory."""
    seen, own = [], command.load_ready
    monkeypatch.setattr(
        command, "load_ready", lambda *given, **more: seen.append(own(*given, **more)) or seen[-1]
    )
    model, *rest = (folders.get(word, word) for word in how)
    options = ("--device", "cpu", f"--load-in-{bits}bit", *rest)
    run("read", model, folders["play.txt"], "--out", tmp_path / "memory", *options)
    said = run("continue", model, tmp_path / "memory", " And", "--max-new-tokens", 6, *options).out
    assert run("continue", model, tmp_path / "memory", " And", "--max-new-tokens", 6, *options).out
    for net, *_ in seen:
        assert net.dtype == (torch.bfloat16 if model == folders["plain"] else torch.float32)
        stored = {weight.dtype for weight in net.parameters()}
        assert stored == {net.dtype, torch.uint8 if bits == 4 else torch.int8}
        assert describe_model(net) == describe_model(seen[0][0])
    quantized = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, bnb_4bit_quant_type="nf4")
    plain = AutoModelForCausalLM.from_pretrained(folders["plain"], quantization_config=quantized)
    if model == folders["plain"]:
        found = dict(seen[0][0].named_parameters())
        for name, weight in plain.named_parameters():
            assert torch.equal(weight.data, found[name].data), name
    assert said.strip()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("command_", ["ask", "read", "continue", "demo"])
@pytest.mark.parametrize("kind", ["gguf", "quantized", "lora", "both"])
def test_weights_that_cannot_be_of_few_bits(kind, command_, bits, folders, run, tmp_path):
    document, out = folders["play.txt"], tmp_path / "out"
    given = {"ask": [document, *ASKED], "read": [document, "--out", out], "demo": []}
    given["continue"] = [document, " And"]
    option, model, more = f"--load-in-{bits}bit", folders["plain"], []
    if kind == "gguf":
        model = tmp_path / "model.gguf"
        model.write_bytes(b"GGUF")
        wanted = f"model.gguf is a GGUF file.*leave {option} out"
    elif kind == "quantized":
        model = tmp_path / "quantized"
        shutil.copytree(folders["plain"], model)
        config = json.loads((model / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
        (model / "config.json").write_text(json.dumps(config))
        wanted = rf"quantized already \(gptq\).*leave {option} out"
    elif kind == "lora":
        more = ["--adapter", folders["lora"]]
        wanted = f"lora has a LoRA, and {bits} bits.*hf-infini convert .*--out FOLDER"
    else:
        more, wanted = ["--load-in-4bit", "--load-in-8bit"], "give one of --load-in-4bit and"
    printed = run(command_, model, *given[command_], option, *more, status=1)
    assert len(printed.err.splitlines()) == 1
    assert re.search(wanted, printed.err), printed.err


@pytest.mark.parametrize("missing", ["bitsandbytes", "accelerate"])
def test_a_package_that_is_missing_is_named(missing, folders, run, monkeypatch):
    own = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == missing else own(name, *_)
    )
    words = ("ask", folders["plain"], folders["play.txt"], *ASKED, "--load-in-4bit")
    assert f"{missing} is not installed: pip install 'hf-infini[bitsandbytes]'" in (
        run(*words, status=1).err
    )


@pytest.mark.slow
def test_what_a_lora_was_merged_into_is_loaded_in_few_bits(folders, run, tmp_path):
    """As the message says."""
    words = ("--adapter", folders["lora"], "--out", tmp_path / "merged")
    run("convert", folders["plain"], *words)
    words = ("ask", tmp_path / "merged", folders["play.txt"], *ASKED[:-2], "--load-in-4bit")
    assert "reading:" in run(*words).err


@pytest.mark.parametrize("make", [lambda: decoder("llama", **SIZES), lambda: gpt2(n_embd=64)])
def test_an_estimate_is_what_the_weights_take(make, tmp_path):
    make().save_pretrained(tmp_path)
    plain = load_causal_lm(tmp_path)
    sizes = weight_bytes(plain.config)
    assert sizes.plain == sum(weight.nbytes for weight in plain.parameters())
    for bits, size in ((4, sizes.four_bits), (8, sizes.eight_bits)):
        model = load_causal_lm(tmp_path, **few_bits(tmp_path, bits, "auto", "cpu"))
        held = sum(weight.nbytes for weight in model.parameters())
        held += sum(
            part.nbytes
            for name, part in model.state_dict().items()
            if name.endswith(("weight.absmax", ".SCB"))
        )
        assert held == size
