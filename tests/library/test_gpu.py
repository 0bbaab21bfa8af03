"""The same on a GPU as on a CPU. Left out where there is none."""

import warnings
from dataclasses import fields, replace

import pytest
import torch

from cases import (
    assert_equals_reference,
    assert_same_gradients,
    keeping_case,
    plain_case,
    random_case,
    random_cuts,
    rotary_of,
    state_before,
)
from hf_infini import InfiniCache, infini_attention
from hf_infini.ops.backends import forced_backend
from hf_infini.options import UPDATE_RULES
from models import causal_mha, infini_gpt2, token_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
FLOAT64 = 1e-9  # rounding: as between two ways on a CPU
FLOAT32 = 1e-4  # of logits up to about 30, through three layers; of gradients, in other orders


def moved(value, device):
    """Tensors, and what holds tensors, on another device."""
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    return value.to(device) if torch.is_tensor(value) else value


def moved_state(state, device):
    return replace(
        state, **{field.name: moved(getattr(state, field.name), device) for field in fields(state)}
    )


def attention_on_gpu(*tensors, state=None, **options):
    """[`infini_attention`] of tensors on the CPU, with results there."""
    options = {name: moved(option, "cuda") for name, option in options.items()}
    state = None if state is None else moved_state(state, "cuda")
    output, state = infini_attention(*moved(tensors, "cuda"), state=state, **options)
    return output.cpu(), moved_state(state, "cpu")


@pytest.mark.parametrize("seed", range(300, 340))
def test_attention_is_the_naive_reference_however_the_input_is_cut(seed):
    case = random_case(seed, dtype=torch.float64)
    cuts = random_cuts(seed, case.query.shape[2])
    assert_equals_reference(case, attention_on_gpu, FLOAT64, cuts, state_before(case))


def by_kernels(*tensors, **options):
    with forced_backend("triton"):
        return attention_on_gpu(*tensors, **options)


@pytest.mark.parametrize("seed", range(400, 424))
def test_the_kernels_are_the_naive_reference_however_the_input_is_cut(seed):
    case = (random_case, keeping_case)[seed % 2](
        seed, torch.float32, width=16, update_rule="linear", softcap=None
    )
    tokens = case.query.shape[2]
    if tokens > 1:  # one token is a step
        cuts = [cut for cut in random_cuts(seed, tokens)[:1] if 1 < cut < tokens - 1]
        assert_equals_reference(
            case, by_kernels, 3e-5, cuts, state_before(case) if seed % 3 else None
        )


WIDE = {"batch": 2, "heads": 4, "kv_heads": 2, "tokens": 300, "width": 64, "segment_length": 64}
# Rounding of inputs and products to the dtype, against float64 and against the largest gradient
HALF = {torch.bfloat16: 0.02, torch.float16: 0.003, torch.float32: 2e-6}

KEEPING = {
    "kept_tokens": 100,
    "keep_score": "learned",
    "learned_score": torch.linspace(-9, 9, 1200).sin().view(2, 2, 300),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("options", [{}, KEEPING], ids=["linear", "kept"])
def test_the_kernels_are_as_exact_as_the_dtype(options, dtype, width):
    """And the same at every run, also beside other work on another stream."""
    case = plain_case(
        **WIDE | {"width": width}, **options, local_segments=1, sink_tokens=4, dtype=dtype
    )
    case.options["rotary"] = rotary_of(64, case.options, width, torch.float64)
    # a score has no gradient
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in case.leaves()[:4]]
    upstream = torch.randn(case.query.shape, generator=torch.Generator().manual_seed(1)).to(
        "cuda", dtype
    )

    def results(leaves, backend, upstream):
        options = {name: moved(option, "cuda") for name, option in case.options.items()}
        with forced_backend(backend):
            output = infini_attention(*leaves, case.segment_length, **options)
        return output, *torch.autograd.grad(output, leaves, upstream)

    found = results(leaves, "triton", upstream)
    wanted = results(
        [leaf.detach().double().requires_grad_() for leaf in leaves], "grid", upstream.double()
    )
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == (dtype if one.dim() > 1 else leaves[3].dtype)
        assert (one.double() - other).abs().max() <= HALF[dtype] * other.abs().max()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        again = results(leaves, "triton", upstream)
    for number, (one, other) in enumerate(zip(found, again, strict=True)):
        # of keys and values that many segments keep, sums are in any order
        if options is KEEPING and number in (2, 3):
            assert (one - other).abs().max() <= HALF[dtype] * other.abs().max()
        else:
            assert torch.equal(one, other)
    torch.cuda.synchronize()


