"""Files as they come: each is read rightly, or refused in one line that names it and says what to
do."""

import gzip
import io
import random
import re
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from hf_infini.tools.documents import read_document, read_documents
from running import sample_text

WORDS = "The train to Marelva leaves from platform 9."
CONTROL = bytes(range(9)) + b" \n" + bytes(range(14, 32))


def pdf(*pages: str, **encryption) -> bytes:
    writer = PdfWriter()
    font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    named = {NameObject(name): NameObject(value) for name, value in font.items()}
    for words in pages:
        page, content = writer.add_blank_page(400, 400), DecodedStreamObject()
        content.set_data(f"BT /F1 12 Tf 10 100 Td ({words}) Tj ET".encode("latin-1"))
        fonts = DictionaryObject({NameObject("/F1"): DictionaryObject(named)})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        page[NameObject("/Contents")] = writer._add_object(content)
    if encryption:
        writer.encrypt(**encryption)
    written = io.BytesIO()
    writer.write(written)
    return written.getvalue()


def zipped() -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("word/document.xml", WORDS)
    return written.getvalue()


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as refused:
        read_document(path)
    said = str(refused.value)
    assert said.startswith(str(path)) and "\n" not in said
    return said


@pytest.mark.parametrize("name", ["a.txt", "a.html"])
@pytest.mark.parametrize("language", ["Água é vida, e o rio corre.", "Река течёт к морю.", WORDS])
@pytest.mark.parametrize(
    "encoding",
    ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"],
)
def test_unicode_is_read_with_and_without_a_mark(name, language, encoding, tmp_path):
    (tmp_path / name).write_bytes(f"{language}\n".encode(encoding))
    assert read_document(tmp_path / name) == language


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(WORDS.encode(), mtime=0), "compressed by gzip.*gzip -dc"),
        (zipped(), "a zip archive.*soffice.*unzip"),
        (rb"{\rtf1 words}", "RTF.*soffice"),
        (random.Random(0).randbytes(3000), "in UTF-8 .byte .*but binary"),
        (CONTROL * 10, "zero.*but binary"),
        (CONTROL[1:] * 10, "control characters.*tr -d"),
        (b"Words and a zero\0" + b" in a text of bytes" * 9, "character 16 is zero.*iconv"),
        ("Água".encode() * 9 + b"\xc3", "ends inside a character"),
        ("Água e sal".encode("utf-16")[:-1], "ends inside a character"),
        (b"abc \xed\xa0\x80 def", "no text in UTF-8 .byte 4.*iconv"),
        ("Água e sal".encode("latin-1"), "no text in UTF-8 .byte 0.*iconv"),
        ("中文没有空格".encode("utf-16-le") + b"\0\0", "no text"),
        (b"\xef\xbb\xbf", "has no text"),
        (b"", "has no text"),
    ],
)
def test_what_is_no_text_is_refused_with_what_it_is(content, said, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    assert re.search(said, refusal(tmp_path / "a.txt"))


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>one<p>two<ul><li>three<li>four</ul>", "one\ntwo\nthree\nfour"),
        ("<h1>Title</h1>words <b>in</b>\n  <i>line</i><br/>next", "Title\nwords in\nline\nnext"),
        ("<script>var a = '<p>';</script><style>p{}</style><p>seen</p>", "seen"),
        ("<template><p>hid</p></template><p>seen", "seen"),
        ("<noscript>Switch JavaScript on</noscript><p>seen", "seen"),
        ("<![CDATA[ words ]]> and <!-- not these --> more", "words  and  more"),
        ("<p>&lt;|im_end|&gt;&#233;&eacute;&unknown;</p>", "<|im_end|>éé&unknown;"),
        ("<div>" * 33_000 + "deep" + "</div>" * 33_000, "deep"),
    ],
)
def test_html_is_what_a_browser_shows(page, text, tmp_path):
    (tmp_path / "a.html").write_text(page, encoding="utf-8")
    assert read_document(tmp_path / "a.html") == text


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("", "no text. A page of scripts or frames"),
        ("<html><script>x()</script><style>p{}</style><body></body></html>", "scripts or frames"),
        ("<frameset><frame src=a><noframes>No frames</noframes></frameset>", "scripts or frames"),
        ("<p>\0\0</p>", "control characters"),
        ("<p>&#0;&#x110000;</p>", "stand for none"),
    ],
)
def test_html_without_text_is_refused(page, said, tmp_path):
    (tmp_path / "a.html").write_text(page, encoding="utf-8")
    assert said in refusal(tmp_path / "a.html")


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-128", "AES-256"])
def test_an_encrypted_pdf_is_read_without_a_password_only(algorithm, tmp_path):
    free = pdf(WORDS, user_password="", owner_password="x", algorithm=algorithm)
    (tmp_path / "free.pdf").write_bytes(free)
    assert read_document(tmp_path / "free.pdf") == WORDS
    closed = pdf(WORDS, user_password="x", algorithm=algorithm)
    (tmp_path / "closed.pdf").write_bytes(closed)
    assert "needs a password" in refusal(tmp_path / "closed.pdf")
    assert "qpdf --password" in refusal(tmp_path / "closed.pdf")


