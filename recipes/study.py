r"""Trains what a YAML file describes, variants × seeds, measures all of it, and
writes one report.

    python recipes/study.py \
        --study recipes/configs/study_variants.yaml recipes/configs/study_mini.yaml \
        --source CAROLINA --out runs/study --jobs 2
    python recipes/study.py --study … --data data/carolina --variants s1 best --seeds 0 1 2 \
        --out runs/seeds
    python recipes/study.py --train recipes/configs/carolina_infini.yaml \
        --set train.max_tokens=1000000 variants.short.segment_length=32 \
        variants.long.segment_length=128 --data data/carolina --out runs/lengths
    python recipes/study.py --runs runs/self runs/infini --data data/quickstart \
        --out runs/comparison

Sections of a study: `train` (options of train.py that all share), `variants` (name: options of its
own, above these, and in `data` those of its own data), `seeds`, `data` (options of prepare.py) and
`evaluate` (name: options of evaluate_model.py). Of several --study files, later ones go above
earlier ones, --set above them, --seeds above all. The others are compared with the first variant,
on the validation rows, paired; variants on other data per character. --runs takes finished runs
instead.

Everything is a process of prepare.py, train.py or evaluate_model.py, its output in OUT/logs.
Stopped or killed at any point and started again with the same command, a study goes on from there;
variants and seeds can be added later. What cannot be made is listed with the reason, what
fails stops no other run. Writes OUT/report.md, report.json and loss.png; each run is in OUT/NAME.
"""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from cli import SEED, UserError, exit_on_error, needed, option, parse_options


@dataclass
class Options:
    out: str = needed("Folder of the study.", group="output")
    study: list[str] | None = option(None, "YAML files with the sections above.", group="study")
    train: str | None = option(None, "YAML file of train.py's options, below the study's own.")
    set: list[str] | None = option(
        None, "SECTION.NAME=VALUE entries, above the files: train.max_steps=20."
    )
    variants: list[str] | None = option(
        None, "Those to train, the one to compare with first; default: all, in their order."
    )
    seeds: list[int] | None = option(
        None, "Seeds to train everything with; default: the study's, or train.py's.", **SEED
    )
    source: str | None = option(
        None, "The corpus to prepare: --source of prepare.py. Or --data.", group="data"
    )
    data: str | None = option(None, "Folder made by prepare.py that all runs read.")
    runs: list[str] | None = option(
        None, "Out folders of finished runs to compare, trained on --data.", group="comparison"
    )
    jobs: int = option(1, "Processes at the same time.", at_least=1, at_most=1024, group="machine")
    threads: int = option(
        1, "CPU threads of each process, and of the measurements.", at_least=1, at_most=1024
    )
    dry_run: bool = option(False, "Print the commands and do nothing.", group="output")


@exit_on_error(when_stopped="the same command goes on from here")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    check_options(options)
    study, runs, data = plan(options)

    from studies.execution import Tasks
    from support.stages import locked_folder

    machine = {"jobs": options.jobs, "threads": options.threads}
    tasks = Tasks(study, runs, data, Path(options.out), source=options.source, **machine)
    if options.dry_run:
        print("\n".join(tasks.commands))
        return
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with locked_folder(Path(options.out), owner="study.py") as out:
        run_study(options, study, tasks, out)


def check_options(options: Options) -> None:
    names = ("study", "train", "set", "variants", "seeds", "source")
    given = [name for name in names if getattr(options, name)]
    if not options.runs and not given:
        raise UserError(
            "give what is to be trained with --study, --train or --set, or finished runs with "
            "--runs"
        )
    given += ["jobs"] * (options.jobs > 1) + ["dry_run"] * options.dry_run
    if options.runs and given:
        raise UserError(
            f"--runs compares finished runs, --{given[0]} is for runs to be trained: give one of "
            "them"
        )
    if (options.data is None) == (options.source is None):
        raise UserError("give --data with --runs, otherwise exactly one of --source and --data")
    if options.data and any(text.startswith("data") for text in options.set or ()):
        raise UserError("--set data would have no effect, as --data is given: give one of the two")


def plan(options: Options) -> tuple[dict, list, dict[str, Path]]:
    """The study, its runs, and the folders of their data by name."""
    from studies import plan as planning

    flags = {"seeds": options.seeds} if options.seeds else {}
    study = planning.read_study(options.study or (), options.train, options.set or (), **flags)
    if options.runs:
        runs = planning.existing_runs(options.runs)
        study["evaluate"] = dict.fromkeys(planning.shared_evaluations(runs), {})
        return study, runs, {planning.BASE: Path(options.data)}
    if options.variants:
        study = planning.choose_variants(study, options.variants)
    runs = planning.runs_of(study, Path(options.out))
    if options.source:
        names = planning.data_settings(study, runs)
        return study, runs, {name: Path(options.out) / "data" / name for name in names}
    if own := [run.data for run in runs if run.data != planning.BASE]:
        raise UserError(
            f"{own[0]} has data of its own: give --source instead of --data, or leave it out of "
            "--variants"
        )
    return study, runs, {planning.BASE: Path(options.data)}


def run_study(options: Options, study: dict, tasks, out: Path) -> None:
    """The study, from the data to the report."""
    from plots.study import plot_losses
    from studies import measure, report
    from studies.processes import FAILED
    from support import measurement
    from support.stages import write_json, write_text

    tasks.prepare()
    finished = tasks.train()
    problems = tasks.evaluate(finished)
    runs = measure.measure_runs(finished, tasks.data, out, list(study["evaluate"]), options.threads)
    content = {"study": study, "variants": report.collect(runs), "runs": tasks.outcomes}
    content |= {"problems": problems, **measurement.environment()}
    content["commands"] = [shlex.join([Path(sys.executable).name, *sys.argv]), *tasks.commands]
    # tokens of other data are others
    plot_losses([run for run in runs if run.data == runs[0].data], out / "loss.png")
    write_json(out / "report.json", content)
    write_text(out / "report.md", report.write_report(content))
    print(report.losses_table(content["variants"], report.groups_of(content["variants"])[0]))
    print(f"\n{out / 'report.md'}, {out / 'report.json'}")
    failed = [run for run in tasks.outcomes if run["status"] == FAILED]
    if failed:
        lines = [f"\n  {run['name']}: {run['reason']} ({tasks.log(run['name'])})" for run in failed]
        what = f"{len(failed)} of {len(tasks.outcomes)} runs failed, the same command tries again:"
        raise UserError("".join([what, *lines]))


if __name__ == "__main__":
    main()
