"""``python -m pwfn`` is the command ``pwfn``."""

from pwfn.cli import main

main()
