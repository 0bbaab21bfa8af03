"""A LoRA beside kept tokens: what is saved is what was measured, in 4 bits too, and trackers
receive each head's gate."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from decoders import decoder, fitted
from evaluation.losses import stream_losses
from evaluation.perplexity import text_rows
from hf_infini import load_adapter, patch_model, save_adapter
from hf_infini.tools.training import gate_values
from running import run_recipe

pytest.importorskip("peft", reason="pip install peft")
pytest.importorskip("trl", reason="pip install trl")
events = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="pip install tensorboard"
)

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
FOUR_BITS = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
)
KEEPING = {
    "segment_length": 16,
    "local_segments": 1,
    "sink_tokens": 4,
    "kept_tokens": 28,
    "keep_score": "learned",
}
TEXT = "\n\n".join(f"{number} squared is {number**2}. " * 8 for number in range(60))


def begun(tmp_path):
    """A prepared folder, a model and its adapter in a folder, as arguments of the recipe."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    data = tmp_path / "data"
    how = "--text_unit paragraph --tokenizer characters --context 128 --validation 0.3".split()
    run_recipe("prepare", "--source", tmp_path / "text.txt", *how, "--out", data)
    tokens = json.loads((data / "manifest.json").read_text())["tokenizer"]
    model = decoder("llama", vocab_size=tokens["vocabulary"], **SIZES)
    model.save_pretrained(tmp_path / "model")
    for file in (data / "tokenizer").iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    patched = patch_model(model.bfloat16(), gate_init=-4.0, **KEEPING)
    save_adapter(fitted(patched), tmp_path / "adapter")

    given = [
        *f"--model {tmp_path / 'model'} --adapter {tmp_path / 'adapter'}".split(),
        *f"--data {data} --rows 3".split(),
    ]
    return data, [*given, "--steps", 4, "--learning_rate", 0.01]


def contestants(out, data) -> dict[str, dict]:
    return {
        each["way"]: each
        for each in json.loads(out.with_suffix(".json").read_text())["contestants"][str(data)]
    }


@pytest.mark.slow
def test_what_the_plain_model_predicts_is_learned_and_a_stopped_training_ends_the_same(tmp_path):
    (data, given), out = begun(tmp_path), tmp_path / "out"
    given += ["--learn", "plain", "--save_steps", 2, "--learning_rate", 0.001]
    run_recipe("finetune_lora", *given, "--out", out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and lines[-1]["train_loss"] < lines[0][
        "train_loss"
    ]
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    shutil.copytree(out / "checkpoint-2", stopped / "checkpoint-2")
    shutil.copy(out / "run.json", stopped)
    run_recipe("finetune_lora", *given, "--out", stopped)
    whole, found = (load_file(folder / "adapter_model.safetensors") for folder in (out, stopped))
    assert whole.keys() == found.keys() and all(
        torch.equal(whole[name], found[name]) for name in whole
    )
    assert (
        contestants(out, data)["kept, after"]["beyond"]
        == contestants(stopped, data)["kept, after"]["beyond"]
    )
    before = load_file(out / "checkpoint-2" / "adapter_model.safetensors")
    assert any(not torch.equal(whole[name], before[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize("four_bits", [False, True], ids=["LoRA", "QLoRA"])
def test_what_is_saved_is_what_was_measured(four_bits, tmp_path):
    if four_bits:
        pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    (data, given), out = begun(tmp_path), tmp_path / "out"
    given += [
        *f"--steps 8 --report_to tensorboard --out {out}".split(),
        *(["--four_bits"] if four_bits else []),
    ]
    printed = run_recipe("finetune_lora", *given).stdout
    found = contestants(out, data)
    assert (
        len(found) == 6
        and "| kept, after, 64" in printed
        and found["plain, after"]["beyond_count"] == 64
    )
    for way in ("kept", "window", "plain"):
        assert sum(found[f"{way}, after"]["beyond"]) < sum(found[f"{way}, before"]["beyond"])

    options = {"dtype": torch.bfloat16, "quantization_config": FOUR_BITS if four_bits else None}
    loaded = load_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options), out)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = [
        json.loads(line)["text"]
        for line in (data / "validation_documents.jsonl").read_text().splitlines()
    ]
    rows = [row for row, _ in text_rows(tokenizer, texts, 128) if len(row) == 128]
    places = zip(
        rows[:: len(rows) // 3],
        *(found[f"kept, {when}"]["beyond"] for when in ("before", "after")),
        strict=False,
    )
    for row, before, after in places:
        with torch.autocast("cpu", torch.bfloat16):
            ((_, losses, _),) = stream_losses(loaded, torch.as_tensor(row)[None].long())
        # The first of them predicts token 1. A LoRA beside 4 bits was bfloat16 while it was
        # trained, and is float32 here
        assert (
            losses[:, 63:].sum().item() == pytest.approx(after, rel=5e-3) and before > 1.02 * after
        )

    reader = events.EventAccumulator(str(next(out.rglob("events.out*"))))
    reader.Reload()
    exact = load_adapter(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32), out
    )
    for head, value in enumerate(gate_values(exact)["3"]):
        sent = [event.value for event in reader.Scalars(f"train/gates/layer_3_head_{head}")]
        assert len(sent) >= 4 and len({*sent}) > 2 and sent[-1] == pytest.approx(value, abs=2e-5)
