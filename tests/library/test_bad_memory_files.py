"""Memory files that are none, damaged, or of another model, and places where none can be: one line that names the file, and
the files that were there are as they were. Each row is one way to damage a file, and what the message says."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save

from hf_infini import InfiniCache
from hf_infini.cache.files import METADATA_KEY, MemoryFileError, read_memory_file, read_record, write_memory_file
from memories import read
from models import infini_gpt2, token_ids

DAMAGED = "is damaged or no memory file"


@pytest.fixture(scope="module")
def model():
    return infini_gpt2(local_segments=1)


@pytest.fixture(scope="module")
def good(model, tmp_path_factory):
    """The bytes of a memory file."""
    file = tmp_path_factory.mktemp("good") / "memory.safetensors"
    read(model, input_ids=token_ids(1, 20)).save_pretrained(file, model)
    return file.read_bytes()


def refused(action, message: str, place) -> None:
    with pytest.raises(MemoryFileError, match=message) as found:
        action()
    text = str(found.value)
    assert "\n" not in text and str(place) in text, text


def header(content: bytes) -> tuple[dict, bytes]:
    """The header of a safetensors file, and what comes behind it."""
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(found, rest: bytes) -> bytes:
    text = found if isinstance(found, bytes) else json.dumps(found).encode()
    return struct.pack("<Q", len(text)) + text + rest


def entry(**changes):
    """Another header of the file's first tensor."""

    def damage(content):
        found, rest = header(content)
        name = next(name for name in found if name.endswith("memory"))
        found[name] |= changes
        return with_header(found, rest)

    return damage


def record(change):
    """Another record, without another checksum: `change` gets the old one and gives what is written."""

    def damage(content):
        found, rest = header(content)
        changed = change(json.loads(found["__metadata__"][METADATA_KEY]))
        found["__metadata__"][METADATA_KEY] = changed if isinstance(changed, str) else json.dumps(changed)
        return with_header(found, rest)

    return damage


def without_record(content):
    found, rest = header(content)
    del found["__metadata__"]
    return with_header(found, rest)


