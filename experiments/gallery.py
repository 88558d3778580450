"""Compress the demo's network twice and write its report and pictures of it.

    python experiments/gallery.py --out gallery

gallery/report.html      the run with recommended settings, with its uncertainty
gallery/runs.html        side by side with the run with the paper's settings
gallery/figures/         every figure of the report as PNG
gallery/*.png            the pages on a phone and on a desktop, light and dark, if there is a Chromium

Finished runs in gallery/runs are not repeated.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from chromium import Browser, find_browser

from pwfn import Config
from pwfn.lab.uncertainty.file import evaluated
from pwfn.report import write
from pwfn.report.figures import save_png
from pwfn.report.reading import read_run
from pwfn.run import demo
from pwfn.run.options import RunOptions, TrustOptions

PRESETS = ("recommended", "paper")
WIDTHS = (390, 1440)


def main() -> None:
    """Run what is missing, and draw everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gallery"))
    out: Path = parser.parse_args().out
    folders = [compressed(out / "runs", preset) for preset in PRESETS]
    pages = [out / "report.html", out / "runs.html"]
    print(write(folders[:1], pages[0]))
    print(write(folders, pages[1]))
    pictures = save_png([read_run(folders[0])], out / "figures")
    print(f"{out / 'figures'}: {len(pictures)} figures")
    if find_browser() is None:
        print("no pictures of the pages: Chromium is not installed (Debian: apt install chromium)")
        return
    with Browser() as browser:
        for page in pages:
            for width in WIDTHS:
                for dark in (False, True):
                    path = out / f"{page.stem}-{width}-{'dark' if dark else 'light'}.png"
                    path.write_bytes(browser.open(page, width=width, dark=dark).picture())
                    print(path)


def compressed(runs: Path, preset: str) -> Path:
    """The folder of a finished demo with that preset, with its uncertainty."""
    folder = runs / preset
    out = folder / "uncertainty.json"
    if not out.exists():
        shutil.rmtree(folder, ignore_errors=True)
        demo.demo(Config.preset(preset), folder)
        scored = RunOptions("", "digits", folder, "", device="cpu")
        weights = str(folder / "weights.safetensors")
        asked = TrustOptions(samples=20, original=weights, ood=("noise",), out=out)
        evaluated([folder / "model.pwfn"], scored, asked)
    return folder


if __name__ == "__main__":
    main()
