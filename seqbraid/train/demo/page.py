"""`report.html` of the demo: one page, with nothing to load from elsewhere."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from html import escape
from importlib.metadata import PackageNotFoundError, version

from ..report.plot import BLUE, GREEN, GREY, ORANGE, Series, line_plot
from ..report.style import STYLE
from .pictures import digit_svg, layout_picture
from .result import ALLOWANCE, LEAST_ACCURACY, ROUNDING, DemoResult
from .training import ROW_TOKENS, Settings

SPLIT_COLOR, ALONE_COLOR, FLOOR_COLOR = BLUE, ORANGE, GREY
SHOWN_DIGITS, SHOWN_MISTAKES = 20, 10


def demo_report(result: DemoResult) -> str:
    """The whole page."""
    settings = result.settings
    mesh = f"{settings.processes} CPU ranks (ring {settings.ring} × ulysses {settings.ulysses})"
    about = (
        f"A Qwen3.5 with vision of {result.num_parameters / 1000000.0:.2f} M parameters learns to read "
        f"handwritten digits from packed rows of up to {ROW_TOKENS} tokens, on {mesh}. It is compared "
        "with the stock model of transformers in one process, on each sample alone, from the same "
        "weights and the same data."
    )
    sections = [
        f"<h1>One training, run in two ways</h1><p>{escape(about)}</p>",
        _tiles(result),
        "<h2>The loss</h2>",
        _loss_plot(result),
        "<h2>Difference between the two</h2>",
        _difference_plot(result),
        f"<p class='soft'>{escape(_why_they_part(result))}</p>",
        "<h2>What the model reads</h2>",
        _accuracy_plot(result),
        _held_out_digits(result),
        "<h2>Where the tokens of a row are</h2>",
        layout_picture(settings),
        "<h2>Reproduce</h2>",
        f"<pre>{escape(command(settings))}</pre><p class='soft'>{escape(_versions())}</p>",
    ]
    head = f"<meta charset='utf-8'><title>seqbraid demo</title><style>{STYLE}</style>"
    return (
        f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n"
        + "\n".join(sections)
        + "</body></html>\n"
    )


def command(settings: Settings) -> str:
    """What to type for this very demo."""
    return (
        f"seqbraid demo --steps {settings.steps} --seed {settings.seed} --processes {settings.processes} "
        f"--out {settings.out}"
    )


def _tiles(result: DemoResult) -> str:
    digits, steps, ranks = len(result.held_out), result.settings.steps, result.settings.processes
    same = sum(a == b for a, b in zip(result.split.predictions, result.stock_predictions, strict=True))
    stock = f"read the same by stock transformers from the checkpoint ({result.stock_accuracy:.1%} right)"
    times = f"in all; {result.split.seconds:.0f} s over ranks, {result.alone.seconds:.0f} s in one process"
    tiles = [
        (
            f"{result.accuracy:.1%}",
            f"of {digits} held-out digits read right after {steps} steps on {ranks} ranks",
            result.accuracy >= LEAST_ACCURACY,
        ),
        (f"{max(result.differences):.1e}", "largest relative difference of the losses", result.curves_agree),
        (f"{max(result.floor):.1e}", "the same between two orders of summation in one process", None),
        (f"{same}/{digits}", stock, None),
        (f"{result.seconds:.0f} s", times, None),
    ]
    verdicts = {True: " class='good'", False: " class='bad'", None: ""}
    shown = [f"<div class='tile'><b{verdicts[good]}>{escape(n)}</b>{escape(t)}</div>" for n, t, good in tiles]
    return f"<div class='tiles'>{''.join(shown)}</div>"


def _loss_plot(result: DemoResult) -> str:
    steps = range(1, result.settings.steps + 1)
    curves = [
        Series("one process, each sample alone", steps, result.alone.losses, ALONE_COLOR, width=7),
        Series(f"{result.settings.processes} ranks, packed", steps, result.split.losses, SPLIT_COLOR),
    ]
    return line_plot("Mean loss per digit", curves, "step", "nats")


def _difference_plot(result: DemoResult) -> str:
    steps = range(1, result.settings.steps + 1)
    curves = [
        Series("rounding: one process, two orders of summation", steps, result.floor, FLOOR_COLOR),
        Series(
            f"{result.settings.processes} ranks against one process", steps, result.differences, SPLIT_COLOR
        ),
    ]
    return line_plot("Relative difference of the loss", curves, "step", "difference / loss", log=True)


def _why_they_part(result: DemoResult) -> str:
    verdict = "holds" if result.curves_agree else "does not hold"
    return (
        "Reordering a sum in float32 changes its last digit, and each update feeds that digit back into "
        "the weights: training amplifies rounding. So the reference is a second training in one process "
        "that differs from the first only in the order of its sums. Up to every step, the ranks may be "
        f"{ALLOWANCE:.0f} times as far off as the largest difference it has had so far, and "
        f"{ALLOWANCE * ROUNDING:.0e} in any case: {verdict}. Where two losses are equal to the last "
        "digit, the curve is at the lower edge. A defect, such as a leak between samples or a gradient "
        "lost between ranks, would show in the first steps already."
    )


def _accuracy_plot(result: DemoResult) -> str:
    steps = [step for step, _ in result.split.accuracy]
    shares = [100 * share for _, share in result.split.accuracy]
    wanted = 100 * LEAST_ACCURACY
    curves = [
        Series(f"{wanted:.0f} %", [0, max(steps)], [wanted, wanted], GREY, width=1.2, dash="4 4"),
        Series("held-out digits read right", steps, shares, GREEN, width=2),
    ]
    return line_plot("Accuracy on held-out digits", curves, "step", "%", y_range=(0.0, 100.0))


def _held_out_digits(result: DemoResult) -> str:
    labels, predictions = result.held_out.labels.tolist(), result.split.predictions
    mistakes = [i for i, label in enumerate(labels) if predictions[i] != label]
    first = range(min(SHOWN_DIGITS, len(labels)))
    parts = [f"<p>The first {len(first)} held-out digits, and what the model reads in them:</p>"]
    parts.append(_figures(result, first))
    if mistakes:
        what = f"{len(mistakes)} of {len(labels)} are misread; the first ones:"
        parts += [f"<p>{what}</p>", _figures(result, mistakes[:SHOWN_MISTAKES])]
    return "".join(parts)


def _figures(result: DemoResult, index: Iterable[int]) -> str:
    shown = []
    for i in index:
        label, prediction = int(result.held_out.labels[i]), result.split.predictions[i]
        verdict = "good" if label == prediction else "bad"
        caption = f"{label} <span class='{verdict}'>→ {prediction}</span>"
        shown.append(
            f"<figure>{digit_svg(result.held_out.images[i])}<figcaption>{caption}</figcaption></figure>"
        )
    return f"<div class='digits'>{''.join(shown)}</div>"


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package in ("seqbraid", "torch", "transformers", "scikit-learn", "numpy"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} (not installed as a package)")
    return f"{' · '.join(found)} · {platform.machine()}, {os.cpu_count()} cores"
