"""Seeds of several answers to one request."""

from outrider.serving.choice_seed import choice_seed


def test_choice_seeds_have_their_golden_values_and_choice_0_is_the_seed() -> None:
    assert choice_seed(0, 0) == 0
    assert choice_seed(2**64 - 1, 0) == 2**64 - 1
    assert choice_seed(0, 1) == 0x630367C9337F4B0B
    assert choice_seed(0, 2) == 0x9ACD357A7928DA85
    assert choice_seed(42, 1) == 0xFBDB64D62829DD30
    assert choice_seed(2**64 - 1, 3) == 0xBD3A8EF140774664
    seeds = {choice_seed(seed, choice) for seed in range(200) for choice in range(50)}
    assert len(seeds) == 200 * 50
