"""Context parallelism: the ranks that share a row compute what one process does, outputs, losses
and gradients."""

import random
from unittest import mock

import pytest
import torch
from torch import distributed

from decoders import decoder
from hf_infini import cache_bytes, patch_model
from hf_infini.options import KEEP_SCORES
from hf_infini.tools.parallel import shard_rows
from models import causal_mha, infini_gpt2
from ranks import on_ranks

# Of the largest number that is compared. Sums in another order round differently; transformers
# computes the loss, and the layers the start of z, in float32 whatever the model's dtype. 130 such
# cases differ by at most 2e-7 and 2e-6.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5}
RULES = ("linear", "delta", "gated_delta")
SIZES = (2, 3, 4)
COUNTS = 3 * 8  # bytes of a row's numbers of tokens, which follow from the whole rows


def model_of(draw: random.Random, dtype: torch.dtype):
    rule = draw.choice(RULES)
    options = {
        "segment_length": draw.choice([4, 6]),
        "update_rule": rule,
        "local_segments": draw.randint(0, 2),
        "sink_tokens": draw.choice([0, 2]),
        "memory_conv": draw.choice([0, 1, 3]),
        "mask_special_tokens": draw.random() < 0.5,
        "kept_tokens": draw.choice([0, 0, 5, 12]),
    }
    if options["kept_tokens"]:
        options["keep_score"] = draw.choice(KEEP_SCORES)
    if rule != "gated_delta":
        options |= draw.choice(
            [{}, {"feature_map": "exp"}, {"feature_map": "exp", "memory_write": "learned"}]
        )
    kind = draw.choice(["gpt2", "causal_mha", "llama"])
    if kind == "llama":
        model = patch_model(decoder("llama", num_hidden_layers=2), **options)
    elif kind == "gpt2":
        model = infini_gpt2(n_positions=128, **options)
    else:
        if options["kept_tokens"]:
            options["kept_shares"] = draw.choice([None, [0.5, 1.7, 0.8], [0, 2, 1]])
        model = causal_mha(n_positions=128, attention="infini", position_encoding="rope", **options)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith(("memory_conv", "memory_write", "keep_weight")):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype)


