"""A table of methods, side by side: every (network, method, seed) run or gone on with, and measured alike.

plan = load("experiments/compare_resnet20.toml")
table = run(plan, Path("tables/resnet20"), jobs=2)
print("\\n".join(lines(table)))                    # also in tables/resnet20/table.md and table.json
"""

from pwfn.lab.compare.plan import Plan, Run, load, read
from pwfn.lab.compare.running import CutOffError, run
from pwfn.lab.compare.table import Table, lines

__all__ = ["CutOffError", "Plan", "Run", "Table", "lines", "load", "read", "run"]
