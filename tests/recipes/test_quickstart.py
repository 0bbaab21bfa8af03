"""The quickstart's text where the Hub does not answer: made here, after one line."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hf_infini.command import app
from running import ROOT


@pytest.mark.slow
def test_a_hub_that_does_not_answer_takes_one_line(tmp_path):
    """The lines of quickstart.sh that choose the text."""
    script = (ROOT / "recipes" / "quickstart.sh").read_text(encoding="utf-8")
    begin, end = script.index("source=("), script.index("python recipes/prepare.py")
    before = "set -euo pipefail; corpus=; step() { printf '%s\\n' \"$*\" >&2; }\n"
    lines = before + script[begin:end] + '\necho "${source[1]}"'
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", lines], capture_output=True, text=True, env=environment, check=True
    )
    generated = (
        "Preparing built-in generated biographies (no --corpus, and nothing came from the Hub)"
    )
    assert done.stdout.strip() == "biographies" and done.stderr.splitlines() == [generated]


def test_what_it_ends_with_is_printed_and_its_next_step_can_be_run():
    """The last lines print what the table shows, and a command whose words exist."""
    script = (ROOT / "recipes" / "quickstart.sh").read_text(encoding="utf-8")
    last = script[script.index('step "What this shows"') :]
    run = subprocess.run(
        ["bash", "-euc", f"step() {{ echo; }}\n{last}"], capture_output=True, text=True, check=True
    )
    (line,) = (text for text in run.stdout.splitlines() if "hf-infini" in text)
    command, name, model, document, *options = shlex.split(line)
    assert command == ".venv/bin/hf-infini" and (ROOT / document).is_file()
    with pytest.raises(SystemExit) as stop:  # every option is known, and then this ends it
        app([name, model, str(ROOT / document), *options, "--help"])
    assert not stop.value.code
