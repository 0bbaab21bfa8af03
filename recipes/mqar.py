r"""Multi-query associative recall (MQAR) in zoology's setting: how much a memory recalls, and how
many bytes it needs.

    python recipes/mqar.py --mixers attention window gated_delta linear --out runs/mqar
    python recipes/mqar.py --mixers gated_delta --d_model 128 --out runs/mqar

A row tells pairs of a key and a value, 4 to 64 of them in training and up to 256 in 1,024 tokens in
the tests, and asks for every value once. The model has two layers: a gated short convolution, and
the mixer.

    attention                       full attention
    window                          the last --window tokens
    linear, delta, gated_delta      segments of --segment_length tokens, and a memory with this rule
    linear+conv, …                  the same with a short convolution inside the memory's layer

Each mixer is trained with each learning rate; the best counts. Stopped at any point and started
again with the same command, it goes on from the last epoch. Commands with other mixers, sizes or
learning rates may share OUT. Each run has a folder there with its state and result.json;
OUT/table.md compares the finished ones.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

from cli import SEED, UserError, exit_on_error, needed, option, parse_options, parse_yaml
from cli.model_options import MEMORY, UPDATE_RULES, given_options

# As associative_recall.model has them, whose import takes seconds; what tells most comes first
MEMORIES = [rule for rule in UPDATE_RULES if rule != "none"]  # "window" has none
MIXERS = ["attention", "window", *MEMORIES, *(f"{rule}+conv" for rule in MEMORIES)]
DECIDED = ("segment_length", "update_rule", "memory_conv", "layers", "mask_special_tokens")
WIDTHS = ("head_dim", "value_dim")
SHORT = {"d_model": "d", "heads": "h", "head_dim": "k", "value_dim": "v"}  # in the names of runs
SHORT |= {"segment_length": "s", "window": "w", "precision": ""}
STATE_TOKENS = 1024  # after which the state is counted
WIDE, LONG = {"at_least": 1, "at_most": 2**16}, {"at_least": 1, "at_most": 2**20}
RATES = [1e-3, 3.16e-3, 1e-2, 3.16e-2]  # which fall as a cosine
TESTS = "64x4x1000 64x8x1000 64x16x1000 128x32x1000 256x64x1000 512x128x1000 1024x256x1000"
TRAIN = "64x4x100000 128x8x20000 256x16x20000 256x32x20000 256x64x20000"


@dataclass
class MQAROptions:
    out: str = needed("Folder of all runs; those that are there go on.", group="output")
    mixers: list[str] = option(MIXERS, "What is compared.", choices=MIXERS, group="model")
    d_model: int = option(64, "Width.", **WIDE)
    heads: int = option(2, "Heads of the mixer; must divide the width.", **WIDE)
    head_dim: int | None = option(
        None, "Of a head's queries and keys; default: --d_model / --heads.", **WIDE
    )
    value_dim: int | None = option(None, "Of a head's values; default: as wide as keys.", **WIDE)
    segment_length: int = option(16, "Tokens of a segment, for the memories.", **LONG)
    window: int = option(
        32, "window: tokens that a token sees; 32 take about as many bytes as the memories.", **LONG
    )
    memory: list[str] = option(
        [], "More options of the memories, NAME=VALUE: gate_init=-2 feature_map=exp."
    )
    learning_rates: list[float] = option(
        RATES, "Tried until one is above --stop_above.", greater_than=0, group="training"
    )
    epochs: int = option(32, "Passes over the training rows, at most.", **LONG)
    stop_above: float = option(
        0.99, "Mean accuracy of the tests above which a training ends.", at_least=0, at_most=1
    )
    batch_size: int = option(256, "Rows of a step.", **LONG)
    precision: str = option(
        "float32",
        "Of the products with the output weights, half of the work. All else is float32.",
        choices=["float32", "bf16"],
    )
    seed: int = option(123, "Seed of rows, weights and dropout; zoology's is 123.", **SEED)
    vocabulary: int = option(
        8192, "Tokens: half keys, half values.", at_least=8, at_most=2**24, group="data"
    )
    train: list[str] = option(
        TRAIN.split(), "Training rows: LENGTHxPAIRSxROWS, tokens of a row, pairs in it, rows."
    )
    test: list[str] = option(TESTS.split(), "Test rows, likewise.")
    threads: int | None = option(
        None, "Of the CPU; default: its cores.", at_least=1, at_most=1024, group="machine"
    )
    use_cpu: bool = option(False, "Train on the CPU even where there is a GPU.")


@exit_on_error(when_stopped="the same command goes on from the last epoch")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(MQAROptions, description=__doc__, argv=argv)
    memory = {"segment_length": options.segment_length, **memory_options(options.memory)}
    if options.d_model % options.heads:
        raise UserError(f"--heads {options.heads} must divide --d_model {options.d_model}")

    import torch

    from associative_recall.model import mixer_config
    from associative_recall.report import write_report
    from associative_recall.rows import make_all_rows, read_parts
    from support import measurement
    from support.stages import claim_folder
    from training.run_folder import say

    parts = [
        read_parts(getattr(options, name), name, options.vocabulary) for name in ("train", "test")
    ]
    sizes = options.d_model, options.heads, options.window, memory
    widths = given_options(options, WIDTHS)
    configs = {mixer: mixer_config(mixer, *sizes, **widths) for mixer in options.mixers}
    claim_folder(Path(options.out), "mqar.py")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = "cpu" if options.use_cpu or not torch.cuda.is_available() else "cuda"
    if device == "cpu":
        measurement.keep_freed_memory()

    @functools.cache
    def rows() -> tuple:
        say(f"making {sum(part.rows for both in parts for part in both):,} rows")
        return make_all_rows(*parts, options.vocabulary, options.seed)

    for mixer, config in configs.items():
        for rate in options.learning_rates:
            result = run(options, mixer, config, memory, rate, rows, device)
            if result["accuracy"] > options.stop_above:
                break
        table = write_report(Path(options.out), setting_of(options))
    print(table)
    say(f"files    {options.out}/table.md")


def memory_options(texts: list[str]) -> dict:
    """The memory's options from NAME=VALUE texts; UserError for an unknown one, or one that another
    option sets."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        known = [name for name in MEMORY if name not in DECIDED]
        if not equals or name not in known or name in found:
            raise UserError(
                f"--memory {text}: give NAME=VALUE, each name once, of {', '.join(known)}"
            )
        found[name] = parse_yaml(value, f"--memory {text}")
    return found


