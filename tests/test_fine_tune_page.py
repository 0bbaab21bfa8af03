"""The programs of the page about fine-tuning run as they are printed, on small models, and learn
what they should."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from cases import assert_same_gradients
from corpora.tokenization import train_bpe
from decoders import decoder
from hf_infini import InfiniCache, patch_model
from models import token_ids
from pages import programs
from running import sample_text

NAME = (
    "HuggingFaceTB/SmolLM2-135M"  # in the page; here a folder with a small model of the same kind
)
FULL, LORA, LOADED, LOOP, LONG_ROWS = programs("docs/fine-tune.md")


@pytest.mark.slow
def test_the_program_that_fine_tunes_runs(tmp_path, monkeypatch):
    """And so does the loop over chunks, which goes on from it."""
    letters = Tokenizer(
        models.WordLevel(
            {letter: number for number, letter in enumerate("?abcdefgh")}, unk_token="?"
        )
    )
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(tmp_path / NAME)
    decoder("llama").save_pretrained(tmp_path / NAME)
    (tmp_path / "livro.txt").write_text("abacadefhg" * 500, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(FULL, names)
    assert len(names["rows"]) == 2 and names["trainer"].state.global_step == 3
    tuned, stock = (
        AutoModelForCausalLM.from_pretrained("tuned"),
        AutoModelForCausalLM.from_pretrained(NAME),
    )
    moved = [(layer.self_attn.gate.weight + 4).abs().max().item() for layer in tuned.model.layers]
    # Adam's steps are about the learning rate, which falls to a third in three steps: 0.01 for the
    # gates, 1e-4 for the rest
    assert min(moved) > 0.005
    assert 0 < (tuned.lm_head.weight - stock.lm_head.weight).abs().max().item() < 0.001
    assert tuned.config.segment_length == 256 and names["tokenizer"]("ab").input_ids == [1, 2]
    exec(LOOP, names)
    assert names["number"] == 5 and names["output"].loss.isfinite()


@pytest.mark.slow
def test_the_program_with_lora_runs(tmp_path, monkeypatch):
    """On this machine, with a GPU or without; and its adapter is loaded as the page loads it."""
    tokenizer = train_bpe([sample_text()], 400)
    tokenizer.save_pretrained(tmp_path / NAME)
    decoder("llama", vocab_size=400, max_position_embeddings=2048).save_pretrained(tmp_path / NAME)
    texts = [sample_text()[begin : begin + 3000] for begin in range(0, 15_000, 3000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    Path(tmp_path, "textos.jsonl").write_text(lines, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(LORA, names)
    trained, ids = names["trainer"].model.eval(), token_ids(1, 700).clamp(min=3)
    gates = [part for name, part in trained.named_parameters() if "gate.modules_to_save" in name]
    assert len(gates) == 4 and min((part + 4).abs().max().item() for part in gates) > 0.005
    exec(LOADED, names)
    with torch.no_grad():
        wanted = trained(ids).logits
        torch.testing.assert_close(names["model"](ids).logits, wanted, rtol=1e-3, atol=1e-3)


def long_document(tokens: int):
    """A patched model without dropout, and one text of so many tokens, of which each has a
    target."""
    model = patch_model(decoder("llama"), segment_length=8, local_segments=1).train()
    return model, token_ids(1, tokens + 1)[0]


def one_pass(model, ids) -> list[torch.Tensor]:
    """The gradients of a whole row."""
    target = ids[None, 1:]
    loss = model(ids[None, :-1], labels=target, shift_labels=target, use_cache=False).loss
    return [
        *torch.autograd.grad(loss, [*model.parameters()], allow_unused=True, materialize_grads=True)
    ]


@pytest.mark.parametrize("window", [4, 1])
def test_the_loop_over_chunks_has_the_gradients_of_one_pass_within_a_window(window):
    """A step of stochastic gradient descent at rate 1 moves the weights by the gradient."""
    code = LOOP
    changes = (
        "torch.optim.AdamW(groups), 1024, 4",
        f"torch.optim.SGD(model.parameters(), 1.0), 16, {window}",
    )
    assert code.count(changes[0]) == code.count("optimizer.step()") == 1
    code = code.replace(*changes).replace("optimizer.step()", "optimizer.step(), moved(model)")
    model, ids = long_document(64)
    wanted, gradients, before = (
        one_pass(model, ids),
        [],
        [parameter.detach().clone() for parameter in model.parameters()],
    )

    def moved(model):
        gradients.append(
            [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
        )
        for old, new in zip(before, model.parameters(), strict=True):
            new.data.copy_(old)  # the next window has the same weights

    exec(code, {"torch": torch, "model": model, "ids": ids, "moved": moved})
    assert len(gradients) == 4 // window
    found = [sum(parts) / len(gradients) for parts in zip(*gradients, strict=True)]
    if window == 4:
        assert_same_gradients(found, wanted, 1e-4)  # float32, in other groups
    else:  # what was cut off is missing
        with pytest.raises(AssertionError, match="gradient"):
            assert_same_gradients(found, wanted, 1e-2)


@pytest.mark.slow
def test_the_trainer_that_reads_long_rows_in_chunks(tmp_path):
    names = {"torch": torch, "Trainer": Trainer, "InfiniCache": InfiniCache}
    exec(LONG_ROWS.replace("split(1024", "split(32"), names)
    arguments = TrainingArguments(
        tmp_path,
        max_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        max_grad_norm=0,
        gradient_accumulation_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    for tokens in (32, 80):
        found = []
        for trainer_class in (Trainer, names["LongRowTrainer"]):
            model, _ = long_document(1)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            rows = [{"input_ids": row, "labels": row} for row in token_ids(4, tokens)]
            optimizer = torch.optim.SGD(model.parameters(), 1.0)
            loss = (
                trainer_class(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
                .train()
                .training_loss
            )
            change = [
                old - new.detach() for old, new in zip(before, model.parameters(), strict=True)
            ]
            found.append((loss, change))
        (loss, wanted), (loss_in_chunks, change) = found
        assert loss_in_chunks == pytest.approx(loss, rel=1e-5)
        if tokens == 32:
            assert_same_gradients(change, wanted, 1e-4)
        else:
            with pytest.raises(AssertionError, match="gradient"):
                assert_same_gradients(change, wanted, 1e-2)
