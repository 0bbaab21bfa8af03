"""Memory files that are none, damaged, or whole and yet no cache of the model, and places where none can be: one line that
names the file and the reason, and the files that were there are as they were."""

import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from cases import examples
from hf_infini import InfiniCache
from hf_infini.cache.files import METADATA_KEY, MemoryFileError, read_memory_file, read_record, write_memory_file
from memories import read
from models import infini_gpt2, left_padded, token_ids

DAMAGED = "is damaged or no memory file"
FORGED = "is of this model, but was not written by save_pretrained: "
# Between them all kinds of tensors: full attention, a start, a convolution, keys for the memory, tokens kept out of it
RICH = {"layers": [0, 2], "memory_conv": 4, "position_encoding": "rope", "memory_init": "learned", "local_segments": 1}
PLAIN = {"local_segments": 1}  # segments of 8, the memory empty at first


@pytest.fixture(scope="module", params=[RICH, PLAIN], ids=["rich", "plain"])
def written(request, tmp_path_factory):
    """A model, record and tensors of its file of three ragged rows, and the file's bytes."""
    model = infini_gpt2(**request.param)
    texts = [token_ids(1, length) for length in (30, 6, 2)]
    texts[0][0, 26] = 0  # an end of text
    file = tmp_path_factory.mktemp("written") / "m"
    read(model, **left_padded(texts)).save_pretrained(file, model, text_sha256=["a", "b", "c"])
    return model, *read_memory_file(file), file.read_bytes()


def refused(action, message: str, place) -> None:
    with pytest.raises(MemoryFileError, match=message) as found:
        action()
    text = str(found.value)
    assert "\n" not in text and str(place) in text, text


# --- bytes ------------------------------------------------------------------------------------------------------------


