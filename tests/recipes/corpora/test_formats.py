"""Files as they come: each format is read whole, by its suffix or by what the options say, or refused with the reason."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from cli import UserError
from cli.corpus_options import CorpusOptions
from corpora.documents import ReadingLog
from corpora.sources import corpus_documents
from running import load_recipe

TEXTS = ["água & fogo", "NA", "dois\nlinhas, “aspas”"]
ROWS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'id,text\r\n0,água & fogo\r\n1,NA\r\n2,"dois\nlinhas, “aspas”"\r\n'
TABLE = pa.Table.from_pylist(ROWS)
XML = '<?xml version="1.0"?>\n<teiCorpus xmlns="http://www.tei-c.org/ns/1.0">{}</teiCorpus>'.format(
    "".join(f"<TEI><text><body><p>{text.replace('&', '&amp;')}</p></body></text></TEI>" for text in TEXTS)
)


def binary(write) -> bytes:
    sink = io.BytesIO()
    write(sink)
    return sink.getvalue()


def arrow_stream(sink) -> None:
    with pa.ipc.new_stream(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)


def zst(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def documents_of(source, log: ReadingLog | None = None, **options):
    return list(corpus_documents(CorpusOptions(str(source), **options), log))


def texts_of(source, **options) -> list[str]:
    return [document.text for document in documents_of(source, **options)]


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


READ = {
    "lines.json": LINES,
    "array.json": json.dumps(ROWS),
    "array_over_lines.json": json.dumps(ROWS, indent=1),
    "a_row_in_a_line.json": "[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n",
    "array.jsonl": json.dumps(ROWS),
    "LINES.NDJSON": LINES,
    "mark.jsonl": "\ufeff" + LINES,
    "windows.jsonl": LINES.replace("\n", "\r\n"),
    "macintosh.jsonl": LINES.replace("\n", "\r"),
    "lines.jsonl.gz": gzip.compress(LINES.encode()),
    "lines.json.BZ2": bz2.compress(LINES.encode()),
    "lines.ndjson.xz": lzma.compress(LINES.encode()),
    "lines.jsonl.zst": zst(LINES.encode()),
    "two_frames.jsonl.zst": zst(LINES[: LINES.index("\n") + 1].encode()) + zst(LINES[LINES.index("\n") + 1 :].encode()),
    "table.csv": CSV,
    "mark.csv": "\ufeff" + CSV,
    "TABLE.CSV.GZ": gzip.compress(CSV.encode()),
    "table.tsv": 'id\ttext\n0\tágua & fogo\n1\tNA\n2\t"dois\nlinhas, “aspas”"\n',
    "table.parquet": binary(lambda sink: parquet.write_table(TABLE, sink)),
    "pieces [1]*.parquet": binary(lambda sink: parquet.write_table(TABLE, sink, row_group_size=1)),
    "stream.arrow": binary(arrow_stream),
    "file.arrow": binary(lambda sink: feather.write_feather(TABLE, sink)),
    "carolina.xml": XML,
    "CAROLINA.XML.GZ": gzip.compress(XML.encode()),
    "carolina.xml.zst": zst(XML.encode()),
}


@pytest.mark.parametrize("name", READ)
def test_each_format_gives_its_texts(name, tmp_path):
    assert texts_of(write(tmp_path / name, READ[name])) == TEXTS
    assert texts_of(tmp_path) == TEXTS  # and so does a folder with it


@pytest.mark.parametrize("name", ["a.txt", "A.TXT.GZ", "a.txt.zst", "a.MD", "a.markdown", "a.rst", "a", "[1] notes", "b.gz"])
def test_plain_text(name, tmp_path):
    text = "[Verse 1]\n<3 {x}\n"  # no JSON, no markup
    packed = {".gz": gzip.compress, ".zst": zst}.get(Path(name).suffix.lower(), bytes)
    assert texts_of(write(tmp_path / name, packed(text.encode()))) == [text]


UNKNOWN = ["a.html", "a.HTM", "a.html.gz", "a.tex", "a.log", "a.zip", "a.tar.gz", "a.pdf", "a.docx", "a.jsonl.lz4"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_file_of_an_unknown_suffix_is_refused_by_it(name, tmp_path):
    content = gzip.compress(b"<p>text</p>") if name.endswith("gz") else b"<p>text</p>"
    file = write(tmp_path / name, content)
    suffix = Path(name.removesuffix(".gz")).suffix.lower()
    with pytest.raises(UserError, match=rf"the suffix {suffix} is none .*rename it, or say with prepare.py's --format"):
        documents_of(file)
    assert texts_of(file, format="text") == ["<p>text</p>"]


JSON_OR_MARKUP = [LINES, json.dumps(ROWS), json.dumps(ROWS, indent=1), "{}", XML, "\ufeff <html>", "<!-- x -->"]


@pytest.mark.parametrize("text", JSON_OR_MARKUP)
@pytest.mark.parametrize("name", ["nosuffix", "nosuffix.gz"])
def test_json_and_markup_without_a_suffix(name, text, tmp_path):
    file = write(tmp_path / name, gzip.compress(text.encode()) if name.endswith(".gz") else text)
    with pytest.raises(UserError, match="nosuffix.* begins as JSON or markup; give it its suffix or say with .*--format"):
        documents_of(file)
    assert texts_of(file, format="text") == [text.removeprefix("\ufeff")]
    if text.lstrip()[0] in "[{" and len(text) > 2:
        assert texts_of(file, format="jsonl") == TEXTS


@pytest.mark.parametrize(
    ("content", "suffix"),
    [(gzip.compress(b"a"), ".gz"), (zst(b"a"), ".zst"), (lzma.compress(b"a"), ".xz"), (READ["table.parquet"], ".parquet")],
    ids=["gz", "zst", "xz", "parquet"],  # some contents hold the time
)
def test_what_a_file_of_another_kind_begins_as_is_said(content, suffix, tmp_path):
    with pytest.raises(UserError, match=rf"a\.txt: .* it begins as a {suffix} file does: unpack or convert it"):
        documents_of(write(tmp_path / "a.txt", content))


def test_a_folder_is_read_by_one_kind_and_what_it_leaves_out_is_said(tmp_path):
    write(tmp_path / "b.jsonl", LINES)
    for name in ("README.md", "LICENSE", "x.py", ".DS_Store", "._b.jsonl", ".git/objects.jsonl"):
        write(tmp_path / name, "\0no text")
    log = ReadingLog()
    assert [document.text for document in documents_of(tmp_path, log)] == TEXTS
    assert log.left_out == {".md": 1, "LICENSE": 1, ".py": 1}  # hidden ones are no part of a corpus
    write(tmp_path / "a.txt", "texto")
    with pytest.raises(UserError, match=r"mixes files of several kinds \(1 jsonl, 1 text\); choose one with --format"):
        documents_of(tmp_path)
    assert texts_of(tmp_path, format="text") == ["texto"] and texts_of(tmp_path, format="jsonl") == TEXTS
    write(tmp_path / "notes" / "a.md", "um")
    assert texts_of(tmp_path / "notes") == ["um"]
    write(tmp_path / "web" / "a.html", "<p>")
    with pytest.raises(UserError, match=r"holds no text file .*; say with --format what files of .html hold"):
        documents_of(tmp_path / "web")
    assert texts_of(tmp_path / "web", format="text") == ["<p>"]


@pytest.mark.parametrize("source", ["biographies", "owner/name"])
def test_a_format_is_for_files(source):
    with pytest.raises(UserError, match=f"--format text is for files, and --source {source} is none"):
        documents_of(source, format="text")


# --- encodings ---

JSON = json.dumps(ROWS[0], ensure_ascii=False)
ENCODED = {"a.txt": TEXTS[0], "a.jsonl": JSON, "a.csv": f"text\n{TEXTS[0]}\n", "a.xml": XML}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "cp1252", "utf-8-sig", "UTF8"])
@pytest.mark.parametrize("name", ENCODED)
def test_encodings(name, encoding, tmp_path):
    file = write(tmp_path / name, ENCODED[name].encode(encoding))
    assert texts_of(file, encoding=encoding)[0] == TEXTS[0]
    for other in ["ascii", "utf-8"] if "8" not in encoding else ["ascii"]:
        with pytest.raises(UserError, match=rf"{name}: (not {other.upper()}, byte|no text, character 1 is NUL).*--encoding"):
            documents_of(file, encoding=other)


@pytest.mark.parametrize(
    ("name", "encoding", "message"),
    [
        ("a.txt", "no-such", "--encoding: unknown encoding: no-such; give one of Python's"),
        ("a.txt", "hex", "--encoding: 'hex' is not a text encoding"),
        ("a.txt", "undefined", "--encoding: "),
        ("a.txt", "utf-16", "a.txt: not UTF-16, UTF-16 stream does not start with BOM"),
        ("a.txt", "unicode_escape", "a.txt: not UNICODE_ESCAPE, .*surrogates not allowed"),
        ("a.parquet", "cp1252", "--encoding cp1252 does nothing with a source of the kind parquet"),
    ],
)
def test_encodings_that_do_not_fit(name, encoding, message, tmp_path):
    with pytest.raises(UserError, match=message):
        documents_of(write(tmp_path / name, "texto \\ud800 texto"), encoding=encoding)


# --- rows ---

IDS = {
    "null": lambda number: {"id": None},
    "none": lambda number: {},
    "all the same": lambda number: {"id": 7},
    "seven": lambda number: {"id": number % 7},
    "empty": lambda number: {"id": ""},
    "NaN": lambda number: {"id": float("nan")},
}


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("shards", [1, 2])
def test_fractions_of_rows_without_ids_of_their_own(ids, shards, tmp_path):
    for shard in range(shards):  # each counts from 0
        rows = [{"text": f"texto {shard} {number}", **IDS[ids](number)} for number in range(400 // shards)]
        write(tmp_path / f"{shard}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert len({document.id for document in documents_of(tmp_path)}) == 400
    for seed in range(4):  # a binomial count: five standard deviations are 50
        half, fifth = (set(texts_of(tmp_path, fraction=fraction, seed=seed)) for fraction in (0.5, 0.2))
        assert 150 < len(half) < 250 and 40 < len(fifth) < 120 and fifth < half


@pytest.mark.parametrize("break_", ["\n", "\r\n", "\r"])
def test_lines_and_paragraphs_end_at_ends_of_lines_only(break_, tmp_path):
    lines = ["um\x85dois", "três\u2028quatro\u2029cinco", "seis\x0csete\x0b\x1c\x1d\x1eoito"]
    assert texts_of(write(tmp_path / "a.txt", break_.join(lines) + break_), text_unit="line") == lines
    file = write(tmp_path / "a.txt", f"{break_} {break_}".join(lines))
    assert texts_of(file, text_unit="paragraph") == lines
    assert texts_of(file) == [f"{break_} {break_}".join(lines)]


def test_shards_may_differ_in_columns(tmp_path):
    shards = [
        {"text": ["um"], "id": [1]},
        {"lang": ["pt"], "id": ["a"], "text": ["dois"]},
        {"text": pa.array([], pa.string()), "meta": pa.array([], pa.int8())},
        {"text": pa.array(["três"], pa.large_string()), "meta": [{"a": [1]}]},
    ]
    for number, columns in enumerate(shards):
        parquet.write_table(pa.table(columns), tmp_path / f"{number}.parquet")
    assert texts_of(tmp_path) == ["um", "dois", "três"]
    write(tmp_path / "2.parquet", b"PAR1 torn")
    with pytest.raises(UserError, match=r"2\.parquet: the parquet file cannot be read .*--skip_bad"):
        documents_of(tmp_path)
    log = ReadingLog()
    assert [document.text for document in documents_of(tmp_path, log, skip_bad=True)] == ["um", "dois", "três"]
    assert [entry["file"] for entry in log.skipped] == ["2.parquet"] and len(log.files) == 3


def test_a_table_torn_in_its_middle_is_left_out_as_a_whole(tmp_path):
    rows = [{"text": f"{number} " + hashlib.sha256(b"%d" % number).hexdigest() * 9} for number in range(3000)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=1000)
    place = parquet.read_metadata(tmp_path / "a.parquet").row_group(2).column(0).data_page_offset
    whole = (tmp_path / "a.parquet").read_bytes()
    write(tmp_path / "a.parquet", whole[: place + 20] + b"\xff" * 200 + whole[place + 220 :])
    write(tmp_path / "b.parquet", READ["table.parquet"])
    with pytest.raises(UserError, match=r"a\.parquet: the parquet file cannot be read"):
        documents_of(tmp_path)
    assert texts_of(tmp_path, skip_bad=True) == TEXTS


NESTED = [
    ("text.paragraphs", {"text": {"paragraphs": [["Um.", "Dois."], ["Três."]]}}, "Um. Dois.\nTrês."),
    ("text.paragraphs", {"text": {"paragraphs": ["Um.", "Dois."]}}, "Um.\nDois."),
    ("paragraphs", {"paragraphs": ["Um.", "Dois."]}, "Um.\nDois."),
    ("a.b.c", {"a": {"b": {"c": "Um."}}}, "Um."),
    ("messages.content", {"messages": [{"content": "Um."}, {"content": "Dois."}]}, "Um.\nDois."),
    ("a.b", {"a.b": "Um."}, "Um."),
]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(("field", "row", "text"), NESTED)
def test_dotted_names_lead_to_texts_in_objects(kind, field, row, text, tmp_path):
    content = {
        "jsonl": json.dumps(row),
        "json": json.dumps([row], indent=1),
        "parquet": binary(lambda sink: parquet.write_table(pa.Table.from_pylist([row]), sink)),
    }[kind]
    file = write(tmp_path / f"a.{kind}", content)
    assert texts_of(file, text_field=field) == [text]
    for wrong in (None, field + ".x", "x." + field):
        with pytest.raises(UserError, match=rf"has no text in the field .*; it has: {next(iter(row))}"):
            documents_of(file, text_field=wrong)


@pytest.mark.parametrize("value", [["a", 3], ["a", None], [["a"], [["b"]]], {"b": "c"}, 3, [{"b": "c"}]])
def test_lists_of_something_else_are_no_text(value, tmp_path):
    file = write(tmp_path / "a.jsonl", json.dumps({"id": 1, "a": value}))
    with pytest.raises(UserError, match="line 1 has no text in the field 'a' .*; it has: id, a"):
        documents_of(file, text_field="a")


def test_a_list_is_a_text_only_where_it_is_named(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"text": ["um", "dois"]}')
    with pytest.raises(UserError, match=r"--text_field, which joins a list if it is given\); it has: text"):
        documents_of(file)
    assert texts_of(file, text_field="text") == ["um\ndois"]


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", '{"text": "um"}\n\n{"text": 2}\n', "line 3"),
        ("a.json", '[{"text": "um"}, {"text": 2}]', "row 2"),
        ("a.csv", 'text,b\n"u\nm",1\n,2\n', "row 2"),
        ("a.tsv", "text\tb\num\t1\n\t2\n", "row 2"),
        ("a.parquet", binary(lambda sink: parquet.write_table(pa.table({"text": ["um", None]}), sink)), "row 2"),
    ],
)
def test_rows_are_counted_from_one(name, content, place, tmp_path):
    file = write(tmp_path / name, content)
    with pytest.raises(UserError, match=rf"{name}: {place} has no text in the field 'text' .*--skip_bad"):
        documents_of(file)
    (document,) = documents_of(file, skip_bad=True)
    assert document.id == f"{name}:1"


@pytest.mark.parametrize("cell", ["NA", "None", "null", "NaN", "N/A", "-", "1.50", "007", "True", "2024-01-01", '"quoted"'])
def test_cells_are_text_as_they_are_written(cell, tmp_path):
    quoted = cell.replace('"', '""')
    content = f'id,text\n{cell if cell == quoted else 1},"{quoted}"\n'
    assert texts_of(write(tmp_path / "a.csv", content)) == [cell]
    assert texts_of(write(tmp_path / "a.csv", content.replace(",", "\t")), format="tsv") == [cell]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,b\n1,2,3\n", "row 1 has more or fewer cells than the header"),
        ("text,b\na,1\nb\n", "row 2 has more or fewer cells than the header"),
        ('text\n"um\n', "line 2 is not valid CSV"),
        ('text\n"um" dois\n', "line 2 is not valid CSV"),
        ("id;text\n1;um\n", "row 1 has no text in the field 'text' .*; it has: id;text"),
    ],
)
def test_damaged_csv(content, message, tmp_path):
    with pytest.raises(UserError, match=rf"a\.csv: {message}"):
        documents_of(write(tmp_path / "a.csv", content))
    write(tmp_path / "a.csv", "text\n" + "a" * 200_000)
    assert len(texts_of(tmp_path)[0]) == 200_000  # more than the csv module takes by itself


# --- Carolina's checksums ---


@pytest.mark.parametrize("place", [".", "corpus", "corpus/wikis", "corpus/wikis/pt", "corpus/wikis/pt/a.xml.gz"])
@pytest.mark.parametrize("separator", ["\t", "  ", " *", "  ./"])
def test_a_shard_must_be_that_of_the_checksums(place, separator, tmp_path, monkeypatch):
    shard = write(tmp_path / "corpus" / "wikis" / "pt" / "a.xml.gz", gzip.compress(XML.encode()))
    digest = hashlib.sha256(XML.encode()).hexdigest()
    others = f"{'0' * 64}{separator}pt/b.xml\n{'1' * 64}{separator}pt/aa.xml\n{'2' * 64}{separator}pt-BR/a.xml\n"
    write(tmp_path / "corpus" / "wikis" / "checksum.sha256", f"{others}{digest}{separator}pt/a.xml\r\n")
    monkeypatch.chdir(tmp_path)
    assert texts_of(place) == TEXTS
    shard.write_bytes(gzip.compress(XML.replace("fogo", "foga").encode()))  # well-formed, and another text
    with pytest.raises(UserError, match=rf"a\.xml\.gz: the SHA-256 of its XML is .* and {digest[:16]}… in .*checksum"):
        documents_of(place)
    log = ReadingLog()
    assert documents_of(place, log, skip_bad=True) == [] and len(log.skipped) == 1
    write(tmp_path / "corpus" / "wikis" / "checksum.sha256", others)  # says nothing of this one
    assert len(texts_of(place)) == 3


def test_evaluations_read_the_same_files(tmp_path):
    recipe = load_recipe("evaluate_model")
    for name in ("array.json", "lines.jsonl.zst", "table.tsv", "table.parquet", "carolina.xml"):
        file = write(tmp_path / name, READ[name])
        assert recipe.read_texts(recipe.Options(model="", text=str(file))) == TEXTS
    with pytest.raises(UserError, match="the suffix .html is none of those that are read"):
        recipe.read_texts(recipe.Options(model="", text=str(write(tmp_path / "a.html", "<p>"))))
