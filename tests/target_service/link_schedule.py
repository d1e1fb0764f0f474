"""Schedules of failures for a LinkWorld: what happens, in order, as values that shrink."""

from dataclasses import dataclass
from enum import Enum

from hypothesis import strategies as st

from outrider.engine.sampling import Sampling

# Several of one length: rows whose slots are mixed up differ in nothing but their text.
PROMPTS = (
    (3, 1, 4, 1, 5, 9),
    (2, 7, 1, 8, 2, 8),
    (1, 6, 1, 8, 0, 3),
    tuple(range(20)),
    (*range(16), 7, 7, 7, 7),
    tuple((7 * index) % 23 for index in range(40)),
)
# Several that are not greedy: rows of a slot's last holder may differ in nothing but their seed.
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=0.8, seed=2),
)


class Direction(Enum):
    TO_DRAFT = "to_draft"
    TO_TARGET = "to_target"


class Fault(Enum):
    """What becomes of the next message in a direction."""

    DROP = "drop"
    DUPLICATE = "duplicate"
    DELAY = "delay"  # those behind it overtake it
    STALL = "stall"  # those behind it wait as well
    CORRUPT = "corrupt"  # see Field


class Field(Enum):
    """What of a message is another, if it has such a thing. A stamp or a hash must give it away."""

    TOKEN = "token"  # the last one of a Step's commits or an Open
    PLACE = "place"  # each row has the next one's slot
    GENERATION = "generation"  # that of the slot's last holder
    BASE_LENGTH = "base_length"
    PREFIX_HASH = "prefix_hash"
    EPOCH = "epoch"
    BOOT_ID = "boot_id"


@dataclass(frozen=True, slots=True)
class Admit:
    """So many sequences, of the prompts from `prompt` on."""

    prompt: int
    sampling: int
    max_tokens: int
    count: int


@dataclass(frozen=True, slots=True)
class Run:
    steps: int


@dataclass(frozen=True, slots=True)
class Tamper:
    direction: Direction
    fault: Fault
    milliseconds: int
    field: Field  # of a corruption


@dataclass(frozen=True, slots=True)
class Replay:
    """A message that went before comes again, into whatever stream is there now."""

    direction: Direction
    back: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The stream ends; what is under way is lost."""

    fell_silent: bool
    pause_milliseconds: int


@dataclass(frozen=True, slots=True)
class RestartDraft:
    pause_milliseconds: int


@dataclass(frozen=True, slots=True)
class RestartTarget:
    """What ran goes on at its successor, behind its output so far."""

    pause_milliseconds: int


@dataclass(frozen=True, slots=True)
class Speculate:
    draft_length: int
    max_decode_rows: int | None


@dataclass(frozen=True, slots=True)
class Cancel:
    """One of the sequences that were admitted."""

    index: int


Event = Admit | Run | Tamper | Replay | Cut | RestartDraft | RestartTarget | Speculate | Cancel


@dataclass(frozen=True, slots=True)
class Schedule:
    num_blocks: int
    uses_ring: bool
    runs_ahead: bool
    events: tuple[Event, ...]


def _pauses() -> st.SearchStrategy[int]:
    return st.sampled_from((0, 0, 0, 5, 30, 200))


def schedules(*, restarts: bool = True) -> st.SearchStrategy[Schedule]:
    """Without restarts, only single messages suffer, and oftener."""
    directions = st.sampled_from(Direction)
    admits = st.builds(
        Admit,
        prompt=st.integers(0, len(PROMPTS) - 1),
        sampling=st.integers(0, len(SAMPLINGS) - 1),
        max_tokens=st.sampled_from((1, 6, 14, 30)),
        count=st.integers(1, 3),
    )
    runs = st.builds(Run, st.integers(1, 5))
    corruptions = st.builds(
        Tamper, directions, st.just(Fault.CORRUPT), st.just(0), st.sampled_from(Field)
    )
    lost_or_late = [fault for fault in Fault if fault is not Fault.CORRUPT]
    delays = st.builds(
        Tamper, directions, st.sampled_from(lost_or_late), _pauses(), st.just(Field.TOKEN)
    )
    rare = st.one_of(
        st.builds(Cut, st.booleans(), _pauses()),
        st.builds(RestartDraft, _pauses()),
        st.builds(RestartTarget, _pauses()),
        st.builds(Speculate, st.sampled_from((0, 1, 4)), st.sampled_from((None, 0, 2))),
        st.builds(Cancel, st.integers(0, 5)),
    )
    replays = st.builds(Replay, directions, st.integers(0, 12))
    events = st.one_of(admits, corruptions, delays, *([replays, rare] if restarts else []))
    # A failure is of interest while something runs.
    pairs = st.tuples(events, runs)
    return st.builds(
        lambda num_blocks, uses_ring, runs_ahead, first, rest: Schedule(
            num_blocks, uses_ring, runs_ahead, (first, *(event for pair in rest for event in pair))
        ),
        st.sampled_from((14, 64)),
        st.booleans(),
        st.booleans(),
        admits,
        st.lists(pairs, min_size=4, max_size=16),
    )
