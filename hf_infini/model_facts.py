"""What a configuration says of its model, whichever family the model belongs to."""


def attention_of(config) -> str:
    """A model's kind of attention: "self" or "infini" of a GPT-2, the configuration's own word for it otherwise."""
    return {"gpt2": "self", "infini_gpt2": "infini"}.get(config.model_type) or config.attention


def context_limit(config) -> int | None:
    """The most tokens that a model's positions reach; None where they have no end: all but learned ones."""
    return getattr(config, "n_positions", None) if getattr(config, "position_encoding", "learned") == "learned" else None


def layer_kinds(config) -> list[str]:
    """What each layer's own attention sees, by transformers' names: "full_attention", "sliding_attention", …"""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return list(kinds)
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
