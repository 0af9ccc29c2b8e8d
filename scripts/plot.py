#!/usr/bin/env python3
"""Draws the course of one or several runs: loss, gradient norm, learning rate and tokens per second.

    scripts/plot.py RUN [RUN ...] [-o PICTURE]

RUN is a run's output folder or its log.jsonl; PICTURE ends in .png, .svg or .pdf (default: training.png). Runs are
told apart by color; the training loss is drawn light as logged and strong smoothed, validation losses are dots.
"""

import argparse
import json
import math
import os
import sys

COLORS = ("#2563eb", "#e1571c", "#16945b", "#8b45c9", "#c2185b", "#8a6d1f", "#0e8fa8", "#555f6b")
INK, FAINT = "#24292f", "#d8dee4"


def fail(message):
    sys.exit(f"plot.py: {message}")


def warn(message):
    print(f"plot.py: {message}", file=sys.stderr)


# ----------------------------------------------------------------------------------------------------------------------
# logs


class Run:
    """What a log says, by kind of event: train[field] and val[field] are lists in the order of steps."""

    TRAIN = ("step", "loss", "grad_norm", "lr", "tokens_per_s")
    VAL = ("step", "loss")

    def __init__(self, name):
        self.name = name
        self.train = {field: [] for field in self.TRAIN}
        self.val = {field: [] for field in self.VAL}

    def add(self, event):
        kind = event["event"]
        if kind not in ("train", "val"):
            return
        fields, series = (self.TRAIN, self.train) if kind == "train" else (self.VAL, self.val)
        values = [number_of(event, field) for field in fields]
        if not math.isfinite(values[0]):
            raise ValueError("'step' is not a number")
        for field, value in zip(fields, values):
            series[field].append(value)


def number_of(event, field):
    """A field's number; a loss that is not finite may be logged as null or in words, and leaves a gap."""
    value = event[field]
    if value is None or isinstance(value, str):
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"'{field}' is not a number")
    return float(value)


def parse_line(line):
    event = json.loads(line)
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError("not an object with an 'event'")
    return event


def read_run(path, name):
    run = Run(name)
    file_name = os.path.join(path, "log.jsonl") if os.path.isdir(path) else path
    try:
        with open(file_name, encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    run.add(parse_line(line))
                except KeyError as error:
                    warn(f"{file_name}:{number}: no field {error}, line left out")
                except ValueError as error:
                    warn(f"{file_name}:{number}: {error}, line left out")
    except OSError as error:
        fail(f"{file_name}: {error.strerror}")
    if not run.train["step"] and not run.val["step"]:
        fail(f"{file_name}: no training or validation line in it")
    return run


def run_names(paths):
    """The shortest ends of the paths that tell the runs apart."""
    parts = []
    for path in paths:
        folder = os.path.dirname(path) if os.path.basename(path) == "log.jsonl" else path
        stem = os.path.splitext(folder)[0] if folder.endswith(".jsonl") else folder
        parts.append(os.path.abspath(stem).strip(os.sep).split(os.sep))
    depth = 1
    while depth < max(map(len, parts)) and len({tuple(p[-depth:]) for p in parts}) < len(parts):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def finite(values):
    return [value for value in values if math.isfinite(value)]


def smooth(values):
    """Means over a window around each step, narrow where a run begins and its loss falls fast; gaps are passed over."""
    sums, counts, result = [0.0], [0], []
    for value in values:
        counts_in = math.isfinite(value)
        sums.append(sums[-1] + (value if counts_in else 0.0))
        counts.append(counts[-1] + counts_in)
    for i in range(len(values)):
        reach = min(len(values) // 50, i // 8)
        begin, end = i - reach, min(i + reach + 1, len(values))
        count = counts[end] - counts[begin]
        result.append((sums[end] - sums[begin]) / count if count else math.nan)
    return result


# ----------------------------------------------------------------------------------------------------------------------
# the picture


def load_pyplot():
    try:
        import matplotlib
    except ImportError:
        fail(
            f"{sys.executable} has no matplotlib. HINT: apt-get install python3-matplotlib and use /usr/bin/python3, "
            "or pip install matplotlib"
        )
    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {
            "font.size": 10.5,
            "axes.edgecolor": FAINT,
            "axes.labelcolor": INK,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "svg.hashsalt": "plot",  # the same log gives the same file
        }
    )
    from matplotlib import pyplot, ticker

    return pyplot, ticker


def dress(axes, title, ticker):
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=7)
    axes.grid(True, color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.margins(x=0.015)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))


