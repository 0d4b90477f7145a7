"""tessera under mpirun, with no flag of ours: the losses of one process, whatever carries the gradients; a rank that dies ends all."""

import os
import pathlib
import shutil
import signal
import subprocess
import time
import unittest

from processes import alive
from support import SystemTest, TESSERA, environment, metrics

MPIRUN = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}


def descendants(pid):
    """Process ids below a process."""
    parents = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # gone meanwhile
    found, last = set(), {pid}
    while last:
        last = {child for child, parent in parents.items() if parent in last} - found
        found |= last
    return found


def variable(pid, name):
    try:
        entries = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None  # gone meanwhile
    for entry in entries:
        if entry.startswith(name.encode() + b"="):
            return entry.split(b"=", 1)[1].decode()
    return None


@unittest.skipUnless(shutil.which("mpirun"), "no mpirun")
class Mpirun(SystemTest):
    def command(self, n, log, *sets):
        flags = [x for s in (f"log.dir={log}", *sets) for x in ("--set", s)]
        return ["mpirun", "-n", str(n), TESSERA, "train", str(self.recipe), *flags]

    def train_under_mpirun(self, n, tag, *sets, expect=0):
        log = self.folder / tag
        done = subprocess.run(self.command(n, log, *sets), capture_output=True, text=True, timeout=120, env=environment(**MPIRUN))
        self.assertEqual(done.returncode, expect, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return done, log

    def test_losses_are_those_of_one_process(self):
        _, one = self.train("one", sets=["run.steps=6"])
        for n, backend in ((2, "auto"), (3, "mpi"), (2, "gloo")):
            _, log = self.train_under_mpirun(n, f"{backend}{n}", f"comm.backend={backend}", "run.steps=6")
            self.assert_close_losses(metrics(log), metrics(one), 5e-6)

    def test_one_rank_is_alone(self):
        _, log = self.train_under_mpirun(1, "one", "run.steps=3", "comm.backend=mpi")
        self.assertEqual(len(metrics(log)), 3)

    def test_a_killed_rank_ends_all(self):
        log = self.folder / "killed"
        process = subprocess.Popen(self.command(3, log, "comm.backend=mpi", "run.steps=100000"), stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, env=environment(**MPIRUN), start_new_session=True)
        try:
            deadline = time.time() + 60
            while time.time() < deadline and not ((log / "metrics.jsonl").exists() and (log / "metrics.jsonl").read_text().count("\n") > 3):
                self.assertIsNone(process.poll(), process.stderr.read() if process.poll() is not None else "")
                time.sleep(0.1)
            ranks = [p for p in descendants(process.pid) if variable(p, "OMPI_COMM_WORLD_RANK") is not None]
            self.assertEqual(len(ranks), 3)
            os.kill(next(p for p in ranks if variable(p, "OMPI_COMM_WORLD_RANK") == "1"), signal.SIGKILL)
            _, stderr = process.communicate(timeout=15)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        self.assertNotEqual(process.returncode, 0)
        self.assertFalse([p for p in ranks if alive(p)], f"orphans\n{stderr[-2000:]}")

    def test_refusals_end_all_with_their_reason(self):
        done = subprocess.run(self.command(2, self.folder / "log", "optim.lr=-1"), capture_output=True, text=True, timeout=60, env=environment(**MPIRUN))
        self.assertEqual(done.returncode, 2, done.stderr[-3000:])
        self.assertIn("optim.lr = -1", done.stderr)

    def test_without_mpirun_the_way_out_is_named(self):
        done, _ = self.train("log", nproc=2, sets=("comm.backend=mpi",), expect=2)
        self.assertIn("comm.backend = mpi: these 2 processes were not started by MPI", self.refusal(done))
        self.assertIn("mpirun -n 2", self.refusal(done))


if __name__ == "__main__":
    unittest.main()
