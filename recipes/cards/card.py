"""Model cards: a run's JSON as Markdown with the Hub's metadata, text from dicts; [`files`] reads the files.

Every number in a card is one that a recipe wrote: result.json and config.json (train.py), evaluation*.json, passkey*.json
and facts*.json (evaluate_model.py), n-gram baselines (ngram_baseline.py), manifest.json (prepare.py, prepare_recall.py),
report.json (study.py), samples.json (write_card.py). The sections stand in modules by their subject: model, data, training,
results, study; this one has the metadata and the words around them.
"""

from corpora.carolina import CAROLINA_REPOSITORY
from support.markdown import fence

from .data import citation_section, data_section, is_recall, licenses_section, uses_carolina
from .model import head_dim, kind_of, limit_of, model_section, segment_length
from .results import measurements, recall_shares, results_section
from .run import Run, corpus_of, trained_on
from .text import bullets, shorten_path
from .training import compute_section, training_section

LANGUAGES = {"en": "English", "pt": "Portuguese"}
TOKENS_PER_PARAMETER = 20  # of compute-optimal training: Hoffmann et al. 2022, arXiv 2203.15556


def write_card(run: Run) -> str:
    """The whole card: metadata between two lines of `---`, then the sections."""
    sections = [
        f"# {run.name}",
        introduction(run),
        use_section(run),
        model_section(run),
        data_section(run),
        training_section(run),
        results_section(run),
        samples_section(run) if run.samples else "",
        loading_section(run),
        f"## Limits\n\n{run.limits.strip() if run.limits else general_limits(run)}",
        compute_section(run),
        licenses_section(run),
        citation_section(run),
    ]
    return f"---\n{metadata(run).to_yaml()}\n---\n\n" + "\n\n".join(filter(None, sections)) + "\n"


def metadata(run: Run):
    """The Hub's `ModelCardData`: a model-index with the perplexity and cross-entropy of every measurement of the model, and
    with the share of right answers in every cell of its recall tasks."""
    from huggingface_hub import EvalResult, ModelCardData

    results, manifest = [], run.manifest
    plain_carolina = manifest is not None and corpus_of(manifest) == "carolina" and not is_recall(manifest)
    for row in measurements(run):
        if row["memory"] == "off":  # which is another model
            continue
        common = {"task_type": "text-generation", "dataset_type": row["data"], "dataset_name": row["data"]}
        if row["data"] == run.data and plain_carolina:
            common["dataset_type"] = CAROLINA_REPOSITORY
        common |= {"dataset_split": row["split"], "dataset_config": row["how"] or None}
        for metric, name in (("perplexity", "Perplexity"), ("cross_entropy", "Loss (cross-entropy, nats per token)")):
            results.append(EvalResult(**common, metric_type=metric, metric_name=name, metric_value=row[metric]))
    for row in recall_shares(run):
        common = {"task_type": "text-generation", "dataset_type": row["data"], "dataset_name": row["data"]}
        common |= {"dataset_split": row["split"], "dataset_config": row["how"], "metric_type": "accuracy"}
        results.append(EvalResult(**common, metric_name=row["name"], metric_value=row["accuracy"]))
    kind = kind_of(run.config)
    return ModelCardData(
        model_name=run.name,
        language=run.language,
        license=run.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["hf_infini", run.config["model_type"], f"{kind}-attention" if kind != "none" else "no-attention"],
        datasets=[CAROLINA_REPOSITORY] if uses_carolina(run) else None,
        base_model=run.base_model,
        eval_results=results,
    )


def introduction(run: Run) -> str:
    start, result = run.result["options"].get("init_from"), run.result
    origin = f"from the weights of `{shorten_path(start)}`" if start else "from random weights"
    text = f"{result['tokens']:,} tokens of {LANGUAGES[run.language]} text ({trained_on(result, run.manifest)})"
    return f"A causal language model of {result['parameters']:,} parameters, trained {origin} on {text} with hf_infini."


def use_section(run: Run) -> str:
    kind, language = kind_of(run.config), LANGUAGES[run.language]
    goals = ["To study how attention works: to compare this model with others trained on the same data, and to look inside "
             "its blocks with `recipes/inspect_heads.py`." if kind != "none" else
             "To be compared with models that have attention and were trained on the same data."]  # fmt: skip
    if kind == "infini":
        goals.append("To see what a memory of constant size keeps of a text that is longer than its window.")
    if any(is_recall(stage.manifest) for stage in run.stages):
        goals.append("To ask it for numbers and facts in the forms that it was trained on; it has learned no others.")
    out = [
        "Whatever relies on what it says: it invents, and what it writes about real people and places is made up.",
        "Products, advice, decisions about people, and text that is passed off as a person's.",
        f"Other languages than {language}, and other kinds of text than it was trained on.",
    ]
    return f"## Intended use\n\n{bullets(goals)}\n\nOut of scope:\n\n{bullets(out)}"


def samples_section(run: Run) -> str:
    """Each prompt, where it is from, and what every method made of it."""
    samples, shown = run.samples["samples"], None
    each = "one continuation for each method" if len(samples) > 1 else "one continuation"
    parts = [f"## Samples\n\nAs generated, nothing chosen or left out: {each}."]
    for sample in samples:
        if sample["prompt"] != shown:
            shown = sample["prompt"]
            parts.append(f"Prompt{_origin(run.prompts.get(shown))}:\n\n{fence(shown, 'text')}")
            if shown in run.prompts:
                parts.append(f"How it really goes on:\n\n{fence(run.prompts[shown]['continuation'].strip(), 'text')}")
        if sample["text"] is None:
            parts.append(f"No sample: {sample['reason']}.")
            continue
        settings = ", ".join(f"`{name}={value}`" for name, value in sample["arguments"].items())
        seed = f", seed {sample['seed']}" if sample["arguments"]["do_sample"] else ""
        head = f"**{sample['method']}** ({settings}{seed}; {sample['new_tokens']} tokens)"
        parts.append(f"{head}\n\n{fence(sample['text'], 'text')}")
    return "\n\n".join(parts)


