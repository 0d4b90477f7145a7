"""tessera under srun's variables, set by hand: a step trains as one run, a batch script is alone, and variables that cannot be are refused by name."""

import itertools
import os
import subprocess
import unittest

from support import SystemTest, TESSERA, environment, metrics, run

job = itertools.count(os.getpid() * 10)  # the port comes from it


class Srun(SystemTest):
    def start(self, tasks, tag, sets=(), missing=(), per_task=lambda task: {}, **step):
        """Processes with the variables that srun would give the tasks of a step, but for the missing ones."""
        flags = [x for s in (f"log.dir={self.folder / tag}", *sets) for x in ("--set", s)]
        number = str(next(job))
        processes = []
        for task in sorted(set(range(tasks)) - set(missing)):
            variables = {"SLURM_JOB_ID": number, "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(tasks), "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task),
                         "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": str(tasks), "SLURM_STEP_NODELIST": "localhost"}
            variables.update(step)
            variables.update(per_task(task))
            processes.append(subprocess.Popen([TESSERA, "train", self.recipe, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                              env=environment(**variables)))
        return processes

    def finish(self, processes, within=90):
        """(exit code, stderr) of each."""
        try:
            errors = [p.communicate(timeout=within)[1] for p in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        return [(p.returncode, error) for p, error in zip(processes, errors)]

    def test_a_step_trains_as_one_run(self):
        _, one = self.train("one", sets=("run.steps=6",))
        for tasks, backend in ((2, "auto"), (3, "gloo")):
            for code, error in self.finish(self.start(tasks, f"step{tasks}", sets=(f"comm.backend={backend}", "run.steps=6"))):
                self.assertEqual(code, 0, error[-3000:])
            self.assert_close_losses(metrics(self.folder / f"step{tasks}"), metrics(one), 5e-6)

    def test_a_step_of_two_nodes_meets_at_the_master_address(self):
        processes = self.start(2, "nodes", sets=("run.steps=3",), per_task=lambda task: {"SLURM_NODEID": str(task), "SLURM_LOCALID": "0"},
                               SLURM_TASKS_PER_NODE="1(x2)", SLURM_STEP_NODELIST="node[1-2]", MASTER_ADDR="127.0.0.1")
        for code, error in self.finish(processes):
            self.assertEqual(code, 0, error[-3000:])
        self.assertEqual(len(metrics(self.folder / "nodes")), 3)

    def test_a_batch_script_without_srun_is_alone(self):
        batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[1-2]",
                 "SLURM_TASKS_PER_NODE": "2(x2)", "ENVIRONMENT": "BATCH"}
        done, log = self.train("alone", sets=("run.steps=3",), **batch)
        self.assertEqual(len(metrics(log)), 3)
        done, log = self.train("copies", nproc=2, sets=("run.steps=3",), **batch)  # and may start its own
        self.assertEqual(len(metrics(log)), 3)

    def test_wrong_variables_are_refused_by_name(self):
        good = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "2",
                "SLURM_STEP_NODELIST": "localhost"}
        for name, value, word in (("SLURM_PROCID", "2", "SLURM_PROCID = 2 must be between 0 and SLURM_NTASKS - 1 = 1"),
                                  ("SLURM_TASKS_PER_NODE", "2(x2)", "SLURM_TASKS_PER_NODE"), ("SLURM_STEP_NODELIST", "n[", "SLURM_STEP_NODELIST"),
                                  ("WORLD_SIZE", "3", 'WORLD_SIZE = "3" contradicts srun'), ("MASTER_PORT", "0", "MASTER_PORT = 0")):
            done = run("train", self.recipe, "--set", f"log.dir={self.folder / 'log'}", **{**good, name: value})
            self.assertIn(word, self.refusal(done))

    def test_a_task_that_never_comes_is_named(self):
        (code, error), = self.finish(self.start(4, "missing", sets=("comm.timeout_s=2",), missing=(1, 2, 3)))
        self.assertEqual(code, 1, error)
        last = error.strip().splitlines()[-1]
        self.assertRegex(last, r"rank 0 of 4: no rendezvous at address 127\.0\.0\.1, port \d+ \(served by rank 0\): ")
        self.assertRegex(last, r"1 of 4 ranks have come; missing: 1-3; waited \d+\.\d s")


if __name__ == "__main__":
    unittest.main()
