"""Start-up as an operator sees it: stages, reasons, and what must be seen before it is ready."""

import time

import pytest
from readiness_support import (
    CHAT,
    CLOSED,
    REFUSED,
    failed_words,
    loading,
    serving,
)

from outrider.v1 import status_pb2, target_pb2


def test_the_port_answers_from_the_first_moment_and_says_what_is_loading(cluster):
    cluster.do(lambda: cluster.target_status.set(loading("weights")))
    cluster.start_gateway()
    assert cluster.client.get("/livez").status_code == 200
    cluster.until(lambda: cluster.service_line("gateway")["stage"] == "connect")
    cluster.until(lambda: cluster.service_line("target")["stage"] == "weights")
    status, body = cluster.readyz()
    assert status == 503 and body["ready"] is False
    line = cluster.service_line("target")
    assert (line["state"], line["reason"]) == ("LOADING", "shard 3 of 9")
    assert "LOADING in stage weights" in cluster.service_line("gateway")["reason"]
    assert cluster.client.get("/health").json() == cluster.client.get("/readyz").json()
    for path, payload in (("/v1/chat/completions", CHAT), ("/v1/completions", {"x": 1})):
        response = cluster.client.post(path, json=payload)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert "gateway" in response.json()["error"]["message"]
    assert cluster.client.get("/v1/models").status_code == 503
    assert cluster.model.admitted == []
    cluster.do(lambda: cluster.target_status.set(serving))
    cluster.wait_ready()


def test_a_draft_that_is_still_loading_keeps_the_gateway_from_being_ready(cluster):
    cluster.do(lambda: cluster.draft_status.set(loading("weights")))
    cluster.start_gateway()
    cluster.until(lambda: "draft: LOADING" in cluster.service_line("gateway")["reason"])
    assert cluster.readyz()[0] == 503
    cluster.do(lambda: cluster.draft_status.set(serving))
    cluster.wait_ready()


def test_what_a_dead_service_said_last_is_kept_and_shown(cluster):
    cluster.do(lambda: cluster.target_status.set(loading("weights")))
    cluster.start_gateway()
    cluster.until(lambda: cluster.service_line("target")["state"] == "LOADING")
    cluster.call(cluster.target.stop())
    cluster.until(lambda: cluster.service_line("target")["state"] == "GONE")
    line = cluster.service_line("target")
    assert line["stage"] == "weights"
    assert line["reason"].startswith("gone; last known: LOADING in stage weights")


def test_a_service_that_was_never_there_is_unreachable(cluster):
    cluster.call(cluster.draft.stop())
    cluster.start_gateway()
    cluster.until(lambda: "UNAVAILABLE" in cluster.service_line("draft")["reason"])
    assert cluster.service_line("draft")["state"] == "UNREACHABLE"
    cluster.call(cluster.draft.start())
    cluster.wait_ready()


def test_a_start_up_that_takes_too_long_names_stage_and_peer(cluster):
    cluster.do(lambda: cluster.draft_status.fail("weights", "no such file"))
    cluster.start_gateway(startup_timeout=1.0)
    cluster.until(lambda: "FAILED in stage weights" in cluster.service_line("gateway")["reason"])
    time.sleep(1)
    cluster.lifecycle.check_timeouts()
    words = failed_words(cluster)
    assert words.startswith("connect: ")
    assert "draft: FAILED in stage weights: no such file" in words


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda info: setattr(info, "name", "another"), "name"),
        (lambda info: setattr(info.identity, "vocab_size", 7), "identity.vocab_size"),
        (
            lambda info: setattr(info.identity, "tokenizer_sha256", "ff"),
            "identity.tokenizer_sha256",
        ),
        (lambda info: info.identity.eos_token_ids.append(9), "identity.eos_token_ids"),
    ],
)
def test_a_target_with_another_model_fails_the_handshake_by_field(cluster, change, field):
    change(cluster.model.info)
    cluster.start_gateway()
    words = failed_words(cluster)
    assert words.startswith("handshake: ModelMismatch: " + field)
    assert cluster.model.admitted == []


def test_a_refused_link_fails_the_handshake_with_its_reason(cluster):
    cluster.link(REFUSED, "identity.tokenizer_sha256: target has aa, draft has bb")
    cluster.start_gateway()
    words = failed_words(cluster)
    assert words.startswith("handshake: ")
    assert "REFUSED: identity.tokenizer_sha256: target has aa, draft has bb" in words


def test_the_handshake_waits_until_the_link_is_in_use(cluster):
    cluster.link(status_pb2.LINK_STATE_CONNECTING)
    cluster.start_gateway()
    cluster.until(lambda: "CONNECTING" in cluster.service_line("gateway")["reason"])
    assert cluster.readyz()[0] == 503
    cluster.link(CLOSED)
    cluster.wait_ready()


