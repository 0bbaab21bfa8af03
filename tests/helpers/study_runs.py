"""The arguments of a study at toy size."""

from pathlib import Path

STEPS = 40
BEST = Path(__file__).parents[2] / "recipes" / "configs" / "study_best.yaml"
FLAGS = ["--n_layer", 2, "--n_embd", 32, "--n_head", 2, "--eval_steps", 10, "--save_steps", 4]
FLAGS += ["--use_cpu", "--precision", "float32", "--data_prose_filter", "false", "--data_context", 64]
FLAGS += ["--data_validation", 0.2]


def with_short_segments(base, variant: str) -> str:
    """The variant, where it is `best` with segments of which a toy row has several."""
    if variant != "best":
        return variant
    file = Path(base) / "best.yaml"
    file.write_text(BEST.read_text(encoding="utf-8").replace("segment_length: 64", "segment_length: 16"), encoding="utf-8")
    return str(file)


def arguments(base, *options, variants=("s1", "best"), flags=()) -> list[str]:
    own = ["--scale", "mini", "--source", base / "text.jsonl", "--out", base / "out", "--max_steps", STEPS]
    own += ["--variants", *(with_short_segments(base, variant) for variant in variants)]
    own += ["--largest_batch", "false", "--state_tokens", 32, 256, "--new_tokens", 20]
    own += ["--long_characters", 500, "--long_length", 512, "--prompt_words", 8, *options]
    return [*map(str, own), "--", *map(str, [*FLAGS, "--data_vocab_size", 300, *flags])]