def draw_lines(axes, lines):
    """Losses worth comparing with, such as an entropy, across the whole picture."""
    for name, value in lines:
        axes.axhline(value, color=INK, linewidth=1, linestyle=(0, (4, 3)), alpha=0.6)
        axes.annotate(f"{name} {value:.3f}", (0.995, value), xycoords=("axes fraction", "data"), xytext=(0, -12),
                      textcoords="offset points", ha="right", fontsize=9.5, color=INK)  # fmt: skip


def frame_losses(axes, runs, lines):
    """Leaves the first steps' cliff out of the frame, which would press everything else flat."""
    tops, lows = [], []
    for run in runs:
        smoothed = smooth(run.train["loss"])
        tops += finite(smoothed[len(smoothed) // 50 :])[:1] + finite(run.val["loss"])
        lows += finite(run.train["loss"] + run.val["loss"])
    lows += [value for _, value in lines]
    if tops and max(tops) > min(lows):
        room = 0.06 * (max(tops) - min(lows))
        axes.set_ylim(min(lows) - room, max(tops) + room)


def draw_losses(axes, runs, lines):
    for run, color in zip(runs, COLORS * len(runs)):
        steps, losses = run.train["step"], run.train["loss"]
        axes.plot(steps, losses, color=color, alpha=0.22, linewidth=0.9)
        axes.plot(steps, smooth(losses), color=color, linewidth=2)
        axes.plot(run.val["step"], run.val["loss"], "o", color=color, markersize=5.5, mec="white", mew=1, zorder=3)
    draw_lines(axes, lines)
    frame_losses(axes, runs, lines)


def draw_field(axes, runs, field, smoothed):
    for run, color in zip(runs, COLORS * len(runs)):
        steps, values = run.train["step"], run.train[field]
        axes.plot(steps, values, color=color, alpha=0.22 if smoothed else 1, linewidth=0.9 if smoothed else 2)
        if smoothed:
            axes.plot(steps, smooth(values), color=color, linewidth=1.8)


def add_legend(axes, runs):
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], color=c, linewidth=2.5, label=r.name) for r, c in zip(runs, COLORS * len(runs))]
    marks.append(Line2D([], [], color="#8c959f", alpha=0.5, linewidth=1, label="as logged"))
    if any(run.val["step"] for run in runs):
        marks.append(Line2D([], [], color="#8c959f", marker="o", linestyle="", label="validation"))
    axes.legend(handles=marks, loc="upper right", frameon=False, fontsize=10)


def draw(runs, lines, picture):
    pyplot, ticker = load_pyplot()
    figure = pyplot.figure(figsize=(10, 6.6), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=(1.75, 1), hspace=0.06)
    loss, norm, rate, speed = (figure.add_subplot(g) for g in (grid[0, :], grid[1, 0], grid[1, 1], grid[1, 2]))

    draw_losses(loss, runs, lines)
    dress(loss, "Loss", ticker)
    loss.set_xlabel("step")
    add_legend(loss, runs)

    norm.set_yscale("log")
    draw_field(norm, runs, "grad_norm", smoothed=True)
    dress(norm, "Gradient norm", ticker)
    norm.yaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    norm.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    norm.yaxis.set_minor_locator(ticker.NullLocator())

    draw_field(rate, runs, "lr", smoothed=False)
    dress(rate, "Learning rate", ticker)
    rate.yaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:.3g}"))
    rate.set_ylim(bottom=0)

    draw_field(speed, runs, "tokens_per_s", smoothed=True)
    dress(speed, "Tokens per second", ticker)
    speed.yaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    speed.set_ylim(bottom=0)

    try:
        figure.savefig(picture, dpi=160, metadata={"Date": None} if picture.endswith(".svg") else None)
    except (OSError, ValueError) as error:
        fail(f"{picture}: {getattr(error, 'strerror', None) or error}")


def read_line(text):
    name, _, value = text.rpartition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=NUMBER")


def main():
    parser = argparse.ArgumentParser(description="Draws the course of one or several runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's output folder or its log.jsonl")
    parser.add_argument("-o", "--output", default="training.png", metavar="PICTURE", help=".png, .svg or .pdf")
    parser.add_argument(
        "--line", action="append", default=[], type=read_line, metavar="NAME=LOSS", help="a loss to compare with"
    )
    arguments = parser.parse_args()
    runs = [read_run(path, name) for path, name in zip(arguments.runs, run_names(arguments.runs))]
    draw(runs, arguments.line, arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    main()
