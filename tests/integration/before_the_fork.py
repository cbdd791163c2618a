"""The last import of the fork server: what each rank would else find out and look through anew."""

import atexit
import gc

import deepspeed.ops

from megatron_ddrp.engine.build import import_muon

import_muon()
COMPILABLE = deepspeed.ops.__compatible_ops__
"""On the first look DeepSpeed asks the C compiler, which takes each rank longer than its five steps."""

gc.freeze()  # ZeRO 3 collects garbage several times: half a second each, if among all imported modules
gc.enable()
atexit.register(gc.unfreeze)
