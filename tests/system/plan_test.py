"""The dry run answers for every recipe, and its peak is that of the real run."""

import json
import math
import re
import shlex
import tomllib
import unittest

from support import SOURCE, SystemTest, metrics, run

CATEGORIES = {"params", "gradients", "optimizer", "activations", "outputs", "comm", "other", "total"}


class Plan(SystemTest):
    def plan(self, *arguments, sets=()):
        flags = [x for s in sets for x in ("--set", s)]
        done = run("plan", *arguments, *flags, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_a_size_that_is_left_to_the_world_is_that_size_to_a_framework(self):
        asked = ["7b", "--world", 8, "--device", "h100", "--framework", "nanotron"]
        said, left = (self.plan(*asked, sets=["batch.global_size=8", f"mesh.tp={tp}"]) for tp in (8, -1))
        self.assertEqual(left["step_s"], said["step_s"])
        self.assertEqual([c.get("reserved_bytes") for c in left["ranks"]], [c.get("reserved_bytes") for c in said["ranks"]])
        self.assertEqual(left.get("reserved_bytes"), said.get("reserved_bytes"))

    def test_what_an_accelerator_takes_beside_tensors_counts(self):
        asked = ("7b", "--world", 8, "--device", "h100")
        sets = ["zero.stage=3", "batch.global_size=8"]
        ranks = self.plan(*asked, sets=sets)["ranks"]
        for one in ranks:
            self.assertGreater(one["reserved_bytes"], one["peak_bytes"]["total"])
        most = max(one["reserved_bytes"] for one in ranks)
        fits = [self.plan(*asked, sets=[*sets, f"run.memory_limit_bytes={limit}"])["fits"] for limit in (most, most // 2)]
        self.assertEqual(fits, [True, False])
        for one in self.plan("7b", "--world", 8, "--device", "cpu", sets=sets)["ranks"]:
            self.assertEqual(one["reserved_bytes"], 0, "a CPU's memory is given back")
        text = run("plan", *asked, *(f"--set={key}" for key in sets)).stdout
        self.assertIn("that the device has beside its context, on the rank that needs most", text)
        self.assertEqual(text.count("ranks like rank"), 1, "ranks that read alike are said once")
        self.assertNotIn("data.files", text)

    def test_tf32_has_a_rate_of_its_own(self):
        fp32, tf32 = (self.plan("7b", "--world", 8, "--device", "h100", sets=["batch.global_size=8", f"precision.compute={c}"]) for c in ("fp32", "tf32"))
        self.assertLess(tf32["step_s"], fp32["step_s"] / 2)

    def test_every_recipe_at_1_and_1024_ranks_or_its_own(self):
        recipes = sorted((SOURCE / "recipes").glob("*.toml"))
        self.assertTrue(recipes)
        for recipe in recipes:
            # One that says how large each axis is runs on so many ranks alone; ep deals ranks that other axes count.
            sizes = [size for axis, size in tomllib.loads(recipe.read_text()).get("mesh", {}).items() if axis != "ep"]
            flops = []  # of all ranks: those that are dealt no micro-batch of their own have none
            for world in (math.prod(sizes),) if sizes else (1, 1024):
                with self.subTest(recipe=recipe.name, world=world):
                    answer = self.plan(recipe, "--world", world)
                    self.assertEqual(any("batch.global_size" in remark for remark in answer["remarks"]), world == 1024)
                    self.assertEqual(sum(c["count"] for c in answer["ranks"]), world)
                    flops.append(sum(c["count"] * c["flops"] for c in answer["ranks"]))
                    self.assertGreater(flops[0], 0)
                    self.assertAlmostEqual(flops[-1] / flops[0], 1, places=9)
                    for ranks in answer["ranks"]:
                        self.assertEqual(set(ranks["peak_bytes"]), CATEGORIES)
                        self.assertEqual(sum(v for k, v in ranks["peak_bytes"].items() if k != "total"), ranks["peak_bytes"]["total"])
                        self.assertEqual(any(c["op"] == "all_reduce" for c in ranks["collectives"]), world > 1)

    def test_predicted_peak_is_the_real_peak(self):
        # The others: tests/plan, with threads as ranks.
        for world, sets in ((1, ["precision.compute=bf16"]), (2, []), (2, ["optim.name=sgd", "optim.momentum=0.9", "model.dropout=0.1"])):
            with self.subTest(world=world, sets=sets):
                _, log = self.train("real", nproc=world, sets=[*sets, "run.steps=4"])
                real = metrics(log)[-1]["peak_bytes"]
                predicted = max(c["peak_bytes"]["total"] for c in self.plan(self.recipe, "--world", world, sets=sets)["ranks"])
                self.assertLessEqual(abs(predicted - real), 0.001 * real, f"predicted {predicted}, real {real}")

    def test_predicted_peak_is_the_real_peak_where_layers_are_cut(self):
        two_d = ["mesh.tp=2", "mesh.dp_shard=2", "zero.stage=3", "tensor.sequence_parallel=true", "tensor.overlap=true"]
        for world, sets in ((2, ["mesh.tp=2"]), (4, two_d)):
            with self.subTest(world=world):
                _, log = self.train("real", nproc=world, sets=[*sets, "run.steps=4"])
                real = metrics(log)[-1]["peak_bytes"]
                classes = self.plan(self.recipe, "--world", world, sets=sets)["ranks"]
                self.assertEqual(len(classes) % 2, 0, "at least one class per rank of tp")
                predicted = max(c["peak_bytes"]["total"] for c in classes)
                self.assertLessEqual(abs(predicted - real), 0.001 * real, f"predicted {predicted}, real {real}")

    def test_memory_is_explained_by_a_name_or_a_number(self):
        for name in ("7b", "7e9"):
            with self.subTest(name=name):
                answer = self.plan(name, "--explain")
                self.assertEqual(answer["parameters"], 7e9)
                self.assertEqual([round(states["bytes"] / 2**30, 2) for states in answer["states"]], [104.31, 104.31, 52.15])
                self.assertLess(abs(answer["counted"] / 7e9 - 1), 0.05)
        away = (x for s in ("offload.params=host", "offload.gradients=host", "offload.optimizer=host") for x in ("--set", s))
        fixed = run("plan", SOURCE / "recipes" / "llama_tp2_fsdp2.toml", "--world", 4, "--explain", *away)
        self.assertEqual(fixed.returncode, 0, fixed.stderr)
        self.assertIn("\nOf one device that has all of it, so these settings are left out: mesh.dp_shard, mesh.tp, offload.gradients, offload.optimizer, offload.params, ", fixed.stdout)
        self.assertEqual(self.plan("7b", "--explain", "--world", 2, sets=["mesh.tp=2"])["left_out"], ["mesh.tp"])
        verdict = self.plan("30b", "--explain", sets=["run.memory_limit_bytes=80000000000"])["verdict"]
        self.assertEqual(verdict["states"], 480_000_000_000)
        self.assertFalse(verdict["fits"])
        self.assertGreater(verdict["smallest"], 6)
        self.assertLessEqual(verdict["needed_there"], 80e9)

    def test_all_reduced_bytes_are_the_gradients(self):
        answer = self.plan(self.recipe, "--world", 2)
        (ranks,) = answer["ranks"]
        moved = sum(c["bytes"] for c in ranks["collectives"] if c["op"] == "all_reduce")
        self.assertEqual(moved, ranks["parameters"] * 4)

    def test_worlds_of_any_size_are_answered_or_refused(self):
        (ranks,) = self.plan(self.recipe, "--world", 1 << 20, sets=("batch.global_size=4194304",))["ranks"]
        self.assertEqual(ranks["count"], 1 << 20)
        refusal = self.refusal(run("plan", self.recipe, "--world", 1000000000, timeout=20))
        self.assertIn("--world = 1000000000: a plan is made for at most 1048576 ranks", refusal)

    def test_what_was_not_computed_again_is_not_mentioned(self):
        for mode in ("none", "full"):
            said = run("plan", self.recipe, "--set", f"recompute.mode={mode}").stdout
            self.assertEqual("of them again)" in said, mode == "full", said)

    def test_a_device_brings_times_and_rates_and_recomputation_counts_in_hfu_alone(self):
        rates = ("step_s", "tokens_per_s", "tflops_per_device", "mfu", "hfu")
        without = self.plan(self.recipe, "--world", 2)
        self.assertFalse(set(rates) & set(without))
        self.assertEqual(without["bubble_fraction"], 0)
        plain, again = (self.plan("7b", "--world", 8, "--device", "h100", sets=("zero.stage=3", "batch.global_size=8", f"recompute.mode={mode}")) for mode in ("none", "full"))
        for planned in (plain, again):
            self.assertIn("fits", planned)
            self.assertAlmostEqual(planned["tokens_per_s"], planned["tokens_per_step"] / planned["step_s"])
            flops = sum(ranks["flops"] * ranks["count"] for ranks in planned["ranks"])
            self.assertAlmostEqual(planned["tflops_per_device"], flops / planned["step_s"] / 8 / 1e12)
        self.assertLess(abs(plain["hfu"] / plain["mfu"] - 1), 0.1)
        self.assertGreater(again["hfu"] / again["mfu"], 1.2)
        self.assertGreater(again["step_s"], plain["step_s"])

    def test_every_preset_has_a_plan(self):
        names = re.search(r"presets: (.*), or a number", self.refusal(run("plan", "no_such_preset"))).group(1).split()
        self.assertIn("llama3-405b", names)
        for name in names:
            with self.subTest(preset=name):
                answer = self.plan(name, "--world", 64, "--device", "b200", sets=("zero.stage=3", "batch.global_size=64"))
                self.assertEqual(sum(ranks["count"] for ranks in answer["ranks"]), 64)
                self.assertGreater(answer["ranks"][0]["peak_bytes"]["params"], answer["parameters"] * 4 // 64)
                self.assertGreater(answer["step_s"], 0)

    def test_a_preflight_passes_what_is_sound_and_refuses_the_rest_before_a_step(self):
        flags = ("--nproc", 2, "--preflight", "--set", "zero.stage=3", "--set", "run.steps=4")
        sound, tight = self.folder / "sound", self.folder / "tight"
        done = run("train", self.recipe, *flags, "--set", f"log.dir={sound}")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr.count("preflight: 2 ranks would meet in all calls of a step"), 1, done.stderr)
        self.assertEqual(len(metrics(sound)), 4)
        refusal = self.refusal(run("train", self.recipe, *flags, "--set", f"log.dir={tight}", "--set", "run.memory_limit_bytes=300000"))
        self.assertRegex(refusal, r"run.memory_limit_bytes = 300000: --preflight: a step needs \d+ on rank \d")
        self.assertFalse((tight / "metrics.jsonl").exists())

    def test_a_measured_device_is_one_to_plan_for(self):
        here = self.folder / "here.toml"
        done = run("bench", "device", "--threads", 1, "--seconds", 0.01, "-o", here)
        self.assertEqual(done.returncode, 0, done.stderr)
        measured = tomllib.loads(here.read_text())
        self.assertEqual(tomllib.loads(done.stdout), measured)
        self.assertGreater(measured["tflops"]["fp32"], 0)
        self.assertGreater(measured["host"]["gb_per_s"], 0)
        on_device, on_host = (self.plan(self.recipe, "--device", here, sets=(f"offload.optimizer={place}",)) for place in ("device", "host"))
        self.assertGreater(on_device["step_s"], 0)
        self.assertEqual(on_device["time"]["waiting_for_copies"], 0)
        self.assertGreater(on_host["step_s"], on_device["step_s"], "its copies cross the same memory")
        picture = self.folder / "rates.svg"
        done = run("bench", "device", "--from", here, "--svg", picture)
        self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)
        for text in ("here.toml", "h100 (2022)", "v100-32gb (2017)", "fp8"):
            self.assertIn(text, picture.read_text())
        self.assertEqual(run("bench", "device", "--from", here).returncode, 2)
        self.assertIn("--output", self.refusal(run("bench", "device", "--from", here, "--svg", picture, "-o", self.folder / "other.toml")))

    def test_a_search_names_a_layout_that_plan_and_train_take(self):
        found = self.folder / "found.toml"
        flags = ("--world", 2, "--device", "cpu", "--search", "--batch", 8, "--patience", 20)
        done = run("plan", self.recipe, *flags, "-o", found, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        answer = json.loads(done.stdout)
        best = answer["layouts"][0]
        self.assertTrue(best["fits"])
        self.assertTrue(answer["neighbours"])
        planned = self.plan(found, "--world", 2, "--device", "cpu")
        self.assertAlmostEqual(planned["time"]["seconds"], best["time"]["seconds"], places=9)
        self.assertEqual(max(ranks["peak_bytes"]["total"] for ranks in planned["ranks"]), best["peak_bytes"])
        done = run("train", found, "--nproc", 2, "--set", f"log.dir={self.folder / 'log'}")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_line_of_a_search_and_its_file_are_planned_as_its_row_says_whatever_the_file_asks_for(self):
        mixture = SOURCE / "recipes" / "tiny_mixtral.toml"
        kinds = {
            "pipelined": (self.recipe, ["mesh.pp=2", "pipeline.schedule=interleaved", "pipeline.virtual_stages=2", "pipeline.per_update=0"]),
            "experts cut": (mixture, ["mesh.tp=2", "mesh.expert_tp=2"]),
            "whole passes": (mixture, ["moe.capacity_factor=1.25", "mesh.tp=2"]),
            "tiles and hosts": (self.recipe, ["recompute.mode=full", "recompute.ffn_tile=16", "offload.optimizer=host", "tensor.overlap=true", "mesh.tp=2"]),
            "of each rank": (self.recipe, ["batch.per_rank=4", "batch.global_size=0", "precision.compute=auto", "zero.stage=3"]),
        }
        for kind, (recipe, asks) in kinds.items():
            with self.subTest(kind=kind):
                file, best = (self.folder / f"{kind}{end}.toml".replace(" ", "_") for end in ("", "_best"))
                file.write_text(self.saved_with(recipe, asks))
                device = ("--world", 2, "--device", "h100")
                searched = ("plan", file, *device, "--search", "--batch", 8, "--patience", 2, "-o", best)
                text = run(*searched)
                line = shlex.split(next(line for line in text.stdout.splitlines() if line.startswith("--set")))
                self.assertEqual(self.plan(file, *device, *line)["ranks"], self.plan(best, *device)["ranks"])
                done = run(*searched, "--json")
                self.assertEqual(done.returncode, 0, done.stderr)
                row = json.loads(done.stdout)["layouts"][0]
                for planned in (self.plan(file, *device, sets=row["set"]), self.plan(best, *device)):
                    self.assertAlmostEqual(planned["time"]["seconds"] / row["time"]["seconds"], 1, places=9)
                    self.assertEqual(max(ranks["peak_bytes"]["total"] for ranks in planned["ranks"]), row["peak_bytes"])
                    self.assertEqual(max(ranks["reserved_bytes"] for ranks in planned["ranks"]), row["needed_bytes"])

    def saved_with(self, recipe, sets):
        """A file that says `sets` itself."""
        sections = tomllib.loads(recipe.read_text())
        sections["data"]["files"] = [str(recipe.parent / name) for name in sections["data"]["files"]]
        for one in sets:
            key, value = one.split("=")
            section, name = key.split(".")
            sections.setdefault(section, {})[name] = int(value) if value.isdigit() else float(value) if value[0].isdigit() else value == "true" or value
        return "".join(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()) for name, keys in sections.items())

    def test_a_search_says_what_it_leaves_out_and_keeps_the_rest_of_a_file(self):
        found = self.folder / "kept.toml"
        sets = ("run.memory_limit_bytes=400000000", "recompute.ffn_tile=16", "recompute.mode=full")
        done = run("plan", self.recipe, "--device", "cpu", "--search", "--batch", 4, "-o", found, *(x for s in sets for x in ("--set", s)))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("--search: recompute.ffn_tile is not looked at, and is left out", done.stderr)
        self.assertIn("--search: recompute.mode is what it goes over, and `--set recompute.mode=full` is left out", done.stderr)
        written = tomllib.loads(found.read_text())
        self.assertEqual(written["run"]["memory_limit_bytes"], 400000000, "whose run this is, may have no more")

    def test_a_search_among_layouts_of_another_framework_times_each_as_a_plan_does(self):
        asked = (self.recipe, "--world", 2, "--device", "h100", "--framework", "nanotron")
        found = json.loads(run("plan", *asked, "--search", "--batch", 4, "--patience", 60, "--json").stdout)
        cut = next(layout for layout in found["layouts"] if "mesh.tp=2" in layout["set"])
        planned = self.plan(*asked, sets=[*cut["set"], "tensor.keep_gathered=false"])
        self.assertAlmostEqual(planned["time"]["seconds"] / cut["time"]["seconds"], 1, places=6)

    def test_the_page_of_a_search_among_layouts_of_another_framework_draws_its_first(self):
        slow, page = self.folder / "slow.toml", self.folder / "search.html"
        slow.write_text((SOURCE / "tessera/plan/hardware/h100.toml").read_text().replace("gb_per_s = 50\n", "gb_per_s = 1\n"))
        asked = ("125000000", "--world", 2, "--device", slow, "--devices-per-node", 1, "--framework", "nanotron", "--search", "--batch", 16)
        best = json.loads(run("plan", *asked, "--json", "--report", page).stdout)["layouts"][0]
        self.assertIn("mesh.pp=2", best["set"], "stages that the framework cuts are drawn")
        drawn = json.loads(re.search('id="plan">(.*)</script>', page.read_text(), re.DOTALL).group(1))
        self.assertAlmostEqual(drawn["time"]["seconds"] / best["time"]["seconds"], 1, places=9)

    def test_layouts_are_planned_for_the_machine_that_a_plan_is_made_for(self):
        layouts = self.folder / "layouts.jsonl"
        layouts.write_text('{"set": []}\n')
        auto = ("--set", "precision.compute=auto")
        for isa in ("AVX2", "ALL"):  # without 16-bit products, and as this machine is
            one = json.loads(run("plan", self.recipe, *auto, "--json", ONEDNN_MAX_CPU_ISA=isa).stdout)
            line = json.loads(run("plan", self.recipe, *auto, "--layouts", layouts, ONEDNN_MAX_CPU_ISA=isa).stdout)
            self.assertEqual((line["compute"], line["peak_bytes"]), (one["compute"], max(c["peak_bytes"]["total"] for c in one["ranks"])))

    def test_threads_share_the_cores_among_ranks_as_in_a_run(self):
        peaks = lambda world, **extra: json.loads(run("plan", self.recipe, "--world", world, "--json", **extra).stdout)["ranks"][0]["peak_bytes"]
        self.assertEqual(peaks(4096, OMP_NUM_THREADS=""), peaks(4096, OMP_NUM_THREADS="1"))

    def test_a_search_of_a_mixture_says_which_terms_its_micro_batch_changes(self):
        mixture = SOURCE / "recipes" / "tiny_mixtral.toml"  # which has batch.micro_size = 2 and moe.balance_loss; of 3 sequences all are one
        for given, says in ((2, True), (3, False)):
            with self.subTest(given=given):
                done = run("plan", mixture, "--device", "cpu", "--search", "--batch", 3, "--set", f"batch.micro_size={given}")
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual("trains another objective, since these are taken over a micro-batch: moe.balance_loss" in done.stdout, says, done.stdout)

    def test_a_search_that_finds_nothing_ends_with_1_and_bad_flags_with_2(self):
        searched = ("plan", self.recipe, "--world", 2, "--device", "cpu", "--search")
        none = run(*searched, "--set", "run.memory_limit_bytes=4096")
        self.assertEqual(none.returncode, 1, none.stderr)
        self.assertIn("none fits", none.stdout)
        self.assertIn("--search: no layout was found that fits", none.stderr)
        for flags, words in (
            (("--batch", 0), "--batch = 0"),
            (("--batch", 4, "--max-batch", 8), "give one"),
            (("--patience", -1), "--patience = -1"),
            (("--longest",), "--search"),
            (("--output", self.folder / "none" / "found.toml"), "--output"),
        ):
            with self.subTest(flags=flags):
                done = run(*searched, *flags)
                self.assertEqual(done.returncode, 2, done.stdout)
                self.assertIn(words, done.stderr)
        self.assertEqual(run("plan", self.recipe, "--search").returncode, 2)
        self.assertEqual(run("plan", self.recipe, "--world", 2, "--batch", 4).returncode, 2)

    def test_a_curve_is_drawn_and_bad_flags_end_with_2(self):
        picture = self.folder / "memory.svg"
        done = run("plan", self.recipe, "--curve", "memory", "--world", 2, "--set", "batch.per_rank=1", "--svg", picture, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = json.loads(done.stdout)["panels"][0]["lines"]
        self.assertEqual([[x for x, _ in line["points"]] for line in lines], [[1, 2]] * 4)
        self.assertIn("ZeRO 3 (FSDP)", picture.read_text())
        for flags, words in (
            (("--curve", "memroy"), "memroy"),
            (("--curve", "latency"), "--device"),
            (("--curve", "memory", "--longest"), "--longest"),
            (("--curve", "memory", "--svg", self.recipe), "--svg"),
            (("--svg", picture), "--curve"),
            (("--curve", "ranks", "--batch", 2), "--device"),
            (("--curve", "ranks", "--device", "h100", "--set", "batch.per_rank=1"), "batch.per_rank"),
            (("--curve", "memory", "--report", self.folder / "page.html"), "--report"),
            (("--curve", "memory", "--batch", 2), "--curve ranks"),
        ):
            with self.subTest(flags=flags):
                done = run("plan", self.recipe, *flags)
                self.assertEqual(done.returncode, 2, done.stdout)
                self.assertIn(words, done.stderr)

    def test_strong_scaling_names_its_knee(self):
        done = run("plan", self.recipe, "--device", "h100", "--world", 4, "--curve", "ranks", "--batch", 2, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        answer = json.loads(done.stdout)
        self.assertEqual([point["ranks"] for point in answer["points"]], [1, 2, 4])
        self.assertIn(answer["knee"], (1, 2))
        self.assertIn(f"adding ranks stops helping at {answer['knee']}", answer["findings"][0])
        self.assertEqual([panel["y"] for panel in answer["panels"]], ["seconds", "tokens_per_second"])

    def test_what_documents_and_routers_decide_has_bounds(self):
        answer = self.plan(self.recipe, "--world", 2, "--device", "h100", sets=["data.documents=lines", "mesh.cp=2"])
        bounds, peak = answer["bounds"], max(ranks["peak_bytes"]["total"] for ranks in answer["ranks"])
        self.assertEqual(bounds["unknown"], ["documents"])
        self.assertLess(bounds["peak_bytes"]["lowest"], peak)
        self.assertEqual(bounds["peak_bytes"]["highest"], peak)
        self.assertLessEqual(bounds["step_s"]["lowest"], answer["step_s"])
        self.assertNotIn("bounds", self.plan(self.recipe, "--world", 2))

    def test_presets(self):
        answer = self.plan("7b", "--world", 256)
        (ranks,) = answer["ranks"]
        self.assertAlmostEqual(ranks["parameters"], 6.74e9, delta=0.01e9)
        self.assertEqual(run("plan", "8bb").returncode, 2)


if __name__ == "__main__":
    unittest.main()
