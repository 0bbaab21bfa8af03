"""Sections of cards: gates, stages, computing, what is said of a corpus and its licence, recall with and without memory."""

import copy
import re

import pytest

import cards
from card_runs import GPT2, INFINI, RESULT, cell, cells, evaluation, load, options_of, recall, run_of
from cards import data as cards_data
from cards import files as cards_files
from cards import results as cards_results
from cards import training as cards_training

# --- gates, stages, computing -----------------------------------------------------------------------------------------

GATED = RESULT | {"gates": {"0": [0.25, 0.75], "2": [0.5, 0.125]}}


def test_gates_by_layer_and_head():
    run = run_of(INFINI | {"gate_init": -4.0}, result=copy.deepcopy(GATED))
    text = cards_training.training_section(run)
    assert cells(text.split("### Gates")[1])[2:] == [["0", "0.250", "0.750"], ["2", "0.500", "0.125"]]
    assert ["Gates at the start", "0.02 (logit -4)"] in cells(text)  # sigmoid(-4) = 0.018
    run.earlier = [cards.Stage("runs/start", copy.deepcopy(GATED))]
    assert "Gates at the start" not in cards_training.training_section(run)  # they go on from that run's
    assert "### Gates" not in cards_training.training_section(run_of())


def test_what_becomes_of_special_tokens():
    def said(config, **options) -> str:
        result = RESULT | {"options": RESULT["options"] | options}
        result["gates"] = GATED["gates"] if config is not GPT2 else {}
        return options_of(run_of(config, result=result))["Special tokens"]

    assert said(INFINI).startswith("learned like all others")  # a run from before the option
    assert said(GPT2, mask_special_tokens=None) == "not learned to be predicted"
    assert said(GPT2, mask_special_tokens=False) == "learned like all others"
    assert said(INFINI | {"mask_special_tokens": False}, mask_special_tokens=None).startswith("learned like all others")


def test_the_stages_and_their_tokens():
    first = RESULT | {"tokens": 1_000_000, "command": "python recipes/train.py --data data/drills --out runs/drills"}
    manifest = recall_manifest(passkey=0, codes=30, echo=90)
    run = run_of(earlier=[cards.Stage("runs/drills", first, manifest), cards.Stage("runs/gone")])
    text = cards_training.stages_section(run)
    rows = cells(text)[2:]
    assert [row[:4] for row in rows] == [
        ["1", "runs/drills", "Carolina, drills (rows of 50: 75 % echo, 25 % codes)", "1,000,000"],
        ["2", "runs/gone", "nothing known of it", ""],
        ["3", "a-model", "plays", "7,654,321"],
    ]
    assert "8,654,321 tokens in all that are known of" in text
    assert "Undertrained" not in cards.write_card(run) and "Of 1 stage(s) before, nothing is known" in cards.write_card(run)
    run.earlier.pop()
    assert "8,654,321 tokens in all." in cards_training.stages_section(run)
    few = RESULT | {"tokens": 100_000}
    # 1,100,000 tokens for 98,765 parameters
    assert "11.1 training tokens for each parameter" in cards.write_card(run_of(result=few, earlier=run.earlier))


@pytest.mark.parametrize(
    ("hardware", "options", "expected"),
    [
        ("8 x NVIDIA H200", {"num_processes": 8}, (0.5, 4.0)),
        ("8 x NVIDIA H200", {"num_processes": 1}, (0.5, 0.5)),
        ("8 x NVIDIA H200", {"num_processes": 2, "use_cpu": True}, (0.5, 0.5)),  # the GPUs were only there
        ("2 CPU cores, AMD EPYC", {"num_processes": 2}, (0.5, 0.5)),
    ],
)
def test_device_hours(hardware, options, expected):
    result = RESULT | {"seconds": 1800.0, "hardware": hardware, "options": RESULT["options"] | options}
    assert cards_training.device_hours(result) == expected
    text = cards_training.compute_section(run_of(result=result, earlier=[cards.Stage("runs/start", result)]))
    assert cells(text)[2:][-1] == ["all", hardware, "1.00", f"{2 * expected[1]:.2f}"]
    assert "Energy was not measured" in text and "CO2" not in text


# --- corpora ----------------------------------------------------------------------------------------------------------


def carolina_manifest(source, names, **options) -> dict:
    usual = {"source": str(source), "source_type": "auto", "tokenizer": "bpe", "context": 50, "split_by": "document"}
    files = [{"file": f"corpus/wikis/pt/{name}.xml.gz"} for name in names]
    splits = {"train": {"blocks": 70, "tokens": 3500}, "validation": {"blocks": 9, "tokens": 450}}
    source = {"documents": 33, "files": files, "dropped": {"too short": 4321}}
    return {"options": usual | options, "source": source, "tokenizer": {"vocabulary": 89}, "splits": splits}