def waits(model, ids, **options) -> int:
    """How often a training step waits for the GPU."""
    for _ in range(2):  # the first compiles
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # which warns of itself the first time
            try:
                model(ids, labels=ids, use_cache=False, **options).loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def test_a_training_step_waits_for_the_gpu_as_often_whatever_the_number_of_layers():
    one, three = (infini_gpt2(n_embd=64, n_layer=layers).cuda() for layers in (1, 3))
    ids = token_ids(2, 45).cuda()
    masks = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(45, device="cuda").expand(2, -1),
    }
    for options, most in (({}, 0), (masks, 4)):  # what the layout reads of masks and positions
        with forced_backend("triton"):
            assert waits(one, ids, **options) == waits(three, ids, **options) <= most


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_kernels_run_where_their_tensors_are():
    case = plain_case(**WIDE, dtype=torch.float32)
    tensors = [tensor.detach() for tensor in case.leaves()]
    on = [
        infini_attention(*(t.to(f"cuda:{n}") for t in tensors), case.segment_length).cpu()
        for n in range(2)
    ]
    assert torch.equal(*on)


MODELS = {
    rule: lambda rule=rule: infini_gpt2(update_rule=rule, memory_conv=3) for rule in UPDATE_RULES
}
# heads wide enough for them
MODELS["kernels"] = lambda: infini_gpt2(n_embd=64, local_segments=1, sink_tokens=2)
MODELS["local"] = lambda: causal_mha(attention="local", sliding_window=7)
MODELS["alibi"] = lambda: causal_mha(position_encoding="alibi")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_same_logits_gradients_and_cached_tokens(name):
    model, ids = MODELS[name](), token_ids(3, 45)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    labels = ids.masked_fill(mask == 0, -100)

    def results(device):
        placed = model.to(device)
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        placed.zero_grad()
        found = placed(**inputs, labels=labels.to(device))
        found.loss.backward()
        options = {
            "max_new_tokens": 15,
            "do_sample": False,
            "return_dict_in_generate": True,
            "output_logits": True,
        }
        written = placed.generate(**inputs, **options)
        gradient = [parameter.grad.cpu().clone() for parameter in placed.parameters()]
        return (
            found.logits.detach().cpu()[mask.bool()],
            written.sequences.cpu(),
            torch.stack(written.logits).cpu(),
            gradient,
        )

    wanted, sequences, scores, gradient = results("cpu")
    logits, found_sequences, found_scores, found_gradient = results("cuda")
    torch.testing.assert_close(logits, wanted, rtol=FLOAT32, atol=FLOAT32)
    assert torch.equal(found_sequences, sequences)
    torch.testing.assert_close(found_scores, scores, rtol=FLOAT32, atol=FLOAT32)
    assert_same_gradients(found_gradient, gradient, FLOAT32)


def test_a_memory_file_of_one_device_goes_on_on_the_other(tmp_path):
    model, ids = infini_gpt2(), token_ids(1, 45)
    with torch.no_grad():
        wanted = model(ids).logits[:, 30:]
        for here, there in (("cpu", "cuda"), ("cuda", "cpu")):
            cache = model.to(here)(ids[:, :30].to(here), use_cache=True).past_key_values
            cache.save_pretrained(tmp_path / f"{here}.safetensors", model)
            cache = InfiniCache.from_pretrained(tmp_path / f"{here}.safetensors", model.to(there))
            logits = model(ids[:, 30:].to(there), past_key_values=cache).logits.cpu()
            torch.testing.assert_close(logits, wanted, rtol=FLOAT32, atol=FLOAT32)


@pytest.mark.parametrize("archive", [True, "int8"])
def test_an_archive_is_on_the_host_and_a_recall_the_same_as_on_a_cpu(archive):
    options = dict(update_rule="none", keep_score="recent", local_segments=1, kept_tokens=70)
    model, ids = infini_gpt2(position_encoding="segment", **options), token_ids(2, 400)
    caches = {}
    for device in ("cpu", "cuda"):
        caches[device] = cache = InfiniCache(model.config, archive=archive)
        with torch.no_grad():
            for piece in ids.to(device).split([150, 1, 1, 248], 1):
                model.to(device)(piece, use_cache=True, cache=cache)
    rows = [cache.archive.rows() for cache in caches.values()]
    assert all(row.tail.device.type == "cpu" for row in rows[1])
    on_cpu, on_gpu = (cache.recall(ids[0, 90:97]) for cache in caches.values())
    for one, two in zip(on_cpu.layers, on_gpu.layers, strict=True):
        assert two.state.local_key.is_cuda
        assert torch.equal(one.state.kept_position, two.state.kept_position.cpu())
        # where a number is halfway between two of 8 bits, it may go to either
        most = 1 / 100 * float(one.state.local_key.abs().max()) if archive == "int8" else FLOAT32
        torch.testing.assert_close(
            one.state.local_key, two.state.local_key.cpu(), atol=most, rtol=FLOAT32
        )
