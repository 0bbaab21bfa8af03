"""What Prometheus may ask of a server."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .engine import Engine
from .requests import Usage

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """Counts what an `engine` answers."""

    def __init__(self, engine: Engine):
        own = self.registry = CollectorRegistry()
        self.requests = Counter(
            "hf_infini_requests", "Requests that ended, by how.", ["end"], registry=own
        )
        self.tokens = Counter(
            "hf_infini_tokens",
            "Tokens of prompts, cached among them, and new.",
            ["of"],
            registry=own,
        )
        self.first = Histogram(
            "hf_infini_first_text_seconds", "To the first text.", registry=own, buckets=SECONDS
        )
        self.whole = Histogram(
            "hf_infini_request_seconds", "To the end.", registry=own, buckets=SECONDS
        )
        for name, about, value in (
            ("running", "Requests that are read or answered.", lambda: engine.running),
            ("waiting", "Requests that wait for a slot.", lambda: engine.waiting),
            ("kept_bytes", "Of beginnings of prompts.", lambda: engine.loop.prefixes.nbytes),
        ):
            Gauge(f"hf_infini_{name}", about, registry=own).set_function(value)

    def ended(self, how: str, usage: Usage | None = None) -> None:
        """Counts a request that has ended, `how`, and its tokens, `usage`."""
        self.requests.labels(how).inc()
        for name, count in (usage or Usage(0, 0, 0))._asdict().items():
            self.tokens.labels(name).inc(count)

    def text(self) -> bytes:
        """As Prometheus reads them."""
        return generate_latest(self.registry)
