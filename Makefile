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

# On a busy machine, tests of time limits may need a second try; no other test has one.
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
soak: build
	@tools/soak
	@tools/soak --kills-in-save 200
	@OMP_NUM_THREADS=1 $(BUILD)/bin/tessera_verify_test --gtest_also_run_disabled_tests --gtest_filter='*VerifyMatrix.DISABLED_Everything*:RandomLayouts.DISABLED_Many'
	@OMP_NUM_THREADS=1 $(BUILD)/bin/tessera_train_test --gtest_also_run_disabled_tests --gtest_filter='*RandomPrograms.DISABLED_Many*:RandomPipelines.DISABLED_Many:RandomResume.DISABLED_Many'
	@OMP_NUM_THREADS=1 $(BUILD)/bin/tessera_pipeline_test --gtest_also_run_disabled_tests --gtest_filter='RandomSplits.DISABLED_Many'
	@OMP_NUM_THREADS=1 $(BUILD)/bin/tessera_tensor_parallel_test --gtest_also_run_disabled_tests --gtest_filter='RandomPlans.DISABLED_Many'
	@OMP_NUM_THREADS=1 $(BUILD)/bin/tessera_plan_test --gtest_also_run_disabled_tests --gtest_filter='RandomLayoutPlans.DISABLED_Many'

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
