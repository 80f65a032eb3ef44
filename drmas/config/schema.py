"""Every setting of a run, one model per section (those that know of tasks are in `tasks`); docstrings of fields are their help.

Models are frozen and refuse unknown keys; `load` names the nearest valid one. Units stand in the names. The team's section
is validated by the team's own model (`drmas.agents.team`), since each team declares its own agents.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from drmas.config.cluster import ClusterConfig, SyncConfig, check_engine_hosts
from drmas.config.derived import completed
from drmas.config.section import Name, NonNegativeFloat, Section
from drmas.config.tasks import CurriculumConfig, DataConfig, RewardConfig, ToolConfig


class EngineConfig(Section):
    """The inference engines of one policy."""

    backend: Literal["vllm", "torch"] = "vllm"
    """`vllm`: vLLM, in a process of its own. `torch`: plain PyTorch in the trainer's own process, up at once and without a
    cache between requests, for models so small that serving them costs more than computing them."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and activations of the engine. With float32 on both sides the log-prob gap stays under 1e-4."""
    max_model_tokens: PositiveInt = 1024
    """Longest prompt plus response."""
    max_concurrent: PositiveInt = 64
    """Sequences decoded together."""
    kv_cache_bytes: PositiveInt = 512 * 2**20
    """Memory for the KV cache (CPU; a GPU engine takes `gpu_memory_fraction` of its card)."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    tensor_parallel: PositiveInt = 1
    threads: PositiveInt | None = None
    """CPU threads of the engine; all cores if unset."""
    start_timeout_seconds: PositiveFloat = 300.0
    request_timeout_seconds: PositiveFloat = 600.0
    max_restarts: Annotated[int, Field(ge=0)] = 2
    """How often in one run an engine that died is started again; episodes in flight go on from their last finished turn."""
    replicas: PositiveInt = 1
    """Engine processes that serve this policy. An episode keeps to one of them, so that its prefixes stay cached."""
    hosts: list[str] | None = None
    """The engine hosts of this policy, of which its replicas take one after the other; those of `cluster.engine_hosts` if
    unset. An empty list is the host of rank 0."""
    gpus: Literal["own", "shared"] = "own"
    """own: `tensor_parallel` GPUs for each replica that no trainer rank of the host and no other engine has. shared: those of
    the trainer ranks, the first ones first; the trainer's numbers and `gpu_memory_fraction` must fit into one together. On an
    engine host, which has no trainer ranks, engines always have their own."""
    sleep: bool = False
    """With shared GPUs: give the engine's memory back while policies are trained, and take it again for the rollout. Needs
    rollouts that don't run ahead."""
    options: dict[str, Any] = {}
    """Further vLLM engine arguments, of capacity and scheduling; what would change the sampled distribution is refused."""

    @field_validator("hosts")
    @classmethod
    def _addresses(cls, urls: list[str] | None) -> list[str] | None:
        return urls if urls is None else check_engine_hosts(urls)

    @model_validator(mode="after")
    def _one_small_model(self) -> EngineConfig:
        if self.backend == "torch":
            for key, plain in (("replicas", 1), ("tensor_parallel", 1), ("options", {}), ("sleep", False)):
                if getattr(self, key) != plain:
                    raise ValueError(f"backend is torch, which serves one small model as it is; {key} is for vllm: unset it")
            if self.hosts:
                raise ValueError("backend is torch, which is in the trainer's process; hosts is for vllm: unset it")
        if self.sleep and self.gpus == "own":
            raise ValueError("sleep is true and gpus is own; nobody else could use what it gives back: set gpus to shared")
        return self


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685) on a frozen base. Policies with adapters on one base hold it in memory once."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """The adapters' product is scaled by alpha / rank."""
    targets: Annotated[list[Literal["qkv", "proj", "fc1", "fc2"]], Field(min_length=1)] = ["qkv", "proj", "fc1", "fc2"]
    """Which linear layers get adapters: query, key and value; attention output; gate and up; down."""
    sync: Literal["merged", "adapter"] = "merged"
    """What the engine gets after an update: whole weights with the adapters merged in, or the adapters alone, which it adds to
    its base at every layer. Those are a small part of the bytes and lose nothing to the rounding of bfloat16 weights, but slow
    sampling down."""


