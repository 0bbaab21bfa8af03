"""A model card: template.md filled with the numbers of a run, and the metadata that the Hub reads.

Every number is one that a recipe wrote into a JSON file, see [`run`].
"""

from pathlib import Path
from types import SimpleNamespace

from huggingface_hub import ModelCardData
from jinja2 import StrictUndefined, Template

from hf_infini.options import attention_of, context_limit
from support.markdown import fence

from .results import counting_note, describe_source, format_answers, losses
from .run import Run, data_name, last_part, shorten_command, shorten_path

TEMPLATE = Path(__file__).with_name("template.md")
ATTENTION = {"self": "self-attention", "global": "self-attention", "local": "sliding-window attention"}
ATTENTION |= {"infini": "Infini-attention", "none": "no attention"}


def number(value) -> str:
    """An integer with separated thousands; anything else unchanged."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


FUNCTIONS = {function.__name__: function for function in (
    counting_note, data_name, describe_source, fence, format_answers, last_part, losses, number, repr, shorten_path,
)}  # fmt: skip


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
    )
    chosen = {name: config[name] for name in result["options"] if config.get(name) is not None}
    template = Template(TEMPLATE.read_text(encoding="utf-8"), undefined=StrictUndefined, keep_trailing_newline=True)
    return template.render(
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
        chosen={name: value for name, value in chosen.items() if name not in ("n_layer", "n_embd", "n_head")},
        command=shorten_command(result["command"]),
        loss_curve=loss_curve,
        notes=about.notes and Path(about.notes).read_text(encoding="utf-8").strip(),
        **FUNCTIONS,
    )
