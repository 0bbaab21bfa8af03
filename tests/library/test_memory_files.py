"""Memory files: what is loaded goes on bit for bit as what was saved, and nothing else is taken for
it."""

import copy
import multiprocessing

import pytest
import torch

from hf_infini import InfiniCache
from hf_infini.cache.files import (
    MemoryFileError,
    check_model,
    describe_model,
    read_memory_file,
    write_memory_file,
)
from memories import MIXED, VARIANTS, each, mha, read
from models import FLOAT32, causal_mha, gpt2, in_calls, infini_gpt2, token_ids


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The memory file of a plain model."""
    model, file = infini_gpt2(), tmp_path_factory.mktemp("kept") / "memory.safetensors"
    read(model, input_ids=token_ids(1, 20)).save_pretrained(file, model)
    return file


processes = multiprocessing.get_context(
    "fork" if "fork" in multiprocessing.get_all_start_methods() else None
)

# --- what is loaded goes on as what was saved
# --------------------------------------------------------------------------------------------------


@each(VARIANTS)
def test_a_loaded_memory_goes_on_as_the_live_one(variant, tmp_path):
    """Into another object of the same model: bit for bit in chunks and single steps, and as one
    pass over everything."""
    make, options = variant
    model, ids = make(**options), token_ids(2, 60)
    ids[:, 5] = 0  # an end of text, which stays out of the memory where the configuration says so
    live = read(model, input_ids=ids[:, :29])
    live.save_pretrained(tmp_path / "two.safetensors", model, text_sha256=["a", "b"])
    other = make(**options)
    loaded = InfiniCache.from_pretrained(tmp_path / "two.safetensors", other)
    assert loaded.nbytes() == live.nbytes() and loaded.get_seq_length() == 29
    cuts = (29, 36, 37, 38, 39, 40, 41, 60)  # single steps over the border of a segment
    output = in_calls(other, ids, cuts, loaded)
    assert torch.equal(output, in_calls(model, ids, cuts, live))
    with torch.no_grad():
        torch.testing.assert_close(output, model(ids).logits[:, 29:], rtol=FLOAT32, atol=FLOAT32)
    record = read_memory_file(tmp_path / "two.safetensors")[0]
    assert (
        record["tokens_seen"] == [29, 29]
        and record["text_sha256"] == ["a", "b"]
        and record["columns"] == 29
    )
    assert record["model"] == describe_model(model)


@each(MIXED)
def test_rows_are_chosen_and_repeated(variant, tmp_path):
    make, options = variant
    model, ids = make(**options), token_ids(3, 21)
    read(model, input_ids=ids).save_pretrained(tmp_path / "three.safetensors", model)
    repeated = InfiniCache.from_pretrained(tmp_path / "three.safetensors", model)
    repeated.batch_select_indices(torch.tensor([1]))
    repeated.batch_repeat_interleave(2)
    prompt = token_ids(2, 9, seed=1)
    output = in_calls(model, prompt, (0, 9), repeated)
    for row in range(2):
        alone = model(torch.cat([ids[1:2], prompt[row : row + 1]], 1)).logits[:, 21:]
        torch.testing.assert_close(output[row : row + 1], alone, rtol=FLOAT32, atol=FLOAT32)


def test_going_on_changes_neither_the_file_nor_what_was_loaded_before(tmp_path):
    """Single steps write into the cache's window in place, and a file may be written over while it
    is in use."""
    model, ids, file = infini_gpt2(), token_ids(1, 40), tmp_path / "deep" / "memory.safetensors"
    read(model, input_ids=ids[:, :20]).save_pretrained(file, model)
    before = file.read_bytes()
    first, kept = (InfiniCache.from_pretrained(file, model) for _ in range(2))
    wanted = in_calls(model, ids, (20, 40), copy.deepcopy(kept))
    steps = in_calls(model, ids, range(20, 27), first)
    assert file.read_bytes() == before
    first.save_pretrained(file, model)
    assert file.read_bytes() != before and [path.name for path in file.parent.iterdir()] == [
        file.name
    ]
    assert torch.equal(in_calls(model, ids, (20, 40), kept), wanted)
    again = InfiniCache.from_pretrained(file, model)
    assert torch.equal(in_calls(model, ids, (26, 40), again), in_calls(model, ids, (26, 40), first))
    torch.testing.assert_close(steps, wanted[:, :6], rtol=FLOAT32, atol=FLOAT32)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    """No room for the whole file: the system stops the write in the middle."""
    resource = pytest.importorskip("resource")
    model, file = infini_gpt2(), tmp_path / "memory.safetensors"
    cache = read(model, input_ids=token_ids(1, 20))
    cache.save_pretrained(file, model)
    before, (soft, hard) = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    in_calls(model, token_ids(1, 3), (0, 3), cache)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
        with pytest.raises(OSError, match="File too large"):
            cache.save_pretrained(file, model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_dtypes_are_kept(tmp_path):
    model = infini_gpt2(local_segments=1).to(torch.bfloat16)
    live = read(model, input_ids=token_ids(1, 30))
    live.save_pretrained(tmp_path / "m", model)
    loaded = InfiniCache.from_pretrained(tmp_path / "m", model)
    for name, tensor in live.state.tensors().items():
        assert (
            torch.equal(getattr(loaded.state, name), tensor)
            and getattr(loaded.state, name).dtype == tensor.dtype
        ), name
    assert (loaded.state.memory.dtype, loaded.state.local_key.dtype) == (
        torch.float32,
        torch.bfloat16,
    )
    with pytest.raises(
        MemoryFileError, match="dtype is 'bfloat16' in the file and 'float32' in the model"
    ):
        InfiniCache.from_pretrained(tmp_path / "m", infini_gpt2(local_segments=1))


def test_windows_of_autocast(tmp_path):
    """Its keys are in bfloat16; it goes on as the live cache inside of autocast, and can go on
    outside."""
    model = infini_gpt2(memory_conv=3, layers=[0, 2])
    with torch.autocast("cpu", torch.bfloat16):
        live = read(model, token_ids(1, 20))
        live.save_pretrained(tmp_path / "m", model)
        loaded = InfiniCache.from_pretrained(tmp_path / "m", model)
        wanted = in_calls(model, token_ids(1, 9), (0, 4, 5, 9), live)
        assert torch.equal(in_calls(model, token_ids(1, 9), (0, 4, 5, 9), loaded), wanted)
    outside = InfiniCache.from_pretrained(tmp_path / "m", model)
    assert outside.state.local_key.dtype == torch.bfloat16
    assert in_calls(model, token_ids(1, 9), (0, 9), outside).isfinite().all()


# --- who writes
# --------------------------------------------------------------------------------------------------


def write_often(file, record, number) -> None:
    for _ in range(150):
        write_memory_file(
            file, {"numbers": torch.full((50_000,), number)}, record | {"columns": number}
        )


def test_a_reader_finds_a_whole_file_whoever_writes(tmp_path):
    """Real processes: neither a file of which a part is another's, nor the header of one and the
    tensors of another."""
    file = tmp_path / "memory.safetensors"
    record = {
        "model": describe_model(infini_gpt2()),
        "columns": 1,
        "tokens_seen": [1],
        "text_sha256": None,
    }
    write_memory_file(file, {"numbers": torch.full((50_000,), 1)}, record)
    writers = [
        processes.Process(target=write_often, args=(file, record, number)) for number in (2, 3)
    ]
    for writer in writers:
        writer.start()
    reads = []
    while any(writer.is_alive() for writer in writers):
        found, tensors = read_memory_file(file)
        assert (tensors["numbers"] == found["columns"]).all()
        reads.append(found["columns"])
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert set(reads) >= {2, 3}  # both have written while it was read
    assert list(file.parent.iterdir()) == [file]


# --- what is refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_length": 4}, "tokens_per_segment is 8 in the file and 4 in the model"),
        ({"layers": [0, 1]}, r"infini_layers is \[0, 1, 2\] in the file and \[0, 1\] in the model"),
        ({"memory_conv": 2}, "memory_conv is 0 in the file and 2 in the model"),
        (
            {"mask_special_tokens": False},
            r"tokens_kept_out is \[0, 0, None\] in the file and \[\] in the model",
        ),
        (
            {"n_embd": 16, "n_layer": 2},
            "n_embd is 32 in the file and 16 in the model; n_layer is 3 in the file and 2 in",
        ),
        ({"seed": 1}, "weights_sha256 is"),
    ],
)
def test_another_model_is_refused_with_what_differs(kept, options, message):
    with pytest.raises(
        MemoryFileError,
        match=f"holds the memory of another model: .*{message}.* load the model that wrote",
    ):
        InfiniCache.from_pretrained(kept, infini_gpt2(**options))


def test_the_other_family_and_models_without_a_memory_are_refused(kept):
    with pytest.raises(
        MemoryFileError,
        match="model_type is 'infini_gpt2' in the file and 'causal_mha' in the model",
    ):
        InfiniCache.from_pretrained(kept, mha())
    for model in (gpt2(), causal_mha()):
        with pytest.raises(
            ValueError, match=f"this {type(model.config).__name__} has no layers with a memory"
        ):
            InfiniCache.from_pretrained(kept, model)


def test_what_changes_nothing_in_a_memory_is_not_asked_for(kept, tmp_path):
    """Options of training alone, the same layers in another order, and the head behind the base
    model."""
    same = infini_gpt2(attn_pdrop=0.3, gate_init=5.0, layers=[2, 1, 0], use_cache=False)
    InfiniCache.from_pretrained(kept, same)
    model = mha()
    read(model, input_ids=token_ids(1, 20)).save_pretrained(tmp_path / "m", model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    InfiniCache.from_pretrained(tmp_path / "m", model)
    InfiniCache.from_pretrained(tmp_path / "m", model.transformer)
    weight = model.transformer.h[0].attn.gate.weight.data
    weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))
    with pytest.raises(MemoryFileError, match="weights_sha256 is"):
        InfiniCache.from_pretrained(tmp_path / "m", model)


def test_options_that_came_after_a_file_had_their_defaults(kept, tmp_path):
    record, tensors = read_memory_file(kept)
    del record["model"]["config"]["feature_map"]
    write_memory_file(tmp_path / "older", tensors, record)
    InfiniCache.from_pretrained(tmp_path / "older", infini_gpt2())
    with pytest.raises(
        MemoryFileError, match="feature_map is 'elu' in the file and 'exp' in the model"
    ):
        InfiniCache.from_pretrained(tmp_path / "older", infini_gpt2(feature_map="exp"))
    record["model"]["config"]["rotation"] = 3
    write_memory_file(tmp_path / "newer", tensors, record)
    with pytest.raises(MemoryFileError, match="rotation is 3 in the file and None in the model"):
        InfiniCache.from_pretrained(tmp_path / "newer", infini_gpt2())


def test_adapters_are_merged_before_a_memory_is_kept(tmp_path):
    peft = pytest.importorskip("peft", reason="pip install peft")
    model = infini_gpt2()
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["c_attn"], init_lora_weights=False)
    ).eval()
    prompted = peft.get_peft_model(
        infini_gpt2(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    cache = read(adapted, token_ids(1, 20))
    for wrapped in (adapted, model, prompted):
        with pytest.raises(ValueError, match="merge these first, with merge_and_unload"):
            cache.save_pretrained(tmp_path / "m", wrapped)
    merged = adapted.merge_and_unload()
    read(merged, token_ids(1, 20)).save_pretrained(tmp_path / "m", merged)
    InfiniCache.from_pretrained(tmp_path / "m", merged)


def test_an_option_that_this_version_does_not_know_is_of_another_model():
    model = infini_gpt2()
    record = {"model": describe_model(model)}
    record["model"]["config"]["denominator"] = "shared"
    with pytest.raises(
        MemoryFileError,
        match="file holds the memory of another model: denominator is 'shared' in the file",
    ):
        check_model("file", record, model)
