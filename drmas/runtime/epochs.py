"""The length of a run in passes over its data: `train.epochs` becomes `train.steps`. Called by `run` and `preview`."""

from __future__ import annotations

from drmas.config.schema import RunConfig


def in_steps(config: RunConfig, tasks: int) -> RunConfig:
    """`config` with as many steps as its epochs take over so many `tasks`, at least one, in their place; as it is where no
    epochs are set.

    What is left over of a last step isn't trained on: with 100 tasks, 32 of them per step, two epochs are 6 steps. Every rank
    calls it with rank 0's number of tasks, since the others needn't have the data.
    """
    if config.train.epochs is None:
        return config
    steps = max(1, config.train.epochs * tasks // config.rollout.tasks_per_step)
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps, "epochs": None})})
