"""Training on short rows for long texts, for the gated delta rule: what a token does to the memory, it does many times over.

The rule replaces a part of what is there with each token that the model has not learned to leave alone. Rows of 512 tokens
hardly punish that; in texts sixteen times as long nothing is left. If each token counts as many copies of itself, the loss
punishes filler that changes the memory, and no longer rows are needed.
"""

import contextlib
import functools
import random
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerCallback

from cli import UserError
from hf_infini.ops.state import Projections
from hf_infini.options import attention_of

SMALLEST = 1e-12  # of a rate, whose logarithm is taken
ONCE = 0.25  # share of the steps in which nothing is repeated


class Repetition(TrainerCallback):
    """Has a model's gated delta memories take in each token several times ([`repeated`]) in training steps, forward and
    backward; evaluations are as they were.

    Args:
        most: times at most. In a share of [`ONCE`] of the steps it is one, else drawn log-uniformly from 1 to it: the same
            in all processes and after a restart.
    """

    def __init__(self, most: float):
        self.most, self.step = most, contextlib.ExitStack()

    def times(self, seed: int, step: int) -> float:
        """How often each token is written in this step."""
        draw = random.Random(f"repeat {seed} {step}")
        return 1.0 if draw.random() < ONCE else self.most ** draw.random()

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.step.close()  # of a step that ended with an error
        self.step.enter_context(repeated(model, self.times(args.seed, state.global_step)))

    def on_step_end(self, args, state, control, **kwargs):
        self.step.close()


@contextlib.contextmanager
def repeated(model, times: float) -> Iterator[None]:
    """Within it, the gated delta memories of a model take in each token as if it came so many times in a row: of what was
    written before they keep what that many copies would leave.

    β becomes 1 − (1 − β)ⁿ and α αⁿ. Where α is below 1, the token's own copies do not decay.
    """
    layers = [] if times == 1 else [layer for layer in model.modules() if hasattr(layer, "memory_rates")]
    for layer in layers:
        layer.change_projections = functools.partial(_of_repeated, times)
    try:
        yield
    finally:
        for layer in layers:
            layer.change_projections = None


def _of_repeated(times: float, tokens: Projections) -> Projections:
    """A layer's projections with log β and log α of [`repeated`], `[batch, kv_heads, tokens, 2]`."""
    own: Any = tokens.log_weight
    log_beta, log_alpha = own.to(torch.promote_types(own.dtype, torch.float32)).unbind(-1)
    kept = torch.log1p(-log_beta.exp().clamp(max=1 - torch.finfo(log_beta.dtype).eps))
    log_beta = (-torch.expm1(times * kept)).clamp(min=SMALLEST).log()
    return tokens._replace(log_weight=torch.stack([log_beta, times * log_alpha], -1))


def check_rule(update_rule: str | None, needs: str = "--update_rule gated_delta") -> None:
    """UserError, which says what it `needs`, unless memories have this rule (`None`: there are none)."""
    if update_rule != "gated_delta":
        raise UserError(f"--repeat_up_to raises the learned rates of the gated delta rule: it needs {needs}")


def check_options(run, optimizer, config, context: int) -> None:
    """UserError when `--repeat_up_to` cannot do what it is for.

    Args:
        run, optimizer: the options of recipes/train.py; config: the model's; context: tokens of a row.
    """
    if run.repeat_up_to is None:
        return
    rule = config.update_rule if attention_of(config) == "infini" else None
    check_rule(rule, "--attention infini and --update_rule gated_delta")
    window = (config.local_segments + 1) * config.segment_length
    if context <= window:
        raise UserError(
            f"--repeat_up_to: rows have {context} tokens and the window sees {window}, so that no token reads the memory: "
            "prepare longer rows, or give a smaller --segment_length"
        )
    if optimizer.torch_compile:
        raise UserError("--repeat_up_to and --torch_compile do not go together: leave one of them out")