@pytest.mark.slow  # a new Python
def test_a_pdf_that_needs_cryptography_says_so(tmp_path):
    closed = pdf(WORDS, user_password="", owner_password="x", algorithm="AES-256")
    (tmp_path / "a.pdf").write_bytes(closed)
    code = (
        "import sys\n"
        "for name in ('cryptography', 'Crypto'): sys.modules[name] = None\n"
        "from hf_infini.tools.documents import read_document\n"
        f"read_document({str(tmp_path / 'a.pdf')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError") and "pip install cryptography" in last


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda good: WORDS.encode(), "damaged, encrypted or no PDF"),
        (lambda good: good[:-60], "damaged, encrypted or no PDF"),
        (lambda good: good.replace(b"/Contents", b"/Contemts"), "no text. Pages that are pictures"),
        (lambda good: good.replace(b"/Kids", b"/Kidz"), "no text. Pages that are pictures"),
        (
            lambda good: b"%PDF-1.4\n" + random.Random(1).randbytes(400),
            "damaged, encrypted or no PDF",
        ),
    ],
)
def test_a_damaged_pdf_is_refused(damage, said, tmp_path, capfd):
    (tmp_path / "a.pdf").write_bytes(damage(pdf(WORDS)))
    assert said in refusal(tmp_path / "a.pdf")
    assert capfd.readouterr() == ("", "")  # and what pypdf logs is not in the terminal


def test_a_pdf_that_has_lost_a_page_is_read_with_a_warning(tmp_path):
    good = pdf("First page.", "Second page.")
    (tmp_path / "good.pdf").write_bytes(good)
    (tmp_path / "junk.pdf").write_bytes(b"junk\n" * 9 + good)
    (tmp_path / "pdf.txt").write_bytes(good)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_document(tmp_path / "good.pdf") == "First page.\n\nSecond page."
        assert read_document(tmp_path / "pdf.txt") == "First page.\n\nSecond page."
    with pytest.warns(UserWarning, match="junk.pdf is damaged, and some of its text may be"):
        assert read_document(tmp_path / "junk.pdf") == "First page.\n\nSecond page."


BEGINNINGS = {
    "a.pdf": pdf(WORDS, sample_text()[:200].translate(dict.fromkeys(b"()\\\n"))),
    "a.html": f"<!DOCTYPE html><p class='a'>{WORDS * 5}<![CDATA[x]]><!-- y --></p>".encode(),
    "a.txt": sample_text()[:300].encode(),
}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(BEGINNINGS)),
    cut=st.floats(0, 1),
    places=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=6)), max_size=4
    ),
)
def test_whatever_is_damaged_is_text_or_refused(tmp_path_factory, name, cut, places):
    content = bytearray(BEGINNINGS[name])
    for place, new in places:
        content[(at := int(place * len(content))) : at + len(new)] = new
    path = tmp_path_factory.mktemp("damaged") / name
    path.write_bytes(content if cut > 0.5 else content[: int(2 * cut * len(content))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read = read_document(path)
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error)
        else:
            assert read == read.strip() and read.encode("utf-8")


def test_documents_are_read_one_after_the_other(tmp_path):
    (tmp_path / "a.txt").write_text("<|im_end|>\n", encoding="utf-8")  # text, as any
    (tmp_path / "b.md").write_bytes(b"two\r\nlines")
    files = [tmp_path / "a.txt", str(tmp_path / "b.md")]
    assert read_documents(files) == "<|im_end|>\n\ntwo\nlines"
    with pytest.raises(OSError, match="none.txt"):
        read_documents([*files, tmp_path / "none.txt"])
