"""The target's start-up: a straight line whose every step takes the results of the steps before
it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from outrider.engine.boot import Engine, Stage
from outrider.engine.config import EngineConfig
from outrider.engine.devices import boot_engine, gpu_uuid
from outrider.engine.first_decode import step_milliseconds
from outrider.engine.noise import NOISE_VERSION
from outrider.engine.prefix_hash import PREFIX_HASH_ALGORITHM
from outrider.serving.errors import ConfigurationError
from outrider.serving.gpu_monitor import monitor_gpu
from outrider.serving.grammar_compiler import GrammarCompiler, make_grammar_compiler
from outrider.serving.lifecycle import Lifecycle
from outrider.serving.link_protocol import PROTOCOL_VERSION
from outrider.serving.model_source import resolve_model
from outrider.serving.tls import channel_credentials
from outrider.serving.tokenizer import load_tokenizer
from outrider.v1 import draft_pb2, target_pb2
from target_service.admission import AdmissionBounds
from target_service.config import TargetConfig
from target_service.draft_link import DraftLink
from target_service.draft_wait import DraftWait
from target_service.drafts import DraftSource
from target_service.feature_intake import FeatureIntake
from target_service.feature_layers import parse_feature_layers
from target_service.first_requests import FirstRequests, run_first_requests
from target_service.link_mailbox import LinkMailbox
from target_service.linked_drafts import LinkedDrafts
from target_service.no_drafts import NoDrafts
from target_service.scheduler import Scheduler, SchedulerBounds
from target_service.statistics import Statistics
from target_service.step_loop import StepLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A whole target: it has decoded, plainly and with drafts, before it exists."""

    engine: Engine
    model_info: target_pb2.ModelInfo
    bounds: AdmissionBounds
    grammar_compiler: GrammarCompiler
    scheduler: Scheduler
    statistics: Statistics
    step_loop: StepLoop
    first_requests: FirstRequests

    def statistics_message(self) -> target_pb2.TargetStatistics:
        """Counters and levels now."""
        return self.statistics.to_message(
            running_sequences=len(self.scheduler.running),
            waiting_sequences=self.scheduler.num_waiting,
            kv_blocks_free=self.engine.block_pool.num_free,
            kv_blocks_used=self.engine.block_pool.num_used,
            kv_blocks_cached=self.engine.block_pool.num_cached,
            preemptions=self.scheduler.preemptions,
        )


def boot_target(
    config: TargetConfig,
    lifecycle: Lifecycle[Target],
    run_on_loop: Callable[[DraftLink], None],
) -> Target:
    """Boots engine, step loop and link. `run_on_loop` starts the link's coroutine on the event
    loop.
    """
    lifecycle.enter(Stage.CONFIG)
    if config.max_running_sequences > config.max_step_rows:
        raise ConfigurationError(
            f"max-running-sequences is {config.max_running_sequences}, "
            f"must be at most max-step-rows, {config.max_step_rows}"
        )
    source = resolve_model(config.model)
    vocabulary = load_tokenizer(source.path)
    grammar_compiler = make_grammar_compiler(vocabulary)
    engine = boot_engine(
        EngineConfig(
            model_path=source.path,
            dtype=config.dtype,
            device=config.device,
            kv_cache_bytes=config.kv_cache_bytes,
            block_size=config.block_size,
            max_sequence_length=config.max_sequence_length or None,
            max_step_rows=config.max_step_rows,
            max_sequences=config.max_running_sequences,
            max_draft_length=config.max_draft_length,
            feature_layers=parse_feature_layers(config.feature_layers),
        ),
        lifecycle,
    )
    first_requests = run_first_requests(engine, config.max_draft_length)
    statistics = Statistics(max(config.max_draft_length, 1))
    model_info = describe_model(
        config, source.name, vocabulary.sha256, vocabulary.eos_token_ids, engine
    )
    drafts = link_drafts(config, lifecycle, model_info, engine, statistics, run_on_loop)
    scheduler = Scheduler(
        engine.block_pool,
        SchedulerBounds(
            max_running_sequences=config.max_running_sequences,
            max_waiting_sequences=config.max_waiting_sequences,
            max_step_rows=config.max_step_rows,
            max_prefill_rows=config.max_prefill_rows,
            block_size=engine.limits.block_size,
            caches_prefixes=config.prefix_caching,
        ),
        on_preempt=drafts.stopped,
    )
    step_loop = StepLoop(
        engine=engine.steps,
        ahead=engine.ahead,
        scheduler=scheduler,
        drafts=drafts,
        statistics=statistics,
        max_step_rows=config.max_step_rows,
        activity=lifecycle.activity,
    )
    monitor = None if engine.device == "cpu" else monitor_gpu(gpu_uuid(engine.device))
    lifecycle.describe(
        gpu=None if monitor is None else monitor.figures,
        model_fingerprint=engine.fingerprint,
        device=engine.device,
        limits={
            "dtype": engine.dtype,
            "num-blocks": str(engine.limits.num_blocks),
            "block-size": str(engine.limits.block_size),
            "kv-granularity": str(engine.limits.kv_granularity),
            "feature-layers": ", ".join(map(str, engine.feature_layers)),
            "max-sequence-length": str(model_info.identity.max_sequence_length),
            "step-milliseconds": step_milliseconds(engine.limits.step_seconds),
        },
    )
    return Target(
        engine=engine,
        model_info=model_info,
        bounds=AdmissionBounds(
            vocab_size=engine.model_config.vocab_size,
            max_sequence_length=model_info.identity.max_sequence_length,
            max_draft_length=config.max_draft_length,
            eos_token_ids=frozenset(model_info.identity.eos_token_ids),
            max_patience_seconds=config.step_timeout / 4,
        ),
        grammar_compiler=grammar_compiler,
        scheduler=scheduler,
        statistics=statistics,
        step_loop=step_loop,
        first_requests=first_requests,
    )


