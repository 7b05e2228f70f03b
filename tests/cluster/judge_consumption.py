"""Judges a history that a consumption test left behind, again.

python -m tests.cluster.judge_consumption FOLDER
"""

import sys
from pathlib import Path

from tests.cluster.consumption_checker import Rules, judge, load

if __name__ == "__main__":
    history = load(sorted(Path(sys.argv[1]).glob("*.jsonl")))
    told = next((event for event in history if event["event"] == "rules"), {})
    rules = Rules(**{name: value for name, value in told.items() if name != "event"})
    verdict = judge(history, rules)
    print(verdict.summary(), *verdict.faults, sep="\n")
    sys.exit(bool(verdict.faults))
