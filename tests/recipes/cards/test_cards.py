"""Cards as text: metadata that the Hub reads back, numbers of the JSON alone, no machine's paths, unbreakable fences."""

import math
import re
import shlex

import pytest

import cards
from card_runs import GPT2, INFINI, RESULT, SAMPLES, baseline, cells, evaluation, load, options_of, run_of
from cards import model as cards_model
from cards import results as cards_results
from cards import text as cards_text
from hf_infini.configuration_causal_mha import INFINI_POSITIONS, INFINI_SCORES, CausalMHAConfig
from hf_infini.options import choices
from hf_infini.options_causal_mha import ScratchOptions
from support import markdown


def test_the_hub_reads_the_metadata_back(tmp_path):
    evaluations = [
        evaluation("validation", 1.2345679, 31_111),  # train.py's number again
        evaluation("test", 1.5, 30_000),
        evaluation("validation", 1.4, 29_000, length=4096),
        evaluation(None, 2.5, 777, data=None, text="/home/maria/sonnets.txt", precision="bf16"),
    ]
    run = run_of(INFINI, evaluations=evaluations, language="pt", license="mit", base_model="gpt2")
    card = load(cards.write_card(run), tmp_path)
    data = card.data
    assert (data.model_name, data.language, data.license, data.base_model) == ("a-model", "pt", "mit", "gpt2")
    assert data.pipeline_tag == "text-generation" and data.library_name == "transformers"
    assert data.tags == ["hf_infini", "infini_gpt2", "infini-attention"]
    found = [(e.dataset_name, e.dataset_split, e.dataset_config, e.metric_type, e.metric_value) for e in data.eval_results]
    assert found == [
        ("plays", "validation", None, "perplexity", 3.4371),
        ("plays", "validation", None, "cross_entropy", 1.2345678),
        ("plays", "test", None, "perplexity", math.exp(1.5)),
        ("plays", "test", None, "cross_entropy", 1.5),
        ("plays", "validation", "rows of 4,096 tokens", "perplexity", math.exp(1.4)),
        ("plays", "validation", "rows of 4,096 tokens", "cross_entropy", 1.4),
        ("sonnets.txt", None, "rows of 40 tokens, precision bf16", "perplexity", math.exp(2.5)),
        ("sonnets.txt", None, "rows of 40 tokens, precision bf16", "cross_entropy", 2.5),
    ]
    assert {entry.task_type for entry in data.eval_results} == {"text-generation"}


def test_results_stand_beside_the_n_grams_of_the_same_split():
    run = run_of(evaluations=[evaluation("test", 1.5, 30_000)], baselines=[baseline("test"), baseline("validation")])
    rows = cells(cards_results.results_section(run))[2:]
    assert [row[:2] for row in rows[:2]] == [["this model", "plays, validation"], ["unigrams", "plays, validation"]]
    assert [row[0] for row in rows] == 2 * ["this model", "unigrams", "bigrams", "trigrams", "4-grams"]
    assert rows[0][2:] == ["31,111", "1.2346", "3.44"]
    assert rows[5] == ["this model", "plays, test", "30,000", "1.5000", "4.48"]
    assert rows[7][2:] == ["31,111", "2.0000", "10.00"]
    assert "counted on all 54,321 training tokens" in cards_results.results_section(run)
    assert "unigram 2.0000, bigram 1.5000, trigram 1.0000, 4-gram 0.5000" in cards_results.results_section(run)


def test_an_evaluation_of_other_data_is_not_taken_for_the_validation():
    other = evaluation("validation", 1.2345678, 31_111) | {"source": "/data/essays"}
    moved = other | {"data_fingerprint": RESULT["data_fingerprint"]}
    assert [row["data"] for row in cards_results.measurements(run_of(evaluations=[other]))] == ["plays", "essays"]
    assert len(cards_results.measurements(run_of(evaluations=[moved]))) == 1  # the fingerprint says that it is the same


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("/home/maria/data/plays", "data/plays"),
        ("/home/maria/plays", "plays"),
        ("/tmp/plays/", "plays"),
        ("~/data/plays", "plays"),
        ("../../other/data/plays", "plays"),
        (r"C:\Users\maria\plays", "plays"),
        ("/a/b/c/d/e/f", "e/f"),
        ("runs/mha", "runs/mha"),
        ("carolina-c4ai/corpus-carolina", "carolina-c4ai/corpus-carolina"),
        ("0.003", "0.003"),
        ("/", ""),
    ],
)
def test_paths_are_shortened(text, short):
    assert cards_text.shorten_path(text) == short


def test_no_path_of_the_machine_is_in_a_card():
    result = RESULT | {"options": RESULT["options"] | {"init_from": "/home/maria/runs/start", "data": "/home/maria/x"}}
    options = {"source": "/home/maria/data/works.txt", "tokenizer": "/home/maria/tok/bpe", "context": 50}
    manifest = {"options": options | {"split_by": "block"}, "source": {"documents": 3}, "tokenizer": {"vocabulary": 89}}
    earlier = [cards.Stage("runs/start")]
    manifest["splits"] = {"train": {"blocks": 70, "tokens": 3500}, "test": {"blocks": 9, "tokens": 450}}
    evaluations = [evaluation("test", 1.5, 30_000), evaluation(None, 2.5, 777, data=None, text="/home/maria/sonnets.txt")]
    given = {"evaluations": evaluations, "baselines": [baseline("test")], "samples": SAMPLES, "earlier": earlier}
    run = run_of(result=result, manifest=manifest, **given)
    text = cards.write_card(run)
    assert "maria" not in text and "/home" not in text and "/mnt" not in text
    command = re.search("```bash\n(.*?)\n```", text, re.DOTALL)[1]
    expected = ["python", "recipes/train.py", "--data", "data/plays", "--out=runs/mha", "--use_cpu"]
    assert shlex.split(command.replace("\\\n", "")) == expected and command.count("\\\n    --") == 3
    text = re.sub(" +", " ", text)  # tables are padded
    assert "| Rows, test | 9 of 50 tokens |" in text and "| Passes over the training rows | 2186.95 |" in text
    assert "from the weights of `runs/start`" in text and "unseen works" in text