def describe_model(
    config: TargetConfig,
    name: str,
    tokenizer_sha256: str,
    eos_token_ids: tuple[int, ...],
    engine: Engine,
) -> target_pb2.ModelInfo:
    """What gateway and draft must agree with."""
    limits = engine.limits
    # One block is the padding's; a sequence that fills all the others can still be computed alone.
    cache_tokens = (limits.num_blocks - 1) * limits.block_size
    return target_pb2.ModelInfo(
        name=name,
        identity=target_pb2.ModelIdentity(
            vocab_size=engine.model_config.vocab_size,
            tokenizer_sha256=tokenizer_sha256,
            eos_token_ids=sorted(eos_token_ids),
            max_sequence_length=min(limits.max_sequence_length, cache_tokens),
            fingerprint=engine.fingerprint,
            hidden_size=engine.model_config.hidden_size,
        ),
        dtype=engine.dtype,
        device=engine.device,
        max_running_sequences=config.max_running_sequences,
        step_costs=[
            target_pb2.StepCost(rows=rows, seconds=seconds) for rows, seconds in limits.step_seconds
        ],
        max_draft_length=config.max_draft_length,
        rounding_depends_on_rows=engine.rounding_depends_on_rows,
    )


def link_drafts(
    config: TargetConfig,
    lifecycle: Lifecycle[Target],
    model_info: target_pb2.ModelInfo,
    engine: Engine,
    statistics: Statistics,
    run_on_loop: Callable[[DraftLink], None],
) -> DraftSource:
    """The link to the draft service, running, or no drafts where no address is given."""
    if not config.draft_address:
        return NoDrafts()
    mailbox = LinkMailbox(statistics)
    link = DraftLink(
        address=config.draft_address,
        hello=draft_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            noise_version=NOISE_VERSION,
            prefix_hash_algorithm=PREFIX_HASH_ALGORITHM,
            target_boot_id=lifecycle.boot_id,
            identity=model_info.identity,
            max_sequences=config.max_running_sequences,
            max_draft_length=config.max_draft_length,
        ),
        intake=FeatureIntake(
            layer_ids=engine.feature_layers,
            hidden_size=engine.model_config.hidden_size,
            transport=config.feature_transport,
            load=engine.steps.make_tap,
        ),
        mailbox=mailbox,
        statistics=statistics,
        on_status=lambda status: lifecycle.set_links([status]),
        credentials=channel_credentials(config.tls),
    )
    drafts = LinkedDrafts(
        mailbox=mailbox,
        send=link.send,
        num_unsent=link.num_unsent,
        target_boot_id=lifecycle.boot_id,
        num_slots=config.max_running_sequences,
        vocab_size=model_info.identity.vocab_size,
        wait=DraftWait([(cost.rows, cost.seconds) for cost in model_info.step_costs]),
        statistics=statistics,
    )
    run_on_loop(link)
    return drafts