def recall_manifest(**rows) -> dict:
    manifest = carolina_manifest("/home/maria/carolina", ["WIKa"], prepared_from="/home/maria/plain", answers_only=True)
    counted = {kind: 7 * count for kind, count in rows.items()}
    rows = {kind: count for kind, count in rows.items() if count}
    split = {"blocks": sum(rows.values()), "tokens": 6000, "rows_by_kind": rows, "counted_tokens": counted}
    return manifest | {"splits": {"train": split, "validation": split}}


def test_how_much_of_the_corpus_its_own_list_says(tmp_path):
    wikis = tmp_path / "corpus" / "wikis"
    (wikis / "pt").mkdir(parents=True)
    (wikis / "checksum.sha256").write_text("".join(f"00\tpt/WIK{name}.xml\n" for name in "abcd"))

    def said(names) -> str:
        manifest = carolina_manifest(tmp_path, names)
        return cards_data.describe_corpus(manifest, cards_files.share_of(manifest))

    assert said(["WIKa", "WIKb"]).endswith("2 of the 4 `wik` shards, not a random sample of them.")
    assert said(["WIKa", "WIKb", "WIKc", "WIKd"]).endswith(": 4 of the 4 `wik` shards.")
    (wikis / "checksum.sha256").unlink()
    assert said(["WIKa", "WIKb"]).endswith(": 2 files; how many there are in all was not at hand.")


def test_a_carolina_card_names_filters_licences_and_corpus(tmp_path):
    filters = {"prose_filter": True, "prose_host": "pt.wikipedia.org", "prose_min_characters": 500, "fraction": 0.1}
    manifest = carolina_manifest("/home/maria/carolina", ["WIKa", "WIKb"], **filters)
    run = run_of(manifest=manifest, share="2 of 193 `wik` shards", language=cards_data.language_of(manifest))
    card = load(cards.write_card(run), tmp_path)
    assert card.data.language == "pt" and card.data.datasets == ["carolina-c4ai/corpus-carolina"]
    rows = dict(row for row in cells(card.text) if len(row) == 2)
    assert rows["Filters"] == (
        "running prose alone: from pt.wikipedia.org, at least 500 characters, at least 50 % of them in paragraphs of 80 "
        "characters and more; no near-duplicates; 10 % of the documents, drawn at random"
    )
    assert rows["Left out"] == "4,321 too short" and "2 of the 193 `wik` shards, not a random sample of them" in card.text
    assert rows["text: Carolina, `wik`"].startswith("documents CC BY-SA 3.0, those of Wikinews CC BY 2.5; headers")
    assert rows["weights"] == "apache-2.0" and rows["code (hf_infini)"] == "Apache-2.0"
    assert re.findall(r"(?m)^@misc\{(\w+),$", card.text) == ["munkhdalai2024leave", "crespo2023carolina", "hf_infini"]
    assert "eprint        = {2404.07143}" in card.text and "Version 0.1.0" in card.text
    other = carolina_manifest("/home/maria/carolina", ["WIKa", "LEGa"])
    assert [row[0] for row in cards_data.text_licenses(cards.Stage("x", RESULT, other), None)] == [
        "text: Carolina, `wik`",
        "text: Carolina, `leg`",
    ]


def test_other_texts_have_the_licence_that_was_stated(tmp_path):
    plays = carolina_manifest("/home/maria/plays.txt", [])
    for stated, expected in ((None, "not stated"), ("public domain", "public domain")):
        card = load(cards.write_card(run_of(manifest=plays, data_license=stated)), tmp_path)
        assert dict(row for row in cells(card.text) if len(row) == 2)["text of plays.txt"] == expected
        assert card.data.language == "en" and card.data.datasets is None and "carolina" not in card.content.lower()
    biographies = carolina_manifest("biographies", [])
    assert cards_data.language_of(biographies) == "pt"
    assert cards_data.text_licenses(cards.Stage("x", RESULT, biographies), None) == [("text: generated biographies", "none")]


def test_rows_of_recall_are_counted_by_kind():
    manifest = recall_manifest(passkey=30, facts=40, text=50)
    text = cards_data.data_section(run_of(manifest=manifest))
    rows = [row for row in cells(text) if len(row) == 4][2:]
    assert [(row[0], *row[2:]) for row in rows] == [("passkey", "30", "210"), ("facts", "40", "280"), ("text", "50", "350")]
    assert "made by recipes/prepare_recall.py of the rows of plain: where they ask, the answers alone are learned." in text
    labels = [row[0] for row in cards_data.text_licenses(cards.Stage("x", RESULT, manifest), None)]
    assert labels == ["text: Carolina, `wik`", "text: generated sentences of recall"]


# --- recall -----------------------------------------------------------------------------------------------------------