NO_RECORD = "is no memory file: it is a safetensors file without the record"
FILES = {
    "empty": (lambda content: b"", DAMAGED),
    "a byte": (lambda content: content[:1], DAMAGED),
    "seven bytes": (lambda content: content[:7], DAMAGED),
    "only a length": (lambda content: content[:8], DAMAGED),
    "half a header": (lambda content: content[:300], DAMAGED),
    "only a header": (lambda content: content[: 8 + struct.unpack("<Q", content[:8])[0]], DAMAGED),
    "half": (lambda content: content[: len(content) // 2], DAMAGED),
    "a byte less": (lambda content: content[:-1], DAMAGED),
    "a byte more": (lambda content: content + b"x", DAMAGED),
    "a text": (lambda content: b"a text, and a long one " * 20, DAMAGED),
    "zeros": (lambda content: bytes(4096), DAMAGED),
    "a picture": (lambda content: b"\x89PNG\r\n\x1a\n" + bytes(500), DAMAGED),
    "JSON": (lambda content: b'{"format_version": 2}', DAMAGED),
    "an archive": (lambda content: b"PK\x03\x04" + bytes(500), DAMAGED),
    "a header of 2^62 bytes": (lambda content: struct.pack("<Q", 2**62) + content[8:], DAMAGED),
    "a header of 2^64 bytes": (lambda content: b"\xff" * 8 + content[8:], DAMAGED),
    "a header of 50 million bytes": (lambda content: struct.pack("<Q", 50_000_000) + content[8:], DAMAGED),
    "a list": (lambda content: with_header([], header(content)[1]), DAMAGED),
    "no JSON": (lambda content: with_header(b"{nothing}", header(content)[1]), DAMAGED),
    "no UTF-8": (lambda content: with_header(b'{"\xff\xfe": 1}', header(content)[1]), DAMAGED),
    "a deep header": (lambda content: with_header(b'{"a":' * 5000, header(content)[1]), DAMAGED),
    "a bit changed": (lambda content: content[:-9] + bytes([content[-9] ^ 64]) + content[-8:], "is damaged: its content is"),
    "an unknown dtype": (entry(dtype="F3"), DAMAGED),
    "another dtype": (entry(dtype="I32"), "is damaged"),
    "another shape": (entry(shape=[1]), DAMAGED),
    "a huge shape": (entry(shape=[2**40, 2**40]), DAMAGED),
    "a negative shape": (entry(shape=[-1]), DAMAGED),
    "places beyond the end": (entry(data_offsets=[0, 2**50]), DAMAGED),
    "places backwards": (entry(data_offsets=[100, 0]), DAMAGED),
    "no places": (entry(data_offsets=None), DAMAGED),
    "weights": (lambda content: save({"weight": torch.ones(3)}), NO_RECORD),
    "a model's weights": (lambda content: save({"weight": torch.ones(3)}, {"format": "pt"}), NO_RECORD),
    "no record": (without_record, NO_RECORD),
    "a record of no JSON": (record(lambda found: "{nothing"), NO_RECORD),
    "a list for a record": (record(lambda found: []), NO_RECORD),
    "null for a record": (record(lambda found: None), NO_RECORD),
    "a number for a record": (record(lambda found: 3), NO_RECORD),
    "a deep record": (record(lambda found: "[" * 100_000), NO_RECORD),
    "no version": (record(lambda found: {k: v for k, v in found.items() if k != "format_version"}), NO_RECORD),
    "an old version": (record(lambda found: found | {"format_version": 1}), "has format version 1"),
    "a new version": (record(lambda found: found | {"format_version": 3}), "has format version 3"),
    "a version in words": (record(lambda found: found | {"format_version": "2"}), "has format version '2'"),
    "another checksum": (record(lambda found: found | {"sha256": "0" * 64}), "is damaged: its content is not what was"),
}
for name in ("model", "columns", "tokens_seen", "sha256"):
    rest = record(lambda found, name=name: {k: v for k, v in found.items() if k != name})
    FILES[f"no {name}"] = (rest, f"in its record {name}")
for name, value in (
    *(("columns", value) for value in (-1, 1.5, "20", True, 10**30, float("nan"), None)),
    *(("tokens_seen", value) for value in ("20", 20, [-1], [2.5], [None], {"0": 20})),
    *(("text_sha256", value) for value in (3, "abc", [1])),
    *(("model", value) for value in (3, {}, [], {"config": None}, {"config": {"model_type": 3}})),
):
    other = record(lambda found, name=name, value=value: found | {name: value})
    FILES[f"{name} {value!r}"] = (other, f"in its record {name} is")
for name, value in (("columns", 21), ("tokens_seen", [19]), ("text_sha256", ["a"])):
    other = record(lambda found, name=name, value=value: found | {name: value})
    FILES[f"{name} {value!r}"] = (other, "the checksums differ")


@pytest.mark.parametrize("case", FILES)
def test_damaged_files(case, model, good, tmp_path):
    damage, message = FILES[case]
    file = tmp_path / "memory.safetensors"
    file.write_bytes(damage(good))
    before = file.read_bytes()
    assert before != good
    refused(lambda: InfiniCache.from_pretrained(file, model), message, file)
    refused(lambda: read_memory_file(file), message, file)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_mostly_a_hole_is_not_read(tmp_path):
    """A terabyte of zeros, which no machine could hold."""
    file = tmp_path / "memory.safetensors"
    with file.open("wb") as opened:
        opened.truncate(2**40)
    refused(lambda: read_memory_file(file), DAMAGED, file)
    refused(lambda: read_record(file), DAMAGED, file)


def changed(name, function):
    def change(tensors):
        chosen = next(full for full in sorted(tensors) if full.endswith(f".{name}"))
        tensors[chosen] = function(tensors[chosen].clone())

    return change


FORGED = {
    "NaN": (changed("memory", lambda t: t * float("nan")), "holds NaN or infinity"),
    "infinity": (changed("normaliser", lambda t: t + float("inf")), "holds NaN or infinity"),
    "minus infinity": (changed("local_key", lambda t: t - float("inf")), "holds NaN or infinity"),
    "a negative normaliser": (changed("normaliser", lambda t: -t - 1), "is negative somewhere"),
    "another dtype": (changed("memory", lambda t: t.double()), "is float64 and must be float32"),
    "whole numbers": (changed("local_value", lambda t: t.long()), "is int64 and must be"),
    "another shape": (changed("memory", lambda t: t[..., :1]), "it must be"),
    "another row": (changed("memory", lambda t: torch.cat([t, t])), "it must be"),
    "one tensor less": (lambda tensors: tensors.pop("text_real"), "text_real are missing"),
    "one tensor more": (lambda tensors: tensors.update(more=torch.ones(1)), "more are none of this model's"),
    "more tokens": (changed("tokens_seen", lambda t: t + 1), "tokens_seen is"),
    "an earlier position": (changed("last_position", lambda t: t - 10), "positions begin at 0|is not layers"),
    "too many in the memory": (changed("memory_tokens", lambda t: t + 100), "at most|is not layers"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_files(case, model, good, tmp_path):
    """With a checksum that is right."""
    change, message = FORGED[case]
    file = tmp_path / "memory.safetensors"
    file.write_bytes(good)
    found, tensors = read_memory_file(file)
    change(tensors)
    write_memory_file(file, tensors, found)
    refused(lambda: InfiniCache.from_pretrained(file, model), message, file)


def folder(place):
    place.mkdir()
    return place


def fifo(place):
    os.mkfifo(place)
    return place


def link(place, target):
    place.symlink_to(target)
    return place


def below_a_file(place):
    place.write_text("a text")
    return place / "memory"


PLACES = {
    "nothing there": (lambda place: place, "there is no memory file"),
    "a folder": (folder, "is no memory file: it is a folder"),
    "a folder that is missing": (lambda place: place / "nowhere" / "memory", "there is no memory file"),
    "below a file": (below_a_file, "there is no memory file"),
    "a pipe": (fifo, "no regular file"),
    "a link to nothing": (lambda place: link(place, "nowhere"), "there is no memory file"),
    "a link to itself": (lambda place: link(place, place.name), "there is no memory file"),
    "a device": (lambda place: link(place, "/dev/zero"), "no regular file"),
    "a long name": (lambda place: place.with_name("n" * 300), "cannot be read: File name too long"),
}


@pytest.mark.parametrize("case", PLACES)
def test_places_without_a_memory_file(case, model, tmp_path):
    make, message = PLACES[case]
    file = make(tmp_path / "place")
    refused(lambda: InfiniCache.from_pretrained(file, model), message, file)
    refused(lambda: read_record(file), message, file)


UNWRITABLE = {
    "a folder": (folder, "is a folder: give the name of a file"),
    "below a file": (below_a_file, "cannot be written: "),
    "a long name": (lambda place: place.with_name("n" * 300), "cannot be written: File name too long"),
    "a name with no room for more": (lambda place: place.with_name("n" * 250), "cannot be written: File name too long"),
    "no place for files": (lambda place: type(place)("/proc/nowhere/memory"), "cannot be written: "),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_places_where_none_can_be_written(case, model, tmp_path):
    make, message = UNWRITABLE[case]
    file = make(tmp_path / "place")
    cache, before = read(model, input_ids=token_ids(1, 20)), sorted(tmp_path.rglob("*"))
    refused(lambda: cache.save_pretrained(file, model), message, file)
    assert sorted(tmp_path.rglob("*")) == before


def test_rows_that_are_none(model, good, tmp_path):
    file = tmp_path / "memory.safetensors"
    file.write_bytes(good)
    for rows in ([], [1], [-1], [0.5], ["0"], [None]):
        with pytest.raises(ValueError, match="rows must be numbers from 0 to 0, the rows of .*; got "):
            InfiniCache.from_pretrained(file, model, rows=rows)
    InfiniCache.from_pretrained(file, model, rows=[torch.tensor(0), 0])


def test_a_memory_that_cannot_be_saved_leaves_the_old_file(model, good, tmp_path):
    file = tmp_path / "memory.safetensors"
    file.write_bytes(good)
    cache = read(model, input_ids=token_ids(1, 20))
    for wrong in ({}, {"config": {}}):
        with pytest.raises(ValueError):
            cache.save_pretrained(file, wrong)
    with pytest.raises(ValueError, match="text_sha256"):
        cache.save_pretrained(file, model, text_sha256=[3])
    cache.layers[0]._state.memory.fill_(float("nan"))
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        cache.save_pretrained(file, model)
    assert file.read_bytes() == good and list(tmp_path.iterdir()) == [file]


def test_what_is_changed_in_the_model_is_noticed(good, tmp_path):
    file = tmp_path / "memory.safetensors"
    file.write_bytes(good)
    for other in (infini_gpt2(local_segments=1, seed=1), infini_gpt2(), infini_gpt2(local_segments=1, n_layer=2)):
        refused(lambda other=other: InfiniCache.from_pretrained(file, other), "holds the memory of another model", file)
