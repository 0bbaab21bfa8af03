"""An archive in 8 bits: how numbers are rounded, that it is the exact archive rounded, however a
text was read, and that the two kinds are not taken for each other."""

import random
import warnings
from pathlib import Path

import pytest
import torch

from corpora.tokenization import train_bpe
from decoders import decoder
from hf_infini import InfiniCache, estimate, patch_model
from hf_infini.cache.archive import Archive, Call, Row
from hf_infini.cache.archive_files import archive_bytes
from hf_infini.cache.files import MemoryFileError
from hf_infini.cache.joined import joined
from hf_infini.cache.merged import merged
from hf_infini.compat.cache_name import CACHE
from hf_infini.ops.int8 import STEP_BYTES, from_int8, to_int8
from hf_infini.ops.naive import naive_int8
from hf_infini.tools.cache_folder import memory_names
from hf_infini.tools.reader import Reader
from running import sample_text

KINDS = (True, "int8")
ENDS = ("", ".archive")  # of the names of files
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WINDOW = {"segment_length": 16, "local_segments": 1, "sink_tokens": 2, "kept_tokens": 24}
WINDOW |= {"update_rule": "none", "keep_score": "recent", "mask_special_tokens": False}


def patched(family: str = "llama", **options):
    layers = {"num_hidden_layers": 2} if family == "llama" else {}  # of the other half slide
    plain = decoder(family, max_position_embeddings=4096, **layers)
    return patch_model(plain, **WINDOW | options).eval()


@torch.no_grad()
def read(model, ids, archive, cuts=(), mask=None) -> InfiniCache:
    """A cache after ids, in calls that begin at the cuts."""
    cache, begins = InfiniCache(model.config, archive=archive), [0, *cuts, ids.shape[1]]
    for begin, end in zip(begins, begins[1:], strict=False):
        part = slice(begin, end)
        own = {} if mask is None else {"attention_mask": mask[:, part]}
        model(input_ids=ids[:, part], use_cache=True, **{CACHE: cache}, **own)
    return cache


def text(rows: int, tokens: int, seed: int = 0):
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def rounded(states):
    """By the naive formula; `[…, width]`."""
    return torch.stack([*map(naive_int8, states.reshape(-1, states.shape[-1]))]).view_as(states)


# --- numbers


