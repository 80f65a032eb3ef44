"""The length of a run in passes over its data: `train.epochs` becomes `train.steps`. Called by `run` before all else."""

from __future__ import annotations

from drmas.config.schema import RunConfig
from drmas.envs.source import TaskSource


def in_steps(config: RunConfig) -> RunConfig:
    """`config` with as many steps as its epochs take, at least one, in their place; as it is where no epochs are set.

    What is left over of a last step isn't trained on: with 100 tasks, 32 of them per step, two epochs are 6 steps. DataError:
    the data can't be read.
    """
    if config.train.epochs is None:
        return config
    tasks = config.train.epochs * len(TaskSource(config.data, seed=config.seed))
    steps = max(1, tasks // config.rollout.tasks_per_step)
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps, "epochs": None})})
