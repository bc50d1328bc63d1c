"""A global order of samples, computed position by position without storing it.

The sample at a position depends only on length, seed, epoch and position. So every rank computes its own samples at any world
size, and a run can resume at any position. The module needs only the standard library, and uses numpy if installed, for speed.

The permutation is a Feistel network of 8 rounds (Luby and Rackoff, 1988) over numbers of b bits; b is the bit length of the
largest position, but at least 8. The rounds change the two halves of a number (b // 2 and b - b // 2 bits) in turn. A result
beyond the length is permuted again until it falls inside: cycle walking (Black and Rogaway, 2002).

A round changes one half by `lowbias32(other half xor round key)`, a hash by Chris Wellons (github.com/skeeto/hash-prospector).
The eight round keys are the big-endian words of SHA-256 of "paceline order 1 seed=<seed> epoch=<epoch>".

Never change the algorithm: checkpoints contain positions in this order.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from paceline.errors import DataError

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np
    import numpy.typing as npt

#: Maximum number of samples: the permutation splits each position into two halves of at most 31 bits.
MAX_LENGTH = 1 << 62

# Number of positions per chunk, without and with numpy. numpy needs larger chunks, to outweigh the cost of its calls.
_CHUNK, _NUMPY_CHUNK = 1 << 12, 1 << 16
# If the halves of a position have at most this many bits, pure Python looks up the permutation's rounds in tables.
_TABLE_BITS = 12
# Minimum number of bits of the permutation network: a smaller network can't reach every order of a few samples equally often.
_LEAST_BITS = 8


class GlobalOrder(Sequence[int]):
    """The samples of one epoch in a pseudo-random order.

    `order[position]` is a sample number. A slice is an `array.array('q')`, which numpy and torch accept without a copy
    (`numpy.asarray(order[:100])`).

    Args:
        length: Number of samples.
        seed: Any integer.
        epoch: Any integer.
        shuffle: False gives the order 0, 1, 2, ...

    Raises:
        DataError: length, seed or epoch is not an integer, or the length is negative or over 2**62.
    """

    def __init__(self, length: int, seed: int = 0, epoch: int = 0, *, shuffle: bool = True) -> None:
        self.length = _integer("length", length)
        self.seed = _integer("seed", seed)
        self.epoch = _integer("epoch", epoch)
        self.shuffle = bool(shuffle)
        if not 0 <= self.length <= MAX_LENGTH:
            raise DataError(f"length={length!r}: a number of samples is 0 or more, and at most 2**62.")
        self._network = _Network(self.length, _keys(self.seed, self.epoch)) if self.shuffle and self.length else None

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> array[int]: ...

    def __getitem__(self, index: int | slice) -> int | array[int]:
        if isinstance(index, slice):
            return self.samples(range(self.length)[index])
        position = range(self.length)[index]
        return position if self._network is None else self._network.walk(position)

    def __iter__(self) -> Iterator[int]:
        for chunk in self.chunks(range(self.length)):
            yield from chunk

    def __repr__(self) -> str:
        shown = "" if self.shuffle else ", shuffle=False"
        return f"GlobalOrder({self.length}, seed={self.seed}, epoch={self.epoch}{shown})"

    def samples(self, positions: range) -> array[int]:
        """Return the sample numbers at these positions, which may wrap around the end."""
        out = array("q", [0]) * len(positions)
        done = 0
        for chunk in self.chunks(positions):
            out[done : done + len(chunk)] = chunk
            done += len(chunk)
        return out

    def chunks(self, positions: range) -> Iterator[array[int]]:
        """Yield the sample numbers at these positions in chunks, computed on demand."""
        # numpy is no faster for a few samples, because each of its calls would permute only a few numbers.
        numpy = _numpy() if self.length >= 1 << _LEAST_BITS else None
        size = _CHUNK if numpy is None else _NUMPY_CHUNK
        for start in range(0, len(positions), size):
            piece = positions[start : start + size]
            if numpy is None:
                inside = array("q", (position % self.length for position in piece))
                yield inside if self._network is None else self._network.permute(inside)
                continue
            out = array("q", [0]) * len(piece)
            # numpy writes through this view into `out`, without a copy.
            values = numpy.frombuffer(out, numpy.int64)
            values[:] = numpy.arange(piece.start, piece.stop, piece.step)
            if max(piece[0], piece[-1]) >= self.length:
                values %= self.length
            if self._network is not None:
                self._network.permute_numpy(values)
            yield out


class _Network:
    """A Feistel network: a pseudo-random permutation of 0 .. length - 1."""

    def __init__(self, length: int, keys: tuple[int, ...]) -> None:
        bits = max(_LEAST_BITS, (length - 1).bit_length())
        self._length = length
        self._keys = keys
        self._right_bits = bits - bits // 2
        self._left_mask = (1 << bits // 2) - 1
        self._right_mask = (1 << self._right_bits) - 1
        self._tables: list[list[int]] | None = None

    def walk(self, value: int) -> int:
        """Return the number to which the permutation maps `value`."""
        # The network permutes numbers below a power of two. Apply it until the result is below `length`: results stay distinct.
        while True:
            left, right = value >> self._right_bits, value & self._right_mask
            for number, key in enumerate(self._keys):
                if number % 2 == 0:
                    left ^= _lowbias32(right ^ key) & self._left_mask
                else:
                    right ^= _lowbias32(left ^ key) & self._right_mask
            value = left << self._right_bits | right
            if value < self._length:
                return value

    def permute(self, values: array[int]) -> array[int]:
        if self._right_bits > _TABLE_BITS:
            return array("q", map(self.walk, values))
        if self._tables is None:
            self._tables = [
                [_lowbias32(half ^ key) & into for half in range(of + 1)]
                for number, key in enumerate(self._keys)
                # Even rounds change the left half by a hash of the right half, and odd rounds do the reverse.
                for of, into in [(self._right_mask, self._left_mask)[:: 1 if number % 2 == 0 else -1]]
            ]
        # The loop over the 8 rounds is unrolled, because this code runs once per sample.
        t0, t1, t2, t3, t4, t5, t6, t7 = self._tables
        shift, mask, length = self._right_bits, self._right_mask, self._length
        out = array("q")
        for start in values:
            value = start
            while True:
                left, right = value >> shift, value & mask
                left ^= t0[right]
                right ^= t1[left]
                left ^= t2[right]
                right ^= t3[left]
                left ^= t4[right]
                right ^= t5[left]
                left ^= t6[right]
                right ^= t7[left]
                value = left << shift | right
                if value < length:
                    break
            out.append(value)
        return out

    def permute_numpy(self, values: npt.NDArray[np.int64]) -> None:
        values[:] = self._rounds(values)
        outside = (values >= self._length).nonzero()[0]
        # Permute values beyond the dataset's end again. Each time, at most about half of them stay beyond the end.
        while len(outside):
            walked = self._rounds(values[outside])
            values[outside] = walked
            outside = outside[walked >= self._length]

    def _rounds(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        import numpy as np

        # Use 32-bit integers: the round function needs products that wrap at 32 bits, and a half has at most 31 bits.
        left = (values >> self._right_bits).astype(np.uint32)
        right = (values & self._right_mask).astype(np.uint32)
        mixed, shifted = np.empty_like(left), np.empty_like(left)
        for number, key in enumerate(self._keys):
            changed, other = (left, right) if number % 2 == 0 else (right, left)
            np.bitwise_xor(other, np.uint32(key), out=mixed)
            for shift, factor in _LOWBIAS32:
                np.right_shift(mixed, np.uint32(shift), out=shifted)
                np.bitwise_xor(mixed, shifted, out=mixed)
                if factor:
                    np.multiply(mixed, np.uint32(factor), out=mixed)
            mixed &= np.uint32(self._left_mask if number % 2 == 0 else self._right_mask)
            changed ^= mixed
        return left.astype(np.int64) << self._right_bits | right


# Each pair stands for `x ^= x >> shift; x *= factor`. The factor 0 stands for no multiplication.
_LOWBIAS32 = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0))


def _lowbias32(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    import hashlib

    digest = hashlib.sha256(f"paceline order 1 seed={seed} epoch={epoch}".encode()).digest()
    return tuple(int.from_bytes(digest[start : start + 4], "big") for start in range(0, 32, 4))


def _numpy() -> ModuleType | None:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise DataError(f"{name}={value!r} must be an integer.") from None
