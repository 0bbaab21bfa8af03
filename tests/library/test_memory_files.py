"""Memory files: what is loaded goes on bit for bit as what was saved, and nothing else is taken for it."""

import copy

import pytest
import torch
from safetensors.torch import save_file

from hf_infini import InfiniCache
from hf_infini.cache.files import MemoryFileError, describe_model, read_memory_file, read_record, write_memory_file
from memories import MIXED, VARIANTS, calls, each, mha, read
from models import FLOAT32, causal_mha, generate, gpt2, infini_gpt2, left_padded, token_ids

# --- what is loaded goes on as what was saved --------------------------------------------------------------------------


@each(VARIANTS)
def test_a_loaded_memory_goes_on_as_the_live_one(variant, tmp_path):
    """Into another object of the same model: bit for bit in chunks and single steps, and as one pass over everything."""
    make, options = variant
    model, ids = make(**options), token_ids(2, 60)
    ids[:, 5] = 0  # an end of text, which stays out of the memory where the configuration says so
    live = read(model, input_ids=ids[:, :29])
    live.save_pretrained(tmp_path / "two.safetensors", model, text_sha256=["a", "b"])
    other = make(**options)
    loaded = InfiniCache.from_pretrained(tmp_path / "two.safetensors", other)
    assert loaded.nbytes() == live.nbytes() and loaded.get_seq_length() == 29
    cuts = (29, 36, 37, 38, 39, 40, 41, 60)  # single steps over the border of a segment
    output = calls(other, loaded, ids, cuts)
    assert torch.equal(output, calls(model, live, ids, cuts))
    with torch.no_grad():
        torch.testing.assert_close(output, model(ids).logits[:, 29:], rtol=FLOAT32, atol=FLOAT32)
    record = read_record(tmp_path / "two.safetensors")
    assert record["tokens_seen"] == [29, 29] and record["text_sha256"] == ["a", "b"] and record["columns"] == 29
    assert record["model"] == describe_model(model)


@pytest.mark.slow
@each(VARIANTS)
def test_ragged_rows(variant, tmp_path):
    """A left-padded batch of texts, each with a prompt of its own, of another length: as each text and prompt alone."""
    make, options = variant
    model = make(**options)
    texts = [token_ids(1, length, seed=length) for length in (19, 8, 13, 1)]
    prompts = [token_ids(1, length, seed=length) for length in (3, 5, 2, 4)]
    live = read(model, **left_padded(texts))
    live.save_pretrained(tmp_path / "four.safetensors", model)
    assert read_record(tmp_path / "four.safetensors")["tokens_seen"] == [19, 8, 13, 1]
    inputs = left_padded(prompts)
    found = []
    for cache in (live, InfiniCache.from_pretrained(tmp_path / "four.safetensors", model)):
        mask = cache.attention_mask(inputs["attention_mask"])
        call = {"attention_mask": mask, "return_dict_in_generate": True, "output_logits": True}
        found.append(generate(model, 12, input_ids=inputs["input_ids"], past_key_values=cache, **call))
    live, loaded = (torch.stack(output.logits, 1) for output in found)
    assert torch.equal(live, loaded) and torch.equal(found[0].sequences, found[1].sequences)
    for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        whole = torch.cat([text, prompt], 1)
        alone = generate(model, 12, input_ids=whole, return_dict_in_generate=True, output_logits=True)
        torch.testing.assert_close(loaded[row], torch.stack(alone.logits, 1)[0], rtol=FLOAT32, atol=FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"do_sample": True, "top_k": 5, "num_return_sequences": 2},
        {"num_beams": 3, "num_return_sequences": 2},
    ],
    ids=["greedy", "sampling", "beams"],
)
@each(MIXED)
def test_generating_from_one_memory_for_several_prompts(variant, how, tmp_path):
    make, options = variant
    model, text = make(**options), token_ids(1, 27)
    read(model, input_ids=text).save_pretrained(tmp_path / "one.safetensors", model)
    prompts = [token_ids(1, length, seed=length) for length in (6, 1, 30)]  # one of them longer than the text
    torch.manual_seed(0)
    whole = generate(model, 6, **left_padded([torch.cat([text, prompt], 1) for prompt in prompts]), **how)
    cache, inputs = InfiniCache.from_pretrained(tmp_path / "one.safetensors", model), left_padded(prompts)
    cache.batch_repeat_interleave(3)
    mask = cache.attention_mask(inputs["attention_mask"])
    cache.batch_repeat_interleave(max(how.get("num_beams", 1), how.get("num_return_sequences", 1)))
    torch.manual_seed(0)
    call = {"input_ids": inputs["input_ids"], "attention_mask": mask, "past_key_values": cache}
    found = generate(model, 6, **call, **how)
    assert len(found) == 3 * how.get("num_return_sequences", 1)
    assert torch.equal(found[:, 30:], whole[:, 57:]) and len({tuple(row.tolist()) for row in found}) == len(found)


