"""Which of the tokens that a document has had a question looks at: the choice that fills the places
of kept tokens from an archive.

The tokens of a document are in *blocks* of B, by their numbers. How much a question looks at a
block is

    w(block) = Σ over layers and key/value heads of
               max over the question's tokens q, and the heads of the group, of
               Σ over the block's tokens t of softmax_t(scaling · q · k_t)

without rotation, that is, as if all tokens were equally far, where the softmax is over all tokens
that have left the window, but sinks. The blocks with the largest w fill the places, all layers
alike; ties go to the earlier block.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .window import ScoreOptions, masked_scores


def block_weights(
    query: Tensor,
    keys: Iterable[tuple[Tensor, Tensor]],
    softmax: ScoreOptions,
    block_tokens: int,
) -> Tensor:
    """What the heads of a layer look at, `[blocks]`, float32: the sum over its key/value heads of w
    (see above).

    Args:
        query: `[heads, tokens, head_dim]`, un-rotated.
        keys: of successive spans of the document, from its beginning on, each but the last a whole
            number of blocks: keys `[kv_heads, tokens, head_dim]`, un-rotated, and which of these
            may be recalled, `[tokens]` bool.
        softmax: how they are compared; without positions.
        block_tokens: tokens in a block.
    """
    logs, whole = [], None
    for key, recalled in keys:
        # [kv_heads, heads of a group · tokens, keys]
        asked = query.unflatten(0, (key.shape[0], -1)).flatten(1, 2).to(key.dtype)
        scores = masked_scores(asked, key, None, softmax).float()
        scores = scores.masked_fill(~recalled, -torch.inf)
        missing = -scores.shape[-1] % block_tokens
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
        logs.append(scores.unflatten(-1, (-1, block_tokens)).logsumexp(-1))
        of_span = logs[-1].logsumexp(-1, keepdim=True)
        whole = of_span if whole is None else torch.logaddexp(whole, of_span)
    if whole is None:
        return query.new_zeros(0, dtype=torch.float32)
    # Where nothing may be recalled all is −∞
    weights = (torch.cat(logs, -1) - whole).exp().nan_to_num(0.0)
    return weights.amax(1).sum(0)
