r"""The comparison of self-attention and Infini-attention in one command: data, training, evaluation, one report.

    python recipes/study.py --scale mini --source CAROLINA --out runs/study --jobs 2
    python recipes/study.py --scale mini --source CAROLINA --out runs/study --variants s1 best my_variant.yaml --seeds 0 1 2
    python recipes/study.py --scale full --source CAROLINA --out runs/study_full \
        --launcher "accelerate launch --multi_gpu --num_processes 8"
    python recipes/study.py --scale mini --source biographies --out runs/try --max_steps 20 -- --data_biographies 200

A scale (configs/study_scale_SCALE.yaml, study_data_SCALE.yaml) is what all variants share, a variant (study_NAME.yaml)
what it has of its own. What stands behind -- goes above both: options of train.py, and with the prefix data_ of prepare.py.
All variants are trained by recipes/train.py on the same tokens in the same order; one with data settings of its own gets
its own prepared folder, and is compared per character. Variants that cannot be made are listed with the reason.

Stopped or killed at any point and started again with the same command, it goes on from there; more variants and seeds can
be added to an --out later, other data or options are refused. Writes OUT/report.md, report.json and figures/; OUT/VARIANT
holds its options (train.yaml), its run and what was measured on it, OUT/logs what the processes printed.
"""

import os
import runpy
import shlex
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cli import UserError, exit_on_user_error, option, parse_options
from cli.model_options import ModelOptions

if TYPE_CHECKING:
    from studies import planning

RECIPES = Path(__file__).parent
SEED = 0  # of the resampling and of the samples; the runs' own are options


