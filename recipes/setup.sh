#!/usr/bin/env bash
# Makes a virtual environment and installs hf_infini with what the recipes need.
#
#   bash recipes/setup.sh [FOLDER] [EXTRAS]      FOLDER: of the environment, default .venv;  EXTRAS: default recipes
#
# torch goes first and pinned, so that resolving the other packages cannot choose another build of it.
set -euo pipefail
folder=${1:-.venv}
extras=${2:-recipes}
root=$(cd "$(dirname "$0")/.." && pwd)

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
    echo "error: hf_infini needs Python 3.11 to 3.13, $python is $("$python" -V 2>&1); name another with PYTHON=…" >&2
    exit 1
}
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 uv
rm -rf "$root/build" # modules of an earlier version would be installed with it
# uv takes seconds where pip takes minutes. Without --reinstall-package it may install a wheel of an earlier version that it kept.
"$folder/bin/uv" pip install --quiet --python "$folder/bin/python" --reinstall-package hf-infini "$root[$extras]"
