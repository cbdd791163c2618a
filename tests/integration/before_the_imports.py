"""The first import of the fork server: looking for garbage among what imports make would take a fifth of their time."""

import gc

gc.disable()
