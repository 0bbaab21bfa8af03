"""The training in a model card: its options, the runs before it, the gates that it ended with, and what it took."""

import math

from studies.report import GATES_ARE
from support.markdown import fence, markdown_table

from .data import is_recall
from .model import gates_table
from .run import Run, Stage
from .text import plain, shorten_command

OPTIONS = {
    "epochs": "Passes asked for",
    "max_tokens": "Tokens asked for",
    "max_steps": "Steps asked for",
    "shuffle_buffer": "Rows in memory that the next were drawn from",
    "separate_documents": "Documents of a row kept apart",
    "dilute_up_to": "Rows begin with the memory of another text, so many times as heavy at most",
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
    "gradient_checkpointing": "Gradient checkpointing",
    "torch_compile": "torch.compile",
    "seed": "Seed",
}


def training_section(run: Run) -> str:
    result = run.result
    rows = [("Tokens", f"{result['tokens']:,}"), ("Steps", f"{result['steps']:,}")]
    given = {name: value for name, value in result["options"].items() if value is not None}
    if not result.get("gates"):
        given.pop("gate_learning_rate", None)
    rows += [(label, plain(given[name])) for name, label in OPTIONS.items() if name in given]
    rows.append(("Special tokens", _special_tokens(run)))
    gates = [value for layer in (result.get("gates") or {}).values() for value in layer]
    if gates:
        rows += _first_gates(run)
        rows.append(("Gates at the end, sigmoid(gate)", f"{min(gates):.2f} to {max(gates):.2f}"))
    rows += [("Time", f"{result['seconds']:,.0f} s"), ("Tokens per second", f"{result['tokens_per_second']:,.0f}")]
    peaks = {"peak_rss_mib": "Peak memory", "peak_cuda_mib": "Peak memory of the GPU"}
    rows += [(label, f"{result[name]:,.0f} MiB") for name, label in peaks.items() if name in result]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    rows += [("Hardware", result["hardware"]), ("Versions", versions), ("Date", result["date"])]
    parts = ["## Training", fence(shorten_command(result["command"]), "bash"), markdown_table(["", ""], rows, left=2)]
    parts[-1] += run.show("training")
    if gates:
        text = f"The gates of each head at the end, sigmoid(gate): {GATES_ARE}."
        parts.append(f"### Gates\n\n{text}\n\n{gates_table(result['gates'])}")
    return "\n\n".join(parts + ([stages_section(run)] if run.earlier else []))


def _special_tokens(run: Run) -> str:
    """What becomes of end of text and padding; runs older than the option did not mask them."""
    given = run.result["options"]
    usual = given["mask_special_tokens"] is not False if "mask_special_tokens" in given else False
    if not run.config.get("mask_special_tokens", usual):
        return "learned like all others" + (", and written into the memory" if run.result.get("gates") else "")
    return "not learned to be predicted" + (", nor written into the memory" if run.result.get("gates") else "")


def _first_gates(run: Run) -> list[tuple[str, str]]:
    """Where the gates began; where a run before had some, they went on from there."""
    if run.earlier and (run.earlier[-1].result is None or run.earlier[-1].result.get("gates")):
        return []
    first = run.config["gate_init"]
    return [("Gates at the start", f"{1 / (1 + math.exp(-first)):.2f} (logit {first:g})")]


def stages_section(run: Run) -> str:
    """The runs that led to this model, one after the other."""
    rows = []
    for number, stage in enumerate(run.stages, start=1):
        result = stage.result
        if result is None:
            rows.append([str(number), stage.name, "nothing known of it", *[""] * 6])
            continue
        numbers = [f"{result['tokens']:,}", f"{result['steps']:,}", plain(result["options"]["learning_rate"])]
        numbers += [plain(result["options"]["seed"]), f"{result['cross_entropy']:.4f}", result["date"][:10]]
        rows.append([str(number), stage.name, f"{stage.data}{_rows_of(stage)}", *numbers])
    header = ["", "run", "data", "tokens", "steps", "learning rate", "seed", "its validation loss", "date"]
    known = [stage.result["tokens"] for stage in run.stages if stage.result is not None]
    total = f"{sum(known):,} tokens in all" + ("" if len(known) == len(rows) else " that are known of") + "."
    text = f"The model was trained in stages, each from the weights of the one before: {total} The validation losses are of "
    text += "each stage's own data, in nats per token, and cannot be compared where the data differ."
    return f"### Stages\n\n{text}\n\n{markdown_table(header, rows, left=3)}"


def _rows_of(stage: Stage) -> str:
    """` (rows of 256: 50 % codes, 50 % echo)`; empty where the data is not at hand."""
    if stage.manifest is None:
        return ""
    words = f"rows of {stage.manifest['options']['context']:,}"
    if is_recall(stage.manifest):
        split = stage.manifest["splits"]["train"]
        counts = sorted(split["rows_by_kind"].items(), key=lambda pair: (-pair[1], pair[0]))
        words += ": " + ", ".join(f"{100 * count / split['blocks']:.0f} % {kind}" for kind, count in counts)
    return f" ({words})"


def compute_section(run: Run) -> str:
    known = [stage for stage in run.stages if stage.result is not None]
    rows = [[stage.name, stage.result["hardware"], *map(_hours, device_hours(stage.result))] for stage in known]
    if len(known) > 1 and len({row[1] for row in rows}) == 1:
        rows.append(["all", rows[0][1], *(_hours(sum(column)) for column in _columns(known))])
    text = "Hours of training steps. Device-hours count a GPU for each process, or the whole machine where a CPU trained"
    on_cpu = not all(_on_gpu(stage.result) for stage in known)
    if on_cpu and run.study is not None:
        text += f" (here {run.study['jobs']} run(s) at a time with {run.study['threads']} thread(s) each)"
    elif on_cpu:
        text += ", although a run may have had a part of it"
    text += ". Evaluation, preparing the data and earlier attempts are not counted. Energy was not measured."
    missing = len(run.stages) - len(known)
    text += f" Of {missing} stage(s) before, nothing is known." if missing else ""
    return f"## Compute\n\n{markdown_table(['run', 'hardware', 'hours', 'device-hours'], rows, left=2)}\n\n{text}"


def _columns(stages: list[Stage]):
    return zip(*(device_hours(stage.result) for stage in stages), strict=True)


def device_hours(result: dict) -> tuple[float, float]:
    """Hours, and hours times devices: a GPU for each process, or one machine where a CPU trained."""
    hours = result["seconds"] / 3600
    return hours, hours * (result["options"].get("num_processes") or 1 if _on_gpu(result) else 1)


def _on_gpu(result: dict) -> bool:
    """`hardware` names the GPUs of the machine (`8 x NVIDIA …`), which a run with --use_cpu leaves alone."""
    return "CPU cores" not in result["hardware"] and not result["options"].get("use_cpu")


def _hours(hours: float) -> str:
    return f"{hours:.4f}" if hours < 1 else f"{hours:,.2f}"