class CriticConfig(Section):
    """The value model of a policy, for `advantage.preset = "ppo"`: the policy's architecture with one number per token.

    Schedule, weight decay, Adam's settings, dtype, layout and recompute are the policy's.
    """

    model: str | None = None
    """Where its weights start; the policy's own model if unset. The value head starts at zero."""
    lr: PositiveFloat = 1e-5
    clip_value: PositiveFloat | None = 0.2
    """How far a value may move from the one that the advantages were made with before its loss is clipped."""
    clip_grad_norm: PositiveFloat = 1.0


def _check_dual_clip(value: float | None) -> None:
    if value is not None and value <= 1.0:
        raise ValueError(f"dual_clip is {value}; it must exceed 1, or be unset to switch it off")


class LossOverrides(Section):
    """What a policy changes of the run's `loss`; what is unset stays as it is there."""

    clip_low: NonNegativeFloat | None = None
    clip_high: NonNegativeFloat | None = None
    dual_clip: PositiveFloat | None = None
    entropy_bonus: NonNegativeFloat | None = None
    kl: Literal["k2", "k3"] | None = None
    kl_coefficient: NonNegativeFloat | None = None

    @model_validator(mode="after")
    def _dual_clip_above_one(self) -> LossOverrides:
        _check_dual_clip(self.dual_clip)
        return self


class PolicyConfig(Section):
    """One trainable model: its weights, parallel layout, optimiser and engine."""

    model: str
    """A Hugging Face folder, a name on the hub such as `Qwen/Qwen3-4B` (fetched where the hub's cache lacks its safetensors),
    `packaged:smollm2-135m-instruct`, or `tiny:NAME` (a small random model made on the spot)."""
    like: str | None = None
    """Another policy, whose settings this one has where it sets none of its own; weights, optimiser and engine are its own all
    the same. Unset once the configuration is read, since all values stand there then."""
    num_ranks: PositiveInt | None = None
    """Trainer ranks of this policy where `train.placement` is split; an equal share of what the others leave if unset."""
    tensor_parallel: PositiveInt = 1
    """Tensor-parallel size of the trainer; must divide the attention heads. The other ranks are data-parallel."""
    sequence_parallel: bool = False
    pipeline_parallel: PositiveInt = 1
    """Stages of the pipeline (1F1B); must divide the layers."""
    context_parallel: PositiveInt = 1
    """Ranks that share the tokens of a microbatch, for rows too long for one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameters of the trainer (the optimiser keeps fp32 copies for bfloat16)."""
    attention: Literal["auto", "transformer-engine", "flex", "sdpa"] = "auto"
    """Which attention the trainer takes; `drmas doctor` and `--dry-run` say what auto is here, and why."""
    fp8: Literal["hybrid", "e4m3"] | None = None
    """TransformerEngine's fp8 recipe for the linear layers (GPU; widens the log-prob gap to the engine)."""
    lr: PositiveFloat = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """After warm-up, over the run's updates: constant, down to `lr_min` by a line or a half cosine, or (wsd) constant and a
    linear descent over the last `lr_decay_share`."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    lr_min: NonNegativeFloat = 0.0
    lr_decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    weight_decay: NonNegativeFloat = 0.01
    no_decay: list[Literal["norm", "bias", "embedding"]] = ["norm", "bias"]
    """Parameters without weight decay; a tied head counts as the embedding."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_eps: PositiveFloat = 1e-8
    clip_grad_norm: PositiveFloat = 1.0
    tokens_per_microbatch: PositiveInt = 4096
    """Token budget of one packed microbatch; a longer row gets a microbatch of its own."""
    prefix_sharing: bool = True
    """Compute a prompt's start that several rows of a microbatch share once, where the attention allows."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to compute again in the backward pass: of norms and MLPs, or of whole layers. Less memory, more time."""
    overlap: bool | None = None
    """Reduce gradients during backward, gather parameters during forward; if unset, on with several replicas on GPUs."""
    offload_optimizer: bool = False
    """Keep fp32 parameters and moments in host memory and step there (GPU; a no-op on a CPU)."""
    agent_grad_norm_every: Annotated[int, Field(ge=0)] = 1
    """Every how many updates the gradient norm is measured per agent where agents share the policy; 0 never. Such an update
    runs the agents' rows one agent after the other: a reduction per agent and a gradient buffer more, no extra pass."""
    freeze: list[str] = []
    """Patterns of Hugging Face tensor names that aren't trained, such as `model.embed_tokens.*` or `model.layers.[0-3].*`."""
    trainable: bool = True
    """False keeps the weights as they are: rollouts only, no optimiser."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights."""
    reference: str | None = None
    """The frozen model that `loss.kl` measures from; `model` if unset (under `lora`: the base, at no cost)."""
    price_per_million_tokens: NonNegativeFloat | None = None
    """What a million tokens, read or generated, cost, for the cost per solved task of `drmas eval`."""
    critic: CriticConfig = CriticConfig()
    loss: LossOverrides = LossOverrides()
    engine: EngineConfig = EngineConfig()
    sync: SyncConfig = SyncConfig()

    @model_validator(mode="after")
    def _lora_alone(self) -> PolicyConfig:
        if self.lora is None:
            return self
        if not self.trainable:
            raise ValueError("lora is set and trainable is false; adapters are there to be trained: unset one of them")
        if self.freeze:
            raise ValueError(f"lora is set and freeze is {self.freeze}; lora freezes the whole base: unset one of them")
        if self.lora.sync == "adapter" and self.engine.backend == "torch":
            raise ValueError("lora.sync is adapter and engine.backend is torch, which takes whole weights: set sync to merged")
        if self.reference is not None:
            raise ValueError(f"lora is set and reference is {self.reference!r}; under lora the base is the reference: unset it")
        return self

    @property
    def syncs_adapters(self) -> bool:
        """Whether the engine gets the adapters alone after an update."""
        return self.lora is not None and self.lora.sync == "adapter"


