"""Random kills, others each time, lose no checkpointed step, and end in the undisturbed run's weights (tools/soak makes hundreds)."""

import unittest

from soak import Soak, SoakFailed, soak
from support import SystemTest


class SoakShort(SystemTest):
    def test_random_kills_change_nothing(self):
        try:
            soak(kills=4)
        except SoakFailed as failure:
            self.fail(str(failure))

    def test_random_kills_during_saves_lose_nothing(self):
        try:
            soak(kills=4, in_save=True)
        except SoakFailed as failure:
            self.fail(str(failure))

    def test_the_comparison_finds_what_is_planted(self):
        comparison = Soak(self.folder, kills=0, ranks=1, seed=0, say=lambda text: None)
        reference, job = comparison.run()
        lines = (job.log_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
        weights = next((job.checkpoints / f"step-{comparison.steps:08}").glob("*.safetensors"))
        content = weights.read_bytes()
        flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        for plant, word in (
            (lambda: (job.log_dir / "metrics.jsonl").write_text("".join(lines[:7] + lines[8:])), "each once"),
            (lambda: (job.log_dir / "metrics.jsonl").write_text("".join(lines[:7] + [lines[7].replace('"loss":', '"loss":1')] + lines[8:])), "loss is"),
            (lambda: weights.write_bytes(flipped), "differs"),
            (lambda: (job.checkpoints / ".tmp-step-00000004").mkdir(), "half-written"),
        ):
            plant()
            with self.assertRaisesRegex(SoakFailed, word):
                comparison.compare(job, reference)
            (job.log_dir / "metrics.jsonl").write_text("".join(lines))
            weights.write_bytes(content)
        with self.assertRaisesRegex(SoakFailed, "an attempt began at step 1 although"):
            comparison.check_attempts(job, known=0, newest=4)


if __name__ == "__main__":
    unittest.main()
