"""A score that a layer has learned: w·x, with x the input of its projections."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .score import TokenScore, rounded


class Score(TokenScore):
    """A w for each key/value head, which starts at zero: then the earliest tokens are kept."""

    keep_score = "learned"
    learns = ("keep_weight",)

    def of_inputs(self, inputs: Tensor, **parameters: Tensor) -> Tensor:
        """In float64, where the order of a sum changes little, and rounded, which also takes in
        what calls of other lengths change in the inputs of later layers. `inputs`: x, `[B, tokens,
        width]`; `parameters`: w, `[K, width]`, by its name."""
        [weight] = parameters.values()
        # Apple's GPUs have no float64
        wide = torch.float32 if inputs.device.type == "mps" else torch.float64
        with torch.autocast(inputs.device.type, enabled=False):
            product = F.linear(inputs.detach().to(wide), weight.detach().to(wide))
        return rounded(product.transpose(1, 2)).unsqueeze(-1)

    def first(self, key: Tensor, value: Tensor, learned_score: Tensor | None) -> Tensor:
        assert learned_score is not None  # as is checked
        wide = torch.promote_types(key.dtype, torch.float32)
        return learned_score.to(wide).detach()

    def naive_first(self, key, value, learned_score):
        return [learned_score[0]]
