"""Corpora as the web has them: damaged, hostile or odd files are named, skipped and counted, or read as they are."""

import bz2
import gzip
import json
import lzma
import os
import time

import pytest

from bad_input import handled, refused
from running import load_recipe

TEXT = "o rato roeu a roupa do rei de roma\n" * 60
GOOD = json.dumps({"text": TEXT}) + "\n"
DEEP = "[" * 100_000 + "]" * 100_000
TEI = '<teiCorpus xmlns="http://www.tei-c.org/ns/1.0">{}</teiCorpus>'
DOCUMENT = f"<TEI><text><body><p>{TEXT}</p></body></text></TEI>"
ENTITIES = '<!ENTITY a "ha">' + "".join(f'<!ENTITY a{i} "{"&a;" * 10}">' for i in range(9))


def xml(body: str, prolog: str = "") -> bytes:
    return gzip.compress((prolog + TEI.format(body)).encode())


# A file's name, its content, and what the message says of it
DAMAGED = {
    "empty text": ("a.txt", b"", "the file is empty"),
    "blank text": ("a.txt", b" \n\t\n", "holds no text"),
    "only a byte-order mark": ("a.txt", b"\xef\xbb\xbf", "holds no text"),
    "latin-1": ("a.txt", "maçã".encode("latin-1"), "not UTF-8, byte 2"),
    "utf-16": ("a.txt", "texto".encode("utf-16"), "UTF-16? prepare.py reads that with --encoding utf-16"),
    "utf-32": ("a.txt", "texto".encode("utf-32"), "is it binary"),
    "NUL bytes": ("a.txt", b"texto\0texto", "character 5 is NUL"),
    "binary": ("a.txt", b"\x89PNG\r\n\x1a\n\x01\xff\xfe", "not UTF-8"),
    "a surrogate in UTF-8": ("a.txt", b"a\xed\xa0\x80b", "not UTF-8, byte 1"),
    "overlong UTF-8": ("a.txt", b"a\xc0\xafb", "not UTF-8, byte 1"),
    "half a character at the end": ("a.txt", "maçã".encode()[:-1], "not UTF-8"),
    "gzip that is none": ("a.txt.gz", TEXT.encode(), "damaged or truncated"),
    "cut gzip": ("a.txt.gz", gzip.compress(os.urandom(2000))[:-500], "damaged or truncated"),
    "gzip with a flipped byte": ("a.txt.gz", gzip.compress(TEXT.encode())[:-3] + b"xyz", "damaged or truncated"),
    "empty gzip": ("a.txt.gz", gzip.compress(b""), "the file is empty"),
    "no bytes as gzip": ("a.txt.gz", b"", "the file is empty"),
    "cut xz": ("a.txt.xz", lzma.compress(os.urandom(2000))[:-500], "damaged or truncated"),
    "xz that is none": ("a.txt.xz", TEXT.encode(), "damaged or truncated"),
    "cut bzip2": ("a.txt.bz2", bz2.compress(os.urandom(2000))[:-500], "damaged or truncated"),
    "bzip2 that is none": ("a.txt.bz2", TEXT.encode(), "damaged or truncated"),
    "binary in gzip": ("a.txt.gz", gzip.compress(b"\0" * 50), "character 0 is NUL"),
    "gzip in gzip": ("a.txt.gz", gzip.compress(gzip.compress(TEXT.encode())), "a.txt.gz"),
    "empty JSONL": ("a.jsonl", b"", "the file is empty"),
    "JSONL not UTF-8": ("a.jsonl", GOOD.encode() + b'{"text": "\xff"}', "not UTF-8"),
    "JSONL in UTF-16": ("a.jsonl", GOOD.encode("utf-16"), "--encoding utf-16"),
    "broken JSON": ("a.jsonl", GOOD.encode() + b'{"text": "abc', "line 2 is not valid JSON"),
    "no JSON": ("a.jsonl", b"text\n", "line 1 is not valid JSON"),
    "several objects in a line": ("a.jsonl", GOOD.strip().encode() * 2, "line 1 is not valid JSON"),
    "objects over lines": ("a.jsonl", json.dumps({"text": TEXT}, indent=1).encode() * 2, "line 3 is not valid JSON"),
    "a cut array": ("a.json", json.dumps([{"text": TEXT}] * 3, indent=1).encode()[:-30], "line 9 is not valid JSON"),
    "deep JSON": ("a.jsonl", (GOOD + DEEP).encode(), "line 2 nests JSON too deeply"),
    "deep JSON in an entry": ("a.jsonl", f'{{"text": "a", "x": {DEEP}}}'.encode(), "line 1 nests JSON too deeply"),
    "a number of 10,000 digits": ("a.jsonl", b'{"text": "a", "id": ' + b"1" * 10_000 + b"}", "line 1 is not valid JSON"),
    "NUL in JSONL": ("a.jsonl", b'{"text": "a\0b"}', "is NUL"),
    "cut gzip of JSONL": ("a.jsonl.gz", gzip.compress(GOOD.encode())[:-9], "damaged or truncated"),
    "Carolina: no gzip": ("a.xml.gz", TEI.format(DOCUMENT).encode(), "damaged or truncated"),
    "Carolina: cut": ("a.xml.gz", xml(DOCUMENT)[:-9], "damaged or truncated"),
    "Carolina: cut XML": ("a.xml.gz", gzip.compress(TEI.format(DOCUMENT)[:-20].encode()), "damaged XML"),
    "Carolina: no XML": ("a.xml.gz", gzip.compress(TEXT.encode()), "damaged XML"),
    "Carolina: a bomb of entities": ("a.xml.gz", xml(DOCUMENT, f"<!DOCTYPE teiCorpus [{ENTITIES}]>"), "holds a DOCTYPE"),
    "Carolina: a file's content": (
        "a.xml.gz",
        xml(DOCUMENT, '<!DOCTYPE teiCorpus [<!ENTITY e SYSTEM "file:///etc/passwd">]>'),
        "holds a DOCTYPE",
    ),
    "Carolina: half a surrogate pair": ("a.xml.gz", xml(DOCUMENT.replace("rato", "&#xD800;")), "damaged XML"),
    "Carolina: a NUL": ("a.xml.gz", xml(DOCUMENT.replace("rato", "\0")), "is NUL"),
    "Carolina: deep": ("a.xml.gz", xml("<a>" * 5000 + "</a>" * 5000), "damaged XML"),
    "Carolina: other XML": ("a.xml.gz", gzip.compress(b"<html></html>"), "no <TEI> document"),
    "Carolina: UTF-16": ("a.xml.gz", gzip.compress(TEI.format(DOCUMENT).encode("utf-16")), "--encoding utf-16"),
    "bomb of gzip": ("a.txt.gz", gzip.compress(b"a" * 3_000_000), "more than --max_file_gb 0.002 of text"),
    "bomb of xz": ("a.txt.xz", lzma.compress(b"a" * 3_000_000), "more than --max_file_gb 0.002 of text"),
    "bomb of bzip2": ("a.txt.bz2", bz2.compress(b"a" * 3_000_000), "more than --max_file_gb 0.002 of text"),
    "bomb of JSONL": ("a.jsonl.gz", gzip.compress(b'{"text":"' + b"a" * 3_000_000 + b'"}'), "more than --max_file_gb"),
    "bomb of XML": ("a.xml.gz", xml("<p>" + "a" * 3_000_000 + "</p>"), "more than --max_file_gb"),
    "large text": ("a.txt", b"a " * 1_500_000, "more than --max_file_gb 0.002 of text"),
}
KINDS = {"a.txt": TEXT.encode(), "a.jsonl": GOOD.encode(), "a.json": GOOD.encode(), "a.xml.gz": xml(DOCUMENT * 3)}