def header_of(content: bytes) -> tuple[dict, bytes]:
    """The header of a safetensors file, and what comes behind it."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(found, rest: bytes) -> bytes:
    text = found if isinstance(found, bytes) else json.dumps(found).encode()
    return len(text).to_bytes(8, "little") + text + rest


@st.composite
def damages(draw, content: bytes) -> bytes:
    """A file that was cut off, continued or changed in a byte, or another header before the same numbers."""
    header, numbers = header_of(content)
    place = draw(st.integers(0, len(content) - 1) | st.integers(0, len(content) - len(numbers)))
    kind = draw(st.sampled_from(["cut", "more", "byte", "length", "header", "entry"]))
    if kind == "cut":
        return content[:place]
    if kind == "more":
        return content + draw(st.binary(min_size=1))
    if kind == "byte":
        wrong = draw(st.sampled_from([content[place] ^ 1, 0, 0x22, 0x39, 0x5B, 0xFF]))
        return content[:place] + bytes([wrong]) + content[place + 1 :]
    if kind == "length":
        return draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little") + content[8:]
    if kind == "header":
        return with_header(draw(st.sampled_from([[], None, b"{", b"\xff", b"[" * 100_000, b'{"a":' * 5000])), numbers)
    name = draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
    wrong = {"dtype": ["F3", "I32"], "shape": [[1], [2**40] * 2, [-1]], "data_offsets": [[0, 2**50], [9, 0], None]}
    changes = [{entry: value} for entry, values in wrong.items() for value in values]
    return with_header(header | {name: header[name] | draw(st.sampled_from(changes))}, numbers)


@examples(60)
@given(data=st.data())
def test_damaged_bytes(written, tmp_path, data):
    model, _, _, content = written
    found, file = data.draw(damages(content)), tmp_path / "memory.safetensors"
    if found == content:
        return
    file.write_bytes(found)
    refused(lambda: InfiniCache.from_pretrained(file, model), "", file)
    refused(lambda: read_memory_file(file), "", file)
    assert file.read_bytes() == found and list(tmp_path.iterdir()) == [file]


def of_record(change):
    """Another record, without another checksum: `change` gets the old one and gives what is written."""

    def damage(content):
        found, rest = header_of(content)
        changed = change(json.loads(found["__metadata__"][METADATA_KEY]))
        found["__metadata__"][METADATA_KEY] = changed if isinstance(changed, str) else json.dumps(changed)
        return with_header(found, rest)

    return damage


NO_RECORD = "is no memory file: it is a safetensors file without the record"
FILES = {
    "a text": (lambda content: b"a text, and a long one " * 20, DAMAGED),
    "a bit changed": (lambda content: content[:-9] + bytes([content[-9] ^ 64]) + content[-8:], "is damaged: its content is"),
    "weights": (lambda content: save({"weight": torch.ones(3)}, {"format": "pt"}), NO_RECORD),
    "a list for a record": (of_record(lambda found: []), NO_RECORD),
    "a deep record": (of_record(lambda found: "[" * 100_000), NO_RECORD),
    "an old version": (of_record(lambda found: found | {"format_version": 1}), "has format version 1, and this version of"),
    "other counts": (of_record(lambda found: found | {"columns": 31}), "the checksums differ"),
}


@pytest.mark.parametrize("case", FILES)
def test_what_is_said_of_a_damaged_file(case, written, tmp_path):
    damage, message = FILES[case]
    file = tmp_path / "memory.safetensors"
    file.write_bytes(damage(written[-1]))
    refused(lambda: InfiniCache.from_pretrained(file, written[0]), message, file)
    refused(lambda: read_memory_file(file), message, file)


WRONG = {
    "model": [None, [], {}, {"config": [], "dtype": "a", "weights_sha256": "a"}, {"config": {"model_type": 3}}],
    "columns": [None, "3", -1, 1.0, True, 2**63, 10**30, float("nan")],
    "tokens_seen": [None, 3, [-1], [True], [1.0], ["1"], {"0": 1}],
    "text_sha256": ["abc", [1], 3],
    "sha256": [None, 3],
}


def test_records_of_wrong_types(written, tmp_path):
    file = tmp_path / "m"
    good = {"format_version": 2, **written[1], "sha256": "0"}
    records = [(entry, good | {entry: value}) for entry, values in WRONG.items() for value in values]
    records += [(entry, {name: good[name] for name in good if name != entry}) for entry in ("model", "tokens_seen")]
    for entry, record in records:
        save_file({"a": torch.ones(1)}, file, {METADATA_KEY: json.dumps(record)})
        refused(lambda: read_record(file), f"was not written by hf_infini: in its record {entry}", file)
    for entry, value in {"model": {}, "columns": -1, "tokens_seen": [1.0], "text_sha256": "abc"}.items():
        with pytest.raises(ValueError, match=f"this is not a record of a memory: {entry} is "):
            write_memory_file(file, {}, written[1] | {entry: value})


def test_a_file_that_is_mostly_a_hole_is_not_read(tmp_path):
    """A terabyte of zeros, which no machine could hold."""
    file = tmp_path / "memory.safetensors"
    with file.open("wb") as opened:
        opened.truncate(2**40)
    refused(lambda: read_memory_file(file), DAMAGED, file)
    refused(lambda: read_record(file), DAMAGED, file)


# --- tensors, with a checksum that is right ---------------------------------------------------------------------------


@st.composite
def forgeries(draw, tensors: dict) -> tuple[dict, str]:
    """Other tensors, of which one is missing, too many, of another shape, dtype or no number, and what is said of it."""
    name = draw(st.sampled_from(sorted(tensors)))
    tensor, kind = tensors[name], draw(st.sampled_from(["missing", "more", "shape", "dtype", "number"]))
    if kind == "missing":
        rest = {other: each for other, each in tensors.items() if other != name}
        if name == "text_fingerprint" or name.endswith("local_skipped"):  # as of a cache that has none
            return tensors, ""
        return rest, "without documents every column" if name == "documents" else f"the tensors {name} are missing"
    if kind == "more":
        other = draw(st.sampled_from(["layers.3.memory", "layers.0.keys2", "extra", "memory"]))
        return tensors | {other: torch.ones(1)}, f"the tensors {other} are none of this model's"
    if kind == "shape":
        dim = draw(st.integers(0, tensor.dim()))
        wrong = tensor[None] if dim == tensor.dim() else torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)
        return tensors | {name: wrong}, f"{name} is .* it must be "
    if kind == "dtype" or not tensor.is_floating_point():
        dtype = draw(st.sampled_from([torch.float64, torch.uint8, torch.float8_e5m2, torch.complex64]))
        return tensors | {name: tensor.to(dtype)}, f"{name} is .* and must be "
    wrong = tensor.clone()
    wrong.view(-1)[-1] = draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    return tensors | {name: wrong}, f"{name} holds NaN or infinity"


@examples(80)
@given(data=st.data())
def test_forged_tensors(written, tmp_path, data):
    model, record, tensors, _ = written
    forged, message = data.draw(forgeries(tensors))
    if message:
        write_memory_file(tmp_path / "forged", forged, record)
        refused(lambda: InfiniCache.from_pretrained(tmp_path / "forged", model), FORGED + message, "forged")


def test_counts_that_disagree(written, tmp_path):
    model, record, tensors, _ = written
    last = [name for name in tensors if name.startswith("layers.2.")]
    for change, message in (
        ({"columns": 29}, "tokens_seen is 30 in a row, and columns, which counts padding too, 29"),
        ({"tokens_seen": [30, 6, 3]}, r".*tokens_seen is \[30, 6, 2\] and the record's tokens_seen \[30, 6, 3\]"),
        ({"text_sha256": ["a"]}, "text_sha256 has 1 rows and tokens_seen 3"),
        ({"tokens_seen": [30, 6], "text_sha256": None}, ".* for 2 rows and 30 columns it must be "),
    ):
        write_memory_file(tmp_path / "forged", tensors, record | change)
        refused(lambda: InfiniCache.from_pretrained(tmp_path / "forged", model), FORGED + message, "forged")
    for name, change, message in (
        ("tokens_seen", lambda t: t - torch.tensor([0, 0, 1]), r".*tokens_seen is \[30, 6, 1\] and the record's"),
        ("last_position", lambda t: t - 10, "positions begin at 0|.* is not layers"),
        ("memory_tokens", lambda t: t + 100, ".*at most|.* is not layers"),
        ("normaliser", lambda t: -t - 1, "layers.2.normaliser is negative"),
        *([("start_memory", lambda t: t + 1e-3, "layers.2.start_memory is not the start that the model's weights give")]
          if "layers.2.start_memory" in last else []),
    ):  # fmt: skip
        forged = tensors | {f"layers.2.{name}": change(tensors[f"layers.2.{name}"])}
        write_memory_file(tmp_path / "forged", forged, record)
        refused(lambda: InfiniCache.from_pretrained(tmp_path / "forged", model), FORGED + message, "forged")


# --- places -----------------------------------------------------------------------------------------------------------


def folder(place):
    place.mkdir()
    return place


def pipe(place):
    os.mkfifo(place)  # which would wait for a writer
    return place


PLACES = {
    "nothing there": (lambda place: place, "there is no memory file"),
    "a folder": (folder, "is no memory file: it is a folder"),
    "a pipe": (pipe, "no regular file"),
    "a long name": (lambda place: place.with_name("n" * 300), "cannot be read: File name too long"),
}
UNWRITABLE = {
    "a folder": (folder, "is a folder: give the name of a file"),
    "a name with no room for more": (lambda place: place.with_name("n" * 250), "cannot be written: File name too long"),
}


@pytest.mark.parametrize("case", PLACES)
def test_places_without_a_memory_file(case, tmp_path):
    make, message = PLACES[case]
    file = make(tmp_path / "place")
    refused(lambda: InfiniCache.from_pretrained(file, infini_gpt2()), message, file)
    refused(lambda: read_record(file), message, file)


@pytest.mark.parametrize("case", UNWRITABLE)
def test_places_where_none_can_be_written(case, tmp_path):
    make, message = UNWRITABLE[case]
    file, model = make(tmp_path / "place"), infini_gpt2()
    cache, before = read(model, input_ids=token_ids(1, 20)), sorted(tmp_path.rglob("*"))
    refused(lambda: cache.save_pretrained(file, model), message, file)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_saved_leaves_the_old_file(written, tmp_path):
    file, model = tmp_path / "memory.safetensors", infini_gpt2()
    file.write_bytes(written[-1])
    cache, empty = read(model, input_ids=token_ids(1, 20)), InfiniCache(model.config)
    with pytest.raises(ValueError, match="this cache has read nothing yet"):
        empty.save_pretrained(file, model)
    for wrong in ("abc", [], ["a", "b"], [3]):
        with pytest.raises(ValueError, match="text_sha256 must be a list with one for each of the 1 rows|text_sha256"):
            cache.save_pretrained(file, model, text_sha256=wrong)
    cache.layers[1].state.local_value[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="layers.1.local_value of this cache holds NaN or infinity: nothing could go on"):
        cache.save_pretrained(file, model)
    assert file.read_bytes() == written[-1] and list(tmp_path.iterdir()) == [file]
