"""The site's figures and tables, made from the package at every build and so never of an older one:
a hook of mkdocs.

A page shows a figure as `![…](figures/NAME.png)`; a line `<!-- table: NAME -->` becomes a table.
Nothing here depends on the speed of the machine: what is measured are bytes, parameters, operations
and what depends on what.
"""

import functools
import io
import re
import sys
from pathlib import Path

RECIPES = str(Path(__file__).parents[1] / "recipes")  # of which a few functions are taken
PLACE = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)
SIZES = dict(
    vocab_size=256,
    n_positions=1024,
    n_embd=128,
    n_layer=4,
    n_head=2,
    bos_token_id=None,
    eos_token_id=None,
)
SEGMENT = dict(segment_length=128, position_encoding="segment")


def png(figure) -> bytes:
    from plots.style import save

    buffer = io.BytesIO()
    save(figure, buffer)
    return buffer.getvalue()


def model(**options):
    """GPT-2 of `SIZES`, with random weights; with options, the same with Infini-attention."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from hf_infini import patch_model

    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(**SIZES | {"initializer_range": 0.2})).eval()
    return patch_model(plain, **options) if options else plain


def cache_sizes(reader, contexts: list[int]) -> list[int]:
    """Bytes of the cache after each of these numbers of tokens, which the model reads one after the
    other."""
    import torch

    from hf_infini.compat.cache_name import CACHE, cache_of
    from support.measurement import cache_bytes

    cache, sizes = None, []
    with torch.inference_mode():
        for begin, end in zip([0, *contexts], contexts, strict=False):
            ids = torch.randint(SIZES["vocab_size"], (1, end - begin))
            cache = cache_of(reader(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache}))
            sizes.append(cache_bytes(cache))
    return sizes


# --- figures
# --------------------------------------------------------------------------------------------------


def reach(tokens: int = 24) -> bytes:
    """Which tokens a token sees by softmax, from the inspected weights, and which through the
    memory: those on which the attention's output depends without such a weight."""
    import torch
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    from hf_infini import inspect_attention
    from plots.style import COLOURS, SMALL, WIDTH, new_figure, set_panel_title

    seen, by_memory = COLOURS[0], COLOURS[4]
    kinds = {
        "GPT-2": {},
        "segments of 8": dict(segment_length=8),
        "the same,\nlocal_segments=1": dict(segment_length=8, local_segments=1),
    }
    figure, panels = new_figure("Which tokens a token sees", "", 1, 3, (WIDTH, 2.9), sharey=True)
    for axes, (name, options) in zip(panels.flat, kinds.items(), strict=True):
        reader = model(**options)
        softmax = (
            inspect_attention(reader, torch.arange(tokens)[None]).layers[0].weights[0].sum(0) > 0
        )
        outputs, inputs = [], torch.randn(1, tokens, SIZES["n_embd"])
        reader.transformer.h[0].attn.register_forward_hook(
            lambda *call, kept=outputs: kept.append(call[-1][0])
        )

        def attended(embeddings, reader=reader, outputs=outputs):
            reader(inputs_embeds=embeddings)
            return outputs.pop().sum((0, 2))

        jacobian = torch.autograd.functional.jacobian(attended, inputs)
        depends = jacobian[:, 0].abs().amax(-1) > 0  # [output token, input token]
        shown = torch.where(softmax, 1, torch.where(depends, 2, 0))
        axes.imshow(shown.numpy(), cmap=ListedColormap(["white", seen, by_memory]), vmin=0, vmax=2)
        axes.grid(False)
        axes.set(
            xlabel="token that is seen", xticks=range(0, tokens, 8), yticks=range(0, tokens, 8)
        )
        set_panel_title(axes, name)
    panels[0, 0].set_ylabel("token that looks")
    patches = [
        Patch(color=seen, label="by softmax"),
        Patch(color=by_memory, label="through the memory"),
    ]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=2, frameon=False, fontsize=SMALL
    )
    return png(figure)


def growth() -> bytes:
    """The cache's size over the context; GPT-2 stops at its `n_positions`."""
    from plots.style import draw_line, label_lines, new_figure

    contexts = [64, 128, 256, 512, 1024]
    kinds = {
        "GPT-2, dynamic cache": {},
        "Infini-attention, segments of 128": SEGMENT,
        "the same, local_segments=1": SEGMENT | dict(local_segments=1),
        "the same, only in layers 0 and 2": SEGMENT | dict(layers=[0, 2]),
    }
    figure, axes = new_figure(
        "What the cache takes", "one row, MiB; GPT-2 stops at its 1,024 positions"
    )
    for name, options in kinds.items():
        reader, lengths = model(**options), contexts + ([2048, 4096] if options else [])
        draw_line(axes, lengths, [size / 2**20 for size in cache_sizes(reader, lengths)], name)
    axes.set(xlabel="tokens read", ylabel="MiB", xscale="log", yscale="log")
    axes.set_xticks([64, 256, 1024, 4096], ["64", "256", "1,024", "4,096"])
    axes.set_yticks([0.25, 0.5, 1, 2, 4, 8], ["0.25", "0.5", "1", "2", "4", "8"])
    axes.minorticks_off()
    label_lines(axes)
    return png(figure)


