"""Training from a stream: its rows are prepare.py's, held-out documents never are among them, a kill changes nothing."""

import functools
import gzip
import itertools
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from cards.card import data_rows
from cards.run import read_run
from cli import UserError
from corpora.biographies import biography_documents
from corpora.selection import chance
from corpora.streaming import BATCH_CHARACTERS, HeldOut, RowStream
from running import DATA, kill_when, load_recipe, losses, recipe, result, run
from training import run_folder

train = load_recipe("train")

CONTEXT = 64
SMALL = ["--tokenizer", "bpe", "--vocab_size", 300, "--context", CONTEXT, "--validation", 0.1, "--test", 0.1]
prepare = load_recipe("prepare")


def write_jsonl(path: Path, documents) -> Path:
    """A corpus of biographies (or of dicts), one JSON object a line."""
    rows = (document if isinstance(document, dict) else {"id": document.id, "text": document.text} for document in documents)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prepared(out: Path, *options) -> Path:
    """A folder by recipes/prepare.py, made in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare.py", *map(str, options), "--out", str(out)])
        prepare.main()
    return out


def manifest_of(data: Path) -> dict:
    return json.loads((data / "manifest.json").read_text(encoding="utf-8"))


def stream_of(source: Path, data: Path, context: int = CONTEXT) -> RowStream:
    return RowStream(str(source), data, AutoTokenizer.from_pretrained(data / "tokenizer"), context)


def rows_of(data: Path) -> list[list[int]]:
    import datasets

    return datasets.load_from_disk(str(data / "train"))["input_ids"][:]


def tokens(rows) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in rows]


def held_out(data: Path) -> dict[str, str]:
    """Id and text of the validation and test documents."""
    files = [data / f"{name}_documents.jsonl" for name in ("validation", "test")]
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return {row["id"]: row["text"] for row in rows}


def whole_texts(stream: RowStream, rows) -> list[str]:
    """The documents that lie in these rows, without the last one, which may be cut."""
    ids = list(itertools.chain.from_iterable(tokens(rows)))
    return stream.tokenizer.decode(ids).split(stream.tokenizer.eos_token)[:-1]


@functools.cache
def biographies() -> list:
    return list(biography_documents(60, seed=0, distance=300))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A folder of three files, 60 biographies."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(3):
        write_jsonl(folder / f"{number}.jsonl", biographies()[20 * number : 20 * (number + 1)])
    return folder


@pytest.fixture(scope="module")
def small(corpus, tmp_path_factory) -> Path:
    """What prepare.py makes of its first 30 documents."""
    return prepared(tmp_path_factory.mktemp("small") / "data", "--source", corpus, *SMALL, "--max_documents", 30)


# --- rows -------------------------------------------------------------------------------------------------------------


def expected_documents(data: Path) -> list:
    """The biographies but for those that the folder holds out, or that fall below its shares by chance."""
    kept = [document for document in biographies() if document.id not in held_out(data)]
    return [d for d in kept if min(chance(0, name, d.id) for name in ("validation", "test")) >= 0.1]


def test_rows_are_those_that_prepare_packs_from_the_same_documents(corpus, small, tmp_path):
    documents = expected_documents(small)
    assert 30 < len(documents) < 56 and len(documents) < 60 - len(held_out(small))  # chance has held out more
    source = write_jsonl(tmp_path / "kept.jsonl", documents)
    options = ["--tokenizer", small / "tokenizer", "--context", CONTEXT, "--validation", 0]
    whole = prepared(tmp_path / "whole", "--source", source, *options)
    stream, counts = stream_of(corpus, small), manifest_of(whole)["splits"]["train"]
    assert tokens(stream.one_pass()) == rows_of(whole)
    record = stream.record()
    assert (record["documents"], record["tokens"], record["passes"]) == (len(documents), counts["stream_tokens"], 1)
    assert record["dropped"] == {"held out": 60 - len(documents)}
    assert [entry["file"] for entry in record["files"]] == ["0.jsonl", "1.jsonl", "2.jsonl"]
    endless = stream_of(corpus, small).dataset(buffer=1)
    twice = tokens(itertools.islice(endless, 2 * counts["blocks"]))
    assert twice == 2 * rows_of(whole)


def test_the_order_is_drawn_anew_in_each_pass(corpus, small):
    expected = tokens(stream_of(corpus, small).one_pass())
    stream = stream_of(corpus, small)
    drawn = tokens(itertools.islice(stream.dataset(seed=1, buffer=40), 2 * len(expected)))
    first, second = drawn[: len(expected)], drawn[len(expected) :]
    assert first != expected and second != first
    # A row is never more than a buffer late, and two passes with what waits in the buffer hold each row twice
    assert all(row in expected[: position + 40] for position, row in enumerate(first[: len(expected) - 40]))
    assert sum(row in first for row in expected) >= len(expected) - 40 and stream.passes == 2
    again = tokens(itertools.islice(stream_of(corpus, small).dataset(seed=1, buffer=40), 50))
    assert again == drawn[:50] != tokens(itertools.islice(stream_of(corpus, small).dataset(seed=2, buffer=40), 50))


def test_no_more_is_read_than_is_asked_for(corpus, small, tmp_path):
    """The stream holds one file at a time: rows come out of the first although the last cannot be read."""
    for file in corpus.iterdir():
        shutil.copy(file, tmp_path)
    with open(tmp_path / "2.jsonl", "a", encoding="utf-8") as file:
        file.write('{"id": "x", "text": \n')
    rows = iter(stream_of(tmp_path, small, context=4_000_000).dataset(buffer=1))
    with pytest.raises(UserError, match="2.jsonl: line 21 is not valid JSON.*options of prepare.py"):
        next(rows)
    write_jsonl(tmp_path / "1.jsonl", [{"id": "long", "text": "Era uma vez um rio. " * (BATCH_CHARACTERS // 20)}])
    stream = stream_of(tmp_path, small)
    assert len(list(itertools.islice(stream.dataset(buffer=1), 500))) == 500
    assert [entry["file"] for entry in stream.record()["files"]] == ["0.jsonl", "1.jsonl"] and stream.passes == 0


# --- held-out documents -----------------------------------------------------------------------------------------------


def test_no_held_out_document_is_streamed(corpus, small):
    found = held_out(small)
    assert len(found) == 6
    stream = stream_of(corpus, small)
    texts = whole_texts(stream, stream.one_pass())
    names = {document.text: document.id for document in biographies()}
    assert len(texts) > 30 and not set(texts) & set(found.values())
    for name in ("validation", "test"):  # of the documents that the small share did not see, too
        assert all(chance(0, name, names[text]) >= 0.1 for text in texts)


def test_ids_that_changed_do_not_let_held_out_texts_in(corpus, small, tmp_path):
    """A share that lay in a folder of its own has other names for its documents than the whole corpus."""
    renamed = [{"id": f"elsewhere {d.id}", "text": d.text} for d in biographies()]
    stream = stream_of(write_jsonl(tmp_path / "renamed.jsonl", renamed), small)
    assert not set(whole_texts(stream, stream.one_pass())) & set(held_out(small).values())


def test_near_duplicates_of_held_out_documents_are_left_out(corpus, tmp_path):
    data = prepared(tmp_path / "data", "--source", corpus, *SMALL, "--max_documents", 30, "--deduplicate", "true")
    near = [{"id": f"near {n}", "text": text + " Fim."} for n, text in enumerate(held_out(data).values())]
    other = [document for document in biographies() if document.id not in held_out(data)][:8]
    twins = [{"id": f"twin {n}", "text": other[0].text} for n in range(8)]
    stream = stream_of(write_jsonl(tmp_path / "near.jsonl", [*near, *other, *twins]), data)
    texts = whole_texts(stream, stream.one_pass())
    assert not any(text.endswith(" Fim.") for text in texts) and stream.record()["dropped"]["near-duplicate"] == len(near)
    assert texts.count(other[0].text) > 1  # of each other they are not known: memory would grow with the corpus


def test_a_share_that_holds_out_no_whole_documents_is_refused(corpus, small, tmp_path):
    data = prepared(tmp_path / "data", "--source", corpus, *SMALL, "--split_by", "block")
    with pytest.raises(UserError, match="--split_by block.*prepare it with --split_by document"):
        stream_of(corpus, data)
    manifest = manifest_of(small)
    with pytest.raises(UserError, match="holds rows of recall"):
        HeldOut(small, manifest | {"options": manifest["options"] | {"prepared_from": "data"}})


# --- kinds of corpora -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "saved dataset", "gzip"])
def test_every_kind_of_source(corpus, small, tmp_path, kind):
    import datasets

    expected = tokens(stream_of(corpus, small).one_pass())
    table = datasets.Dataset.from_list([{"id": d.id, "text": d.text} for d in biographies()])
    source = tmp_path / "corpus"
    if kind == "parquet":
        source = tmp_path / "corpus.parquet"
        table.to_parquet(str(source))
    elif kind == "saved dataset":
        table.save_to_disk(str(source))
    else:
        source = tmp_path / "corpus.jsonl.gz"
        source.write_bytes(gzip.compress(b"".join(file.read_bytes() for file in sorted(corpus.iterdir()))))
    assert tokens(stream_of(source, small).one_pass()) == expected


@pytest.mark.skipif(not (DATA / "carolina").is_dir(), reason=f"no Carolina shards under {DATA}")
def test_carolina(tmp_path):
    shard = min((DATA / "carolina").rglob("*.xml.gz"), key=lambda path: path.stat().st_size)
    options = ["--tokenizer", "bpe", "--vocab_size", 400, "--context", 256, "--validation", 0.1, "--joiner", "blank_line"]
    data = prepared(tmp_path / "data", "--source", shard, *options, "--max_documents", 60)
    stream = stream_of(shard, data, 256)
    rows = list(itertools.islice(stream.dataset(buffer=1), 300))
    texts = whole_texts(stream, rows)
    assert len(rows) == 300 and stream.kind == "carolina" and any("\n\n" in text for text in texts)
    validation = [json.loads(line)["text"] for line in open(data / "validation_documents.jsonl", encoding="utf-8")]
    assert len(validation) == 6 and not set(texts) & set(validation)


# --- runs -------------------------------------------------------------------------------------------------------------


def options_of(data: Path, corpus: Path) -> list:
    sizes = ["--n_layer", 1, "--n_embd", 16, "--n_head", 2, "--segment_length", 16, "--position_encoding", "segment"]
    ends = ["--max_steps", 24, "--save_steps", 4, "--eval_steps", 12, "--eval_rows", 8, "--logging_steps", 2]
    return ["--data", data, "--streaming", corpus, "--shuffle_buffer", 100, *sizes, *ends, "--use_cpu", "true",
            "--batch_size", 16, "--learning_rate", 0.005, "--schedule", "constant_with_warmup", "--warmup", 2,
            "--precision", "float32"]  # fmt: skip


def training_losses(folder: Path, last: int = 24) -> dict[int, float]:
    return {step: loss for step, loss, *_ in losses(folder) if loss is not None and step <= last}


@pytest.fixture(scope="module")
def straight(corpus, small, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "straight"
    train.main([*map(str, options_of(small, corpus)), "--gradient_accumulation", "4", "--out", str(out)])
    return out


def test_a_run_learns_from_the_stream_and_says_what_it_read(straight, corpus, small):
    found, lines = result(straight), run_folder.read_jsonl(straight / "metrics.jsonl")
    curve = [line["train_loss"] for line in lines if "train_loss" in line]
    assert curve[-1] < curve[0] - 0.1 and found["cross_entropy"] > 0
    stream, rows = found["stream"], list(stream_of(corpus, small).one_pass())
    assert found["tokens"] == 24 * 64 * CONTEXT and stream["source"] == str(corpus)
    # All that was learned from was read, and beyond it no more than the buffer, the batch that waits and the end of a row
    per_pass = len(rows) * CONTEXT
    assert stream["passes"] == (found["tokens"] + 100 * CONTEXT) // per_pass
    assert found["tokens"] < stream["tokens"] < found["tokens"] + (100 + 16 + 1) * CONTEXT + 20_000
    assert stream["documents"] > len(expected_documents(small)) * stream["passes"]
    assert found["options"]["streaming"].startswith(corpus.name) and found["options"]["shuffle_buffer"] == 100


def test_killed_and_started_again_it_ends_as_if_it_had_run_through(straight, corpus, small, tmp_path, capsys):
    folder = tmp_path / "killed"
    options = [*options_of(small, corpus), "--gradient_accumulation", 4, "--out", folder]
    kill_when((folder / "checkpoint-12" / "model.safetensors").exists, *recipe("train"), *options)
    assert not (folder / "result.json").exists()
    resumes_at = run_folder.checkpoint_step(run_folder.last_complete_checkpoint(folder))
    changed = [str(corpus / "0.jsonl" if option == corpus else option) for option in options]
    with pytest.raises(SystemExit):  # another corpus is another run
        train.main(changed)
    assert f"streaming was '{corpus.name} (" in capsys.readouterr().err
    train.main([*map(str, options)])
    assert f"from step {resumes_at}" in capsys.readouterr().err and resumes_at < 24
    # Another number of threads sums in another order
    assert training_losses(folder) == pytest.approx(training_losses(straight), rel=1e-5)
    assert result(folder)["cross_entropy"] == pytest.approx(result(straight)["cross_entropy"], rel=1e-5)
    assert result(folder)["stream"] == result(straight)["stream"]


def test_two_processes_train_what_one_does(straight, corpus, small, tmp_path):
    """The first reads for both: each row goes to one of them, in the order in which one process would take them."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    options = [*options_of(small, corpus), "--max_steps", 8, "--gradient_accumulation", 2, "--num_processes", 2]
    command, folder = [*torchrun, *recipe("train")[1:], *options, "--out", tmp_path / "two"], tmp_path / "two"
    assert "2 process(es)" in run(*command).stderr
    # The gradients of 64 rows are summed in another order; the steps of AdamW let that grow a little
    assert training_losses(folder) == pytest.approx(training_losses(straight, last=8), rel=1e-4)
    assert len(training_losses(folder)) == 4
    before, stream = losses(folder), result(folder)["stream"]
    (folder / "result.json").unlink()
    (folder / "checkpoint-8" / "complete.json").unlink()
    assert "from step 4" in run(*command).stderr
    assert losses(folder) == before and result(folder)["stream"] == stream


