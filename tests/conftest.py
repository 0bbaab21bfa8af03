"""Settings that every test needs."""

import os
from pathlib import Path

import pytest

# Before anything imports a Hugging Face library: no test may depend on the network.
os.environ["HF_HUB_OFFLINE"] = "1"
# The models are so small that threads cost more than they bring, above all where another program
# wants a core too.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items) -> None:
    """Files of many short tests last, so that two workers end at the same time."""
    items.sort(key=lambda item: "bad_input" in item.path.parts)


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """The folder of everything that several tests read."""
    return tmp_path_factory.getbasetemp()