def test_the_canary_goes_through_decode_with_drafts_and_without(cluster):
    cluster.start_gateway()
    cluster.wait_ready()
    assert cluster.model.kinds[:3] == ["attach", "policy", "admit"]
    admits = [admit for batch in cluster.model.admitted for admit in batch.sequences]
    lengths = [(admit.sampling.temperature, admit.speculation.draft_length) for admit in admits]
    assert sorted(lengths) == [(0.0, 0), (0.0, 5), (0.8, 0), (0.8, 5)]
    assert all(admit.max_tokens <= 64 for admit in admits)
    stages = cluster.client.get("/status").json()["details"]["gateway"]["stages"]
    assert [stage["name"] for stage in stages] == [
        "config", "tokenizer", "connect", "handshake", "canary",
    ]  # fmt: skip
    assert "draft tokens accepted" in stages[-1]["detail"]


def test_with_a_threshold_of_one_row_drafted_canaries_run_one_after_the_other(cluster):
    cluster.model.step_seconds = 0.01
    cluster.start_gateway(speculative_disable_batch_threshold=1)
    cluster.wait_ready()
    assert cluster.model.policies[0].max_decode_rows == 1
    kinds = [
        (kind, admit.speculation.draft_length)
        for kind, batch in zip(
            [kind for kind in cluster.model.kinds if kind == "admit"],
            cluster.model.admitted,
            strict=True,
        )
        for admit in batch.sequences
    ]
    assert [length for _, length in kinds] == [0, 0, 5, 5]
    assert cluster.model.most_drafting == 1


def test_without_a_draft_service_only_plain_canaries_run_and_nothing_is_degraded(cluster):
    cluster.start_gateway(draft_address="")
    cluster.wait_ready()
    admits = [admit for batch in cluster.model.admitted for admit in batch.sequences]
    assert {admit.speculation.draft_length for admit in admits} == {0}
    body = cluster.readyz()[1]
    assert body["degraded"] is False
    assert [line["service"] for line in body["services"]] == ["gateway", "target"]
    assert cluster.model.policies == [target_pb2.SpeculationPolicy()]


def test_drafts_that_change_a_token_fail_the_canary(cluster):
    cluster.model.lies_with_drafts_at = 7
    cluster.start_gateway()
    words = failed_words(cluster)
    assert words.startswith("canary: TokensDiffer: ")
    assert "token 7" in words


def test_where_rounding_depends_on_the_rows_a_near_tie_passes_the_canary_and_is_told(
    cluster, caplog
):
    cluster.model.lies_with_drafts_at = 7
    cluster.model.info.rounding_depends_on_rows = True
    caplog.set_level("INFO")
    cluster.start_gateway()
    cluster.wait_ready()
    told = [record.getMessage() for record in caplog.records if "near tie" in record.getMessage()]
    assert told and "token 7 is" in told[0]


def test_the_token_behind_the_prompt_is_no_near_tie_anywhere(cluster):
    cluster.model.lies_with_drafts_at = 0
    cluster.model.info.rounding_depends_on_rows = True
    cluster.start_gateway()
    words = failed_words(cluster)
    assert words.startswith("canary: TokensDiffer: ")
    assert "token 0" in words


def test_a_canary_without_an_accepted_token_fails_or_warns(cluster, caplog):
    cluster.model.accepts = False
    cluster.start_gateway()
    words = failed_words(cluster)
    assert words.startswith("canary: CanaryFailed: no draft token was accepted")


def test_a_missing_acceptance_is_only_a_warning_where_that_is_wanted(cluster, caplog):
    cluster.model.accepts = False
    cluster.start_gateway(canary_acceptance="warn")
    cluster.wait_ready()
    assert any(
        record.levelname == "WARNING" and "no draft token was accepted" in record.getMessage()
        for record in caplog.records
    )
    assert cluster.readyz()[1]["degraded"] is False


def test_a_draft_that_fails_during_the_canary_is_named_with_stage_and_reason(cluster):
    cluster.model.accepts = False

    def proposing(message: status_pb2.ServiceStatus) -> None:
        message.stages.add(name="propose", state=status_pb2.STAGE_STATE_RUNNING)

    cluster.do(lambda: cluster.draft_status.set(proposing))
    cluster.start_gateway()
    cluster.until(lambda: "no draft token" in cluster.service_line("gateway")["reason"])
    assert "draft: SERVING in stage propose" in cluster.service_line("gateway")["reason"]
    cluster.do(lambda: cluster.draft_status.fail("propose", "injected fault"))
    words = failed_words(cluster)
    assert words.startswith("canary: ")
    assert "draft: FAILED in stage propose: injected fault" in words


def test_a_target_that_fails_during_the_canary_is_named_with_stage_and_reason(cluster):
    cluster.model.step_seconds = 0.2
    cluster.start_gateway()
    cluster.until(lambda: cluster.service_line("gateway")["stage"] == "canary")
    cluster.do(lambda: cluster.target_status.fail("verify", "out of memory"))
    words = failed_words(cluster)
    assert words.startswith("canary: ")
    assert "target: FAILED in stage verify: out of memory" in words
