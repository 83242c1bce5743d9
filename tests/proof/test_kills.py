"""Twenty kills at random moments: in a step, a save, a cache write, while answers are written.

Each run is then started again with the same command and compared with the one that nothing
interrupted: data order, learning rates, metrics, weights, moments.  One kill belongs to `make
test`, `make proof` does all.
"""

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from launch import TESTS, finish, start, write_config
from proof.ledger import Ledger
from proof.places import PLACES
from training import make_config, metrics

from selfdraft.train import checkpoint
from selfdraft.train.config import PACKAGE

VICTIM = TESTS / "proof" / "victim.py"
SCHEDULE = {"steps": 10, "eval_every": 4, "save_every": 3, "keep_last": 2, "batch_size": 2}
COUNT = 20


class Proof:
    """The unbroken run, and copies of it that are killed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        prompts = root / "prompts.jsonl"
        rows = [{"prompt": f"tell me about {word} {n}"} for n, word in enumerate("abcdefghijkl")]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.data = {
            "file": None,
            "prompts": str(prompts),
            "answers": [{"temperature": 0}, {"temperature": 1.0}],
            "max_new_tokens": 12,
            "answer_batch_size": 4,
            "eval_prompts": 3,
        }
        first = self.count("answers")
        shutil.copytree(root / "unbroken", root / "answered")
        self.events = self.count("step") | {"answers": first["answers"]}

    def config(self, name: str) -> Path:
        """The YAML of a run in root/NAME."""
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        config = make_config(folder, data=self.data, schedule=SCHEDULE, resume="latest")
        return write_config(folder / "run.yaml", config)

    def victim(self, name: str, place: str, number: int, seconds: float) -> str:
        words = [place, str(number), str(seconds), PLACES[place].script, str(self.config(name))]
        return finish(start(1, VICTIM, *words), -signal.SIGKILL if number else 0)

    def count(self, place: str) -> dict[str, int]:
        """Runs the script of a place to its end; how many events of each place there were."""
        return json.loads(self.victim("unbroken", place, 0, 0.0).splitlines()[-1])

    def kill(self, case: int) -> dict[str, Any]:
        """One kill, and the run that goes on from it; what differs from the unbroken run."""
        dice = random.Random(case)
        place = list(PLACES)[case % len(PLACES)]
        number = dice.randint(1, self.events[place])
        seconds = dice.uniform(0, PLACES[place].seconds)
        name = f"case-{case}"
        if place != "answers":
            shutil.copytree(self.root / "answered", self.root / name)
        self.victim(name, place, number, seconds)
        left = checkpoint.numbered(self.root / name / "run")
        for script in dict.fromkeys([PLACES[place].script, "train.py"]):
            finish(start(1, PACKAGE / script, str(self.root / name / "run.yaml")))
        return {
            "place": place,
            "event": f"{number} of {self.events[place]}",
            "seconds_later": round(seconds, 4),
            "went_on_from_step": left[0][0] if left else 0,
            "differs": self.differences(name),
        }

    def differences(self, name: str) -> list[str]:
        """Names of what is not as in the unbroken run."""
        runs = [self.root / other / "run" for other in ("unbroken", name)]
        found = []
        lines = [metrics(run) for run in runs]
        for line in (*lines[0], *lines[1]):
            line.pop("tokens_per_second", None)
        if lines[0] != lines[1]:
            found.append("metrics.jsonl")
        answers = [(run / "answers.jsonl").read_bytes() for run in runs]
        if answers[0] != answers[1]:
            found.append("answers.jsonl")
        last = f"checkpoints/step-{SCHEDULE['steps']}"
        files = [f"{last}/{file}" for file in ("model.safetensors", "optimizer.pt", "random.pt")]
        for file in (*files, "model.safetensors"):
            if (runs[0] / file).read_bytes() != (runs[1] / file).read_bytes():
                found.append(file)
        if list(runs[1].glob("checkpoints/.*")):
            found.append("a temporary folder is left")
        return found


@pytest.fixture(scope="module")
def proof(tmp_path_factory) -> Proof:
    return Proof(tmp_path_factory.mktemp("kills"))


@pytest.mark.parametrize("case", [1])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(proof, case):
    assert proof.kill(case)["differs"] == []


@pytest.mark.proof
@pytest.mark.parametrize("case", range(COUNT))
def test_twenty_kills(proof, case):
    assert Ledger("kills").settle(case, lambda: proof.kill(case))["differs"] == []