def _origin(prompt: dict | None) -> str:
    """`, the beginning of “Title” (URL), a validation document`; empty for a prompt of the user's."""
    if prompt is None:
        return ""
    title = f"“{prompt['title']}”" if prompt["title"] else "a text"
    source = f" ({shorten_path(prompt['source'])})" if prompt["source"] else ""
    return f", the beginning of {title}{source}, a validation document"


def loading_section(run: Run) -> str:
    lines = [] if run.config["model_type"] == "gpt2" else ["import hf_infini  # registers the model type"]
    first = next((sample for sample in (run.samples or {"samples": []})["samples"] if sample["text"] is not None), None)
    seeded = first is not None and first["arguments"]["do_sample"]
    lines += [f"from transformers import AutoModelForCausalLM, AutoTokenizer{', set_seed' if seeded else ''}", ""]
    lines.append(f"model = AutoModelForCausalLM.from_pretrained({run.folder!r})")
    lines.append(f"tokenizer = AutoTokenizer.from_pretrained({run.folder!r})")
    if first is not None:
        arguments = "".join(f", {name}={value!r}" for name, value in first["arguments"].items())
        lines.append(f'inputs = tokenizer({first["prompt"]!r}, add_special_tokens=False, return_tensors="pt")')
        lines += [f"set_seed({first['seed']})"] if seeded else []
        lines.append(f"output = model.generate(**inputs{arguments})  # {first['method']}, as above")
        lines.append("print(tokenizer.decode(output[0], skip_special_tokens=True))")
    text = "## Loading\n\n" + fence("\n".join(lines), "python")
    if run.config.get("auto_map"):
        text += "\n\nThe model's code lies beside its weights: where hf_infini is not installed, leave its import out, and "
        text += "load the model with `trust_remote_code=True`, which runs that code."
    return text


def general_limits(run: Run) -> str:
    """The limits that follow from the JSON."""
    config, tokens = run.config, sum(stage.result["tokens"] for stage in run.stages if stage.result is not None)
    points = [
        f"{run.result['parameters']:,} parameters and {tokens:,} training tokens of one corpus: it continues "
        f"{LANGUAGES[run.language]} text in the manner of that corpus, and no more.",
        "Made to study architectures, not for use: nothing was done against false or offensive continuations, and nothing "
        "but the figures above was measured.",
        *_undertrained(run),
    ]
    limit = limit_of(config)
    if limit is None:
        points.append("Inputs may have any length; how good it is beyond its training rows, only the tables above can say.")
    else:
        points.append(f"Prompt and continuation together have at most {config['n_positions']:,} tokens.")
    points += _memory_limits(config) if kind_of(config) == "infini" else []
    if any(is_recall(stage.manifest) for stage in run.stages):
        points.append("It was trained to recall what rows made for that ask for, in their words. That it would recall other "
                      "things, asked for in other words, does not follow.")  # fmt: skip
    if run.manifest is not None and run.manifest["options"]["split_by"] == "block":
        points.append("Held-out rows come from the documents of the training rows: they say nothing about unseen works.")
    return bullets([*points, f"No figures here on {', '.join(_not_measured(run))}."])


def _undertrained(run: Run) -> list[str]:
    known = [stage.result for stage in run.stages]
    if None in known:
        return []
    ratio = sum(result["tokens"] for result in known) / run.result["parameters"]
    if ratio >= TOKENS_PER_PARAMETER:
        return []
    return [
        f"Undertrained: {ratio:.1f} training tokens for each parameter, where about {TOKENS_PER_PARAMETER} make the best of "
        "a given amount of computing (Hoffmann et al. 2022, of far larger models and of parts of words)."
    ]


def _memory_limits(config: dict) -> list[str]:
    size, length = head_dim(config), segment_length(config)
    points = [f"A memory of {size} × {size} numbers a head cannot hold a long text word for word; what lies more than a "
              "window back reaches a token through it alone."]  # fmt: skip
    if config.get("position_encoding") == "segment":
        points.append(f"The same positions, 1 to {length:,}, come back in every segment: how far back something stands, the "
                      "model is not told.")  # fmt: skip
    elif limit_of(config) is not None:
        points.append("The memory's size does not grow with the text, but the positions end.")
    if config.get("layers") is not None:
        points.append("The layers without a memory keep full attention, whose cache grows with the text.")
    return points


def _not_measured(run: Run) -> list[str]:
    """What a reader may miss among the figures."""
    seeds = 1 if run.variant is None else len(run.variant["by_seed"])
    missing = ["how much the losses vary with the seed"] if seeds == 1 else []
    tasks = {"passkey": "recall of a number hidden in a text", "facts": "recall of facts after many tokens"}
    if kind_of(run.config) == "infini" or run.study is not None or any(map(run.of_task, tasks)):
        missing += [words for task, words in tasks.items() if not run.of_task(task)]
    lengths = [found["options"].get("length") or 0 for found in run.of_task("perplexity")]
    long = run.variant is not None and (run.variant["positions"] or {}).get("long")
    if limit_of(run.config) is None and not long and max(lengths, default=0) <= run.context:
        missing.append("texts beyond the trained context")
    return [*missing, "other tasks", "bias and false statements in what it writes"]
