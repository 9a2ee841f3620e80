"""Which chunks stay on the device, within a budget of its memory. Pure: no CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Of what the busiest step so far left free, this much is kept free for other steps.
MARGIN_SHARE = 0.1
MARGIN_BYTES = 2**30
#: Steps that are looked at before ``"auto"`` decides.
NUM_STEPS_WATCHED = 3


@dataclass(frozen=True, slots=True)
class Budget:
    """How many bytes of state may stay on each device.

    Attributes:
        num_bytes: at most so many, or
        share: at most this share of all state there, 0 to 1, or
        is_auto: nothing until the first steps were seen.
        from_end: prefer the chunks that come last, not those that come first.
    """

    num_bytes: int = 0
    share: float = 0.0
    is_auto: bool = False
    from_end: bool = False

    def choose(self, sizes: Sequence[int], known_bytes: int = 0, used_bytes: int = 0) -> list[int]:
        """Return the indices of the chunks that stay.

        Args:
            sizes: bytes of new chunks, in the order in which they are updated.
            known_bytes: of all chunks that were planned before.
            used_bytes: of those of them that stay.
        """
        allowed = self.num_bytes
        if self.share:
            allowed = int(self.share * (known_bytes + sum(sizes)))
        chosen = []
        indices = range(len(sizes))
        for index in reversed(indices) if self.from_end else indices:
            if used_bytes + sizes[index] <= allowed:
                chosen.append(index)
                used_bytes += sizes[index]
        return sorted(chosen)


def what_is_free(total: int, elsewhere: int, peak: int) -> int:
    """Return the bytes of a device that no step has needed, less a margin.

    Args:
        total: of the device.
        elsewhere: used by other processes, and by this one outside of torch's allocator.
        peak: most bytes that torch's allocator has reserved.
    """
    left = total - elsewhere - peak
    return max(0, left - max(MARGIN_BYTES, int(MARGIN_SHARE * total)))