def options(source, out) -> list[str]:
    words = ["--source", source, "--out", out, "--vocab_size", "258", "--context", "8", "--max_file_gb", "0.002"]
    return [*map(str, words), "--split_by", "block"]


def prepare(*argv) -> None:
    load_recipe("prepare").main([*map(str, argv)])


def manifest(out) -> dict:
    return json.loads((out / "manifest.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_named(case, tmp_path, capsys):
    name, content, message = DAMAGED[case]
    (tmp_path / name).write_bytes(content)
    line = refused(load_recipe("prepare").main, options(tmp_path / name, tmp_path / "out"), capsys, name, message)
    assert "--skip_bad" in line and len(line) < 600


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_left_out_and_listed(case, tmp_path, capsys):
    name, content, message = DAMAGED[case]
    kind = next(good for good in KINDS if name.startswith(good))
    source, out = tmp_path / "corpus" / "wikis", tmp_path / "out"
    source.mkdir(parents=True)
    (source / name).write_bytes(content)
    (source / f"good{kind[1:]}").write_bytes(KINDS[kind])
    handled(load_recipe("prepare").main, [*options(source, out), "--skip_bad"], capsys, f"skipped {name}")
    found = manifest(out)["source"]
    assert [entry["file"] for entry in found["skipped"]] == [name] and message in found["skipped"][0]["reason"]
    assert found["documents"] >= 1


# Rows that are whole as JSON, and without a text
BAD_ROWS = {
    "half a surrogate pair": '{"text": "a\\ud800b"}',
    "the other half": '{"text": "\\udc00"}',
    "half a pair in the id": '{"text": "a", "id": "\\ud83d"}',
    "half a pair in the title": '{"text": "a", "title": "\\ud83d"}',
    "no object": "[1]",
    "a number": "3",
    "null": "null",
    "a text": '"text"',
    "no text": '{"txt": "a"}',
    "empty object": "{}",
    "text null": '{"text": null}',
    "text a number": '{"text": 3}',
    "text a list": '{"text": ["a"]}',
    "text an object": '{"text": {"a": "b"}}',
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_without_a_text(case, tmp_path, capsys):
    source = tmp_path / "rows.jsonl"
    source.write_text(GOOD + BAD_ROWS[case] + "\n" + GOOD)
    refused(load_recipe("prepare").main, options(source, tmp_path / "out"), capsys, "rows.jsonl: line 2", "--skip_bad")
    handled(load_recipe("prepare").main, [*options(source, tmp_path / "out"), "--skip_bad"], capsys)
    found = manifest(tmp_path / "out")["source"]
    assert found["documents"] == 2 and found["skipped"] == [] and found["dropped"] == {"without text in 'text'": 1}


def test_all_rows_without_a_text(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(GOOD)
    argv = [*options(tmp_path / "rows.jsonl", tmp_path / "out"), "--skip_bad", "--text_field", "body"]
    refused(load_recipe("prepare").main, argv, capsys, "no document is left (1 without text in 'body'")


TABLES = {
    "empty parquet": ("a.parquet", b""),
    "no parquet": ("a.parquet", b"PAR1" + b"x" * 50),
    "text as parquet": ("a.parquet", TEXT.encode()),
    "empty csv": ("a.csv", b""),
    "binary csv": ("a.csv", b"\xff\xfe\0\0" * 20),
    "csv in latin-1": ("a.csv", "text\nmaçã\n".encode("latin-1")),
    "csv of other lengths": ("a.csv", b"text,b\n1,2,3,4\n5\n"),
    "csv without the field": ("a.csv", b"a,b\n1,2\n"),
    "csv with a hole": ("a.csv", b"text,b\nabc,1\n,2\n"),
    "no arrow": ("a.arrow", b"ARROW1" + b"x" * 50),
    "empty arrow": ("a.arrow", b""),
    "a saved dataset that is none": ("state.json", b"{}"),
    "a saved dataset of garbage": ("dataset_dict.json", b"["),
    "a saved dataset without its parts": ("dataset_dict.json", b'{"splits": ["train"]}'),
}


@pytest.mark.parametrize("case", TABLES)
def test_damaged_tables(case, tmp_path, capsys):
    name, content = TABLES[case]
    source = tmp_path / "corpus"
    source.mkdir()
    (source / name).write_bytes(content)
    refused(load_recipe("prepare").main, options(source, tmp_path / "out"), capsys, str(source), keeps=source)


def test_a_split_that_is_not_there(tmp_path, capsys):
    import datasets

    table = datasets.Dataset.from_dict({"text": [TEXT, None]})
    datasets.DatasetDict({"treino": table}).save_to_disk(tmp_path / "saved")
    argv = options(tmp_path / "saved", tmp_path / "out")
    refused(load_recipe("prepare").main, argv, capsys, "no split 'train' (--dataset_split); it has treino")
    argv += ["--dataset_split", "treino"]
    refused(load_recipe("prepare").main, argv, capsys, "row 2 has no text")
    handled(load_recipe("prepare").main, [*argv, "--skip_bad"], capsys)
    assert manifest(tmp_path / "out")["source"]["dropped"] == {"without text in 'text'": 1}


# --- places ---


def pipe(folder):
    os.mkfifo(folder / "pipe.txt")
    return folder / "pipe.txt", "neither a file nor a folder"


def missing(folder):
    return folder / "missing.txt", "there is no file or folder"


def broken_link(folder):
    (folder / "link.txt").symlink_to(folder / "gone.txt")
    return folder / "link.txt", "there is no file or folder"


def looping_link(folder):
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop", "there is no file or folder"


def folder_with_a_broken_link(folder):
    (folder / "good.txt").write_text(TEXT)
    (folder / "link.txt").symlink_to(folder / "gone.txt")
    return folder, "link.txt"


def folder_without_text(folder):
    (folder / "a.pdf").write_bytes(b"%PDF")
    return folder, "holds no text file (.txt, .text, also compressed); say with --format what files of .pdf hold"


def empty_folder(folder):
    return folder, "holds no text file"


def device(folder):
    return "/dev/zero", "neither a file nor a folder"


def long_name(folder):
    return folder / ("a" * 300), "name too long"


def mixed_tables(folder):
    for name in ("a.csv", "a.parquet"):
        (folder / name).write_text("text\na\n")
    return folder, "mixes files of several kinds (1 parquet, 1 csv); choose one with --format"


def name_of_no_dataset(folder):
    return "owner/no-such-dataset", "the dataset cannot be read"


def carolina_without_the_part(folder):
    (folder / "a.xml.gz").write_bytes(xml(DOCUMENT))
    return folder, "holds no *.xml.gz shard"


PLACES = [pipe, missing, broken_link, looping_link, folder_with_a_broken_link, folder_without_text, empty_folder, device,
          long_name, mixed_tables, name_of_no_dataset, carolina_without_the_part]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_places(place, tmp_path, capsys):
    (tmp_path / "corpus").mkdir()
    source, message = place(tmp_path / "corpus")
    argv = options(source, tmp_path / "out") + (["--taxonomy", "jud"] if place is carolina_without_the_part else [])
    assert message in refused(load_recipe("prepare").main, argv, capsys).replace("File name", "name")


def test_a_link_that_leads_nowhere_is_counted(tmp_path, capsys):
    source, _ = folder_with_a_broken_link(tmp_path)
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    handled(load_recipe("prepare").main, [*options(source, tmp_path.with_name("out")), "--skip_bad"], capsys)
    found = manifest(tmp_path.with_name("out"))["source"]
    assert sorted(entry["file"] for entry in found["skipped"]) == ["link.txt", "loop.txt"] and found["documents"] == 1


def test_a_folder_that_links_to_itself(tmp_path, capsys):
    source = tmp_path / "corpus"
    source.mkdir()
    (source / "again").symlink_to(source)
    (source / "a.txt").write_text(TEXT)
    handled(load_recipe("prepare").main, options(source, tmp_path / "out"), capsys)
    assert manifest(tmp_path / "out")["source"]["documents"] == 1


# --- odd, and read as they are ---

ODD = {
    "windows": ("a.txt", TEXT.replace("\n", "\r\n").encode(), "file", 1),
    "old macintosh": ("a.txt", TEXT.replace("\n", "\r").encode(), "line", 60),
    "windows lines": ("a.txt", TEXT.replace("\n", "\r\n").encode(), "line", 60),
    "windows paragraphs": ("a.txt", b"um dois tres\r\n\r\nquatro cinco seis\r\n \r\nsete oito nove", "paragraph", 3),
    "byte-order mark": ("a.txt", b"\xef\xbb\xbf" + TEXT.encode(), "file", 1),
    "windows JSONL": ("a.jsonl", b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode() * 2, "file", 2),
    "blank lines in JSONL": ("a.jsonl", b"\n\n" + GOOD.encode() + b" \n\n" + GOOD.encode(), "file", 2),
    "NUL as JSON has it": ("a.jsonl", (GOOD + '{"text": "a\\u0000b"}').encode(), "file", 2),
    "a whole surrogate pair": ("a.jsonl", (GOOD + '{"text": "\\ud83d\\ude00"}').encode(), "file", 2),
    "the same id twice": ("a.jsonl", (GOOD.replace("{", '{"id": 1, ') * 3).encode(), "file", 3),
    "the same name twice": ("a.jsonl", GOOD.replace("{", '{"text": "", ').encode(), "file", 1),
    "no address": ("a.xml.gz", xml(DOCUMENT), "file", 1),
    "control characters": ("a.txt", TEXT.encode() + bytes(range(1, 32)), "file", 1),
    "one letter": ("a.txt", b"a" * 500, "file", 1),
    "white space between": ("a.txt", b"a" + b" " * 50_000 + b"b" * 20, "file", 1),
    "private and unassigned characters": ("a.txt", (TEXT + "\ue000\uffff\U0010ffff").encode(), "file", 1),
    "an end-of-text token in the text": ("a.txt", (TEXT + "<|endoftext|><|pad|>" * 9).encode(), "file", 1),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_files_are_read(case, tmp_path, capsys):
    name, content, unit, documents = ODD[case]
    (tmp_path / name).write_bytes(content)
    argv = [*options(tmp_path / name, tmp_path / "out"), "--text_unit", unit]
    handled(load_recipe("prepare").main, argv, capsys)
    assert manifest(tmp_path / "out")["source"]["documents"] == documents


def test_a_shard_whose_address_is_none(tmp_path, capsys):
    media = '<teiHeader><fileDesc><sourceDesc><media url="http://[x"/></sourceDesc></fileDesc></teiHeader>'
    (tmp_path / "a.xml.gz").write_bytes(xml(DOCUMENT.replace("<TEI>", f"<TEI>{media}")))
    argv = [*options(tmp_path / "a.xml.gz", tmp_path / "out"), "--prose_filter", "--prose_min_characters", "1"]
    handled(load_recipe("prepare").main, argv, capsys)
    assert manifest(tmp_path / "out")["source"]["documents"] == 1


STRETCHES = {"letters": "a", "spaces": " ", "base64": "ab1+", "lines": "\n"}
STRETCHED = [(name, tokenizer) for name in STRETCHES for tokenizer in ("bpe", "characters")]


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [pytest.param(*case, marks=() if case == ("letters", "bpe") else pytest.mark.slow) for case in STRETCHED],
)
def test_stretches_without_a_break_take_linear_time(name, tokenizer, tmp_path, capsys):
    """The BPE's training took 280 s and more where these take two: each of its merges read the whole stretch."""
    words = " ".join(f"{number:x}abc{number * 7919:x}" for number in range(4000))
    stretch = STRETCHES[name]
    (tmp_path / "a.txt").write_text(words + stretch * (500_000 // len(stretch)) + words)
    argv = [*options(tmp_path / "a.txt", tmp_path / "out"), "--vocab_size", "2000", "--tokenizer", tokenizer]
    start = time.process_time()
    handled(load_recipe("prepare").main, argv, capsys)
    assert time.process_time() - start < 30  # ten times what it takes, for slow machines
