"""A run, or several side by side, as one HTML page that needs nothing beside it.

write([Path("run")], Path("report.html"))
"""

from pwfn.report.writing import write

__all__ = ["write"]