def memory(segments: int = 6) -> bytes:
    """What the inspection shows of a memory: its norm before each segment that reads it, and its
    share of these tokens' outputs."""
    import torch

    from hf_infini import inspect_attention
    from plots.style import draw_line, label_lines, new_figure, set_panel_title

    length = 8
    reader = model(segment_length=length)
    layer = inspect_attention(
        reader, torch.randint(SIZES["vocab_size"], (1, length * segments))
    ).layers[0]
    norms, shares = layer.memory_norm[0].numpy(), layer.memory_share[0].numpy()
    figure, panels = new_figure(
        "A memory that grows", f"norm of the memory; segments have {length} tokens", 2
    )
    (above,), (below,) = panels
    set_panel_title(
        below, "the memory's share of a token's output; the first segment finds it empty"
    )
    for head in range(SIZES["n_head"]):
        draw_line(above, range(1, segments + 1), norms[head, 1:], f"head {head}")
        draw_line(below, range(length, length * segments), shares[head, length:], f"head {head}")
    above.set(xlabel="segments written", ylabel="Frobenius norm")
    below.set(
        xlabel="token", ylabel="share", ylim=(0, 1), xticks=range(0, length * segments + 1, length)
    )
    for axes in (above, below):
        label_lines(axes)
    return png(figure)


def recall() -> bytes:
    """Hidden numbers found over the bytes of the cache: the tables of notes/kept-tokens.md, and no
    model runs. README has a copy in images/, which `python docs/figures.py` writes."""
    from plots.style import (
        WIDTH,
        draw_line,
        label_lines,
        new_figure,
        set_log_scale,
        set_panel_title,
        style_of,
    )
    from recall.tasks import wilson_interval

    text = (Path(__file__).parent / "notes" / "kept-tokens.md").read_text(encoding="utf-8")

    def rows_of(section: str) -> dict[str, list[str]]:
        part = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        rows = [
            [cell.strip(" *") for cell in line.strip("| ").split("|")]
            for line in part.splitlines()
            if line[:2] == "| "
        ]
        return {name: cells for name, *cells in rows}

    found, sizes = rows_of("Hidden numbers"), rows_of("Cost")
    ways = {
        "all tokens: grows": "all tokens",
        "window and sinks": "512: window and sinks",
        "252 of 512 tokens kept by the learned score": "512: 252 kept by the learned score",
        "half of the 252 by attention": "512: 252 kept, half by each score",
    }
    figure, panels = new_figure(
        "Hidden numbers found over the size of the cache", "", 1, 2, (WIDTH, 3.3), sharey=True
    )
    for axes, columns, length in zip(
        panels.flat, ((0, 2), (1, 3)), ("2,048", "8,192"), strict=True
    ):
        for number, (way, name) in enumerate(ways.items()):
            (size,) = next(cells for cache, cells in sizes.items() if cache.startswith(name))
            grown = re.search(rf"(\d+) after {length}", size)
            mebibytes = float(grown[1] if grown else size)
            # of 40 in each language
            correct = sum(int(re.match(r"\d+", found[name][column])[0]) for column in columns)
            share, low, high = (
                100 * part for part in (correct / 80, *wilson_interval(correct, 80))
            )
            draw_line(axes, [mebibytes], [share], way, **style_of(number))
            axes.vlines(mebibytes, low, high, color=style_of(number)["color"], linewidth=1.2)
        set_log_scale(axes.xaxis, [10, 200])
        axes.set(xlabel="cache, MiB", xlim=(9, 250), ylim=(0, 103))
        set_panel_title(axes, f"SmolLM2-135M, texts of {length} tokens")
    panels[0, 0].set_ylabel("found, % (95 %)")
    label_lines(panels[0, 0])
    return png(figure)


# --- tables
# --------------------------------------------------------------------------------------------------


def options_cost() -> str:
    """Parameters and cache of one change each, beside those of the model without it."""
    from support.markdown import markdown_table

    changes = {
        "GPT-2, without memory": None,
        '`segment_length=128, position_encoding="segment"`': {},
        "… `segment_length=32`": dict(segment_length=32),
        '… `update_rule="delta"`': dict(update_rule="delta"),
        '… `update_rule="gated_delta"`': dict(update_rule="gated_delta"),
        '… `update_rule="none"`': dict(update_rule="none"),
        '… `feature_map="exp"`': dict(feature_map="exp"),
        "… `local_segments=1`": dict(local_segments=1),
        "… `memory_conv=3`": dict(memory_conv=3),
        '… `feature_map="exp", memory_write="learned"`': dict(
            feature_map="exp", memory_write="learned"
        ),
        "… `layers=[0, 2]`": dict(layers=[0, 2]),
    }
    rows = []
    for name, change in changes.items():
        reader = model(**({} if change is None else SEGMENT | change))
        sizes = [f"{size / 1024:,.1f}" for size in cache_sizes(reader, [256, 1024])]
        rows.append([name, f"{reader.num_parameters():,}", *sizes])
    return markdown_table(
        ["model", "parameters", "cache after 256 tokens, KiB", "after 1,024"], rows, 1
    )


