"""Memory files that are none or damaged, and places where none can be: one line that names the file
and the reason, and the files that were there are as they were."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from hf_infini import InfiniCache
from hf_infini.cache.files import METADATA_KEY, MemoryFileError, read_memory_file
from memories import read
from models import infini_gpt2, left_padded, token_ids

DAMAGED = "is damaged or no memory file"
# Between them all kinds of tensors: full attention, a start, a convolution, keys for the memory,
# tokens kept out of it
RICH = {"layers": [0, 2], "memory_conv": 4, "position_encoding": "rope", "local_segments": 1}
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


# --- bytes
# --------------------------------------------------------------------------------------------------


def header_of(content: bytes) -> tuple[dict, bytes]:
    """The header of a safetensors file, and what comes behind it."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(found, rest: bytes) -> bytes:
    text = found if isinstance(found, bytes) else json.dumps(found).encode()
    return len(text).to_bytes(8, "little") + text + rest


@st.composite
def damages(draw, content: bytes) -> bytes:
    """A file that was cut off, continued or changed in a byte, or another header before the same
    numbers."""
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
        return with_header(
            draw(st.sampled_from([[], None, b"{", b"\xff", b"[" * 100_000, b'{"a":' * 5000])),
            numbers,
        )
    name = draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
    wrong = {
        "dtype": ["F3", "I32"],
        "shape": [[1], [2**40] * 2, [-1]],
        "data_offsets": [[0, 2**50], [9, 0], None],
    }
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
    """Another record, without another checksum: `change` gets the old one and gives what is
    written."""

    def damage(content):
        found, rest = header_of(content)
        found["__metadata__"][METADATA_KEY] = json.dumps(
            change(json.loads(found["__metadata__"][METADATA_KEY]))
        )
        return with_header(found, rest)

    return damage


FILES = {
    "a text": (lambda content: b"a text, and a long one " * 20, DAMAGED),
    "a bit changed": (
        lambda content: content[:-9] + bytes([content[-9] ^ 64]) + content[-8:],
        "is damaged: its content is",
    ),
    "an old version": (
        of_record(lambda found: found | {"format_version": 1}),
        "has format version 1, and this version of",
    ),
    "other counts": (of_record(lambda found: found | {"columns": 31}), "the checksums differ"),
}


@pytest.mark.parametrize("case", FILES)
def test_what_is_said_of_a_damaged_file(case, written, tmp_path):
    damage, message = FILES[case]
    file = tmp_path / "memory.safetensors"
    file.write_bytes(damage(written[-1]))
    refused(lambda: InfiniCache.from_pretrained(file, written[0]), message, file)
    refused(lambda: read_memory_file(file), message, file)


def test_places_without_a_memory_file(tmp_path):
    """The system's own errors."""
    for place, error in ((tmp_path / "none", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error, match=place.name):
            InfiniCache.from_pretrained(place, infini_gpt2())


def test_places_where_none_can_be_written(tmp_path):
    model = infini_gpt2()
    cache = read(model, input_ids=token_ids(1, 20))
    (tmp_path / "file").write_text("a text")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for place in ("folder", "file/memory"):
        with pytest.raises(OSError, match=place.partition("/")[0]):
            cache.save_pretrained(tmp_path / place, model)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_saved_leaves_the_old_file(written, tmp_path):
    file, model = tmp_path / "memory.safetensors", infini_gpt2()
    file.write_bytes(written[-1])
    cache, empty = read(model, input_ids=token_ids(1, 20)), InfiniCache(model.config)
    with pytest.raises(ValueError, match="this cache has read nothing yet"):
        empty.save_pretrained(file, model)
    for wrong in ("abc", [], ["a", "b"]):
        with pytest.raises(ValueError, match="text_sha256"):
            cache.save_pretrained(file, model, text_sha256=wrong)
    assert file.read_bytes() == written[-1] and list(tmp_path.iterdir()) == [file]