def test_passkeys_of_one_depth_stand_in_one_table():
    lengths = (64, 128, 256)
    found = [cell(48 - n, length=length, depth=0.5) for n, length in enumerate(lengths)]
    found[2] = {"length": 256, "depth": 0.5, "not_possible": "256 tokens, but this model has 128 positions"}
    off = [cell(2, length=64, depth=0.5), cell(1, length=128, depth=0.5)]
    run = run_of(INFINI, evaluations=[recall("passkey", found, data="d"), recall("passkey", off, "off", data="d")])
    text = cards_results.recall_section(run, "passkey")
    assert cells(text)[0] == ["tokens (depth 0.5)", "right", "share", "95 % interval", "nats per token", "memory off"]
    assert cells(text)[2:] == [
        ["64", "48 of 48", "100.0 %", "48.0–101.0 %", "1.5000", "2/48 (2.0–5.2 %)"],
        ["128", "47 of 48", "97.9 %", "47.0–98.9 %", "1.5208", "1/48 (1.0–3.1 %)"],
        ["256", "not possible", "–", "–", "–", "–"],
    ]
    assert "Seed 3, 48 examples for each cell; text: plays, validation; 1 x NVIDIA H200, 2026-11-22." in text
    assert "Not possible: 256 tokens, but this model has 128 positions." in text


def test_passkeys_by_length_and_depth():
    found = [cell(length // 8 + n, length=length, depth=n / 2) for length in (64, 128) for n in range(3)]
    off = [cell(n, length=64, depth=n / 2) for n in range(3)]
    run = run_of(INFINI, evaluations=[recall("passkey", found, data="d"), recall("passkey", off, "off", data="d")])
    before, after = cards_results.recall_section(run, "passkey").split("The same with the memory switched off:")
    assert [row[0] for row in cells(before)[2:]] == ["64", "128"] and cells(before)[0][1:] == [
        "depth 0",
        "depth 0.5",
        "depth 1",
    ]
    assert cells(before)[3][3] == "18/48 (18.0–38.5 %)"
    assert cells(after)[2][1:] == ["0/48 (0.0–1.0 %)", "1/48 (1.0–3.1 %)", "2/48 (2.0–5.2 %)"]
    assert cells(after)[3][1:] == ["–"] * 3


def test_facts_stand_beside_the_same_questions_without_memory_alone():
    found = [cell(40 - n, distance=n) | {"chance": 0.125} for n in range(2)]
    off = [cell(6, distance=1) | {"chance": 0.125}]
    run = run_of(INFINI, evaluations=[recall("facts", off, "off"), recall("facts", found)])
    text = cards_results.recall_section(run, "facts")
    assert cells(text)[0][-2:] == ["most frequent answers", "memory off"] and "segments of 8 tokens" in text
    assert [row[-2:] for row in cells(text)[2:]] == [["12.5 %", "–"], ["12.5 %", "6/48 (6.0–13.5 %)"]]
    among = recall("facts", found, data="d") | {"source": "data/plays", "data_fingerprint": RESULT["data_fingerprint"]}
    run.evaluations.append(among | {"split": "validation"})
    *_, last = cards_results.recall_section(run, "facts").splitlines()
    assert "segments of 8 tokens; lines of text between (plays, validation);" in last
    shares = [row["how"] for row in cards_results.recall_shares(run)]
    assert shares[1:3] == ["1 segments between", "0 segments of lines of text between (plays, validation)"]
    run.evaluations.pop()
    # Another seed asks about other people: two tables
    run.evaluations[0]["options"]["seed"] = 4
    before, after = cards_results.recall_section(run, "facts").split("With the memory switched off:")
    assert "memory off" not in before and cells(after)[2][:3] == ["1", "6 of 48", "12.5 %"]


def test_the_metadata_counts_passkeys_by_length():
    places = ((1024, 0, 48), (1024, 1, 24), (2048, 0, 12))
    found = [cell(right, length=length, depth=depth) for length, depth, right in places]
    run = run_of(INFINI, evaluations=[recall("passkey", found), recall("passkey", found, "off")])
    shares = [(row["how"], row["accuracy"]) for row in cards_results.recall_shares(run)]
    assert shares == [("1,024 tokens, depths 0, 1", 0.75), ("2,048 tokens, depth 0", 0.25)]


def test_perplexity_without_memory_is_no_figure_of_the_model(tmp_path):
    off = evaluation("validation", 1.75, 31_111) | {"memory": "off"}
    text = cards.write_card(run_of(INFINI, evaluations=[off, evaluation("test", 1.5, 30_000)]))
    splits = [entry.dataset_split for entry in load(text, tmp_path).data.eval_results]
    assert splits == ["validation"] * 2 + ["test"] * 2
    assert ["its memory off", "plays, validation", "31,111", "1.7500", "5.75"] in cells(text)
    assert "8 CPU cores, Some CPU, 2026-11-20; 1 x NVIDIA H200, 2026-11-22" in text


def test_long_rows_are_shown_by_position():
    evaluations = [evaluation("validation", 1.4, 29_000, length=4096), evaluation("test", 1.5, 30_000)]
    text = cards_results.results_section(run_of(evaluations=evaluations))
    assert text.count("### ") == 1
    part = text.split("### By position in rows of 4,096 tokens (plays, validation)")[1]
    assert cells(part)[2:] == [["1–1", "5", "3.00"], ["2–3", "9", "2.50"]]