@pytest.mark.parametrize("text", ["plain", "```", "a `` b", "````\n~~~\n```", "ends with `", "`" * 9])
def test_no_text_closes_its_fence(text):
    block = markdown.fence(text, "text")
    first, *inside, last = block.split("\n")
    assert "\n".join(inside) == text and first == f"{last}text" and set(last) == {"`"} and len(last) >= 3
    # CommonMark: only a line of at least as many backticks closes the block
    assert not any(re.fullmatch(rf" {{0,3}}`{{{len(last)},}}\s*", line) for line in inside)


def test_a_sample_breaks_neither_card_nor_metadata(tmp_path):
    card = load(cards.write_card(run_of(samples=SAMPLES)), tmp_path)
    assert card.data.model_name == "a-model"
    assert f"`````text\n{SAMPLES['samples'][0]['text']}\n`````" in card.text
    assert "**Top-k** (`do_sample=True`, `top_k=40`, `max_new_tokens=9`, seed 5; 8 tokens)" in card.text
    outside = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", card.text)
    assert re.findall("(?m)^#+ .*", outside) == [
        *("# a-model", "## Intended use", "## Model", "## Data", "## Training", "## Results", "## Samples", "## Loading"),
        *("## Limits", "## Compute", "## Licences", "## Citation"),
    ]


def test_the_architecture_of_every_family():
    described = dict(cards_model.describe_model(INFINI, RESULT, 55))
    assert described["Attention"] == (
        "Infini-attention: segments of 8 tokens, delta update, the local window holds 2 earlier segments, learned start of "
        "the memory, in the layers 0, 2 (from 0)"
    )
    assert described["Position encoding"] == "learned, the place in the segment"
    assert described["Layers × width × heads"] == "3 × 96 × 6" and described["Feed-forward"] == "384 wide, gelu_new"
    assert described["Context"] == "55 tokens in training, any number in use" and described["Parameters"] == "98,765"
    assert dict(cards_model.describe_model(GPT2, RESULT, 40))["Context"] == "40 tokens"


@pytest.mark.parametrize("kind", choices(ScratchOptions)["attention"])
def test_every_choice_of_causal_mha_is_described(kind):
    seen = set()
    for score in {"infini": INFINI_SCORES, "none": ("scaled_dot",)}.get(kind, choices(ScratchOptions)["score"]):
        allowed = {"infini": INFINI_POSITIONS, "none": ("learned", "sinusoidal", "none")}
        for position in allowed.get(kind, choices(ScratchOptions)["position_encoding"]):
            lengths = {"local": {"sliding_window": 13}, "infini": {"segment_length": 17}}.get(kind, {})
            choice = {"attention": kind, "score": score, "position_encoding": position, **lengths}
            config = CausalMHAConfig(n_positions=50, n_embd=24, n_head=3, **choice).to_dict()
            described = dict(cards_model.describe_model(config, RESULT, 50))
            assert ("13 tokens" in described["Attention"]) == (kind == "local")
            assert ("segments of 17 tokens" in described["Attention"]) == (kind == "infini")
            assert described["Output head"] == "a matrix of its own"
            assert described["Context"].endswith("in use") == (position != "learned")
            seen.add((described.get("Score"), described["Position encoding"]))
    # Each choice has words of its own; without attention there is no score to speak of
    scores = 1 if kind == "none" else len({score for score, _ in seen})
    assert len(seen) == scores * len({place for _, place in seen})
    assert len({place for _, place in seen}) == len(allowed.get(kind, choices(ScratchOptions)["position_encoding"]))


def test_options_that_did_nothing_are_not_shown():
    plain = options_of(run_of())
    assert plain["Peak learning rate (AdamW)"] == "0.003" and plain["Seed"] == "5" and plain["Tokens"] == "7,654,321"
    assert "Peak learning rate of the gates" not in plain and "Passes asked for" not in plain
    result = RESULT | {"gates": {"0": [0.25, 0.75], "1": [0.5, 0.125]}, "peak_cuda_mib": 321.0}
    gated = options_of(run_of(INFINI, result=result))
    assert gated["Peak learning rate of the gates"] == "0.01" and gated["Peak memory of the GPU"] == "321 MiB"
    assert gated["Gates at the end, sigmoid(gate)"] == "0.12 to 0.75"


def test_notes_take_the_place_of_the_general_limits():
    assert "## Limits\n\n- 98,765 parameters and 7,654,321 training tokens" in cards.write_card(run_of())
    assert "## Limits\n\nOnly for *study*.\n\n## Compute" in cards.write_card(run_of(limits="\nOnly for *study*.\n"))


def test_a_run_whose_data_is_named_in_its_config_file():
    run = run_of(result=RESULT | {"command": "python recipes/train.py --config mine.yaml"})
    assert run.data == "data 0123456789abcdef"
