"""An installed tessera is found by find_package and used by a project that knows nothing else."""

import os
import pathlib
import subprocess
import unittest

from support import SOURCE, SystemTest, environment

BUILD = pathlib.Path(os.environ.get("TESSERA_BUILD", SOURCE / "build/release"))


class Install(SystemTest):
    def command(self, *arguments):
        done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, timeout=500, env=environment())
        self.assertEqual(done.returncode, 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done.stdout

    def test_a_consumer_builds_and_runs(self):
        prefix, build = self.folder / "prefix", self.folder / "build"
        self.command("cmake", "--install", BUILD, "--prefix", prefix)
        self.assertIn("tessera", self.command(prefix / "bin/tessera", "--help"))
        # With the system's own compiler, whatever built the library.
        self.command("cmake", "-G", "Ninja", "-S", SOURCE / "tests/consumer", "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}")
        self.command("cmake", "--build", build)
        self.assertIn("loss fell", self.command(build / "consumer"))


if __name__ == "__main__":
    unittest.main()
