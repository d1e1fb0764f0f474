"""Slots of the link: which live sequence has which number, and which generation of it."""

from target_service.sequence import Sequence


class SlotTable:
    """Slots by sequence and back. A slot's generation grows whenever it is given out. Owned by the
    engine's thread.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(reversed(range(num_slots)))
        self._generations = [0] * num_slots
        self._sequences: dict[int, Sequence] = {}
        self._slots: dict[int, int] = {}  # by the sequence's arrival

    def take(self, sequence: Sequence) -> tuple[int, int]:
        """Gives the sequence a slot; returns slot and generation."""
        assert sequence.arrival not in self._slots
        slot = self._free.pop()
        self._generations[slot] += 1
        self._sequences[slot] = sequence
        self._slots[sequence.arrival] = slot
        return slot, self._generations[slot]

    def give_back(self, sequence: Sequence) -> tuple[int, int]:
        """Frees the sequence's slot; returns what it was."""
        slot = self._slots.pop(sequence.arrival)
        del self._sequences[slot]
        self._free.append(slot)
        return slot, self._generations[slot]

    def find(self, sequence: Sequence) -> tuple[int, int]:
        """Slot and generation of a running sequence."""
        slot = self._slots[sequence.arrival]
        return slot, self._generations[slot]

    def holder(self, slot: int) -> Sequence | None:
        """The sequence in a slot, if any: the slot's number came from outside."""
        return self._sequences.get(slot)

    def generation(self, slot: int) -> int:
        """The generation of a slot that has a holder."""
        return self._generations[slot]
