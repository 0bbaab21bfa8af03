"""Corpora: every source gives its text whole, and a damaged file is named, never read in part."""

import gzip
import hashlib
import json
import os
import random
import re
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

from cli import UserError
from cli.corpus_options import CorpusOptions
from corpora import selection
from corpora.documents import Document, ReadingLog
from corpora.sources import corpus_documents, detect_source_type

DATA = Path(os.environ.get("HF_INFINI_DATA", Path(__file__).parents[4] / "shared" / "data"))
real_carolina = pytest.mark.skipif(
    not (DATA / "carolina").is_dir(), reason=f"no Carolina shards under {DATA} (HF_INFINI_DATA names another folder)"
)


def documents_of(source, log: ReadingLog | None = None, **options):
    return corpus_documents(CorpusOptions(str(source), **options), log)


HEADER = "<teiHeader><fileDesc><sourceDesc><p>NOT TEXT</p></sourceDesc></fileDesc></teiHeader>"


def tei(name: str, paragraphs: list[str], url: str = "https://pt.wikipedia.org/wiki?curid=1") -> str:
    body = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)
    return (
        f"<TEI><teiHeader><fileDesc><titleStmt><title>{name}</title></titleStmt><sourceDesc><biblFull><fileDesc><titleStmt>"
        f'<title><name>Title of {name}</name><media url="{url}"/></title></titleStmt><sourceDesc><p>Born digital</p>'
        f"</sourceDesc></fileDesc></biblFull></sourceDesc></fileDesc></teiHeader><text><body>{body}</body></text></TEI>"
    )


def shard_xml(*documents: str, prolog: str = "<?xml version='1.0' encoding='utf-8'?>") -> bytes:
    corpus = f'<teiCorpus xmlns="http://www.tei-c.org/ns/1.0">{HEADER}{"".join(documents)}</teiCorpus>'
    return f"{prolog}\n{corpus}".encode()


def write_tree(root: Path, shards: dict[str, bytes], folder: str = "wikis") -> Path:
    for name, xml in shards.items():
        path = root / "corpus" / folder / f"{name}.xml.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(xml))
    return root


GOOD = shard_xml(tei("a", ["Água & fogo <b>", "segundo  parágrafo"]), tei("b", ["outro"], "https://pt.wikinews.org/x"))


def test_carolina_gives_paragraphs_of_the_body_only(tmp_path):
    write_tree(tmp_path, {"pt/good": GOOD})
    log = ReadingLog()
    first, second = documents_of(tmp_path, log=log)
    assert first.text == "Água & fogo <b>\nsegundo  parágrafo"
    assert first.paragraphs == ("Água & fogo <b>", "segundo  parágrafo")
    assert (first.id, first.title, first.source) == ("a", "Title of a", "https://pt.wikipedia.org/wiki?curid=1")
    assert second.text == "outro"
    shard = tmp_path / "corpus/wikis/pt/good.xml.gz"
    digest = hashlib.sha256(shard.read_bytes()).hexdigest()
    assert log.files == [
        {
            "file": "corpus/wikis/pt/good.xml.gz",
            "bytes": shard.stat().st_size,
            "sha256": digest,
        }
    ]


def billion_laughs() -> bytes:
    entities = '<!ENTITY a0 "ha">' + "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 10))
    return shard_xml(
        tei("x", ["BOMB"]).replace("BOMB", "&a9;"), prolog=f"<?xml version='1.0'?><!DOCTYPE teiCorpus [{entities}]>"
    )


