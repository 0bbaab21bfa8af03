"""Questions about documents: ways that hold everything are the plain model, measures by their
definition, runs that go on, bad input."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import document_files
from bad_input import handled, refused
from corpora.tokenization import build_character_tokenizer
from decoders import begin_with_bos, decoder, fitted
from document_sets.prepared import write_set
from evaluation import answers, caches, prompts, ways
from hf_infini import lora_config, patch_model, save_adapter, unpatch_model
from hf_infini.compat.cache_name import CACHE
from hf_infini.models.loading import load_causal_lm, load_tokenizer
from running import kill_when, load_recipe
from support.lines import only_writer

recipe = load_recipe("evaluate_documents")
prepare = load_recipe("prepare_documents")
SETS = ["tpo", "contracts", "qmsum"]
OWN = ["plain", "window", "kept", "bm25"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}\n{% endfor %}{{ '<assistant>\n' }}"
)
ALL = 2048  # tokens: more than a document with its questions has
FEW = 128
SPECIAL = ("[UNK]", "[PAD]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, an adapter with scores, and prepared sets."""
    path = tmp_path_factory.mktemp("questions")
    raw = document_files.download(path / "raw")
    prepare.main(["--source", str(raw), "--out", str(path / "data"), "--sets", *SETS])
    seen = "".join(file.read_text() for file in (path / "data").glob("*.jsonl"))
    tokenizer = build_character_tokenizer([seen, json.dumps(prompts.ASKED), TEMPLATE])
    tokenizer.chat_template = TEMPLATE
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")
    }
    model = decoder("llama", vocab_size=len(tokenizer), max_position_embeddings=ALL, **special)
    model.save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    fitted(patch_model(model, **caches.memory_options("learned", 64)))
    save_adapter(model, path / "adapter")
    unpatch_model(model)
    return path


def words_for(folder, out, *options) -> list[str]:
    given = ["--model", folder / "model", "--adapter", folder / "adapter", "--device", "cpu"]
    given += ["--data", folder / "data", "--documents", 2, "--out", out, *options]
    return [*map(str, given)]


def evaluated(folder, out, *options) -> list[dict]:
    """Runs the recipe in this process and returns the lines that it wrote, without their times."""
    recipe.main(words_for(folder, out, *options))
    lines = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "checksum")} for line in lines[1:]
    ]


def by_way(lines: list[dict]) -> dict[str, dict]:
    """Of each way its questions, by document and number."""
    found: dict[str, dict] = {}
    for line in lines:
        if line["question"] is not None:
            found.setdefault(line["way"], {})[line["document"], line["question"]] = line
    return found


@pytest.fixture(scope="module")
def whole(folder):
    """All ways with few places, from a run that nothing stopped."""
    return evaluated(folder, folder / "whole", "--ways", *OWN, "--tokens", FEW, "--generate", 6)


def test_ways_that_hold_everything_are_the_plain_model(folder, tmp_path, whole, capsys):
    found = by_way(evaluated(folder, tmp_path / "all", "--ways", *OWN, "--tokens", ALL))
    plain = found["plain"]
    assert {line["set"] for line in plain.values()} == {*SETS} and len(plain) >= 6
    for way in OWN:
        assert found[way].keys() == plain.keys()
        for key, line in found[way].items():
            # float32 sums in another order
            assert line["nats"] == pytest.approx(plain[key]["nats"], rel=1e-4), way
            assert line["right"] == plain[key]["right"]
            assert line["evidence"] in (None, 1)
    few = by_way(whole)
    nats = {way: tuple(round(line["nats"], 4) for line in few[way].values()) for way in OWN}
    assert len({*nats.values()}) == len(OWN)  # no way is another under a second name
    assert nats["plain"] == tuple(round(line["nats"], 4) for line in plain.values())
    for way in OWN[1:]:
        assert max(line["bytes"] for line in few[way].values()) < min(
            line["bytes"] for line in few["plain"].values()
        )
    shown = capsys.readouterr().out
    assert "| contracts" in shown and "| all" in shown and "above plain" in shown
    assert (tmp_path / "all.png").read_bytes()[:4] == b"\x89PNG"


