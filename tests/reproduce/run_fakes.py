"""`drmas reproduce` of fake trials, as a process of its own: ROOT, then a JSON object of what to run and how.

Every trial's process runs this file again, up to `main`; so nothing is imported above it.
"""

import json
import sys
from functools import partial
from pathlib import Path


def main(root: Path, given: dict) -> None:
    from drmas.errors import UserError
    from drmas.reproduce import folder as folders
    from drmas.reproduce.plan import Trial
    from drmas.reproduce.runner import run_units, units_of

    trials = [Trial(*one) for one in given.pop("trials")]
    entry = given.pop("entry", "fake_trials:run_trial")
    folders.code_version = lambda: "that of the fakes"
    folders.LOCK_SECONDS = given.pop("lock_seconds", folders.LOCK_SECONDS)
    folder = folders.ReproduceFolder(root, quick=True, scale={"trials": len(trials)})
    try:
        lock = folder.open(overwrite=False)
        units = units_of(trials, folder.path, quick=True, trial=entry, bandit="fake_trials:run_bandit")
        run_units(units, lock=lock, say=partial(print, flush=True), **given)
    except UserError as error:
        sys.exit(f"refused: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        folder.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