def segments_cost(tokens: int = 2048, width: int = 64) -> str:
    """Operations of one head's attention over a row, and its state, by segment length."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    from hf_infini import infini_attention
    from support.markdown import markdown_table

    def operations(function) -> float:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        count = lambda q, k, v, *args, out_shape=None, **kwargs: sdpa_flop_count(q, k, v)  # noqa: E731
        with (
            torch.inference_mode(),
            FlopCounterMode(display=False, custom_mapping={kernel: count}) as counter,
        ):
            function()
        return counter.get_total_flops() / tokens / 1000

    query, key, value = torch.randn(3, 1, 1, tokens, width)
    full = operations(lambda: scaled_dot_product_attention(query, key, value, is_causal=True))
    rows = []
    for length in (16, 32, 64, 128, 256, 512, 1024):
        call = functools.partial(infini_attention, query, key, value, torch.zeros(1), length)
        state = call(return_state=True)[1]
        rows.append(
            [
                str(length),
                str(tokens // length),
                f"{operations(call):,.0f}",
                f"{state.nbytes() / 1024:,.1f}",
            ]
        )
    rows.append(
        ["full attention", "1", f"{full:,.0f}", f"{(key.nbytes + value.nbytes) / 1024:,.1f}"]
    )
    return markdown_table(
        ["segment length", "segments", "thousand operations a token", "state, KiB"], rows, 1
    )


def families() -> str:
    """The families of decoders with Infini-attention, and those that are refused by name."""
    from hf_infini.models.families import PROBED, REFUSED
    from support.markdown import markdown_table

    rows = [["supported", ", ".join(f"`{name}`" for name in ("gpt2", *PROBED))]]
    rows += [
        [f"refused: {reason}", ", ".join(f"`{name}`" for name in names)]
        for reason, names in REFUSED.items()
    ]
    return markdown_table(["", "`model_type`"], rows, 0)


def estimates() -> str:
    """Cache of one text by the length of it, from sizes that the models' configurations have."""
    import torch
    from transformers import AutoConfig

    from hf_infini import estimate
    from support.markdown import markdown_table

    sizes = {  # layers, heads, heads of keys and values, width of a head
        "SmolLM2-135M": ("llama", 30, 9, 3, 64),
        "Llama-3.1-8B": ("llama", 32, 32, 8, 128),
        "Qwen3-8B": ("qwen3", 36, 32, 8, 128),
        "Gemma-3-4B: most layers have windows of 1,024": ("gemma3_text", 34, 8, 4, 256),
    }
    options = dict(cache_tokens=1024, keep_score="learned")
    rows = []
    for name, (kind, layers, heads, groups, width) in sizes.items():
        shape = dict(
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            head_dim=width,
        )
        window = {"sliding_window": 1024} if kind.startswith("gemma") else {}
        config = AutoConfig.for_model(
            kind, hidden_size=heads * width, dtype=torch.bfloat16, **shape, **window
        )
        found = [estimate(config, tokens, **options) for tokens in (8192, 131072, 1048576)]
        rows.append(
            [
                name,
                *(
                    f"{size / 2**20:,.0f}"
                    for size in (*(each.plain for each in found), found[-1].infini)
                ),
            ]
        )
    return markdown_table(
        ["MiB in bfloat16", "all of 8,192 tokens", "131,072", "1,048,576", "with 1,024 a head"],
        rows,
        1,
    )


# --- the hook
# --------------------------------------------------------------------------------------------------

FIGURES = {"reach": reach, "growth": growth, "memory": memory}
TABLES = {
    "options_cost": options_cost,
    "segments_cost": segments_cost,
    "families": families,
    "estimates": estimates,
}


@functools.cache
def made(name: str) -> bytes | str:
    """A figure or table, made once in a process however often `mkdocs serve` builds."""
    if RECIPES not in sys.path:  # mkdocs takes back what a hook adds while it is loaded
        sys.path.append(RECIPES)
    return (FIGURES | TABLES)[name]()


def on_files(files, config):
    from mkdocs.structure.files import File

    for name in FIGURES:
        files.append(File.generated(config, f"figures/{name}.png", content=made(name)))
    return files


def on_page_markdown(markdown, page, config, files):
    return PLACE.sub(lambda place: made(place[1]), markdown)


if __name__ == "__main__":
    sys.path.append(RECIPES)
    (Path(__file__).parent / "images" / "recall.png").write_bytes(recall())