def test_nats_and_choices_are_those_of_the_whole_prompt(folder, whole):
    model = load_causal_lm(folder / "model", dtype=torch.float32).eval()
    tokenizer = load_tokenizer(folder / "model", model)
    asked = {line["id"]: line for name in SETS for line in lines_of(folder / "data", name)}
    kinds = set()
    for (name, number), line in by_way(whole)["plain"].items():
        entry, nats = asked[name]["questions"][number], {}
        kinds.add(entry["kind"])
        how = "Answer in a paragraph" if entry["kind"] == "summary" else "Answer in a few words"
        mark = "" if entry["question"][-1] in "?." else "?"
        said = f"{asked[name]['text']}\n\nQuestion: {entry['question']}{mark} {how}, from the text."
        prompt = f"<user>\n{said}\n<assistant>\n"
        for answer in entry["options"] or entry["answers"]:
            ids = tokenizer(prompt + answer, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, -len(answer) - 1 : -1]
            nats[answer] = F.cross_entropy(logits, ids[0, -len(answer) :], reduction="sum").item()
        right = entry["answers"][0]
        assert (line["nats"], line["tokens"]) == (pytest.approx(nats[right], rel=1e-4), len(right))
        best = min(nats, key=lambda answer: nats[answer] / len(answer))
        assert line["right"] == (best == right if entry["options"] else None)
    assert kinds == {"short", "choice", "summary"}