def vectors(seed: int, dtype: torch.dtype):
    """Of any sizes, with zeros, and some as large or small as the dtype has them."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape = [draw.randrange(1, 5) for _ in range(draw.randrange(3))]
    states = torch.randn(*shape, 6, draw.randrange(1, 70), dtype=torch.float64)
    limits = torch.finfo(dtype)
    states[..., 0, :] = 0
    states[..., 1, :] *= limits.tiny / draw.choice([1, 3, 100])
    states[..., 2, :] = states[..., 2, :].sign() * limits.max
    states[..., 3, 0] = limits.max
    states[..., 4, :] *= torch.rand(states.shape[-1], dtype=torch.float64) < 0.3
    return states.clamp(limits.min, limits.max).to(dtype)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_off_by_half_a_step_at_most(dtype, seed):
    given = vectors(seed, dtype)
    packed = to_int8(given)
    assert packed.dtype == torch.uint8 and packed.shape[-1] == given.shape[-1] + STEP_BYTES
    found = from_int8(packed, dtype)
    assert found.dtype == dtype and torch.equal(found, rounded(given))
    exact, back = given.double(), found.double()
    step = exact.abs().amax(-1, keepdim=True).clamp(min=127 * 2.0**-126) / 127
    # and the rounding of the dtype, also of numbers without all of its digits; of float32, in
    # which the step is, too
    limits = torch.finfo(dtype)
    own = limits.eps * exact.abs() + limits.tiny * limits.eps
    assert ((back - exact).abs() <= step / 2 * (1 + 2**-15) + own).all()
    assert bool((found[exact == 0] == 0).all()) and bool(found.isfinite().all())


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_vector_with_a_number_that_is_not_finite_is_nan(dtype, bad):
    """It alone, and not as some number by which nobody would notice it."""
    given = torch.randn(3, 40).to(dtype)
    given[1, 7] = bad
    found = from_int8(to_int8(given), dtype)
    assert found[1].isnan().all() and naive_int8(given[1]).isnan().all()
    assert torch.equal(found[::2], rounded(given[::2]))
    assert torch.equal(to_int8(given)[1, :40], torch.zeros(40, dtype=torch.uint8))


def test_what_float32_does_not_have_is_no_number():
    given = torch.tensor([[1e300, 2], [1e-300, -2]], dtype=torch.float64)
    found = from_int8(to_int8(given), torch.float64)
    assert found[0].isnan().all() and torch.equal(found[1], rounded(given[1:])[0])


# --- the archive


def row_bytes(row: Row) -> torch.Tensor:
    return row.found(torch.arange(row.tokens))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_have_the_same_bytes_in_any_calls(kind, seed):
    """Whatever the cuts, the padding, and the rows beside them."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    tokens, rows, dtype = draw.randrange(1, 400), draw.randrange(1, 4), draw.choice(DTYPES)
    shape = rows, 2, tokens, draw.choice([5, 16])
    layers = {n: tuple(torch.randn(2, *shape).mul(9).to(dtype)) for n in (0, 3)}
    ids, real = torch.arange(tokens).repeat(rows, 1), torch.rand(rows, tokens) < 0.8

    def archived(chosen: list[int], cuts: list[int]) -> tuple[Row, ...]:
        archive = InfiniCache(patched().config, archive=kind).archive
        for begin, end in zip([0, *cuts], [*cuts, tokens], strict=True):
            part = slice(begin, end)
            own = {
                n: tuple(side[chosen][:, :, part] for side in pair) for n, pair in layers.items()
            }
            mask, seen = real[chosen][:, part], real[chosen][:, :end].sum(1)
            archive = archive.after(Call(ids[chosen][:, part], mask, mask, seen, own))
        return archive.rows()

    every = [*range(rows)]
    whole = archived(every, [])
    cuts = sorted(draw.sample(range(1, tokens), min(tokens - 1, draw.randrange(6))))
    found = archived(every, cuts), [archived([row], cuts)[0] for row in every]
    for count, one, *others in zip(real.sum(1).tolist(), whole, *found, strict=True):
        assert one.tokens == count
        for other in others:
            assert torch.equal(row_bytes(one), row_bytes(other)) and one.parts == other.parts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_recall_is_the_exact_one_with_rounded_keys_and_values(family, seed, tmp_path):
    """Random cuts, padding and rows; from memory, from a file, and when both have read on."""
    model, draw = patched(family), random.Random(seed)
    rows, tokens = draw.randrange(1, 4), draw.randrange(90, 300)
    ids, mask = text(rows, tokens, seed), torch.ones(rows, tokens, dtype=torch.long)
    for row in range(rows):
        mask[row, : draw.randrange(20)] = 0
    cuts = sorted(draw.sample(range(1, tokens), 3))
    question = [draw.choices(row.tolist(), k=4) for row in ids]
    exact, own = (read(model, ids, kind, cuts, mask) for kind in KINDS)
    own.save_pretrained(tmp_path / "text", model)
    loaded = InfiniCache.from_pretrained(tmp_path / "text", model)
    assert (exact.archived, own.archived, loaded.archived) == (True, "int8", "int8")
    for goes_on in (False, True):
        if goes_on:
            with torch.no_grad():
                for cache in (exact, own, loaded):
                    model(input_ids=text(rows, 70, seed + 1), use_cache=True, **{CACHE: cache})
            loaded.save_pretrained(tmp_path / "text", model)
            loaded = InfiniCache.from_pretrained(tmp_path / "text", model)
        wanted, *found = (cache.recall(question) for cache in (exact, own, loaded))
        for layer, window in wanted.windows.items():
            places = slice(window.sink_tokens, window.ahead)
            states = [each.layers[layer].state.tensors() for each in (wanted, *found)]
            for name in ("local_key", "local_value"):
                states[0][name] = states[0][name].clone()
                states[0][name][:, :, places] = rounded(states[0][name][:, :, places])
            for other in states[1:]:
                assert all(torch.equal(states[0][name], other[name]) for name in other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_documents_in_8_bits_are_asked_together(dtype):
    model = patched().to(dtype)
    documents = [text(1, tokens, seed) for seed, tokens in enumerate((200, 20, 130))]
    question = torch.cat([documents[0][0, 20:23], documents[1][0, 5:8]])
    wanted, found = (
        joined([read(model, ids, kind) for ids in documents]).recall(question) for kind in KINDS
    )
    for layer, window in found.windows.items():
        places = slice(window.sink_tokens, window.ahead)
        one, two = (cache.layers[layer].state for cache in (wanted, found))
        assert torch.equal(one.kept_position, two.kept_position)
        for name in ("local_key", "local_value"):
            pair = (getattr(state, name)[:, :, places] for state in (one, two))
            assert torch.equal(rounded(next(pair)), next(pair))


def test_the_two_kinds_are_not_mixed():
    model, ids = patched(), text(1, 200)
    exact, own = (read(model, ids, kind) for kind in KINDS)
    for pair in ((exact, own), (own, exact)):
        with pytest.raises(ValueError, match="float32(, rounded to int8)?, and the one before in"):
            joined(pair)
        with pytest.raises(ValueError, match="cache 1 has archive=.*, and cache 2 .*one kind"):
            merged(pair)
    both = merged([own, own])
    assert both.archived == "int8" and both.archive.nbytes() == own.archive.nbytes()
    own.reset()
    assert own.archived == "int8"


@pytest.mark.parametrize("archive", ["int4", "8", "", 8, None])
def test_other_kinds_are_refused(archive):
    config = patched().config
    said = f"archive must be True .*'int8'.* or False .*; got {archive!r}"
    with pytest.raises(ValueError, match=said):
        InfiniCache(config, archive=archive)
    for function in (archive_bytes, estimate):
        with pytest.raises((ValueError, TypeError), match=f"archive .*must be.*; got {archive!r}"):
            function(config, 5, archive=archive)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_are_as_estimated(dtype, family, tmp_path):
    model = patched(family).to(dtype)
    config, sizes = model.config, {}
    config.dtype = dtype
    for kind in KINDS:
        cache = read(model, text(1, 256), kind)
        sizes[kind] = archive_bytes(config, 256, kind)
        assert estimate(config, 256, archive=kind).archive == sizes[kind] == cache.archive.nbytes()
        cache.save_pretrained(tmp_path / f"{kind}", model)
        [file] = tmp_path.glob(f"{kind}.*.archive")
        ids = 256 * 9
        assert sizes[kind] - ids <= file.stat().st_size <= sizes[kind] - ids + 64
        loaded = InfiniCache.from_pretrained(tmp_path / f"{kind}", model)
        assert loaded.archive.nbytes() == ids  # the blocks are in the file
    width = config.head_dim
    of_ids = 256 * 9
    assert (sizes["int8"] - of_ids) * width * dtype.itemsize == (sizes[True] - of_ids) * (width + 4)
    assert archive_bytes(config, 256, False) == 0 == estimate(config, 256, archive=False).archive
    assert archive_bytes(config, 256) == sizes[True]


# --- files and readers


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([sample_text()], 300)


@pytest.fixture(scope="module")
def model(tokenizer):
    plain = decoder("llama", vocab_size=len(tokenizer), max_position_embeddings=4096)
    return patch_model(plain, **WINDOW).eval()


def question() -> list[dict[str, str]]:
    return [{"role": "user", "content": "Who is the king?"}]


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize(("written", "asked"), [(True, "int8"), ("int8", True)])
def test_a_reader_takes_no_file_of_the_other_kind(written, asked, part, model, tokenizer, tmp_path):
    """A part of one is passed over, and the text read in the kind that is asked for."""
    document, file = sample_text()[:2000], tmp_path / "text"

    def reader(kind, **options) -> Reader:
        return Reader(model, tokenizer, archive=kind, **options)

    reader(written).read(document, file=file, progress=False)
    if part:
        file.rename(tmp_path / "text.partial")
        with pytest.warns(UserWarning, match=f"reading from the start, for .*archive={written!r}"):
            cache = reader(asked).read(document, file=file, progress=False)
        fresh = reader(asked).read(document, progress=False)
        assert cache.archived == asked
        assert torch.equal(row_bytes(cache.archive.rows()[0]), row_bytes(fresh.archive.rows()[0]))
    else:
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        how = "without" if asked == "int8" else "with"
        with pytest.raises(MemoryFileError, match=f"archive={written!r}, .*read it {how} archive="):
            reader(asked).read(document, file=file, progress=False)
        assert before.items() <= {path: path.read_bytes() for path in tmp_path.iterdir()}.items()
    loaded = InfiniCache.from_pretrained(file, model)  # as it is
    assert reader(True, cache=loaded).archive == loaded.archived == (asked if part else written)


def test_what_was_read_goes_on_after_a_stop(model, tokenizer, tmp_path, monkeypatch):
    """Into the same bytes as without one, and so does what is read from the finished file."""
    document, read_piece, left = sample_text()[:3000], Reader._read_piece, 3
    for name in ("straight", "stopped"):
        reader = Reader(model, tokenizer, archive="int8", chunk=170)
        if name == "stopped":

            def stops(*args):
                nonlocal left
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
                read_piece(*args)

            with monkeypatch.context() as patch:
                patch.setattr(Reader, "_read_piece", stops)
                with pytest.raises(KeyboardInterrupt):
                    reader.read(document, file=tmp_path / name, progress=False)
            reader = Reader(model, tokenizer, archive="int8", chunk=170)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it does not begin again
            reader.read(document, file=tmp_path / name, progress=False)
    pairs = ((tmp_path / f"{name}{end}" for name in ("straight", "stopped")) for end in ENDS)
    assert all(next(pair).read_bytes() == next(pair).read_bytes() for pair in pairs)
    found = InfiniCache.from_pretrained(tmp_path / "stopped", model)
    more = Reader(model, tokenizer, cache=found).read(" And then?", progress=False)
    assert more.archived == "int8" and more.archive.rows()[0].tokens > found.get_seq_length()


def test_a_form_that_is_not_known_is_refused(tmp_path, monkeypatch):
    """As a later version may write it."""
    model = patched()
    cache = read(model, text(1, 200), "int8")
    [row] = cache.archive.rows()
    parts = tuple(part._replace(form="int4") for part in row.parts)
    cache.archive = Archive([row._replace(parts=parts)])
    cache.save_pretrained(tmp_path / "text", model)
    with pytest.raises(MemoryFileError, match="its archive has other parts .*'int8'.*got 'int4'"):
        InfiniCache.from_pretrained(tmp_path / "text", model)


def test_memory_files_have_names_of_their_own(model, tokenizer):
    names = [memory_names(model, tokenizer, kind)("text") for kind in (False, *KINDS)]
    assert len({*names}) == 3


def test_a_disk_with_room_for_8_bits_only(model, tokenizer, tmp_path, monkeypatch):
    """What does not fit says what would, and what fits is read."""
    text = sample_text()[:2000]
    needed = archive_bytes(model.config, len(tokenizer(text)["input_ids"]), "int8")

    class Usage:
        free = needed + 1

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    reader = Reader(model, tokenizer, archive=True)
    with pytest.raises(OSError, match="in 8 bits .archive='int8', --archive-int8., or without"):
        reader.read(text, file=tmp_path / "text", progress=False)
    own = Reader(model, tokenizer, archive="int8")
    assert own.read(text, file=tmp_path / "text", progress=False).archived == "int8"
    Usage.free = 5
    with pytest.raises(OSError, match="another disk, or read without an archive"):
        own.read(f"{text} and", file=tmp_path / "more", progress=False)
    assert not Path(tmp_path / "more").exists()
