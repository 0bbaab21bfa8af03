"""Corpora: every format gives its text whole, by its suffix or by what the options say, and
documents are chosen."""

import bz2
import gzip
import hashlib
import html
import io
import json
import random
import re
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

import pyarrow as pa
import pytest
from pyarrow import parquet

from cli import UserError
from cli.corpus_options import CorpusOptions
from corpora import selection
from corpora.documents import Document, ReadingLog
from corpora.sources import corpus_documents
from evaluation import texts
from running import DATA, load_recipe

real_carolina = pytest.mark.skipif(
    not (DATA / "carolina").is_dir(),
    reason=f"no Carolina shards under {DATA} (HF_INFINI_DATA names another folder)",
)


def documents_of(source, log: ReadingLog | None = None, **options) -> list[Document]:
    return list(corpus_documents(CorpusOptions(str(source), **options), log))


def texts_of(source, **options) -> list[str]:
    return [document.text for document in documents_of(source, **options)]


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# --- Carolina -------------------------------------------------------------------------------------

HEADER = "<teiHeader><fileDesc><sourceDesc><p>NOT TEXT</p></sourceDesc></fileDesc></teiHeader>"


def tei(
    name: str, paragraphs: list[str], url: str = "https://pt.wikipedia.org/wiki?curid=1"
) -> str:
    body = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)
    return (
        f"<TEI><teiHeader><fileDesc><titleStmt><title>{name}</title></titleStmt>"
        "<sourceDesc><biblFull><fileDesc><titleStmt>"
        f'<title><name>Title of {name}</name><media url="{url}"/></title></titleStmt>'
        "<sourceDesc><p>Born digital</p>"
        f"</sourceDesc></fileDesc></biblFull></sourceDesc></fileDesc></teiHeader>"
        f"<text><body>{body}</body></text></TEI>"
    )


def shard_xml(*documents: str, prolog: str = "<?xml version='1.0' encoding='utf-8'?>") -> bytes:
    corpus = (
        f'<teiCorpus xmlns="http://www.tei-c.org/ns/1.0">{HEADER}{"".join(documents)}</teiCorpus>'
    )
    return f"{prolog}\n{corpus}".encode()


GOOD = shard_xml(
    tei("a", ["Água & fogo <b>", "segundo  parágrafo"]),
    tei("b", ["outro"], "https://pt.wikinews.org/x"),
)


def test_carolina_gives_paragraphs_of_the_body_only(tmp_path):
    write(tmp_path / "corpus/wikis/pt/good.xml.gz", gzip.compress(GOOD))
    log = ReadingLog()
    first, second = documents_of(tmp_path, log)
    assert first.text == "Água & fogo <b>\nsegundo  parágrafo"
    assert first.paragraphs == ("Água & fogo <b>", "segundo  parágrafo")
    assert (first.id, first.title, first.source) == (
        "a",
        "Title of a",
        "https://pt.wikipedia.org/wiki?curid=1",
    )
    assert second.text == "outro"
    shard = (tmp_path / "corpus/wikis/pt/good.xml.gz").read_bytes()
    entry = {
        "file": "corpus/wikis/pt/good.xml.gz",
        "bytes": len(shard),
        "sha256": hashlib.sha256(shard).hexdigest(),
    }
    assert log.files == [entry]


@pytest.mark.slow
@real_carolina
def test_real_shard_matches_an_independent_reading(tmp_path):
    shard = min((DATA / "carolina").rglob("*.xml.gz"), key=lambda path: path.stat().st_size)
    log = ReadingLog()
    documents = documents_of(shard, log)
    xml = gzip.decompress(shard.read_bytes()).decode()
    bodies = re.findall(r"<text>\s*<body>(.*?)</body>", xml, flags=re.DOTALL)
    texts = ["\n".join(map(html.unescape, re.findall("<p>(.*?)</p>", body))) for body in bodies]
    assert [document.text for document in documents] == [text for text in texts if text.strip()]
    assert len({document.id for document in documents}) == len(documents)
    hosts = {".".join(selection.url_host(document).split(".")[-2:]) for document in documents}
    assert hosts <= {"wikimedia.org", "wikipedia.org", "wiktionary.org", "wikinews.org"}