@each(MIXED)
def test_rows_are_chosen_and_repeated(variant, tmp_path):
    make, options = variant
    model, ids = make(**options), token_ids(3, 21)
    live = read(model, input_ids=ids)
    live.save_pretrained(tmp_path / "three.safetensors", model)
    chosen = InfiniCache.from_pretrained(tmp_path / "three.safetensors", model, rows=[2, 0])
    live.batch_select_indices(torch.tensor([2, 0]))
    prompt = token_ids(2, 9, seed=1)
    assert torch.equal(calls(model, chosen, prompt, (0, 9)), calls(model, live, prompt, (0, 9)))
    repeated = InfiniCache.from_pretrained(tmp_path / "three.safetensors", model, rows=[1])
    repeated.batch_repeat_interleave(2)
    output = calls(model, repeated, prompt, (0, 9))
    for row in range(2):
        alone = model(torch.cat([ids[1:2], prompt[row : row + 1]], 1)).logits[:, 21:]
        torch.testing.assert_close(output[row : row + 1], alone, rtol=FLOAT32, atol=FLOAT32)
    for rows in ([3], [-1, 0]):
        with pytest.raises(ValueError, match=r"rows must be numbers from 0 to 2, the rows of .*three.safetensors; got \["):
            InfiniCache.from_pretrained(tmp_path / "three.safetensors", model, rows=rows)