@pytest.mark.parametrize(
    "before, asks", [("Read this.", None), ("You are asked {} of a text. {}", "Now: {} Say ({}).")]
)
def test_what_is_said_before_and_behind_a_document(folder, tmp_path, before, asks):
    """Ways that hold everything give the nats of the whole prompt, wherever the question is."""
    given = ["--ways", *OWN, "--tokens", ALL, "--sets", "contracts", "--documents", 1]
    given += ["--before", before, *(["--asks", asks] if asks else [])]
    lines = evaluated(folder, tmp_path / "said", *given)
    model = load_causal_lm(folder / "model", dtype=torch.float32).eval()
    tokenizer = load_tokenizer(folder / "model", model)
    documents = {line["id"]: line for line in lines_of(folder / "data", "contracts")}
    asked = [line for line in lines if line["question"] is not None]
    for line in asked:
        document = documents[line["document"]]
        entry, text = document["questions"][line["question"]], document["text"]
        question = entry["question"] + ("" if entry["question"][-1] in "?." else "?")
        behind = asks or prompts.ASKED["en"][entry["kind"]]
        parts = before.replace("{}", question), text, behind.replace("{}", question)
        prompt = "<user>\n{}\n\n{}\n\n{}\n<assistant>\n".format(*parts)
        right = entry["answers"][0]
        ids = tokenizer(prompt + right, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = model(ids).logits[0, -len(right) - 1 : -1].double()
        wanted = F.cross_entropy(logits, ids[0, -len(right) :], reduction="sum").item()
        assert line["nats"] == pytest.approx(wanted, rel=1e-4)
    assert {line["way"] for line in asked} == {*OWN}


@pytest.mark.parametrize("name", OWN)
def test_readings_are_made_again_only_where_the_question_comes_first(folder, name):
    way, prepared, document, prompter = made(folder, name)
    every = [*range(len(prepared["questions"]))]
    first = prompts.Prompter(prompter.tokenizer, True, before="{}")
    with way.ready(), torch.inference_mode():
        for asking, readings in ((prompter, 1), (first, len(every))):
            made_of = [*recipe.readings(way, asking, prepared, document, every)]
            assert [number for number, *_ in made_of] == every
            assert len({id(reading) for _, _, reading, _ in made_of}) == readings


def lines_of(folder, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def made(folder, name: str, **options):
    """A way, a document with its reading, and the prompter."""
    model = load_causal_lm(folder / "model", dtype=torch.float32).eval()
    prompter = prompts.Prompter(load_tokenizer(folder / "model", model), True)
    given = recipe.Options(model="", data="", out="", adapter=str(folder / "adapter"), **options)
    prepared = lines_of(folder / "data", "contracts")[0]
    return ways.WAYS[name](name, model, given, FEW), prepared, prompter.document(prepared), prompter


@pytest.mark.parametrize("name", OWN)
def test_a_question_does_not_change_what_was_read(folder, name):
    way, prepared, document, prompter = made(folder, name)
    with way.ready(), torch.inference_mode():
        reading = way.read(document)
        first, again = (
            [
                {**answers.ask(way, reading, document, asked, prompter, 4), "seconds": 0}
                for asked in order
            ]
            for order in (prepared["questions"], prepared["questions"][::-1])
        )
    assert first == again[::-1] and first[0]["nats"] != first[1]["nats"]


@pytest.mark.parametrize("name", ["window", "kept"])
def test_the_tokens_that_are_held_are_those_in_the_cache(folder, name):
    way, _, document, _ = made(folder, name)
    with way.ready(), torch.inference_mode():
        cache = way.asked(way.read(document), None)
        held = way.held(cache, document)
        (length, local, sinks, kept), *_ = cache.windows.values()
        last = local * length + len(document.ids) % length
        # each layer's places are full, and no token is in two of them
        places = sum(sinks + last + windows[3] for windows in cache.windows.values())
        assert held.sum().item() == pytest.approx(places / len(cache.windows))
        assert (held[:sinks] == 1).all() and (held[-last:] == 1).all()
        middle = held[sinks:-last]
        assert (middle == 0).all() if name == "window" else 0 < middle.sum()


def test_layers_that_slide_do_not_count_as_holding_all(folder):
    way, _, document, _ = made(folder, "window")
    way.model = decoder("gemma3_text", vocab_size=len(load_tokenizer(folder / "model"))).eval()
    with way.ready(), torch.inference_mode():
        cache = way.asked(way.read(document), None)
        assert len(cache.windows) < way.model.config.num_hidden_layers
        held = way.held(cache, document)
    assert held[0] == held[-1] == 1 and 0 < held.sum() < 2 * FEW and {*held.tolist()} == {0, 1}


def test_the_search_finds_the_passage_with_the_rare_word(folder):
    way, prepared, document, prompter = made(folder, "bm25", passage=32)
    sentence = prepared["questions"][1]["answers"][0]
    asked = prompter.question({"question": sentence, "kind": "short"}, "en")
    way.tokens = document.first + len(asked.ids) + 3 * 32
    with torch.inference_mode():
        cache = way.asked(way.read(document), asked)
    evidence = document.tokens_of([[*prepared["questions"][1]["evidence"][0]]])
    assert (
        "".join(document.text[document.spans[n - document.first][0]] for n in evidence) == sentence
    )
    assert way.held(cache, document)[evidence].mean() > 0.7
    chosen = way.chosen.tolist()
    assert cache.get_seq_length() == document.first + len(chosen) and chosen == sorted({*chosen})
    assert 64 < len(chosen) <= 96  # three passages, of which the document's last is shorter


@pytest.mark.parametrize("text, asked", [("? !" * 99, "Who?"), ("Amber " * 99, "Who is it?")])
def test_a_search_without_words(folder, text, asked):
    way, prepared, _, prompter = made(folder, "bm25", passage=32)
    document = prompter.document({**prepared, "text": text})
    question = prompter.question({"question": asked, "kind": "short"}, "en")
    with torch.inference_mode():
        way.asked(way.read(document), question)
    assert len(document.ids) - 1 in way.chosen  # the latest passages


def test_code_is_asked_as_it_is_written(folder):
    _, prepared, _, prompter = made(folder, "plain")
    code = "import lib\n\nfor each in lib:\n    return"
    asked = prompter.question({"question": code, "kind": "code"}, "en")
    said = prompter.tokenizer.decode(asked.ids)
    assert said.endswith(f"missing code only.\n\n{code}\n<assistant>\n")


def saved_embedder(path, texts: list[str], longest: int | None):
    """A model of sentence-transformers whose words have random embeddings: their mean, or a small
    BERT with so many positions."""
    st = pytest.importorskip("sentence_transformers")
    words = [*SPECIAL, *sorted({word for text in texts for word in text.split()})]
    backend = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    draw = np.random.default_rng(0)
    if longest is None:
        from sentence_transformers.sentence_transformer.modules import StaticEmbedding

        weights = draw.normal(size=(len(words), 64)).astype(np.float32)
        part = StaticEmbedding(backend, embedding_weights=weights)
    else:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = BertConfig(vocab_size=len(words), **sizes, max_position_embeddings=longest)
        BertModel(config).save_pretrained(path / "bert")
        names = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
        PreTrainedTokenizerFast(
            tokenizer_object=backend, model_max_length=longest, **names
        ).save_pretrained(path / "bert")
        st.SentenceTransformer(str(path / "bert")).save(str(path / "embedder"))
        return path / "embedder"
    st.SentenceTransformer(modules=[part]).save(str(path / "embedder"))
    return path / "embedder"


def test_embeddings_find_the_passage_with_the_same_words(folder, tmp_path):
    _, prepared, document, prompter = made(folder, "plain")
    embedder = saved_embedder(tmp_path, [prepared["text"]], None)
    way, *_ = made(folder, "embedding", passage=64, embedder=str(embedder))
    for start in (64, 192, 256):
        text = document.text[start : start + 64]
        asked = prompter.question({"question": text.strip(), "kind": "short"}, "en")
        way.tokens = document.first + len(asked.ids) + 64
        with way.ready(), torch.inference_mode():
            way.asked(way.read(document), asked)
        assert way.chosen.tolist() == [*range(document.first + start, document.first + start + 64)]


@pytest.mark.parametrize("passage", (16, 512))
def test_passages_that_are_too_long_for_an_embedder_are_said(folder, tmp_path, capsys, passage):
    prepared = lines_of(folder / "data", "contracts")
    embedder = saved_embedder(tmp_path, [line["text"] for line in prepared], 32)
    options = ["--embedder", embedder, "--passage", passage, "--sets", "contracts"]
    ways = ["plain", "embedding"]
    found = by_way(evaluated(folder, tmp_path / "out", *options, "--tokens", 640, "--ways", *ways))
    assert found["embedding"].keys() == found["plain"].keys()
    said = "reads the first 32 of its tokens of a passage"
    assert capsys.readouterr().err.count(said) == (passage == 512)


def tuned_adapter(model, path, kind: str):
    """An adapter with a LoRA of random numbers: of PEFT, or with scores."""
    if kind == "scores":
        fitted(patch_model(model, **caches.memory_options("learned", 64)))
        config = lora_config(model, r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    else:
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    tuned, draw = get_peft_model(model, config), torch.Generator().manual_seed(3)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=draw)
    save_adapter(tuned, path) if kind == "scores" else tuned.save_pretrained(path)
    return tuned.merge_and_unload()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("scores", "PEFT"))
def test_a_lora_is_in_the_weights_of_its_ways_and_of_no_other(folder, tmp_path, kind):
    model = load_causal_lm(folder / "model", dtype=torch.float32)
    merged = tuned_adapter(model, tmp_path / "lora", kind)
    merged = unpatch_model(merged) if kind == "scores" else merged
    shutil.copytree(folder / "model", tmp_path / "model")
    merged.save_pretrained(tmp_path / "model")
    names = ["plain", "kept", "recall", "bm25"]
    options = ["--tokens", FEW, "--sets", "tpo", "--ways"]
    both = [name + end for end in ("+lora", "") for name in names]
    lora = ["--lora", tmp_path / "lora"]
    if kind == "scores":  # the adapter's is the default; its scores are those of the other
        lora = ["--adapter", tmp_path / "lora"]
    found = by_way(evaluated(folder, tmp_path / "both", *options, *both, *lora))
    tuned = ["--model", tmp_path / "model"]
    wanted = by_way(evaluated(folder, tmp_path / "tuned", *options, *names, *tuned))
    plain = by_way(evaluated(folder, tmp_path / "plain", *options, *names))
    for name in names:
        assert [*found[name].values()] == [*plain[name].values()]
        for key, line in wanted[name].items():
            # sums of float32 weights, which were saved
            assert found[f"{name}+lora"][key]["nats"] == pytest.approx(line["nats"], rel=1e-4)
            assert line["nats"] != pytest.approx(found[name][key]["nats"], rel=2e-4)


@pytest.mark.slow
def test_quantised_keys_and_values(folder, tmp_path, whole):
    pytest.importorskip("optimum.quanto")
    found = by_way(evaluated(folder, tmp_path / "q", "--ways", "plain", "quantized"))
    for key, line in found["quantized"].items():
        plain = found["plain"][key]
        assert line["nats"] != plain["nats"] and line["bytes"] < plain["bytes"] / 2
        assert line["nats"] == pytest.approx(plain["nats"], rel=0.2)  # 4 bits of random weights


@pytest.mark.parametrize("name", recipe.PRESSES)
def test_presses_leave_as_many_tokens_and_all_is_plain(folder, name):
    pytest.importorskip("kvpress")
    if CACHE != "past_key_values":
        pytest.skip("kvpress needs transformers before 5.24")
    found = {}
    for tokens in (FEW, ALL):
        way, prepared, document, prompter = made(folder, name, window=32)
        way.tokens = tokens
        with way.ready(), torch.inference_mode():
            reading = way.read(document)
            assert reading.get_seq_length() == min(tokens - 32, len(document.ids))
            asked = prepared["questions"][0]
            found[tokens] = answers.ask(way, reading, document, asked, prompter, 4)["nats"]
    plain, *_ = made(folder, "plain")
    with torch.inference_mode():
        whole = answers.ask(plain, plain.read(document), document, asked, prompter, 4)["nats"]
    assert found[ALL] == pytest.approx(whole, rel=1e-4) and found[FEW] != found[ALL]


def test_an_archive_in_8_bits_is_the_exact_one_but_for_rounding(folder):
    found = {}
    for name in ("recall", "recall-int8"):
        way, prepared, document, prompter = made(folder, name, window=32)
        with way.ready(), torch.inference_mode():
            reading = way.read(document)
            assert reading.archived == ("int8" if name == "recall-int8" else True)
            asked = prepared["questions"][0]
            found[name] = answers.ask(way, reading, document, asked, prompter, 4)
    one, two = found.values()
    assert one["nats"] == pytest.approx(two["nats"], rel=0.01) and one["nats"] != two["nats"]
    assert all(one[name] == two[name] for name in ("bytes", "evidence", "tokens"))


def test_text_that_spells_special_tokens_is_plain_text(folder):
    _, prepared, document, prompter = made(folder, "plain")
    end = prompter.tokenizer.eos_token
    spelled = prompter.document({**prepared, "text": f"{end}{prepared['text']}"})
    assert prompter.tokenizer.eos_token_id not in spelled.ids
    assert spelled.first == document.first


@pytest.mark.parametrize("template", (None, "{{ messages[0].content | upper }}", "{{ raise() }}"))
def test_models_without_a_template_or_with_one_that_does_not_fit(folder, template):
    tokenizer = copy.deepcopy(made(folder, "plain")[-1].tokenizer)
    tokenizer.chat_template = template
    if template is None:
        prompter = prompts.Prompter(tokenizer, True)
        assert (prompter.head, prompter.before, prompter.after) == ("", "\n\n", "\nAnswer:")
        assert tokenizer.decode(prompter.answer("x")) == " x" and not prompter.chat
        return
    with pytest.raises(Exception, match="--chat false"):
        prompts.Prompter(tokenizer, True)
    assert prompts.Prompter(tokenizer, False).after == "\nAnswer:"


def test_a_model_without_a_template_reads_what_its_tokenizer_begins_with(folder):
    tokenizer = copy.deepcopy(made(folder, "plain")[-1].tokenizer)
    begin_with_bos(tokenizer)
    bos = tokenizer.bos_token_id
    prepared = lines_of(folder / "data", "contracts")[0]
    for template, first in ((None, [bos]), (TEMPLATE, [])):
        tokenizer.chat_template = template
        prompter = prompts.Prompter(tokenizer, True)
        document = prompter.document(prepared)
        assert document.ids.tolist().count(bos) == len(first)
        assert document.ids[: len(first)].tolist() == first
        question = prompter.question(prepared["questions"][0], "en")
        assert bos not in question.ids


def test_each_size_is_a_row_beside_the_same_plain_one(folder, tmp_path, capsys):
    given = ["--questions", 1, "--sets", "contracts", "--ways", "plain", "recall"]
    one = evaluated(folder, tmp_path / "one", *given, "--tokens", FEW)
    assert "| recall |" in capsys.readouterr().out.replace("  ", "")
    both = evaluated(folder, tmp_path / "both", *given, "--tokens", FEW, ALL)
    shown = capsys.readouterr().out
    assert f"| recall, {FEW}" in shown and f"| recall, {ALL:,}" in shown and "| plain" in shown
    assert [line for line in both if line["tokens_held"] != ALL] == one
    held = {(line["way"], line["tokens_held"]) for line in both}
    assert held == {("plain", None), ("recall", FEW), ("recall", ALL)}
    assert evaluated(folder, tmp_path / "one", *given, "--tokens", ALL, FEW)[: len(one)] == one


# --- runs that go on ---


@pytest.mark.slow
def test_a_kill_loses_one_question_at_most(folder, tmp_path, whole):
    options = ["--ways", *OWN, "--tokens", FEW, "--generate", 6]
    file, lines = tmp_path / "killed.jsonl", len(whole) // 2

    def half_done() -> bool:
        return file.exists() and file.read_bytes().count(b"\n") > lines

    kill_when(half_done, "evaluate_documents", *words_for(folder, tmp_path / "killed", *options))
    before = file.read_bytes().rpartition(b"\n")[0]
    assert evaluated(folder, tmp_path / "killed", *options) == whole
    assert file.read_bytes().startswith(before) and before.count(b"\n") >= lines - 1


@pytest.mark.parametrize("damage", ("cut", "changed", "another's", "none"))
@pytest.mark.parametrize("place", (1, 5, -1))
def test_a_damaged_line_is_measured_again(damage, place, folder, tmp_path, whole, capsys):
    for suffix in (".json", ".jsonl", ".png"):
        shutil.copy(folder / f"whole{suffix}", tmp_path / f"out{suffix}")
    file = tmp_path / "out.jsonl"
    lines = file.read_text().splitlines()
    line = lines[place]
    lines[place] = {
        "cut": line[:-9],
        "changed": line.replace('"way": "', '"way": "x'),
        "another's": '{"way": "plain"}',
        "none": line,
    }[damage]
    file.write_text("\n".join(lines))  # and the last line has no end
    options = ["--ways", *OWN, "--tokens", FEW, "--generate", 6]
    found = evaluated(folder, tmp_path / "out", *options)
    assert sorted(map(json.dumps, found)) == sorted(map(json.dumps, whole))
    said = f"line {place % len(lines) + 1} is damaged" in capsys.readouterr().err
    assert said == (damage != "none")


def test_more_ways_and_questions_are_added_and_other_options_are_not(folder, tmp_path, capsys):
    out = tmp_path / "out"
    small = ["--tokens", FEW, "--questions", 1, "--sets", "tpo", "contracts"]
    first = evaluated(folder, out, *small, "--ways", "plain")
    more = evaluated(folder, out, "--tokens", FEW, "--ways", "plain", "bm25")
    assert more[: len(first)] == first and len(by_way(more)["bm25"]) == len(by_way(more)["plain"])
    before = out.with_suffix(".jsonl").read_bytes()
    other = [("--window", 32), ("--chat", "false"), ("--generate", 3), ("--before", "x")]
    for option, value in (*other, ("--asks", "{}")):
        words = words_for(folder, out, *small, "--ways", "plain", option, value)
        refused(recipe.main, words, capsys, "was measured with other options", option[2:], "--out")
    assert out.with_suffix(".jsonl").read_bytes() == before
    with only_writer(out.with_suffix(".jsonl")):
        words = words_for(folder, out, *small, "--ways", "plain")
        refused(recipe.main, words, capsys, "another run is writing there")


def test_the_card_of_an_adapter_is_no_part_of_what_was_measured(folder, tmp_path):
    adapter = shutil.copytree(folder / "adapter", tmp_path / "adapter")
    words = ["--ways", "plain", "--questions", 1, "--sets", "tpo", "--adapter", adapter]
    first = evaluated(folder, tmp_path / "out", *words)
    (adapter / "README.md").write_text("A card.")
    assert evaluated(folder, tmp_path / "out", *words) == first


@pytest.mark.parametrize("text", (b"", b"{}\n", b'{"way": 1}\n', b"\xff\n", b"[1]\n"))
def test_files_of_something_else(text, folder, tmp_path, capsys):
    file = tmp_path / "out.jsonl"
    file.write_bytes(text)
    words = words_for(folder, tmp_path / "out", "--ways", "plain")
    refused(recipe.main, words, capsys, str(file), "--out")
    assert file.read_bytes() == text


# --- bad input ---


def test_documents_that_are_too_long_are_said(folder, tmp_path, capsys):
    model = shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 500}))
    data = ["--ways", "plain", "window", "--tokens", FEW, "--sets", "qmsum", "tpo"]
    words = [*words_for(folder, tmp_path / "out", *data), "--model", model]
    shown = handled(recipe.main, words, capsys, "and plain holds 500: left out of its rows")
    assert "qmsum, too long for plain" in shown
    words = words_for(folder, tmp_path / "none", "--max_tokens", 9)
    refused(recipe.main, words, capsys, "no document has at most --max_tokens 9")


