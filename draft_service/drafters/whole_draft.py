"""What is proposed of a draft that is seen only when it is whole."""

from collections.abc import Collection

from draft_service.drafters.drafter import NO_PROPOSAL, Proposal


def proposal_of(token_ids: list[int], eos_token_ids: Collection[int]) -> Proposal:
    """The draft up to its first end token, that one included; none of an empty one."""
    for index, token_id in enumerate(token_ids):
        if token_id in eos_token_ids:
            return Proposal(token_ids[: index + 1])
    return Proposal(token_ids) if token_ids else NO_PROPOSAL
