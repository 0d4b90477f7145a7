# Each target sets up what is missing first.
PRESET ?= release
BUILD := build/$(PRESET)

.PHONY: build demo test bench parity soak asan format clean

build/torch_dir: tools/setup
	@tools/setup
	@touch $@

$(BUILD)/build.ninja: build/torch_dir CMakePresets.json
	@cmake --preset $(PRESET) -Wno-dev > $(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }

build: $(BUILD)/build.ninja
	@cmake --build --preset $(PRESET)

demo: build
	@tools/demo

# A second try is printed as such: on a busy machine, tests of time limits (a rank that dies ends all within 10 s) may need one.
test: build
	@ctest --test-dir $(BUILD) --output-on-failure -j 2 --repeat until-pass:2

asan:
	@$(MAKE) --no-print-directory build PRESET=asan
	@ctest --test-dir build/asan --output-on-failure -L unit

parity: build
	@tools/parity

# Hundreds of kills: about 10 minutes. The tests do ten.
soak: build
	@tools/soak

bench: build
	@tools/bench

format: build/torch_dir
	@git ls-files '*.h' '*.cpp' '*.cu' | xargs clang-format-19 -i

clean:
	@rm -rf build
