"""Model cards: a run's JSON as Markdown with the Hub's metadata, text from dicts; recipes/write_card.py reads the files.

Every number in a card is one that a recipe wrote: result.json and config.json (train.py), evaluation*.json
(evaluate_model.py), n-gram baselines (ngram_baseline.py), manifest.json (prepare.py), samples.json (write_card.py).
"""

import math
import re
import shlex
from dataclasses import dataclass, field
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

from .model_options import attention_of, context_limit
from .tables import markdown_table

LANGUAGES = {"en": "English", "pt": "Portuguese"}
SCORES = {
    "scaled_dot": "scaled dot product, qᵀk / √d",
    "dot": "dot product, qᵀk",
    "general": "general, qᵀWk",
    "additive": "additive, vᵀ tanh(W[q; k])",
}
POSITIONS = {  # of causal_mha, filled from its configuration
    "learned": "learned, one for each of {n_positions:,} places",
    "sinusoidal": "sinusoidal, added to the token embeddings",
    "relative_key": "relative: a learned vector for each distance up to {max_distance} is added to the keys",
    "t5": "relative: a learned bias for each of {num_buckets} buckets of distances is added to the scores (T5)",
    "alibi": "ALiBi: scores fall linearly with the distance",
    "rope": "rotary (RoPE), base {rope_theta:g}",
    "none": "none",
}
TRAINING_OPTIONS = {
    "epochs": "Passes asked for",
    "max_tokens": "Tokens asked for",
    "max_steps": "Steps asked for",
    "batch_size": "Rows per process and forward pass",
    "gradient_accumulation": "Forward passes per step",
    "num_processes": "Processes",
    "learning_rate": "Peak learning rate (AdamW)",
    "gate_learning_rate": "Peak learning rate of the gates",
    "schedule": "Schedule",
    "warmup": "Warm-up (a share below 1, steps from 1 on)",
    "weight_decay": "Weight decay",
    "max_grad_norm": "Gradient norm at most",
    "dropout": "Dropout",
    "precision": "Precision",
    "seed": "Seed",
}
EVALUATION_DEFAULTS = {"join": True, "min_characters": 0, "max_tokens": None, "precision": "float32"}


@dataclass
class Run:
    """What a card is written from.

    Attributes:
        name, language, license, base_model: of the metadata; `base_model` is a name on the Hub or None.
        folder: where to load the model from, as shown to the reader; figures: captions and relative links.
        config, result, evaluations, baselines, manifest, samples: contents of the files named above.
        limits: Markdown for the section of limits; None states those that follow from the JSON.
    """

    name: str
    folder: str
    config: dict
    result: dict
    language: str = "en"
    license: str = "apache-2.0"
    base_model: str | None = None
    evaluations: list[dict] = field(default_factory=list)
    baselines: list[dict] = field(default_factory=list)
    manifest: dict | None = None
    samples: dict | None = None
    figures: list[tuple[str, str]] = field(default_factory=list)
    limits: str | None = None


def write_card(run: Run) -> str:
    """The whole card: metadata between two lines of `---`, then the sections."""
    sections = [
        f"# {run.name}",
        introduction(run),
        f"## Model\n\n{markdown_table(['', ''], describe_model(run.config, run.result), left=2)}",
        training_section(run),
        results_section(run),
        samples_section(run.samples) if run.samples else "",
        loading_section(run),
        f"## Limits\n\n{run.limits.strip() if run.limits else general_limits(run)}",
    ]
    return f"---\n{metadata(run).to_yaml()}\n---\n\n" + "\n\n".join(filter(None, sections)) + "\n"


def metadata(run: Run):
    """The Hub's `ModelCardData`: a model-index with the perplexity and cross-entropy of every measurement of the model."""
    from huggingface_hub import EvalResult, ModelCardData

    results = []
    for row in measurements(run):
        common = {"task_type": "text-generation", "dataset_type": row["data"], "dataset_name": row["data"]}
        common |= {"dataset_split": row["split"], "dataset_config": row["how"] or None}
        for metric, name in (("perplexity", "Perplexity"), ("cross_entropy", "Loss (cross-entropy, nats per token)")):
            results.append(EvalResult(**common, metric_type=metric, metric_name=name, metric_value=row[metric]))
    kind = attention_of(SimpleNamespace(**run.config))
    return ModelCardData(
        model_name=run.name,
        language=run.language,
        license=run.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["hf_infini", run.config["model_type"], f"{kind}-attention" if kind != "none" else "no-attention"],
        base_model=run.base_model,
        eval_results=results,
    )


