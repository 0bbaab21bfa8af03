"""torch.compile with the models: one graph, eager's numbers, no compiling again for every token.

What takes most of the time is the generation of code, by "inductor". The backend "eager" runs the
graphs as they are: there the numbers must be eager's, and whether there is one graph is seen as
well.
"""

import contextlib
import copy
import threading

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig, LogitsProcessor

from decoders import decoder
from hf_infini import InfiniCache, patch_model, unpatch_model
from hf_infini.cache.step_cache import StepCache
from hf_infini.compat.cache_name import CACHE, cache_of
from hf_infini.models import generation
from hf_infini.ops.equations import FEW_ROWS, product
from hf_infini.ops.layout.grid import segment_layout
from hf_infini.options import Window
from models import causal_mha, infini_gpt2, token_ids

# Fused kernels round in float32 in other places, and add in another order.
TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
MODELS = {
    "gpt2": lambda: infini_gpt2(n_layer=1, position_encoding="segment"),
    "gated_delta": lambda: infini_gpt2(n_layer=1, update_rule="gated_delta", segment_length=10),
    "convolution": lambda: infini_gpt2(
        n_layer=1, memory_conv=2, local_segments=1, position_encoding="rope"
    ),
    "causal_mha": lambda: causal_mha(
        n_layer=1, attention="infini", segment_length=8, position_encoding="rope"
    ),
    "gemma2": lambda: patch_model(
        decoder("gemma2", num_hidden_layers=2, **MIXED), segment_length=8, local_segments=1
    ),
}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


def rows(padded: bool, packed: bool) -> dict:
    """Three rows of 30 tokens: padding at both ends, three documents in each, special tokens that
    no memory takes."""
    ids = token_ids(3, 30)
    ids[:, 4::9] = 0
    inputs = {"input_ids": ids, "labels": ids}
    if padded:
        inputs["attention_mask"] = torch.ones(3, 30, dtype=torch.long)
        inputs["attention_mask"][0, :7] = inputs["attention_mask"][1, 20:] = 0
        inputs["labels"] = ids.masked_fill(inputs["attention_mask"] == 0, -100)
    if packed:
        inputs["position_ids"] = (
            torch.cat([torch.arange(n) for n in (11, 5, 14)]).expand(3, -1).contiguous()
        )
    return inputs


