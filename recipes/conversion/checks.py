"""What `recipes/convert.py` refuses before anything is loaded or trained."""

import torch

from cli import UserError
from training import dilution, run_folder

from .evaluation import counted_beyond


def check(conversion) -> None:
    """UserError unless rows reach beyond the window, the options go together, and the folder is not another's.

    Args:
        conversion: a [`Conversion`].
    """
    run_folder.check_same_run(conversion.out, conversion.identity)
    options, memory, window = conversion.options, conversion.memory, conversion.window
    dilution.check_given(options)
    if options.dilute_with is not None:
        dilution.check_rule(memory.get("update_rule", "linear"))
        if not options.together_steps:
            raise UserError("--dilute_with is of the training of all layers: give --together_steps")
    if conversion.fits_score and conversion.context <= window:
        raise UserError(
            f"--keep_score {memory['keep_score']} is fitted to rows longer than the window with what is kept, {window} "
            f"tokens, and those of --data have {conversion.context}: prepare longer rows, or give a smaller --kept_tokens"
        )
    if conversion.trains and conversion.context < 2 * window:
        raise UserError(
            f"--data has rows of {conversion.context} tokens, and the window sees {window}: rows must have twice as many, "
            "so that there is something beyond it. Prepare longer rows, or give a smaller --segment_length"
        )
    _check_evaluation(conversion)
    lengths, longest, sinks = options.narrow_to, memory["segment_length"], memory["sink_tokens"]
    if conversion.trains and any(options.narrow) and not (lengths and sinks < min(lengths) <= max(lengths) < longest):
        raise UserError(
            f"--narrow_to {' '.join(map(str, lengths))}: give lengths below --segment_length {longest} and above "
            f"--sink_tokens {sinks}, or --narrow 0 0"
        )


def _check_evaluation(conversion) -> None:
    """UserError unless there is something to evaluate in every folder."""
    given, window = conversion.options.evaluation_from, conversion.window
    first = given or window
    count, device = conversion.options.evaluation_rows, torch.device("cpu")
    for folder, rows in conversion.first_rows("evaluation", count, device).items():
        tokens = rows.shape[2]
        if given is not None and not window <= first < tokens:
            raise UserError(
                f"--evaluation_from {first}: the window sees {window} tokens, and the rows of {folder} have {tokens}; give "
                "a position between"
            )
        if not any(counted_beyond(rows, first)):
            raise UserError(
                f"{folder}: in its first {len(rows)} validation rows, of {tokens} tokens, there is nothing to predict from "
                f"position {first} on, and the window sees {window}: give longer rows (--evaluation_data), or more of them "
                "(--evaluation_rows)"
            )
