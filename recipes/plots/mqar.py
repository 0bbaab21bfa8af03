"""The figure of associative recall: accuracy over the bytes of state, beside what zoology's own figure shows."""

from pathlib import Path

from . import style

# Bytes of state in float32 and accuracy, at widths of 64, 128 and 256. The accuracy was read off
# zoology/analysis/paper/zoology_paper/zoology_results.png (± 0.01); the bytes are those of zoology's formulas, without the
# inputs that convolutions keep, and for RWKV-7 as its README corrects them. The windows are 16, 64 and 128 tokens, 128 wide.
PUBLISHED = {
    "attention": ((524_288, 1.0), (1_048_576, 1.0)),
    "window": ((16_384, 0.15), (65_536, 0.51), (131_072, 0.66)),
    "Gated DeltaNet": ((16_384, 0.89), (65_536, 0.99), (262_144, 0.99)),
    "DeltaNet": ((8_192, 0.79), (32_768, 0.96), (131_072, 0.995)),
    "RWKV-7": ((16_384, 0.82), (32_768, 0.91), (65_536, 0.98)),
    "GLA": ((4_096, 0.53), (16_384, 0.77), (65_536, 0.95)),
    "Mamba-2": ((16_384, 0.69), (65_536, 0.83)),
}


def plot_state(runs: list[dict], file: Path) -> None:
    """Accuracy over bytes of state: a line for each mixer of ours, with 95 % intervals, and in grey the published points.

    Args:
        runs: with `mixer`, `state_bytes`, `accuracy`, `low` and `high`.
    """
    figure, axes = style.new_figure(
        "Recall and the size of the state",
        f"MQAR, mean of {len(runs[0]['tests'])} tests with the 95 % interval\ngrey: read off zoology's plot (± 0.01)",
        size=(style.WIDTH, 1.5 * style.HEIGHT),
    )
    axes.set(xlabel="state for one sequence (bytes)", ylabel="accuracy", ylim=(-0.02, 1.05))
    for number, (name, points) in enumerate(PUBLISHED.items()):
        look = {"color": style.GREY, "markerfacecolor": "white", "linestyle": ":", "linewidth": 0.8}
        style.draw_line(axes, *zip(*points, strict=True), f"{name} (zoology)", **style.style_of(number) | look)
    sizes = [size for points in PUBLISHED.values() for size, _ in points]
    for number, mixer in enumerate(dict.fromkeys(run["mixer"] for run in runs)):
        own = sorted((run for run in runs if run["mixer"] == mixer), key=lambda run: run["state_bytes"])
        x, y = [run["state_bytes"] for run in own], [run["accuracy"] for run in own]
        around = [[run["accuracy"] - run["low"] for run in own], [run["high"] - run["accuracy"] for run in own]]
        look = style.style_of(number) | {"linestyle": "-" if number < len(style.COLOURS) else "--"}
        axes.errorbar(x, y, around, ecolor=look["color"], capsize=3, fmt="none")
        style.draw_line(axes, x, y, mixer, **look)
        sizes += x
    style.set_log_scale(axes.xaxis, sizes)
    style.format_token_ticks(axes.xaxis)  # bytes: 16 k
    style.label_lines(axes)
    style.save(figure, file)
