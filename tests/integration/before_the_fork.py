"""The last import of the fork server: what each rank would else find out and look through anew."""

import atexit
import gc

import deepspeed.ops

COMPILABLE = deepspeed.ops.__compatible_ops__
"""On the first look DeepSpeed asks the C compiler, which takes each rank longer than its five steps."""

gc.collect()
gc.freeze()  # ZeRO 3 collects garbage several times: half a second each, if among all imported modules
atexit.register(gc.unfreeze)
