"""Notices a draft service whose drafts are all but always wrong: it works, and is of no use."""

# Drafts of one draft process that are looked at together.
NUM_WATCHED_DRAFTS = 400
# Share of first draft tokens accepted, below which something must be wrong with the drafter.
MIN_FIRST_TOKEN_SHARE = 0.01


class AcceptanceWatch:
    """Looks at two counters that only grow, now and then. Not thread-safe."""

    def __init__(self) -> None:
        self._draft_boot_id = 0
        self._drafts = 0
        self._accepted = 0
        self._alert = ""

    def look(self, *, draft_boot_id: int, drafts: int, first_accepted: int, hint: str) -> str:
        """The alert now, "" for none.

        `drafts` were verified so far, `first_accepted` of them with their first token accepted.
        Each process starts anew. `hint` names the likely cause.
        """
        if draft_boot_id != self._draft_boot_id:
            self._draft_boot_id = draft_boot_id
            self._alert = ""
            self._restart(drafts, first_accepted)
        num_drafts = drafts - self._drafts
        num_accepted = first_accepted - self._accepted
        if num_accepted >= MIN_FIRST_TOKEN_SHARE * max(num_drafts, NUM_WATCHED_DRAFTS):
            # Right often enough, whatever else of this window is still to come.
            self._alert = ""
        elif num_drafts >= NUM_WATCHED_DRAFTS:
            self._alert = (
                f"{num_accepted} of the last {num_drafts} drafts had their first token accepted: "
                f"{hint}"
            )
        if num_drafts >= NUM_WATCHED_DRAFTS:
            self._restart(drafts, first_accepted)
        return self._alert

    def _restart(self, drafts: int, first_accepted: int) -> None:
        self._drafts = drafts
        self._accepted = first_accepted
