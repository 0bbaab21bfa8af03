"""Corpora as the web has them: damaged, hostile or odd files are named, left out and listed, or
read as they are."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import time

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from bad_input import handled
from cli import UserError
from cli.corpus_options import CorpusOptions
from corpora.documents import Document
from corpora.sources import corpus_documents
from running import load_recipe

TEXT = "o rato roeu a roupa do rei de roma\n" * 20
ROWS = [{"text": f"{number} {TEXT}", "id": str(number)} for number in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
TEI = '<teiCorpus xmlns="http://www.tei-c.org/ns/1.0">{}</teiCorpus>'
DOCUMENT = f"<TEI><text><body><p>{TEXT}</p></body></text></TEI>"
ENTITIES = '<!ENTITY a "ha">' + "".join(f'<!ENTITY a{i} "{"&a;" * 10}">' for i in range(9))


def xml(body: str, prolog: str = "") -> bytes:
    return gzip.compress((prolog + TEI.format(body)).encode())


def binary(write) -> bytes:
    sink = io.BytesIO()
    write(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


def table() -> bytes:
    sink = io.StringIO()
    writer = csv.DictWriter(sink, ["text", "id"])
    writer.writeheader(), writer.writerows(ROWS)
    return sink.getvalue().encode()


FILES = {
    "a.txt": TEXT.encode(),
    "a.txt.gz": gzip.compress(TEXT.encode()),
    "a.txt.xz": lzma.compress(TEXT.encode()),
    "a.txt.bz2": bz2.compress(TEXT.encode()),
    "a.txt.zst": pa.compress(TEXT.encode(), codec="zstd", asbytes=True),
    "a.jsonl": LINES.encode(),
    "a.json": json.dumps(ROWS, indent=1).encode(),
    "a.csv": table(),
    "a.parquet": binary(parquet.write_table),
    "a.xml": TEI.format(DOCUMENT * 3).encode(),
    "a.xml.gz": xml(DOCUMENT * 3),
}
damages = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 0.99), st.just(b"")),
    st.tuples(
        st.sampled_from(["replace", "insert"]), st.floats(0, 1), st.binary(min_size=1, max_size=9)
    ),
)


def damaged(content: bytes, damage) -> bytes:
    kind, share, new = damage
    place = int(share * len(content))
    return (
        content[:place]
        + new
        + content[place + (len(content) if kind == "cut" else len(new) * (kind == "replace")) :]
    )


def read(source, log=None, **options) -> list[Document]:
    return list(corpus_documents(CorpusOptions(str(source), **options), log))


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_or_has_another_text(name, tmp_path):
    """Never another error."""

    @settings(
        max_examples=8 if name == "a.parquet" else 40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(damages)
    def check(damage):
        (tmp_path / name).write_bytes(damaged(FILES[name], damage))
        try:
            found = read(tmp_path / name)
        except UserError as error:
            assert name in str(error)
        else:
            assert all(document.text.strip() for document in found)

    check()


# A file's name, its content, and what the message says of it
NAMED = {
    "blank text": ("a.txt", b" \n\t\n", "the file is empty"),
    "latin-1": ("a.txt", "maçã".encode("latin-1"), "not UTF-8 (.*byte 0xe7 in position 2"),
    "NUL bytes": ("a.txt", b"texto\0texto", "character 5 is NUL"),
    "other XML": ("a.xml", b"<html></html>", "no <TEI> document"),
    "gzip that is none": ("a.txt.gz", TEXT.encode(), "damaged or truncated"),
    "broken JSON": ("a.jsonl", LINES.encode() + b'{"text": "abc', "row 4 is not valid JSON"),
    "deep JSON": (
        "a.jsonl",
        (LINES + "[" * 100_000 + "]" * 100_000).encode(),
        "row 4 is not valid JSON",
    ),
    "ragged csv": ("a.csv", b"text,b\n1,2,3\n", "row 1 has more or fewer cells than the header"),
}


@pytest.mark.parametrize("case", NAMED)
def test_what_is_said_of_a_damaged_file(case, tmp_path):
    name, content, message = NAMED[case]
    (tmp_path / name).write_bytes(content)
    pattern = rf"{name}: .*{message.replace('(', '[(]')}"
    with pytest.raises(UserError, match=pattern) as error:
        read(tmp_path / name)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    "row",
    ['{"text": "a\\ud800b"}', "[1]", '{"txt": "a"}', '{"text": 3}'],
)
def test_rows_without_a_text(row, tmp_path):
    (tmp_path / "a.jsonl").write_text(LINES + row + "\n")
    with pytest.raises(UserError, match="a.jsonl: row 4 "):
        read(tmp_path)


def test_entities_are_not_expanded(tmp_path):
    """Neither a bomb of them, nor the content of a file."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for entities in (ENTITIES, f'<!ENTITY a8 SYSTEM "{secret.as_uri()}">'):
        body = DOCUMENT.replace("<p>", "<p>&a8;")
        (tmp_path / "a.xml.gz").write_bytes(xml(body, f"<!DOCTYPE teiCorpus [{entities}]>"))
        (found,) = read(tmp_path / "a.xml.gz")
        assert "secret" not in found.text and len(found.text) < len(TEXT) + 9


