"""Where ranks compute: what is not there is refused by every command in one line, before any rank is started; what is there, `inspect device` lists."""

import json
import unittest

from support import SystemTest, run


class Device(SystemTest):
    def commands(self):
        yield "train", self.recipe, "--nproc", 2
        yield "verify", self.recipe, "--mesh", "dp_replicate=2"
        yield "bench", "tp", "--nproc", 2
        yield "bench", "pp", "--nproc", 2
        yield "bench", "cp", "--nproc", 2
        yield "bench", "comm", "--nproc", 2
        yield "plan", self.recipe, "--world", 2

    def test_what_is_no_device_is_refused_everywhere(self):
        for command in self.commands():
            device = ("--set", "run.device=gpu") if command[0] == "plan" else ("--device", "gpu")
            line = self.refusal(run(*command, *device))
            knob = "--device" if command[0] == "bench" else "run.device"
            self.assertIn(f"{knob} = gpu: there is no such device; set it to auto, cpu, cuda or cuda:N", line)

    def test_what_there_is(self):
        found = json.loads(run("inspect", "device", "--json").stdout)
        cpu = found["devices"][0]
        self.assertEqual((cpu["name"], cpu["kernels"], cpu["supported"]), ("cpu", True, True))
        self.assertGreater(cpu["memory_bytes"], 0)
        self.assertIn("shm", found["engines"])
        names = [device["name"] for device in found["devices"]]
        self.assertIn(found["auto"], names)
        table = run("inspect", "device").stdout
        for name in names:
            self.assertIn(name, table)
        self.assertIn(f"run.device = auto: {found['auto']}", table)
        self.assertEqual("reaches" in table, any(device.get("peers") for device in found["devices"]))
        if found["auto"] != "cpu":
            return
        line = self.refusal(run("train", self.recipe, "--device", "cuda:0"))
        self.assertRegex(line, r"run.device = cuda:0: .*(no CUDA).*set run.device = cpu")


if __name__ == "__main__":
    unittest.main()
