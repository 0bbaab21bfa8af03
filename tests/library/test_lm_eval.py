"""lm-eval on hf_infini's models: every number against the model's own logits, and its command on
local tasks."""

import json
import sys

import pytest
import torch
import yaml
from lm_eval.api.instance import Instance
from peft import LoraConfig, get_peft_model

from corpora.tokenization import train_bpe
from decoders import decoder
from hf_infini import patch_model, save_adapter, unpatch_model
from hf_infini.models.adapter import merged
from hf_infini.tools.lm_eval import UNLIMITED, InfiniLM
from models import gpt2, infini_gpt2
from running import run, sample_text

POSITIONS = 64  # of the models, n_positions
TEXT = sample_text()
# Two of them are far longer than POSITIONS tokens. lm-eval moves white space at an end into the
# continuation: there is none
CONTEXTS = [text.strip() for text in (TEXT[:40], TEXT[100:900], TEXT[2000:2090], TEXT[3000:3500])]
CHOICES = [
    [" the king", "\nnight falls"],
    [" crown", " of the"],
    [" a", " b"],
    [" rivers", " turn"],
]
PAIRS = [
    (text, choice) for text, choices in zip(CONTEXTS, CHOICES, strict=True) for choice in choices
]
TASK = {
    "task": "tiny_choice",
    "test_split": "test",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "doc_to_text": "{{context}}",
    "doc_to_choice": "choices",
    "doc_to_target": "label",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([TEXT], 300)


@pytest.fixture(scope="module")
def infini(tokenizer):
    return infini_gpt2(position_encoding="segment", **sizes(tokenizer))


def sizes(tokenizer) -> dict:
    ids = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    return dict(vocab_size=len(tokenizer), n_positions=POSITIONS, **ids)


def requests(kind: str, *arguments) -> list[Instance]:
    return [Instance(kind, {}, args, number) for number, args in enumerate(arguments)]


def direct(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The continuation's log-likelihood by one forward pass over everything, and whether it is the
    arg-max throughout."""
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        logits = (
            model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(context) - 1 :].double()
        )
    targets = ids[0, len(context) :]
    found = logits.log_softmax(-1).gather(-1, targets[:, None])
    return found.sum().item(), bool((logits.argmax(-1) == targets).all())


def direct_pair(model, tokenizer, context: str, continuation: str) -> tuple[float, bool]:
    whole, first = tokenizer.encode(context + continuation), tokenizer.encode(context)
    return direct(model, whole[: len(first)], whole[len(first) :])


def direct_text(model, tokenizer, text: str) -> float:
    return direct(model, [tokenizer.bos_token_id], tokenizer.encode(text))[0]


def greedy_tokens(model, ids: list[int], tokens: int) -> list[int]:
    """What greedy decoding appends, without a cache."""
    whole = list(ids)
    for _ in range(tokens):
        with torch.no_grad():
            whole.append(
                int(model(input_ids=torch.tensor([whole]), use_cache=False).logits[0, -1].argmax())
            )
        if whole[-1] == model.config.eos_token_id:
            break
    return whole[len(ids) :]


def direct_answer(model, tokenizer, context: str, tokens: int) -> str:
    """Greedy decoding up to an empty line."""
    found = greedy_tokens(model, tokenizer.encode(context), tokens)
    return tokenizer.decode(found, skip_special_tokens=True).split("\n\n")[0]


def test_log_likelihoods_of_any_chunks_and_batches(infini, tokenizer):
    pairs = [*PAIRS, ("", " the king"), (CONTEXTS[0], TEXT[40:900])]
    wanted = [direct_pair(infini, tokenizer, *pair) for pair in pairs if pair[0]]
    wanted.insert(-1, direct(infini, [tokenizer.bos_token_id], tokenizer.encode(" the king")))
    texts = [direct_text(infini, tokenizer, text) for text in CONTEXTS]
    ids = tokenizer.encode(CONTEXTS[1])
    best = greedy_tokens(infini, ids, 3)
    for batch_size, chunk_tokens in ((1, 1000), (3, 7)):
        model = InfiniLM(
            infini, tokenizer=tokenizer, batch_size=batch_size, chunk_tokens=chunk_tokens
        )
        found = model.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
        for (value, is_greedy), expected in zip(found, wanted, strict=True):
            assert (
                value == pytest.approx(expected[0], rel=1e-4, abs=1e-5) and is_greedy is expected[1]
            )
        other = [*best[:-1], (best[-1] + 1) % len(tokenizer)]
        found = model._loglikelihood_tokens([(None, ids, best), (None, ids, other)])
        assert [is_greedy for _, is_greedy in found] == [True, False]
        found = model.loglikelihood_rolling(
            requests("loglikelihood_rolling", *((text,) for text in CONTEXTS))
        )
        assert found == pytest.approx(texts, rel=1e-5)


@pytest.mark.slow
def test_the_command_gives_the_class_s_numbers(infini, tokenizer, tmp_path):
    infini.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [
        {"context": text, "choices": choices, "label": 1}
        for text, choices in zip(CONTEXTS, CHOICES, strict=True)
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    source = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    (tmp_path / "tiny_choice.yaml").write_text(yaml.safe_dump(TASK | source))
    line = [
        sys.executable,
        "-m",
        "hf_infini.tools.lm_eval",
        "--model",
        "hf_infini",
        "--device",
        "cpu",
        "--batch_size",
        "3",
    ]
    line += [
        "--model_args",
        f"pretrained={tmp_path / 'model'},chunk_tokens=50",
        "--include_path",
        str(tmp_path),
    ]
    line += ["--tasks", "tiny_choice", "--log_samples", "--output_path", str(tmp_path / "out")]
    run(*line)
    [file] = (tmp_path / "out").rglob("samples_tiny_choice_*.jsonl")
    samples = sorted(
        map(json.loads, file.read_text(encoding="utf-8").splitlines()),
        key=lambda sample: sample["doc_id"],
    )
    found = [
        (float(value), str(greedy) == "True")
        for sample in samples
        for value, greedy in sample["filtered_resps"]
    ]
    wanted = InfiniLM(infini, tokenizer=tokenizer).loglikelihood(
        requests("loglikelihood", *PAIRS), disable_tqdm=True
    )
    assert found == [(pytest.approx(value, rel=1e-4), greedy) for value, greedy in wanted]


def test_max_length(infini, tokenizer, caplog):
    """The plain limit for learned positions, the one that was given for others: the beginning is
    cut off, and said so."""
    ids = tokenizer.encode(CONTEXTS[1])
    for network, options, limit in (
        (gpt2(**sizes(tokenizer)), {}, POSITIONS),
        (infini, {"max_length": 40}, 40),
    ):
        model = InfiniLM(network, tokenizer=tokenizer, **options)
        assert model.max_length == limit
        [(found, _)] = model.loglikelihood(requests("loglikelihood", (CONTEXTS[1], " crown")))
        assert f"1 inputs lose their beginning: longer than {limit} tokens" in caplog.text
        rest = tokenizer.encode(CONTEXTS[1] + " crown")[len(ids) :]
        assert found == pytest.approx(
            direct(network, ids[len(rest) - limit - 1 :], rest)[0], rel=1e-4
        )
    # the whole context counts
    assert abs(found - direct_pair(infini, tokenizer, CONTEXTS[1], " crown")[0]) > 1e-3


@pytest.mark.slow
def test_a_long_context_needs_the_memory_of_a_chunk(infini, tokenizer):
    """No call of the model reads more than a chunk, and logits are made of the continuation's
    places alone."""
    model = InfiniLM(infini, tokenizer=tokenizer, chunk_tokens=128)
    read, places = [], []
    hooks = [
        infini.transformer.wte.register_forward_hook(
            lambda module, given, out: read.append(out.shape[1])
        ),
        infini.lm_head.register_forward_hook(
            lambda module, given, out: places.append(out.shape[1])
        ),
    ]
    text = TEXT[:12_000].strip()
    model.loglikelihood(requests("loglikelihood", (text, " the king")))
    length, answer = len(tokenizer.encode(text)), len(tokenizer.encode(" the king"))
    assert length > 30 * 128 and sum(read) == length + answer - 1 and max(read) == 128
    # a chunk without one of them gives the logits of its last token
    assert max(places) <= max(answer, 1)
    for hook in hooks:
        hook.remove()


def test_greedy_answers_of_a_padded_batch(infini, tokenizer):
    model = InfiniLM(infini, tokenizer=tokenizer, batch_size=len(CONTEXTS), chunk_tokens=33)
    options = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    found = model.generate_until(
        requests("generate_until", *((text, options) for text in CONTEXTS))
    )
    assert found == [direct_answer(infini, tokenizer, text, 12) for text in CONTEXTS]


def test_a_family_has_a_limit_as_long_as_a_layer_has_full_attention(tokenizer):
    """Its layers with a memory have no positions to run out of; others do."""
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": 0,
    }
    network = decoder("gemma2", vocab_size=len(tokenizer), max_position_embeddings=POSITIONS, **ids)
    assert InfiniLM(network, tokenizer=tokenizer).max_length == POSITIONS
    patch_model(network, segment_length=8, layers=[1])
    # layer 3 has full attention
    assert InfiniLM(network, tokenizer=tokenizer).max_length == POSITIONS
    unpatch_model(network)
    patch_model(network, segment_length=8, local_segments=1, sink_tokens=2)
    assert InfiniLM(network, tokenizer=tokenizer).max_length == UNLIMITED


def test_an_adapter_is_put_on_the_plain_model(tokenizer, tmp_path):
    plain = decoder("llama", vocab_size=len(tokenizer))
    plain.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    model = get_peft_model(
        patch_model(plain, segment_length=8), LoraConfig(r=2, target_modules=["q_proj"])
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name or name.endswith("gate.weight"):
            torch.nn.init.normal_(parameter)
    save_adapter(model, tmp_path / "adapter")
    asked = requests("loglikelihood", *((context, CHOICES[0][0]) for context in CONTEXTS))
    options = dict(device="cpu", dtype="float32", batch_size=2, chunk_tokens=64)
    with_adapter = InfiniLM(str(tmp_path / "plain"), adapter=str(tmp_path / "adapter"), **options)
    whole = InfiniLM(merged(model), tokenizer=tokenizer, **options)
    # the plain model's positions end
    assert with_adapter.max_length == whole.max_length == UNLIMITED
    for found, wanted in zip(
        with_adapter.loglikelihood(asked), whole.loglikelihood(asked), strict=True
    ):
        assert found[0] == pytest.approx(wanted[0], rel=1e-4) and found[1] == wanted[1]
    with pytest.raises(OSError, match="infini_adapter.json"):
        InfiniLM(str(tmp_path / "plain"), adapter=str(tmp_path / "plain"), **options)


def test_a_batch_size_is_a_number(infini, tokenizer):
    with pytest.raises(ValueError, match="batch_size must be a number"):
        InfiniLM(infini, tokenizer=tokenizer, batch_size="auto")