@dataclass
class Options:
    scale: Literal["mini", "small", "full"] = field(
        metadata={"help": "Sizes, length and data of all variants.", "group": "study"}
    )
    source: str = field(metadata={"help": "The corpus: --source of prepare.py.", "group": "data"})
    out: str = field(metadata={"help": "Folder of the study.", "group": "output"})
    variants: list[str] | None = option(None, "Names, or .yaml files of your own; default: s1 i1 i2 best.", group="training")
    seeds: list[int] | None = option(None, "Seeds to train every variant with; default: the scale's, 0.")
    tokens: int | None = option(None, "Tokens to train each variant on; default: the scale's length.")
    max_steps: int | None = option(None, "Stop every run after so many steps, to see that a scale runs; the report says so.")
    ready_tokenizer: str | None = option(None, "Name or folder to use for the ready tokenizer of a variant (i2: gpt2).")
    launcher: str = option(
        "", "What starts train.py on several devices, such as 'accelerate launch --multi_gpu …'.", group="machine"
    )
    jobs: int = option(1, "Runs at the same time.")
    threads: int = option(1, "CPU threads of each run, and of the measurements.")
    largest_batch: bool = option(
        True, "Search the largest batch of each variant within --memory_budget_gib.", group="measurements"
    )
    memory_budget_gib: float | None = option(None, "GiB for the largest batch; default: 8 on a CPU, 40 on a GPU.")
    long_length: int = option(8192, "Tokens per row beyond the trained context, for models without a limit.")
    long_characters: int = option(16000, "Validation documents of at least so many characters are read in such rows.")
    state_tokens: list[int] = option([1024, 8192], "Tokens after which the bytes of the cache are measured.")
    prompt_words: int = option(60, "Words of the prompt of the samples.")
    new_tokens: int = option(150, "Tokens of each sample.")
    dry_run: bool = option(False, "Print the files of options and the commands, and do nothing.", group="output")


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    own, passed = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    (options,) = parse_options(Options, description=__doc__, argv=own)
    plan = make_plan(options, passed)
    if options.dry_run:
        from studies.runs import commands_text

        print(commands_text(plan, RECIPES), end="")
        return

    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill is Ctrl-C
    try:
        run(plan, options)
    except KeyboardInterrupt:
        print("\nstopped: the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None


def run(plan: "planning.Plan", options: Options) -> None:
    """The study, from the data to the report."""
    from plots import study as figures
    from studies import planning, report, results
    from studies import runs as study_runs
    from studies.sweeps import FAILED
    from support import measurement
    from support.stages import locked_folder, write_json, write_text

    study_runs.check_launcher(plan)
    with locked_folder(plan.out):
        record = planning.check_same_study(plan)
        write_json(plan.out / planning.STUDY_FILE, record)
        planning.write_settings(plan, RECIPES)
        study_runs.prepare_data(plan, record, RECIPES, options.jobs)
        commands = study_runs.train_runs(plan, record, RECIPES, options.jobs, options.threads)
        study_runs.finished_runs(plan)
        measured, problems = measure(plan, options, record)
        content = {name: getattr(options, name) for name in ("scale", "source", "max_steps", "jobs", "threads")}
        content |= results.collect(plan, record["fingerprints"], seed=SEED)
        content |= {"context": plan.context, "corpus": record["corpus"], "seed": SEED, **measured, "problems": problems}
        content["not_asked_for"] = sorted(set(planning.VARIANTS) - {run.variant for run in plan.runs})
        content["commands"] = [shlex.join([Path(sys.executable).name, *sys.argv]), *commands]
        content |= measurement.environment()
        content["figures"] = figures.draw(content, plan.out / "figures")
        write_json(plan.out / "report.json", content)
        write_text(plan.out / "report.md", report.write_report(content))
    print(f"{plan.out / 'report.md'}, {plan.out / 'report.json'}")
    failed = [f"{run.name}: {run.reason} ({plan.log(run.name)})" for run in plan.runs if run.status == FAILED] + problems
    if failed:
        raise UserError("not all was done; the same command tries it again:\n  " + "\n  ".join(failed))


def make_plan(options: Options, passed: list[str]) -> "planning.Plan":
    """The plan of the study, with every option of prepare.py and train.py checked before anything runs."""
    from studies import planning

    for name in ("tokens", "max_steps", "jobs", "threads", "memory_budget_gib", "prompt_words", "new_tokens"):
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            raise UserError(f"--{name} must be greater than 0, got {getattr(options, name)}")
    if options.long_length < 2 or min(options.state_tokens) < 1:
        raise UserError("--long_length must be at least 2, and each of --state_tokens at least 1")
    given = ("scale", "source", "seeds", "tokens", "max_steps", "ready_tokenizer", "launcher")
    plan = planning.make_plan(
        out=Path(options.out),
        configs=RECIPES / "configs",
        flags=planning.read_flags(passed),
        variants=options.variants or list(planning.VARIANTS),
        **{name: getattr(options, name) for name in given},
    )
    of_prepare, of_train = (runpy.run_path(str(RECIPES / f"{name}.py")) for name in ("prepare", "train"))
    for name, settings in plan.data.items():
        words = ["--source", plan.source, "--out", str(plan.data_folder(name)), *planning.words_of(settings)]
        kinds = [of_prepare[kind] for kind in ("CorpusOptions", "TokenizerOptions", "BlockOptions")]
        of_prepare["check_options"](*parse_options(*kinds, description=__doc__, argv=words))
    for run in plan.runs:
        words = ["--data", str(plan.data_folder(run.data)), "--out", str(run.trained), *planning.words_of(run.options)]
        kinds = [of_train["RunOptions"], ModelOptions, of_train["OptimizerOptions"]]
        parse_options(*kinds, description=__doc__, argv=words)
    return plan


def measure(plan: "planning.Plan", options: Options, record: dict) -> tuple[dict, list[str]]:
    """Measures the finished runs. Returns what the report says about the measurements, and what went wrong."""
    import torch
    from tqdm import tqdm

    from studies import evaluation, planning
    from studies.runs import finished_runs
    from studies.sweeps import FAILED

    torch.set_num_threads(options.threads)
    documents = evaluation.validation_documents(plan.data_folder(planning.BASE))
    for run in tqdm(finished_runs(plan), desc="losses", unit="run"):
        folder, fingerprint = plan.data_folder(run.data), record["fingerprints"][run.data]
        try:
            evaluation.evaluate_run(run, folder, documents, plan.context, fingerprint)
        except UserError as error:
            run.status, run.reason = FAILED, f"trained, but not measured: {error}"
    runs = finished_runs(plan)

    others = {run.data for run in runs} - {planning.BASE}
    seen = set().union(*(evaluation.trained_on(plan.data_folder(name)) for name in others))
    unseen = [document for document in documents if document["id"] not in seen]
    prompt = evaluation.choose_prompt(unseen or documents, options.prompt_words)
    wanted = evaluation.Description(
        state_tokens=options.state_tokens,
        text=documents[0]["text"],
        prompt=prompt["prompt"],
        new_tokens=options.new_tokens,
        seed=SEED,
        long_texts=[document["text"] for document in unseen if len(document["text"]) >= options.long_characters],
        long_length=options.long_length,
        context=plan.context,
    )
    first = list({run.variant: run for run in reversed(runs)}.values())[::-1]  # of each variant, its first seed
    for run in tqdm(first, desc="caches, samples, long texts", unit="variant"):
        evaluation.describe_run(run, wanted)

    on_gpu = torch.cuda.is_available() and not runs[0].options.get("use_cpu")
    budget, problems = options.memory_budget_gib or (40 if on_gpu else 8), []
    for run in tqdm(first, desc="largest batch", unit="variant", disable=not options.largest_batch):
        try:
            evaluation.largest_batch(run, plan.context, budget) if options.largest_batch else None
        except UserError as error:
            problems.append(f"{run.name}, largest batch: {error}")
    long = {"length": options.long_length, "characters": options.long_characters, "documents": len(wanted.long_texts)}
    return {
        "long_text": long,
        "memory_budget_gib": budget if options.largest_batch else None,
        "memory_kind": "GPU memory" if on_gpu else "resident memory, libraries included",
        "eval_rows": runs[0].options.get("eval_rows"),
        "prompt": prompt,
        "sampling": {**evaluation.SAMPLING, "seed": SEED, "new_tokens": options.new_tokens},
    }, problems


if __name__ == "__main__":
    main()
