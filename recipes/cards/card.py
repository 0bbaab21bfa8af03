"""A model card: template.md filled with the numbers of a run, and the metadata that the Hub reads.

Every number is one that a recipe wrote into a JSON file, see [`run`].
"""

from pathlib import Path
from types import SimpleNamespace

from huggingface_hub import ModelCardData
from jinja2 import StrictUndefined, Template

from cli.model_options import attention_of
from hf_infini.options import context_limit
from support.markdown import fence, markdown_table

from .run import Run, data_name, last_part, shorten_command, shorten_path

TEMPLATE = Path(__file__).with_name("template.md")
# Options of an evaluation of perplexity that a card names where they are others than these
USUAL = {"length": None, "min_characters": 0, "max_tokens": None}
USUAL |= {"precision": "float32", "memory": "on"}
ATTENTION = {"infini": "Infini-attention", "none": "no attention"}
ATTENTION |= {"local": "sliding-window attention"}
ATTENTION |= dict.fromkeys(("self", "global"), "self-attention")


def number(value) -> str:
    """An integer with separated thousands; anything else unchanged."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def write_card(run: Run, about, samples: list[dict], loss_curve: str | None = None) -> str:
    """The card as Markdown with the Hub's metadata in front.

    Args:
        about: options of recipes/model_card.py: what no file of a run says.
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
    )
    names = [name for name in result["options"] if name not in ("n_layer", "n_embd", "n_head")]
    how = {"undefined": StrictUndefined, "keep_trailing_newline": True}
    return Template(TEMPLATE.read_text(encoding="utf-8"), **how).render(
        card_data=data.to_yaml(),
        run=run,
        config=config,
        result=result,
        options=result["options"],
        manifest=run.manifest,
        about=about,
        samples=samples,
        attention=ATTENTION[kind],
        has_memory=kind == "infini",
        context_limit=context_limit(SimpleNamespace(**config)),
        load_from=about.repo_id or shorten_path(about.out),
        chosen={name: config[name] for name in names if config.get(name) is not None},
        command=shorten_command(result["command"]),
        loss_curve=loss_curve,
        notes=about.notes and Path(about.notes).read_text(encoding="utf-8").strip(),
        **FUNCTIONS,
    )


def losses(run: Run) -> str:
    """Cross-entropy and perplexity: of the validation by recipes/train.py, and of evaluations that
    do not only repeat it."""
    rows = {(run.data, "validation", ""): run.result | {"tokens": run.result["validation_tokens"]}}
    usual = USUAL | {"separate_documents": bool(run.result["options"].get("separate_documents"))}
    for found in run.of_task("perplexity"):
        options = {name: found["options"][name] for name in usual}
        how = [f"{name} {value}" for name, value in options.items() if value != usual[name]]
        own = found["data_fingerprint"] == run.result["data_fingerprint"]
        name = run.data if own else last_part(found["source"])
        rows.setdefault((name, found["split"] or "", ", ".join(how)), found)
    cells = []
    for place, row in rows.items():
        numbers = f"{row['tokens']:,}", f"{row['cross_entropy']:.4f}", f"{row['perplexity']:.2f}"
        cells.append([", ".join(filter(None, place)), *numbers])
    table = markdown_table(["text", "tokens", "cross-entropy", "perplexity"], cells, left=1)
    text = "Cross-entropy in nats per token over all predicted tokens, perplexity its exponential."
    if asked := exercises(run):
        text += f" The rows of {run.data} are exercises of recall ({asked}): their numbers say"
        text += " nothing of running text."
    return f"{table}\n\n{text} Measured on {measured_on(run.result, *run.of_task('perplexity'))}."


def format_answers(cell: dict) -> str:
    """`45/48 (83.2–97.9 %)`."""
    if "accuracy" not in cell:
        return "not possible"
    return (
        f"{cell['correct']}/{cell['samples']} ({100 * cell['low']:.1f}–{100 * cell['high']:.1f} %)"
    )


def counting_note(found: dict) -> str:
    text = "Counted are the answers that greedy decoding gives exactly, with 95 % Wilson intervals"
    how = f"{found['options']['precision']}, seed {found['options']['seed']}"
    return f"{text}; {how}; {measured_on(found)}."


def describe_source(found: dict) -> str:
    """`plays, validation, memory off`: what was read, and whether with the memory."""
    source = None if found["source"] is None else last_part(found["source"])
    off = "memory off" if found["memory"] == "off" else None
    return ", ".join(filter(None, (source or "invented text", found["split"], off)))


def measured_on(*files: dict) -> str:
    """Machine and day of JSONs, each pair once: `2 CPU cores, AMD EPYC, 2026-11-21`."""
    return "; ".join(dict.fromkeys(f"{file['hardware']}, {file['date'][:10]}" for file in files))


def exercises(run: Run) -> str | None:
    """What the rows of the run's data ask for where they are no running text but exercises of
    recall: `codes, echo`."""
    if run.manifest is None or "prepared_from" not in run.manifest["options"]:
        return None
    kinds = dict.fromkeys(
        kind for split in run.manifest["splits"].values() for kind in split.get("rows_by_kind", {})
    )
    return ", ".join(kind for kind in kinds if kind != "text")


FUNCTIONS = (counting_note, data_name, describe_source, fence, format_answers, last_part, losses)
FUNCTIONS = {function.__name__: function for function in (*FUNCTIONS, number, repr, shorten_path)}