def test_the_card_tells_of_the_stream(straight, corpus, small):
    rows, stream = dict(data_rows(read_run(straight, str(small)))), result(straight)["stream"]
    read = f"{stream['documents']:,} document(s) of {stream['tokens']:,} tokens, {stream['passes']} time(s) read to its end"
    assert rows["Trained on a stream of"] == f"{corpus.name}, {read}"
    assert "Rows, train" not in rows and rows["Rows, validation"] and rows["Rows, test"]


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--streaming needs --max_tokens or --max_steps"),
        (["--epochs", "2", "--max_steps", "3"], "--epochs 2 with --streaming: a stream has no end"),
        (["--max_steps", "3", "--shuffle_buffer", "0"], "--shuffle_buffer must be greater than 0, got 0"),
        (["--max_steps", "3", "--streaming", "no/such/folder"], "--streaming: there is no file or folder no/such/folder"),
    ],
)
def test_user_errors(corpus, small, tmp_path, capsys, options, message):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stopped:
        train.main(["--data", str(small), "--streaming", str(corpus), "--use_cpu", "true", "--out", str(out), *options])
    assert stopped.value.code == 1 and message in capsys.readouterr().err and not out.exists()


def test_a_buffer_without_a_stream_is_refused(small, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train.main(["--data", str(small), "--shuffle_buffer", "9", "--use_cpu", "true", "--out", str(tmp_path / "out")])
    assert "--shuffle_buffer belongs to --streaming" in capsys.readouterr().err


def test_a_corpus_without_training_text_is_refused(small, tmp_path):
    rows = [{"id": name, "text": text} for name, text in held_out(small).items()]
    stream = stream_of(write_jsonl(tmp_path / "held.jsonl", rows), small)
    with pytest.raises(UserError, match=r"not one row of 64 tokens is there to train on \(documents left out: 6 held out\)"):
        next(iter(stream.dataset(buffer=1)))


def test_the_identity_follows_the_files_and_not_their_place(corpus, small, tmp_path):
    moved = shutil.copytree(corpus, tmp_path / corpus.name)
    before = stream_of(corpus, small).identity
    assert stream_of(moved, small).identity == before and before.startswith(corpus.name)
    with open(moved / "2.jsonl", "a", encoding="utf-8") as file:
        file.write("\n")
    assert stream_of(moved, small).identity != before
    os.rename(moved / "2.jsonl", moved / "3.jsonl")
    assert stream_of(moved, small).identity not in (before, stream_of(corpus, small).identity)
