"""`pwfn compress`: a run, or a dry run, shown as suits where its output goes."""

from __future__ import annotations

import json
from collections.abc import Callable

from pwfn.bayes.distributed import distributed_for
from pwfn.config import Config
from pwfn.run.console import view_for
from pwfn.run.folder import run
from pwfn.run.forecast import forecast
from pwfn.run.options import RunOptions


def compress(
    options: RunOptions, config: Config, say: Callable[[str], None], *, dry_run: bool, as_json: bool
) -> int:
    """Do it, show it, and return the command's status: 1 where there was a target, and it was missed."""
    distributed = distributed_for(options.device)
    if dry_run:
        found = forecast(options, config, distributed)
        if distributed.leads:
            say(json.dumps(found.to_dict()) if as_json else "\n".join(found.lines()))
        return 0
    facts = run(options, config, view_for(as_json=as_json, say=say), distributed)
    if as_json and distributed.leads:
        say(json.dumps(facts))
    return int(facts.get("choice", {}).get("met_in_the_end") is False)