def test_going_on_changes_neither_the_file_nor_what_was_loaded_before(tmp_path):
    """Single steps write into the cache's window in place, and a file may be written over while it is in use."""
    model, ids, file = infini_gpt2(), token_ids(1, 40), tmp_path / "deep" / "memory.safetensors"
    read(model, input_ids=ids[:, :20]).save_pretrained(file, model)
    before = file.read_bytes()
    first, kept = (InfiniCache.from_pretrained(file, model) for _ in range(2))
    wanted = calls(model, copy.deepcopy(kept), ids, (20, 40))
    steps = calls(model, first, ids, range(20, 27))
    assert file.read_bytes() == before
    first.save_pretrained(file, model)
    assert file.read_bytes() != before and [path.name for path in file.parent.iterdir()] == [file.name]
    assert torch.equal(calls(model, kept, ids, (20, 40)), wanted)
    again = InfiniCache.from_pretrained(file, model)
    assert torch.equal(calls(model, again, ids, (26, 40)), calls(model, first, ids, (26, 40)))
    torch.testing.assert_close(steps, wanted[:, :6], rtol=FLOAT32, atol=FLOAT32)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    """No room for the whole file: the system stops the write in the middle."""
    resource = pytest.importorskip("resource")
    model, file = infini_gpt2(), tmp_path / "memory.safetensors"
    cache = read(model, input_ids=token_ids(1, 20))
    cache.save_pretrained(file, model)
    before, (soft, hard) = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    calls(model, cache, token_ids(1, 3), (0, 3))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
        with pytest.raises(OSError, match="File too large"):
            cache.save_pretrained(file, model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_the_same_memory_is_the_same_bytes(tmp_path):
    for name in ("one", "other"):
        model = infini_gpt2(layers=[0, 2])
        read(model, input_ids=token_ids(2, 20)).save_pretrained(tmp_path / name, describe_model(model))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_a_new_document_begins_from_the_learned_start(tmp_path):
    model = infini_gpt2(memory_init="learned")
    for block in model.transformer.h:
        block.attn.start_memory.data.normal_()
    live = read(model, input_ids=token_ids(1, 20))
    live.save_pretrained(tmp_path / "m", model)
    loaded = InfiniCache.from_pretrained(tmp_path / "m", model)
    ids, positions = token_ids(1, 30, seed=1), torch.arange(30)[None]  # going back to 0: another document
    with torch.no_grad():
        output = model(ids, position_ids=positions, past_key_values=loaded, use_cache=True).logits
        assert torch.equal(output, model(ids, position_ids=positions, past_key_values=live, use_cache=True).logits)
        torch.testing.assert_close(output, model(ids).logits, rtol=FLOAT32, atol=FLOAT32)


def test_dtypes_are_kept(tmp_path):
    model = infini_gpt2(local_segments=1).to(torch.bfloat16)
    live = read(model, input_ids=token_ids(1, 30))
    live.save_pretrained(tmp_path / "m", model)
    loaded = InfiniCache.from_pretrained(tmp_path / "m", model)
    for name, tensor in live.state.tensors().items():
        assert torch.equal(getattr(loaded.state, name), tensor) and getattr(loaded.state, name).dtype == tensor.dtype, name
    assert (loaded.state.memory.dtype, loaded.state.local_key.dtype) == (torch.float32, torch.bfloat16)
    with pytest.raises(MemoryFileError, match="dtype is bfloat16 in the file and float32 in the model"):
        InfiniCache.from_pretrained(tmp_path / "m", infini_gpt2(local_segments=1))


def test_size_does_not_depend_on_the_text(tmp_path):
    model = infini_gpt2(position_encoding="segment")
    sizes = set()
    for tokens in (100, 900, 9000):
        cache = read(model, input_ids=token_ids(1, tokens))
        cache.save_pretrained(tmp_path / "m", model)
        sizes.add((tmp_path / "m").stat().st_size)
    # Digits of the token counts move the header by steps of 8 bytes
    assert max(sizes) - min(sizes) <= 8 and cache.nbytes() < min(sizes) < cache.nbytes() + 6000


# --- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The memory file of a plain model."""
    model, file = infini_gpt2(), tmp_path_factory.mktemp("kept") / "memory.safetensors"
    read(model, input_ids=token_ids(1, 20)).save_pretrained(file, model)
    return file


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_length": 4}, "tokens_per_segment is 8 in the file and 4 in the model"),
        ({"update_rule": "delta"}, "update_rule is 'linear' in the file and 'delta' in the model"),
        ({"feature_map": "exp"}, "feature_map is 'elu' in the file and 'exp' in the model"),
        ({"local_segments": 1}, "local_segments is 0 in the file and 1 in the model"),
        ({"layers": [0, 1]}, r"infini_layers is \[0, 1, 2\] in the file and \[0, 1\] in the model"),
        ({"position_encoding": "segment"}, "position_encoding is 'learned' in the file and 'segment' in the model"),
        ({"memory_conv": 2}, "memory_conv is 0 in the file and 2 in the model"),
        ({"memory_init": "learned"}, "memory_init is 'zeros' in the file and 'learned' in the model"),
        ({"mask_special_tokens": False}, r"tokens_kept_out is \[0, 0, None\] in the file and \[\] in the model"),
        ({"n_embd": 16, "n_layer": 2}, "n_embd is 32 in the file and 16 in the model; n_layer is 3 in the file and 2 in"),
        ({"seed": 1}, "the weights are not the same"),
    ],
)
def test_another_model_is_refused_with_what_differs(kept, options, message):
    with pytest.raises(MemoryFileError, match=f"holds the memory of another model: .*{message}.* load the model that wrote"):
        InfiniCache.from_pretrained(kept, infini_gpt2(**options))


def test_the_other_family_and_models_without_a_memory_are_refused(kept):
    with pytest.raises(MemoryFileError, match="model_type is 'infini_gpt2' in the file and 'causal_mha' in the model"):
        InfiniCache.from_pretrained(kept, mha())
    for model in (gpt2(), causal_mha()):
        with pytest.raises(ValueError, match=f"a {type(model).__name__} without Infini-attention has no memory to keep"):
            InfiniCache.from_pretrained(kept, model)