# --- sections ---------------------------------------------------------------------------------------------------------


def introduction(run: Run) -> str:
    start, result = run.result["options"].get("init_from"), run.result
    origin = f"from the weights of `{shorten_path(start)}`" if start else "from random weights"
    text = f"{result['tokens']:,} tokens of {LANGUAGES[run.language]} text ({data_name(run)})"
    return f"A causal language model of {result['parameters']:,} parameters, trained {origin} on {text} with hf_infini."


def describe_model(config: dict, result: dict) -> list[tuple[str, str]]:
    """Label and value of what config.json says about the architecture."""
    c, kind = config, attention_of(SimpleNamespace(**config))
    attention = dict.fromkeys(("self", "global"), "causal self-attention over the whole context") | {
        "local": f"causal self-attention over the last {c.get('sliding_window')} tokens, the token itself included",
        "none": "none: a block is its feed-forward alone, and a token sees only itself",
    }
    rows = [("Model type", f"`{c['model_type']}`"), ("Attention", attention.get(kind) or _infini_attention(c))]
    if c["model_type"] == "causal_mha":
        rows += [] if kind == "none" else [("Score", SCORES[c["score"]])]
        rows.append(("Position encoding", POSITIONS[c["position_encoding"]].format(**c)))
    else:
        place = "the place in the segment" if c.get("positions") == "segment" else "the place in the text"
        rows += [("Score", SCORES["scaled_dot"]), ("Position encoding", f"learned, {place}")]
    limit = " in training, any number in use" if context_limit(SimpleNamespace(**c)) is None else ""
    return rows + [
        ("Layers × width × heads", f"{c['n_layer']} × {c['n_embd']} × {c['n_head']}"),
        ("Feed-forward", f"{c.get('n_inner') or 4 * c['n_embd']:,} wide, {c['activation_function']}"),
        ("Output head", "the token embedding" if c.get("tie_word_embeddings", True) else "a matrix of its own"),
        ("Parameters", f"{result['parameters']:,}"),
        ("Vocabulary", f"{c['vocab_size']:,} tokens"),
        ("Context", f"{c['n_positions']:,} tokens{limit}"),
    ]


def _infini_attention(config: dict) -> str:
    length = config.get("segment_length") or config["n_positions"] // config["n_segments"]
    words = [f"Infini-attention: segments of {length:,} tokens", f"{config['update_rule']} update"]
    if config["local_segments"]:
        words.append(f"the local window holds {config['local_segments']} earlier segments")
    if config.get("memory_init", "zeros") != "zeros":
        words.append(f"{config['memory_init']} start of the memory")
    if config.get("layers") is not None:
        words.append(f"in the layers {', '.join(map(str, config['layers']))} (from 0)")
    return ", ".join(words)


def training_section(run: Run) -> str:
    result, manifest = run.result, run.manifest
    rows = [("Data", f"{data_name(run)}, fingerprint `{result['data_fingerprint']}`")]
    if manifest is not None:
        options, splits = manifest["options"], manifest["splits"]
        rows.append(("Source", f"{shorten_path(options['source'])}, {manifest['source']['documents']:,} document(s)"))
        rows.append(("Tokenizer", f"{shorten_path(options['tokenizer'])}, {manifest['tokenizer']['vocabulary']:,} entries"))
        rows += [(f"Rows, {name}", f"{s['blocks']:,} of {options['context']:,} tokens") for name, s in splits.items()]
        rows.append(("Passes over the training rows", f"{result['tokens'] / splits['train']['tokens']:.2f}"))
    rows += [("Tokens", f"{result['tokens']:,}"), ("Steps", f"{result['steps']:,}")]
    given = {name: value for name, value in result["options"].items() if value is not None}
    if not result.get("gates"):
        given.pop("gate_learning_rate", None)
    rows += [(label, _plain(given[name])) for name, label in TRAINING_OPTIONS.items() if name in given]
    gates = [value for layer in (result.get("gates") or {}).values() for value in layer]
    if gates:
        rows.append(("Gates at the end (the memory's share)", f"{min(gates):.2f} to {max(gates):.2f}"))
    rows += [("Time", f"{result['seconds']:,.0f} s"), ("Tokens per second", f"{result['tokens_per_second']:,.0f}")]
    peaks = {"peak_rss_mib": "Peak memory", "peak_cuda_mib": "Peak memory of the GPU"}
    rows += [(label, f"{result[name]:,.0f} MiB") for name, label in peaks.items() if name in result]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    rows += [("Hardware", result["hardware"]), ("Versions", versions), ("Date", result["date"])]
    figures = "".join(f"\n\n![{caption}]({link})" for caption, link in run.figures)
    command = fence(shorten_command(result["command"]), "bash")
    return f"## Training\n\n{command}\n\n{markdown_table(['', ''], rows, left=2)}{figures}"


