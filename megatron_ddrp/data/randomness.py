"""Counter-based randomness: every draw is a pure function of (seed, purpose, counters), without a generator's state.

Masks, shuffles and samples must be the same on any number of ranks and after any resume. With a stateful generator a
draw depends on the number of draws before it. Here a draw is a hash of its purpose and place ("mask-order", epoch 3,
sample 17, position 5), so each process computes only the draws it needs, in any order, and checkpoints store nothing.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). The shuffle is a Feistel
network over the smallest sufficient even number of bits with cycle walking (Black and Rogaway, CT-RSA 2002): a
bijection of range(size) that is evaluated at single points, without a stored permutation.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Hashes = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FEISTEL_ROUNDS = 6


def hash_uint64(seed: int, purpose: str, *counters: ArrayLike) -> Hashes:
    """Return a uniform 64-bit hash of (seed, purpose, counters).

    The counters are non-negative integers or arrays of them, broadcast against each other; the result has their common
    shape (`[]` without counters). Put slowly varying counters first: each is folded in at its own broadcast size.
    """
    state = _stream(int(seed), purpose)
    for counter in counters:
        state = fold_in(state, counter)
    return state


def fold_in(state: Hashes, counter: ArrayLike) -> Hashes:
    """Fold one more counter into a hash: `hash_uint64(s, p, a, b) == fold_in(hash_uint64(s, p, a), b)`."""
    shape = np.broadcast_shapes(np.shape(state), np.shape(counter))
    # At least one axis: numpy warns of the intended wrap-around modulo 2**64 for scalars only.
    mixed = np.atleast_1d(counter).astype(np.uint64) * _GOLDEN + (np.atleast_1d(state) + _GOLDEN)
    _mix(mixed)
    return mixed.reshape(shape)


def to_unit(hashes: Hashes) -> Floats:
    """Return the upper 53 bits of 64-bit hashes as float64 in [0, 1)."""
    return (hashes >> np.uint64(11)) * 2.0**-53


def permute(index: ArrayLike, size: int, seed: int, purpose: str, epoch: ArrayLike) -> Ints:
    """Return the place of each `index` in the shuffled range(size): a bijection for every (seed, purpose, epoch).

    `index` and `epoch` broadcast against each other. Memory is constant for any size up to 2**62; each index takes
    about three evaluations of the network. Raises `ValueError` for an index outside [0, size).
    """
    index, epoch = np.broadcast_arrays(np.asarray(index, np.int64), np.asarray(epoch, np.int64))
    if index.size and (index.min() < 0 or index.max() >= size):
        raise ValueError(f"permute: indices span [{index.min()}, {index.max()}], expected within [0, {size})")
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    place = index.ravel().astype(np.uint64)
    keys = hash_uint64(seed, purpose, epoch.ravel())
    pending = np.arange(place.size)
    while pending.size:
        place[pending] = _feistel(place[pending], keys[pending], half_bits)
        pending = pending[place[pending] >= size]  # cycle walking: outside the range, encrypt once more
    return place.astype(np.int64).reshape(index.shape)


@lru_cache(maxsize=256)
def _stream(seed: int, purpose: str) -> Hashes:
    """Return the initial state of a (seed, purpose) stream: a digest, since Python's hash() varies by process."""
    digest = hashlib.blake2b(f"{seed}:{purpose}".encode(), digest_size=8).digest()
    state = np.array(int.from_bytes(digest, "little"), np.uint64)
    state.setflags(write=False)
    return state


def _mix(state: Hashes) -> None:
    """Apply SplitMix64's finaliser in place: every output bit depends on every input bit."""
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)


def _feistel(value: Hashes, keys: Hashes, half_bits: int) -> Hashes:
    """Return one pass of a balanced Feistel network over 2·half_bits bits; a bijection for each key."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> shift, value & mask
    for round_number in range(_FEISTEL_ROUNDS):
        scrambled = fold_in(fold_in(keys, round_number), right)
        left, right = right, left ^ (scrambled >> np.uint64(32) & mask)
    return left << shift | right
