"""The alert of a link whose drafts are all but always wrong."""

from target_service.acceptance_watch import AcceptanceWatch

HINT = "a head trained for another model?"


def look(watch: AcceptanceWatch, drafts: int, first_accepted: int, boot_id: int = 1) -> str:
    return watch.look(
        draft_boot_id=boot_id, drafts=drafts, first_accepted=first_accepted, hint=HINT
    )


def test_so_many_drafts_with_hardly_a_right_first_token_are_an_alert_in_words() -> None:
    watch = AcceptanceWatch()
    assert look(watch, 0, 0) == ""
    assert look(watch, 399, 0) == ""
    assert look(watch, 410, 3) == (
        "3 of the last 410 drafts had their first token accepted: a head trained for another model?"
    )
    # It stays while nothing is known to be better ...
    assert look(watch, 500, 4) != ""
    # ... and goes as soon as the share of a whole window is reached.
    assert look(watch, 520, 7) == ""


def test_one_in_a_hundred_is_enough_and_later_windows_count_alone() -> None:
    watch = AcceptanceWatch()
    look(watch, 0, 0)
    assert look(watch, 400, 4) == ""
    assert look(watch, 800, 7) == "3 of the last 400 drafts had their first token accepted: " + HINT
    assert look(watch, 1200, 407) == ""


def test_another_process_starts_anew_and_is_not_blamed_for_what_came_before() -> None:
    watch = AcceptanceWatch()
    look(watch, 0, 0)
    assert look(watch, 400, 0) != ""
    assert look(watch, 400, 0, boot_id=2) == ""
    assert look(watch, 799, 0, boot_id=2) == ""
    assert look(watch, 800, 0, boot_id=2) != ""