def results_section(run: Run) -> str:
    rows = [("this model", row) for row in measurements(run)]
    rows += [(f"{row['name']}s", row) for row in ngram_rows(run)]
    places = [(row["data"], row["split"]) for _, row in rows]
    rows = sorted(rows, key=lambda pair: places.index((pair[1]["data"], pair[1]["split"])))  # rivals side by side
    cells = []
    for who, row in rows:
        text = ", ".join(filter(None, (row["data"], row["split"], row["how"])))
        cells.append((who, text, f"{row['tokens']:,}", f"{row['cross_entropy']:.4f}", f"{row['perplexity']:.2f}"))
    header = ["", "text", "tokens", "cross-entropy", "perplexity"]
    text = f"## Results\n\n{markdown_table(header, cells, left=2)}\n\n"
    text += "Cross-entropy in nats per token over all predicted tokens, perplexity its exponential."
    entropies = {row["order"]: f"{row['name']} {row['entropy']:.4f}" for row in ngram_rows(run)}
    if entropies:
        listed = ", ".join(entropies[order] for order in sorted(entropies))
        counted = f"{run.baselines[0]['training_tokens']:,} training tokens"
        text += f" The n-grams predict from the last tokens alone, smoothed, and counted on all {counted}. Entropy of these "
        text += f"counts, below which no prediction from as many tokens gets on the training rows: {listed}."
    return text


def samples_section(samples: dict) -> str:
    """Each prompt, and what every method made of it."""
    parts = ["## Samples\n\nAs generated, nothing chosen or left out: one continuation for each method."]
    shown = None
    for sample in samples["samples"]:
        if sample["prompt"] != shown:
            shown = sample["prompt"]
            parts.append(f"Prompt:\n\n{fence(shown, 'text')}")
        settings = ", ".join(f"`{name}={value}`" for name, value in sample["arguments"].items())
        seed = f", seed {sample['seed']}" if sample["arguments"]["do_sample"] else ""
        head = f"**{sample['method']}** ({settings}{seed}; {sample['new_tokens']} tokens)"
        parts.append(f"{head}\n\n{fence(sample['text'], 'text')}")
    return "\n\n".join(parts)


def loading_section(run: Run) -> str:
    lines = [] if run.config["model_type"] == "gpt2" else ["import hf_infini  # registers the model type"]
    lines += ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines.append(f"model = AutoModelForCausalLM.from_pretrained({run.folder!r})")
    lines.append(f"tokenizer = AutoTokenizer.from_pretrained({run.folder!r})")
    if run.samples:
        first = run.samples["samples"][0]
        arguments = "".join(f", {name}={value!r}" for name, value in first["arguments"].items())
        lines.append(f'inputs = tokenizer({first["prompt"]!r}, add_special_tokens=False, return_tensors="pt")')
        lines.append(f"output = model.generate(**inputs{arguments})  # {first['method']}, as above")
        lines.append("print(tokenizer.decode(output[0], skip_special_tokens=True))")
    return "## Loading\n\n" + fence("\n".join(lines), "python")