def rows_of(draw: random.Random, tokens: int) -> dict[str, torch.Tensor]:
    """Two rows: plain, padded (anywhere, or at the end over whole shards), of documents that begin
    anywhere, or both."""
    generator = torch.Generator().manual_seed(draw.randint(0, 10**6))
    batch = {"input_ids": torch.randint(89, (2, tokens), generator=generator)}
    real = torch.ones(2, tokens, dtype=torch.long)
    padding = draw.choice(["none", "anywhere", "end"])
    if padding == "anywhere":
        real = (torch.rand(2, tokens, generator=generator) < 0.8).long()
    elif padding == "end":
        real[0, draw.randint(tokens // 4, tokens) :] = 0
    if padding != "none":
        batch["attention_mask"] = real
    if draw.random() < 0.6:
        begins = torch.rand(2, tokens, generator=generator) < draw.choice([0.03, 0.1, 0.3])
        columns = torch.arange(tokens).expand(2, -1)
        batch["position_ids"] = columns - torch.where(begins, columns, 0).cummax(1).values
    labels = batch["input_ids"].masked_fill(real == 0, -100)
    batch["labels"] = labels.masked_fill(torch.rand(2, tokens, generator=generator) < 0.2, -100)
    return batch


def run(model, batch, count) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = model(**batch, num_items_in_batch=count)
    output.loss.backward()
    gradients = {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
    }
    return output.logits.detach(), output.loss.detach(), gradients


def differences(seeds: range, dtype: torch.dtype) -> list[tuple[int, str, float]]:
    """On every rank: how far what the ranks find together is from what one process does, of the
    largest number compared."""
    groups = {size: distributed.new_group(range(size)) for size in SIZES}
    found = []
    for seed in seeds:
        draw = random.Random(seed)
        size = draw.choice(SIZES)
        model = model_of(draw, dtype)
        if draw.random() < 0.25:
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        tokens = draw.randint(2 * size, 4 * model.config.segment_length * size)
        batch = rows_of(draw, tokens)
        if draw.random() < 0.3:  # of some layers or states nothing has a gradient, on any rank
            trained = draw.choice(
                [
                    ("gate",),
                    ("o_proj", "c_proj", "out_proj"),
                    ("q_proj", "W_query", "h.1.attn.c_attn"),
                ]
            )
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(any(part in name for part in trained))
        if distributed.get_rank() >= size:
            continue
        count = max(1, int((batch["labels"][:, 1:] != -100).sum()))
        share = shard_rows(batch, model.config, groups[size])
        logits, loss, gradients = run(model, batch, count)
        own_logits, own_loss, own_gradients = run(model, share, count)
        every = [own_logits] * size
        distributed.all_gather_object(every, own_logits, groups[size])
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        pairs = {"logits": (logits[real], torch.cat(every, 1)[real]), "loss": (loss, own_loss)}
        pairs |= {name: (gradients[name], own_gradients[name]) for name in gradients}
        for name, (wanted, own) in pairs.items():
            if name != "logits":
                distributed.all_reduce(own, group=groups[size])
            found.append(
                (
                    seed,
                    name,
                    float((own - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)),
                )
            )
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_ranks_compute_what_one_process_does(dtype):
    seeds = range(14) if dtype == torch.float64 else range(24, 28)
    for found in on_ranks(differences, max(SIZES), seeds, dtype):
        assert not isinstance(found, Exception), found
        assert len(found) > 40
        assert max(entry[2] for entry in found) < TOLERANCE[dtype], [
            e for e in found if not e[2] < TOLERANCE[dtype]
        ]


def in_half_precision() -> list[float]:
    """Under autocast: how far loss and a gradient are from one process's, of their size."""
    model, found = infini_gpt2(n_layer=2, local_segments=1, memory_conv=3), []
    ids = torch.randint(1, 89, (2, 48), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": ids, "labels": ids}
    for batch in (rows, shard_rows(rows, model.config)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch, num_items_in_batch=94).loss
        loss.backward()
        found.append([loss.detach(), model.transformer.h[0].attn.c_attn.weight.grad.clone()])
    for own in found[1]:
        distributed.all_reduce(own)
    return [
        float((own - wanted).norm() / wanted.norm()) for wanted, own in zip(*found, strict=True)
    ]


def test_half_precision_is_exchanged_as_it_is():
    for found in on_ranks(in_half_precision, 3):
        assert not isinstance(found, Exception), found
        assert max(found) < 0.02  # bfloat16 has 8 bits: 0.004 for one number


def refusals() -> list[str]:
    """What each call that cannot be right is told, on this rank."""
    rank, model = distributed.get_rank(), infini_gpt2(n_layer=2)
    batch = {"input_ids": torch.randint(89, (2, 48), generator=torch.Generator().manual_seed(0))}
    other, used = (
        infini_gpt2(n_layer=2, update_rule=RULES[rank], sink_tokens=rank),
        shard_rows(batch, model.config),
    )
    model(**used)
    calls = [
        lambda: shard_rows({"input_ids": batch["input_ids"][:, :5]}, model.config),
        lambda: shard_rows(batch | {"labels": batch["input_ids"][:, 1:]}, model.config),
        lambda: shard_rows(batch, infini_gpt2(layers=[1]).config),
        lambda: model(**used),
        lambda: model(
            **shard_rows({"input_ids": batch["input_ids"][: 1 + rank % 2]}, model.config)
        ),
        lambda: model(
            **shard_rows(
                batch | ({"attention_mask": batch["input_ids"] >= 0} if rank else {}), model.config
            )
        ),
        lambda: model(**shard_rows({"input_ids": batch["input_ids"].roll(rank, 1)}, model.config)),
        lambda: other(**shard_rows(batch, other.config)),
        lambda: model(
            **(shard_rows(batch, model.config) | {"input_ids": batch["input_ids"][:, :12]})
        ),
    ]
    found = []
    for call in calls:
        with pytest.raises(ValueError) as refused:
            call()
        found.append(str(refused.value))
    return found


def test_what_cannot_be_right_is_refused_on_every_rank():
    every = on_ranks(refusals, 3)
    wanted = [
        "rows of 5 tokens are too short for 3 shards of 2 at least: use fewer ranks",
        "all parts [rows, tokens, …]; got {'input_ids': [2, 48], 'labels': [2, 47]}",
        "layers [0, 2] of this model have no memory: their attention would need the keys and "
        "values of all ranks",
        "a ShardCache is for one call",
        "the ranks that share a row differ, listed by rank: {'batch': [1, 2, 1], 'sha256 of whole",
        "{'attention_mask': [False, True, True]}",
        "the ranks that share a row differ, listed by rank: {'sha256 of whole rows': ['",
        "{'update_rule': ['linear', 'delta', 'gated_delta'], 'sink_tokens': [0, 1, 2]}",
        "a shard must be [rows, tokens] = [2, 16], as shard_rows has made it",
    ]
    for found in every:
        assert not isinstance(found, Exception), found
        for part, message in zip(wanted, found, strict=True):
            assert part in message


def received(tokens: int, rule: str, **options) -> int:
    """Bytes that this rank receives for one layer in the forward and the backward pass of one
    step."""
    found = []
    for layers in (1, 2):
        model = infini_gpt2(n_layer=layers, n_positions=256, update_rule=rule, **options)
        count = 0

        def batch_isend_irecv(operations, call=distributed.batch_isend_irecv):
            nonlocal count
            count += sum(each.tensor.nbytes for each in operations if each.op is distributed.irecv)
            return call(operations)

        batch = {
            "input_ids": torch.randint(
                1, 89, (2, tokens), generator=torch.Generator().manual_seed(0)
            )
        }
        with mock.patch.object(distributed, "batch_isend_irecv", batch_isend_irecv):
            model(
                **shard_rows(batch | {"labels": batch["input_ids"]}, model.config)
            ).loss.backward()
        found.append(count)
    return found[1] - found[0]


def counts() -> dict[str, list[int]]:
    options = {"segment_length": 8, "local_segments": 2, "memory_conv": 3}
    found = {rule: [received(tokens, rule, **options) for tokens in (96, 192)] for rule in RULES}
    return found | {
        "kept": [received(tokens, "linear", **options, kept_tokens=5) for tokens in (96, 192)]
    }


def test_bytes_do_not_grow_with_the_text():
    """A layer's state of two rows, from the rank before; its gradient, from the rank after, without
    the kept positions."""
    for rank, found in enumerate(on_ranks(counts, 3)):
        assert not isinstance(found, Exception), found
        for rule, lengths in found.items():
            options = {"kept_tokens": 5} if rule == "kept" else {"update_rule": rule}
            config = infini_gpt2(
                n_layer=1, segment_length=8, local_segments=2, memory_conv=3, **options
            ).config
            numbers = 2 * 4 * 5 * 8 * (rule == "kept")  # int64
            state = 2 * (cache_bytes(config) - COUNTS)
            assert lengths == [state * (rank > 0) + (state - numbers) * (rank < 2)] * 2
