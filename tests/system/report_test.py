"""The page of a plan, as a browser shows it: offline, without an error, with everything drawn and nothing on top of anything else. Skipped without Chromium."""

import json
import re
import unittest

import browser
from support import SystemTest, run

# Of each picture: what it draws, and texts that another covers or that stick out of it.
PICTURES = """
[...document.querySelectorAll('section')].map(section => ({
  id: section.id,
  height: section.getBoundingClientRect().height,
  rows: section.querySelectorAll('tbody tr').length, words: section.querySelectorAll('p').length,
  empty: [...section.querySelectorAll('td, th')].filter(cell => cell.cellIndex > 0 && !cell.textContent.trim()).length,
  pictures: [...section.querySelectorAll('svg')].map(svg => {
    const frame = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    const shapes = [...svg.querySelectorAll('rect, line, polygon, polyline, path, circle')].map(s => s.getBoundingClientRect());
    const inner = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
    const overlaps = [];
    texts.forEach(([a, here], i) => texts.slice(i + 1).forEach(([b, there]) => { if (inner(here, there)) overlaps.push(a + ' | ' + b); }));
    return {
      width: frame.width, height: frame.height, right: frame.right, shapes: shapes.filter(s => s.width + s.height > 0).length, texts: texts.length, overlaps,
      outside: texts.filter(([t, r]) => r.left < frame.left - 1 || r.right > frame.right + 1 || r.bottom > frame.bottom + 2 || r.top < frame.top - 2).map(([t]) => t)
    };
  })
}))
"""


@unittest.skipUnless(browser.executable(), "no Chromium on this machine")
class ReportTest(SystemTest):
    def page(self, name, *flags, code=0):
        page = self.folder / f"{name}.html"
        done = run("plan", *flags, "--report", page)
        self.assertEqual(done.returncode, code, done.stderr)
        return page

    def look(self, path, sections, dark=False):
        """The page's sections by their ids; nothing is asked of the network, and nothing complained of."""
        with browser.Page(path, dark=dark) as page:
            self.assertEqual(page.problems, [])
            self.assertEqual(page.requests, [])
            self.assertEqual(page.evaluate("document.querySelectorAll('script:not([type=\"application/json\"])').length"), 0)
            self.assertIn("world", json.loads(page.evaluate("document.getElementById('plan').textContent")))
            found = {section["id"]: section for section in page.evaluate(PICTURES)}
            wide = "[...document.querySelectorAll('.wide')].filter(table => table.scrollWidth > table.clientWidth + 1).map(table => table.textContent.slice(0, 60))"
            self.assertEqual(page.evaluate(wide), [], "a reader would have to scroll")
            self.assertEqual(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), True, "the page is wider than the window")
            ink, paper = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
            page.screenshot(path.with_suffix(".dark.png" if dark else ".png"))
        self.assertEqual(list(found), sections)
        brightness = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in (ink, paper)]
        self.assertEqual(brightness[0] < brightness[1], not dark, f"{ink} on {paper}")
        for section in found.values():
            with self.subTest(page=path.name, section=section["id"]):
                self.assertGreater(section["height"], 20)
                self.assertGreater(section["rows"] + len(section["pictures"]) + section["words"], 0)
                for picture in section["pictures"]:
                    self.assertGreater(min(picture["width"], picture["height"]), 40)
                    self.assertLess(picture["right"], 1200, "a reader would have to scroll")
                    self.assertGreater(min(picture["shapes"], picture["texts"]), 1)
                    self.assertEqual(picture["overlaps"], [])
                    self.assertEqual(picture["outside"], [])
        return found

    def test_a_plan_is_drawn_offline(self):
        sets = ["--set", "mesh.pp=2", "--set", "mesh.dp_shard=2", "--set", "zero.stage=1"]
        path = self.page("plan", self.recipe, "--world", 4, "--device", "h100", *sets)
        for dark in (False, True):
            found = self.look(path, ["memory-by-rank", "memory-over-step", "timeline", "traffic", "layout"], dark)
        for section in ("memory-by-rank", "memory-over-step", "timeline", "traffic"):
            self.assertTrue(found[section]["pictures"], section)

    def test_of_one_rank_without_a_device(self):
        self.look(self.page("alone", self.recipe), ["memory-by-rank", "memory-over-step", "timeline", "traffic", "layout"])

    def test_of_a_search_and_of_ranks(self):
        sections = ["memory-by-rank", "memory-over-step", "timeline", "traffic", "layout"]
        self.look(self.page("search", self.recipe, "--world", 4, "--device", "h100", "--search", "--batch", 8), [*sections, "search"])
        self.look(self.page("ranks", self.recipe, "--world", 4, "--device", "h100", "--curve", "ranks", "--batch", 2), [*sections, "scaling"])

    def test_another_frameworks_verdict_is_its_own(self):
        sets = ["--set", "run.memory_limit_bytes=2000000000"]  # between our tensors and its contexts
        page = self.page("framework", self.recipe, "--device", "h100", "--framework", "nanotron", *sets).read_text()
        self.assertIn('<p class="verdict no">', page)
        self.assertRegex(page, r"framework Nanotron.*: .* reserved and .* of contexts on the rank that needs most, which do not fit")


if __name__ == "__main__":
    unittest.main()
