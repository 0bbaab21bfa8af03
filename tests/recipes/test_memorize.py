"""The memorize recipe, real processes and files: read, killed, gone on with, and asked by recipes/generate.py."""

import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from bad_input import refused
from corpora.tokenization import build_character_tokenizer, encode_texts, train_bpe
from decoders import decoder
from hf_infini import patch_model, save_adapter
from hf_infini.cache.files import read_memory_file
from models import infini_gpt2
from running import continuations, greedy, kill_when, load_recipe, run_recipe, sample_text

memorize = load_recipe("memorize")
TOKENS = 700  # of a short text; one token is one character


def saved(folder, make, **options):
    """A folder with a random model and a character tokenizer."""
    tokenizer = build_character_tokenizer([sample_text()])
    tokenizer.save_pretrained(folder)
    make(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **options).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    options = {"position_encoding": "segment", "update_rule": "delta", "memory_conv": 3, "layers": [0, 2]}
    return saved(tmp_path_factory.mktemp("model"), infini_gpt2, **options)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "play.txt"
    file.write_text(sample_text()[:TOKENS], encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def memory(model, text, tmp_path_factory):
    """The text's memory file, by this process."""
    file = tmp_path_factory.mktemp("memory") / "play.safetensors"
    remember("--model", model, "--text", text, "--out", file, "--chunk_tokens", 64)
    return file


def remember(*options) -> None:
    memorize.main([*map(str, options), "--device", "cpu"])


# --- from a text to its continuation -----------------------------------------------------------------------------------


def test_several_prompts_on_one_memory(model, memory, capsys, chunk=5):
    prompts = ["The king", " and", "no more of this, my lord; the night is old"]
    common = ["--model", model, "--memory", memory, "--prompt", *prompts, "--batch_size", 2, "--max_new_tokens", 6]
    found = continuations(capsys, *common, "--chunk", chunk)
    assert [row["text"] for row in found] == [greedy(model, sample_text()[:TOKENS] + prompt, 6) for prompt in prompts]
    # The same text read anew in front of each prompt
    whole = ["--model", model, "--prompt", *(sample_text()[:TOKENS] + prompt for prompt in prompts), "--max_new_tokens", 6]
    sampled = ["--batch_size", 8, "--do_sample", "true"]
    found = continuations(capsys, *common, *sampled, "--chunk", chunk)
    assert [row["text"] for row in found] == [row["text"] for row in continuations(capsys, *whole, *sampled)]
    assert [row["prompt"] for row in found] == prompts


def test_a_family_with_grouped_heads_and_an_adapter(text, tmp_path, capsys):
    """Heads wider than the model's width divided by their number, too."""
    folder, adapted = saved(tmp_path / "plain", decoder, model_type="llama", head_dim=16), tmp_path / "adapted"
    net = patch_model(AutoModelForCausalLM.from_pretrained(folder), segment_length=16, layers=[0, 2, 3])
    save_adapter(net, adapted)
    options = ["--model", folder, "--adapter", adapted]
    remember(*options, "--text", text, "--out", tmp_path / "m")
    size, full = (tmp_path / "m").stat().st_size, 2 * 4 * 2 * 16 * 4 * TOKENS  # 4 layers, 2 heads of 16 float32 numbers
    printed = f"a full key/value cache would take {full:,} bytes, {full / size:,.1f} times as many"
    assert printed in capsys.readouterr().out
    [found] = continuations(capsys, *options, "--memory", tmp_path / "m", "--prompt", "The king", "--max_new_tokens", 6)
    net.save_pretrained(tmp_path / "whole")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "whole")
    assert found["text"] == greedy(tmp_path / "whole", sample_text()[:TOKENS] + "The king", 6)


