"""The largest batch that a training step of a model has memory for, by the real peak of fresh processes.

    python recipes/batch_probe.py --model runs/infini --context 1024 --budget_gib 8
    python recipes/batch_probe.py --model runs/infini --context 1024 --budget_gib 8 --rows 16

A process takes one step of --rows rows, as recipes/train.py takes it (forward, backward, AdamW whose state is already
there, bf16 autocast or float32), of a model with the configuration in --model and random weights. Its peak is all that it
has held: on a CPU the resident set, libraries included (two processes can differ by some percent; recipes/train.py takes
more, as it keeps freed memory for speed); on a GPU torch.cuda.max_memory_allocated. Without --rows, the largest number of
rows within the budget is searched for, a process for every attempt. Prints one JSON object; a step that needs more than the
budget or the machine has ends with exit status 17.
"""

import json

from cli import UserError, exit_on_user_error, parse_options
from training.batch_probe import Options


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)

    from training.batch_probe import largest_batch, measure_step

    for name in ("budget_gib", "context", "rows"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name} must be greater than 0, got {value}")
    if options.rows is not None:
        print(json.dumps({"rows": options.rows, "peak_bytes": measure_step(options)}))
        return
    print(json.dumps(largest_batch(options)))


if __name__ == "__main__":
    main()
