"""Settings that every test needs."""

import os

# Before anything imports a Hugging Face library: no test may depend on the network.
os.environ["HF_HUB_OFFLINE"] = "1"
