"""A model card: template.md filled with the numbers of a run, and the metadata that the Hub reads.

Every number is one that a recipe wrote into a JSON file, see [`run`].
"""

from pathlib import Path
from types import SimpleNamespace

from huggingface_hub import ModelCard, ModelCardData

from hf_infini.configurations import attention_of, context_limit
from support.markdown import fence, markdown_table

from .results import eval_results, evaluation_section
from .run import Run, data_name
from .text import last_part, shorten_command, shorten_path

TEMPLATE = Path(__file__).with_name("template.md")
ATTENTION = {"self": "self-attention", "global": "self-attention", "local": "sliding-window attention"}
ATTENTION |= {"infini": "Infini-attention", "none": "no attention"}


def write_card(run: Run, about, samples: list[dict], loss_curve: str | None = None) -> str:
    """The card as Markdown with the Hub's metadata in front.

    Args:
        about: options of recipes/push.py: what no file of a run says.
        samples: of [`folder.generate_samples`].
        loss_curve: link to the figure, where there is one.
    """
    config, result = run.config, run.result
    kind = attention_of(SimpleNamespace(**config))
    data = ModelCardData(
        model_name=about.name,
        language=about.language,
        license=about.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["hf_infini", config["model_type"], ATTENTION[kind].lower().replace(" ", "-")],
        datasets=about.dataset and [about.dataset],
        base_model=about.base_model,
        eval_results=eval_results(run),
    )
    start, limit = result["options"].get("init_from"), context_limit(SimpleNamespace(**config))
    origin = f"from the weights of `{shorten_path(start)}`" if start else "from random weights"
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=about.name,
        parameters=f"{result['parameters']:,}",
        attention=ATTENTION[kind],
        origin=f"{origin} on {result['tokens']:,} tokens",
        example=example(run, about.repo_id or shorten_path(about.out), samples[0]),
        has_code="auto_map" in config,
        has_memory=kind == "infini",
        context_limit=limit and f"{limit:,}",
        model=markdown_table(["", ""], model_rows(run), left=2),
        command=fence(shorten_command(result["command"]), "bash"),
        training=markdown_table(["", ""], training_rows(run), left=2),
        stages=stages(run) if run.earlier else None,
        loss_curve=loss_curve,
        data=markdown_table(["", ""], data_rows(run), left=2),
        evaluation=evaluation_section(run),
        samples=[sample_text(sample) for sample in samples],
        data_license=about.data_license,
        notes=about.notes and Path(about.notes).read_text(encoding="utf-8").strip(),
    )
    return f"{str(card).rstrip()}\n"


def example(run: Run, name: str, sample: dict) -> str:
    """Code that loads the model by the name of its folder or repository and generates the sample."""
    code = ", trust_remote_code=True" if "auto_map" in run.config else ""
    arguments = "".join(f", {name}={value!r}" for name, value in sample["arguments"].items())
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"name = {name!r}",
        f'model = AutoModelForCausalLM.from_pretrained(name{code}, dtype="float32")',
        f"tokenizer = AutoTokenizer.from_pretrained(name{code})",
        f'inputs = tokenizer({sample["prompt"]!r}, add_special_tokens=False, return_tensors="pt")',
        f"output = model.generate(**inputs{arguments})",
        "print(tokenizer.decode(output[0], skip_special_tokens=True))",
    ]
    return fence("\n".join(lines), "python")


def model_rows(run: Run) -> list[tuple[str, str]]:
    """The architecture: sizes, and every option of the model that recipes/train.py has and config.json names."""
    config = run.config
    chosen = {name: config[name] for name in run.result["options"] if config.get(name) is not None}
    for size in ("n_layer", "n_embd", "n_head"):
        chosen.pop(size)
    return [
        ("Model type", f"`{config['model_type']}`"),
        ("Layers × width × heads", f"{config['n_layer']} × {config['n_embd']} × {config['n_head']}"),
        ("Parameters", f"{run.result['parameters']:,}"),
        ("Vocabulary", f"{config['vocab_size']:,} tokens"),
        *((f"`{name}`", shown(value)) for name, value in chosen.items()),
    ]


def training_rows(run: Run) -> list[tuple[str, str]]:
    result, options = run.result, run.result["options"]
    rows_a_step = options["batch_size"] * options["gradient_accumulation"] * options["num_processes"]
    gates = [value for layer in result.get("gates", {}).values() for value in layer]
    peaks = {"peak_rss_mib": "Peak memory", "peak_cuda_mib": "Peak memory of the GPU"}
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [
        ("Tokens", f"{result['tokens']:,}"),
        ("Steps", f"{result['steps']:,} of {rows_a_step:,} rows"),
        ("Peak learning rate (AdamW)", f"{options['learning_rate']}, schedule {options['schedule']}"),
        ("Precision", options["precision"]),
        ("Seed", str(options["seed"])),
        *([("Gates at the end, sigmoid(gate)", f"{min(gates):.2f} to {max(gates):.2f}")] if gates else []),
        ("Time", f"{result['seconds']:,.0f} s, {result['tokens_per_second']:,.0f} tokens/s"),
        *((label, f"{result[name]:,.0f} MiB") for name, label in peaks.items() if name in result),
        ("Hardware", result["hardware"]),
        ("Versions", versions),
        ("Date", result["date"]),
    ]


def stages(run: Run) -> str:
    """The runs that led to this model, one after the other."""
    rows = []
    for name, result in [*run.earlier, ("this model", run.result)]:
        if result is None:
            rows.append([name, "not known", *[""] * 5])
            continue
        numbers = [f"{result['tokens']:,}", f"{result['steps']:,}", str(result["options"]["seed"])]
        rows.append([name, data_name(result), *numbers, f"{result['cross_entropy']:.4f}", result["date"][:10]])
    return markdown_table(["run", "data", "tokens", "steps", "seed", "loss", "date"], rows, left=2)


def data_rows(run: Run) -> list[tuple[str, str]]:
    """What the manifest says of the data; their name and fingerprint only, where it is not at hand."""
    rows = [("Data", f"{run.data}, fingerprint `{run.result['data_fingerprint']}`")]
    if run.manifest is None:
        return rows
    options, manifest = run.manifest["options"], run.manifest
    rows.append(("Source", f"{shorten_path(options['source'])}, {manifest['source']['documents']:,} document(s)"))
    if "prepared_from" in options:
        rows.append(("Rows made by recipes/prepare_recall.py from", last_part(options["prepared_from"])))
    rows.append(("Tokenizer", f"{shorten_path(options['tokenizer'])}, {manifest['tokenizer']['vocabulary']:,} entries"))
    for name, split in manifest["splits"].items():
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in split.get("rows_by_kind", {}).items())
        rows.append((f"Rows, {name}", f"{split['blocks']:,} of {options['context']:,} tokens{kinds and f': {kinds}'}"))
    held_out = "whole documents" if options["split_by"] == "document" else "rows of the same documents"
    return [*rows, ("Held out", held_out)]


def sample_text(sample: dict) -> str:
    settings = ", ".join(f"`{name}={value}`" for name, value in sample["arguments"].items())
    seed = f", seed {sample['seed']}" if sample["arguments"]["do_sample"] else ""
    prompt, text = (fence(sample[name], "text") for name in ("prompt", "text"))
    return f"Prompt, {settings}{seed}:\n\n{prompt}\n\nContinuation:\n\n{text}"


def shown(value) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
