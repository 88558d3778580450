"""Draw the picture of the README, docs/idea.svg: the weights of ResNet-20 before, during and after fixing.

    python experiments/idea.py                  write docs/idea.svg
    python experiments/idea.py --out idea.png   another file, in any format that matplotlib writes

The weights are those of weights/resnet20_cifar10.safetensors, with one sigma for all, fixed by
`pwfn.fix_round`. The training between the rounds is left out, so that it takes a second.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

import pwfn
from pwfn.evaluate.entropy import Pool

ROOT = Path(__file__).resolve().parent.parent
SIGMA = 0.33  # of the root mean square of the weights
SHOWN = {
    0.0: "1. Every weight is a Gaussian",
    0.6: "2. Popular values take the nearest",
    1.0: "3. All are fixed",
}
EXAMPLES = np.linspace(0.05, 0.95, 9)  # quantiles of the weights that are drawn as single Gaussians
REACH = 0.3  # of the horizontal axis
# Colours that can be read on white and on black.
FREE, FIXED, TEXT = "#3f8efc", "#e8730c", "#808890"


@dataclass(frozen=True)
class Moment:
    """The weights after some round."""

    mu: Tensor
    sigma: Tensor
    fixed: Tensor


def moments() -> dict[float, Moment]:
    """The weights at the moments that are shown, by the fraction that is fixed."""
    tensors = load_file(ROOT / "weights" / "resnet20_cifar10.safetensors")
    mu = torch.cat([tensor.flatten() for tensor in tensors.values() if tensor.dim() > 1])
    sigma = torch.full_like(mu, SIGMA * float(mu.square().mean().sqrt()))
    now = Moment(mu, sigma, torch.zeros_like(mu, dtype=torch.bool))
    found = {0.0: now}
    for fraction in pwfn.PAPER_FRACTIONS:
        done = pwfn.fix_round(now.mu, now.sigma, now.fixed, fraction, rule="each", b=None, sweep=16.0)
        found[fraction] = now = Moment(done.mu, done.sigma, done.fixed)
    return {fraction: found[fraction] for fraction in SHOWN}


def draw_examples(axes: Any, moment: Moment, chosen: Tensor, sigma: float) -> None:
    """A bell for each weight that is free, a dot for each that is fixed; dots at one value are stacked."""
    x = np.linspace(-4, 4, 41)
    stacks: dict[float, int] = {}
    for mean, fixed in zip(moment.mu[chosen].tolist(), moment.fixed[chosen].tolist(), strict=True):
        if fixed:
            stacks[mean] = stacks.get(mean, 0) + 1
            axes.plot([mean], [0.2 * stacks[mean] - 0.08], "o", color=FIXED, markersize=6)
        else:
            bell = np.exp(-0.5 * x**2)
            axes.fill_between(mean + sigma * x, bell, color=FREE, alpha=0.15, linewidth=0)
            axes.plot(mean + sigma * x, bell, color=FREE, linewidth=1)
    axes.set(xlim=(-REACH, REACH), ylim=(0, 1.1), xticks=[], yticks=[])


def draw_histogram(axes: Any, moment: Moment) -> None:
    """All weights: the free ones in bins of 1/80, the fixed ones as a line at each value."""
    free = moment.mu[~moment.fixed].numpy()
    counts, edges = np.histogram(free, np.arange(-25.5, 26) / 80)
    axes.stairs(counts / moment.mu.numel(), edges, color=FREE, fill=True)
    values, counts = moment.mu[moment.fixed].unique(return_counts=True)
    axes.vlines(values, 0, counts / moment.mu.numel(), color=FIXED, linewidth=4)
    axes.set(xlim=(-REACH, REACH), ylim=(0, 0.42), xticks=[-0.25, -0.125, 0, 0.125, 0.25], yticks=[])
    axes.set_xticklabels(["-1/4", "-1/8", "0", "1/8", "1/4"])


def said(moment: Moment) -> str:
    """What is under a histogram."""
    pool, fixed = Pool.of(moment.mu), moment.mu[moment.fixed].unique().numel()
    if bool(moment.fixed.all()):
        return f"{pool.weights:,} weights, {pool.unique} values: {pool.entropy_bits:.1f} bits each"
    if fixed:
        return f"{moment.fixed.float().mean():.0%} of them have {fixed} values; train the rest, repeat"
    return f"{pool.weights:,} weights, {pool.unique:,} values"


def draw(path: Path) -> None:
    """The picture: single weights above, all of them below, from left to right."""
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "pwfn",
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": TEXT,
        "axes.edgecolor": TEXT,
        "axes.labelcolor": TEXT,
        "xtick.color": TEXT,
        "savefig.transparent": True,
    }
    found = moments()
    start = found[0.0]
    order = start.mu.argsort()
    chosen = order[torch.tensor(EXAMPLES * (len(order) - 1)).long()]
    with mpl.rc_context(style):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 3.6), layout="constrained")
        grid = figure.subplots(2, len(SHOWN), height_ratios=(1, 1.5), squeeze=False)
        for column, (fraction, title) in enumerate(SHOWN.items()):
            above, below = grid[0][column], grid[1][column]
            draw_examples(above, found[fraction], chosen, float(start.sigma[0]))
            draw_histogram(below, found[fraction])
            above.set_title(title, fontsize=11, fontweight="bold")
            below.set_xlabel(said(found[fraction]))
            for axes in (above, below):
                axes.spines[["left", "right", "top"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "idea.svg", help="the picture to write")
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
