"""Cards as text: metadata that the Hub reads back, numbers of the JSON only, no machine's paths,
unbreakable fences."""

import re
import shlex

from hypothesis import given, strategies

from card_runs import (
    GPT2,
    INFINI,
    RESULT,
    SAMPLE,
    about,
    cell,
    cells,
    evaluation,
    load,
    recall,
    run_of,
)
from cards.card import losses, write_card
from cards.run import shorten_path
from support import markdown


def test_the_hub_reads_the_metadata_back(tmp_path):
    options = about(license="mit", dataset="user/data", base_model="gpt2")
    data = load(write_card(run_of(INFINI), options, [SAMPLE]), tmp_path).data
    assert (data.model_name, data.language, data.license, data.base_model) == (
        "a-model",
        "pt",
        "mit",
        "gpt2",
    )
    assert (
        data.pipeline_tag == "text-generation"
        and data.library_name == "transformers"
        and data.datasets == ["user/data"]
    )
    assert data.tags == ["hf_infini", "infini_gpt2", "infini-attention"]


def test_numbers_of_exercises_are_no_language_model_s():
    whole = write_card(run_of(manifest=manifest(rows_by_kind={"codes": 30})), about(), [SAMPLE])
    assert "exercises" not in whole
    rows = manifest(rows_by_kind={"codes": 30, "text": 4, "echo": 6})
    rows["options"]["prepared_from"] = "data/carolina"
    whole = write_card(run_of(manifest=rows), about(), [SAMPLE])
    assert (
        "The rows of plays are exercises of recall (codes, echo): their numbers say nothing"
        in whole
    )


def test_losses_of_the_run_and_of_its_evaluations():
    repeated = evaluation("validation", 1.2345679, 31_111)  # train.py's number again
    other = evaluation("validation", 1.4, 31_111) | {
        "source": "/data/essays",
        "data_fingerprint": "0",
    }
    found = [
        repeated,
        evaluation("test", 1.5, 30_000),
        other,
        evaluation("validation", 1.9, 31_111, memory="off"),
    ]
    assert cells(losses(run_of(evaluations=found)))[1:] == [
        ["plays, validation", "31,111", "1.2346", "3.44"],
        ["plays, test", "30,000", "1.5000", "4.48"],
        ["essays, validation", "31,111", "1.4000", "4.06"],
        ["plays, validation, memory off", "31,111", "1.9000", "6.69"],
    ]


def evaluation_section(run) -> str:
    return (
        write_card(run, about(), [SAMPLE])
        .partition("## Evaluation")[2]
        .partition("\n\nAll of this was measured")[0]
    )


def test_positions_and_recall_with_counts_and_intervals():
    asked = [
        cell(48, length=64, depth=0.0),
        cell(24, length=64, depth=1.0),
        cell(12, length=1024, depth=0.0),
    ]
    asked.append({"length": 1024, "depth": 1.0, "not_possible": "too long"})
    facts = [cell(12, distance=3), {"distance": 9, "not_possible": "too long"}]
    measured = [evaluation("test", 1.5, 30_000), evaluation("test", 1.4, 29_000, length=4096)]
    measured += [recall("passkey", asked), recall("facts", facts, memory="off")]
    positions, passkeys, questions = evaluation_section(run_of(INFINI, evaluations=measured)).split(
        "### "
    )[1:]
    assert positions.startswith("By position in rows of 4,096 tokens (plays, test)")
    assert cells(positions)[1:] == [["1–1", "5", "3.00"], ["2–3", "9", "2.50"]]
    assert cells(passkeys) == [
        ["tokens", "depth 0", "depth 1"],
        ["64", "48/48 (48.0–100.0 %)", "24/48 (24.0–50.0 %)"],
        ["1,024", "12/48 (12.0–25.0 %)", "not possible"],
    ]
    assert (
        passkeys.startswith("Passkeys (plays, validation)")
        and ("seed 3; 1 x NVIDIA H200, 2026-11-22") in passkeys
    )
    assert (
        questions.startswith("Facts (invented text, memory off)")
        and "segments of 8 tokens" in questions
    )
    assert cells(questions)[1:] == [
        ["3", "12/48 (12.0–25.0 %)", "2.5000", "2.0 %"],
        ["9", "not possible", "–", "–"],
    ]


SHORT = {
    "/home/maria/data/plays": "data/plays",
    "/tmp/plays/": "plays",
    "~/data/plays": "plays",
    "../../other/data/plays": "plays",
    r"C:\Users\maria\plays": "plays",
    "/a/b/c/d/e/f": "e/f",
    "runs/mha": "runs/mha",
    "0.003": "0.003",
    "/": "",
}


def test_paths_are_shortened():
    assert {path: shorten_path(path) for path in SHORT} == SHORT


def manifest(**train) -> dict:
    options = {
        "source": "/home/maria/data/works.txt",
        "tokenizer": "/home/maria/tok/bpe",
        "context": 50,
    }
    splits = {"train": {"blocks": 70} | train, "test": {"blocks": 9}}
    options |= {"split_by": "block"}
    return {
        "options": options,
        "source": {"documents": 3},
        "tokenizer": {"vocabulary": 89},
        "splits": splits,
    }