class RemoteConfig(Section):
    """A frozen model behind an OpenAI-compatible URL, which agents name as their `policy`. It is asked and never trained."""

    url: str
    """For example http://127.0.0.1:8000/v1"""
    model: str
    """The model's name at the server."""
    api_key_env: str | None = None
    """The environment variable that holds the key; the key itself never stands in a configuration."""
    timeout_seconds: PositiveFloat = 120.0
    """Of one attempt."""
    max_retries: Annotated[int, Field(ge=0)] = 4
    """After 429, 5xx, a timeout or a lost connection, with growing pauses."""
    max_concurrent: PositiveInt = 32
    price_per_million_tokens: NonNegativeFloat | None = None


class DynamicSamplingConfig(Section):
    """Replace groups whose rewards are all equal, which teach nothing, by fresh tasks (DAPO, arXiv 2503.14476)."""

    enabled: bool = False
    max_tries: PositiveInt = 4
    """Rounds of tasks per step, the first one counted; after the last, groups without signal fill the step."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """Tasks that are started per task that is missing. With more than 1, groups may be left over: the next step takes them
    first, so that it needs `max_staleness` of at least 1."""


class RolloutConfig(Section):
    """How episodes run."""

    tasks_per_step: PositiveInt = 8
    group_size: PositiveInt = 4
    """Episodes per task. Elsewhere called n, num_generations or n_samples_per_prompt."""
    max_concurrent_episodes: PositiveInt = 256
    episode_timeout_seconds: PositiveFloat = 600.0
    """For the whole episode; the time that a dead engine takes to come back doesn't count."""
    turn_timeout_seconds: PositiveFloat | None = None
    """For one request of an agent."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """How many steps rollouts may run ahead of the weights that are trained. 0: on-policy. 1: while a step is trained, the next
    one is rolled out with the weights from before (one-step-off). More needs `carry_over`."""
    carry_over: bool = False
    """Weights arrive while episodes are in flight, which go on with the new ones (each token keeps the version that sampled
    it); a step takes the groups that are done, and slow ones are carried over, within `max_staleness`."""
    dynamic: DynamicSamplingConfig = DynamicSamplingConfig()
    deterministic: bool = True
    """Advance the engines only when every live episode waits for them, so that batches, and with them the last bits of the
    log-probs, never depend on timing (I9). Costs the engine a short wait per finished turn."""

    @model_validator(mode="after")
    def _ahead(self) -> RolloutConfig:
        if self.carry_over and self.deterministic:
            raise ValueError(
                "carry_over is true and deterministic is true; which tokens the new weights sample depends on timing then: set "
                "rollout.deterministic to false"
            )
        if self.carry_over and self.max_staleness == 0:
            raise ValueError("carry_over is true and max_staleness is 0; what is carried over is stale by a step: set it to 1")
        if self.max_staleness > 1 and not self.carry_over:
            raise ValueError(
                f"max_staleness is {self.max_staleness} and carry_over is false; rollouts run at most one step ahead then: set "
                "carry_over, or max_staleness to 1"
            )
        if self.dynamic.enabled and self.dynamic.oversample > 1 and self.carry_over:
            raise ValueError(
                f"dynamic.oversample is {self.dynamic.oversample:g} and carry_over is true; what is carried over is surplus "
                "enough, and more of it could not be taken in time: set oversample to 1"
            )
        if self.dynamic.enabled and self.dynamic.oversample > 1 and self.max_staleness == 0:
            raise ValueError(
                f"dynamic.oversample is {self.dynamic.oversample:g} and max_staleness is 0; groups that are left over would be "
                "stale in the next step: set oversample to 1, or max_staleness to 1"
            )
        return self


class AdvantageSettings(Section):
    """Which rows are compared with each other. A preset, and what to change of it."""

    preset: str = "dr-mas"
    """dr-mas, grpo, dr-mas-paper, mean=agent,std=task, mean=task,std=agent, grpo-turns, rloo, dapo, gigpo, reinforce++,
    reinforce++-baseline, remax, ema, difference, ppo. `drmas/core/estimators/README.md` has the formula, the source and the
    weak spot of each. dapo also sets loss.clip_high 0.28, loss.aggregation token, loss.kl unset and rollout.dynamic.enabled,
    each unless the configuration sets it (as another run's config.json does with all); a note says what it set and what not.
    loss.dual_clip, which the paper doesn't have, stays. As the preset of a single agent it sets nothing."""
    mean: Literal["agent", "task", "none"] | None = None
    std: Literal["agent", "task", "none"] | None = None
    weighting: Literal["turn", "episode"] | None = None
    ddof: Annotated[int, Field(ge=0, le=1)] | None = None
    eps: NonNegativeFloat | None = None
    min_std: NonNegativeFloat | None = None
    singleton: Literal["zero", "raw"] | None = None
    penalty: Literal["inside", "outside"] | None = None
    """Penalties are part of what is normalised, or taken off afterwards; inside in dapo and dr-mas-paper unless set."""
    whiten: Literal["pooled", "agent"] | None = None
    """After the preset: subtract the mean of the step's advantages and divide by their standard deviation, over the tokens of
    all agents, or of each agent apart. reinforce++ and reinforce++-baseline whiten pooled by themselves, ppo each agent
    apart."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount: per token for ppo and reinforce++, per turn for gigpo (whose reference scripts have 0.95)."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Generalised advantage estimation (arXiv 1506.02438), for ppo."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of the comparison within equal states beside that of whole episodes, for gigpo."""
    anchor_norm: Literal["mean", "mean_std"] = "mean_std"
    """Of equal states: subtract their mean return, or divide by its standard deviation, too; for gigpo."""
    anchor_similarity: Annotated[float, Field(gt=0, lt=1)] | None = None
    """How alike two prompts must be to count as one state (difflib's ratio); equal ones only if unset; for gigpo."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Weight of an agent's baseline of before against the step's mean reward, for ema."""
    counterfactuals: PositiveInt = 1
    """Episodes per task and trained agent that run without the agent, for difference."""


class AdvantageConfig(AdvantageSettings):
    """Which rows are compared with each other: for all agents, and for single ones that differ."""

    agents: dict[str, AdvantageSettings] = {}
    """Agent -> the settings that its rows have instead. Without a preset they are changes to the run's settings; with one, to
    that preset. Statistics that are pooled over agents still see all rows."""

    @model_validator(mode="before")
    @classmethod
    def _agents_change_the_run(cls, data: Any) -> Any:
        """Every value stands in the result, so that the run's config.json reads back as it is."""
        agents = data.get("agents") if isinstance(data, dict) else None
        if not isinstance(agents, dict):
            return data
        run = {name: value for name, value in data.items() if name != "agents"}
        whole = {
            agent: {**run, **own} if isinstance(own, dict) and "preset" not in own else own for agent, own in agents.items()
        }
        return {**data, "agents": whole}


class LossConfig(Section):
    """The clipped policy loss."""

    clip_low: NonNegativeFloat = 0.2
    """The ratio's lower bound is 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio's upper bound is 1 + clip_high."""
    dual_clip: PositiveFloat | None = 3.0
    """Bound of the loss at negative advantages, in units of the advantage; off if unset."""
    entropy_bonus: NonNegativeFloat = 0.0
    kl: Literal["k2", "k3"] | None = None
    """Estimator of the divergence from the policy's `reference` whose gradient is followed; off if unset. k2's is that of the
    divergence on on-policy tokens, k3's has less variance and a bias. (k1's would be zero in expectation.)"""
    kl_coefficient: NonNegativeFloat = 0.001
    aggregation: Literal["token", "turn", "episode"] = "token"
    """Equal weight to every response token of the update, to every turn, or to every episode."""
    mismatch: Literal["none", "truncate", "mask"] | None = None
    """Correct for the engine's probabilities differing from the trainer's before the update: importance weights truncated at
    `mismatch_high`, tokens masked where the weight is outside both bounds, or nothing. If unset: truncate where rollouts may
    be stale (`rollout.max_staleness`), else none."""
    mismatch_low: NonNegativeFloat = 0.5
    mismatch_high: PositiveFloat = 2.0

    @model_validator(mode="after")
    def _dual_clip_above_one(self) -> LossConfig:
        _check_dual_clip(self.dual_clip)
        return self

    @model_validator(mode="after")
    def _mismatch_bounds_in_order(self) -> LossConfig:
        if self.mismatch == "mask" and self.mismatch_low > self.mismatch_high:
            raise ValueError(
                f"mismatch_low is {self.mismatch_low:g} and mismatch_high is {self.mismatch_high:g}; that masks every token: "
                "set mismatch_low to at most mismatch_high"
            )
        return self


class TrainConfig(Section):
    """The length of the run and of its pieces."""

    steps: Annotated[int, Field(ge=0)] = 10
    """0: the warm start alone, and its export."""
    epochs: PositiveInt | None = None
    """Passes over the data, in the place of `steps`, which are epochs x tasks / `rollout.tasks_per_step` once the data is read.
    (Tasks that dynamic sampling drops come on top.) An epoch of a mix, or under a curriculum, is as many draws as there are
    tasks in all: some come several times in it, others not at all. The option --train.steps takes the place of epochs that a
    recipe sets."""
    ranks: PositiveInt | None = None
    """The trainer ranks that the run is laid out for; any number if unset. A start with another number is refused, and
    `--dry-run` describes a job of so many."""
    updates_per_step: PositiveInt = 1
    """Optimiser updates per step and policy; tasks are split over them, as evenly as they go."""
    placement: Literal["shared", "split"] = "shared"
    """shared: every rank holds a part of every policy, and policies are updated one after the other. split: each policy has
    ranks of its own (`policies.NAME.num_ranks`, in the order of the configuration), and all are updated at the same time."""
    threads: PositiveInt | None = None
    """CPU threads per trainer rank; all cores divided by the ranks of this host if unset."""


class WarmStartConfig(Section):
    """Supervised steps on demonstrations that the team writes itself, for models that start from nothing."""

    steps: PositiveInt = 200
    batch_size: PositiveInt = 64
    lr: PositiveFloat = 1e-3
    error_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of demonstrations with a wrong answer, so that reinforcement has something to correct."""


class EvalConfig(Section):
    """What `drmas eval` does; training doesn't read it."""

    data: DataConfig | None = None
    """The tasks; the run's own `data` if unset."""
    samples: PositiveInt = 4
    """Episodes per task: n of avg@n and pass@k."""
    max_tasks: PositiveInt | None = None
    temperature: NonNegativeFloat | None = None
    """Of all agents; each agent's own if unset. 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    bootstrap: PositiveInt = 1000
    """Resamples of tasks behind each interval."""
    ablate: list[str] = []
    """Agents that speak with the base model instead, one evaluation each, beside the whole team's."""


class CheckpointConfig(Section):
    every_steps: Annotated[int, Field(ge=0)] = 0
    """0 saves at the end only."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints stay."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """How many more stay for their value of `best_metric`."""
    best_metric: str = "reward/mean"
    """The larger the better; measured in the step that was saved, with the weights from before its update."""
    asynchronous: bool = False
    """Write checkpoints while training goes on, from a copy in host memory."""
    export: bool = True
    """Write one Hugging Face folder per policy at the end."""


class AlarmConfig(Section):
    """When a step's per-agent numbers raise an alarm, in the console, in alarms.jsonl and in the report; training goes on."""

    window: Annotated[int, Field(ge=2)] = 20
    """Steps that the running medians look back on."""
    spike: Annotated[float, Field(gt=1)] = 3.0
    """Gradient norm, in multiples of its running median."""
    collapse: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Entropy or response length below this share of its running median."""
    idle_steps: PositiveInt = 5
    """Steps in a row in which an agent has no rows."""
    constant_share: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Share of an agent's rows without any comparison, because rewards are equal, over `idle_steps` steps in a row."""
    truncated_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of an agent's turns that were cut at the length limit."""
    logprob_gap: PositiveFloat = 0.05
    """Mean distance of the trainer's to the engine's log-probs, in nats, of fresh rows."""


class TelemetryConfig(Section):
    alarms: AlarmConfig = AlarmConfig()
    tensorboard: bool = True
    report: bool = True
    profile: Annotated[str, Field(pattern=r"^(steps=)?\d+(-\d+)?$")] | None = None
    """Steps to trace, such as `steps=3-5`: `profile/trace.json` opens in Perfetto."""
    transcripts: Annotated[int, Field(ge=0)] = 4
    """Episodes per step whose transcript goes into the report."""
    episodes: bool = True
    """Write every step's episodes, with ids, log-probs and advantages; without them there are no transcripts and no
    `inspect`."""
    moments_every_steps: Annotated[int, Field(ge=0)] = 0
    """Every how many steps the second moment of each agent's gradient is measured, row by row, beside what it would be under
    one pooled baseline and under per-agent normalisation; 0 never. Costs a backward pass per measured row."""
    moments_rows: PositiveInt = 32
    """Rows per agent that are measured then, spread evenly over the step's rows."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Serve the step's numbers to Prometheus on this port of rank 0's host, with `/health`; 0 takes a free one. Off if
    unset."""
    metrics_host: str = "127.0.0.1"
    """The address to serve them on. Nobody is asked for a password."""
    stall_seconds: PositiveFloat = 1800.0
    """`/health` says 503 where no step has ended for so long, or for five times the longest step so far if that is more."""


class RunConfig(Section):
    """A whole run. Recipes are TOML files of this shape."""

    name: Name = "run"
    seed: int = 0
    output: str = "runs"
    """The run's folder is `output/name`."""
    policies: dict[Name, PolicyConfig]
    remotes: dict[Name, RemoteConfig] = {}
    """Frozen models behind URLs, which agents may name as their policy."""
    tools: dict[Name, ToolConfig] = {}
    """What agents and teams may call."""
    team: dict[str, Any]
    """`name` picks the team; the other keys are the team's own."""
    data: DataConfig
    curriculum: CurriculumConfig = CurriculumConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    cluster: ClusterConfig = ClusterConfig()
    warm_start: WarmStartConfig | None = None
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    def hosts_of(self, policy: str) -> list[str]:
        """The engine hosts of a policy; none where its engines run on rank 0's host."""
        own = self.policies[policy].engine
        return [] if own.backend == "torch" else self.cluster.engine_hosts if own.hosts is None else own.hosts

    def shares_gpus(self, policy: str) -> bool:
        """Whether the policy's engines are on GPUs of trainer ranks."""
        return self.policies[policy].engine.gpus == "shared" and not self.hosts_of(policy)

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, data: Any) -> Any:
        return completed(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _shape(self) -> RunConfig:
        if not self.policies:
            raise ValueError("policies is empty; name at least one")
        if both := sorted(self.policies.keys() & self.remotes.keys()):
            raise ValueError(f"{both[0]} is a policy and a remote; agents name both as their policy: choose another name")
        if self.train.updates_per_step > self.rollout.tasks_per_step:
            raise ValueError(
                f"rollout.tasks_per_step is {self.rollout.tasks_per_step}, train.updates_per_step is "
                f"{self.train.updates_per_step}; every update needs a task of its own"
            )
        if self.warm_start is not None and self.data.type not in ("sums", "lookups"):
            raise ValueError(
                f"warm_start needs demonstrations, which data.type sums and lookups can write and {self.data.type} can't"
            )
        sleepers = [name for name, policy in self.policies.items() if policy.engine.sleep]
        if sleepers and self.rollout.max_staleness > 0:
            raise ValueError(
                f"policies.{sleepers[0]}.engine.sleep is true and rollout.max_staleness is {self.rollout.max_staleness}; an "
                "engine that sleeps during updates can't run ahead of them: set one of them back"
            )
        if self.train.steps == 0 and self.warm_start is None:
            raise ValueError("train.steps is 0 and there is no warm_start; the run would do nothing: set one of them")
        return self
