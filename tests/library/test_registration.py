"""What transformers and other libraries decide by a model's type or class name: the families get
what GPT-2 gets."""

import json
import sys

import pytest
import tokenizers
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)
from transformers.modelcard import TrainingSummary

from decoders import decoder
from hf_infini import patch_model
from hf_infini.models.families import infini_config
from models import causal_mha, infini_gpt2, token_ids
from running import run

FAMILIES = {
    "llama": lambda: patch_model(decoder("llama"), segment_length=8),
    "infini_gpt2": infini_gpt2,
    "causal_mha": causal_mha,
}


LAZY = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM, conversion_mapping
before = set(sys.modules)
import hf_infini
from hf_infini.models.families import PROBED
made = {name for name in set(sys.modules) - before if name.startswith("transformers.models.")}
# Llama: whose forward the from-scratch model has
assert not {name.split(".")[2] for name in made} & {*PROBED} - {"llama"}, made
assert conversion_mapping._checkpoint_conversion_mapping_cache is None  # 0.3 s
for folder in sys.argv[1:]:
    config, model = AutoConfig.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert type(config).__name__.startswith("Infini") and type(config) is type(model.config), folder
    assert type(model).__module__ == "hf_infini.models.families", folder
"""


@pytest.mark.slow
def test_families_cost_nothing_until_one_is_loaded(tmp_path):
    folders = [tmp_path / name for name in ("gpt2", "llama", "qwen3_moe")]
    for folder in folders:
        patch_model(decoder(folder.name), segment_length=8).save_pretrained(folder)
    run(sys.executable, "-c", LAZY, *folders)


def smoothed_loss(logits, labels, smoothing: float):
    """Cross-entropy against the next token's label, of which `smoothing` is spread over the whole
    vocabulary."""
    loss = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)
    return loss(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.fixture(params=["llama", "infini_gpt2", "causal_mha"])
def model(request):
    return FAMILIES[request.param]()


def test_smoothed_labels_are_those_of_the_next_token(model, tmp_path):
    options = TrainingArguments(
        tmp_path, label_smoothing_factor=0.1, use_cpu=True, report_to="none"
    )
    trainer, ids = Trainer(model=model, args=options), token_ids(4, 24)
    with torch.no_grad():
        model.eval()  # making a Trainer turns dropout on
        wanted = smoothed_loss(model(ids).logits, ids, 0.1)
        loss = trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
    # Float32 sums of the same 92 terms in another order
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    assert TrainingSummary.from_trainer(trainer, model_name="its card").tasks == "text-generation"


@pytest.mark.parametrize(
    ("model_type", "named"),
    [("gpt2", None), ("llama", None), ("gemma2", "GPT2Tokenizer"), ("qwen2", "LlamaTokenizer")]
    + [("gpt_neox", "PreTrainedTokenizerFast")],
)
def test_a_tokenizer_is_the_one_that_it_is_beside_the_own_model(model_type, named, tmp_path):
    """transformers decides by type: whether to believe the class that the files name, and which it
    is without one."""
    own = CONFIG_MAPPING[model_type]()
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "<s>": 3}, [("a", "b")], unk_token="<s>")
    )
    if model_type == "gpt2":  # as its repository has them
        backend.model.save(str(tmp_path))
    else:
        backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": named} if named else {})
    )
    (tmp_path / "chat_template.jinja").write_text(
        "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    )

    def loaded(config):
        config.save_pretrained(tmp_path)
        assert AutoConfig.from_pretrained(tmp_path).model_type == config.model_type
        tokenizer, processor = (
            auto.from_pretrained(tmp_path) for auto in (AutoTokenizer, AutoProcessor)
        )
        assert type(processor) is type(tokenizer)
        turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "b"}]
        return (
            type(tokenizer),
            tokenizer("ab").input_ids,
            tokenizer.apply_chat_template(turns, tokenize=False),
        )

    wanted = loaded(own)
    assert loaded(infini_config(type(own))(segment_length=8, layers=[0])) == wanted
    assert wanted[2] == "abb"