EXTERNAL = shard_xml(
    tei("x", ["HERE"]).replace("HERE", "&e;"),
    prolog="<?xml version='1.0'?><!DOCTYPE teiCorpus [<!ENTITY e SYSTEM 'file:///etc/passwd'>]>",
)
# What is wrong with the shard, how to write it, and what the message has to say.
DAMAGED = {
    "truncated gzip": (lambda: gzip.compress(GOOD)[:-20], "truncated"),
    "flipped byte": (
        lambda: gzip.compress(GOOD)[:60] + b"\xff\x00\xff" + gzip.compress(GOOD)[63:],
        "damaged|truncated",
    ),
    "no gzip": (lambda: GOOD, "damaged or truncated"),
    "empty file": (lambda: b"", "empty"),
    "empty gzip": (lambda: gzip.compress(b""), "empty"),
    "truncated xml": (lambda: gzip.compress(GOOD[:-30]), "damaged XML"),
    "bad utf-8": (lambda: gzip.compress(GOOD.replace("Água".encode(), b"\xc1gua")), "not UTF-8, byte"),
    "utf-16": (
        lambda: gzip.compress(GOOD.decode().replace("utf-8", "utf-16").encode("utf-16-le")),
        "not UTF-8.*is it binary, or UTF-16",
    ),
    "entity bomb": (lambda: gzip.compress(billion_laughs()), "DOCTYPE"),
    "external entity": (lambda: gzip.compress(EXTERNAL), "DOCTYPE"),
    "undefined entity": (lambda: gzip.compress(GOOD.replace(b"outro", b"&nbsp;")), "damaged XML: .*nbsp"),
    "no document": (lambda: gzip.compress(shard_xml()), "no <TEI> document"),
    "another namespace": (lambda: gzip.compress(GOOD.replace(b"tei-c.org/ns/1.0", b"tei-c.org/ns/9.9")), "no <TEI>"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_shard_is_named_or_left_out_as_a_whole(tmp_path, case):
    make, message = DAMAGED[case]
    write_tree(tmp_path, {"pt/good": shard_xml(tei("kept", ["texto"]))})
    (tmp_path / "corpus/wikis/pt/bad.xml.gz").write_bytes(make())
    read = []
    with pytest.raises(UserError, match=rf"bad\.xml\.gz: .*({message}).*--skip_bad"):
        for document in documents_of(tmp_path):
            read.append(document.id)
    assert read == []  # "bad" sorts first: none of its documents came out before the damage was seen

    log = ReadingLog()
    assert [document.id for document in documents_of(tmp_path, skip_bad=True, log=log)] == ["kept"]
    assert [entry["file"] for entry in log.skipped] == ["corpus/wikis/pt/bad.xml.gz"]
    assert re.search(message, log.skipped[0]["reason"])


def test_taxonomy_chooses_folders_from_any_root(tmp_path):
    write_tree(tmp_path, {"w": shard_xml(tei("w", ["w"]))})
    write_tree(tmp_path, {"l": shard_xml(tei("l", ["l"]))}, "legislative_branch")

    def ids(source, *codes):
        return [document.id for document in documents_of(source, taxonomy=list(codes))]

    assert ids(tmp_path) == ["l", "w"]
    assert ids(tmp_path, "wik") == ids(tmp_path / "corpus", "wik") == ids(tmp_path / "corpus/wikis", "wik") == ["w"]
    assert ids(tmp_path / "corpus/wikis/w.xml.gz") == ["w"]
    with pytest.raises(UserError, match="unknown code 'wiki'; choose from wik, dat, leg, jud, uni, soc, pub"):
        ids(tmp_path, "wiki")
    with pytest.raises(UserError, match="judicial_branch holds no .*codes present: wik, leg"):
        ids(tmp_path, "jud")


@pytest.mark.slow
@real_carolina
def test_real_shard_matches_an_independent_reading(tmp_path):
    shard = min((DATA / "carolina").rglob("*.xml.gz"), key=lambda path: path.stat().st_size)
    log = ReadingLog()
    documents = list(documents_of(shard, log=log))
    xml = gzip.decompress(shard.read_bytes()).decode()
    bodies = re.findall(r"<text>\s*<body>(.*?)</body>", xml, flags=re.DOTALL)
    texts = [
        "\n".join(
            p.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") for p in re.findall("<p>(.*?)</p>", body)
        )
        for body in bodies
    ]
    assert [document.text for document in documents] == [text for text in texts if text.strip()]
    assert len({document.id for document in documents}) == len(documents)
    hosts = {".".join(selection.url_host(document).split(".")[-2:]) for document in documents}
    assert hosts <= {"wikimedia.org", "wikipedia.org", "wiktionary.org", "wikinews.org"}


# --- other sources ---------------------------------------------------------------------------------------------------


def test_text_files_by_unit_and_compression(tmp_path):
    (tmp_path / "b.txt").write_text("um\ndois\n\n \n\ntrês\n", encoding="utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\ufeffolá".encode()))
    assert [document.text for document in documents_of(tmp_path)] == ["olá", "um\ndois\n\n \n\ntrês\n"]
    units = {
        unit: [d.text for d in documents_of(tmp_path / "b.txt", text_unit=unit)]
        for unit in ("line", "paragraph")
    }
    assert units == {"line": ["um", "dois", "três"], "paragraph": ["um\ndois", "três\n"]}
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    with pytest.raises(UserError, match="bad.txt: not UTF-8, byte 3"):
        list(documents_of(tmp_path))
    log = ReadingLog()
    assert len(list(documents_of(tmp_path, skip_bad=True, log=log))) == 2
    assert [entry["file"] for entry in log.skipped] == ["bad.txt"]


def test_jsonl_is_verified_to_its_last_line(tmp_path):
    rows = [{"body": "primeiro", "id": "x", "title": "T"}, {"body": "segundo"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = documents_of(path, text_field="body")
    assert (first.text, first.id, first.title) == ("primeiro", "x", "T")
    assert (second.text, second.id) == ("segundo", "rows.jsonl:2")
    with pytest.raises(
        UserError, match=r"line 1 has no text in the field 'text' \(--text_field\); it has: body, id, title"
    ):
        list(documents_of(path))
    path.write_text(json.dumps(rows[0]) + "\n" + '{"body": "cort')
    with pytest.raises(UserError, match="rows.jsonl: line 2 is not valid JSON"):
        next(documents_of(path, text_field="body"))  # already the first document is refused
    log = ReadingLog()
    assert list(documents_of(path, text_field="body", skip_bad=True, log=log)) == []
    assert len(log.skipped) == 1


def test_datasets_saved_parquet_and_csv(tmp_path):
    import datasets

    table = datasets.Dataset.from_dict({"text": ["um", "dois", " "], "title": ["A", "B", "C"]})
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "saved")
    table.to_parquet(tmp_path / "table.parquet")
    table.to_csv(tmp_path / "table.csv")
    for source in ("saved", "table.parquet", "table.csv"):
        log = ReadingLog()
        documents = list(documents_of(tmp_path / source, log=log))
        file = "" if source == "saved" else f"{source}:"  # which may be one of several
        assert [(d.text, d.id, d.title) for d in documents] == [("um", f"{file}1", "A"), ("dois", f"{file}2", "B")]
        assert log.dropped == Counter({"empty": 1})
        assert log.files
    assert [d.text for d in documents_of(tmp_path / "saved", dataset_split="test")] == ["dois"]
    with pytest.raises(UserError, match="there is no split 'dev'"):
        list(documents_of(tmp_path / "saved", dataset_split="dev"))
    (tmp_path / "table.parquet").write_bytes((tmp_path / "table.parquet").read_bytes()[:-40])
    with pytest.raises(UserError, match="table.parquet: the parquet file cannot be read"):
        list(documents_of(tmp_path / "table.parquet"))


def test_detecting_the_source(tmp_path):
    for name in ("a.txt", "a.jsonl.gz", "a.parquet", "noname", "x.xml.gz"):
        (tmp_path / name).touch()
    found = {
        name: detect_source_type(str(tmp_path / name))
        for name in ("a.txt", "a.jsonl.gz", "a.parquet", "noname", "x.xml.gz")
    }
    assert list(found.values()) == ["text", "jsonl", "parquet", "text", "carolina"]
    with pytest.raises(UserError, match="1 carolina, 1 parquet, 1 jsonl, 1 text.; choose one with --format"):
        detect_source_type(str(tmp_path))
    assert detect_source_type("biographies") == "biographies"
    assert detect_source_type("carolina-c4ai/corpus-carolina") == "carolina"
    assert detect_source_type("owner/name") == "hub"
    for missing in ("missing.txt", "./missing", "/no/such/folder", "owner/missing.jsonl"):
        with pytest.raises(UserError, match="there is no file or folder"):
            detect_source_type(missing)


def test_missing_and_empty_sources(tmp_path):
    with pytest.raises(UserError, match="--source: the folder .* holds no text file"):
        list(documents_of(tmp_path))
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(UserError, match="blank.txt: the file holds no text"):
        list(documents_of(tmp_path))


def test_an_unreachable_hub_is_explained():
    with pytest.raises(UserError, match="^--source carolina-c4ai/corpus-carolina: the download from the Hub failed"):
        list(documents_of("carolina-c4ai/corpus-carolina"))
    with pytest.raises(UserError, match="^--source owner/no-such-dataset: the dataset cannot be read"):
        list(documents_of("owner/no-such-dataset"))


# --- selection -------------------------------------------------------------------------------------------------------


def test_prose_filter_at_its_limits():
    long, short = "p" * 80, "s" * 79
    cases = {
        "exactly 160 characters, half of them prose": Document(
            "", "a", source="", paragraphs=(long, short + "s")[:1] * 2
        ),
        "too short": Document("", "b", paragraphs=(long,)),
        "not prose": Document("", "c", paragraphs=(short, short, short)),
        "other host": Document("", "d", source="https://pt.wiktionary.org/x", paragraphs=(long, long)),
        "right host": Document("", "e", source="https://pt.wikipedia.org/x", paragraphs=(long, long)),
        "lines of the text": Document(f"{long}\n{short}\n1", "f"),
    }
    log = ReadingLog()
    kept = [d.id for d in selection.keep_prose(cases.values(), log, host="pt.wikipedia.org", min_characters=160)]
    assert kept == ["a", "e", "f"]  # f: 80 of 160 characters are in the long line, exactly the half that is needed
    assert log.dropped == Counter({"too short": 1, "not prose": 1, "other host": 1})
    kept = [d.id for d in selection.keep_prose(cases.values(), ReadingLog(), host=None, min_characters=160)]
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
        a, b = ({tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (first, second))
        return len(a & b) / len(a | b)

    near, far, other = edited(original, 4), edited(original, 60), rng.choices(vocabulary, k=400)
    # 64 hashes estimate a Jaccard similarity to about 0.06: the two sides keep well away from the limit of 0.7.
    assert jaccard(original, near) > 0.85 and jaccard(original, far) < 0.45
    texts = {
        "original": original,
        "near": near,
        "far": far,
        "other": other,
        "same": original,
        "tiny": ["só"],
        "tiny2": ["só"],
    }
    log = ReadingLog()
    documents = [Document(" ".join(words), name) for name, words in texts.items()]
    assert [d.id for d in selection.drop_near_duplicates(documents, log)] == ["original", "far", "other", "tiny"]
    assert log.dropped == Counter({"near-duplicate": 3})


def test_fractions_are_nested_and_do_not_depend_on_order():
    documents = [Document("x", str(number)) for number in range(4000)]

    def kept(fraction, seed=0, of=documents):
        return {d.id for d in selection.keep_fraction(of, fraction, seed, ReadingLog())}

    tenth, half = kept(0.1), kept(0.5)
    assert tenth < half and half == kept(0.5, of=documents[::-1]) and half != kept(0.5, seed=1)
    # A binomial count of 4,000 documents: five standard deviations are 95 at a tenth, 158 at a half.
    assert abs(len(tenth) - 400) < 95 and abs(len(half) - 2000) < 158
    ids = [d.id for d in documents]
    chosen = selection.choose(ids, 0.35, 0, "tokenizer")
    assert len(chosen) == 1400 and chosen == sorted(set(chosen))
    assert chosen != selection.choose(ids, 0.35, 0, "validation")
    assert len(selection.choose(["a", "b"], 0.02, 0, "x")) == 1 and selection.choose(ids, 0, 0, "x") == []
