#include "tessera/config/config.h"
#include "tests/fuzz/target.h"

/// A TOML file, and behind a zero byte what --set gives, one a line. What is read is written and read again as the same; every rule can be asked.
TESSERA_FUZZ_TARGET(configuration) {
  using namespace tessera;
  const std::string_view text = input.substr(0, input.find('\0'));
  Config config;
  if (!fuzz::accepts("run.toml", [&] { config = parse_config(text, "/data", {}, "run.toml"); })) return;

  std::string_view sets = input.substr(std::min(input.size(), text.size() + 1));
  std::vector<std::string> lines;
  while (!sets.empty()) {
    const size_t end = std::min(sets.find('\n'), sets.size());
    lines.emplace_back(sets.substr(0, std::min(end, sets.find('\0'))));  // arguments end at a zero
    sets.remove_prefix(std::min(end + 1, sets.size()));
  }
  if (!fuzz::accepts("--set", [&] { config = parse_config(text, "/data", lines, "run.toml"); })) return;

  fuzz::expect(parse_config(to_toml(config), "/data") == config, "a configuration changes when it is written");
  fuzz::accepts("", [&] {
    resolve(config);
    fuzz::expect(parse_config(to_toml(config), "/data") == config, "a resolved configuration changes when it is written");
    for (const int world_size : {1, 6}) validate(config, world_size);
  });
}
