"""Publishes a finished run on the Hugging Face Hub: model, tokenizer and card, checked before anything leaves.

    python recipes/push.py --run runs/carolina_infini --repo_id user/carolina-infini --dry_run
    python recipes/push.py --run runs/carolina_infini --repo_id user/carolina-infini --private --tag v1.0
    python recipes/push.py --run runs/carolina_infini --repo_id user/carolina-infini --update --tag v1.1

The card is written anew, from the run's JSON and with what recipes/write_card.py was told last (RUN/card.json), as
RUN/README.md with its figures in RUN/figures. Then weights, tokenizer, card, sizes and texts are checked; what is found is
listed all at once, and nothing is sent before all of it is mended. Everything arrives in one commit, or nothing does. A push
that was interrupted goes on with the same command. `hf auth login` or HF_TOKEN gives the token.
"""

from dataclasses import dataclass, field
from pathlib import Path

from cli import UserError, exit_on_user_error, option, parse_options


@dataclass
class Options:
    run: str = field(metadata={"help": "Out folder of a finished run of recipes/train.py.", "group": "run"})
    repo_id: str = field(
        metadata={"help": "Where to publish on the Hub: user/name or organisation/name.", "group": "repository"}
    )
    private: bool = option(False, "Make the new repository private.")
    tag: str | None = option(None, "Tag for the commit, such as v1.0; one that exists is never moved.")
    revision: str = option("main", "Branch to commit to; made from main where it is not there.")
    update: bool = option(False, "Publish a new version in a repository that exists; files of its model that the run has no "
                          "more are deleted from the branch.")  # fmt: skip
    allow: list[str] = option(
        [], "Texts that may go up although they look like secrets, local paths or names.", group="card and checks"
    )
    device: str = option("auto", "To generate the card's samples on. cpu, cuda, cuda:1, …; auto: a GPU where there is one.")
    dry_run: bool = option(
        False, "Write the card, check, and list what would go up; nothing is sent or asked.", group="repository"
    )


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    folder = Path(options.run)

    from hf_infini import __version__
    from hub import checks, upload
    from hub.files import plan

    target = upload.Target(options.repo_id, options.private, options.revision, options.tag, options.update)
    upload.check_target(target)
    if not folder.is_dir():
        raise UserError(f"--run: there is no folder {folder}")
    if not options.dry_run:
        upload.check_login()
    findings = checks.check_model(folder)
    findings += [] if findings else renew_card(options)
    files, left_out = plan(folder)
    findings += checks.check_files(folder, files, options.repo_id, options.allow)
    print(listing(files, left_out))
    if findings:
        raise checks.list_findings(folder, findings)
    if options.dry_run:
        size = sum(file.size for file in files)
        print(f"\n{len(files)} files, {size:,} bytes would go to {options.repo_id}; nothing was sent")
        return
    address = upload.publish(files, target, f"Publish {options.tag or 'a run'} with hf_infini {__version__}")
    print(f"\n{len(files)} files are on the Hub: {address}{f', tag {options.tag}' if options.tag else ''}")


def renew_card(options: Options) -> list:
    """Writes RUN/README.md as recipes/write_card.py does, and returns what is missing in it."""
    import write_card
    from cards.files import kept_settings
    from hub import checks
    from hub.files import CARD, FIGURES

    folder = Path(options.run)
    fix = "Write the card with recipes/write_card.py and the options that it asks for: the next push keeps to them"
    try:
        settings = kept_settings(folder)
        where = {"run": None if settings.get("study") else options.run, "out": str(folder / CARD)}
        where |= {"figures": str(folder / FIGURES), "repo_id": options.repo_id, "device": options.device}
        run = write_card.write(write_card.Options(**settings | where))
    except (UserError, TypeError) as error:  # TypeError: settings of another version
        return [checks.Finding(CARD, None, f"the card cannot be written: {error}", fix)]
    return checks.check_card(folder, run)


def listing(files: list, left_out: dict[str, str]) -> str:
    """Two tables: what goes up, and what stays and why."""
    from support.markdown import markdown_table

    rows = [[file.path, "LFS" if file.lfs else "regular", file.sha256[:12], f"{file.size:,}"] for file in files]
    parts = [markdown_table(["goes up", "stored as", "sha256", "bytes"], rows, left=3)]
    if left_out:
        parts.append(markdown_table(["stays here", "because it is"], [*left_out.items()], left=2))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
