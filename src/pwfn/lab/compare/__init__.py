"""A table of methods: every (network, method, seed) is run or resumed, and measured in the same way.

plan = load("experiments/compare_resnet20.toml")
table = run(plan, Path("tables/resnet20"), jobs=2)
print("\\n".join(lines(table)))                    # also in tables/resnet20/table.md and table.json
"""

from pwfn.lab.compare.plan import Plan, Run, load, read
from pwfn.lab.compare.runner import InterruptedTableError, run
from pwfn.lab.compare.table import Table, lines

__all__ = ["InterruptedTableError", "Plan", "Run", "Table", "lines", "load", "read", "run"]
