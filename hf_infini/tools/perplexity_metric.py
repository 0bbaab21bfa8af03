"""The project's perplexity as a local `evaluate.Metric`: token-weighted, offline, fed with sums instead of logits.

`evaluate.load("perplexity")` needs the network, loads a model by name and averages per text. This one is told what a
model's losses summed to and over how many tokens, so that one long batch weighs what its tokens weigh.
"""

from .extras import needs
from .metrics import summarize

with needs("metrics", "datasets", "evaluate"):
    import datasets
    import evaluate

_DESCRIPTION = "Cross-entropy in nats per token and perplexity over all tokens, weighted by the tokens of each batch."
_INPUTS = """
Args:
    loss_sums (list of float): per batch (or per text), the sum of the tokens' negative log-likelihoods, in nats.
    token_counts (list of int): per batch (or per text), how many tokens that sum covers.
Returns:
    cross_entropy (float): nats per token; perplexity (float): exp(cross_entropy); tokens (int).
"""


class TokenPerplexity(evaluate.Metric):
    """Token-weighted perplexity: `metric.add_batch(loss_sums=[…], token_counts=[…])`, then `metric.compute()`.

    The entries stay in memory (two numbers per batch), so nothing is written to a cache folder. Several processes: add
    up their sums first (`hf_infini.metrics.reduce_sums`), then feed one metric.
    """

    def __init__(self, **kwargs):
        super().__init__(keep_in_memory=True, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"loss_sums": datasets.Value("float64"), "token_counts": datasets.Value("int64")}
            ),
        )

    def _compute(self, loss_sums, token_counts) -> dict[str, float]:
        return summarize(loss_sums, token_counts)
