"""Lets the installed package carry what it reads of a checkout: the launchers' declarations and DeepSpeed's options."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CARRIED = ("scripts/run_megatron_t5_*.sh", "scripts/megatron_common.sh", "ds_configs/*.json")


class BuildWithCarriedFiles(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # which reads the checkout itself
            return
        for pattern in CARRIED:
            for path in sorted(Path().glob(pattern)):
                target = Path(self.build_lib, "t5bench", "carried", path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


setup(cmdclass={"build_py": BuildWithCarriedFiles})
