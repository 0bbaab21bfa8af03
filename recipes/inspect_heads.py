r"""Shows what every head of a trained model does with a text: one HTML page to look around in.

    python recipes/inspect_heads.py --model runs/infini
    python recipes/inspect_heads.py --model runs/infini --text_file livro.txt --max_tokens 300 \
        --out heads
    python recipes/inspect_heads.py --model gpt2 --text "The cat sat on the mat." \
        --layers 0 5 11 --out gpt2_heads
    python recipes/inspect_heads.py --model folder --adapter runs/kept --text_file livro.txt \
        --layers 12 --picture 12 4

Writes OUT/heads.html, which needs no other file and no network: a heat map of every head's
attention weights with their tokens, and, with Infini-attention, where each token is as each segment
is read (a sink, in the window, kept, or in the memory), what every older token weighs through the
memory, the memory's share of each head's output, its norm after every segment, and the gates.
--picture also draws what one head keeps. The numbers themselves, context vectors included, come
from `hf_infini.tools.inspection.inspect_attention`. Models: every decoder that goes with
Infini-attention, with it or without, and causal_mha.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from cli import ADAPTER, UserError, exit_on_error, option, parse_options
from cli.names import home_of

LARGEST_PAGE = 100e6  # bytes; browsers take long over more
TITLE = "<title>Attention heads: "  # of every page
TOKENS, MOST_TOKENS = 200, 1000  # read by default: the second where the model's segments are long
# Read without --text, repeated until it reaches the memory; names and numbers return in it
STORY = """A biblioteca da rua do Porto abre às oito horas. Marina chega cedo, senta-se perto \
da janela e abre um livro de mapas. O rio que passa pela cidade nasce na serra, atravessa três \
vales e encontra o mar depois de noventa quilômetros. Na mesa ao lado, Tomás escreve uma carta \
para a irmã, que mora em Recife e estuda o clima. Ele conta que choveu durante doze dias, que a \
ponte velha foi fechada e que a feira mudou de lugar. Marina pergunta onde o rio nasce. Na \
serra, diz Tomás, e mostra no mapa os três vales. Às seis horas a biblioteca da rua do Porto \
fecha, e os dois voltam para casa pela ponte nova.
"""


@dataclass
class Options:
    model: str = field(metadata={"help": "Model folder or name on the Hub.", "group": "model"})
    adapter: str | None = option(None, ADAPTER)
    text: str | None = option(
        None, "The text, or --text_file; default: a story in Portuguese.", group="text"
    )
    text_file: str | None = option(None, "UTF-8 file with the text. Or --text.")
    max_tokens: int | None = option(
        None,
        f"Most tokens to read, from the text's beginning; default: {TOKENS}, or until a whole "
        f"segment reads the memory, but {MOST_TOKENS:,} at most.",
        greater_than=0,
    )
    layers: list[int] | None = option(
        None, "The layers to look into, from 0; default: all.", at_least=0, group="model"
    )
    picture: list[int] | None = option(
        None,
        "A layer and a head: also writes OUT/kept_LAYER_HEAD.png, the text with the tokens "
        "that it keeps.",
        at_least=0,
    )
    device: str = option(
        "auto", "cpu, cuda, cuda:1, …; auto: a GPU where there is one.", group="machine"
    )
    out: str | None = option(
        None,
        "Folder to write into; default: heads, in the folder of the adapter or model.",
        group="output",
    )


@exit_on_error(when_stopped="nothing was written; the same command starts again")
def main(argv: list[str] | None = None) -> None:
    (options,) = parse_options(Options, description=__doc__, argv=argv)
    if options.text is not None and options.text_file is not None:
        raise UserError("give one of --text and --text_file, not both")
    if options.picture and len(options.picture) != 2:
        raise UserError("--picture takes two numbers, a layer and a head: --picture 12 4")
    text = options.text
    if options.text_file is not None:
        text = Path(options.text_file).read_text(encoding="utf-8").removesuffix("\n")
    out = Path(options.out or home_of(options) / "heads")

    import torch

    from corpora.tokenization import encode_texts
    from evaluation import inference
    from hf_infini.options import context_limit
    from hf_infini.tools.inspection import inspect_attention
    from hf_infini.tools.inspection.page import inspection_page
    from plots.kept import plot_kept
    from support.stages import new_file

    page = out / "heads.html"
    if page.exists() and TITLE not in page.read_text(encoding="utf-8", errors="replace"):
        raise UserError(
            f"--out: {page} exists and is not from this recipe: move it away, or "
            "choose another --out"
        )
    model, tokenizer = inference.load_model(options.model, options.device, options.adapter)
    length = model.config.segment_length if getattr(model.config, "has_memory", False) else 0
    window = inference.first_beyond(model.config) if length else 0
    wanted = options.max_tokens or max(TOKENS, min(window + length, MOST_TOKENS))
    if text is None:
        wanted = min(wanted, context_limit(model.config) or wanted)
        once = len(tokenizer(STORY, add_special_tokens=False)["input_ids"])
        text = STORY * -(-wanted // once)
    ids = encode_texts(tokenizer, [text], split_special_tokens=False)[0].tolist()
    read = ids[:wanted]
    if not read:
        raise UserError("the text is empty: there is no token to look at")
    inference.check_length(model.config, len(read))
    print(f"{len(read):,} of the text's {len(ids):,} tokens", file=sys.stderr)
    if length and not inference.reads_memory(model.config, len(read)):
        print(f"no token reads the memory: that takes more than {window:,} tokens", file=sys.stderr)
    try:
        inspection = inspect_attention(
            model, torch.tensor([read]), tokenizer, layers=options.layers
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    if all(layer.weights is None for layer in inspection.layers.values()):
        raise UserError(
            f"{options.model} has no attention heads in these layers (attention='none')"
        )

    if options.picture:
        layer, head = options.picture
        fates = getattr(inspection.layers.get(layer), "fates", None)
        if fates is None or head >= fates.shape[1]:
            raise UserError(
                f"--picture {layer} {head}: there is no such head with a memory in "
                "the --layers that are read"
            )
    content = inspection_page(inspection, title=Path(options.model).name).encode("utf-8")
    if len(content) > LARGEST_PAGE:
        sizes = f"{len(content) / 1e6:,.0f} MB, more than {LARGEST_PAGE / 1e6:,.0f}"
        raise UserError(f"the page would have {sizes}: choose fewer --layers or --max_tokens")
    out.mkdir(parents=True, exist_ok=True)
    with new_file(page) as part:
        part.write_bytes(content)
    print(f"{page} ({len(content) / 1e6:.1f} MB): open it in a browser")
    if options.picture:
        with new_file(out / f"kept_{layer}_{head}.png") as part:
            plot_kept(inspection, layer, head, part)


if __name__ == "__main__":
    main()