def test_bad_options_and_folders(folder, tmp_path, capsys):
    for options, message in [
        (["--ways", "plain", "plain"], "name each once"),
        (["--tokens", 128, 128], "--tokens 128 128: name each once"),
        (["--ways", "window"], "--against plain must be one of --ways window: add it"),
        (["--sets", "quality"], "has qmsum, tpo, contracts"),
        (["--data", folder], "has no documents.json"),
        (["--data", folder / "none"], "has no documents.json"),
        (["--ways", "plain", "SnapKV"], "kvpress"),
        (["--model", tmp_path / "none"], "there is no folder"),
        (["--adapter", tmp_path / "none"], "there is no folder"),
    ]:
        words = words_for(folder, tmp_path / f"out{len(message)}", *options)
        refused(recipe.main, words, capsys, message)
    for number, (options, message) in enumerate(
        [
            (["--ways", "plain", "embedding"], "give the --embedder"),
            (["--ways", "plain", "embedding", "--embedder", tmp_path], "cannot load it"),
            (["--ways", "plain", "plain+lora"], "this adapter has no LoRA"),
            (["--ways", "plain", "--asks", "Why?"], "--asks 'Why?' needs {}"),
            (
                ["--ways", "plain", "recall+lora", "--lora", tmp_path / "none"],
                "--lora: there is no folder",
            ),
            (["--ways", "plain", "recall+lora", "--lora", folder / "model"], "cannot take it"),
        ]
    ):
        words = words_for(folder, tmp_path / f"new{number}", "--sets", "tpo", *options)
        refused(recipe.main, words, capsys, message)
    words = [word for word in words_for(folder, tmp_path / "o") if "adapter" not in word]
    refused(recipe.main, [*words, "--keep_score", "learned"], capsys, "give the --adapter")
    tuned = ["--ways", "plain", "plain+lora"]
    refused(recipe.main, [*words, *tuned], capsys, "give the --lora, or an --adapter that has one")
    for name, change in (
        ("tpo.jsonl", lambda text: text.replace("gate", "door", 1)),
        ("documents.json", lambda text: text.replace("8", "9", 1)),
    ):
        data = shutil.copytree(folder / "data", tmp_path / f"changed {name}")
        (data / name).write_text(change((data / name).read_text()))
        words = [*words_for(folder, tmp_path / "out"), "--data", data]
        refused(recipe.main, words, capsys, str(data / name), "make it again", keeps=data)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_half_without_documents_of_a_set_is_said(folder, tmp_path, capsys):
    data = tmp_path / "data"
    lines = {
        name: [line for line in lines_of(folder / "data", name) if line["half"] == half]
        for name, half in (("tpo", "development"), ("qmsum", "test"))
    }
    data.mkdir()
    for name, own in lines.items():
        write_set(data, name, own)
    words = [*words_for(folder, tmp_path / "out", "--ways", "plain"), "--data", data]
    missing = "has no documents of the development half of qmsum", "give --half test"
    refused(recipe.main, [*words, "--sets", "tpo", "qmsum"], capsys, *missing)
    handled(recipe.main, words, capsys, "sets without a document of the development half: qmsum")


def test_an_adapter_of_another_model_is_refused_before_anything_is_read(folder, tmp_path, capsys):
    model = decoder("llama", vocab_size=99, num_hidden_layers=5, max_position_embeddings=ALL)
    save_adapter(
        fitted(patch_model(model, **caches.memory_options("learned", 64))), tmp_path / "adapter"
    )
    words = words_for(folder, tmp_path / "out", "--ways", "plain", "kept", "--tokens", FEW)
    said = "is of another model, with 5 layers; --model has"
    refused(recipe.main, [*words, "--adapter", tmp_path / "adapter"], capsys, said)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1  # no way was measured


def test_a_model_with_a_memory_is_refused(folder, tmp_path, capsys):
    model = load_causal_lm(folder / "model")
    patch_model(model, segment_length=16).save_pretrained(tmp_path / "model")
    load_tokenizer(folder / "model", model).save_pretrained(tmp_path / "model")
    words = [*words_for(folder, tmp_path / "out"), "--model", tmp_path / "model"]
    refused(recipe.main, words, capsys, "has a memory")