def test_no_path_of_the_machine_is_in_a_card():
    result = RESULT | {"options": RESULT["options"] | {"init_from": "/home/maria/runs/start"}}
    found = [
        evaluation("test", 1.5, 30_000),
        evaluation(None, 2.5, 777, data=None, text="/home/maria/sonnets.txt"),
    ]
    found.append(
        recall("passkey", [cell(48, length=64, depth=0.5)]) | {"source": "/home/maria/essays"}
    )
    given = {"evaluations": found, "earlier": [("runs/start", result)]}
    whole = write_card(run_of(result=result, manifest=manifest(), **given), about(), [SAMPLE])
    assert "maria" not in whole and "/home" not in whole and "/mnt" not in whole
    command = re.search("```bash\n(.*?)\n```", whole, re.DOTALL)[1]
    expected = ["python", "recipes/train.py", "--data", "data/plays", "--out=runs/mha", "--use_cpu"]
    assert shlex.split(command.replace("\\\n", "")) == expected and command.count("\\\n    --") == 3
    assert ["Rows, test", "9 of 50 tokens"] in cells(whole) and [
        "Held out",
        "rows of the same documents",
    ] in cells(whole)
    assert "from\nthe weights of `runs/start`" in whole


@given(strategies.text("`a \n~", max_size=12))
def test_no_text_closes_its_fence(inside):
    first, *lines, last = markdown.fence(inside, "text").split("\n")
    assert (
        "\n".join(lines) == inside
        and first == f"{last}text"
        and set(last) == {"`"}
        and len(last) >= 3
    )
    # CommonMark: only a line of at least as many backticks closes the block
    assert not any(re.fullmatch(rf" {{0,3}}`{{{len(last)},}}\s*", line) for line in lines)


def test_a_sample_breaks_neither_card_nor_metadata(tmp_path):
    found = load(write_card(run_of(), about(), [SAMPLE]), tmp_path)
    assert (
        found.data.model_name == "a-model" and f"`````text\n{SAMPLE['text']}\n`````" in found.text
    )
    assert "`do_sample=True`, `top_k=40`, `max_new_tokens=9`, seed 5" in found.text
    outside = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", found.text)
    headings = "How to use it, Model, Training, Data, Evaluation, Samples, Limits, Licence".split(
        ", "
    )
    assert re.findall("(?m)^#+ .*", outside) == [
        "# a-model",
        *(f"## {heading}" for heading in headings),
    ]


def test_what_depends_on_the_model():
    plain, infini = (write_card(run_of(config), about(), [SAMPLE]) for config in (GPT2, INFINI))
    assert "with self-attention, trained from\nrandom weights on 7,654,321 tokens" in plain
    assert (
        "have at most 40 tokens" in plain
        and "trust_remote_code" not in plain
        and "## Citation" not in plain
    )
    assert (
        "trust_remote_code=True" in infini
        and "a memory of constant size" in infini
        and ("## Citation") in infini
    )
    assert "tokens.\n- What lies" not in infini and "have at most" not in infini
    rows = dict(row for row in cells(infini) if len(row) == 2)
    assert (
        rows["`segment_length`"] == "5"
        and rows["`layers`"] == "[0, 2]"
        and rows["`update_rule`"] == "delta"
    )
    assert "`update_rule`" not in plain  # no option of that model
    assert "`layers`" not in write_card(run_of(INFINI | {"layers": None}), about(), [SAMPLE])
    assert (
        rows["Steps"] == "1,212 of 128 rows"
        and rows["Seed"] == "5"
        and ("Gates at the end, sigmoid(gate)") not in rows
    )
    result = RESULT | {"gates": {"0": [0.25, 0.75], "1": [0.5, 0.125]}, "peak_cuda_mib": 321.0}
    rows = dict(
        row
        for row in cells(write_card(run_of(INFINI, result=result), about(), [SAMPLE]))
        if len(row) == 2
    )
    assert (
        rows["Gates at the end, sigmoid(gate)"] == "0.12 to 0.75"
        and rows["Peak memory of the GPU"] == "321 MiB"
    )


def test_the_stages_and_their_data():
    first = RESULT | {
        "tokens": 1_000_000,
        "command": "python recipes/train.py --data data/drills --out runs/drills",
    }
    earlier = [("runs/gone", None), ("runs/drills", first)]
    run = run_of(earlier=earlier, manifest=manifest(rows_by_kind={"passkey": 30, "a": 40}))
    whole = write_card(run, about(), [SAMPLE])
    assert [row[:3] for row in cells(whole) if len(row) == 7][1:] == [
        ["runs/gone", "not known", ""],
        ["runs/drills", "drills", "1,000,000"],
        ["this model", "plays", "7,654,321"],
    ]
    assert "trained in stages" in whole
    assert "trained in stages" not in write_card(run_of(), about(), [SAMPLE])
    assert ["Rows, train", "70 of 50 tokens: 30 passkey, 40 a"] in cells(whole)


def test_notes_licences_and_a_run_whose_data_is_named_in_its_config_file(tmp_path):
    (tmp_path / "notes.md").write_text("\nOnly for *study*.\n")
    options = about(data_license="CC BY-SA 3.0", notes=str(tmp_path / "notes.md"))
    run = run_of(result=RESULT | {"command": "python recipes/train.py --config mine.yaml"})
    whole = write_card(run, options, [SAMPLE])
    assert "## Limits\n\nOnly for *study*.\n\n- It continues" in whole
    assert "Weights: apache-2.0." in whole and "was trained on: CC BY-SA 3.0." in whole
    assert ["Data", "data 0123456789abcdef, fingerprint `0123456789abcdef`"] in cells(whole)
