"""How a run is shown: plain lines, a live view on a terminal, TensorBoard, or not at all.

with view_for(as_json=False) as view:
    view.begin("resnet18 on imagefolder:/data, into run", rounds=10)
    ...                                 # view.pulse(...) now and then, view.round(...) after each
    view.end("71.2% before, 71.0% after")
"""

from pwfn.run.console.choice import view_for
from pwfn.run.console.lines import HEADER, Lines, round_line
from pwfn.run.console.live import Live
from pwfn.run.console.tensorboard import TensorBoard
from pwfn.run.console.timing import TimeLeft, duration, stopwatch
from pwfn.run.console.view import Several, Silent, View

__all__ = [
    "HEADER",
    "Lines",
    "Live",
    "Several",
    "Silent",
    "TensorBoard",
    "TimeLeft",
    "View",
    "duration",
    "round_line",
    "stopwatch",
    "view_for",
]
