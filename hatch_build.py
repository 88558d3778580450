"""Builds the compiled coder beside its source. Without a C compiler the package works, but slowly."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/pwfn/file/native.c")


class NativeCoder(BuildHookInterface[Any]):
    """Compile ``native.c``, and mark the wheel as one for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel or an editable installation is made."""
        source = Path(self.root) / SOURCE
        target = source.with_name("libpwfn.so.2")
        compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            self.app.display_warning("no C compiler was found: pwfn will read and write files slowly")
            target.unlink(missing_ok=True)  # of another version, perhaps
            return
        options = ["-std=c99", "-O3", "-shared", "-fPIC", "-fvisibility=hidden"]
        done = subprocess.run([compiler, *options, str(source), "-o", str(target)], check=False)
        if done.returncode:
            self.app.display_warning("native.c could not be compiled: pwfn will read and write files slowly")
            target.unlink(missing_ok=True)
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