def general_limits(run: Run) -> str:
    """The limits that follow from the JSON."""
    result, config = run.result, run.config
    points = [
        f"{result['parameters']:,} parameters and {result['tokens']:,} training tokens of one corpus: it continues "
        f"{LANGUAGES[run.language]} text in the manner of that corpus, and no more.",
        "Made to study architectures, not for use: nothing was done against false or offensive continuations, and nothing "
        "but the figures above was measured.",
    ]
    if context_limit(SimpleNamespace(**config)) is None:
        points.append("Inputs may have any length; how good it is beyond its training rows, only the table above can say.")
    else:
        points.append(f"Prompt and continuation together have at most {config['n_positions']:,} tokens.")
    if run.manifest is not None and run.manifest["options"]["split_by"] == "block":
        points.append("Held-out rows come from the documents of the training rows: they say nothing about unseen works.")
    return "\n".join(f"- {point}" for point in points)


# --- numbers ----------------------------------------------------------------------------------------------------------


def measurements(run: Run) -> list[dict[str, Any]]:
    """What was measured of the model: `data`, `split`, `how` (what differs from train.py's evaluation), and the numbers.

    The validation of result.json comes first; an evaluation that only repeats it is left out.
    """
    first = {"data": data_name(run), "split": "validation", "how": "", "tokens": run.result["validation_tokens"]}
    rows = [first | {name: run.result[name] for name in ("cross_entropy", "perplexity")}]
    for evaluation in run.evaluations:
        options = evaluation["options"]
        length = options.get("length") or (evaluation["length"] if options.get("data") is None else None)
        how = [f"rows of {length:,} tokens"] if length else []
        changed = [name for name, usual in EVALUATION_DEFAULTS.items() if options.get(name, usual) != usual]
        how += [f"{name} {_plain(options[name])}" for name in changed]
        split = None if options.get("data") is None else evaluation.get("split") or "validation"
        same_data = evaluation.get("data_fingerprint") == run.result["data_fingerprint"]
        data = data_name(run) if same_data else PurePath(evaluation["source"]).name
        row = {"data": data, "split": split, "how": ", ".join(how)}
        row |= {name: evaluation[name] for name in ("tokens", "cross_entropy", "perplexity")}
        # The same float32 sums in batches of another size agree to about six digits
        repeated = math.isclose(row["cross_entropy"], rows[0]["cross_entropy"], rel_tol=1e-5)
        if not (repeated and all(row[name] == rows[0][name] for name in ("data", "split", "how", "tokens"))):
            rows.append(row)
    return rows


def ngram_rows(run: Run) -> list[dict[str, Any]]:
    """The baselines in the form of [`measurements`], with `order` and `entropy`; they are of the run's data."""
    common = {"data": data_name(run), "how": ""}
    return [row | common | {"split": baseline["split"]} for baseline in run.baselines for row in baseline["orders"]]


def data_name(run: Run) -> str:
    """The name of the folder that --data named in the run's command, or the data's fingerprint where it named none."""
    words = [piece for word in shlex.split(run.result["command"]) for piece in word.split("=", 1)]
    places = [words[number + 1] for number, word in enumerate(words[:-1]) if word == "--data"]
    return re.split(r"[\\/]", places[-1].rstrip("\\/"))[-1] if places else f"data {run.result['data_fingerprint']}"


# --- text -------------------------------------------------------------------------------------------------------------


def fence(text: str, language: str = "") -> str:
    """A fenced block that no run of backticks in the text can close."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}{language}\n{text}\n{ticks}"


def shorten_path(text: str) -> str:
    """The last one or two components of an absolute path, or of one that begins with `~` or `..`; other text as it is.

    The first two name a machine and its user rather than a run: they are only shown where there is no other.
    """
    if not re.match(r"([A-Za-z]:)?[\\/]|~|\.\.[\\/]", text):
        return text
    parts = [part for part in re.split(r"^[A-Za-z]:|[\\/]", text) if part not in ("", ".", "..")]
    return "/".join(parts[2:][-2:] or parts[-1:])


def shorten_command(command: str) -> str:
    """A shell command with its paths shortened, an option a line."""
    text = ""
    for word in shlex.split(command):
        name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        text += " \\\n    " if name else " "
        text += shlex.quote(name + equals + shorten_path(value))
    return text.strip()


def _plain(value) -> str:
    """A value as a reader writes it: true, 0.001, 1,200."""
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)
