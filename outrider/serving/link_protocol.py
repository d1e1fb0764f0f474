"""What both ends of a link agree on beyond the messages: versions, special values, column types.

Knows neither gRPC nor protobuf.
"""

from typing import Final

# Raised with every change that an older peer would misread.
PROTOCOL_VERSION: Final = 1

# In Draft.case_accepted_lengths: the draft continues the committed prefix.
PREFIX_CASE_COMMITTED: Final = 255

# In Draft.parents: the token continues the committed prefix (or the case), not another draft token.
NO_PARENT: Final = -1

# Draft lengths and cases share one byte on the wire, and one value of it is taken.
LONGEST_DRAFT_LENGTH: Final = PREFIX_CASE_COMMITTED - 1

# How features travel.
INLINE: Final = "inline"
SHARED_MEMORY: Final = "shared_memory"

# Column types, by the fields' names in draft.proto.
SLOT: Final = "<u4"
GENERATION: Final = "<u4"
BASE_LENGTH: Final = "<u4"
HELD_LENGTH: Final = "<u4"
PREFIX_HASH: Final = "<u8"
COMMIT_COUNT: Final = "<u4"
TOKEN_ID: Final = "<i4"
DRAFT_LENGTH: Final = "<u1"
TOKEN_COUNT: Final = "<u1"
PARENT: Final = "<i1"
CASE_ACCEPTED_LENGTH: Final = "<u1"
REFUSE_REASON: Final = "<u1"
SHARED_MEMORY_OFFSET: Final = "<u8"
FEATURE_FIRST_POSITION: Final = "<u4"
FEATURE_COUNT: Final = "<u4"
