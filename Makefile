# Each target sets up what is missing first.
PRESET ?= release
BUILD := build/$(PRESET)
.DEFAULT_GOAL := build

.PHONY: build demo test bench parity soak fuzz asan cuda format clean

build/torch_dir: tools/setup
	@tools/setup
	@touch $@

$(BUILD)/build.ninja: build/torch_dir CMakePresets.json
	@cmake --preset $(PRESET) -Wno-dev > $(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }

build: $(BUILD)/build.ninja
	@cmake --build --preset $(PRESET)

demo: build
	@tools/demo

# On a busy machine, tests of time limits may need a second try, which is said; no other test has one.
test: build
	@tools/run_tests $(BUILD)

asan:
	@$(MAKE) --no-print-directory build PRESET=asan
	@ctest --test-dir build/asan --output-on-failure -L unit

# The CUDA build, on any machine with a toolkit: it links, trains on the CPU as the CPU build does, and says which devices it sees (docs/gpu.md).
build/cuda_torch_dir: tools/setup
	@tools/setup --cuda

cuda: build/torch_dir build/cuda_torch_dir
	@$(MAKE) --no-print-directory build PRESET=cuda
	@tools/check_cuda

parity: build
	@tools/parity

# Hundreds of kills, at any moment and during saves, every combination of stage, layout, number format and recomputation against one device, and thousands of
# random programs: training loops under every wrapper, models in stages, recipes in layouts, plans of tensor parallelism (docs/testing.md). The tests do four
# kills of each, let every stage meet every one of the others, and run a hundred programs or two.
# Two parts at a time, the longest first; `make soak_layouts` is one alone. What fails is said where it does, and again by the exit code: the rest is run all
# the same.
SOAK_layouts := verify RandomLayouts.DISABLED_Many
SOAK_resumes := train RandomResume.DISABLED_Many:RandomStarts.DISABLED_Many
SOAK_plans := plan RandomLayoutPlans.DISABLED_Many:RandomDeepPlans.DISABLED_Many
SOAK_matrix := verify *VerifyMatrix.DISABLED_Everything*
SOAK_programs := train *RandomPrograms.DISABLED_Many*:RandomPipelines.DISABLED_Many:RandomAsynchronous.DISABLED_Many
SOAK_splits := pipeline RandomSplits.DISABLED_Many
SOAK_cuts := tensor_parallel RandomPlans.DISABLED_Many
soak: build
	@$(MAKE) --no-print-directory -k -j2 soak_layouts soak_kills soak_kills_in_save soak_resumes soak_matrix soak_plans soak_programs soak_splits soak_cuts
soak_kills: build
	@tools/soak
soak_kills_in_save: build
	@tools/soak --kills-in-save 200
soak_%: build
	@OMP_NUM_THREADS=1 $(BUILD)/bin/tessera_$(firstword $(SOAK_$*))_test --gtest_also_run_disabled_tests --gtest_filter="$(lastword $(SOAK_$*))"

# Every parser under the sanitizers, FUZZ_SECONDS each, as many at once as there are cores. The tests do a moment of each.
FUZZ_SECONDS ?= 600
fuzz:
	@$(MAKE) --no-print-directory build PRESET=fuzz
	@tools/fuzz --seconds $(FUZZ_SECONDS)

bench: build
	@tools/bench

format: build/torch_dir
	@git ls-files '*.h' '*.cpp' '*.cu' | xargs clang-format-19 -i

clean:
	@rm -rf build
