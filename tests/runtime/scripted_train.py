"""`drmas train` with scripted engines in the place of vLLM's: teachers that are wrong at times. For tests on several ranks.

FAIL or KILL in the environment, as RANK:UPDATE, has that rank raise a DataError, or die, in an update of its own. DIE, as
numbers separated by commas, kills the engine at those requests. For paths with FULL in them the disk is full. The rank BLIND
has no data.
"""

import itertools
import os
import shutil
import signal
import sys

from transformers import AutoTokenizer

import drmas.runtime.engines
from drmas.cli.main import main
from drmas.envs.source import TaskSource
from drmas.envs.sums import demonstrate
from drmas.errors import DataError, EngineDied
from drmas.policy.trainer import PolicyTrainer
from drmas.rollout.scripted import ScriptedEngine

requests = itertools.count(1)
deaths = {int(number) for number in os.environ.get("DIE", "").split(",") if number}


def scripted_engine(name, config, *, model_path, seed, deterministic, **unused) -> ScriptedEngine:
    def answer(prompt: str, key: str) -> str:
        if next(requests) in deaths:
            raise EngineDied("killed by the test")
        return demonstrate(prompt, key, seed=seed, error_rate=0.4)

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return ScriptedEngine(tokenizer, answer, deterministic=deterministic, max_model_tokens=config.max_model_tokens)


update = PolicyTrainer.update


def troubled_update(self, *args, **kwargs):
    place = f"{os.environ.get('RANK', 0)}:{self.version + 1}"
    if os.environ.get("FAIL") == place:
        raise DataError(f"update {self.version + 1} of {self.name} was refused by the test")
    if os.environ.get("KILL") == place:
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, *args, **kwargs)


def blind_source(self, *args, **kwargs):
    raise DataError("this rank has no data")


if "BLIND" in os.environ and os.environ["BLIND"] == os.environ.get("RANK"):
    TaskSource.__init__ = blind_source
disk_usage = shutil.disk_usage


def filled_disk_usage(path):
    usage = disk_usage(path)
    return usage._replace(free=0) if os.environ.get("FULL", "\0") in str(path) else usage


shutil.disk_usage = filled_disk_usage
drmas.runtime.engines.VllmEngine = scripted_engine
PolicyTrainer.update = troubled_update

if __name__ == "__main__":
    sys.argv[0] = "drmas"
    main()
