"""Which backend computes the attention of a model's layers, and why."""

import torch

from ..compat.execution_device import device_of
from ..layers.memory_layer import memory_layers
from ..ops.backends import choose, forced_backend
from ..ops.backends.grid import attend_grid
from ..ops.checks import Model, check_types
from ..ops.state import Attended, AttentionCall
from ..options import check_number, context_limit


@check_types
def backend_of(model: Model, batch: int = 1, tokens: int = 1024) -> dict[str, str]:
    """By the name of each layer with a memory, which backend computes a call of `[batch, tokens]`
    that begins a text, without padding or a cache, and with gradients in training (the last one);
    and why: "step: not one token for every row; grid: plain torch, …". The model is called once, by
    plain torch. ValueError where no layer has a memory, or a number is below 1."""
    for name, number in {"batch": batch, "tokens": tokens}.items():
        check_number(name, number, {"at_least": 1})
    reasons, layers = (
        [],
        [name for name, layer in memory_layers(model).items() if layer.options.has_memory],
    )
    if not layers:
        raise ValueError(
            f"a {type(model).__name__} has no layer with a memory: patch_model() gives it some."
        )

    def explain(call: AttentionCall) -> Attended:
        reasons.append(choose(call)[1])
        return attend_grid(call)

    config, tokens = model.config, min(tokens, context_limit(model.config) or tokens)
    ids = torch.full(
        (batch, tokens), config.vocab_size // 2, device=device_of(model.get_input_embeddings())
    )
    with torch.set_grad_enabled(model.training), torch.random.fork_rng(), forced_backend(explain):
        model(input_ids=ids, use_cache=False)
    return dict(zip(layers, reasons, strict=True))