# --- formats --------------------------------------------------------------------------------------

TEXTS = ["água & fogo", "NA", "dois\nlinhas, “aspas”"]
ROWS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'id,text\r\n0,água & fogo\r\n1,NA\r\n2,"dois\nlinhas, “aspas”"\r\n'
TABLE = pa.Table.from_pylist(ROWS)
XML = '<?xml version="1.0"?>\n<teiCorpus xmlns="http://www.tei-c.org/ns/1.0">{}</teiCorpus>'.format(
    "".join(
        f"<TEI><text><body><p>{text.replace('&', '&amp;')}</p></body></text></TEI>"
        for text in TEXTS
    )
)


def binary(write) -> bytes:
    sink = io.BytesIO()
    write(sink)
    return sink.getvalue()


def zst(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


READ = {
    "lines.json": LINES,
    "array.json": json.dumps(ROWS),
    "LINES.NDJSON": LINES,
    "lines.json.BZ2": bz2.compress(LINES.encode()),
    "lines.jsonl.zst": zst(LINES.encode()),
    "table.csv": CSV,
    "TABLE.CSV.GZ": gzip.compress(CSV.encode()),
    "table.tsv": 'id\ttext\n0\tágua & fogo\n1\tNA\n2\t"dois\nlinhas, “aspas”"\n',
    "table.parquet": binary(lambda sink: parquet.write_table(TABLE, sink)),
    "pieces [1]*.parquet": binary(lambda sink: parquet.write_table(TABLE, sink, row_group_size=1)),
    "carolina.xml": XML,
    "CAROLINA.XML.GZ": gzip.compress(XML.encode()),
}


@pytest.mark.parametrize("name", READ)
def test_each_format_gives_its_texts(name, tmp_path):
    assert texts_of(write(tmp_path / name, READ[name])) == TEXTS
    assert texts_of(tmp_path) == TEXTS  # and so does a folder with it


def test_plain_text_and_unknown_suffixes(tmp_path):
    text = "[Verse 1]\n<3 {x}\n"
    for name in ("a.txt", "A.TXT.GZ", "a.txt.zst", "a.MD", "a", "b.gz"):
        packed = {".gz": gzip.compress, ".zst": zst}.get(Path(name).suffix.lower(), bytes)
        assert texts_of(write(tmp_path / name, packed(text.encode()))) == [text]
    for name in ("a.html", "b.html.gz", "a.jsonl.lz4"):
        with pytest.raises(UserError, match=r"must have files of one kind .*, got none: rename"):
            documents_of(write(tmp_path / name, text))


def test_a_folder_is_read_by_one_kind_and_what_it_leaves_out_is_said(tmp_path):
    write(tmp_path / "b.jsonl", LINES)
    for name in ("README.md", "LICENSE", "x.py", ".DS_Store", "._b.jsonl", ".git/objects.jsonl"):
        write(tmp_path / name, "no text")
    log = ReadingLog()
    assert [document.text for document in documents_of(tmp_path, log)] == TEXTS
    assert log.left_out == {".md": 1, "LICENSE": 1, ".py": 1}  # hidden ones are no part of a corpus
    write(tmp_path / "a.txt", "texto")
    with pytest.raises(
        UserError, match=r"must have files of one kind .*, got 1 jsonl, 1 text: rename or move"
    ):
        documents_of(tmp_path)
    write(tmp_path / "notes" / "a.md", "um")
    assert texts_of(tmp_path / "notes") == ["um"]


def test_an_unreachable_hub_is_explained():
    with pytest.raises(UserError, match="^owner/no-such-dataset: the dataset cannot be read"):
        documents_of("owner/no-such-dataset")


@pytest.mark.parametrize("encoding", ["utf-16", "cp1252", "utf-8-sig"])
def test_encodings(encoding, tmp_path):
    text = TEXTS[0]
    for name, content in {
        "a.txt": text,
        "a.jsonl": json.dumps(ROWS[0], ensure_ascii=False),
        "a.xml": XML,
    }.items():
        file = write(tmp_path / name, content.encode(encoding))
        assert texts_of(file, encoding=encoding)[0] == text
        with pytest.raises(UserError, match=f"{name}: not ASCII .*--encoding"):
            documents_of(file, encoding="ascii")
    for wrong in ("no-such", "hex"):
        with pytest.raises(UserError, match="--encoding: .*; give one of Python's"):
            documents_of(tmp_path / "a.txt", encoding=wrong)


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [{"id": None}, {"id": 7}, {}])
def test_fractions_of_rows_without_ids_of_their_own(ids, tmp_path):
    for shard in range(2):  # each counts from 0
        rows = [{"text": f"texto {shard} {number}", **ids} for number in range(200)]
        write(tmp_path / f"{shard}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert len({document.id for document in documents_of(tmp_path)}) == 400
    for seed in range(4):  # a binomial count: five standard deviations are 50
        half, fifth = (
            set(texts_of(tmp_path, fraction=fraction, seed=seed)) for fraction in (0.5, 0.2)
        )
        assert 150 < len(half) < 250 and 40 < len(fifth) < 120 and fifth < half


@pytest.mark.parametrize("break_", ["\n", "\r\n", "\r"])
def test_lines_and_paragraphs_end_at_ends_of_lines_only(break_, tmp_path):
    lines = ["um\x85dois", "três\u2028quatro\u2029cinco", "seis\x0csete\x0b\x1c\x1d\x1eoito"]
    assert (
        texts_of(write(tmp_path / "a.txt", break_.join(lines) + break_), text_unit="line") == lines
    )
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


def test_rows_without_a_text(tmp_path):
    """A null is an empty text, which is counted; anything else is an error that names the row,
    counted from 1."""
    table = pa.table({"text": ["um", None, "dois"]})
    for name, content in (
        ("a.jsonl", '{"text": "um"}\n\n{"text": null}\n{"text": "dois"}'),
        ("a.csv", 'text,b\n"um",1\n,2\ndois,3\n'),
        ("a.parquet", binary(lambda sink: parquet.write_table(table, sink))),
    ):
        log = ReadingLog()
        assert [
            document.text for document in documents_of(write(tmp_path / name, content), log)
        ] == ["um", "dois"]
        assert log.dropped == {"empty": 1}
    for name, content, place in (
        ("a.jsonl", '{"text": "um"}\n\n{"text": 2}\n', "row 3"),
        ("a.json", '[{"text": "um"}, {"text": ["a"]}]', "row 2"),
        (
            "a.parquet",
            binary(lambda sink: parquet.write_table(pa.table({"n": [1]}), sink)),
            "row 1",
        ),
    ):
        with pytest.raises(
            UserError,
            match=rf"{name}: {place} has no text in the field 'text' .*; it has: (text|n)$",
        ):
            documents_of(write(tmp_path / name, content))
    assert texts_of(write(tmp_path / "a.jsonl", '{"body": "um"}'), text_field="body") == ["um"]


def test_nested_fields(tmp_path):
    """By dotted names, unless a field has the whole name; what is in a null is null."""
    rows = [{"doc": {"body": {"text": text}}} for text in TEXTS]
    for name, content in (
        (
            "a.jsonl",
            "".join(
                json.dumps(row) + "\n" for row in [*rows, {"doc": None}, {"doc": {"body": None}}]
            ),
        ),
        ("a.parquet", binary(lambda sink: parquet.write_table(pa.Table.from_pylist(rows), sink))),
        ("a.csv", "doc.body.text\n" + "".join(f'"{text}"\n' for text in TEXTS)),
        (
            "b.jsonl",
            "".join(
                json.dumps({"doc.body.text": row["doc"]["body"]["text"]} | row) + "\n"
                for row in rows
            ),
        ),
    ):
        assert texts_of(write(tmp_path / name, content), text_field="doc.body.text") == TEXTS
    for field in ("doc.text", "doc.body.text.text", "doc", "doc."):
        with pytest.raises(
            UserError, match=f"a.jsonl: row 1 has no text in the field '{field}' .*; it has: doc$"
        ):
            documents_of(tmp_path / "a.jsonl", text_field=field)


def test_evaluations_read_the_same_files(tmp_path):
    recipe = load_recipe("evaluate_model")
    for name in ("array.json", "lines.jsonl.zst", "table.parquet", "carolina.xml"):
        file = write(tmp_path / name, READ[name])
        assert texts.read_texts(recipe.Options(model="", text=str(file))) == TEXTS


# --- selection ------------------------------------------------------------------------------------


def test_prose_filter_at_its_limits():
    long, short = "p" * 80, "s" * 79
    cases = {
        "exactly 160 characters": Document("", "a", paragraphs=(long, long)),
        "too short": Document("", "b", paragraphs=(long,)),
        "not prose": Document("", "c", paragraphs=(short, short, short)),
        "other host": Document(
            "", "d", source="https://pt.wiktionary.org/x", paragraphs=(long, long)
        ),
        "right host": Document(
            "", "e", source="https://pt.wikipedia.org/x", paragraphs=(long, long)
        ),
        "lines of the text": Document(f"{long}\n{short}\n1", "f"),
    }
    log = ReadingLog()
    kept = [
        d.id
        for d in selection.keep_prose(
            cases.values(), log, host="pt.wikipedia.org", min_characters=160
        )
    ]
    # f: 80 of 160 characters are in the long line, exactly the half that is needed
    assert kept == ["a", "e", "f"]
    assert log.dropped == Counter({"too short": 1, "not prose": 1, "other host": 1})
    kept = [
        d.id
        for d in selection.keep_prose(cases.values(), ReadingLog(), host=None, min_characters=160)
    ]
    assert kept == ["a", "d", "e", "f"]


def test_near_duplicates_agree_with_exact_jaccard():
    rng = random.Random(0)
    vocabulary = [f"w{number}" for number in range(3000)]
    original = rng.choices(vocabulary, k=400)

    def edited(words: list[str], changes: int) -> list[str]:
        words = list(words)
        for position in rng.sample(range(len(words)), changes):
            words[position] = rng.choice(vocabulary)
        return words

    def jaccard(first: list[str], second: list[str]) -> float:
        a, b = (
            {tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (first, second)
        )
        return len(a & b) / len(a | b)

    near, far, other = edited(original, 4), edited(original, 60), rng.choices(vocabulary, k=400)
    # 64 hashes estimate a Jaccard similarity to about 0.06: the two sides keep well away from the
    # limit of 0.7.
    assert jaccard(original, near) > 0.85 and jaccard(original, far) < 0.45
    texts = {"original": original, "near": near, "far": far, "other": other, "same": original}
    texts |= {"tiny": ["só"], "tiny2": ["só"]}
    log = ReadingLog()
    documents = [Document(" ".join(words), name) for name, words in texts.items()]
    assert [d.id for d in selection.drop_near_duplicates(documents, log)] == [
        "original",
        "far",
        "other",
        "tiny",
    ]
    assert log.dropped == Counter({"near-duplicate": 3})


def test_fractions_are_nested_and_do_not_depend_on_order():
    documents = [Document("x", str(number)) for number in range(4000)]

    def kept(fraction, seed=0, of=documents):
        return {d.id for d in selection.keep_fraction(of, fraction, seed, ReadingLog())}

    tenth, half = kept(0.1), kept(0.5)
    assert tenth < half and half == kept(0.5, of=documents[::-1]) and half != kept(0.5, seed=1)
    # A binomial count of 4,000 documents: five standard deviations are 95 at a tenth, 158 at a
    # half.
    assert abs(len(tenth) - 400) < 95 and abs(len(half) - 2000) < 158
    ids = [d.id for d in documents]
    chosen = selection.choose(ids, 0.35, 0, "tokenizer")
    assert len(chosen) == 1400 and chosen == sorted(set(chosen))
    assert chosen != selection.choose(ids, 0.35, 0, "validation")
    assert (
        len(selection.choose(["a", "b"], 0.02, 0, "x")) == 1
        and selection.choose(ids, 0, 0, "x") == []
    )
