#!/usr/bin/env bash
# All tests in a new environment.
#
#   bash tests/run.sh [PYTEST OPTIONS]
#
# Takes 12 to 20 minutes on 2 CPU cores, installation included. The environment is a temporary folder, removed at the end.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
PIP_NO_COMPILE=1 bash "$root/recipes/setup.sh" "$environment" test # what is imported is compiled then
cd "$root"
"$environment/bin/ruff" check .
"$environment/bin/pyrefly" check --python-interpreter-path "$environment/bin/python"
"$environment/bin/pytest" -n 2 --dist loadfile --no-loadscope-reorder "$@" # in the order of conftest.py
if [ "$(uname)" = Linux ]; then # the GPU kernels in Triton's interpreter, which needs an older numpy
    "$environment/bin/python" -m pip install --quiet --no-deps --target "$environment/kernels" triton==3.6.0 'numpy<2.4'
    PYTHONPATH="$environment/kernels" TRITON_INTERPRET=1 "$environment/bin/pytest" -n 2 tests/library/test_kernels.py
fi
