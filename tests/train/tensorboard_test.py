"""Opens a run's event files with TensorBoard itself and compares every scalar with metrics.jsonl and validation.jsonl.

  tensorboard_test.py LOG_DIR          a finished run
  tensorboard_test.py --write BINARY   a run that the test binary writes (interrupted at step 10, resumed at step 6)
"""

import json
import os
import subprocess
import sys
import tempfile


def expected_scalars(log_dir):
    scalars = {}

    def add(file, prefix, skipped):
        with open(os.path.join(log_dir, file)) as lines:
            for line in map(json.loads, lines):
                for name, value in line.items():
                    if name not in skipped:
                        scalars.setdefault(f"{prefix}/{name}", []).append((line["step"], value))

    add("metrics.jsonl", "train", {"step", "tokens"})
    add("validation.jsonl", "validation", {"step"})
    return scalars


def written_scalars(log_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(os.path.join(log_dir, "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def compare(log_dir):
    expected, written = expected_scalars(log_dir), written_scalars(log_dir)
    assert expected.keys() == written.keys(), f"tags: {sorted(expected)} expected, {sorted(written)} written"
    for tag, points in expected.items():
        steps = [step for step, _ in written[tag]]
        assert steps == [step for step, _ in points], f"{tag}: steps {steps}"
        for (step, value), (_, found) in zip(points, written[tag]):
            assert abs(found - value) <= 1e-6 * abs(value), f"{tag}, step {step}: {found} instead of {value}"
    count = sum(map(len, expected.values()))
    assert count > 0, "no scalar in metrics.jsonl"
    print(f"TensorBoard reads {len(expected)} tags, {count} scalars, all as in metrics.jsonl")


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        with tempfile.TemporaryDirectory() as log_dir:
            command = [sys.argv[2], "--gtest_filter=TensorBoardFile.*"]
            subprocess.run(command, env={**os.environ, "TESSERA_TEST_LOG_DIR": log_dir}, check=True, stdout=subprocess.DEVNULL)
            compare(log_dir)
    else:
        compare(sys.argv[1])
