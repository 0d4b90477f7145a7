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
# What fails is said where it does, and again by the exit code: the rest is run all the same.
SOAKED := "verify *VerifyMatrix.DISABLED_Everything*:RandomLayouts.DISABLED_Many" "train *RandomPrograms.DISABLED_Many*:RandomPipelines.DISABLED_Many" \
  "train RandomResume.DISABLED_Many" "pipeline RandomSplits.DISABLED_Many" "tensor_parallel RandomPlans.DISABLED_Many" "plan RandomLayoutPlans.DISABLED_Many"
soak: build
	@failed=0; tools/soak || failed=1; tools/soak --kills-in-save 200 || failed=1; \
	for programs in $(SOAKED); do \
	  OMP_NUM_THREADS=1 $(BUILD)/bin/tessera_$${programs%% *}_test --gtest_also_run_disabled_tests --gtest_filter="$${programs#* }" || failed=1; \
	done; exit $$failed

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