def loss_and_gradients(model, call, inputs) -> tuple[torch.Tensor, dict]:
    model.zero_grad()
    loss = call(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, padded, backend",
    [
        ("gated_delta", True, "eager"),
        ("convolution", True, "eager"),
        ("causal_mha", False, "inductor"),
    ],
)
def test_a_training_step_is_one_graph_with_eagers_loss_and_gradients(name, padded, backend):
    model, inputs = MODELS[name](), rows(padded, packed=False)
    wanted, wanted_gradients = loss_and_gradients(model, model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    loss, gradients = loss_and_gradients(model, compiled, inputs)
    torch.testing.assert_close(loss, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert gradients.keys() == wanted_gradients.keys()
    for key, gradient in gradients.items():
        difference = float((gradient - wanted_gradients[key]).abs().max())
        assert difference <= GRADIENT_TOLERANCE * float(wanted_gradients[key].abs().max()), key


@pytest.mark.slow
def test_any_padding_is_the_same_graph_and_a_batch_of_another_size_is_not():
    compiled = torch.compile(MODELS["gpt2"](), backend="eager")
    graphs = []
    for batch, tokens, padded in ((3, 30, slice(0, 9)), (3, 30, slice(25, 30)), (2, 17, slice(0))):
        inputs = {
            name: tensor[:batch, :tokens]
            for name, tensor in rows(padded=False, packed=False).items()
        }
        inputs["attention_mask"] = torch.ones(batch, tokens, dtype=torch.long)
        inputs["attention_mask"][0, padded] = 0
        compiled(**inputs, use_cache=False).loss.backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 2] and not counters["graph_break"]


@pytest.mark.slow
def test_packed_rows_leave_the_graph_for_the_layout_alone():
    model, inputs = MODELS["gpt2"](), rows(padded=False, packed=True)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="position_ids can begin any number of documents"
    ):
        torch.compile(model, fullgraph=True, backend="eager")(**inputs)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(
        compiled(**inputs, use_cache=False).loss, model(**inputs, use_cache=False).loss
    )
    assert counters["graph_break"] and all(
        "segment_layout" in reason for reason in counters["graph_break"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name, batch", [("gated_delta", 2), ("gemma2", 1)])
def test_decoding_is_one_graph_for_all_tokens(name, batch):
    """Over three borders of segments, with rows at different places; the second call may still
    compile, no later one."""
    model = MODELS[name]()
    ids = token_ids(batch, 40)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, use_cache=False).logits
        cache = InfiniCache(model.config)
        model(ids[:, :14], attention_mask=mask[:, :14], past_key_values=cache, use_cache=True)
        step = torch.compile(model, fullgraph=True, backend="eager")
        for column in range(14, 40):
            seen = mask[:, : column + 1].contiguous()  # as generate() makes it
            inputs = {"attention_mask": seen, "past_key_values": cache, "use_cache": True}
            with torch._dynamo.config.patch(error_on_recompile=column > 15):
                logits = step(ids[:, column : column + 1], **inputs).logits
            torch.testing.assert_close(
                logits[:, 0], wanted[:, column], rtol=TOLERANCE, atol=TOLERANCE
            )
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_a_graph_multiplies_few_rows_by_a_sum(rows, dtype):
    """In float32, whatever the factors are, where a matrix product would round to their dtype."""
    draw, graphs = torch.Generator().manual_seed(rows), []
    left, right = (
        torch.randn(size, generator=draw).to(dtype) for size in ((2, 3, rows, 16), (2, 1, 16, 20))
    )
    compiled = torch.compile(
        product, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph
    )
    found, exact = compiled(left, right), left.double() @ right.double()
    assert ("@" in graphs[0].code or "matmul" in graphs[0].code) == (rows > FEW_ROWS)
    rounding = torch.finfo(dtype if rows > FEW_ROWS else torch.float32).eps
    torch.testing.assert_close(
        found.double(), exact, rtol=0, atol=16 * rounding * float(exact.abs().max())
    )


@pytest.mark.slow
def test_padded_masks_compile_for_avx2():
    """Of booleans that it pads, torch.compile wrote C++ that is none; other machines are made to
    write for AVX2."""
    attention_mask, memory_mask = (
        torch.ones(3, 30, dtype=torch.long),
        torch.arange(90).view(3, 30) % 7 != 0,
    )
    attention_mask[0, :7] = attention_mask[1, 20:] = 0

    def written(attention_mask, memory_mask):
        return segment_layout(
            3, 30, Window(8, 1), attention_mask=attention_mask, memory_mask=memory_mask
        ).written

    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        compiled = torch.compile(written, fullgraph=True)(attention_mask, memory_mask)
    assert torch.equal(compiled, written(attention_mask, memory_mask))


WINDOW = dict(segment_length=8, local_segments=1, sink_tokens=2)


def half_kept():
    """Five and three kept tokens, half of them by the attention received, half by a score that
    differs between tokens."""
    options = {"kept_tokens": 5, "keep_score": "half", "kept_shares": [1, 0.6]}
    model = patch_model(decoder("llama", num_hidden_layers=2), **WINDOW, **options)
    for name, parameter in model.named_parameters():
        if name.endswith("keep_weight"):
            parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    return model


DECODERS = {
    "gpt2": lambda: infini_gpt2(n_layer=2, n_positions=96),
    "llama": lambda: patch_model(decoder("llama", num_hidden_layers=1), **WINDOW),
    "qwen3": lambda: patch_model(decoder("qwen3", num_hidden_layers=1), **WINDOW, kept_tokens=3),
    "gemma3_text": lambda: patch_model(
        decoder("gemma3_text", num_hidden_layers=2, **MIXED), **WINDOW, layers=[0, 1]
    ),
    "half": half_kept,
    "gated_delta": lambda: infini_gpt2(
        n_layer=1, update_rule="gated_delta", memory_conv=2, position_encoding="rope"
    ),
    "causal_mha": lambda: causal_mha(n_layer=1, attention="infini", segment_length=8),
}
END = 7


class Forced(LogitsProcessor):
    """The rows become these: so each step computes from the same tokens, also where rounding
    chooses another."""

    def __init__(self, rows):
        self.rows = rows

    def __call__(self, input_ids, scores):
        chosen = self.rows[:, input_ids.shape[1], None]
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


def generated(model, rows, backend=None, begin=13, **options):
    """`rows` `[batch, tokens]` by generate(), the first `begin` as the prompt; `backend`: by
    torch.compile, as on a GPU."""
    if backend:
        options["compile_config"] = CompileConfig(backend=backend, fullgraph=True)
        options["compile_config"]._compile_all_devices = True
    mask = torch.ones_like(rows[:, :begin])
    mask[0, :4] = 0
    options = {
        "attention_mask": mask,
        "eos_token_id": END,
        "pad_token_id": 0,
        "output_logits": True,
    } | options
    options = {"logits_processor": [Forced(rows)]} | options
    options |= {"max_length": rows.shape[1], "return_dict_in_generate": True}
    return model.generate(rows[:, :begin], **options)


def rows_of_text(seed=0, batch=3):
    rows = token_ids(batch, 60, seed=seed).clamp(min=8)
    rows[1, 30] = END
    rows[1, 31:] = 0
    return rows


def assert_same_generation(found, wanted, tolerance):
    assert torch.equal(found.sequences, wanted.sequences)
    for one, other in zip(found.logits, wanted.logits, strict=True):
        unfinished = torch.isfinite(other).all(-1)
        torch.testing.assert_close(
            one[unfinished], other[unfinished], rtol=tolerance, atol=tolerance
        )
    states = cache_of(found).tensors()
    for name, tensor in cache_of(wanted).tensors().items():
        torch.testing.assert_close(states[name], tensor, rtol=tolerance, atol=tolerance)


def addresses(cache) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in cache.tensors().items() if tensor.numel()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype, backend",
    [
        ("gpt2", torch.float32, "eager"),
        ("llama", torch.bfloat16, "aot_eager"),
        ("llama", torch.float32, "inductor"),
        ("qwen3", torch.float32, "eager"),
        ("gemma3_text", torch.float32, "eager"),
        ("half", torch.float32, "aot_eager"),
        ("gated_delta", torch.float32, "eager"),
        ("causal_mha", torch.float32, "eager"),
    ],
)
def test_generate_compiles_one_step_for_all_tokens(name, dtype, backend):
    """Over five borders, with left padding and a row that ends early; the next generation has the
    same graph and tensors at the same addresses, and what the one before has left stays."""
    model, tolerance = DECODERS[name]().to(dtype), 0.1 if dtype is torch.bfloat16 else TOLERANCE
    first, second = rows_of_text(), rows_of_text(seed=1)
    wanted = [generated(model, rows) for rows in (first, second)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = generated(model, first, backend)
        before = addresses(generation.step_caches[model])
        again = generated(model, second, backend)
    assert counters["stats"]["unique_graphs"] == 1
    assert addresses(generation.step_caches[model]) == before
    assert not set(before.values()) & {
        *addresses(cache_of(found)).values(),
        *addresses(cache_of(again)).values(),
    }
    assert_same_generation(found, wanted[0], tolerance)
    assert_same_generation(again, wanted[1], tolerance)


@pytest.mark.slow
def test_compiled_generations_go_on_from_caches_copies_and_states():
    model, rows = DECODERS["qwen3"](), rows_of_text(batch=2)
    rows[1] = token_ids(1, 60, seed=3).clamp(min=8)
    caches = {}
    for backend in (None, "eager"):
        cache = cache_of(generated(model, rows[:, :30], backend))
        state, copied = cache.layers[0].state, copy.deepcopy(cache)
        seen = {name: tensor.clone() for name, tensor in state.tensors().items()}
        mask = torch.ones_like(rows)
        mask[0, :4] = 0
        for one in (cache, copied, cache):  # each of which moves in where the other was
            width = one.get_seq_length() + 8
            new = {"begin": width, "attention_mask": mask[:, :width], CACHE: one}
            found = generated(model, rows[:, : width + 7], backend, **new)
        with torch.no_grad():
            model(rows[:, -3:], **{CACHE: cache})  # by plain calls
        caches[backend] = cache, copied, found
        assert all(torch.equal(tensor, seen[name]) for name, tensor in state.tensors().items())
    assert counters["stats"]["unique_graphs"] == 1
    for one, other in zip(caches["eager"][:2], caches[None][:2], strict=True):
        assert one.get_seq_length() == other.get_seq_length()
        for name, tensor in other.tensors().items():
            torch.testing.assert_close(one.tensors()[name], tensor, rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(caches["eager"][2].sequences, caches[None][2].sequences)


@pytest.mark.slow
def test_rows_without_all_sinks_take_their_first_steps_as_they_are():
    model, rows = DECODERS["llama"](), rows_of_text()
    # one token in the first row
    wanted, found = (generated(model, rows, backend, begin=5) for backend in (None, "eager"))
    assert_same_generation(found, wanted, TOLERANCE)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_no_step_but_the_first_reads_values_back(monkeypatch):
    """A GPU would be waited for. Of rows that complete their segments one after the other, with
    kept tokens."""

    class NeverReads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert function not in (
                torch.ops.aten._local_scalar_dense.default,
                torch.ops.aten.nonzero.default,
            )
            return function(*args, **(kwargs or {}))

    begin, end, steps = StepCache.begin_step, StepCache.end_step, []

    def begin_step(self, cache):
        with NeverReads() if steps else contextlib.nullcontext():
            return begin(self, cache)

    def end_step(self, layers):
        steps.append(self.state.tokens_seen)
        with NeverReads():
            end(self, layers)

    monkeypatch.setattr(StepCache, "begin_step", begin_step)
    monkeypatch.setattr(StepCache, "end_step", end_step)
    generated(half_kept(), rows_of_text(), "eager")
    assert len(steps) == 46 and counters["stats"]["unique_graphs"] == 1


def test_generate_does_not_compile_what_it_cannot_and_says_so(monkeypatch):
    rows, said = rows_of_text()[:, :18], []
    monkeypatch.setattr(generation.logger, "warning_once", said.append)
    mixed = patch_model(decoder("gemma2", num_hidden_layers=2, **MIXED), segment_length=8)
    generated(mixed, rows, "eager")
    model = DECODERS["gpt2"]()
    generated(model, rows, "eager", output_hidden_states=True)
    generated(model, rows, "eager", num_beams=2, logits_processor=[])
    # and not a failure inside of a graph
    with pytest.raises(ValueError, match="position 96 is beyond"):
        generated(model, token_ids(3, 100), "eager")
    thread = threading.Thread(target=generated, args=(model, rows, "eager"))
    thread.start()
    thread.join()
    positions = torch.arange(13).expand(3, -1)
    found = generated(model, rows, "eager", position_ids=positions)
    assert_same_generation(found, generated(model, rows, position_ids=positions), 0.0)
    reasons = [text.rpartition("because of ")[2] for text in said]
    expected = [
        "layers without a memory",
        "outputs of layers",
        "beams",
        "a text that may exceed n_positions",
    ]
    expected += ["another thread than the main one", "position_ids"]
    assert reasons == [f"{reason}." for reason in expected]
    generated(model, rows)  # a CPU
    generated(model, rows, "eager", disable_compile=True)
    assert len(said) == 6 and not counters["stats"] and model not in generation.step_caches


@pytest.mark.slow
def test_a_model_that_is_patched_anew_and_a_copy_have_steps_of_their_own():
    model, rows = DECODERS["qwen3"](), rows_of_text(batch=2)
    generated(model, rows, "eager")
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data.mul_(1.1)
    patch_model(unpatch_model(model), segment_length=5, kept_tokens=4)
    for other in (copied, model):
        found = generated(other, rows, "eager")
        assert_same_generation(found, generated(other, rows), TOLERANCE)
    unpatch_model(model)
    assert model not in generation.step_caches and copied in generation.step_caches


@pytest.mark.slow
def test_a_generation_in_another_thread_leaves_the_compiled_one_alone():
    model, rows = DECODERS["llama"](), rows_of_text()
    wanted = generated(model, rows)

    class Meanwhile(LogitsProcessor):
        """Whole generations of another thread, between two steps of this one."""

        def __call__(self, ids, scores):
            for options in ({}, {"use_cache": False}):
                thread = threading.Thread(
                    target=generated, args=(model, rows[:, :16]), kwargs=options
                )
                thread.start()
                thread.join()
            return scores

    found = generated(model, rows, "eager", logits_processor=[Meanwhile(), Forced(rows)])
    assert counters["stats"]["unique_graphs"] == 1
    assert_same_generation(found, wanted, TOLERANCE)


@pytest.mark.slow
def test_a_loop_of_ones_own_compiles_only_steps_and_a_failed_one_leaves_no_whole_cache():
    model, rows = DECODERS["qwen3"](), token_ids(2, 30).clamp(min=8)
    config = CompileConfig(backend="eager", fullgraph=True)
    config._compile_all_devices = True
    step = model.get_compiled_call(config)
    told = [
        {},
        {"position_ids": torch.zeros(2, 1, dtype=torch.long)},
        {"attention_mask": torch.tensor([[1], [0]])},
    ]
    told += [{"memory_mask": torch.tensor([[0], [1]])}, {"return_dict": False}, {}, {}]
    logits, caches = [], [InfiniCache(model.config) for _ in range(2)]
    for call, cache in zip((model, step), caches, strict=True):
        with torch.no_grad():
            model(rows[:, :20], **{CACHE: cache})
            given = (
                {"input_ids": rows[:, 20 + place : 21 + place], **more}
                for place, more in enumerate(told)
            )
            logits.append(
                torch.cat([call(use_cache=True, **{CACHE: cache}, **more)[0] for more in given], 1)
            )
    torch.testing.assert_close(*logits, rtol=TOLERANCE, atol=TOLERANCE)
    for name, tensor in caches[0].tensors().items():
        torch.testing.assert_close(
            caches[1].tensors()[name], tensor, rtol=TOLERANCE, atol=TOLERANCE
        )
    assert counters["stats"]["unique_graphs"] >= 1

    with pytest.raises(IndexError):
        step(input_ids=rows[:, :1] + 10**6, use_cache=True, **{CACHE: caches[1]})
    for again in (step, model):
        with pytest.raises(ValueError, match="failed halfway"):
            again(input_ids=rows[:, :1], use_cache=True, **{CACHE: caches[1]})


@pytest.mark.slow
def test_a_compiled_model_archives_and_recalls_as_it_does_without():
    """Of pieces and of steps, of which no later one compiles again; `generate` compiles none."""
    window = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2, "kept_tokens": 70}
    options = {"update_rule": "none", "keep_score": "recent", "mask_special_tokens": False}
    small = decoder("llama", num_hidden_layers=1, max_position_embeddings=4096)
    model, ids, graphs = patch_model(small, **window, **options).eval(), token_ids(1, 180), []
    compiled, pieces = torch.compile(model, backend="eager"), ids.split([100, 68, *[1] * 12], 1)
    caches, logits = [], []
    for net in (model, compiled):
        caches.append(InfiniCache(model.config, archive=True))
        logits.append([])
        with torch.no_grad():
            for piece in pieces:
                found = net(input_ids=piece, use_cache=True, **{CACHE: caches[-1]})
                logits[-1].append(found.logits)
                graphs.append(counters["stats"]["unique_graphs"])
    torch.testing.assert_close(*(torch.cat(each, 1) for each in logits), rtol=1e-4, atol=1e-4)
    assert graphs[-1] == graphs[-7]
    rows = [cache.archive.rows()[0] for cache in caches]
    assert torch.equal(rows[0].ids, rows[1].ids) and len(rows[0].blocks) == len(rows[1].blocks)
    every = torch.arange(rows[0].tokens)
    for one, other in zip(*(row.states(0, row.found(every)) for row in rows), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    asked, options = ids[:, 40:48], {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    said = []
    for net, cache in zip((model, compiled), caches, strict=True):
        cache = cache.recall(asked[0])
        mask = cache.attention_mask(torch.ones_like(asked))
        said.append(net.generate(asked, attention_mask=mask, **options, **{CACHE: cache}))
        assert cache.archive.rows()[0].tokens == 180 + 8 + 3
    assert torch.equal(*said)
