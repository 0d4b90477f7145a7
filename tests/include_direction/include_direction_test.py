"""The direction of includes in this repository, and proof that tools/check_includes finds what it is for."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = """
tessera_room(core LIBS fmt::fmt)
tessera_room(nn DEPS core)  # tessera_room(ghost)
tessera_room(recompute DEPS nn)
tessera_room(offload DEPS nn
             LIBS z)
tessera_room(train DEPS recompute offload)
"""


def run(root: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, ROOT / "tools" / "check_includes", root], capture_output=True, text=True)
    return done.returncode, done.stdout


class IncludeDirection(unittest.TestCase):
    def check(self, files: dict[str, str], rooms: str = ROOMS) -> tuple[int, str]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for name, text in {"CMakeLists.txt": rooms, **files}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            return run(root)

    def test_this_repository(self):
        self.assertEqual(run(ROOT), (0, ""))

    def test_downwards_is_allowed_through_several_rooms(self):
        files = {
            "tessera/train/a.cpp": '#include <vector>\n#include "tessera/core/e.h"\n#include "tessera/offload/o.h"\n#include "tessera/recompute/r.h"\n',
            "tessera/tessera.h": '#include "tessera/train/a.h"\n',
            "tests/train/a_test.cpp": '#include "tessera/nn/m.h"\n',
            "tests/other/fixture.h": '#include "tessera/train/a.h"\n',
        }
        self.assertEqual(self.check(files), (0, ""))

    def test_upwards_is_found_with_its_line(self):
        code, out = self.check({"tessera/core/a.h": '#pragma once\n\n  #  include "tessera/nn/m.h"\n'})
        self.assertEqual((code, out), (1, "tessera/core/a.h:3: room core may not include room nn\n"))

    def test_a_technique_may_not_include_another(self):
        code, out = self.check({"tessera/offload/deep/a.cpp": '#include "tessera/recompute/r.h"\n#include "tessera/nn/m.h"\n'})
        self.assertEqual((code, out), (1, "tessera/offload/deep/a.cpp:1: room offload may not include room recompute\n"))

    def test_a_technique_may_not_declare_another(self):
        code, out = self.check({}, ROOMS.replace("offload DEPS nn", "offload DEPS nn recompute"))
        self.assertEqual((code, out), (1, "CMakeLists.txt: technique offload may not depend on technique recompute\n"))

    def test_tests_may_have_rooms_of_their_own(self):
        rooms = ROOMS.replace("recompute DEPS nn", "recompute DEPS nn TEST_DEPS offload")
        test = {"tests/recompute/r_test.cpp": '#include "tessera/offload/o.h"\n'}
        self.assertEqual(self.check(test, rooms), (0, ""))
        self.assertEqual(self.check(test)[0], 1)
        self.assertEqual(self.check({"tessera/recompute/r.cpp": '#include "tessera/offload/o.h"\n#include "tessera/nn/m.h"\n'}, rooms)[0], 1)

    def test_a_room_that_is_named_is_included(self):
        code, out = self.check({"tessera/nn/m.cpp": '#include "tessera/nn/m.h"\n', "tessera/recompute/r.cpp": '#include "tessera/core/e.h"\n'})
        self.assertEqual((code, out.splitlines()[-1]), (1, "CMakeLists.txt: room recompute names nn in DEPS and includes nothing of it"))

    def test_a_test_obeys_its_room(self):
        code, out = self.check({"tests/nn/m_test.cpp": '#include "tessera/train/t.h"\n'})
        self.assertEqual((code, out), (1, "tests/nn/m_test.cpp:1: room nn may not include room train\n"))

    def test_a_room_may_not_include_the_umbrella(self):
        code, out = self.check({"tessera/train/a.cpp": '#include "tessera/tessera.h"\n'})
        self.assertEqual((code, out), (1, "tessera/train/a.cpp:1: a room may not include the umbrella header\n"))

    def test_full_paths_only(self):
        code, out = self.check({"tessera/nn/a.cpp": '#include "m.h"\n', "tessera/nn/m.h": ""})
        self.assertEqual((code, out), (1, 'tessera/nn/a.cpp:1: "m.h" must be included by its full path, "tessera/nn/m.h"\n'))

    def test_unknown_folders_and_orders(self):
        self.assertIn("its folder is no room", self.check({"tessera/ghost/a.h": ""})[1])
        self.assertIn("not declared before it", self.check({}, "tessera_room(nn DEPS core)\ntessera_room(core)\n")[1])
        self.assertIn("no tessera_room", self.check({}, "project(tessera)\n")[1])


if __name__ == "__main__":
    unittest.main()
