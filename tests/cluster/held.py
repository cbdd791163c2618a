"""Plug-in of the tier's runs: a run waits after the step that the file beside its folder, `DIR.hold`, names.

A test can then do its harm at that step, however fast or slow the machine is.
"""

import time
from pathlib import Path

from megatron_ddrp.run.callbacks import Callback


class Held(Callback):
    """Waits after a step until `DIR.hold` names a later one."""

    def on_start(self, config, iteration, model):
        self.file = Path(f"{config.checkpoint.save}.hold")

    def on_step(self, row):
        while self.file.exists() and int(self.file.read_text() or 0) <= row["iteration"]:
            time.sleep(0.01)


CALLBACKS = {"held": Held}