def test_places(tmp_path):
    for name in ("empty", "pdf", "mixed", "link", "self"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "pdf" / "a.pdf").write_bytes(b"%PDF")
    for name in ("mixed/a.csv", "mixed/a.parquet", "link/good.txt", "self/a.txt"):
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "link" / "link.txt").symlink_to(tmp_path / "gone.txt")
    (tmp_path / "self" / "again").symlink_to(tmp_path / "self")
    for source, message in (
        (tmp_path / "pipe.txt", "there is no file or folder"),
        (tmp_path / "loop", "there is no file or folder"),
        (tmp_path / "link", "link.txt"),
        (tmp_path / "pdf", "got none"),
        (tmp_path / "empty", "got none"),
        (tmp_path / "mixed", "got 1 csv, 1 parquet: rename or move"),
        ("owner/no-such-dataset", "the dataset cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            read(source)
    assert len(read(tmp_path / "self")) == 1


ODD = {
    "old macintosh": ("a.txt", TEXT.replace("\n", "\r").encode(), "line", 20),
    "windows paragraphs": ("a.txt", b"um dois\r\n\r\nquatro\r\n \r\nsete", "paragraph", 3),
    "byte-order mark": (
        "a.jsonl",
        b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n").encode(),
        "file",
        3,
    ),
    "the same id twice": ("a.jsonl", b'{"id": 1, "text": "a"}\n' * 3, "file", 3),
    "an address that is none": (
        "a.xml",
        TEI.format(
            DOCUMENT.replace(
                "<TEI>",
                '<TEI><teiHeader><fileDesc><sourceDesc><media url="http://[x"/>'
                "</sourceDesc></fileDesc></teiHeader>",
            )
        ).encode(),
        "file",
        1,
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_files_are_read(case, tmp_path):
    name, content, unit, documents = ODD[case]
    (tmp_path / name).write_bytes(content)
    found = read(
        tmp_path / name, text_unit=unit, prose_filter=name == "a.xml", prose_min_characters=1
    )
    assert len(found) == len({document.id for document in found}) == documents


def test_stretches_without_a_break_take_linear_time(tmp_path, capsys):
    """The BPE's training took 280 s and more where this takes two: each of its merges read the
    whole stretch."""
    words = " ".join(f"{number:x}abc{number * 7919:x}" for number in range(4000))
    (tmp_path / "a.txt").write_text(words + "a" * 500_000 + words)
    argv = [
        *f"--source {tmp_path / 'a.txt'} --out {tmp_path / 'out'} --context 8".split(),
        *"--split_by block".split(),
    ]
    start = time.process_time()
    handled(load_recipe("prepare").main, [*argv, "--vocab_size", "2000"], capsys)
    assert time.process_time() - start < 30  # ten times what it takes, for slow machines