def test_what_changes_nothing_in_a_memory_is_not_asked_for(kept, tmp_path):
    """Options of training alone, the same segments by another name, and the head behind the base model."""
    same = infini_gpt2(attn_pdrop=0.3, gate_init=5.0, segment_length=None, n_segments=8, layers=[2, 1, 0], use_cache=False)
    InfiniCache.from_pretrained(kept, same)
    model = mha()
    read(model, input_ids=token_ids(1, 20)).save_pretrained(tmp_path / "m", model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    InfiniCache.from_pretrained(tmp_path / "m", model)
    InfiniCache.from_pretrained(tmp_path / "m", model.transformer)
    weight = model.transformer.h[0].attn.gate.weight.data
    weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))
    with pytest.raises(MemoryFileError, match="the weights are not the same"):
        InfiniCache.from_pretrained(tmp_path / "m", model)


def test_options_that_came_after_a_file_had_their_defaults(kept, tmp_path):
    record, tensors = read_memory_file(kept)
    del record["model"]["config"]["feature_map"]
    write_memory_file(tmp_path / "older", tensors, record)
    InfiniCache.from_pretrained(tmp_path / "older", infini_gpt2())
    with pytest.raises(MemoryFileError, match="feature_map is 'elu' in the file and 'exp' in the model"):
        InfiniCache.from_pretrained(tmp_path / "older", infini_gpt2(feature_map="exp"))
    record["model"]["config"]["rotation"] = 3
    write_memory_file(tmp_path / "newer", tensors, record)
    with pytest.raises(MemoryFileError, match="rotation is 3 in the file and None in the model"):
        InfiniCache.from_pretrained(tmp_path / "newer", infini_gpt2())


def test_every_damaged_byte_is_noticed(kept, tmp_path):
    content, file = kept.read_bytes(), tmp_path / "damaged"
    for place in range(0, len(content), len(content) // 97):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(MemoryFileError, match="damaged"):
            read_memory_file(file)
    for length in (0, 5, 1000, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(MemoryFileError, match="damaged is damaged or no memory file"):
            InfiniCache.from_pretrained(file, infini_gpt2())


def test_foreign_files_are_refused(kept, tmp_path):
    save_file({"weight": torch.ones(3)}, tmp_path / "weights")
    with pytest.raises(MemoryFileError, match="weights is no memory file: it is a safetensors file without the record"):
        read_record(tmp_path / "weights")
    (tmp_path / "text").write_text("a text, and a long one " * 20)
    with pytest.raises(MemoryFileError, match="text is damaged or no memory file"):
        read_record(tmp_path / "text")
    record, tensors = read_memory_file(kept)
    for name, version in (("later", 3), ("earlier", 1)):
        write_memory_file(tmp_path / name, tensors, record | {"format_version": version})
        message = f"{name} has format version {version}, and this version of hf_infini reads 2: have this one read the text"
        with pytest.raises(MemoryFileError, match=message):
            InfiniCache.from_pretrained(tmp_path / name, infini_gpt2())
    with pytest.raises(MemoryFileError, match="there is no memory file"):
        InfiniCache.from_pretrained(tmp_path / "nowhere", infini_gpt2())


def test_what_cannot_be_saved_or_gone_on_from(tmp_path):
    model = infini_gpt2()
    cache = InfiniCache(model.config)
    with pytest.raises(ValueError, match="this cache has read nothing yet"):
        cache.save_pretrained(tmp_path / "m", model)
    mask = torch.ones(2, 5, dtype=torch.long)
    assert torch.equal(cache.attention_mask(mask), mask)
    cache = read(model, input_ids=token_ids(1, 20))
    for wrong in ("abc", [], ["a", "b"]):
        with pytest.raises(ValueError, match="text_sha256 must be a list with one for each of the 1 rows"):
            cache.save_pretrained(tmp_path / "m", model, text_sha256=wrong)
    with pytest.raises(ValueError, match="the mask has 2 rows and the cache 1: repeat the cache's rows"):
        cache.attention_mask(mask)
    assert not list(tmp_path.iterdir())
