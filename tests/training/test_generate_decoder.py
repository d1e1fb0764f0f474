"""The batched decoder continues rows as the dense forward would, whatever is in other slots."""

import pytest
import torch

from tests.engine.engine_support import make_model, random_tokens, save
from training.batch_decoder import BatchDecoder, RowRequest
from training.decode_attention import matmul_attention
from training.target import DenseTarget, load_target


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DenseTarget:
    path = save(make_model(request.param), tmp_path_factory.mktemp("model"))
    return load_target(path)


def greedy(target: DenseTarget, prompt_ids: list[int], count: int) -> list[int]:
    token_ids = list(prompt_ids)
    for _ in range(count):
        _, final = target(torch.tensor([token_ids]), ())
        token_ids.append(int((final[0, -1] @ target.head.T).argmax()))
        if token_ids[-1] in target.config.eos_token_ids:
            break
    return token_ids[len(prompt_ids) :]


def decoder_of(target: DenseTarget, rows: int = 4, length: int = 96) -> BatchDecoder:
    return BatchDecoder(target, rows=rows, length=length, attention=matmul_attention)


def request(prompt_ids: list[int], count: int, temperature: float = 0.0) -> RowRequest:
    return RowRequest(prompt_ids=prompt_ids, max_new_tokens=count, temperature=temperature)


def test_greedy_rows_equal_the_dense_forward_through_refilled_slots(target: DenseTarget) -> None:
    decoder = decoder_of(target)
    prompts = [random_tokens(count, seed=count) for count in (1, 40, 7, 63, 33, 12, 2)]
    counts = [20, 25, 3, 30, 17, 9, 28]
    waiting = list(range(len(prompts)))
    in_slot: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    while waiting or decoder.num_occupied():
        slots = decoder.free_slots()[: len(waiting)]
        taken = [waiting.pop(0) for _ in slots]
        in_slot.update(zip(slots, taken, strict=True))
        decoder.admit(slots, [request(prompts[i], counts[i]) for i in taken])
        decoder.run(4)
        for row in decoder.harvest():
            found[in_slot.pop(row.slot)] = row.token_ids
    for index, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        assert found[index] == greedy(target, prompt, count), index


def test_a_row_ends_with_its_end_token_and_only_then_says_so(target: DenseTarget) -> None:
    prompt = random_tokens(9, seed=3)
    whole = greedy(target, prompt, 12)
    decoder = decoder_of(target)
    decoder._is_eos[whole[5]] = True
    decoder._eos_ids = frozenset({whole[5]})
    decoder.admit([2], [request(prompt, 12)])
    decoder.run(12)
    (row,) = decoder.harvest()
    end = whole.index(whole[5]) + 1
    assert (row.slot, row.token_ids, row.ended) == (2, whole[:end], True)


def test_unfinished_rows_are_taken_as_far_as_they_came(target: DenseTarget) -> None:
    prompt = random_tokens(9, seed=4)
    decoder = decoder_of(target)
    decoder.admit([1], [request(prompt, 30)])
    decoder.run(5)
    assert decoder.harvest() == []
    (row,) = decoder.harvest_all()
    assert (row.token_ids, row.ended) == (greedy(target, prompt, 5), False)
    assert decoder.free_slots() == [0, 1, 2, 3]


def test_drawn_tokens_follow_the_models_distribution(target: DenseTarget) -> None:
    prompt = random_tokens(5, seed=6)
    rows = 3000
    decoder = decoder_of(target, rows=rows, length=8)
    torch.manual_seed(1)
    decoder.admit(range(rows), [request(prompt, 1, temperature=0.7)] * rows)
    decoder.run(1)
    drawn = torch.tensor([row.token_ids[0] for row in decoder.harvest()])
    _, final = target(torch.tensor([prompt]), ())
    wanted = torch.softmax(final[0, -1] @ target.head.T / 0.7, dim=0)
    found = torch.bincount(drawn, minlength=len(wanted)) / rows
    # The total variation of 3000 draws is itself about sqrt(sum p (1 - p)) / sqrt(rows).
    assert float((found - wanted).abs().sum()) / 2 < 0.16


def test_min_p_leaves_only_likely_tokens(target: DenseTarget) -> None:
    prompt = random_tokens(5, seed=6)
    rows = 500
    decoder = decoder_of(target, rows=rows, length=8)
    likely = RowRequest(prompt_ids=prompt, max_new_tokens=1, temperature=1.5, min_p=0.5)
    decoder.admit(range(rows), [likely] * rows)
    decoder.run(1)
    _, final = target(torch.tensor([prompt]), ())
    shares = torch.softmax((final[0, -1] @ target.head.T) / 1.5, dim=0)
    allowed = set((shares >= 0.5 * shares.max()).nonzero().flatten().tolist())
    assert {row.token_ids[0] for row in decoder.harvest()} == allowed


def test_rows_beyond_the_cache_are_not_taken(target: DenseTarget) -> None:
    decoder = decoder_of(target, length=96)
    assert decoder.fits(request(random_tokens(66), 30))
    assert not decoder.fits(request(random_tokens(67), 30))
    assert not decoder.fits(request([], 30))
    with pytest.raises(ValueError, match="length is 2000: must be at most 1024"):
        decoder_of(target, length=2000)
