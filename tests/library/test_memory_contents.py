"""Memory files that are whole and of the right model, and yet no cache of it: they are refused with the reason."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from hf_infini import InfiniCache
from hf_infini.cache.files import MemoryFileError, read_memory_file, read_record, write_memory_file
from memories import VARIANTS, calls, each, read
from models import causal_mha, infini_gpt2, left_padded, token_ids

# Between them all kinds of tensors: full attention, a start, a convolution, keys for the memory, tokens kept out of it
RICH = {"layers": [0, 2], "memory_conv": 4, "position_encoding": "rope", "memory_init": "learned", "local_segments": 1}
PLAIN = {"local_segments": 1}  # segments of 8, the memory empty at first
LENGTHS = [30, 6, 2]
NOTHING_YET = r"holds something where after \[30, 6, 2\] tokens there can be nothing yet"


@pytest.fixture(scope="module", params=["rich", "plain"])
def written(request, tmp_path_factory):
    """A model, and record and tensors of its file of three ragged rows."""
    model = infini_gpt2(**{"rich": RICH, "plain": PLAIN}[request.param])
    texts = [token_ids(1, length) for length in LENGTHS]
    texts[0][0, 26] = 0  # an end of text
    file = tmp_path_factory.mktemp("written") / "m"
    read(model, **left_padded(texts)).save_pretrained(file, model, text_sha256=["a", "b", "c"])
    return model, *read_memory_file(file)


def load(tmp_path, model, record, tensors) -> InfiniCache:
    """Writes what may be forged, with a checksum that is right."""
    write_memory_file(tmp_path / "forged", tensors, record)
    return InfiniCache.from_pretrained(tmp_path / "forged", model)


def refused(tmp_path, model, record, tensors, message) -> None:
    with pytest.raises(MemoryFileError, match=f"forged is of this model, but was not written by save_pretrained: {message}"):
        load(tmp_path, model, record, tensors)


def test_tensors_that_are_missing_or_too_many(written, tmp_path):
    model, record, tensors = written
    load(tmp_path, model, record, tensors)
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        if name == "documents":
            refused(tmp_path, model, record, rest, "without documents every column is a token, and of 30 columns")
        elif name == "text_fingerprint":
            load(tmp_path, model, record, rest)
        elif name.endswith("local_skipped"):
            load(tmp_path, model, record, {n: t for n, t in tensors.items() if not n.endswith("local_skipped")})
        else:
            refused(tmp_path, model, record, rest, f"the tensors {name} are missing")
    for name in ("layers.3.memory", "layers.0.keys", "layers.1.memory2", "extra", "memory"):
        refused(tmp_path, model, record, tensors | {name: torch.ones(1)}, f"the tensors {name} are none of this model's")
    refused(tmp_path, model, record, {}, "the tensors layers.0.last_position, layers.0.local_key, ")


@pytest.mark.slow
def test_shapes_and_rows(written, tmp_path):
    model, record, tensors = written
    for name, tensor in tensors.items():
        for dim in range(tensor.dim()):
            longer = torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)
            refused(tmp_path, model, record, tensors | {name: longer}, f"{name} is .* it must be ")
        refused(tmp_path, model, record, tensors | {name: tensor[None]}, f"{name} is .* it must be ")
    fewer = record | {"tokens_seen": [30, 6], "text_sha256": None}
    refused(tmp_path, model, fewer, tensors, ".* for 2 rows and 30 columns it must be ")
    nothing = {n: t if ".start_" in n else t[:0] for n, t in tensors.items()}
    refused(tmp_path, model, record | {"tokens_seen": [], "text_sha256": []}, nothing, "tokens_seen has no rows")


@pytest.mark.slow
def test_dtypes(written, tmp_path):
    model, record, tensors = written
    for name, tensor in tensors.items():
        for dtype in (torch.float64, torch.float16, torch.int32, torch.uint8, torch.float8_e5m2, torch.complex64):
            if name.endswith("recent_inputs") and dtype == torch.float16:
                continue  # as autocast may leave it
            message = rf"layers.*{name.rpartition('.')[2]} is .* and must be |{name} is .* and must be "
            if name.endswith(("local_key", ".keys")) and dtype == torch.float16:
                message = "layers.*_key is float32 and must be float16|layers.*values? is float32 and must be float16"
            refused(tmp_path, model, record, tensors | {name: tensor.to(dtype)}, message)


def test_numbers(written, tmp_path):
    model, record, tensors = written
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        for number in (float("nan"), float("-inf")):
            changed = tensor.clone()
            changed.view(-1)[-1] = number
            refused(tmp_path, model, record, tensors | {name: changed}, f"{name} holds NaN or infinity")
    negative = -tensors["layers.2.normaliser"]
    refused(tmp_path, model, record, tensors | {"layers.2.normaliser": negative}, "layers.2.normaliser is negative")


def test_what_is_not_finite_is_not_saved(tmp_path):
    model = infini_gpt2()
    cache = read(model, input_ids=token_ids(1, 20))
    cache.layers[1].state.local_value[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="layers.1.local_value of this cache holds NaN or infinity: nothing could go on"):
        cache.save_pretrained(tmp_path / "m", model)
    assert not list(tmp_path.iterdir())


def test_counts_that_disagree(written, tmp_path):
    model, record, tensors = written
    for change, message in (
        ({"columns": 29}, "tokens_seen is 30 in a row, and columns, which counts padding too, 29"),
        ({"tokens_seen": [30, 6, 3]}, r".*tokens_seen is \[30, 6, 2\] and the record's tokens_seen \[30, 6, 3\]"),
        ({"text_sha256": ["a"]}, "text_sha256 has 1 rows and tokens_seen 3"),
    ):
        refused(tmp_path, model, record | change, tensors, message)
    for layer in (0, 2):
        changed = tensors | {f"layers.{layer}.tokens_seen": torch.tensor([30, 6, 1])}
        message = rf"layers.{layer}.tokens_seen is \[30, 6, 1\] and the record's tokens_seen"
        refused(tmp_path, model, record, changed, message)


@pytest.mark.parametrize("start", ["learned", "noise"])
def test_a_start_is_that_of_the_weights(start, tmp_path):
    model = infini_gpt2(memory_init=start)
    for block in model.transformer.h:
        for name in ("start_memory", "start_normaliser"):
            if hasattr(block.attn, name):
                getattr(block.attn, name).data.uniform_()
    read(model, input_ids=token_ids(1, 20)).save_pretrained(tmp_path / "m", model)
    record, tensors = read_memory_file(tmp_path / "m")
    for name in ("start_memory", "start_normaliser"):
        changed = tensors[f"layers.1.{name}"] * 0.999 + 1e-3
        message = f"layers.1.{name} is not the start that the model's weights give"
        refused(tmp_path, model, record, tensors | {f"layers.1.{name}": changed}, message)


@pytest.mark.slow
@each(VARIANTS)
def test_what_a_model_writes_is_taken_at_every_length(variant, tmp_path):
    """Ragged rows and packed ones, at the borders of segments, in training mode, and without a random number drawn."""
    make, options = variant
    model = make(**options).train()
    for lengths in ([1, 3], [7, 8], [9, 17], [16, 25]):
        cache = read(model.eval(), **left_padded([token_ids(1, length) for length in lengths]))
        cache.save_pretrained(tmp_path / "m", model)
        torch.manual_seed(0)
        InfiniCache.from_pretrained(tmp_path / "m", model.train())
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
    positions = torch.cat([torch.arange(13), torch.arange(10)])[None]
    cache = read(model.eval(), token_ids(1, 23), position_ids=positions)
    assert cache.state.tokens_seen.tolist() == [10]
    cache.save_pretrained(tmp_path / "m", model)
    InfiniCache.from_pretrained(tmp_path / "m", model)


@pytest.mark.parametrize("make", [lambda: infini_gpt2(memory_conv=3, layers=[0, 2]), lambda: mha()], ids=["gpt2", "mha"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_of_autocast(make, dtype, tmp_path):
    """Its keys are in bfloat16; it goes on as the live cache inside of autocast, and can go on outside."""
    model = make().to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        live = read(model, token_ids(1, 20))
        live.save_pretrained(tmp_path / "m", model)
        loaded = InfiniCache.from_pretrained(tmp_path / "m", model)
        wanted = calls(model, live, token_ids(1, 9), (0, 4, 5, 9))
        assert torch.equal(calls(model, loaded, token_ids(1, 9), (0, 4, 5, 9)), wanted)
    outside = InfiniCache.from_pretrained(tmp_path / "m", model)
    assert outside.state.local_key.dtype == torch.bfloat16
    assert calls(model, outside, token_ids(1, 9), (0, 9)).isfinite().all()


def mha():
    return causal_mha(attention="infini", segment_length=8, position_encoding="rope", local_segments=1)


# --- files that cannot be read -----------------------------------------------------------------------------------------


def unreadable(file) -> None:
    for function in (read_record, read_memory_file):
        with pytest.raises(MemoryFileError, match=f"{file.name} (is|has format version) "):
            function(file)


def test_what_is_no_file(tmp_path):
    with pytest.raises(MemoryFileError, match="is no memory file: it is a folder"):
        InfiniCache.from_pretrained(tmp_path, infini_gpt2())
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MemoryFileError, match="pipe is no memory file: it is no regular file"):
        read_record(tmp_path / "pipe")  # which would wait for a writer


def test_every_header_is_read_or_refused(written, tmp_path):
    """Whatever stands in its bytes."""
    model, record, tensors = written
    write_memory_file(tmp_path / "m", tensors, record)
    content, file = (tmp_path / "m").read_bytes(), tmp_path / "changed"
    for place in [*range(8), *range(8, int.from_bytes(content[:8], "little"), 41)]:
        for byte in (0, 0x22, 0x39, 0x5B, 0xFF):
            if content[place] != byte:
                file.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
                with pytest.raises(MemoryFileError, match="changed is "):
                    read_memory_file(file)
    for length in (0, 7, 8, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        unreadable(file)
    for header in (
        b"[]",
        b"null",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"a": {"dtype": "F8_E8M0", "shape": [], "data_offsets": 1}}',
    ):
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        unreadable(file)
    header = json.dumps({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    unreadable(file)


def test_records_of_wrong_types(written, tmp_path):
    model, record, tensors = written
    file = tmp_path / "m"
    for text in (
        "",
        "[]",
        "3",
        '"a"',
        "null",
        "{}",
        "[" * 100_000,
        "NaN",
        '{"format_version": "1"}',
        '{"format_version": []}',
    ):
        save_file({"a": torch.ones(1)}, file, {"hf_infini_memory": text})
        unreadable(file)
    good = {"format_version": 2, **record, "sha256": "0"}
    for entry, wrong in {
        "model": [None, [], {}, {"config": [], "dtype": "a", "weights_sha256": "a"}, {**record["model"], "dtype": 3}],
        "columns": [None, "3", -1, 1.0, True, 2**63, float("nan")],
        "tokens_seen": [None, 3, [-1], [True], [1.0], ["1"], {"0": 1}],
        "text_sha256": ["abc", [1], 3],
        "sha256": [None, 3],
    }.items():
        for value in wrong:
            save_file({"a": torch.ones(1)}, file, {"hf_infini_memory": json.dumps(good | {entry: value})})
            with pytest.raises(
                MemoryFileError, match=f"m is damaged, or was not written by hf_infini: in its record {entry} is"
            ):
                read_record(file)
        save_file(
            {"a": torch.ones(1)}, file, {"hf_infini_memory": json.dumps({k: v for k, v in good.items() if k != entry})}
        )
        if entry != "text_sha256":
            unreadable(file)
    no_type = {**record["model"], "config": {}}
    with pytest.raises(ValueError, match="model is"):
        write_memory_file(file, tensors, record | {"model": no_type})
