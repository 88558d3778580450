"""The demo's network, compressed twice, as a report and as pictures.

    python experiments/gallery.py --out gallery

gallery/report.html      of the recommended settings, its uncertainty assessed
gallery/runs.html        beside those of the paper
gallery/figures/         every figure of the report, PNG
gallery/*.png            the pages on a phone and on a desk, light and dark, where there is a Chromium

What was run is kept in gallery/runs and not run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from chromium import Browser, find_browser
from safetensors.torch import save_file

from pwfn.report import write
from pwfn.report.figures import save_png
from pwfn.report.reading import read_run
from pwfn.run import demo
from pwfn.run.folder import run
from pwfn.run.options import RunOptions, TrustOptions
from pwfn.run.scores import assess_file
from pwfn.zoo import data

PRESETS = ("recommended", "paper")
WIDTHS = (390, 1440)


def main() -> None:
    """Run what is not there yet, and draw everything."""
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
        print("no pictures of the pages: there is no Chromium here (Debian: apt install chromium)")
        return
    with Browser() as browser:
        for page in pages:
            for width in WIDTHS:
                for dark in (False, True):
                    path = out / f"{page.stem}-{width}-{'dark' if dark else 'light'}.png"
                    path.write_bytes(browser.open(page, width=width, dark=dark).picture())
                    print(path)


def compressed(runs: Path, preset: str) -> Path:
    """The folder of a run of the demo's network with that preset, done and assessed."""
    folder, weights = runs / preset, runs / "digits_resnet.safetensors"
    if (folder / "uncertainty.json").exists():
        return folder
    config = demo.settings(preset, seed=0).override({"target.keep_states": True})
    if not weights.exists():
        runs.mkdir(parents=True, exist_ok=True)
        train, _ = data.digits()
        save_file(demo.pretrained(train, config.seed).state_dict(), weights)
    options = RunOptions("digits_resnet", "digits", folder, str(weights), device="cpu", resume=True)
    run(options, config)
    scored = RunOptions("", "digits", folder, "", device="cpu")
    facts, _ = assess_file(
        folder / "model.pwfn", scored, TrustOptions(samples=20, original=str(weights), ood=("noise",))
    )
    (folder / "uncertainty.json").write_text(json.dumps(facts["uncertainty"], indent=1) + "\n")
    return folder


if __name__ == "__main__":
    main()