def setting_of(options: MQAROptions) -> dict:
    """The options that runs must share to be compared."""
    names = ("vocabulary", "train", "test", "seed", "batch_size", "epochs", "stop_above")
    return {name: getattr(options, name) for name in names}


def run(
    options: MQAROptions, mixer: str, config, memory: dict, rate: float, rows, device: str
) -> dict:
    """The result of one training, which is read from its folder, or trained or continued there.

    Args:
        config: of the mixer; memory: its options, for the run's name; rate: the learning rate.
        rows: makes the training and test rows, once.
    """
    import torch

    from associative_recall.model import Recaller
    from associative_recall.report import ENTRIES, REMEDY
    from associative_recall.training import train
    from support import measurement
    from support.stages import locked_folder, read_json, sealed, write_json
    from training.run_folder import OPTIONS, RESULT, check_same_run, say

    shape = {"d_model": options.d_model, "heads": options.heads, **given_options(options, WIDTHS)}
    own = {"window": options.window} if mixer == "window" else {}
    shape |= memory if config.has_memory else own
    shape["precision"] = options.precision
    words = (f"{SHORT.get(name, f'{name}=')}{value}" for name, value in shape.items())
    model_name = "-".join([mixer, *words])
    folder, setting = Path(options.out) / f"{model_name}-lr{rate:g}", setting_of(options)
    identity = {**setting, "mixer": mixer, **shape, "learning_rate": rate}
    check_same_run(folder, identity)
    with locked_folder(folder):
        say(f"{folder}: {'finished' if (folder / RESULT).exists() else f'training on {device}'}")
        if (folder / RESULT).exists():
            return read_json(folder / RESULT, ENTRIES, REMEDY)
        write_json(folder / OPTIONS, identity)
        torch.manual_seed(options.seed)
        model = Recaller(config, options.vocabulary).to(device)
        history = train(model, *rows(), options, rate, folder / "state.pt")
        last = dict(history[-1])
        result = {"model": model_name, "mixer": mixer, "setting": setting, "options": identity}
        result |= {"learning_rate": rate, "epochs": last.pop("epoch"), "history": history}
        result |= {"diverged": last.pop("loss") is None, **last, "state_tokens": STATE_TOKENS}
        result["tokens_per_second"] = round(last["tokens"] / last["seconds"], 1)
        result["state_bytes"] = model.state_bytes(STATE_TOKENS)
        result["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        result["threads"] = torch.get_num_threads()
        result |= {**measurement.peak_memory(), **measurement.environment()}
        write_json(folder / RESULT, sealed(result))
        return result


if __name__ == "__main__":
    main()
