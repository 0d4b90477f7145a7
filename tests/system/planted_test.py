"""The table of planted faults (tests/faults.tsv, docs/testing.md) follows the code: each line's old text is in its file, once."""

import re
import sys
import unittest
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader

from support import SOURCE


class PlantedFaults(unittest.TestCase):
    def test_each_can_be_planted(self):
        spec = spec_from_loader("plant", SourceFileLoader("plant", str(SOURCE / "tools" / "plant")))
        plant = sys.modules["plant"] = module_from_spec(spec)  # where its dataclass looks for itself
        spec.loader.exec_module(plant)
        faults = plant.read_table(plant.TABLE)
        rooms = set(re.findall(r"^tessera_room\((\w+)", (SOURCE / "CMakeLists.txt").read_text(), re.M)) | {"cli", "sim_device"}
        self.assertGreater(len(faults), 800)
        self.assertEqual([str(fault) for fault in faults if not plant.Planted(fault).possible()], [], "gone: the line has to follow the code")
        self.assertEqual([str(fault) for fault in faults if fault.old == fault.new or re.match(r"\w+", fault.test)[0] not in rooms], [], "plants nothing")
        self.assertEqual(len({(fault.test, fault.file, fault.old, fault.new) for fault in faults}), len(faults), "planted twice")


if __name__ == "__main__":
    unittest.main()
