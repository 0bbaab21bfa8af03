"""The architecture in a model card: what config.json says, in words, and the gates."""

from types import SimpleNamespace

from hf_infini.configurations import attention_of, context_limit
from support.markdown import markdown_table

from .run import Run

SCORES = {
    "scaled_dot": "scaled dot product, qᵀk / √d",
    "dot": "dot product, qᵀk",
    "general": "general, qᵀWk",
    "additive": "additive, vᵀ tanh(W[q; k])",
}
POSITIONS = {  # of causal_mha, filled from its configuration
    "learned": "learned, one for each of {n_positions:,} places",
    "sinusoidal": "sinusoidal, added to the token embeddings",
    "relative_key": "relative: a learned vector for each distance up to {max_distance} is added to the keys",
    "t5": "relative: a learned bias for each of {num_buckets} buckets of distances is added to the scores (T5)",
    "alibi": "ALiBi: scores fall linearly with the distance",
    "rope": "rotary (RoPE), base {rope_theta:g}",
    "none": "none",
}


def kind_of(config: dict) -> str:
    """self, global, local, infini or none."""
    return attention_of(SimpleNamespace(**config))


def limit_of(config: dict) -> int | None:
    """The most tokens that the model's positions reach, None without a limit."""
    return context_limit(SimpleNamespace(**config))


def model_section(run: Run) -> str:
    return f"## Model\n\n{markdown_table(['', ''], describe_model(run.config, run.result, run.context), left=2)}"


def describe_model(config: dict, result: dict, context: int) -> list[tuple[str, str]]:
    """Label and value of what config.json says about the architecture; `context` are the tokens of a training row."""
    c, kind = config, kind_of(config)
    attention = dict.fromkeys(("self", "global"), "causal self-attention over the whole context") | {
        "local": f"causal self-attention over the last {c.get('sliding_window')} tokens, the token itself included",
        "none": "none: a block is its feed-forward alone, and a token sees only itself",
    }
    rows = [("Model type", f"`{c['model_type']}`"), ("Attention", attention.get(kind) or _infini_attention(c))]
    if kind == "infini":
        rows += _memory(c)
    if c["model_type"] == "causal_mha":
        rows += [] if kind == "none" else [("Score", SCORES[c["score"]])]
        rows.append(("Position encoding", POSITIONS[c["position_encoding"]].format(**c)))
    else:
        places = {"segment": "learned, the place in the segment", "rope": POSITIONS["rope"].format(rope_theta=10_000)}
        encoding = places.get(c.get("position_encoding"), "learned, the place in the text")
        rows += [("Score", SCORES["scaled_dot"]), ("Position encoding", encoding)]
    any_length = limit_of(c) is None
    return rows + [
        ("Layers × width × heads", f"{c['n_layer']} × {c['n_embd']} × {c['n_head']}"),
        ("Feed-forward", f"{c.get('n_inner') or 4 * c['n_embd']:,} wide, {c['activation_function']}"),
        ("Output head", "the token embedding" if c.get("tie_word_embeddings", True) else "a matrix of its own"),
        ("Parameters", f"{result['parameters']:,}"),
        ("Vocabulary", f"{c['vocab_size']:,} tokens"),
        ("Context", f"{context:,} tokens in training, any number in use" if any_length else f"{c['n_positions']:,} tokens"),
    ]


def segment_length(config: dict) -> int:
    return config.get("segment_length") or config["n_positions"] // config["n_segments"]


def head_dim(config: dict) -> int:
    return config["n_embd"] // config["n_head"]


def _infini_attention(config: dict) -> str:
    words = [f"Infini-attention: segments of {segment_length(config):,} tokens", f"{config['update_rule']} update"]
    if config["local_segments"]:
        more = "s" if config["local_segments"] > 1 else ""
        words.append(f"the local window holds {config['local_segments']} earlier segment{more}")
    if config.get("feature_map", "elu") != "elu":
        words.append(f"{config['feature_map']} features")
    if config.get("denominator", "separate") == "shared":
        words.append("one normaliser for window and memory")
    if config.get("memory_write", "equal") == "learned":
        words.append("learned weights of what is written")
    if config.get("memory_init", "zeros") != "zeros":
        words.append(f"{config['memory_init']} start of the memory")
    if config.get("layers") is not None:
        words.append(f"in the layers {', '.join(map(str, config['layers']))} (from 0)")
    return ", ".join(words)


def _memory(config: dict) -> list[tuple[str, str]]:
    layers = config["n_layer"] if config.get("layers") is None else len(config["layers"])
    heads, size = layers * config["n_head"], head_dim(config)
    memory = f"{size} × {size} + {size} numbers a head, {heads * size * (size + 1):,} in all, whatever was read"
    rows = [("Memory", memory)]
    if "memory_conv" in config:
        taps = config["memory_conv"]
        rows.append(("Short convolution", f"over {taps} tokens, added to the input of these layers" if taps else "none"))
    return rows


def gates_table(gates: dict[str, list[float]]) -> str:
    """sigmoid(gate), a line for each layer and a column for each head."""
    heads = max(map(len, gates.values()))
    rows = [[layer, *(f"{value:.3f}" for value in values)] for layer, values in gates.items()]
    return markdown_table(["layer", *(f"head {head}" for head in range(heads))], rows, left=1)
