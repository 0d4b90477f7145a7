"""tessera run: torchrun's command line, several agents on one machine, and every fault that a launcher is for."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time
import unittest

from support import SystemTest, TESSERA, environment, metrics, safetensors

BUILD = pathlib.Path(TESSERA).resolve().parents[1]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def stat(pid):
    """State, parent and process group; nothing for a process that is gone."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else (fields[0], int(fields[1]), int(fields[2]))


def variables(pid):
    try:
        pairs = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(pair.decode(errors="replace").split("=", 1) for pair in pairs if b"=" in pair)


def gone(pid, within=5):
    deadline = time.time() + within
    while stat(pid) and time.time() < deadline:
        time.sleep(0.05)
    return not stat(pid)


class Agent:
    """One agent in the background, with its output in files."""

    def __init__(self, folder, name, arguments, **extra):
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        env = environment(**({"PYTHON_EXEC": sys.executable, "TMPDIR": str(folder)} | extra))
        with open(self.out, "w") as out, open(self.err, "w") as err:
            self.process = subprocess.Popen([TESSERA, "run", *map(str, arguments)], stdout=out, stderr=err, env=env, start_new_session=True)

    def text(self):
        return self.out.read_text()

    def errors(self):
        return self.err.read_text()

    def last_line(self):
        return ([""] + self.errors().strip().splitlines())[-1]

    def workers(self):
        """Process ids by rank."""
        found = {}
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            pid = int(entry.name)
            state = stat(pid)
            if state and state[1] == self.process.pid and "RANK" in variables(pid):
                found[int(variables(pid)["RANK"])] = pid
        return found

    def wait(self, within):
        try:
            return self.process.wait(timeout=within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running {within} s later\n{self.text()[-2000:]}\n{self.errors()[-3000:]}") from None

    def kill(self):
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
            self.process.kill()
            self.process.wait()


class RunTest(SystemTest):
    def setUp(self):
        super().setUp()
        self.agents = []
        self.port = free_port()

    def tearDown(self):
        for agent in self.agents:
            agent.kill()
        super().tearDown()

    def start(self, *arguments, **extra):
        agent = Agent(self.folder, f"agent{len(self.agents)}", arguments, **extra)
        self.agents.append(agent)
        return agent

    def start_node(self, nnodes, *arguments, conf="", host="localhost", **extra):
        flags = [f"--nnodes={nnodes}", "--rdzv_backend=c10d", f"--rdzv_endpoint={host}:{self.port}"]
        return self.start(*flags, *([f"--rdzv_conf={conf}"] if conf else []), *arguments, **extra)

    def script(self, text, name="script.py"):
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path

    def until(self, condition, what, within=15):
        deadline = time.time() + within
        while not condition():
            told = "\n".join(f"--- {a.out.name}\n{a.text()[-1000:]}{a.errors()[-2000:]}" for a in self.agents)
            self.assertLess(time.time(), deadline, f"{what}: not within {within} s\n{told}")
            time.sleep(0.05)

    def ends(self, agent, code, within=15):
        self.assertEqual(agent.wait(within), code, f"{agent.text()[-2000:]}\n{agent.errors()[-3000:]}")

    # A rank that says who it is and stays until a file appears.
    def staying(self):
        return self.script(f"""
            import os, pathlib, signal, sys, time
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            e = os.environ
            print("here", e["RANK"], "of", e["WORLD_SIZE"], "attempt", e["TORCHELASTIC_RESTART_COUNT"], "group", e["GROUP_RANK"], flush=True)
            while not pathlib.Path({str(self.folder / "enough")!r}).exists():
                time.sleep(0.05)
            """)

    def enough(self):
        (self.folder / "enough").touch()

    def here(self, world, attempt):
        """Which ranks of that world and attempt have said that they are there."""
        said = "".join(agent.text() for agent in self.agents).splitlines()
        return sorted({int(line.split()[1]) for line in said if line.startswith("here") and f"of {world} attempt {attempt} " in line})

    def await_world(self, world, attempt, within=15):
        self.until(lambda: self.here(world, attempt) == list(range(world)), f"{world} ranks of attempt {attempt}", within)


class Launching(RunTest):
    def test_variables_are_those_of_torchrun(self):
        shown = self.script("""
            import json, os
            names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR MASTER_PORT "
                     "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE").split()
            print(json.dumps({name: os.environ[name] for name in names}), flush=True)
            """)
        ours = self.start("--standalone", "--nproc-per-node=2", "--max-restarts=3", "--role=trainer", shown)
        self.ends(ours, 0)
        rows = {row["RANK"]: row for row in map(json.loads, ours.text().splitlines())}
        self.assertEqual(sorted(rows), ["0", "1"])
        row = rows["1"]
        for name, value in {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "1",
                            "ROLE_WORLD_SIZE": "2", "ROLE_NAME": "trainer", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3",
                            "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
            self.assertEqual(row[name], value, name)

    def test_the_classic_line_runs_torch_distributed(self):
        script = self.script("""
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            x = torch.full((3,), float(dist.get_rank() + 1))
            dist.all_reduce(x)
            print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {x[0].item():g}", flush=True)
            dist.destroy_process_group()
            """)
        line = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_id=100", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{self.port}", script]
        agents = [self.start(*line), self.start(*line)]
        for agent in agents:
            self.ends(agent, 0, 60)
        said = "".join(agent.text() for agent in agents)
        for rank in (0, 1):
            self.assertIn(f"rank {rank} of 2: 3\n", said)

    def test_two_nodes_train_as_one(self):
        _, alone = self.train("alone", nproc=2)
        line = ["--nproc-per-node=1", TESSERA, "train", self.recipe, "--set", f"log.dir={self.folder / 'nodes'}"]
        agents = [self.start_node("2", *line), self.start_node("2", *line)]
        for agent in agents:
            self.ends(agent, 0, 40)
        losses = [[row["loss"] for row in metrics(log)] for log in (alone, self.folder / "nodes")]
        self.assertEqual(losses[0], losses[1])

    def test_two_programs_of_one_attempt_each_meet_anew(self):
        train = f"{TESSERA} train {self.recipe} --set log.dir={self.folder}/log --set run.steps=3"
        read = f"{TESSERA} eval --checkpoint {self.folder}/ckpt --file {self.folder}/held_out.txt --seq-len 16 --json"
        line = ("--nproc-per-node=2", "--", "bash", "-c")
        both = self.start(*line, f"{train} --set checkpoint.dir={self.folder}/ckpt && {read}")
        self.ends(both, 0, 60)
        self.assertGreater(json.loads(both.text().splitlines()[-1])["loss"], 1)
        # What the ranks of the second one are told is compared, whatever those of the first had been told.
        for backend in ("auto", "gloo"):
            train_by = f"{train} --set comm.backend={backend}"
            apart = self.start(*line, f"{train_by} && {train_by} --set comm.check=$([ $RANK = 0 ] && echo true || echo false)")
            self.ends(apart, 2, 60)
            self.assertIn("comm.check = true on rank 0, false on rank 1", apart.last_line())

    def test_an_example_runs_on_static_nodes(self):
        line = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={self.port}"]
        agents = [self.start(*line, f"--node-rank={rank}", "--", BUILD / "examples/toy_ddp") for rank in (1, 0)]
        for agent in agents:
            self.ends(agent, 0, 30)
        self.assertRegex(agents[1].text(), r"4 replicas, checksum [0-9a-f]+: equal")

    def test_program_and_flags_are_told_apart(self):
        for arguments, said in ((["--nproc_per_node", "1", "--", "sh", "-c", "echo $0 $1", "--tee", "--"], "--tee --"),
                                (["sh", "-c", "echo $0", "--nnodes"], "--nnodes"),
                                (["-m", "platform"], "Linux"), (["--no-python", "echo", "-m"], "-m")):
            agent = self.start(*arguments)
            self.ends(agent, 0)
            self.assertIn(said, agent.text())

    def test_output_goes_where_it_is_sent(self):
        logs = self.folder / "logs"
        both = "echo out $RANK; echo err $RANK >&2"
        agent = self.start("--nproc-per-node=2", "--tee=0:3", "--redirects=1:3", f"--log-dir={logs}", "--rdzv-id=job", "sh", "-c", both)
        self.ends(agent, 0)
        self.assertEqual(agent.text(), "[default0]:out 0\n")
        self.assertIn("[default0]:err 0\n", agent.errors())
        self.assertNotIn("err 1", agent.errors())
        for rank in (0, 1):
            for name in ("out", "err"):
                self.assertEqual((logs / f"job/attempt_0/{rank}/std{name}.log").read_text(), f"{name} {rank}\n")
        prefixed = self.start("--nproc-per-node=2", "--prefix", "--local-ranks-filter=1", "sh", "-c", both)
        self.ends(prefixed, 0)
        self.assertEqual(prefixed.text(), "[rank 1] out 1\n")


class Faults(RunTest):
    def train_line(self, tag, *more):
        sets = (f"log.dir={self.folder / tag}", f"checkpoint.dir={self.folder / (tag + '.ckpt')}", "checkpoint.every=2", "run.steps=8")
        return [TESSERA, "train", self.recipe, *[x for s in sets for x in ("--set", s)], *more]

    def dump(self, tag):
        return ["--dump-step", 8, "--dump-dir", self.folder / f"{tag}.dump"]

    def assert_same_weights(self, one, other):
        tensors = [safetensors(self.folder / f"{tag}.dump" / "weights.safetensors") for tag in (one, other)]
        self.assert_equal_tensors(*tensors)

    def test_a_killed_rank_costs_no_saved_step(self):
        whole = self.start("--nproc-per-node=2", *self.train_line("whole", *self.dump("whole")))
        self.ends(whole, 0, 30)
        killed = self.start("--nproc-per-node=2", "--max-restarts=1", "--inject=rank=1,op=all_reduce,count=5,do=kill",
                            *self.train_line("killed", *self.dump("killed")))
        self.ends(killed, 0, 40)
        self.assertIn("rank 1 was ended by SIGKILL (killed); restart 1 of 1", killed.errors())
        self.assert_same_weights("whole", "killed")
        self.assertEqual([row["loss"] for row in metrics(self.folder / "whole")], [row["loss"] for row in metrics(self.folder / "killed")])

    def test_what_fails_leaves_no_folder_behind(self):
        killed = self.start("--nproc-per-node=2", "--inject=rank=1,op=all_reduce,count=5,do=kill", *self.train_line("killed"))
        self.ends(killed, 1, 40)
        self.assertIn("rank  last entered", killed.errors())
        self.assertIn("flight records: gone with this job; --log-dir keeps them", killed.errors())
        self.ends(self.start("--nproc-per-node=2", "no-such-program-of-ours"), 2)
        self.assertEqual(list(self.folder.glob("tessera_run_*")), [])

    def test_what_a_killed_launcher_left_goes_with_the_next(self):
        def folders():
            return set(self.folder.glob("tessera_run_*"))

        dead = self.start("--nproc-per-node=2", "sleep", "100")
        self.until(lambda: len(dead.workers()) == 2, "two ranks")
        [left] = folders()
        dead.kill()
        self.assertEqual(folders(), {left}, "it could not clear up")
        live = self.start("--nproc-per-node=2", self.staying())
        self.await_world(2, 0)
        [lives] = folders()
        self.assertNotEqual(lives, left)
        self.ends(self.start("true"), 0)
        self.assertEqual(folders(), {lives}, "its launcher lives")
        self.enough()
        self.ends(live, 0)
        self.assertEqual(folders(), set())

    def test_a_temporary_folder_that_is_none(self):
        (self.folder / "file").touch()
        for place in (self.folder / "nope", self.folder / "file", "/proc"):
            agent = self.start("--nproc-per-node=2", "touch", self.folder / "started", TMPDIR=str(place))
            self.ends(agent, 2)
            self.assertRegex(agent.errors(), rf"^tessera: TMPDIR = {place}: nothing can be made there \(.*\); set TMPDIR to a folder .* with --log-dir\n$")
            self.assertFalse((self.folder / "started").exists(), "before any rank starts")
        self.ends(self.start(f"--log-dir={self.folder / 'logs'}", "true", TMPDIR="/proc"), 0)
        self.train("ranks", nproc=2, sets=["run.steps=1", "optim.warmup_steps=0"], TMPDIR="/proc")  # needs none
        nope = self.folder / "nope"
        done, _ = self.train("cached", nproc=2, expect=2, TMPDIR=str(nope), HOME="", XDG_CACHE_HOME="")
        self.assertIn(f"TMPDIR = {nope}: ", self.refusal(done))
        self.assertIn("data.cache_dir", self.refusal(done))

    def test_restarts_run_out(self):
        logs = self.folder / "logs"
        agent = self.start("--nproc-per-node=2", "--max-restarts=2", f"--log-dir={logs}", "sh", "-c",
                           "echo attempt $TORCHELASTIC_RESTART_COUNT; [ $RANK = 1 ] || sleep 100; echo it was me >&2; exit 7")
        self.ends(agent, 1)
        self.assertEqual(agent.last_line(), "rank 1 failed with exit code 7; restarted 2 times before")
        self.assertIn("last lines of rank 1:\nit was me", agent.errors())
        for attempt in range(3):
            self.assertEqual((logs / f"none/attempt_{attempt}/0/stdout.log").read_text(), f"attempt {attempt}\n")
            self.assertEqual((logs / f"none/attempt_{attempt}/1/stderr.log").read_text(), "it was me\n")
        self.assertEqual(len(list((logs / "none").glob("attempt_*"))), 3)

    def test_a_job_has_a_name_of_its_own_in_all_attempts(self):
        line = ["--nproc-per-node=2", "--max-restarts=2", "sh", "-c", "echo $TESSERA_JOB; [ $TORCHELASTIC_RESTART_COUNT = 2 ]"]
        names = []
        for _ in range(2):
            agent = self.start(*line, TESSERA_JOB="inherited")
            self.ends(agent, 0)
            [name] = set(agent.text().split())
            self.assertRegex(name, "^[0-9a-f]{16}$")
            names.append(name)
        self.assertNotEqual(*names)

    def test_bad_input_is_not_restarted(self):
        refuse = "echo $GROUP_RANK; [ $GROUP_RANK = 0 ] || sleep 100; echo 'config optim.lr: too much' > $TESSERA_ERROR_FILE; exit 2"
        line = ["--max-restarts=3", "sh", "-c", refuse]
        agents = [self.start_node("2", *line), self.start_node("2", *line)]
        for agent in agents:
            self.ends(agent, 2)
            self.assertEqual(agent.last_line(), "optim.lr: too much")
        self.assertEqual("".join(agent.text() for agent in agents).count("0"), 1)

    def test_a_program_that_one_node_lacks_ends_all(self):
        agents = [self.start_node("2", "--max-restarts=3", program, "100") for program in ("sleep", "no-such-program")]
        for agent in agents:
            self.ends(agent, 2)
            self.assertIn("cannot start 'no-such-program': No such file or directory", agent.last_line())

    def test_a_failure_on_one_node_restarts_all(self):
        line = ["--max-restarts=1", "sh", "-c", "echo here $RANK; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 1 ] && kill -9 $$; sleep 100"]
        agents = [self.start_node("2", *line), self.start_node("2", *line)]
        for agent in agents:
            self.ends(agent, 0)
            self.assertIn("rank 1 was ended by SIGKILL (killed); restart 1 of 1", agent.errors())
            self.assertEqual(agent.text().count("here"), 2)

    def test_what_a_python_rank_records_is_quoted(self):
        script = self.script("""
            from torch.distributed.elastic.multiprocessing.errors import record

            @record
            def main():
                raise ValueError("no such thing")

            main()
            """)
        agent = self.start("--nproc-per-node=1", script)
        self.ends(agent, 1, 60)
        self.assertEqual(agent.last_line(), "rank 0 failed with exit code 1: ValueError: no such thing")

    def test_sigterm_to_one_agent_saves_and_ends_all(self):
        def line(tag):
            return [*self.train_line(tag), "--set", "run.steps=100000", "--set", "checkpoint.every=100000"]

        agents = [self.start_node("2", *line("stopped")), self.start_node("2", *line("stopped"))]
        file = self.folder / "stopped" / "metrics.jsonl"
        self.until(lambda: file.exists() and file.read_text().count("\n") > 3, "three steps", 30)
        agents[1].process.send_signal(signal.SIGTERM)
        for agent in agents:
            self.ends(agent, 0, 20)
            self.assertNotIn("restart", agent.errors())
        self.assertTrue(list((self.folder / "stopped.ckpt").iterdir()))

    def test_a_killed_agent_leaves_no_orphan(self):
        agent = self.start("--nproc-per-node=2", "sh", "-c", "trap '' TERM; echo here; while true; do sleep 0.1; done")
        self.until(lambda: agent.text().count("here") == 2, "two ranks")
        workers = agent.workers()
        self.assertEqual(sorted(workers), [0, 1])
        agent.process.kill()
        for pid in workers.values():
            self.assertTrue(gone(pid), "orphan")


class Elastic(RunTest):
    """Three agents of one rank each; whoever vanishes, the rest goes on."""

    def begin(self, count, nnodes="1:3", conf="last_call_timeout=1.5"):
        for _ in range(count):
            self.start_node(nnodes, "--nproc-per-node=1", self.staying(), conf=conf)
        self.await_world(count, 0, 20)

    def holder(self):
        return next(agent for agent in self.agents if "this node serves the rendezvous" in agent.errors())

    def test_a_node_that_vanishes(self):
        self.begin(3)
        victim = next(agent for agent in self.agents if agent is not self.holder())
        self.agents.remove(victim)
        victim.kill()
        self.await_world(2, 1)
        self.assertIn("vanished", "".join(agent.errors() for agent in self.agents))
        self.enough()
        for agent in self.agents:
            self.ends(agent, 0)

    def test_the_node_that_serves_the_store_vanishes(self):
        self.begin(3)
        for left, attempt in ((2, 1), (1, 2)):  # the second time it is a spare store
            holder = self.holder()
            self.agents.remove(holder)
            holder.kill()
            self.await_world(left, attempt)
        self.enough()
        self.ends(self.agents[0], 0)

    def test_a_node_0_that_is_replaced_has_the_others_ranks(self):
        line = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={self.port}"]
        first, stays = [self.start(*line, f"--node-rank={rank}", self.staying()) for rank in (0, 1)]
        self.await_world(2, 0)
        replaces = self.start(*line, "--node-rank=0", self.staying())
        stays.process.send_signal(signal.SIGSTOP)  # until that one has the place
        self.agents.remove(first)
        first.kill()
        self.until(lambda: "this node serves the rendezvous" in replaces.errors(), "a store")
        stays.process.send_signal(signal.SIGCONT)
        self.until(lambda: "here 0 of 2 attempt 0" in replaces.text() and stays.text().count("here 1 of 2 attempt 0") == 2, "both ranks of the new job")
        self.assertIn("the job that this node was of is gone, and another one has begun", stays.errors())
        self.enough()
        for agent in (stays, replaces):
            self.ends(agent, 0)

    def test_too_few_are_left(self):
        for victim in (0, 1):  # with and without the store
            self.port = free_port()
            (self.folder / "enough").unlink(missing_ok=True)
            del self.agents[:]
            self.begin(2, "2:3")
            self.agents[victim].kill()
            survivor = self.agents[1 - victim]
            self.ends(survivor, 1)
            self.assertRegex(survivor.last_line(), r"vanished.*; 1 node left, --nnodes = 2:3 asks for at least 2")

    def test_a_node_joins(self):
        self.begin(1)
        self.start_node("1:3", "--nproc-per-node=1", self.staying())
        self.await_world(2, 1)
        self.assertIn("joins", self.agents[0].errors())
        self.enough()
        for agent in self.agents:
            self.ends(agent, 0)

    def test_a_stopped_agent_is_left_behind_and_comes_back(self):
        self.begin(2, conf="last_call_timeout=1.5,keep_alive_interval=0.2")
        stopped = next(agent for agent in self.agents if agent is not self.holder())
        stopped.process.send_signal(signal.SIGSTOP)
        self.await_world(1, 1)
        stopped.process.send_signal(signal.SIGCONT)
        self.await_world(2, 2)
        self.enough()
        for agent in self.agents:
            self.ends(agent, 0)

    def test_a_stopped_store_is_left_behind_by_the_majority(self):
        self.begin(3, conf="last_call_timeout=1.5,keep_alive_interval=0.2")
        stopped = self.holder()
        stopped.process.send_signal(signal.SIGSTOP)
        self.await_world(2, 1)
        self.agents.remove(stopped)
        stopped.kill()
        self.enough()
        for agent in self.agents:
            self.ends(agent, 0)


class Addresses(RunTest):
    def refused(self, *arguments, code=1, within=15):
        agent = self.start(*arguments, "true")
        self.ends(agent, code, within)
        return agent.last_line()

    def nodes(self, endpoint, conf="join_timeout=1"):
        return self.refused("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={conf}")

    def test_nobody_listens(self):
        line = self.nodes(f"127.0.0.1:{self.port}", "join_timeout=1,is_host=false")
        self.assertRegex(line, rf"no rendezvous at address 127.0.0.1, port {self.port}: Connection refused; waited 1(\.\d)? s")

    def test_a_name_that_does_not_resolve(self):
        self.assertRegex(self.nodes("no-such-host.invalid:29400"),
                         r"no rendezvous at address no-such-host.invalid, port 29400: the name does not resolve: .*; waited 1(\.\d)? s")

    def test_a_port_in_use_by_something_else(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            line = self.nodes(f"127.0.0.1:{taken.getsockname()[1]}")
            self.assertRegex(line, rf"no rendezvous at address 127.0.0.1, port {taken.getsockname()[1]}: .*; waited \d+(\.\d)? s")
            static = self.refused("--nnodes=1", f"--master-port={taken.getsockname()[1]}", "--master-addr=127.0.0.1", "--rdzv-conf=join_timeout=1")
            self.assertRegex(static, rf"address 127.0.0.1, port {taken.getsockname()[1]}: .*Address already in use.*; waited \d+(\.\d)? s")

    def test_a_node_that_never_comes(self):
        self.assertRegex(self.nodes(f"127.0.0.1:{self.port}"),
                         rf"1 node came to address 127.0.0.1, port {self.port} within 1 s, --nnodes = 2:2 asks for at least 2")

    def test_who_waits_in_vain_is_told_for_whom(self):
        agent = self.start_node("2", "--rdzv-id=j", "true", host="127.0.0.1")
        self.until(lambda: "this node serves the rendezvous" in agent.errors(), "a store")
        self.assertRegex(self.refused("--nnodes=2", "--rdzv-id=k", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-conf=join_timeout=1"),
                         rf"no rendezvous at address 127.0.0.1, port {self.port}: the job there has --rdzv-id j, this agent k; give all .* the same; waited")
        self.until(lambda: "1 of at least 2 nodes has come; waiting up to 600 s for the others" in agent.errors(), "how many have come")

    def test_a_second_job_at_a_live_endpoint(self):
        endpoint = f"--rdzv-endpoint=127.0.0.1:{self.port}"
        first = self.start(endpoint, self.staying())
        self.await_world(1, 0)
        for nnodes, said in (("1", "has its one node already"), ("3", "was begun with 1:1")):
            line = self.refused(f"--nnodes={nnodes}", endpoint, code=2)
            self.assertRegex(line, rf"^--nnodes = {nnodes}:{nnodes}: the job at address 127.0.0.1, port {self.port} {said}; give .* another --rdzv-endpoint")
        self.enough()
        self.ends(first, 0)

    def test_ipv6(self):
        line = ["sh", "-c", "echo here $RANK $MASTER_ADDR"]
        agents = [self.start_node("2", *line, host="[::1]"), self.start_node("2", *line, host="[::1]")]
        for agent in agents:
            self.ends(agent, 0)
        self.assertEqual(sorted("".join(agent.text() for agent in agents).splitlines()), ["here 0 ::1", "here 1 ::1"])

    def test_what_cannot_be_meant(self):
        for arguments, words in ((["--nproc-per-nod=2"], ["--nproc-per-nod", "--nproc-per-node"]), (["--nnodes=3:2"], ["3:2", "MIN"]),
                                 (["--nnodes=x"], ["--nnodes = x"]),
                                 (["--nnodes=2", "--rdzv-backend=etcd"], ["etcd", "c10d"]), (["--nnodes=2", "--rdzv-backend=c10d"], ["--rdzv-endpoint"]),
                                 (["--inject=rank=x"], ["--inject"]), (["--tee=3"], ["--log-dir"])):
            line = self.refused(*arguments, code=2)
            for word in words:
                self.assertIn(word, line)
        nothing = self.start()
        self.ends(nothing, 2)
        missing = self.start("no-such-program-of-ours")
        self.ends(missing, 2)
        self.assertIn("no-such-program-of-ours", missing.last_line())


if __name__ == "__main__":
    unittest.main()