# --- stopped and gone on with ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_while_it_writes_it_goes_on_and_ends_with_the_same_bytes(tmp_path_factory, tmp_path, capsys):
    """Real processes from a text to its continuation, the first of them killed, most often in the middle of a checkpoint."""
    options = {"position_encoding": "segment", "update_rule": "delta", "memory_conv": 3, "memory_init": "learned"}
    model, tokens = saved(tmp_path_factory.mktemp("bounded"), infini_gpt2, **options), 3000
    text, file = tmp_path / "long.txt", tmp_path / "long.safetensors"
    text.write_text(sample_text()[:tokens], encoding="utf-8")
    options = ["--model", model, "--text", text, "--chunk_tokens", 24, "--checkpoint_tokens", 50, "--device", "cpu"]
    remember(*options, "--out", tmp_path / "straight")
    partial = tmp_path / f"{file.name}.partial"

    def ready() -> bool:
        writing = any(tmp_path.glob(f"{partial.name}.*.part"))
        return partial.exists() and (writing or read_memory_file(partial)[0]["columns"] > tokens / 2)

    kill_when(ready, "memorize", *options, "--out", file)
    done = read_memory_file(partial)[0]["columns"]
    assert 0 < done < tokens and done % 24 == 0 and not file.exists()
    shutil.copy(partial, tmp_path / "kept")
    resumed = run_recipe("memorize", *options, "--out", file)
    assert f"continuing after {done:,} tokens" in resumed.stderr and "reading long.txt: 100%" in resumed.stderr
    assert file.read_bytes() == (tmp_path / "straight").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"long.txt", "long.safetensors", "straight", "kept"}
    size, full = file.stat().st_size, 2 * 3 * 32 * 4 * tokens  # keys and values of 3 layers of 32 float32 numbers
    assert resumed.stdout.startswith(f"{file}: {size:,} bytes for {tokens:,} tokens of long.txt, read at ")
    assert f"a full key/value cache would take {full:,} bytes, {full / size:,.1f} times as many" in resumed.stdout
    asked = ["--model", model, "--memory", file, "--prompt", "The king", "--max_new_tokens", 8, "--device", "cpu"]
    assert run_recipe("generate", *asked).stdout == greedy(model, sample_text()[:tokens] + "The king", 8) + "\n"

    # What an earlier start has read of another text, or what is damaged, is not gone on with
    for change, message in (
        (lambda: text.write_text("Another text"), "long.safetensors.partial is the memory of another text."),
        (lambda: (tmp_path / "kept").write_bytes(b"nothing"), "damaged or no memory file"),
    ):
        change()
        file.unlink(missing_ok=True)
        shutil.copy(tmp_path / "kept", partial)
        refused(memorize.main, [*options, "--out", file], capsys, message)
        assert partial.exists()


def test_a_second_start(model, text, memory, tmp_path, capsys):
    file = tmp_path / "play.safetensors"
    shutil.copy(memory, file)
    time = file.stat().st_mtime_ns
    options = ["--model", model, "--text", text, "--out", file]
    remember(*options)
    printed = capsys.readouterr()
    assert printed.out == "" and "play.safetensors is there already" in printed.err
    # Another text or model under the name of a finished memory
    (tmp_path / "other").write_text("Another text", encoding="utf-8")
    words = [*options, "--device", "cpu"]
    refused(memorize.main, [*words, "--text", tmp_path / "other"], capsys, "is the memory of another text. --out: choose")
    refused(memorize.main, [*words, "--dtype", "bfloat16"], capsys, "dtype is 'float32' in the file and 'bfloat16' in")
    assert time == file.stat().st_mtime_ns


def test_the_text_is_taken_as_it_is(tmp_path):
    """Line breaks stay as they are, a byte-order mark is dropped, special tokens that are spelt out are text."""
    tokenizer, text = train_bpe([sample_text()], 300), sample_text()[:500] + "\r\nfim<|endoftext|> não\n"
    infini_gpt2(vocab_size=300, position_encoding="segment").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbf" + text.encode())
    remember("--model", tmp_path, "--text", tmp_path / "text", "--out", tmp_path / "memory")
    ids = encode_texts(tokenizer, [text])[0].tolist()
    assert read_memory_file(tmp_path / "memory")[0]["tokens_seen"] == [len(ids)]
    pieces = [*memorize.pieces_of(text, 100)]
    assert len(pieces) > 3 and [token for piece in pieces for token in encode_texts(tokenizer, [piece])[0]] == ids
