"""What `recipes/convert.py` takes where an option is not given; imports nothing, for the command line shows it."""

DEFAULTS = {"segment_length": 256, "local_segments": 1, "sink_tokens": 4, "feature_map": "learned", "denominator": "shared"}
DEFAULTS |= {"memory_write": "learned", "gate_init": -2.0}  # nearly closed, a gate would hardly learn
# Where no memory is trained: which tokens are kept is all that is learned, and an adapter has little else
UNTRAINED = {"segment_length": 128, "local_segments": 1, "sink_tokens": 4}
NARROW_TO = (32, 64, 128)  # as far as they are shorter than a segment
LORA_RANK = 8
