r"""Continues prompts of any length with a trained model: greedy or sampled.

    python recipes/generate.py --model runs/infini --prompt "A cidade de São Paulo" \
        --do_sample true --top_p 0.9
    python recipes/generate.py --model runs/infini --prompt_file livro.txt --max_new_tokens 200
    python recipes/generate.py --model runs/infini --prompt "O rio" "A serra" --json true
    cat livro.txt | python recipes/generate.py --model runs/infini

Standard output receives only the text (with --json one object per continuation), standard error
everything else: before each continuation the end of its prompt, in lines that begin with ">"
(--json has it in its objects). A single continuation appears while it is made. A prompt longer than
--chunk is read in pieces into the model's cache. A model with learned positions takes prompts up to
its context, others take any length.

What was read of a long text once is asked by the command `hf-infini` (ask, read, continue).
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cli import ADAPTER, SEED, UserError, exit_on_error, needed, option, parse_options

SHOWN = 300  # characters of a prompt
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # any token, by its probability


@dataclass
class Options:
    model: str = needed("Model folder or name on the Hub.", group="model")
    adapter: str | None = option(None, ADAPTER)
    prompt: list[str] | None = option(
        None, "Prompts; without --prompt_file too, standard input is read.", group="prompt"
    )
    prompt_file: str | None = option(None, "UTF-8 file with the prompt.")
    max_new_tokens: int = option(100, "Most tokens to add.", greater_than=0, group="continuation")
    do_sample: bool = option(False, "Draw each token by its probability, or take the likeliest.")
    temperature: float | None = option(
        None, "Sampling: below 1 likelier tokens, above 1 rarer ones; default: 1.", greater_than=0
    )
    top_k: int | None = option(
        None, "Sampling: among this number of the likeliest tokens; default: all.", greater_than=0
    )
    top_p: float | None = option(
        None, "Sampling: among the likeliest of this total; default: 1.", greater_than=0, at_most=1
    )
    repetition_penalty: float = option(
        1.0, "Above 1, tokens already in prompt or continuation become less likely.", greater_than=0
    )
    seed: int = option(0, "Seed of sampling.", **SEED)
    chunk: int = option(
        4096, "Tokens of the prompt per call of the model.", greater_than=0, group="machine"
    )
    batch_size: int = option(8, "Prompts per call of the model.", greater_than=0)
    device: str = option("auto", "cpu, cuda, cuda:1, …; auto: a GPU where there is one.")
    dtype: Literal["float32", "bfloat16"] = option("float32", "Of weights and cache.")
    json: bool = option(
        False, "Print objects with prompt, text and the number of new tokens.", group="output"
    )


@exit_on_error(when_stopped="what is printed above is all there is")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    if options.prompt is not None and options.prompt_file is not None:
        raise UserError("give --prompt or --prompt_file, not both")
    for name in SAMPLING:
        if getattr(options, name) is not None and not options.do_sample:
            raise UserError(f"--{name} has no effect on greedy search: add --do_sample true")
    prompts = read_prompts(options)

    from transformers import TextStreamer, logging, set_seed

    from evaluation import inference
    from hf_infini.options import context_limit

    model, tokenizer = inference.load_model(
        options.model, options.device, options.adapter, options.dtype
    )
    if context_limit(model.config) is None:
        # transformers warns of lengths beyond n_positions, which limits nothing here
        logging.set_verbosity_error()
    set_seed(options.seed)
    names = ("max_new_tokens", "do_sample", "repetition_penalty")
    arguments = {name: getattr(options, name) for name in names}
    if options.do_sample:  # whatever the model's generation config says
        given = {name: getattr(options, name) for name in SAMPLING}
        arguments |= SAMPLING | {name: value for name, value in given.items() if value is not None}
    streaming = len(prompts) == 1 and not options.json
    if streaming:
        show_prompt(prompts[0])
        arguments["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    arguments["prefill_chunk_size"] = options.chunk
    for start in range(0, len(prompts), options.batch_size):
        batch = prompts[start : start + options.batch_size]
        found = inference.continue_texts(model, tokenizer, batch, **arguments)
        for prompt, (text, count) in zip(batch, found, strict=True) if not streaming else ():
            if options.json:
                found = {"prompt": prompt, "text": text, "new_tokens": count}
                text = json.dumps(found, ensure_ascii=False)
            else:
                show_prompt(prompt)
            print(text, flush=True)


def read_prompts(options: Options) -> list[str]:
    """The prompts, from the flag, the file or standard input. A file's last line break is not part
    of its prompt."""
    if options.prompt is not None:
        return options.prompt
    file = options.prompt_file
    try:
        read = sys.stdin.buffer.read if file is None else Path(file).read_bytes
        text = read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        place = "standard input" if file is None else f"--prompt_file {file}"
        raise UserError(f"cannot read {place}: {error}") from error
    return [text.removesuffix("\n")]


def show_prompt(prompt: str) -> None:
    """Prints the end of a prompt on standard error, each line after a ">"."""
    text = prompt if len(prompt) <= SHOWN else f"… {prompt[-SHOWN:]}"
    print("\n".join(f"> {line}" for line in text.split("\n")), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
