"""Every setting of a run, one model per section. A docstring under a field is its help text.

Models are frozen and refuse unknown keys; `load` names the nearest valid one. Units stand in the names. The team's section
is validated by the team's own model (`drmas.agents.team`), since each team declares its own agents.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

NonNegativeFloat = Annotated[float, Field(ge=0.0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class EngineConfig(Section):
    """The inference engine of one policy. One engine process per policy."""

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
    """How often in one run an engine that died is started again; the episodes it took along run again on the new one."""
    options: dict[str, Any] = {}
    """Further vLLM engine arguments, of capacity and scheduling; what would change the sampled distribution is refused."""


class PolicyConfig(Section):
    """One trainable model: its weights, parallel layout, optimiser and engine."""

    model: str
    """A Hugging Face folder, `packaged:smollm2-135m-instruct`, or `tiny:NAME` (a small random model made on the spot)."""
    tensor_parallel: PositiveInt = 1
    """Tensor-parallel size of the trainer; must divide the attention heads. The other ranks are data-parallel."""
    sequence_parallel: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameters of the trainer (the optimiser keeps fp32 copies for bfloat16)."""
    lr: PositiveFloat = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    lr_min: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.01
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_eps: PositiveFloat = 1e-8
    clip_grad_norm: PositiveFloat = 1.0
    tokens_per_microbatch: PositiveInt = 4096
    """Token budget of one packed microbatch; a longer row gets a microbatch of its own."""
    recompute: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    trainable: bool = True
    """False keeps the weights as they are: rollouts only, no optimiser."""
    engine: EngineConfig = EngineConfig()


class ReasoningGymData(Section):
    """Procedural tasks of the package reasoning-gym."""

    type: Literal["reasoning-gym"] = "reasoning-gym"
    name: str = "basic_arithmetic"
    """The generator's name."""
    size: PositiveInt = 1000
    seed: int = 0
    options: dict[str, Any] = {}
    """The generator's own settings, its difficulty among them."""


class JsonlData(Section):
    """One JSON object per line with `prompt` (or `question`) and `answer`, and optionally `id` and `source`."""

    type: Literal["jsonl"] = "jsonl"
    path: str


class SumsData(Section):
    """Small additions with one accepted answer, for models that learn from nothing in minutes."""

    type: Literal["sums"] = "sums"
    largest: PositiveInt = 9
    """Operands are 0 to `largest`."""
    terms: Annotated[int, Field(ge=2)] = 2
    size: PositiveInt = 1000
    seed: int = 0


DataConfig = Annotated[ReasoningGymData | JsonlData | SumsData, Field(discriminator="type")]


class RewardConfig(Section):
    """How an episode's answer becomes its reward."""

    type: Literal["math", "exact"] = "math"
    """`math` grades with math-verify in killable workers; `exact` compares the stripped text."""
    timeout_seconds: PositiveFloat = 10.0
    workers: PositiveInt = 1


class RolloutConfig(Section):
    """How episodes run."""

    tasks_per_step: PositiveInt = 8
    group_size: PositiveInt = 4
    """Episodes per task. Elsewhere called n, num_generations or n_samples_per_prompt."""
    max_concurrent_episodes: PositiveInt = 256
    episode_timeout_seconds: PositiveFloat = 600.0
    deterministic: bool = True
    """Advance the engines only when every live episode waits for them, so that batches, and with them the last bits of the
    log-probs, never depend on timing (I9). Costs the engine a short wait per finished turn."""


class AdvantageConfig(Section):
    """Which rows are compared with each other. A preset, and what to change of it."""

    preset: str = "dr-mas"
    """dr-mas, grpo, dr-mas-paper, mean=agent,std=task, mean=task,std=agent, grpo-turns, rloo."""
    mean: Literal["agent", "task", "none"] | None = None
    std: Literal["agent", "task", "none"] | None = None
    weighting: Literal["turn", "episode"] | None = None
    ddof: Annotated[int, Field(ge=0, le=1)] | None = None
    eps: NonNegativeFloat | None = None
    min_std: NonNegativeFloat | None = None
    singleton: Literal["zero", "raw"] | None = None
    penalty: Literal["inside", "outside"] | None = None


class LossConfig(Section):
    """The clipped policy loss."""

    clip_low: NonNegativeFloat = 0.2
    """The ratio's lower bound is 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio's upper bound is 1 + clip_high."""
    dual_clip: PositiveFloat | None = 3.0
    """Bound of the loss at negative advantages, in units of the advantage; off if unset."""
    entropy_bonus: NonNegativeFloat = 0.0
    aggregation: Literal["token", "turn", "episode"] = "token"
    """Equal weight to every response token of the update, to every turn, or to every episode."""

    @model_validator(mode="after")
    def _dual_clip_above_one(self) -> LossConfig:
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ValueError(f"dual_clip is {self.dual_clip}; it must exceed 1, or be unset to switch it off")
        return self


class TrainConfig(Section):
    """The length of the run and of its pieces."""

    steps: PositiveInt = 10
    updates_per_step: PositiveInt = 1
    """Optimiser updates per step and policy; tasks are split evenly over them."""
    threads: PositiveInt | None = None
    """CPU threads per trainer rank; all cores divided by the ranks of this host if unset."""


class WarmStartConfig(Section):
    """Supervised steps on demonstrations that the team writes itself, for models that start from nothing."""

    steps: PositiveInt = 200
    batch_size: PositiveInt = 64
    lr: PositiveFloat = 1e-3
    error_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of demonstrations with a wrong answer, so that reinforcement has something to correct."""


class CheckpointConfig(Section):
    every_steps: Annotated[int, Field(ge=0)] = 0
    """0 saves at the end only."""
    keep: PositiveInt = 2
    """How many checkpoints stay."""
    export: bool = True
    """Write one Hugging Face folder per policy at the end."""


class TelemetryConfig(Section):
    tensorboard: bool = True
    report: bool = True
    transcripts: Annotated[int, Field(ge=0)] = 4
    """Episodes per step whose transcript goes into the report."""


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
"""Stands in file names and metric names."""


class RunConfig(Section):
    """A whole run. Recipes are TOML files of this shape."""

    name: Name = "run"
    seed: int = 0
    output: str = "runs"
    """The run's folder is `output/name`."""
    policies: dict[Name, PolicyConfig]
    team: dict[str, Any]
    """`name` picks the team; the other keys are the team's own."""
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    warm_start: WarmStartConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _shape(self) -> RunConfig:
        if not self.policies:
            raise ValueError("policies is empty; name at least one")
        if self.rollout.tasks_per_step % self.train.updates_per_step:
            raise ValueError(
                f"rollout.tasks_per_step is {self.rollout.tasks_per_step}, train.updates_per_step is "
                f"{self.train.updates_per_step}; the updates must divide the tasks"
            )
        if self.warm_start is not None and self.data.type != "sums":
            raise ValueError(f"warm_start needs demonstrations, which data.type sums can write and {self.data.type} can't")
        return self
