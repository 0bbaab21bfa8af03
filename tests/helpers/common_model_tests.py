"""transformers' own tests of a model, `ModelTesterMixin`. The wheel has no tests: they come from the source distribution of
the installed version, which is fetched when it is not in pytest's cache."""

import functools
import hashlib
import importlib.util
import io
import json
import os
import sys
import tarfile
import urllib.request
from http.client import HTTPException
from pathlib import Path
from types import ModuleType
from unittest import mock
from urllib.parse import urljoin

import pytest
from filelock import FileLock
from transformers import __version__ as VERSION

CACHE = Path(__file__).parents[2] / ".pytest_cache" / "transformers-tests"
MEMBER = f"transformers-{VERSION}/tests/test_modeling_common.py"
PACKAGE = "tests_of_transformers"
# Modules of the package that the source distribution lacks, and what is imported from them
LACKING = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
SECONDS = 30  # without an answer from the index


class NotFetched(Exception):
    """There are no tests of the installed version; the message says why."""


class NoMarks:
    """Stands in for `pytest.mark`."""

    def __getattr__(self, name: str):
        return lambda test: test


def load() -> ModuleType:
    """The module of `ModelTesterMixin`, whose models are on the CPU.

    Empty mixins stand in for those that it imports from `LACKING`, a function for the package `parameterized`. Its marks are
    not set: pytest refuses those that no configuration names.

    Raises:
        NotFetched: the source distribution cannot be had.
    """
    name = f"{PACKAGE}.{Path(MEMBER).stem}"
    spec = importlib.util.spec_from_file_location(name, _fetched())
    module = importlib.util.module_from_spec(spec)
    lacking = {f"{PACKAGE}.{path}": _module(path, **{mixin: type(mixin, (), {})}) for path, mixin in LACKING.items()}
    sys.modules.update(lacking | {PACKAGE: _module(PACKAGE, __path__=[]), name: module})
    own = sys.modules.get("parameterized")
    sys.modules["parameterized"] = _module("parameterized", parameterized=_module("parameterized", expand=_expand))
    try:
        with mock.patch.dict(os.environ, TRANSFORMERS_TEST_DEVICE="cpu"), mock.patch.object(pytest, "mark", NoMarks()):
            spec.loader.exec_module(module)
    finally:
        del sys.modules["parameterized"]
        if own is not None:
            sys.modules["parameterized"] = own
    return module


def _module(name: str, **attributes) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    return module


def _expand(cases):
    """Stands in for `parameterized.expand`: a test for each case, with the case's first argument in its name."""

    def decorate(test):
        names = sys._getframe(1).f_locals  # of the class body
        for case in cases:
            case = case if isinstance(case, tuple) else (case,)
            names[f"{test.__name__}_{case[0]}"] = _of_case(test, case)

    return decorate


def _of_case(test, case: tuple):
    @functools.wraps(test)
    def of_case(self):
        return test(self, *case)

    return of_case


def _fetched() -> Path:
    """The file of the tests; one process fetches it, for all workers and later runs.

    The workers of a run must find the same tests: where the first cannot fetch them, the others do not try.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    file, failure, run = CACHE / f"{VERSION}.py", CACHE / "failure", os.environ.get("PYTEST_XDIST_TESTRUNUID")
    with FileLock(CACHE / "lock"):
        if file.exists():
            return file
        failed_run, _, reason = failure.read_text(encoding="utf-8").partition("\n") if failure.exists() else ("", "", "")
        if run and run == failed_run:
            raise NotFetched(reason)
        try:
            content = _download()
        except (OSError, HTTPException, LookupError, json.JSONDecodeError) as error:
            reason = f"transformers' own tests cannot be fetched: {error}"
            failure.write_text(f"{run}\n{reason}", encoding="utf-8")
            raise NotFetched(reason) from error
        partial = file.with_suffix(".partial")  # a process that is killed leaves no half file
        partial.write_bytes(content)
        partial.replace(file)
        return file


def _download() -> bytes:
    """The tests out of the source distribution. (`pip download` would build it first, to learn its dependencies.)"""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/transformers/"
    request = urllib.request.Request(index, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as page:
        files = {file["filename"]: file for file in json.load(page)["files"]}
    file = files.get(f"transformers-{VERSION}.tar.gz")
    if file is None:
        raise LookupError(f"{index} lists no source distribution of version {VERSION}.")
    with urllib.request.urlopen(urljoin(index, file["url"]), timeout=SECONDS) as answer:
        archive = answer.read()
    if hashlib.sha256(archive).hexdigest() != file["hashes"]["sha256"]:
        raise ValueError(f"{file['url']} is not the file that {index} lists: its SHA-256 differs.")
    with tarfile.open(fileobj=io.BytesIO(archive)) as archive:
        return archive.extractfile(MEMBER).read()
